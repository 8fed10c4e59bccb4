"""Module for `imports` of a recipe: rank 1 takes 0.3 s longer per forward pass; ranks are compared every 4 batches."""

import os

if os.environ.get('RANK') is not None:
    import time

    from diffusion.callbacks import stragglers
    from diffusion.models.latent_diffusion import LatentDiffusion

    stragglers.EVERY = 4
    if os.environ['RANK'] == '1':
        plain = LatentDiffusion.forward

        def slow(self, batch):
            time.sleep(0.3)
            return plain(self, batch)

        LatentDiffusion.forward = slow
