"""Families of denoisers: one adapter per class of diffusers, which says how LatentDiffusion uses it."""
