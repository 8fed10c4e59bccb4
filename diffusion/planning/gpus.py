"""GPU models: peak FLOP/s, memory, hourly price, and which builds of torch have kernels for them."""

import datetime
import importlib.util
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.config.schema import Gatherer, build_dataclass, did_you_mean, field_docs, join
from diffusion.config.yaml_files import UnreadableYAML, read_yaml
from diffusion.errors import UserError

SHIPPED = Path(__file__).with_name('gpus.yaml')
STALE_DAYS = 180
"""Age in days at which a price triggers a warning."""


@dataclass(frozen=True)
class GPU:
    """A GPU model: peak FLOP/s, memory and price."""

    peak_tflops: dict[str, float]
    """Peak TFLOP/s without sparsity, by precision: bf16, fp16, fp32."""
    memory_gib: float
    """Memory as reported by the driver, in GiB."""
    price_usd_per_hour: float | None = None
    """Price in US dollars per GPU-hour. Null means unknown; costs then require --price."""
    date: str | None = None
    """Date of the price, such as 2026-05-01."""
    source: str = ''
    """Source of the price."""
    compute_capability: str | None = None
    """Compute capability, such as '9.0', by which torch selects kernels. Null skips the check of torch's kernels."""
    gpus_per_node: int = 8
    """Number of GPUs per node."""
    name: str = ''
    """Name of the GPU on the command line."""

    def peak_flops(self, precision: str) -> float:
        """Return the peak FLOP/s in bf16, fp16 or fp32, without sparsity; raise UserError if unsupported."""
        if precision not in self.peak_tflops:
            raise UserError(
                f'--gpu {self.name} does not support {precision} (supported: {", ".join(self.peak_tflops)}); '
                'use another GPU or another trainer.precision'
            )
        return self.peak_tflops[precision] * 1e12

    def stale(self, today: datetime.date) -> str | None:
        """Return a warning if the price of the GPU is more than STALE_DAYS old, else None."""
        if self.date is None:
            return None
        days = (today - datetime.date.fromisoformat(self.date)).days
        if days <= STALE_DAYS:
            return None
        return (
            f'{self.name}: the price of ${self.price_usd_per_hour:.2f} per hour is {days} days old ({self.date}); '
            'pass --price or --gpus-file'
        )


def load_gpus(path: Path | None = None) -> dict[str, GPU]:
    """Return the GPU models by name, from gpus.yaml and an optional file, whose entries take precedence.

    Raises:
        UserError: A file cannot be read, or is not in the format of gpus.yaml.
    """
    found = _read(SHIPPED)
    return found if path is None else found | _read(path)


def find_gpu(name: str, gpus: dict[str, GPU], *, or_file: bool = True) -> GPU:
    """Return the GPU model with this name; case is ignored, and `_` is equivalent to `-`.

    Args:
        or_file: True if the command has the option --gpus-file; the error message then suggests the option.

    Raises:
        UserError: No GPU has this name; the message suggests the nearest name.
    """
    key = name.lower().replace('_', '-')
    if key not in gpus:
        starts = [known for known in gpus if key and known.startswith(key)]
        hint = f'did you mean {" or ".join(starts)}?' if starts else did_you_mean(key, gpus)
        file = ' (or describe the GPU in a file and pass --gpus-file)' if or_file else ''
        raise UserError(f'--gpu: no GPU is called {name!r}; {hint}{file}')
    return gpus[key]


def _read(path: Path) -> dict[str, GPU]:
    try:
        content = read_yaml(path)
    except UnreadableYAML as error:
        raise UserError(f'--gpus-file: {error}') from error
    gather, gpus = Gatherer(), {}
    for key, entry in content.items():
        values: Any = {**entry, 'name': str(key)} if isinstance(entry, dict) else entry
        gpu = build_dataclass(GPU, values, str(key), gather)
        if not gather.problems:
            _check(gpu, str(key), gather)
        gpus[str(key).lower()] = gpu
    if gather.problems:
        lines = '\n  '.join(str(problem) for problem in gather.problems)
        raise UserError(f'{path}:\n  {lines}')
    return gpus


def _check(gpu: GPU, where: str, gather: Gatherer) -> None:
    docs = field_docs(GPU)
    for name in ('memory_gib', 'gpus_per_node', 'price_usd_per_hour'):
        value = getattr(gpu, name)
        if value is not None and value <= 0:
            gather.problem(join(where, name), f'{value} is not positive; expected: {docs[name]}')
    for precision, peak in gpu.peak_tflops.items():
        if not isinstance(peak, int | float) or peak <= 0:
            message = f'{peak!r} is not a positive number; use the dense peak in TFLOP/s'
            gather.problem(join(where, f'peak_tflops.{precision}'), message)
    if gpu.compute_capability is not None:
        try:
            capability_of(gpu.compute_capability)
        except ValueError as error:
            gather.problem(join(where, 'compute_capability'), str(error))
    if gpu.date is not None:
        try:
            datetime.date.fromisoformat(gpu.date)
        except ValueError:
            gather.problem(join(where, 'date'), f'{gpu.date!r} is not a date; use the format 2026-05-01')


Capability = tuple[int, int]
"""Compute capability of a GPU: major and minor number, such as (9, 0) for H100."""

UP_TO_HOPPER = ('sm_50', 'sm_60', 'sm_70', 'sm_75', 'sm_80', 'sm_86', 'sm_90')
TURING_TO_BLACKWELL = ('sm_75', 'sm_80', 'sm_86', 'sm_90', 'sm_100', 'sm_120')
VOLTA_TO_BLACKWELL = ('sm_70', *TURING_TO_BLACKWELL)
PACKAGE_INDEX_CUDA: tuple[tuple[tuple[float, int], tuple[int, int]], ...] = (
    ((2, 7), (12, 6)),
    ((2, 10), (12, 8)),
    ((math.inf, 0), (13, 0)),
)
"""CUDA versions of torch's wheels on PyPI, as pairs: the last torch release with a CUDA version, and that version."""
NEWER_TORCH = 'use torch 2.9 or newer (make install; docs/install.md)'
OLDER_TORCH = 'use torch 2.7 with CUDA 12.6 (make install STACK=resolvable; docs/install.md)'


def capability_of(text: str) -> Capability:
    """Return a compute capability such as 9.0 or 10.3 as a pair of integers, or raise ValueError."""
    found = re.fullmatch(r'(\d+)\.(\d)', text)
    if found is None:
        raise ValueError(f'{text!r} is not a compute capability; use the format 9.0')
    return int(found[1]), int(found[2])


def has_kernels(capability: Capability, architectures: Iterable[str]) -> bool:
    """Return True if code for any of the architectures runs on a GPU with this compute capability.

    Binary code (sm_XY) runs on GPUs with the same major number and an equal or higher minor number. The driver compiles
    PTX (compute_XY) for every GPU of the same or a newer architecture. Code with the suffix `a` runs only on exactly
    that architecture, and code with the suffix `f` on its family (CUDA C++ Programming Guide, "Compute capability").

    Args:
        architectures: Names as in torch.cuda.get_arch_list(), such as sm_90 or compute_120.
    """
    for name in architectures:
        found = re.fullmatch(r'(sm|compute)_(\d+)(\d)([af]?)', name)
        if found is None:
            continue
        kind, major, minor, suffix = found[1], int(found[2]), int(found[3]), found[4]
        if suffix == 'a':
            runs = capability == (major, minor)
        elif kind == 'sm' or suffix == 'f':
            runs = capability[0] == major and capability[1] >= minor
        else:
            runs = capability >= (major, minor)
        if runs:
            return True
    return False


def installed_torch() -> str | None:
    """Return the version of the installed torch with its CUDA version, such as 2.7.0+cu126; None if not installed."""
    spec = importlib.util.find_spec('torch')
    if spec is None or spec.origin is None:
        return None
    # Read the file: importing torch takes 3 s, and the version in the wheel's metadata omits the CUDA version.
    text = Path(spec.origin).with_name('version.py').read_text()
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.MULTILINE)
    if version is None:
        return None
    release = version[1].split('+')[0]
    return f'{release}+cu{cuda[1].replace(".", "")}' if cuda is not None else release


def architectures_of(version: str) -> tuple[str, ...]:
    """Return the GPU architectures for which a build of torch, such as 2.7.0+cu128 or 2.9, has code.

    A version without `+cu` means the wheel on PyPI, which has CUDA 12.6 up to torch 2.7, 12.8 up to 2.10, then 13.0.

    Raises:
        UserError: The text is not a version of torch.
    """
    found = re.fullmatch(r'(\d+)\.(\d+)[\w.]*(?:\+cu(\d{2})(\d))?(?:\+cpu)?', version)
    if found is None:
        raise UserError(f'{version!r} is not a version of torch; use the format 2.9 or 2.7.0+cu128')
    release = int(found[1]), int(found[2])
    if found[3] is not None:
        cuda = int(found[3]), int(found[4])
    else:
        cuda = next(default for newest, default in PACKAGE_INDEX_CUDA if release <= newest)
    if cuda < (12, 8):
        return UP_TO_HOPPER
    return VOLTA_TO_BLACKWELL if cuda < (13, 0) and release > (2, 7) else TURING_TO_BLACKWELL


def missing_kernels(gpu: GPU, version: str | None = None) -> str | None:
    """Return a message if a build of torch has no kernels for a GPU; None if it has, or if torch or GPU is unknown.

    Args:
        version: Version of torch, such as 2.9 or 2.7.0+cu128; None means the installed torch.
    """
    version = version or installed_torch()
    if version is None or gpu.compute_capability is None:
        return None
    return missing_kernels_message(
        gpu.name, capability_of(str(gpu.compute_capability)), architectures_of(version), version
    )


def missing_kernels_message(gpu: str, capability: Capability, architectures: Iterable[str], version: str) -> str | None:
    """Return a message if a build of torch with code for these architectures does not run on a GPU, else None."""
    names = tuple(architectures)
    if has_kernels(capability, names):
        return None
    have = ', '.join(names) if names else 'no GPU'
    # CUDA 13 does not support GPUs before Turing (7.5).
    way_out = NEWER_TORCH if capability >= (7, 5) else OLDER_TORCH
    return (
        f'torch {version} has no kernels for {gpu} (compute capability {capability[0]}.{capability[1]}; '
        f'it has kernels for {have}); {way_out}'
    )
