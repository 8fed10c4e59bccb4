"""Find source lines that synchronize the host with the GPU; each synchronization lets the GPU run idle."""

import contextlib
import traceback
import unittest.mock
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from diffusion.compatibility.private_names import TorchDispatchMode
from diffusion.models.host_copy import HostCopy

VALUES = {
    # Called by item(), float(), bool() and similar conversions of a tensor to a Python number.
    'aten::_local_scalar_dense',
    'aten::equal',
    'aten::is_nonzero',
    'aten::masked_select',
    'aten::nonzero',
    'aten::repeat_interleave',
    'aten::_unique2',
}
"""Operations that make the host wait, because their result or its shape depends on values on the GPU."""
METHODS = ('cpu', 'numpy', 'tolist')
"""Tensor methods that copy values to the host, but dispatch no operation if the tensor is already on the CPU."""
HOSTS = ('/diffusion/data/', '/torch/optim/', '/diffusion/models/host_copy.py')
"""Path fragments of code that only uses host tensors: data loaders, optimizers' step counters, completed copies."""
PACKAGES = ('diffusion', 'composer')
"""A synchronization is reported at the innermost stack frame in these packages or, if none, outside PyTorch."""
DETECTORS = {module.__file__ for module in (contextlib, unittest.mock, warnings)} | {__file__}


class Site(NamedTuple):
    """Source line that makes the host wait for the device."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f'{self.file}:{self.line} ({self.function})'


@contextmanager
def find_waits() -> Iterator[Counter[Site]]:
    """Return a context manager that counts device synchronizations inside the context by source line.

    Without a GPU, operations are counted that would synchronize if their tensors were on a GPU.
    """
    found: Counter[Site] = Counter()
    with _count_cuda_warnings(found) if torch.cuda.is_available() else _count_calls(found), _count_early_reads(found):
        yield found


@contextmanager
def _count_early_reads(found: Counter[Site]) -> Iterator[None]:
    """Count reads of asynchronous copies to the host before the copy is complete; such a read has to wait."""
    # Without a GPU, a copy counts as complete after the next synchronization of any kind: on a GPU, all earlier
    # kernels would then have ended.
    make, read = HostCopy.__init__, HostCopy.read

    def making(self: Any, tensor: Tensor) -> None:
        make(self, tensor)
        self.waits_before = found.total()

    def reading(self: Any) -> Any:
        arrived = self.has_arrived if torch.cuda.is_available() else found.total() > self.waits_before
        if not arrived:
            found[_site()] += 1
        return read(self)

    with patch.object(HostCopy, '__init__', making), patch.object(HostCopy, 'read', reading):
        yield


@contextmanager
def _count_cuda_warnings(found: Counter[Site]) -> Iterator[None]:
    """Count the warnings that PyTorch emits for synchronizing operations in CUDA's sync debug mode."""

    # The warning has the Python line that called the operation, which is often inside PyTorch. showwarning runs during
    # that call, so the stack shows which of our lines led to it.
    def count_warning(message: Any, category: Any, *rest: Any, **more: Any) -> None:
        if 'synchronizing CUDA operation' in str(message):
            found[_site()] += 1
        else:
            show(message, category, *rest, **more)

    show = warnings.showwarning
    previous_mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # restores filters and showwarning at the end
        # Python's default is to show a warning once per line.
        warnings.filterwarnings('always', message='.*synchronizing CUDA operation')
        warnings.showwarning = count_warning
        torch.cuda.set_sync_debug_mode('warn')
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(previous_mode)


@contextmanager
def _count_calls(found: Counter[Site]) -> Iterator[None]:
    """Count the calls that would synchronize if their tensors were on a GPU."""

    # A dispatch mode sees every operation. Methods such as Tensor.cpu() dispatch no operation for CPU tensors, so they
    # are replaced on the Tensor class while the context is active, in this process only.
    class CountOperations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (_name(func) in VALUES or _masks(func, args)) and not _is_on_host():
                found[_site()] += 1
            return func(*args, **(kwargs or {}))

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not _is_on_host():
                found[_site()] += 1
            return method(self, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in METHODS:
            stack.enter_context(patch.object(Tensor, name, counting(getattr(Tensor, name))))
        stack.enter_context(CountOperations())
        yield


def _name(func: Any) -> str:
    """Return the name of an operation without its overload, such as aten::index."""
    return func.name().partition('.')[0]


def _masks(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True if an operation indexes a tensor with a boolean mask, which synchronizes to count the True values."""
    if _name(func) not in ('aten::index', 'aten::index_put_', 'aten::index_put'):
        return False
    return any(index is not None and index.dtype == torch.bool for index in args[1])


def _is_on_host() -> bool:
    """Return True if the current call stack is in code whose tensors are only on the host, such as a data loader."""
    # Check the innermost frames first: Composer runs forward and backward in a closure called by the optimizer, so an
    # outer frame in torch/optim says nothing about the operations in that closure.
    for frame in reversed(traceback.extract_stack()):
        if any(fragment in frame.filename for fragment in HOSTS):
            return True
        if _package(frame.filename) in PACKAGES and frame.filename != __file__:
            return False
    return False


def _site() -> Site:
    """Return the innermost stack frame in one of `PACKAGES` or, if there is none, the innermost outside PyTorch."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename not in DETECTORS]
    frames = [frame for frame in frames if _package(frame.filename) != 'torch']
    named = [frame for frame in frames if _package(frame.filename) in PACKAGES]
    frame = (named or frames)[-1]
    return Site(_short(frame.filename), frame.lineno or 0, frame.name)


def _package(path: str) -> str:
    """Return the name of the top-level package of a source file."""
    return _short(path).partition('/')[0]


def _short(path: str) -> str:
    """Return a source file's path relative to its package's parent folder, such as composer/trainer/trainer.py."""
    # Packages may be installed in site-packages, or in development mode in any folder.
    for package in PACKAGES:
        _, inside, rest = path.rpartition(f'/{package}/')
        if inside and 'site-packages' not in rest:
            return f'{package}/{rest}'
    return path.rpartition('-packages/')[2]
