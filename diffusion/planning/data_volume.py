"""Bytes of the data: stored as images or latents, and read while training."""

from dataclasses import dataclass

from diffusion.planning.workload import Encoding, Phase

JPEG_BYTES_PER_PIXEL = 62e3 / 512**2
"""A 512 x 512 JPEG of the usual quality is 62 kB; other sizes in proportion. Used if the shards are not local."""
CAPTION_BYTES = 100
"""A caption as text. An assumption, and small."""
LATENT_WIDTHS = {'float16': 2, 'float32': 4}


@dataclass(frozen=True)
class Storage:
    """Bytes of one kind of dataset, and the rate at which training reads it."""

    bytes_per_sample: float
    samples: int
    """Number of different images."""
    images: int
    """Number of images that training reads, repeated ones counted each time."""
    images_per_second: float
    nodes: int

    @property
    def stored_bytes(self) -> float:
        return self.bytes_per_sample * self.samples

    @property
    def read_bytes(self) -> float:
        """Egress of the object store, without a cache for later epochs."""
        return self.bytes_per_sample * self.images

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_per_sample * self.images_per_second

    @property
    def bytes_per_second_per_node(self) -> float:
        return self.bytes_per_second / self.nodes


def storage_of(phase: Phase, encoding: Encoding, *, images_per_second: float, nodes: int) -> Storage:
    """Storage and bandwidth of one kind of dataset."""
    return Storage(
        bytes_per_sample=sample_bytes(phase, encoding),
        samples=phase.different_images,
        images=phase.images,
        images_per_second=images_per_second,
        nodes=nodes,
    )


def sample_bytes(phase: Phase, encoding: Encoding) -> float:
    """Bytes of an image or its latents, with its caption or text embedding."""
    if phase.stored_bytes is not None and encoding == phase.encoding:
        return phase.stored_bytes
    if encoding == 'pictures':
        return JPEG_BYTES_PER_PIXEL * phase.pixels + CAPTION_BYTES
    settings = phase.recipe.precompute
    width, stores_variance = LATENT_WIDTHS[settings.dtype], settings.posterior == 'sample'
    latents = width * (2 if stores_variance else 1) * phase.latent_elements
    text = width * phase.model.text_embedding_elements
    return latents + CAPTION_BYTES + (text if encoding == 'latents+text' else 0)
