"""Traffic that leaves the object store per epoch: bytes, GET requests, dollars."""

from dataclasses import dataclass

from diffusion.config.byte_sizes import parse_bytes
from diffusion.config.recipe import Recipe
from diffusion.config.sample_order import default_canonical_nodes
from diffusion.storage.ranged_download import RANGE_BYTES

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
