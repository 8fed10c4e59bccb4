"""Normalisation of the denoiser in the precision of autocast.

CUDA's autocast runs group_norm and layer_norm in float32, which doubles the bytes of layers that do little but move
bytes. These algorithms run them in autocast's own dtype; statistics are accumulated in float32 by the kernels anyway.
"""

import logging
from collections.abc import Collection

import torch
from composer.core import Algorithm, Event, Precision, State
from composer.loggers import Logger
from torch import Tensor, nn
from torch.nn import functional

log = logging.getLogger(__name__)


class LowPrecisionGroupNormLayer(nn.GroupNorm):
    """A GroupNorm that computes in autocast's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        dtype = _dtype(input)
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = _cast(self.weight, dtype), _cast(self.bias, dtype)
            return functional.group_norm(input.to(dtype), self.num_groups, weight, bias, self.eps)


class LowPrecisionLayerNormLayer(nn.LayerNorm):
    """A LayerNorm that computes in autocast's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        dtype = _dtype(input)
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = _cast(self.weight, dtype), _cast(self.bias, dtype)
            return functional.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)


class _LowPrecisionNorm(Algorithm):
    plain: type[nn.Module]
    fast: type[nn.Module]

    def match(self, event: Event, state: State) -> bool:
        return event == Event.INIT

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if state.precision not in (Precision.AMP_FP16, Precision.AMP_BF16):
            log.warning(
                '%s: does nothing in precision %s; it is for amp_bf16 and amp_fp16',
                type(self).__name__,
                state.precision,
            )
            return
        count = replace_norms(state.model.denoiser, self.plain, self.fast)  # type: ignore[arg-type]
        log.info('%s: %d layers of the denoiser', type(self).__name__, count)


class DenoiserLowPrecisionGroupNorm(_LowPrecisionNorm):
    """GroupNorm of the denoiser in autocast's dtype."""

    plain, fast = nn.GroupNorm, LowPrecisionGroupNormLayer


class DenoiserLowPrecisionLayerNorm(_LowPrecisionNorm):
    """LayerNorm of the denoiser in autocast's dtype."""

    plain, fast = nn.LayerNorm, LowPrecisionLayerNormLayer


def replace_norms(
    module: nn.Module, plain: type[nn.Module], fast: type[nn.Module], *, keep: Collection[nn.Module] = ()
) -> int:
    """Make layers of exactly the class `plain`, but for those to keep, into `fast` in place; returns how many."""
    layers = [layer for layer in module.modules() if type(layer) is plain and layer not in keep]
    for layer in layers:
        layer.__class__ = fast
    return len(layers)


def _dtype(input: Tensor) -> torch.dtype:
    kind = input.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
