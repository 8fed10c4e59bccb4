"""FLOPs of forward passes by shape; a multiplication and an addition are 2, as torch's FlopCounterMode counts."""

import copy
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from diffusion.errors import UserError
from diffusion.models.pretrained import TextConditioner, downsampling
from diffusion.planning.cost_tape import Tape
from diffusion.planning.encoders import run_clip_text, run_vae_encoder
from diffusion.planning.unet import run_unet


class FlopCount:
    """FLOPs of a denoiser's forward pass on one sample: of a U-Net by arithmetic, of others on the meta device.

    Args:
        denoiser: From noisy latents, timesteps and text to a prediction; it is not run.
        channels: C, of the latents.
        text_width: D, of the text.
    """

    def __init__(self, denoiser: nn.Module, *, channels: int, text_width: int) -> None:
        self.denoiser = denoiser
        self.channels = channels
        self.text_width = text_width
        self._known: dict[tuple[int, int, int], int] = {}

    def __call__(self, height: int, width: int, text_length: int) -> int:
        """On latents of height x width cells and so many tokens; the same shape is counted once."""
        shape = height, width, text_length
        if shape not in self._known:
            self._known[shape] = self._count(*shape)
        return self._known[shape]

    def _count(self, height: int, width: int, text_length: int) -> int:
        if isinstance(self.denoiser, UNet2DConditionModel):
            tape = Tape()
            try:
                run_unet(tape, dict(self.denoiser.config), height=height, width=width, text_length=text_length)
                return tape.forward_flops
            except UserError:
                pass  # it has a part that the arithmetic does not know
        noisy = torch.empty(1, self.channels, height, width, device='meta')
        text_embeds = torch.empty(1, text_length, self.text_width, device='meta')
        return count_on_meta(self.denoiser, noisy, torch.zeros(1, device='meta'), text_embeds, return_dict=False)


def count_on_meta(module: nn.Module, *args: Any, **kwargs: Any) -> int:
    """FLOPs of calling a module, counted on a copy of it without data; the arguments are on the meta device."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        on_meta(module)(*args, **kwargs)
    return counter.get_total_flops()


def on_meta(module: nn.Module) -> nn.Module:
    """A copy of a module on the meta device, where tensors have shapes and no data."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device='meta')
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device='meta')
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        vars(part).pop('forward', None)  # a compiled one, which is the original's
    return copied


def vae_encoder_flops(vae: AutoencoderKL, *, height: int, width: int) -> int:
    """Of the VAE's encoder on one picture, of height x width latent cells."""
    tape, cell = Tape(), downsampling(vae)
    run_vae_encoder(tape, dict(vae.config), height=height * cell, width=width * cell)
    return tape.forward_flops


def text_encoder_flops(text: TextConditioner, *, length: int) -> int:
    """Of all text encoders on one caption of so many tokens."""
    tape = Tape()
    for encoder in text.encoders:
        run_clip_text(tape, encoder.config.to_dict(), length=length)  # type: ignore[union-attr]
    return tape.forward_flops
