"""Composer callbacks; one a file, its `__init__` arguments are its YAML keys."""
