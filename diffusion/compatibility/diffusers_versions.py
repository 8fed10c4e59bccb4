"""Differences between diffusers 0.39, the last version that supports transformers 4, and later versions."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import diffusers
import transformers
from diffusers.models.transformers import transformer_prx
from torch import Tensor

from diffusion.compatibility.transformers_versions import IS_VERSION_5


@contextmanager
def without_own_deprecations() -> Iterator[None]:
    """Hide, inside the context, deprecation warnings that diffusers itself causes and a user cannot avoid.

    diffusers 0.42 always passes `local_dir_use_symlinks`, which huggingface-hub 2 ignores with a warning, and its
    PRXPipeline inherits from a class that announces its own removal. Remove this function once neither is the case.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='The `local_dir_use_symlinks` argument is deprecated')
        warnings.filterwarnings('ignore', message='`LoraLoaderMixin` is deprecated')
        yield


def rae_problem(config: Mapping[str, Any]) -> str | None:
    """Return an error message if an AutoencoderRAE with this configuration cannot be built, else None.

    diffusers 0.42 still looks for SigLIP's parts where transformers 4 had them. Remove this function when diffusers
    finds them in transformers 5.
    """
    if config.get('encoder_type') != 'siglip2' or not IS_VERSION_5:
        return None
    return (
        f'diffusers {diffusers.__version__} cannot build AutoencoderRAE with SigLIP 2 on transformers '
        f'{transformers.__version__}; use one with DINOv2 or MAE, or install transformers 4'
    )


def keep_prx_masks_small() -> None:
    """Make PRX's attention use a bool mask [B, 1, 1, L] for padding, which attention broadcasts by itself.

    diffusers 0.39 expands the mask to [B, heads, image tokens, L], and backends copy that: 1.1 GiB in each block for 32
    images of 1,024 tokens. diffusers 0.42 does not. Remove this function when support for diffusers 0.39 is dropped.
    """
    module: Any = transformer_prx
    dispatch = module.dispatch_attention_fn

    def attention(*arguments: Any, attn_mask: Tensor | None = None, **settings: Any) -> Tensor:
        small = None if attn_mask is None else attn_mask[:, :1, :1]
        return dispatch(*arguments, attn_mask=small, **settings)

    module.dispatch_attention_fn = attention
