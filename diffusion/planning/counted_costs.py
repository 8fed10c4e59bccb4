"""Costs of one model or network from the cache of counts; missing counts are made on first use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from diffusion.config.image_shapes import Shape
from diffusion.planning.count_cache import ModelKey, count, known_counts, merged

Precision = Literal['float32', 'float32+compile', 'half', 'half+low_precision_norms', 'half+compile']
"""Settings of a GPU run that change the activations kept for the backward pass; see models/activation_memory.py."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class ActivationCounts:
    """Bytes kept for the backward pass: activations per sample, and autocast's copies of weights per microbatch.

    Both are counted by models/activation_memory.py.
    """

    kept: int
    """Activations per sample without activation checkpointing."""
    kept_between: int
    """Activations per sample kept between checkpointed blocks, block inputs included."""
    kept_inside: int
    """Activations per sample inside the largest checkpointed block while it is recomputed."""
    copies: int
    """Copies of weights in 16 bits without activation checkpointing; independent of the batch size."""
    copies_between: int
    """Copies of weights outside of checkpointed blocks."""
    copies_inside: int
    """Copies of weights inside the largest checkpointed block."""
    largest: int
    """Bytes of the largest intermediate tensor, per sample."""
    largest_encoder_elements: int
    """Number of elements of the largest tensor in the frozen image encoder, per sample."""

    @property
    def kept_recomputing(self) -> int:
        """Peak bytes of activations per sample with activation checkpointing."""
        return self.kept_between + self.kept_inside

    @property
    def copies_recomputing(self) -> int:
        """Peak bytes of 16-bit weight copies with activation checkpointing: only one block at a time holds copies."""
        return self.copies_between + self.copies_inside


class CountedCosts:
    """Facts, FLOPs and activation memory of a model or network, counted in a separate process if they are not known."""

    def __init__(self, key: ModelKey) -> None:
        self.key = key
        self._counts = known_counts(key)

    def require(self, flops: Sequence[str] = (), activations: Sequence[tuple[Shape, Precision]] = ()) -> None:
        """Make all requested counts that are not known yet, in one process.

        Args:
            flops: Names of FLOPs: a shape, or a shape and a route of tokens.
            activations: Pairs of shape and precision.

        Raises:
            UserError: The model cannot be built.
            CountingFailed: The forward pass failed.
        """
        pairs = dict.fromkeys((str(shape), precision) for shape, precision in activations)
        names = [name for name in dict.fromkeys(flops) if name not in self._counts['flops']]
        unknown = [pair for pair in pairs if ' '.join(pair) not in self._counts['activations']]
        if names or unknown or not self.is_counted:
            self._counts = merged(self._counts, count(self.key, flops=names, activations=unknown))

    @property
    def is_counted(self) -> bool:
        """True if the model has been counted, so that `facts` returns immediately."""
        return bool(self._counts['facts'])

    @property
    def facts(self) -> Mapping[str, int]:
        """Counts that do not depend on the image shape, such as the number of parameters, by name."""
        # The names are defined in models/cost_counting.py and models/auxiliary_counting.py.
        self.require()
        return self._counts['facts']

    def flops(self, name: str) -> Mapping[str, int]:
        """Return FLOPs by part, for a shape or for a shape and a route."""
        self.require(flops=[name])
        return self._counts['flops'][name]

    def activations(self, shape: Shape, precision: Precision) -> ActivationCounts:
        """Return the bytes kept for the backward pass of one sample, for this image shape and precision."""
        self.require(activations=[(shape, precision)])
        counts: Mapping[str, Any] = self._counts['activations'][f'{shape} {precision}']
        return ActivationCounts(**counts)
