"""Datasets and loader for buckets of images, captions and precomputed latents, streamed from MDS shards."""
