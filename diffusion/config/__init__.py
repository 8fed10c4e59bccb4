"""Read, check and print recipes. This package imports the standard library, PyYAML and OmegaConf, but never torch."""
