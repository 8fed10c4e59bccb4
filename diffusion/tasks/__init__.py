"""The tasks a recipe can run: train, precompute, evaluate, generate; plus exporting a checkpoint to diffusers."""
