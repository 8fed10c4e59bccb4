"""The denoiser of a LatentDiffusion as a CUDA graph: an experiment of the step benchmark."""

from typing import Any

import torch
from torch import Tensor, nn

from diffusion.models.latent_diffusion import LatentDiffusion


def graph_denoiser(model: LatentDiffusion) -> None:
    """Capture the U-Net's forward and backward pass in the first training step, and replay them in the others.

    The host then launches two graphs instead of thousands of kernels. All batches must have the shape of the first,
    without a mask of the text, and under DDP all gradients would arrive at the end of the backward pass.
    """
    unet: Any = model.denoiser
    plain = unet.forward
    captured: list[Any] = []

    class Prediction(nn.Module):
        """The U-Net with tensors as its only arguments."""

        def __init__(self) -> None:
            super().__init__()
            self.unet = unet

        def forward(self, noisy: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
            return plain(noisy, timestep=timestep, encoder_hidden_states=text, return_dict=False)[0]

    def forward(noisy: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, **settings: Any) -> tuple[Tensor]:
        assert settings == {'encoder_attention_mask': None, 'return_dict': False}, settings
        inputs = (noisy, timestep, encoder_hidden_states)
        if not captured:
            # A cached cast of a weight would be captured as a constant.
            with torch.autocast('cuda', torch.bfloat16, cache_enabled=False):
                examples = tuple(each.detach().clone() for each in inputs)
                captured.append(torch.cuda.make_graphed_callables(Prediction(), examples, allow_unused_input=True))
        return (captured[0](*inputs),)

    unet.forward = forward
