"""Composer callbacks; the `__init__` arguments of each callback are its YAML keys."""
