"""Tasks of a recipe: train, precompute, evaluate and generate; and export of checkpoints to diffusers."""
