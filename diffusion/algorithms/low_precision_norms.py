"""Normalization layers of the denoiser that compute in autocast's dtype instead of float32.

CUDA's autocast runs group_norm and layer_norm in float32, which doubles the memory traffic of these bandwidth-bound
layers. These algorithms run both in autocast's dtype; the kernels accumulate statistics in float32 anyway.
"""

import logging
from collections.abc import Collection

import torch
from composer.core import Algorithm, Event, Precision, State
from composer.loggers import Logger
from torch import Tensor, nn
from torch.nn import functional

from diffusion.config.declarations import STATELESS

log = logging.getLogger(__name__)


class LowPrecisionGroupNormLayer(nn.GroupNorm):
    """GroupNorm that computes in autocast's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        dtype = _dtype(input)
        # Autocast must be off: group_norm is on CUDA's float32 list, so autocast would cast its input to float32 again.
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = _cast(self.weight, dtype), _cast(self.bias, dtype)
            return functional.group_norm(input.to(dtype), self.num_groups, weight, bias, self.eps)


class LowPrecisionLayerNormLayer(nn.LayerNorm):
    """LayerNorm that computes in autocast's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        dtype = _dtype(input)
        # layer_norm is on CUDA's float32 list too.
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = _cast(self.weight, dtype), _cast(self.bias, dtype)
            return functional.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)


class _LowPrecisionNorm(Algorithm):
    """Base class of algorithms that convert the denoiser's layers of class `plain` to class `fast` before training.

    With a precision other than amp_fp16 and amp_bf16, they only log a warning.
    """

    on_resume = STATELESS
    plain: type[nn.Module]
    fast: type[nn.Module]

    def match(self, event: Event, state: State) -> bool:
        return event == Event.INIT

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if state.precision not in (Precision.AMP_FP16, Precision.AMP_BF16):
            log.warning(
                '%s: has no effect with precision %s; use amp_bf16 or amp_fp16', type(self).__name__, state.precision
            )
            return
        count = replace_norms(state.model.denoiser, self.plain, self.fast)  # type: ignore[arg-type]
        log.info('%s: replaced %d layers of the denoiser', type(self).__name__, count)


class DenoiserLowPrecisionGroupNorm(_LowPrecisionNorm):
    """Algorithm that runs the denoiser's GroupNorm layers in autocast's dtype."""

    plain, fast = nn.GroupNorm, LowPrecisionGroupNormLayer


class DenoiserLowPrecisionLayerNorm(_LowPrecisionNorm):
    """Algorithm that runs the denoiser's LayerNorm layers in autocast's dtype."""

    plain, fast = nn.LayerNorm, LowPrecisionLayerNormLayer


def replace_norms(
    module: nn.Module, plain: type[nn.Module], fast: type[nn.Module], *, keep: Collection[nn.Module] = ()
) -> int:
    """Change the class of layers from `plain` (no subclass) to `fast`, except for `keep`; return how many changed."""
    layers = [layer for layer in module.modules() if type(layer) is plain and layer not in keep]
    # Changing the class keeps the layer object, so the optimizer's parameters, hooks and state dict names stay valid.
    for layer in layers:
        layer.__class__ = fast
    return len(layers)


def _dtype(input: Tensor) -> torch.dtype:
    # Without a device type, is_autocast_enabled() only checks CUDA and returns False under autocast('cpu').
    device_type = input.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else input.dtype


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
