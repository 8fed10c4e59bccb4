"""Names of autoencoders that recipes use instead of a folder or repository."""

PIXELS = 'pixels'
"""Value of `model.vae` for a model that is trained on pixels, without an autoencoder. Write `./pixels` for a folder."""
