"""Diffusion models: VAE, text encoders, denoiser, training objective, and the ComposerModel that combines them."""
