"""Names of other packages that are not part of their public interface."""
