"""Keyed randomness: random numbers that depend only on (seed, purpose, sample, epoch, batch).

The numbers from a stateful generator depend on earlier calls, and therefore on the number of devices and on
interruptions. A counter-based generator has no state: any number can be drawn anywhere, in any order. This is Philox
4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011), in integer arithmetic that
gives the same bits on every device.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from diffusion.errors import UserError

_MASK = 0xFFFFFFFF
# The constants of Philox 4x32-10 from the paper.
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Purpose(IntEnum):
    """Purposes of random numbers, each with its own sequence. Changing a value here would change training runs."""

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


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Return the four 32-bit words of Philox 4x32-10 for a counter and a key, integers or int64 tensors (broadcast)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The signed product wraps around, but its 64 bits are those of the unsigned product. Shifting right copies the
        # sign bit; the mask removes the copies.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def philox_rows(even: Tensor, odd: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `philox` for many counters, each with its own key; launches a fifth as many GPU kernels as `philox`.

    Args:
        even: Words 0 and 2 of the counters, int64 [2, B, N].
        odd: Words 1 and 3 of the counters, int64 [2, B, N].
        keys: Both key words for each round, int64 [rounds, 2, 1, N].

    Returns:
        Two tensors, int64 [2, B, N] each: words 0 and 2, and words 1 and 3, of the four random words per counter.
    """
    multipliers = _multipliers(even.device)
    for key in keys:
        # The product wraps around as in `philox`. Low words stay unmasked: the mask after the next xor removes the bits
        # above bit 31.
        product = even.mul(multipliers).flip(0)
        even, odd = ((product >> 32) ^ odd ^ key) & _MASK, product
    return even, odd & _MASK


class RandomBits(NamedTuple):
    """Random numbers for N blocks of four words per sample, in exact arithmetic: the same bits on every device."""

    words: Tensor
    """First word of each of the first S blocks, as a 32-bit integer, int64 [B, S]."""
    fractions: Tensor
    """The same words as numbers in [0, 1), float64 [B, S]."""
    uniforms: Tensor
    """Words 0 and 2 of every block as numbers in (0, 1], float32 [B, 2 N]."""
    angles: Tensor
    """Words 1 and 3 of every block as angles in [0, 2 pi), float32 [B, 2 N]."""


def random_bits(
    blocks: Tensor, keys: Tensor, sample_id: Tensor, epoch: Tensor, batch_index: Tensor, *, num_words: int
) -> RandomBits:
    """Return the random numbers of each sample for the blocks and keys that `_layout` returned.

    Args:
        blocks: Index of each block within its purpose, int64 [N].
        keys: Both key words for each round, int64 [rounds, 2, 1, N].
        sample_id: Index of each sample in its dataset, int64 [B].
        epoch: Epoch of each sample, int64 [B].
        batch_index: Index of the global batch, int64 [B].
        num_words: S, the number of blocks whose first word is returned.
    """
    c0, c1, c2, c3 = _counters(blocks, sample_id, epoch, batch_index)
    even, odd = philox_rows(torch.stack((c0, c2)), torch.stack((c1, c3)), keys)
    words = even[0, :, :num_words]
    uniforms, angles = (each.permute(1, 2, 0).flatten(1) for each in _pairs(even, odd))
    return RandomBits(words, _fractions(words), uniforms, angles)


def fusible_random_bits(
    blocks: Tensor, keys: Tensor, sample_id: Tensor, epoch: Tensor, batch_index: Tensor, *, num_words: int
) -> RandomBits:
    """Return the result of `random_bits`, in a form that torch.compile turns into a single GPU kernel."""
    # All operations have the shape [B, N, 2], although each block is then computed twice. For other shapes, and for
    # torch.stack, the compiler would generate more kernels, and launching a kernel costs more than its arithmetic.
    counters = [each[..., None].expand(-1, -1, 2) for each in _counters(blocks, sample_id, epoch, batch_index)]
    w0, w1, w2, w3 = philox(tuple(counters), (keys[0, 0, ..., None], keys[0, 1, ..., None]))  # type: ignore[arg-type]
    is_first = torch.arange(2, device=blocks.device) == 0
    even, odd = torch.where(is_first, w0, w2), torch.where(is_first, w1, w3)
    fractions = _fractions(even)
    uniforms, angles = _pairs(even, odd)
    return RandomBits(even[:, :num_words, 0], fractions[:, :num_words, 0], uniforms.flatten(1), angles.flatten(1))


def _fractions(words: Tensor) -> Tensor:
    """Convert 32-bit words to numbers in [0, 1), float64, without rounding."""
    return words.double() * 2.0**-32


def _counters(
    blocks: Tensor, sample_id: Tensor, epoch: Tensor, batch_index: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the counter words for N blocks of B samples, int64 [B, N] each."""
    shape = (len(sample_id), len(blocks))
    ids = ((each[:, None] & _MASK).expand(shape) for each in (sample_id, epoch, batch_index))
    return blocks.expand(shape), *ids  # type: ignore[return-value]


def _pairs(even: Tensor, odd: Tensor) -> tuple[Tensor, Tensor]:
    """Convert words to numbers in (0, 1] and to angles in [0, 2 pi), float32."""
    # float32 holds 24 bits exactly; +1 keeps the argument of the logarithm in (0, 1].
    uniforms = ((even >> 8) + 1).float() * 2.0**-24
    return uniforms, (odd >> 8).float() * (2.0**-24 * 2.0 * math.pi)


def box_muller(uniforms: Tensor, angles: Tensor) -> Tensor:
    """Return normal numbers [B, 2 K] from numbers in (0, 1] and angles, [B, K] each (Box and Muller 1958)."""
    radius = uniforms.log().mul_(-2.0).sqrt_()
    # Write in place to launch only six GPU kernels: for few numbers, each launch costs more time than its arithmetic.
    normals = torch.empty((*angles.shape, 2), dtype=angles.dtype, device=angles.device)
    torch.cos(angles, out=normals[..., 0])
    torch.sin(angles, out=normals[..., 1])
    return normals.mul_(radius[..., None]).flatten(1)


@lru_cache
def _multipliers(device: torch.device) -> Tensor:
    return torch.tensor(_MULTIPLIERS, device=device).view(2, 1, 1)


@lru_cache(maxsize=32)
def _layout(seed: int, counts: tuple[tuple[Purpose, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the Philox blocks and keys for `counts`, the number of random words per sample for each purpose.

    For N blocks of four words, these are each block's index within its purpose, [N], and keys, [rounds, 2, 1, N].
    """
    blocks = [_blocks(count) for _, count in counts]
    number = torch.cat([torch.arange(count) for count in blocks])
    purpose = torch.repeat_interleave(torch.tensor([int(each) for each, _ in counts]), torch.tensor(blocks))
    # Philox adds the Weyl constants to both key words after each round; precompute the keys of all rounds.
    weyl = torch.arange(_ROUNDS)[:, None] * torch.tensor(_WEYL)
    keys = (torch.stack((torch.full_like(purpose, seed), purpose)) + weyl[:, :, None]) & _MASK
    return number.to(device), keys[:, :, None, :].to(device)


@dataclass(frozen=True)
class Draws:
    """Source of random numbers for the samples of one batch, keyed by seed, purpose, sample, epoch and batch.

    Attributes:
        seed: Seed of the run, in [0, 2**32).
        sample_id: Index of each sample in its dataset, int64 [B].
        epoch: Epoch of each sample, combined by `epoch_word` with the number of its earlier copies in that epoch, int64
            [B].
        batch_index: Index of the global batch, int64 [B].
        ready_words: Random words that `precompute_draws` drew, one per sample, by purpose: a pair of the words as
            32-bit integers and as fractions in [0, 1), [B] each.
        ready_normals: Normal numbers that `precompute_draws` drew, by purpose, [B, N]; N is a multiple of 4.
    """

    seed: int
    sample_id: Tensor
    epoch: Tensor
    batch_index: Tensor
    ready_words: Mapping[Purpose, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)
    ready_normals: Mapping[Purpose, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def precompute_draws(
        self, words: Sequence[Purpose], normals: Mapping[Purpose, int], draw: Callable[..., RandomBits] = random_bits
    ) -> 'Draws':
        """Return a copy that already holds some of its random numbers, drawn in one call for all purposes.

        Per sample, it holds one word for each purpose in `words` and `normals[purpose]` normal numbers for each purpose
        in `normals`. `draw` is `random_bits` or a compiled `fusible_random_bits`.
        """
        counts = (*((purpose, 4) for purpose in words), *normals.items())
        bits = self._bits(counts, len(words), draw)
        values = box_muller(bits.uniforms[:, 2 * len(words) :], bits.angles[:, 2 * len(words) :])
        parts = values.split([4 * _blocks(count) for count in normals.values()], dim=1) if normals else ()
        singles = zip(bits.words.unbind(1), bits.fractions.unbind(1), strict=True)
        return replace(
            self,
            ready_words=dict(zip(words, singles, strict=True)),
            ready_normals=dict(zip(normals, parts, strict=True)),
        )

    def words(self, purpose: Purpose, count: int) -> Tensor:
        """Return uniformly distributed random 32-bit integers, `count` per sample, as an int64 tensor [B, count]."""
        if count == 1 and purpose in self.ready_words:
            return self.ready_words[purpose][0][:, None]
        blocks, keys = self._layout(((purpose, count),))
        c0, c1, c2, c3 = _counters(blocks, self.sample_id, self.epoch, self.batch_index)
        words = torch.stack(philox_rows(torch.stack((c0, c2)), torch.stack((c1, c3)), keys))
        return words.permute(2, 3, 1, 0).flatten(1)[:, :count]

    def _bits(
        self, counts: tuple[tuple[Purpose, int], ...], num_words: int, draw: Callable[..., RandomBits]
    ) -> RandomBits:
        return draw(*self._layout(counts), self.sample_id, self.epoch, self.batch_index, num_words=num_words)

    def _layout(self, counts: tuple[tuple[Purpose, int], ...]) -> tuple[Tensor, Tensor]:
        if not 0 <= self.seed <= _MASK:
            raise UserError(f'seed: {self.seed} is not in [0, 2**32); use another seed')
        return _layout(self.seed, counts, self.sample_id.device)

    def uniform(self, purpose: Purpose) -> Tensor:
        """Return one uniform random number in [0, 1) per sample, float64 [B], without rounding."""
        if purpose in self.ready_words:
            return self.ready_words[purpose][1]
        return _fractions(self.words(purpose, 1)[:, 0])

    def stratified(self, stratum: Purpose, within: Purpose) -> Tensor:
        """Return a uniform random number per sample, float64 [B], with one in each of B equal parts of [0, 1)."""
        assert len(self.sample_id) <= 2**20  # in larger batches, a number could be rounded to 1
        # Sort samples by random words. Equal words are rare and are sorted by sample id.
        by_id = self.sample_id.argsort(stable=True)
        order = by_id[self.words(stratum, 1)[by_id, 0].argsort(stable=True)]
        parts = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return (parts.double() + self.uniform(within)) / len(order)

    def integers(self, purpose: Purpose, high: int) -> Tensor:
        """Return one random integer in [0, high) per sample, int64 [B]; high is at most 2**31."""
        return (self.words(purpose, 1)[:, 0] * high) >> 32

    def normal(self, purpose: Purpose, shape: Sequence[int]) -> Tensor:
        """Return standard normal noise, float32 [B, *shape]; a sample's noise is the same on any rank."""
        count = math.prod(shape)
        normals = self.ready_normals.get(purpose)
        if normals is None or normals.shape[1] < count:
            bits = self._bits(((purpose, count),), 0, random_bits)
            normals = box_muller(bits.uniforms, bits.angles)
        return normals[:, :count].unflatten(1, tuple(shape))


def _blocks(count: int) -> int:
    return -(-count // 4)


def epoch_word(epoch: Words, occurrence: Words) -> Words:
    """Return a counter word for an epoch and a sample's `occurrence`, the number of its earlier copies in the epoch."""
    return epoch + (occurrence << 16)


def keyed_uniforms(seed: int, purpose: Purpose, sample_id: int, epoch: int) -> tuple[float, float, float, float]:
    """Return four random numbers in [0, 1) for a sample and an `epoch_word`, without tensors, for loader workers."""
    # Convert the NumPy integers that Streaming passes, since their products would warn about overflow.
    w0, w1, w2, w3 = philox((0, int(sample_id) & _MASK, int(epoch) & _MASK, 0), (seed, int(purpose)))
    return w0 * 2.0**-32, w1 * 2.0**-32, w2 * 2.0**-32, w3 * 2.0**-32


def draws_for(ids: Sequence[int], *, seed: int, device: torch.device | str = 'cpu') -> Draws:
    """Return a source of random numbers that depend only on seed and ids, for generating images outside of training."""
    sample_id = torch.tensor(list(ids), dtype=torch.int64, device=device)
    return Draws(seed, sample_id, torch.zeros_like(sample_id), torch.zeros_like(sample_id))
