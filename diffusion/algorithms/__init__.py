"""Composer algorithms, such as weight averaging, gradient clipping and low-precision normalization."""
