"""Benchmark of the quickstart's training beside busy processes, with libgomp's default spin and with a short one.

    python benchmarks/busy_machine.py [--batches N] [--rounds N] [--spins N ...] [--data DIR]

Each row is a setting of OpenMP, and a process that trains yamls/quickstart.yaml with it, since libgomp reads its
variables when it is loaded. The processes train in turns, a few batches each, alone, beside one and beside two Python
loops of normal priority, so that other load on the machine slows all of them. The order is reversed in every second
round. The figures are medians of wall seconds per batch, over the second half of each turn's batches, and in
parentheses the lowest and the highest median of a turn. Ratios are to the first row alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from machine import heading

from diffusion.runs.openmp_spin import POLICY_VARIABLE, SPIN_VARIABLE

ROOT = Path(__file__).parents[1]
RECIPE = str(ROOT / 'yamls' / 'quickstart.yaml')
THREADS_VARIABLE = 'OMP_NUM_THREADS'
DEFAULT_SPIN = '300000'
"""libgomp's own GOMP_SPINCOUNT while OMP_WAIT_POLICY is unset, as `OMP_DISPLAY_ENV=VERBOSE` prints it."""
BUSY_COUNTS = (0, 1, 2)
WARMUP = 10
"""Batches before the measured ones."""
BUSY_LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""
"""Program that computes until it is killed or its parent has ended."""

Turns = dict[int, list[list[float]]]
"""Seconds of the measured batches of each turn, by the number of busy processes."""


class Training:
    """Process that trains the quickstart with a setting of OpenMP, a number of batches at a time."""

    def __init__(self, folder: str, name: str, setting: Mapping[str, str]) -> None:
        command = [sys.executable, __file__, 'train', name]
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment(setting), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.spin = str(self._answer())

    def train(self, batches: int) -> list[float]:
        """Train some batches, and return the seconds of each."""
        assert self._process.stdin is not None
        print(batches, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process, which ends when its input does."""
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('answer '):
                return json.loads(line.removeprefix('answer '))
        raise SystemExit(f'the training ended with {self._process.wait()}; see above')


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--batches', type=int, default=12, help='per turn (default: %(default)s)')
    parser.add_argument('--rounds', type=int, default=5, help='turns of each kind (default: %(default)s)')
    parser.add_argument('--spins', nargs='*', default=[], metavar='N', help='further values of GOMP_SPINCOUNT')
    parser.add_argument('--data', metavar='DIR', help="folder with the quickstart's data (default: it is prepared)")
    parser.add_argument('--images', type=int, default=200, help='number of images to prepare (default: %(default)s)')
    args = parser.parse_args()
    settings = {
        "before: libgomp's default": {SPIN_VARIABLE: DEFAULT_SPIN},
        'after: set by this package': {},
        'after, with one thread': {THREADS_VARIABLE: '1'},
        **{f'{SPIN_VARIABLE}={spin}': {SPIN_VARIABLE: spin} for spin in args.spins},
    }
    turns: dict[str, Turns] = {name: {busy: [] for busy in BUSY_COUNTS} for name in settings}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if args.data is None:
            prepare(folder, args.images)
        else:
            (Path(folder) / 'data').symlink_to(Path(args.data).resolve())
        trainings = {}
        for number, (name, setting) in enumerate(settings.items()):
            trainings[name] = Training(folder, f'run{number}', setting)
            stack.callback(trainings[name].close)
            trainings[name].train(WARMUP)
        for number in range(args.rounds):
            step = -1 if number % 2 else 1
            for busy in BUSY_COUNTS[::step]:
                with busy_processes(busy):
                    for name in list(settings)[::step]:
                        turns[name][busy].append(trainings[name].train(args.batches)[args.batches // 2 :])
                        seconds = statistics.median(turns[name][busy][-1])
                        print(f'{name}, beside {busy}: {seconds:.3f} s per batch', file=sys.stderr, flush=True)
        spins = {name: training.spin for name, training in trainings.items()}
    print(f'{heading()}, torch {version("torch")}; {args.rounds} turns of {args.batches} batches\n')
    print_table(turns, spins)


def print_table(turns: Mapping[str, Turns], spins: Mapping[str, str]) -> None:
    """Print a row for each setting."""
    print('| setting | GOMP_SPINCOUNT | alone, s | ratio | beside one, s | ratio | beside two, s | ratio |')
    print('|---|---|---|---|---|---|---|---|')
    alone = statistics.median(chain(*next(iter(turns.values()))[0]))
    for name, found in turns.items():
        cells = [name, spins[name]]
        for measured in found.values():
            seconds, medians = statistics.median(chain(*measured)), [statistics.median(turn) for turn in measured]
            cells += [f'{seconds:.3f} ({min(medians):.3f} to {max(medians):.3f})', f'{seconds / alone:.2f}']
        print(f'| {" | ".join(cells)} |')


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run a number of processes that compute without an end."""
    processes = [subprocess.Popen([sys.executable, '-c', BUSY_LOOP, str(os.getpid())]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def prepare(folder: str, images: int) -> None:
    """Prepare the quickstart's images and latents in a folder."""
    size = ['--sizes', '64', '--limit', str(images)]
    commands: Sequence[list[str]] = [
        ['-m', 'diffusion', 'prepare', 'openmoji', '--out', 'data/openmoji', *size],
        [str(ROOT / 'run.py'), RECIPE, 'task=precompute'],
    ]
    for words in commands:
        subprocess.run([sys.executable, *words], cwd=folder, env=environment({}), check=True, stdout=sys.stderr)


def environment(setting: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process on the CPU, with only these variables of OpenMP."""
    removed = (SPIN_VARIABLE, POLICY_VARIABLE, THREADS_VARIABLE)
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    return kept | {'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': str(ROOT), **setting}


def train(name: str) -> None:
    """Train in this process: for each number on stdin train as many batches, and print their seconds."""
    from composer.core import Callback, State
    from composer.loggers import Logger

    from diffusion.config.load import load
    from diffusion.training.train import build_trainer

    class Turn(Callback):
        """Callback that waits for the next number after the batches of a turn."""

        def __init__(self) -> None:
            self._left, self._since, self._seconds = 0, 0.0, []

        def fit_start(self, state: State, logger: Logger) -> None:
            answer(os.environ[SPIN_VARIABLE])
            self._begin()

        def batch_end(self, state: State, logger: Logger) -> None:
            now = time.perf_counter()
            self._seconds.append(now - self._since)
            self._since = now
            if len(self._seconds) == self._left:
                answer(self._seconds)
                self._begin()

        def _begin(self) -> None:
            line = sys.stdin.readline()
            if not line:
                sys.exit()  # not killed: Streaming would leave shared memory behind
            self._left, self._seconds = int(line), []
            self._since = time.perf_counter()

    forever = ['trainer.max_duration=1000000ba', 'trainer.save_interval=1000000ba', 'trainer.eval_interval=1000000ba']
    trainer = build_trainer(load(RECIPE, [f'name={name}', *forever, 'callbacks.image_grid=false']))
    trainer.state.callbacks.append(Turn())
    trainer.fit()


def answer(value: object) -> None:
    """Print a value for the parent."""
    print(f'answer {json.dumps(value)}', flush=True)


if __name__ == '__main__':
    if sys.argv[1:2] == ['train']:
        train(sys.argv[2])
    else:
        main()
