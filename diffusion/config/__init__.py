"""Read, check and print recipes. Imports only the standard library, PyYAML and OmegaConf, never torch."""
