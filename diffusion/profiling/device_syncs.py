"""Where the host waits for the device: each such place in a step leaves a GPU without work for a moment."""

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

VALUES = {
    'aten::_local_scalar_dense',  # item(), float(), bool() and the like
    'aten::equal',
    'aten::is_nonzero',
    'aten::masked_select',
    'aten::nonzero',
    'aten::repeat_interleave',
    'aten::_unique2',
}
"""Operations that must know a tensor's values before they can go on."""
METHODS = ('cpu', 'numpy', 'tolist')
"""Methods that need values, too, and dispatch nothing where the tensor is on the CPU already."""
HOSTS = ('/diffusion/data/', '/torch/optim/')
"""Code whose tensors are on the host on any machine: what loaders read, and the steps that optimizers count."""
PACKAGES = ('diffusion', 'composer')
"""Whose code is named; otherwise it is the innermost line outside of PyTorch."""


class Site(NamedTuple):
    """A line that makes the host wait."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f'{self.file}:{self.line} ({self.function})'


@contextmanager
def find_waits() -> Iterator[Counter[Site]]:
    """Count the places inside that wait for a GPU; without one, those that would if every tensor were on it."""
    found: Counter[Site] = Counter()
    with _as_cuda_tells(found) if torch.cuda.is_available() else _as_calls_tell(found):
        yield found


@contextmanager
def _as_cuda_tells(found: Counter[Site]) -> Iterator[None]:
    def note(message: Any, category: Any, *rest: Any, **more: Any) -> None:
        if 'synchronizing CUDA operation' in str(message):
            found[_site()] += 1
        else:
            show(message, category, *rest, **more)

    show = warnings.showwarning
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings('always', message='.*synchronizing CUDA operation')
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode('warn')
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _as_calls_tell(found: Counter[Site]) -> Iterator[None]:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (func._schema.name in VALUES or _masks(func, args)) and not _is_the_hosts():
                found[_site()] += 1
            return func(*args, **(kwargs or {}))

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not _is_the_hosts():
                found[_site()] += 1
            return method(self, *args, **kwargs)

        return call

    patches = [patch.object(Tensor, name, noting(getattr(Tensor, name))) for name in METHODS]
    for each in patches:
        each.start()
    try:
        with Mode():
            yield
    finally:
        for each in patches:
            each.stop()


def _masks(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a tensor is indexed by a mask, whose true values must be counted."""
    if func._schema.name not in ('aten::index', 'aten::index_put_', 'aten::index_put'):
        return False
    return any(index is not None and index.dtype == torch.bool for index in args[1])


def _is_the_hosts() -> bool:
    """Whether the innermost code that has a say in it is the host's (a closure is called by the optimizer)."""
    for frame in reversed(traceback.extract_stack()):
        if any(place in frame.filename for place in HOSTS):
            return True
        if _package(frame.filename) in PACKAGES and Path(frame.filename) != Path(__file__):
            return False
    return False


def _site() -> Site:
    """The innermost line of ours or of Composer, or else of anything but PyTorch."""
    frames = [frame for frame in traceback.extract_stack() if Path(frame.filename) != Path(__file__)]
    frames = [frame for frame in frames if _package(frame.filename) not in ('torch', 'unittest', 'contextlib.py')]
    named = [frame for frame in frames if _package(frame.filename) in PACKAGES]
    frame = (named or frames)[-1]
    return Site(_short(frame.filename), frame.lineno or 0, frame.name)


def _package(path: str) -> str:
    return _short(path).partition('/')[0]


def _short(path: str) -> str:
    """A file by its package: composer/trainer/trainer.py."""
    for package in PACKAGES:
        _, inside, rest = path.rpartition(f'/{package}/')
        if inside and 'site-packages' not in rest:
            return f'{package}/{rest}'
    return path.rpartition('-packages/')[2]
