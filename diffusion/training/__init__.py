"""Build a Composer Trainer from a recipe and run it: components, parallelism and performance settings."""
