"""Saving and loading of checkpoints, and access to a run's weights and recipe."""
