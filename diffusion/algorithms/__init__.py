"""Composer algorithms: weight averaging and low-precision normalization."""
