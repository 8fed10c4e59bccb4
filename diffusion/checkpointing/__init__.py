"""Reading runs and checkpoints: which file, which weights, which recipe."""
