"""Evaluation of trained models: retrieval accuracy and sheets of images."""
