"""Names of what a batch holds; every tensor has the batch as its first dimension."""

IMAGE = 'image'
"""Pictures, uint8 [B, 3, H, W] in pixels."""

LATENT_MOMENTS = 'latent_moments'
"""What the VAE's encoder says of a picture, before any scaling: mean, or mean and log-variance, [B, C or 2C, H, W]."""

INPUT_IDS = 'input_ids'
"""Tokens of the caption, int64 [B, E, L], E text encoders of L tokens."""

TEXT_EMBEDS = 'text_embeds'
"""What the frozen text encoders say of the caption, [B, L, D]; beside its tokens, which a mask is made of."""

SAMPLE_ID = 'sample_id'
"""Index of the sample in its dataset, int64 [B]; what keyed randomness depends on."""

EPOCH = 'epoch'
"""Pass over the data that the sample belongs to, int64 [B]."""

BATCH_INDEX = 'batch_index'
"""Number of the global batch within the epoch, int64 [B]."""

TIMESTEP_QUANTILE = 'timestep_quantile'
"""Share of the noise schedule below the sample's timestep, float64 [B] in [0, 1), each in an own part of it."""

REPLACED = 'replaced'
"""On the way from a worker to the loader: of a sample that stands for a bad one a note, otherwise ''; no tensor."""
