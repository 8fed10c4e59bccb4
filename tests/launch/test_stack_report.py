"""Name the rank that hangs, from the stacks and heartbeats of all ranks."""

import dataclasses
from pathlib import Path

from diffusion.launch.stack_report import RankReport, describe_hang, find_place, main_thread, suspects
from tests.golden import check_golden

SITE = '/opt/venv/lib/python3.11/site-packages'
ALL_REDUCE = f"""\
Thread 0x00007f4617fff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007ffa27fdeb80 (most recent call first):
  File "{SITE}/torch/distributed/distributed_c10d.py", line 2815 in all_reduce
  File "{SITE}/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "{SITE}/composer/utils/dist.py", line 338 in all_reduce
  File "{SITE}/diffusion/callbacks/preemption.py", line 127 in highest_signal
  File "{SITE}/composer/trainer/trainer.py", line 2515 in _train_loop
  File "/workspace/run.py", line 8 in <module>
"""
READING = f"""\
Current thread 0x00007ffa27fdeb80 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 415 in select
  File "{SITE}/torch/utils/data/dataloader.py", line 1284 in _try_get_data
  File "{SITE}/torch/utils/data/dataloader.py", line 733 in __next__
  File "{SITE}/composer/trainer/trainer.py", line 3620 in _iter_dataloader
  File "/workspace/run.py", line 8 in <module>
"""


def report(rank: int, text: str = ALL_REDUCE, *, batch: int = 4711, problem: str = '') -> RankReport:
    place = find_place(main_thread('' if problem else text))
    return RankReport(rank, rank // 8, f'gpu-{rank // 8}', batch, 900.0, place.label, place.waits, problem)


OTHER = ALL_REDUCE.replace('all_reduce', 'barrier').replace('highest_signal', 'save')
PLACES = {
    'collective': 'torch/distributed/distributed_c10d.py:barrier',
    'private collective': 'torch/distributed/distributed_c10d.py:_object_to_tensor diffusion/training/train.py:fit',
    'nested collective': 'torch/distributed/distributed_c10d.py:all_gather torch/distributed/c10d_logger.py:wrapper '
    'torch/distributed/distributed_c10d.py:all_gather_object diffusion/checkpointing/checkpointer.py:all',
    'utilities of Composer': 'torch/distributed/distributed_c10d.py:all_reduce composer/utils/dist.py:all_reduce '
    'composer/utils/collect_utils.py:map_collection composer/trainer/trainer.py:_train_loop '
    'diffusion/training/train.py:fit',
    'backward pass': 'torch/autograd/graph.py:_engine_run_backward',
    'function of autograd': 'torch/autograd/graph.py:backward',
    'GPU': 'torch/cuda/streams.py:synchronize diffusion/runs/end.py:wait',
    'all GPUs': 'torch/cuda/__init__.py:synchronize',
    'stream': 'torch/cuda/streams.py:wait_stream diffusion/runs/end.py:wait',
    'loader': 'diffusion/data/transforms.py:decode torch/utils/data/dataloader.py:_next_data',
    'start of the loader': 'torch/utils/data/dataloader.py:_start diffusion/data/transforms.py:decode',
    'own code': 'torch/serialization.py:save diffusion/checkpointing/checkpointer.py:write',
    'library': 'torch/nn/modules/linear.py:forward',
}
"""Calls of a main thread, innermost first."""
CASES: dict[str, tuple[list[RankReport], list[int]]] = {
    'one of 128 ranks reads data': ([report(rank, READING if rank == 37 else ALL_REDUCE) for rank in range(128)], []),
    'no answer counts more': (
        [report(0), report(1), report(2, READING), report(3, batch=4710), report(9, problem='is stopped (SIGSTOP)')],
        [],
    ),
    'two ranks without an answer': ([report(rank, problem='does not respond') for rank in (3, 4)] + [report(5)], []),
    'an older heartbeat counts more': ([report(0, READING), report(1), report(2, batch=4710), report(3)], []),
    'half of the ranks are late': ([report(rank, batch=4710 + rank // 2) for rank in range(4)], []),
    'one rank is ahead of the others': (
        [report(0, batch=4712), *(report(rank, READING if rank == 3 else ALL_REDUCE) for rank in range(1, 4))],
        [],
    ),
    **{
        f'a node reads data, and {count} are missing': (
            [report(rank, READING if rank // 8 == 4 else ALL_REDUCE) for rank in range(120)],
            [*range(count)],
        )
        for count in (1, 4, 5)
    },
    'ranks of five nodes read data': (
        [report(each, READING if each % 8 in (1, 2, 5) else OTHER) for each in range(40)],
        [],
    ),
    'all wait': ([report(rank, batch=0) for rank in range(16)], []),
    'all read the first batch': ([report(rank, READING, batch=-1) for rank in range(3)], []),
    'two unknown calls': ([report(0, ''), report(1, ''), report(2)], []),
    'one rank': ([report(0)], []),
    'no ranks': ([], [2]),
    'a rank has ended': (
        [*map(report, range(3)), dataclasses.replace(report(3), place='', problem='has ended with 1', ended=True)],
        [],
    ),
    'one rank in another collective': ([report(rank, OTHER if rank == 2 else ALL_REDUCE) for rank in range(4)], []),
    'halves in two collectives': ([report(rank, OTHER if rank % 2 else ALL_REDUCE) for rank in range(4)], []),
}
"""Reports of ranks, and the numbers of the nodes without stacks."""


def test_hanging_ranks_are_described_as_reviewed():
    lines = []
    for name, text in PLACES.items():
        calls = [frame.split(':') for frame in text.split()]
        frames = [f'  File "{SITE}/{file}", line 7 in {function}' for file, function in calls]
        stack = main_thread('\n'.join(['Current thread 0x1 (most recent call first):', *frames]))
        lines.append(f'{name}: {find_place(stack)}')
    for name, (reports, missing) in CASES.items():
        named = [each.rank for each in suspects(reports)]
        lines.append(f'\n{name}: {named}\n{describe_hang(reports, missing)}')
    check_golden(Path(__file__).parent / 'golden' / 'hangs', {'hangs.txt': '\n'.join(lines) + '\n'})
