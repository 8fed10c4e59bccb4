"""Keyed randomness: random numbers that depend only on (seed, purpose, sample, epoch, batch).

A stateful generator makes a run depend on how often it was called: on the number of devices and on interruptions. A
counter-based generator has no state; any number can be drawn anywhere, in any order. This is Philox 4x32-10
(Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011), in integer arithmetic that gives
the same bits on every device.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from diffusion.errors import UserError

_MASK = 0xFFFFFFFF
# Constants of Philox 4x32-10 from the paper.
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Purpose(IntEnum):
    """Use of a random number; two purposes never share numbers. Never renumber: that would change every run."""

    NOISE = 1
    TIMESTEP = 2
    POSTERIOR = 3
    CAPTION_DROPOUT = 4
    OFFSET_NOISE = 5
    CAPTION_CHOICE = 6
    CROP = 7
    FLIP = 8
    VALIDATION_NOISE = 9
    SAMPLING = 10
    STRATUM = 11
    REPLACEMENT = 12
    ROUTING = 13
    NEGATIVE = 14


Words = TypeVar('Words', int, Tensor)


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Return four random 32-bit words for a counter and a key: ten rounds of Philox 4x32.

    Words are Python integers, or int64 tensors of one shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The signed 64-bit product wraps around, which keeps its bits correct; the mask removes the sign bits that the
        # shift copies.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def philox_rows(even: Tensor, odd: Tensor, keys: Tensor) -> Tensor:
    """Return the random words of `philox` for many counters, each with its own key, in a fifth of the GPU kernels.

    Args:
        even: Words 0 and 2 of the counters, int64 [2, B, N].
        odd: Words 1 and 3 of the counters, int64 [2, B, N].
        keys: Both key words of every round, int64 [rounds, 2, 1, N].

    Returns:
        Random 32-bit words, four per counter, in the order of the counters, int64 [B, 4 N].
    """
    multipliers = _multipliers(even.device)
    for key in keys:
        # As above. Low words stay unmasked: the mask after the next xor removes what is above their 32 bits.
        product = even.mul(multipliers).flip(0)
        even, odd = ((product >> 32) ^ odd ^ key) & _MASK, product
    return torch.stack((even, odd & _MASK)).permute(2, 3, 1, 0).flatten(1)


@lru_cache
def _multipliers(device: torch.device) -> Tensor:
    return torch.tensor(_MULTIPLIERS, device=device).view(2, 1, 1)


@lru_cache(maxsize=32)
def _layout(seed: int, counts: tuple[tuple[Purpose, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the Philox counters and keys that give each purpose its count of random words, in N blocks of four words.

    Returns:
        Index of each block within its purpose [N], and its keys for all rounds [rounds, 2, 1, N].
    """
    blocks = [-(-count // 4) for _, count in counts]
    number = torch.cat([torch.arange(count) for count in blocks])
    purpose = torch.repeat_interleave(torch.tensor([int(each) for each, _ in counts]), torch.tensor(blocks))
    weyl = torch.arange(_ROUNDS)[:, None] * torch.tensor(_WEYL)
    keys = (torch.stack((torch.full_like(purpose, seed), purpose)) + weyl[:, :, None]) & _MASK
    return number.to(device), keys[:, :, None, :].to(device)


@dataclass(frozen=True)
class Draws:
    """Source of random numbers for the samples of one batch, keyed by seed, purpose, sample, epoch and batch.

    Attributes:
        seed: Seed of the run, in [0, 2**32).
        sample_id: Index of each sample in its dataset, int64 [B].
        epoch: Epoch of each sample, int64 [B].
        batch_index: Index of the global batch, int64 [B]; distinguishes repetitions of a sample within an epoch.
        ready: Random words precomputed by `precompute_draws`, by purpose.
    """

    seed: int
    sample_id: Tensor
    epoch: Tensor
    batch_index: Tensor
    ready: Mapping[Purpose, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def precompute_draws(self, counts: Mapping[Purpose, int]) -> 'Draws':
        """Return an equal source of random numbers, with `counts` 32-bit words per purpose precomputed in one call."""
        # On a GPU the cost of such small draws is the number of kernels; one call for all purposes needs a sixth.
        return replace(self, ready=self._make(tuple(counts.items())))

    def words(self, purpose: Purpose, count: int) -> Tensor:
        """Return uniformly distributed random 32-bit integers, `count` per sample, as an int64 tensor [B, count]."""
        ready = self.ready.get(purpose)
        if ready is None or ready.shape[1] < count:
            ready = self._make(((purpose, count),))[purpose]
        return ready[:, :count]

    def _make(self, counts: tuple[tuple[Purpose, int], ...]) -> dict[Purpose, Tensor]:
        """Draw random 32-bit words for several purposes, int64 [B, count rounded up to a multiple of 4] each."""
        if not 0 <= self.seed <= _MASK:
            raise UserError(f'seed: {self.seed} is not in [0, 2**32); use another seed')
        blocks, keys = _layout(self.seed, counts, self.sample_id.device)
        shape = (len(self.sample_id), len(blocks))
        c0, c2 = blocks.expand(shape), (self.epoch[:, None] & _MASK).expand(shape)
        c1, c3 = ((ids[:, None] & _MASK).expand(shape) for ids in (self.sample_id, self.batch_index))
        words = philox_rows(torch.stack((c0, c2)), torch.stack((c1, c3)), keys)
        widths = [-(-count // 4) * 4 for _, count in counts]
        return {purpose: part for (purpose, _), part in zip(counts, words.split(widths, dim=1), strict=True)}

    def uniform(self, purpose: Purpose) -> Tensor:
        """Return one uniform random number in [0, 1) per sample, float64 [B], without rounding."""
        return self.words(purpose, 1)[:, 0].double() * 2.0**-32

    def stratified(self, stratum: Purpose, within: Purpose) -> Tensor:
        """Return one random number in [0, 1) per sample, float64 [B], one in each of B equal parts; each is uniform.

        The part that a sample gets depends on all samples of the batch, but not on their order.
        """
        assert len(self.sample_id) <= 2**20  # larger batches could round a number to 1
        # Sort samples by random words. Equal words are rare and are sorted by sample id.
        by_id = self.sample_id.argsort(stable=True)
        order = by_id[self.words(stratum, 1)[by_id, 0].argsort(stable=True)]
        parts = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return (parts.double() + self.uniform(within)) / len(order)

    def integers(self, purpose: Purpose, high: int) -> Tensor:
        """Return one random integer in [0, high) per sample, int64 [B]; high is at most 2**31."""
        return (self.words(purpose, 1)[:, 0] * high) >> 32

    def normal(self, purpose: Purpose, shape: Sequence[int]) -> Tensor:
        """Return standard normal noise for each sample of the batch, float32 [B, *shape], for training or sampling.

        The noise of a sample does not depend on its rank or on the other samples. Method of Box and Muller (1958).
        """
        count = math.prod(shape)
        words = self.words(purpose, count + count % 2)
        first, second = words[:, 0::2], words[:, 1::2]
        # A float32 holds 24 bits exactly; +1 keeps the argument of the logarithm in (0, 1].
        radius = (((first >> 8) + 1).float() * 2.0**-24).log().mul(-2.0).sqrt()
        angle = (second >> 8).float() * (2.0**-24 * 2.0 * math.pi)
        normals = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1)
        return normals.flatten(1)[:, :count].unflatten(1, tuple(shape))


def keyed_uniforms(seed: int, purpose: Purpose, sample_id: int, epoch: int) -> tuple[float, float, float, float]:
    """Return four random numbers in [0, 1) for one sample in one epoch, without tensors, for data workers."""
    # int(): Streaming passes NumPy integers, which warn when a product overflows.
    w0, w1, w2, w3 = philox((0, int(sample_id) & _MASK, int(epoch) & _MASK, 0), (seed, int(purpose)))
    return w0 * 2.0**-32, w1 * 2.0**-32, w2 * 2.0**-32, w3 * 2.0**-32


def draws_for(ids: Sequence[int], *, seed: int, device: torch.device | str = 'cpu') -> Draws:
    """Return a source of random numbers keyed by ids alone, without epoch and batch, as for image generation."""
    sample_id = torch.tensor(list(ids), dtype=torch.int64, device=device)
    return Draws(seed, sample_id, torch.zeros_like(sample_id), torch.zeros_like(sample_id))
