"""Data volume of a training phase: bytes stored, read bandwidth, and bytes read from the object store per epoch."""

from dataclasses import dataclass
from typing import NamedTuple

from diffusion.config.byte_sizes import parse_bytes
from diffusion.config.device_checks import default_canonical_nodes
from diffusion.config.recipe import Recipe
from diffusion.planning.workload import Encoding, Phase
from diffusion.storage.transfers import RANGE_BYTES

JPEG_BYTES_PER_PIXEL = 62e3 / 512**2
"""Size assumed for JPEG images if the shards are not local: 62 kB for a typical 512 x 512 JPEG."""
CAPTION_BYTES = 100
"""Assumed size of a caption as text, which is negligible compared with an image."""
LATENT_WIDTHS = {'float16': 2, 'float32': 4}
"""Bytes per element of stored latents, by data type."""


@dataclass(frozen=True)
class Storage:
    """Size of a dataset stored as images or latents, and the rate at which training reads it."""

    bytes_per_sample: float
    samples: int
    images: int
    """Number of images that training reads, counting repetitions."""
    images_per_second: float
    nodes: int

    @property
    def stored_bytes(self) -> float:
        return self.bytes_per_sample * self.samples

    @property
    def read_bytes(self) -> float:
        """Bytes that training reads from the object store if shards are not cached between epochs."""
        return self.bytes_per_sample * self.images

    @property
    def bytes_per_second(self) -> float:
        """Read bandwidth of training in bytes/s, for all nodes together."""
        return self.bytes_per_sample * self.images_per_second

    @property
    def bytes_per_second_per_node(self) -> float:
        return self.bytes_per_second / self.nodes


def storage_of(phase: Phase, encoding: Encoding, *, images_per_second: float, nodes: int) -> Storage:
    """Return the size and read bandwidth of a phase's dataset if samples are stored in the form `encoding`."""
    return Storage(sample_bytes(phase, encoding), phase.distinct_images, phase.images, images_per_second, nodes)


def sample_bytes(phase: Phase, encoding: Encoding) -> float:
    """Return the mean bytes per stored sample: an image or latents, plus the caption or text embedding."""
    if phase.stored_bytes is not None and encoding == phase.encoding:
        return phase.stored_bytes
    if encoding == 'pictures':
        return JPEG_BYTES_PER_PIXEL * phase.pixels + CAPTION_BYTES
    settings = phase.recipe.precompute
    # Training can sample from the VAE's posterior only if variances are stored with the means.
    width, stores_variance = LATENT_WIDTHS[settings.dtype], settings.posterior == 'sample'
    latents = width * (2 if stores_variance else 1) * phase.latent_elements
    text = width * phase.model.text_embedding_elements
    return latents + CAPTION_BYTES + (text if encoding == 'latents+text' else 0)


USD_PER_GET = 0.0004 / 1000
"""List price of a GET request to S3 Standard in us-east-1 (aws.amazon.com/s3/pricing) as of PRICE_DATE."""
USD_PER_EGRESS_BYTE = 0.09 / 1e9
"""List price per byte for the first 10 TB per month from AWS to the internet (same page) as of PRICE_DATE; larger
volumes cost less. Reads within the store's region are free."""
PRICE_DATE = '2026-11-25'
"""Date on which the prices were entered here; they were not compared with the page on that day."""


@dataclass(frozen=True)
class StoreReads:
    """Data read from the object store in an epoch."""

    bytes: float

    @property
    def requests(self) -> float:
        """Number of GET requests, one per `RANGE_BYTES`."""
        return self.bytes / RANGE_BYTES

    @property
    def request_usd(self) -> float:
        return self.requests * USD_PER_GET

    @property
    def egress_usd(self) -> float:
        """Cost in US dollars of reading the bytes from outside the store's cloud; reads within its region are free."""
        return self.bytes * USD_PER_EGRESS_BYTE


class EpochReads(NamedTuple):
    """Data read from the object store in the first epoch, with empty caches, and in later ones on the same nodes."""

    first: StoreReads
    later: StoreReads


def nodes_per_shard(recipe: Recipe, nodes: int) -> float:
    """Return the number of nodes that read the same shard in an epoch.

    In Streaming, each canonical node has the same shards in every epoch, and each node reads whole canonical nodes, so
    that one node reads a shard (two nodes at a boundary). If there are more nodes than canonical nodes, several nodes
    share a canonical node's samples. With the algorithm `naive`, all nodes read every shard.
    """
    loader = recipe.loader
    if loader.shuffle and loader.shuffle_algo == 'naive':
        return nodes
    return max(1.0, nodes / (loader.num_canonical_nodes or default_canonical_nodes(recipe.global_batch)))


def reads_per_epoch(recipe: Recipe, stored_bytes: float, *, nodes: int) -> EpochReads:
    """Return the data that the first and each later epoch over the whole dataset read from the object store.

    If a node's cache is large enough for all shards that the node reads, later epochs read nothing. A smaller cache
    counts as no cache, which gives an upper bound. Not counted: repeated reads within an epoch if the cache is smaller
    than a shuffle block, and restarts with other nodes or another node order (these read as much as the first epoch).
    `loader.epoch_size` is ignored, although each such shorter epoch draws from all shards.
    """
    limit = recipe.loader.cache_limit
    cache = float('inf') if limit is None else parse_bytes(limit)
    readers = nodes_per_shard(recipe, nodes)
    first = StoreReads(stored_bytes * readers)
    return EpochReads(first, StoreReads(0.0) if stored_bytes * readers / nodes <= cache else first)
