"""Data volume of a phase: bytes stored, read bandwidth, and traffic that leaves the object store per epoch."""

from dataclasses import dataclass

from diffusion.config.byte_sizes import parse_bytes
from diffusion.config.device_checks import default_canonical_nodes
from diffusion.config.recipe import Recipe
from diffusion.planning.workload import Encoding, Phase
from diffusion.storage.transfers import RANGE_BYTES

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


USD_PER_GET = 0.0004 / 1000
"""List price of a GET request to S3 Standard in us-east-1 (aws.amazon.com/s3/pricing), as known on PRICE_DATE."""
USD_PER_EGRESS_BYTE = 0.09 / 1e9
"""List price per byte of the first 10 TB per month that leave AWS for the internet (same page), as known on PRICE_DATE;
larger volumes cost less. Reads within the region of the store are free."""
PRICE_DATE = '2026-11-25'
"""Date on which the prices were entered; they were not compared with the page on that day."""


@dataclass(frozen=True)
class StoreReads:
    """Traffic that leaves the object store in an epoch."""

    bytes: float

    @property
    def requests(self) -> float:
        """Number of GET requests, one per `RANGE_BYTES`."""
        return self.bytes / RANGE_BYTES

    @property
    def request_usd(self) -> float:
        """Dollars for the requests."""
        return self.requests * USD_PER_GET

    @property
    def egress_usd(self) -> float:
        """Dollars for the bytes, if the GPUs are outside of the store's cloud; 0 within its region."""
        return self.bytes * USD_PER_EGRESS_BYTE


@dataclass(frozen=True)
class EpochReads:
    """Traffic that leaves the object store in the first epoch, on empty disks, and in each later one of these nodes."""

    first: StoreReads
    later: StoreReads


def nodes_per_shard(recipe: Recipe, nodes: int) -> float:
    """Return the number of nodes that read a shard in an epoch.

    Streaming gives each canonical node the same shards in every epoch, and each node whole canonical nodes, so that one
    node reads a shard (two at a boundary). If there are more nodes than canonical nodes, several nodes share the
    samples of one. The algorithm `naive` shuffles samples over all nodes.
    """
    loader = recipe.loader
    if loader.shuffle and loader.shuffle_algo == 'naive':
        return nodes
    return max(1.0, nodes / (loader.num_canonical_nodes or default_canonical_nodes(recipe.global_batch)))


def reads_per_epoch(recipe: Recipe, stored_bytes: float, *, nodes: int) -> EpochReads:
    """Return the traffic that leaves the object store in the epochs of a run over a whole dataset.

    A cache that holds all shards that its node reads keeps them; a smaller one counts as keeping none, which is an
    upper bound. Three causes of further reads are not counted: a cache smaller than a shuffle block, from which a node
    reads shards again within an epoch; a restart on other nodes or in another order of nodes, which reads as the first
    epoch does; and `loader.epoch_size`, with which each epoch draws its samples from all shards.

    Args:
        recipe: The recipe, for the order of samples and `loader.cache_limit`.
    """
    limit = recipe.loader.cache_limit
    cache = float('inf') if limit is None else parse_bytes(limit)
    readers = nodes_per_shard(recipe, nodes)
    first = StoreReads(stored_bytes * readers)
    return EpochReads(first, StoreReads(0.0) if stored_bytes * readers / nodes <= cache else first)
