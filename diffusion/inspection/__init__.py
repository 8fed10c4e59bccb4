"""`diffusion data`: verify shards, preview samples as the model sees them, and measure loading speed."""
