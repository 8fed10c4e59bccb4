"""Composer algorithms: weight averaging and low-precision normalisation."""
