"""Differences between diffusers 0.39, the newest for transformers 4, and later versions."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_deprecated_arguments() -> Iterator[None]:
    """Context for downloads by diffusers, without a warning about an argument that the user has not given.

    diffusers 0.42 always passes `local_dir_use_symlinks`, which huggingface-hub 2 ignores with a warning. Remove this
    function when diffusers does not.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='The `local_dir_use_symlinks` argument is deprecated')
        yield
