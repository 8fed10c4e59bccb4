"""Benchmark of recovery time: seconds without training after a killed process, a stopped node and a hang.

    python benchmarks/recovery.py [batches between two faults [killed processes]]

Trains the U-Net of benchmarks/first_quickstart.yaml on OpenMoji images at 64 px under `diffusion launch`, as two nodes
with one process each: first as it is, then with `restart.standby`. For each fault it prints the seconds until the next
batch, split into parts: the median of several killed processes, and the longest. Then come the ratio of the two kinds
of restart, the speed of training while standby processes import, and `diffusion status` of both runs.
"""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from machine import heading

from diffusion.launch.standby.in_place import STANDBY
from diffusion.loggers.metrics_file import TRAIN_LOSS, read_metrics
from diffusion.runs import attempts

ROOT = Path(__file__).parents[1]
HANG_SECONDS = 30
SAVE_EVERY = 10
"""Batches from one checkpoint to the next."""
OVERRIDES = {
    'dataset.name': 'image_text',
    'streams.openmoji.local': 'data/64px',
    'eval_streams.openmoji.local': 'data/64px',
    'scheduler': None,
    'global_batch': 16,
    'trainer.max_duration': '100000ba',
    'trainer.eval_interval': '1000000ba',
    'trainer.save_interval': f'{SAVE_EVERY}ba',
}
KILLED = 'process killed'
Parts = tuple[float, float, float]
"""Seconds from a fault until all processes have ended, from then until the next attempt starts, and from its start to
its first batch."""


def main(batches: str = '25', kills: str = '3') -> None:
    """Run the benchmark and print its tables."""
    print(heading())
    with tempfile.TemporaryDirectory() as name:
        folder, every, count = Path(name), int(batches), int(kills)
        (folder / 'run.py').symlink_to(ROOT / 'run.py')
        code = 'import sys; from diffusion.cli import main; sys.exit(main(sys.argv[1:]))'
        prepare = [sys.executable, '-c', code, 'prepare', 'openmoji', '--out', 'data', '--limit', '200']
        subprocess.run([*prepare, '--sizes', '64'], cwd=folder, env=environment(), check=True, stdout=sys.stderr)
        command = [sys.executable, '-c', code, 'launch']
        with Job(folder, command, 'restarted', standby=False) as job:
            rows = {KILLED: [job.disturb(kill_rank, every) for _ in range(count)]}
            rows['node stopped by SIGTERM'] = [job.disturb(stop_node, every)]
            rows[f'process hangs (timeout {HANG_SECONDS} s)'] = [job.disturb(hang_rank, every)]
        with Job(folder, command, 'standby', standby=True) as job:
            warm, speeds = [], []
            for _ in range(count):
                speeds.append(job.speeds_with_and_without_imports())
                warm.append(job.disturb(kill_rank, 1))
            rows[f'{KILLED}, with standby processes'] = warm
        reports = [
            '\n'.join(attempts.attempts_table(attempts.read_attempts(folder / 'runs' / name)))
            for name in ('restarted', 'standby')
        ]
    print_table(rows)
    print()
    ratio = statistics.median(map(sum, warm)) / statistics.median(map(sum, rows[KILLED]))
    print(f'with standby processes, a restart after a killed process takes {ratio:.2f} of the time')
    during, after = (statistics.median(found) for found in zip(*speeds, strict=True))
    print(
        f'batches/s while standby processes import: {during:.2f}, afterwards: {after:.2f}, ratio {during / after:.2f}'
    )
    print('', *reports, sep='\n')


def print_table(rows: dict[str, list[Parts]]) -> None:
    """Print the median of the seconds of each fault, and the longest total."""
    print()
    print(
        '| fault | times | until all processes ended, s | until the next start, s | until its first batch, s '
        '| total, s | longest total, s |'
    )
    print('|---|---|---|---|---|---|---|')
    for fault, found in rows.items():
        middle = sorted(found, key=sum)[len(found) // 2]
        cells = ' | '.join(f'{part:.1f}' for part in (*middle, sum(middle), max(map(sum, found))))
        print(f'| {fault} | {len(found)} | {cells} |')


class Job:
    """A running job of two nodes; a context manager that stops it in the end.

    Args:
        folder: Working folder.
        launch: Command of `diffusion launch`.
        name: Name of the run.
        standby: Value of `restart.standby`.
    """

    def __init__(self, folder: Path, launch: Sequence[str], name: str, *, standby: bool) -> None:
        self.folder, self.run = folder, folder / 'runs' / name
        spec = {'name': name, 'backend': 'local', 'recipe': str(ROOT / 'benchmarks' / 'first_quickstart.yaml')}
        spec |= {'overrides': {**OVERRIDES, 'name': name}, 'workdir': str(folder), 'restart': {'standby': standby}}
        spec |= {'nodes': 2, 'gpus_per_node': 1, 'preflight': 'none', 'hang_seconds': HANG_SECONDS}
        (folder / f'{name}.yaml').write_text(yaml.safe_dump(spec))
        self._log = folder / f'{name}.log'
        with self._log.open('wb') as log:
            command = [*launch, f'{name}.yaml']
            self._process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=log, stderr=log)
        self._standbys_used = 0

    def __enter__(self) -> 'Job':
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        print(self._log.read_text(), file=sys.stderr)

    def batches(self) -> int:
        """Return the number of batches trained."""
        metrics = self.run / 'metrics.jsonl'
        return max(read_metrics(metrics).get(TRAIN_LOSS, {0: 0.0})) if metrics.exists() else 0

    def disturb(self, inject_fault: Callable[[Path], None], after: int) -> Parts:
        """Inject a fault after at least `after` more batches; return the seconds until the next attempt trains."""
        # Wait until the middle between two saves, since the hang detection waits longer during a save.
        batch = self.batches() + after
        batch += (SAVE_EVERY // 2 - batch) % SAVE_EVERY
        self._wait(lambda: self.batches() >= batch)
        before, fault_time = len(attempts.read_attempts(self.run)), time.time()
        inject_fault(self.folder)
        self._wait(lambda: len(found := attempts.read_attempts(self.run)) > before and found[before].first is not None)
        attempt, following = attempts.read_attempts(self.run)[before - 1 : before + 1]
        return attempt.end - fault_time, following.begin - attempt.end, following.first_at - following.begin

    def speeds_with_and_without_imports(self) -> tuple[float, float]:
        """Wait for the standby processes; return batches/s while they import, and over the same time afterwards."""
        self._wait(lambda: bool(processes(self.folder, STANDBY)))
        begin, first = time.monotonic(), self.batches()
        self._standbys_used += 2
        self._wait(lambda: self._log.read_text().count('standby processes: 1 ready') >= self._standbys_used)
        ready, second = time.monotonic(), self.batches()
        self._wait(lambda: time.monotonic() - ready >= ready - begin)
        end, third = time.monotonic(), self.batches()
        return (second - first) / (ready - begin), (third - second) / (end - ready)

    def _wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._process.poll() is not None:
                raise SystemExit(f'{self.run}: ended early; see above')
            time.sleep(0.02)


def kill_rank(folder: Path) -> None:
    """Kill the second process of a run."""
    os.kill(processes(folder, 'run.py')[1], signal.SIGKILL)


def stop_node(folder: Path) -> None:
    """Send SIGTERM to the second node, as a scheduler does to stop it."""
    os.kill(processes(folder, 'diffusion.launch.node')[1], signal.SIGTERM)


def hang_rank(folder: Path) -> None:
    """Suspend the second process, so that it hangs."""
    os.kill(processes(folder, 'run.py')[1], signal.SIGSTOP)


def processes(folder: Path, word: str) -> list[int]:
    """Return the IDs of the processes in a folder whose second or third command-line word is this, sorted."""
    found = []
    for entry in Path('/proc').glob('[0-9]*'):
        with contextlib.suppress(OSError):  # a process may end while it is inspected
            words = (entry / 'cmdline').read_bytes().decode(errors='replace').split('\0')
            if word in words[1:3] and (entry / 'cwd').resolve() == folder.resolve():
                found.append(int(entry.name))
    return sorted(found)


def environment() -> dict[str, str]:
    """Return the environment of runs on CPUs without network."""
    return os.environ | {'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': str(ROOT)}


if __name__ == '__main__':
    main(*sys.argv[1:])
