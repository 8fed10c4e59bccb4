"""Peak FLOP/s, memory and hourly price of GPUs, read from gpus.yaml and optionally from the user's file."""

import datetime
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.config.schema import Gatherer, build_dataclass, did_you_mean, field_docs, join
from diffusion.config.yaml_files import UnreadableYAML, read_yaml
from diffusion.errors import UserError

SHIPPED = Path(__file__).with_name('gpus.yaml')
STALE_DAYS = 180
"""Age in days from which a price causes a warning."""


@dataclass(frozen=True)
class GPU:
    """A GPU model: peak FLOP/s, memory, bandwidths and price."""

    peak_tflops: dict[str, float]
    """Dense peak in 10**12 FLOP/s, by precision: bf16, fp16, fp32."""
    memory_gib: float
    """Memory as reported by the driver, in GiB."""
    price_usd_per_hour: float | None = None
    """Price in US dollars per GPU-hour; null if unknown, which requires --price."""
    date: str | None = None
    """Date of the price, such as 2026-05-01."""
    source: str = ''
    """Source of the price."""
    memory_gb_per_second: float | None = None
    """Memory bandwidth in GB/s."""
    nvlink_gb_per_second: float = 0.0
    """NVLink bandwidth in GB/s, both directions together; 0 if it has no NVLink."""
    compute_capability: str | None = None
    """Compute capability, such as '9.0', by which torch selects kernels; null skips the check that torch has them."""
    gpus_per_node: int = 8
    """Number of GPUs per node."""
    name: str = ''
    """Name on the command line."""

    def peak_flops(self, precision: str) -> float:
        """Return the peak FLOP/s of the GPU in a precision (bf16, fp16 or fp32), without sparsity.

        Raises:
            UserError: The GPU does not support this precision.
        """
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
    """Load the GPU models of gpus.yaml and of an optional file, whose entries take precedence; return them by name.

    Raises:
        UserError: A file cannot be read, or does not have the format of gpus.yaml.
    """
    found = _read(SHIPPED)
    return found if path is None else found | _read(path)


def find_gpu(name: str, gpus: dict[str, GPU], *, or_file: bool = True) -> GPU:
    """Return the GPU model with this name; case does not matter, and `_` equals `-`.

    Args:
        name: Name of the GPU, such as a100-80gb.
        or_file: True if the command has the option --gpus-file, which the error then suggests.

    Raises:
        UserError: No GPU has this name; the message suggests the nearest.
    """
    key = name.lower().replace('_', '-')
    if key not in gpus:
        starts = [known for known in gpus if key and known.startswith(key)]
        hint = f'did you mean {" or ".join(starts)}?' if starts else did_you_mean(key, gpus)
        file = ' (or describe the GPU in a file and pass --gpus-file)' if or_file else ''
        raise UserError(f'--gpu: no GPU is called {name!r}; {hint}{file}')
    return gpus[key]


def _read(path: Path) -> dict[str, GPU]:
    """Return the GPU models in a YAML file, by lowercase name."""
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
    """Report the invalid numbers and dates of a GPU model in a file."""
    docs = field_docs(GPU)
    for name in ('memory_gib', 'gpus_per_node', 'price_usd_per_hour'):
        value = getattr(gpu, name)
        if value is not None and value <= 0:
            gather.problem(join(where, name), f'{value} is not positive; expected: {docs[name]}')
    for precision, peak in gpu.peak_tflops.items():
        if not isinstance(peak, int | float) or peak <= 0:
            gather.problem(
                join(where, f'peak_tflops.{precision}'),
                f'{peak!r} is not a positive number; use the dense peak in TFLOP/s',
            )
    if gpu.compute_capability is not None and re.fullmatch(r'\d+\.\d', gpu.compute_capability) is None:
        gather.problem(
            join(where, 'compute_capability'),
            f'{gpu.compute_capability!r} is not a compute capability; use the format 9.0',
        )
    if gpu.date is not None:
        try:
            datetime.date.fromisoformat(gpu.date)
        except ValueError:
            gather.problem(join(where, 'date'), f'{gpu.date!r} is not a date; use the format 2026-05-01')
