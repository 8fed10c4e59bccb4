"""Preflight checks before the first batch, of each node (`node_checks`) and across all ranks (`collective_checks`)."""
