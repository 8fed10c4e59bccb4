"""Evaluate trained models: retrieval accuracy, and sheets of images."""
