"""Saving and loading of checkpoints, and reading of a run's weights and recipe."""
