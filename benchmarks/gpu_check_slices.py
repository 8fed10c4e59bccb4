"""Slices of `gpu_check.py`: tests on GPUs, rows of the step benchmark, and short training runs. Imports no PyTorch."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slice_runner import DATA, Slice
from step_settings import PARTS, ROWS

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 530.0
"""Time limit of a slice: less than 9 minutes."""
TEST_FILES = (
    'tests/checkpointing/test_saves_on_devices.py',
    'tests/data/test_copies_on_devices.py',
    'tests/launch/test_flight_recorder.py',
    'tests/models/test_randomness.py',
    'tests/planning/test_memory.py',
    'tests/profiling/test_syncs_on_devices.py',
    'tests/training/test_block_graphs.py',
    'tests/training/test_speed_on_devices.py',
    'tests/training/test_strategies_on_devices.py',
)
"""Files with tests that are marked `gpu`, of which most are also marked `cpu_form`."""
PIXELS = (256, 512)
STEP = str(ROOT / 'benchmarks' / 'step.py')
STRATEGIES = ('ddp', 'fsdp2')
OFFLINE = {'HF_HUB_OFFLINE': '1', 'HF_HUB_DISABLE_TELEMETRY': '1', 'DO_NOT_TRACK': '1', 'PYTHONUNBUFFERED': '1'}


@dataclass(frozen=True)
class Entry:
    """Name, title, kind of figures, and arguments of Python of a slice; see `slice_runner.Slice`."""

    name: str
    title: str
    kind: str
    command: Sequence[str]


def make_slices(folder: Path, *, memory_gib: Sequence[float], limit_seconds: float = LIMIT_SECONDS) -> list[Slice]:
    """Return the slices for a machine with GPUs of these sizes, the most telling ones first.

    Without GPUs they are small, and take 2 minutes on two cores: they show only that everything runs.

    Args:
        folder: Folder of the results, where training runs keep their images.
        memory_gib: Memory of each GPU; empty without GPUs.
        limit_seconds: Time limit of each slice.
    """
    on_gpu = bool(memory_gib)
    found = [*test_slices(on_gpu), *step_slices(on_gpu), *training_slices(folder, memory_gib), *absence_slices(on_gpu)]
    environment = OFFLINE | {'PYTHONPATH': str(ROOT)} | ({} if on_gpu else {'CUDA_VISIBLE_DEVICES': ''})
    return [
        Slice(each.name, each.title, [sys.executable, *each.command], each.kind, limit_seconds, environment)
        for each in found
    ]


def test_slices(on_gpu: bool) -> list[Entry]:
    """Return one slice per file of tests on a GPU, and one for all of them on a CPU, since each start takes 15 s."""
    # With other versions of PyTorch there are other warnings, which must not fail tests here.
    pytest = [
        '-m',
        'pytest',
        '-q',
        '-p',
        'no:cacheprovider',
        '-rs',
        '--timeout=300',
        '-W',
        'default',
        f'--junitxml={DATA}',
    ]
    if not on_gpu:
        files = [str(ROOT / file) for file in TEST_FILES]
        return [Entry('tests', 'tests in their CPU form', 'tests', [*pytest, '-m', 'cpu_form and not slow', *files])]
    return [
        Entry(f'tests-{_stem(file)}', f'tests {_stem(file)}', 'tests', [*pytest, '-m', 'gpu', str(ROOT / file)])
        for file in TEST_FILES
    ]


def step_slices(on_gpu: bool) -> list[Entry]:
    """Return the step benchmark's slices: one per row on a GPU, where compiling takes minutes, and one on a CPU."""
    if not on_gpu:
        small = ['--rows', 'plain', 'fused_optimizer', '--absent', 'fused_optimizer']
        size = ['--steps', '1', '--warmup', '1', '--millions', '1', '--batch', '1', '--json', DATA]
        return [Entry('step', 'step benchmark', 'step', [STEP, *small, *size])]
    return [
        Entry(f'step-{pixels}-{row}', f'step at {pixels} px, {row}', 'step', _row(pixels, '--rows', row))
        for pixels in PIXELS
        for row in ROWS
    ]


def absence_slices(on_gpu: bool) -> list[Entry]:
    """Return the slices of the step benchmark with all settings but one; none on a CPU."""
    return [
        Entry(f'step-{pixels}-no-{part}', f'step at {pixels} px, all but {part}', 'step', _absent(pixels, part))
        for pixels in (PIXELS if on_gpu else ())
        for part in PARTS
    ]


def training_slices(folder: Path, memory_gib: Sequence[float]) -> list[Entry]:
    """Return one slice per parallelism strategy; on a CPU, that of ddp."""
    script = str(ROOT / 'benchmarks' / 'gpu_check_training.py')
    work = str(folder / 'training')
    gpus = len(memory_gib)
    size = ['--gpus', str(gpus), '--memory-gib', f'{min(memory_gib):.1f}'] if gpus else []
    return [
        Entry(
            f'training-{strategy}',
            f'training with {strategy} on {gpus or "no"} GPU{"" if gpus == 1 else "s"}',
            'training',
            [script, work, DATA, '--strategy', strategy, *size],
        )
        for strategy in (STRATEGIES if gpus else STRATEGIES[:1])
    ]


def _row(pixels: int, *words: str) -> list[str]:
    return [STEP, '--pixels', str(pixels), *words, '--json', DATA]


def _absent(pixels: int, part: str) -> list[str]:
    return _row(pixels, '--rows', '--absent', part)


def _stem(file: str) -> str:
    return Path(file).stem.removeprefix('test_')
