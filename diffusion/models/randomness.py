"""Keyed randomness: numbers that depend on (seed, purpose, sample, epoch, batch) and on nothing else.

A stream of random numbers makes a run depend on how often it was read: on the number of devices, on interruptions.
A counter-based generator has no state; any number can be drawn anywhere, in any order. This is Philox 4x32-10
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
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Purpose(IntEnum):
    """What a number is drawn for; two purposes never share numbers. Values are part of every run: never renumber."""

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


Words = TypeVar('Words', int, Tensor)


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Ten rounds of Philox 4x32 on 32-bit words, Python integers or int64 tensors of one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The signed 64-bit product wraps, which leaves its bits right; the mask undoes the sign of the shift.
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
    """The same as `philox` in a fifth of the kernels, for many counters that each have their own key.

    Args:
        even: Words 0 and 2 of the counters, int64 [2, B, N].
        odd: Words 1 and 3 of the counters, int64 [2, B, N].
        keys: Both words of every round's keys, int64 [rounds, 2, 1, N].

    Returns:
        Word after word of each block, int64 [B, 4 N].
    """
    multipliers = _multipliers(even.device)
    for key in keys:
        # As above; low words are left unmasked, since what is above their 32 bits goes in the mask after the next xor.
        product = even.mul(multipliers).flip(0)
        even, odd = ((product >> 32) ^ odd ^ key) & _MASK, product
    return torch.stack((even, odd & _MASK)).permute(2, 3, 1, 0).flatten(1)


@lru_cache
def _multipliers(device: torch.device) -> Tensor:
    return torch.tensor(_MULTIPLIERS, device=device).view(2, 1, 1)


@lru_cache(maxsize=32)
def _layout(seed: int, counts: tuple[tuple[Purpose, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Number in its purpose of each block [N], and the round keys [rounds, 2, 1, N], of several purposes in a row."""
    blocks = [-(-count // 4) for _, count in counts]
    number = torch.cat([torch.arange(count) for count in blocks])
    purpose = torch.repeat_interleave(torch.tensor([int(each) for each, _ in counts]), torch.tensor(blocks))
    weyl = torch.arange(_ROUNDS)[:, None] * torch.tensor(_WEYL)
    keys = (torch.stack((torch.full_like(purpose, seed), purpose)) + weyl[:, :, None]) & _MASK
    return number.to(device), keys[:, :, None, :].to(device)


@dataclass(frozen=True)
class Draws:
    """The random numbers of the samples of one batch.

    Attributes:
        seed: Seed of the run, in [0, 2**32).
        sample_id: int64 [B].
        epoch: int64 [B].
        batch_index: int64 [B]; tells a sample that comes twice in an epoch from itself.
        ready: Words that `at_once` has made already, by purpose.
    """

    seed: int
    sample_id: Tensor
    epoch: Tensor
    batch_index: Tensor
    ready: Mapping[Purpose, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def at_once(self, counts: Mapping[Purpose, int]) -> 'Draws':
        """The same draws, with so many words for each of some purposes made in one go.

        On a GPU it is the number of kernels that such small draws cost, and this takes a sixth of them.
        """
        return replace(self, ready=self._make(tuple(counts.items())))

    def words(self, purpose: Purpose, count: int) -> Tensor:
        """Uniform 32-bit words, int64 [B, count]."""
        ready = self.ready.get(purpose)
        if ready is None or ready.shape[1] < count:
            ready = self._make(((purpose, count),))[purpose]
        return ready[:, :count]

    def _make(self, counts: tuple[tuple[Purpose, int], ...]) -> dict[Purpose, Tensor]:
        if not 0 <= self.seed <= _MASK:
            raise UserError(f'seed: {self.seed} is not in [0, 2**32)')
        blocks, keys = _layout(self.seed, counts, self.sample_id.device)
        shape = (len(self.sample_id), len(blocks))
        c0, c2 = blocks.expand(shape), (self.epoch[:, None] & _MASK).expand(shape)
        c1, c3 = ((ids[:, None] & _MASK).expand(shape) for ids in (self.sample_id, self.batch_index))
        words = philox_rows(torch.stack((c0, c2)), torch.stack((c1, c3)), keys)
        widths = [-(-count // 4) * 4 for _, count in counts]
        return {purpose: part for (purpose, _), part in zip(counts, words.split(widths, dim=1), strict=True)}

    def uniform(self, purpose: Purpose) -> Tensor:
        """One number in [0, 1) a sample, float64 [B], exact."""
        return self.words(purpose, 1)[:, 0].double() * 2.0**-32

    def stratified(self, stratum: Purpose, within: Purpose) -> Tensor:
        """One number in [0, 1) a sample, float64 [B], one in each B-th of it; by itself each is uniform.

        Which part a sample gets depends on all samples, whatever their order; B is at most 2**20, so that none is
        rounded to 1.
        """
        assert len(self.sample_id) <= 2**20
        # Samples in the order of random words; of equal words, which are rare, in that of their ids.
        by_id = self.sample_id.argsort(stable=True)
        order = by_id[self.words(stratum, 1)[by_id, 0].argsort(stable=True)]
        parts = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return (parts.double() + self.uniform(within)) / len(order)

    def integers(self, purpose: Purpose, high: int) -> Tensor:
        """One integer in [0, high) a sample, int64 [B]; high is at most 2**31."""
        return (self.words(purpose, 1)[:, 0] * high) >> 32

    def normal(self, purpose: Purpose, shape: Sequence[int]) -> Tensor:
        """Standard normals by Box and Muller (1958), float32 [B, *shape]."""
        count = math.prod(shape)
        words = self.words(purpose, count + count % 2)
        first, second = words[:, 0::2], words[:, 1::2]
        # 24 bits are what a float32 holds exactly; +1 keeps the logarithm's argument in (0, 1].
        radius = (((first >> 8) + 1).float() * 2.0**-24).log().mul(-2.0).sqrt()
        angle = (second >> 8).float() * (2.0**-24 * 2.0 * math.pi)
        normals = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1)
        return normals.flatten(1)[:, :count].unflatten(1, tuple(shape))


def keyed_uniforms(seed: int, purpose: Purpose, sample_id: int, epoch: int) -> tuple[float, float, float, float]:
    """Four numbers in [0, 1) of one sample in one epoch, without tensors: what data workers want."""
    # int(): Streaming counts in numpy's integers, whose products warn when they wrap.
    w0, w1, w2, w3 = philox((0, int(sample_id) & _MASK, int(epoch) & _MASK, 0), (seed, int(purpose)))
    return w0 * 2.0**-32, w1 * 2.0**-32, w2 * 2.0**-32, w3 * 2.0**-32


def draws_for(ids: Sequence[int], *, seed: int, device: torch.device | str = 'cpu') -> Draws:
    """Draws outside of any epoch: validation noise, sampling."""
    sample_id = torch.tensor(list(ids), dtype=torch.int64, device=device)
    return Draws(seed, sample_id, torch.zeros_like(sample_id), torch.zeros_like(sample_id))
