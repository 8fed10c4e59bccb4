"""Data: resolution buckets of pictures, captions and latents, streamed from MDS shards."""
