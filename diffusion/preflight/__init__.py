"""Checks of the nodes before the first batch: each alone (`node_checks`), then all together (`collective_checks`)."""
