"""`diffusion data`: whether shards are sound, what the model sees of them, and how fast they can be read."""
