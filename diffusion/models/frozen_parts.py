"""Frozen parts of a model: their precision, and conversion of their outputs for training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from xxhash import xxh3_128

from diffusion.errors import UserError


def encoder_precision(name: str) -> torch.dtype:
    """Return the torch dtype of frozen encoders by name; `auto` is float16 with a GPU and float32 without."""
    if name == 'auto':
        return torch.float16 if torch.cuda.is_available() else torch.float32
    dtypes = {'float32': torch.float32, 'float16': torch.float16, 'bfloat16': torch.bfloat16}
    if name not in dtypes:
        raise UserError(f'encoder_dtype: {name!r}; use one of auto, {", ".join(dtypes)}')
    return dtypes[name]


def freeze(part: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a module to a dtype in place, for inference only (no gradients, evaluation mode), and return it."""
    # Call nn.Module's `to`: the override in diffusers' VAEs warns about modules that they do not have.
    return nn.Module.to(part.requires_grad_(False).eval(), dtype)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which a model is in evaluation mode; its previous mode is restored afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert half precision to float32; keep float64, which tests of summation orders use."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def for_autograd(tensor: Tensor) -> Tensor:
    """Convert an encoder's output to at least float32 and to a tensor that autograd can save."""
    # Autograd refuses to save tensors created in inference mode; a clone made outside it is an ordinary tensor.
    converted = at_least_float32(tensor)
    return converted.clone() if converted.is_inference() else converted


def weights_hash(network: nn.Module) -> str:
    """Return a hash of the names, types and values of a network's tensors, 32 hex digits."""
    digest = xxh3_128()
    for key, tensor in sorted(network.state_dict().items()):
        digest.update(f'{key} {tensor.dtype} {list(tensor.shape)}'.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
