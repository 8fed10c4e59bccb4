"""Files that are whole or absent, object stores, downloads with retries, locks, hashes, and MDS shard writing."""
