"""Preparing pictures and captions: MDS shards, one folder a resolution bucket."""
