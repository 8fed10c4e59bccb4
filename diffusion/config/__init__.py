"""Recipes: reading, validating and printing them. Standard library and OmegaConf only; nothing here imports torch."""
