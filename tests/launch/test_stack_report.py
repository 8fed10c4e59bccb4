"""Name the rank that hangs, from the stacks and heartbeats of all ranks."""

import dataclasses

import pytest

from diffusion.launch.stack_report import RankReport, describe_hang, find_place, main_thread, suspects

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


GATHER = (
    'torch/distributed/distributed_c10d.py:all_gather torch/distributed/c10d_logger.py:wrapper '
    'torch/distributed/distributed_c10d.py:all_gather_object'
)
REDUCE = (
    'torch/distributed/distributed_c10d.py:all_reduce composer/utils/dist.py:all_reduce '
    'composer/utils/collect_utils.py:map_collection composer/trainer/trainer.py:_train_loop'
)
NEXT = 'torch/utils/data/dataloader.py:_next_data torch/utils/data/dataloader.py:__next__'


@pytest.mark.parametrize(
    ('frames', 'label', 'waits'),
    [
        ('torch/distributed/distributed_c10d.py:barrier', 'barrier', True),
        (f'{GATHER} diffusion/checkpointing/checkpointer.py:all', 'all_gather_object (all, checkpointer.py)', True),
        (f'{REDUCE} diffusion/training/train.py:fit', 'all_reduce (_train_loop, trainer.py)', True),
        ('torch/autograd/graph.py:_engine_run_backward', 'the backward pass', True),
        ('torch/autograd/graph.py:backward', 'backward (graph.py)', False),
        ('torch/cuda/streams.py:synchronize diffusion/runs/end.py:wait', 'cuda.synchronize (wait, end.py)', True),
        (f'diffusion/data/transforms.py:decode {NEXT}', 'DataLoader.next (decode, transforms.py)', False),
        ('torch/serialization.py:save diffusion/checkpointing/checkpointer.py:write', 'write (checkpointer.py)', False),
        ('torch/nn/modules/linear.py:forward', 'forward (linear.py)', False),
    ],
)
def test_place_is_the_collective_loader_or_own_function(frames, label, waits):
    calls = [frame.split(':') for frame in frames.split()]
    lines = [f'  File "{SITE}/{file}", line 7 in {function}' for file, function in calls]
    stack = main_thread('\n'.join(['Current thread 0x1 (most recent call first):', *lines]))
    assert find_place(stack) == (label, waits)


def test_one_of_128_ranks_in_the_data_loader_is_named():
    reports = [report(rank, READING if rank == 37 else ALL_REDUCE) for rank in range(128)]
    assert describe_hang(reports) == (
        '127 ranks wait in all_reduce (highest_signal, preemption.py) of batch 4711; '
        'rank 37 on node 4 (gpu-4) is in DataLoader.next'
    )
    assert [each.rank for each in suspects(reports)] == [37]


def test_rank_without_an_answer_counts_more_than_other_signs():
    reports = [report(rank) for rank in range(128)]
    reports[5] = report(5, READING)
    reports[6] = report(6, batch=4710)
    reports[99] = report(99, problem='is stopped (SIGSTOP or a debugger)')
    assert [each.rank for each in suspects(reports)] == [99]
    assert 'rank 99 on node 12 (gpu-12) is stopped (SIGSTOP or a debugger); rank 5' in describe_hang(reports)


def test_rank_with_an_older_heartbeat_counts_more_than_its_stack():
    reports = [report(0, READING), report(1), report(2, batch=4710), report(3)]
    assert [each.rank for each in suspects(reports)] == [2]
    reports = [report(rank, batch=4710 + rank // 2) for rank in range(4)]
    assert '; ranks 0-1 on node 0 (gpu-0) wait in all_reduce (highest_signal' in describe_hang(reports)
    # One rank that is ahead does not make all others late.
    reports = [report(0, batch=4712), *(report(rank, READING if rank == 3 else ALL_REDUCE) for rank in range(1, 4))]
    assert [each.rank for each in suspects(reports)] == [3]


def test_whole_node_is_named_as_a_range_and_a_missing_node_by_its_number():
    reports = [report(rank, READING if rank // 8 == 4 else ALL_REDUCE) for rank in range(120)]
    for count, named in ((1, 'node 0'), (4, 'nodes 0, 1, 2, 3'), (5, 'nodes 0, 1, 2, 3 ...')):
        sentence = describe_hang(reports, range(count))
        assert f'ranks 32-39 on node 4 (gpu-4) are in DataLoader.next; {named} wrote no stacks' in sentence


def test_no_rank_is_blamed_if_all_wait_in_the_same_collective():
    reports = [report(rank, batch=0) for rank in range(16)]
    assert suspects(reports) == suspects([report(rank, READING) for rank in range(3)]) == suspects([]) == []
    assert describe_hang(reports).startswith('all 16 ranks wait in all_reduce')
    assert describe_hang(reports).endswith(' of batch 0; no rank differs, so check the network and the GPUs')
    ended = dataclasses.replace(report(3), place='', problem='has ended with 1', ended=True)
    assert describe_hang([*reports[:3], ended]).endswith('; rank 3 on node 0 (gpu-0) has ended with 1')


def test_ranks_in_two_collectives_are_told_apart():
    other = ALL_REDUCE.replace('all_reduce', 'barrier').replace('highest_signal', 'save')
    reports = [report(rank, other if rank == 2 else ALL_REDUCE) for rank in range(4)]
    assert [each.rank for each in suspects(reports)] == [2]
    assert 'rank 2 on node 0 (gpu-0) waits in barrier (save, preemption.py)' in describe_hang(reports)
    assert suspects([report(rank, other if rank % 2 else ALL_REDUCE) for rank in range(4)]) == []
