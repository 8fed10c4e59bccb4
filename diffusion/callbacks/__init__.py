"""Composer callbacks; the `__init__` arguments of a callback are its YAML keys."""
