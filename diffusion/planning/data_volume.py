"""Data volume of a phase: bytes stored as images or latents, bytes read during training, and read bandwidth."""

from dataclasses import dataclass

from diffusion.planning.workload import Encoding, Phase

JPEG_BYTES_PER_PIXEL = 62e3 / 512**2
"""Size of JPEG images whose shards are not local, from 62 kB for a typical 512 x 512 JPEG."""
CAPTION_BYTES = 100
"""Size of a caption as text. An assumption; negligible beside an image."""
LATENT_WIDTHS = {'float16': 2, 'float32': 4}
"""Bytes per element of stored latents, by data type."""


@dataclass(frozen=True)
class Storage:
    """Size of a dataset stored as images or latents, and the rate at which training reads the dataset."""

    bytes_per_sample: float
    samples: int
    """Number of distinct images."""
    images: int
    """Number of images that training reads, counting repetitions."""
    images_per_second: float
    nodes: int

    @property
    def stored_bytes(self) -> float:
        """Size of the dataset in bytes."""
        return self.bytes_per_sample * self.samples

    @property
    def read_bytes(self) -> float:
        """Bytes that training reads from the object store if shards are not cached for later epochs."""
        return self.bytes_per_sample * self.images

    @property
    def bytes_per_second(self) -> float:
        """Read bandwidth of training in bytes/s, all nodes together."""
        return self.bytes_per_sample * self.images_per_second

    @property
    def bytes_per_second_per_node(self) -> float:
        """Read bandwidth of training in bytes/s on each node."""
        return self.bytes_per_second / self.nodes


def storage_of(phase: Phase, encoding: Encoding, *, images_per_second: float, nodes: int) -> Storage:
    """Return the size and read bandwidth of a phase's dataset, if `encoding` is the form of the stored samples."""
    return Storage(
        bytes_per_sample=sample_bytes(phase, encoding),
        samples=phase.distinct_images,
        images=phase.images,
        images_per_second=images_per_second,
        nodes=nodes,
    )


def sample_bytes(phase: Phase, encoding: Encoding) -> float:
    """Return the mean bytes per stored sample: an image or its latents, with its caption or text embedding."""
    if phase.stored_bytes is not None and encoding == phase.encoding:
        return phase.stored_bytes
    if encoding == 'pictures':
        return JPEG_BYTES_PER_PIXEL * phase.pixels + CAPTION_BYTES
    settings = phase.recipe.precompute
    # Training can sample from the VAE's posterior only if its variances are stored beside the means.
    width, stores_variance = LATENT_WIDTHS[settings.dtype], settings.posterior == 'sample'
    latents = width * (2 if stores_variance else 1) * phase.latent_elements
    text = width * phase.model.text_embedding_elements
    return latents + CAPTION_BYTES + (text if encoding == 'latents+text' else 0)
