"""Families of models, one folder each: declaration, denoiser's adapter, and builders of the model and its miniature."""
