"""FLOPs of forward passes, counted on the meta device by FlopCounterMode: a multiplication and an addition are 2."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from diffusion.models.pretrained import TextConditioner, downsampling


class FlopCount:
    """FLOPs of a denoiser's forward pass on one sample.

    They are counted on a copy made here, before the denoiser is compiled, sharded or given hooks.

    Args:
        denoiser: Called with noisy latents, timesteps and text embeddings.
        channels: C, of the latents.
        text_width: D, of the text embeddings.
    """

    def __init__(self, denoiser: nn.Module, *, channels: int, text_width: int) -> None:
        self._denoiser = empty_copy(denoiser, 'meta')
        self.channels = channels
        self.text_width = text_width
        self._known: dict[tuple[int, int, int], int] = {}

    def __call__(self, height: int, width: int, text_length: int) -> int:
        """FLOPs for latents of height x width cells and this many tokens; each shape is counted once."""
        shape = height, width, text_length
        if shape not in self._known:
            size = self.channels, height, width
            inputs = denoiser_inputs(1, size, text_length, self.text_width, device='meta')
            self._known[shape] = forward_flops(self._denoiser, *inputs, return_dict=False)
        return self._known[shape]


def vae_encoder_flops(vae: AutoencoderKL, *, height: int, width: int) -> int:
    """FLOPs of the VAE's encoder for one image of height x width latent cells."""
    cell = downsampling(vae)
    size = vae.config['in_channels'], height * cell, width * cell
    pixels = torch.empty(1, *size, dtype=vae.dtype, device='meta')
    return forward_flops(empty_copy(vae, 'meta').encode, pixels)  # type: ignore[operator]


def text_encoder_flops(text: TextConditioner, *, length: int) -> int:
    """FLOPs of all text encoders for one caption of this many tokens."""
    tokens = torch.zeros(1, len(text.encoders), length, dtype=torch.int64, device='meta')
    return forward_flops(empty_copy(text, 'meta'), tokens)


def forward_flops(function: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """FLOPs of calling a module or a method; it and the arguments are on the meta device."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    return counter.get_total_flops()


def empty_copy(module: nn.Module, device: str) -> nn.Module:
    """A copy of a module on another device, with parameters and buffers that hold no data of the original."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        vars(part).pop('forward', None)  # a compiled one, which belongs to the original
    return copied


def denoiser_inputs(
    batch: int, size: tuple[int, int, int], text_length: int, text_width: int, *, device: str = 'cpu'
) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy latents [B, C, H, W], timesteps [B] and text embeddings [B, L, D]."""
    noisy = torch.empty(batch, *size, device=device)
    return noisy, torch.zeros(batch, device=device), torch.empty(batch, text_length, text_width, device=device)
