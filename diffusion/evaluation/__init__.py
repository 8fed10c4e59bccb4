"""Evaluation of trained models: retrieval accuracy, human comparisons and image sheets."""
