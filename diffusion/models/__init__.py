"""Diffusion models: their parts, the training objective, and the ComposerModel that combines them."""
