"""Atomic file writes, object stores, downloads with retries, file locks, hashes, and MDS shard writing."""
