"""Names of autoencoders that recipes use in the place of a folder or repository."""

PIXELS = 'pixels'
"""`model.vae` of a model that is trained on pixels: no autoencoder. A folder of this name is `./pixels`."""
