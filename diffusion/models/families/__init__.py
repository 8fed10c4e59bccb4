"""Model families, one folder each: declaration, denoiser adapter, and builders for the model and its miniature."""
