"""Preflight checks before training: on each node (`node_checks`) and across all ranks (`collective_checks`)."""
