"""A recipe's tasks (train, precompute, evaluate and generate), and export of checkpoints to diffusers."""
