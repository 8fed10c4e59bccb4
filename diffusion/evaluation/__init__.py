"""What is measured on a trained model."""
