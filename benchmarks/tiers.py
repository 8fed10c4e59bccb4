"""Benchmark of checkpoints in the memory of the nodes: what a save costs, and how fast each place brings a run back.

    python benchmarks/tiers.py [FOLDER [millions of parameters]]

Two processes with one training thread each train the model of checkpoint_stall.py under DDP. Each is a node, whose
memory is a folder in /dev/shm; FOLDER (default: a temporary folder) is on a disk that both share. The run saves to both
by turns, in the background, with a copy of each file in the memory of the other node. Then both processes are killed,
and the run starts three times: with the memory of both nodes, after node 0 has lost its memory, and from the disk.
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from checkpoint_stall import Denoiser
from composer import Trainer
from composer.core import Callback, State
from composer.loggers import InMemoryLogger, Logger
from machine import heading
from torch.utils.data import DataLoader, DistributedSampler

from diffusion.algorithms.ema import EMA
from diffusion.checkpointing.checkpointer import Checkpointer
from diffusion.config.checkpointing import TierConfig, TiersConfig

BATCHES = 159
DISK_EVERY = 40
MEMORY_EVERY = 20
"""Batches between two saves. Every second save into memory is skipped, since the one to the disk has the same batch."""
PLACES = ('memory of its own node', 'memory of the other node', 'disk')


class TimedCheckpointer(Checkpointer):
    """Checkpointer that records how long it looks for a checkpoint, verifies it and loads it."""

    seconds = 0.0

    def init(self, state: State, logger: Logger) -> None:
        began = time.perf_counter()
        super().init(state, logger)
        self.seconds += time.perf_counter() - began

    def before_load(self, state: State, logger: Logger) -> None:
        began = time.perf_counter()
        super().before_load(state, logger)
        self.seconds += time.perf_counter() - began


class Killed(Callback):
    """Callback that ends the process after `BATCHES` batches without the saves and cleanup of a normal end."""

    def __init__(self, metrics: InMemoryLogger) -> None:
        self.metrics = metrics

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == BATCHES:
            names = ('stall_seconds', 'save_seconds', 'memory_stall_seconds', 'memory_save_seconds')
            finish({name: [each[1] for each in self.metrics.data[f'checkpoint/{name}']] for name in names})


def finish(result: object) -> None:
    """Print a result on rank 0, and end the process."""
    if os.environ['RANK'] == '0':
        print(json.dumps(result), flush=True)
    os._exit(0)


def work(action: str, root: str, millions: str) -> None:
    """Train until `Killed` ends the process, or only resume (action `resume`); runs in each of two processes."""
    torch.set_num_threads(1)
    model, metrics = Denoiser(int(millions)), InMemoryLogger()
    memory = TierConfig(save_interval=f'{MEMORY_EVERY}ba', folder=os.environ['NODE'], replicate=True)
    saver = TimedCheckpointer(
        Path(root) / 'run',
        save_interval=f'{DISK_EVERY}ba',
        asynchronous=True,
        resume='auto',
        tiers=TiersConfig(memory=memory),
    )
    data = [torch.randn(4, 8, 8) for _ in range(10_000)]
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, sampler=DistributedSampler(data, 2, int(os.environ['RANK']))),  # type: ignore[arg-type]
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4),
        algorithms=[EMA()],
        callbacks=[saver, Killed(metrics)],
        loggers=[metrics],
        max_duration='1ep',
        progress_bar=False,
        device='cpu',
    )
    if action == 'resume':
        finish({'seconds': saver.seconds, 'batch': trainer.state.timestamp.batch.value, 'from': str(saver.resume)})
    trainer.fit()


def start(action: str, root: Path, memory: Path, millions: str) -> dict:
    """Run two processes, and return what rank 0 prints."""
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
    common = {'WORLD_SIZE': '2', 'LOCAL_WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}
    common |= {'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}
    processes = []
    for rank in range(2):
        (memory / f'node{rank}').mkdir(exist_ok=True)
        own = {'RANK': str(rank), 'LOCAL_RANK': str(rank), 'NODE': str(memory / f'node{rank}')}
        command = [sys.executable, __file__, action, str(root), millions]
        environment = {**os.environ, **common, **own}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [each.communicate()[0] for each in processes]
    if any(each.returncode for each in processes):
        sys.exit(f'{action} has failed')
    return json.loads(outputs[0].splitlines()[-1])


def forget(folder: Path) -> None:
    """Remove the content of a folder's files from the page cache, so that they are read from the disk."""
    for file in folder.rglob('*'):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def main(folder: str = '', millions: str = '100') -> None:
    """Run the benchmark and print its tables."""
    with (
        tempfile.TemporaryDirectory(dir=folder or None) as name,
        tempfile.TemporaryDirectory(dir='/dev/shm') as memory_name,
    ):
        root, memory = Path(name), Path(memory_name)
        saves = start('train', root, memory, millions)
        size = sum(file.stat().st_size for file in (root / 'run').glob('ba*/*')) / 1e9
        size /= len([*(root / 'run').glob('ba*')])
        resumed = {}
        for number, place in enumerate(PLACES):
            for node in range(number):
                shutil.rmtree(memory / f'node{node}')
            forget(root)
            resumed[place] = start('resume', root, memory, millions)
            expected = str(memory if place != 'disk' else root)
            assert resumed[place]['from'].startswith(expected), resumed[place]
    print(f'{heading()}, load {os.getloadavg()[1]:.1f}, PyTorch {torch.__version__}, two processes of one thread')
    print(f'{size:.2f} GB per checkpoint')
    print('\n| | disk | memory, with a copy on the other node |\n|---|---|---|')
    for text, name in (('stall of a save, s', 'stall_seconds'), ('until the checkpoint exists, s', 'save_seconds')):
        medians = [statistics.median(saves[f'{prefix}{name}'][1:]) for prefix in ('', 'memory_')]
        print(f'| {text} | {medians[0]:.2f} | {medians[1]:.2f} |')
    print('\n| resumed from | batch | found, verified and loaded, s |\n|---|---|---|')
    for place, found in resumed.items():
        print(f'| {place} | {found["batch"]} of {BATCHES} | {found["seconds"]:.2f} |')


if __name__ == '__main__':
    if sys.argv[1:2] in (['train'], ['resume']):
        work(*sys.argv[1:])
    else:
        main(*sys.argv[1:])
