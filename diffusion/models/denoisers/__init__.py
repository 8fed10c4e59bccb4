"""Families of denoisers: one adapter per class of diffusers, which defines how LatentDiffusion uses it."""
