"""Whether nodes are fit to train on, before the first batch: each alone (`alone`), then all together (`together`)."""
