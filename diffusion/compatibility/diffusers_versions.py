"""Differences between diffusers 0.39, the last version that supports transformers 4, and later versions."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diffusers.models.transformers import transformer_prx
from torch import Tensor


@contextmanager
def without_own_deprecations() -> Iterator[None]:
    """Inside the context, hide deprecation warnings that diffusers itself causes and a user cannot avoid.

    diffusers 0.42 always passes `local_dir_use_symlinks`, which huggingface-hub 2 ignores with a warning, and its
    PRXPipeline inherits from a class that announces its own removal. Remove this function once neither is the case.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='The `local_dir_use_symlinks` argument is deprecated')
        warnings.filterwarnings('ignore', message='`LoraLoaderMixin` is deprecated')
        yield


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
