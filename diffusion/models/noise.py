"""Keyed randomness: numbers that depend on (seed, purpose, sample, epoch, batch) and on nothing else.

A stream of random numbers makes a run depend on how often it was read: on the number of devices, on interruptions.
A counter-based generator has no state; any number can be drawn anywhere, in any order. This is Philox 4x32-10
(Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011), in integer arithmetic that gives
the same bits on every device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class Draws:
    """The random numbers of the samples of one batch.

    Attributes:
        seed: Seed of the run, in [0, 2**32).
        sample_id: int64 [B].
        epoch: int64 [B].
        batch_index: int64 [B]; tells a sample that comes twice in an epoch from itself.
    """

    seed: int
    sample_id: Tensor
    epoch: Tensor
    batch_index: Tensor

    def words(self, purpose: Purpose, count: int) -> Tensor:
        """Uniform 32-bit words, int64 [B, count]."""
        if not 0 <= self.seed <= _MASK:
            raise ValueError(f'seed: {self.seed} is not in [0, 2**32)')
        block = torch.arange(-(-count // 4), device=self.sample_id.device)
        columns = [ids[:, None] & _MASK for ids in (self.sample_id, self.epoch, self.batch_index)]
        counter = torch.broadcast_tensors(block[None, :], *columns)
        words = philox((counter[0], counter[1], counter[2], counter[3]), (self.seed, int(purpose)))
        return torch.stack(words, dim=-1).flatten(1)[:, :count]

    def uniform(self, purpose: Purpose) -> Tensor:
        """One number in [0, 1) a sample, float64 [B], exact."""
        return self.words(purpose, 1)[:, 0].double() * 2.0**-32

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
