"""Logger destinations that Composer does not have."""
