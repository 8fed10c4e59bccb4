"""FLOPs of forward passes, counted with FlopCounterMode on the meta device; a multiply-add counts as 2 FLOPs."""

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from diffusion.models.families.adapter import DenoiserAdapter, adapter_of
from diffusion.models.randomness import draws_for
from diffusion.models.text_conditioner import TextConditioner
from diffusion.models.token_routing import Route, TokenRouter
from diffusion.models.vae import Vae, downsampling

_autocast = torch.autocast


class FlopCount:
    """Callable that returns the FLOPs of a denoiser's forward pass on one sample, counted on a copy without data."""

    def __init__(self, denoiser: nn.Module, family: DenoiserAdapter | None = None) -> None:
        self._family = family or adapter_of(denoiser)
        # Copy now, before training compiles or shards the denoiser or adds hooks, which a later copy would include.
        self._denoiser = empty_copy(denoiser, 'meta')
        self._counted: dict[tuple[int, int, int], int] = {}
        self._router: TokenRouter | None = None

    def route(self, route: Route) -> None:
        """In later calls, count a token route's blocks with only the tokens that it keeps; needs a transformer."""
        assert self._family.token_blocks is not None
        self._router = TokenRouter(self._denoiser, self._family.token_blocks, route)
        self._counted.clear()

    def __call__(self, height: int, width: int, text_length: int) -> int:
        """Return the denoiser's FLOPs for latents of height x width cells and `text_length` tokens, cached by shape."""
        shape = height, width, text_length
        if shape not in self._counted:
            args, kwargs = self._family.example_inputs(self._denoiser, 1, *shape, device='meta')
            if self._router is None:
                self._counted[shape] = forward_flops(self._denoiser, *args, **kwargs)
            else:
                with self._router.routing(draws_for([0], seed=0, device='meta')):
                    self._counted[shape] = forward_flops(self._denoiser, *args, **kwargs, gradients=True)
        return self._counted[shape]


class TrainingFlops:
    """Counter of the FLOPs of training on one sample, for a denoiser that is not yet compiled or sharded."""

    def __init__(self, denoiser: nn.Module, text: TextConditioner, *, trains_text: bool) -> None:
        self._denoiser = FlopCount(denoiser)
        # Copy a trained text encoder now: it will be sharded too, and FSDP2 does not allow copying sharded modules.
        self._text: Any = empty_copy(text, 'meta', shared=text.tokenizers) if trains_text else text
        self._counted: dict[tuple[int | bool, ...], int] = {}

    def route(self, route: Route) -> None:
        self._denoiser.route(route)
        self._counted.clear()

    def of_sample(self, model: Any, *shape: Any) -> int:
        """Return the FLOPs of training on one sample, cached by `shape`, the arguments of `_count` after the model."""
        # Shapes repeat (aspect-ratio buckets), and counting one takes a forward pass on the meta device.
        if shape not in self._counted:
            self._counted[shape] = self._count(model, *shape)
        return self._counted[shape]

    def _count(
        self,
        model: Any,
        height: int,
        width: int,
        token_length: int,
        encodes_images: bool,
        encodes_text: bool,
        encodes_features: bool,
        is_pair: bool,
    ) -> int:
        # The backward pass costs two forward passes, for gradients of activations and of weights, but only one if the
        # weights are frozen.
        passes = (2 if model.denoiser_is_frozen else 3) + is_pair  # the reference adds a forward pass
        total = passes * self._denoiser(height, width, model.text.embeddings_per_caption(token_length))
        if encodes_images:
            total += vae_encoder_flops(model.vae, height=height, width=width)
        total *= 1 + is_pair
        if encodes_text:
            passes = 3 if model.train_text_encoder else 1
            total += passes * text_encoder_flops(self._text, length=token_length)
        if model.representation_alignment is not None:
            grid = height // model.denoiser_sizes.patch, width // model.denoiser_sizes.patch
            tokens = grid[0] * grid[1]
            if model.router is not None:
                tokens = model.router.route.tokens_after(model.representation_alignment.block, tokens)
            total += feature_projector_flops(model.feature_projector, tokens)
            if encodes_features:
                total += feature_encoder_flops(model.image_encoder, grid)
        if (perceptual := model.perceptual_loss) is not None:
            # Perceptual losses require a model on pixels, whose latents have the same size as the image.
            total += perceptual_flops(perceptual, height=height, width=width)
        return total


def vae_encoder_flops(vae: Vae, *, height: int, width: int) -> int:
    """Return the FLOPs of the VAE's encoder for one image of height x width latent cells."""
    cell = downsampling(vae)
    size = vae.config['in_channels'], height * cell, width * cell
    pixels = torch.empty(1, *size, dtype=vae.dtype, device='meta')
    return forward_flops(empty_copy(vae, 'meta').encode, pixels)  # type: ignore[operator]


def text_encoder_flops(text: TextConditioner, *, length: int) -> int:
    """Return the FLOPs of all text encoders for one caption of `length` token ids per encoder."""
    tokens = torch.zeros(1, len(text.encoders), length, dtype=torch.int64, device='meta')
    return forward_flops(empty_copy(text, 'meta', shared=text.tokenizers), tokens)


def feature_encoder_flops(encoder: nn.Module, grid: tuple[int, int]) -> int:
    """Return the FLOPs of a FeatureEncoder for one image that is resized to a grid of height x width cells."""
    # The image size does not matter: the encoder resizes images.
    images = torch.zeros(1, 3, 8, 8, dtype=torch.uint8, device='meta')
    return forward_flops(empty_copy(encoder, 'meta'), images, grid)


def feature_projector_flops(projector: nn.Module, tokens: int) -> int:
    """Return the FLOPs of training a FeatureProjector on `tokens` tokens: three passes. It may be sharded."""
    weights = sum(each.numel() for each in projector.parameters() if each.ndim > 1)
    return 3 * 2 * weights * tokens


def perceptual_flops(loss: nn.Module, *, height: int, width: int) -> int:
    """Return a PerceptualLoss's FLOPs in a training step: forward passes on both images, and one backward pass."""
    images = torch.zeros(1, 3, height, width, device='meta')
    with torch.enable_grad(), FlopCounterMode(display=False) as counter:
        empty_copy(loss, 'meta')(images.clone().requires_grad_(), images).sum().backward()
    return counter.get_total_flops()


def forward_flops(function: Callable[..., Any], *args: Any, gradients: bool = False, **kwargs: Any) -> int:
    """Return the FLOPs of calling a module or method on the meta device, with or without gradients enabled."""
    # Gemma's rotary embedding turns off autocast on its input's device, but the meta device has no autocast.
    autocast = mock.patch.object(torch, 'autocast', _autocast_except_on_meta)
    with torch.set_grad_enabled(gradients), autocast, FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    return counter.get_total_flops()


def _autocast_except_on_meta(device_type: str, *args: Any, **kwargs: Any) -> Any:
    return contextlib.nullcontext() if device_type == 'meta' else _autocast(device_type, *args, **kwargs)


def empty_copy(module: nn.Module, device: str, *, shared: Iterable[object] = ()) -> nn.Module:
    """Return a copy with uninitialized tensors on a device; objects in `shared`, such as tokenizers, are not copied."""
    # deepcopy looks up existing copies in its memo. Put empty tensors there, so that it never copies data.
    memo: dict[int, Any] = {id(each): each for each in shared}
    for parameter in module.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        # A compiled `forward` is set on the instance and bound to the original module, so drop it from the copy.
        vars(part).pop('forward', None)
    return copied
