"""Names of datasets in shared memory, which all ranks of a machine choose together and leave free at the end."""

import gc
import json
import os
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
from numbered import expected, loader_over, served, write_samples
from streaming.base.shared import prefix

from diffusion.data import shared_state
from diffusion.storage import locks

PROGRAM = """
import os
import sys
from composer.utils import dist
from streaming.base.shared import prefix
from streaming.base.world import World
from diffusion.data.shared_state import one_job_at_a_time

dist.initialize_dist('cpu')
find = prefix._check_and_find
# Pretend that the names of a killed job vanished after rank 0 has looked. No other test has a number as high.
number_of_rank_0 = 100_000 + os.getpid()
prefix._check_and_find = lambda *arguments: find(*arguments) if dist.get_global_rank() else number_of_rank_0
with one_job_at_a_time():
    number, memory = prefix.get_shm_prefix([sys.argv[1]], [None], World.detect())
assert len(set(dist.all_gather_object(number))) == 1
prefix._check_and_find = find
assert prefix._check_and_find_retrying.__module__ == prefix.__name__, 'restored'
dist.barrier()
"""


def test_ranks_that_find_different_free_names_agree(ranks, tmp_path):
    (tmp_path / 'program.py').write_text(PROGRAM)
    job = ranks.start_program(2, tmp_path / 'program.py', tmp_path)
    assert job.wait() == [0, 0], job.output()


def test_failures_and_jobs_go_on_without_a_file_that_cannot_be_written(tmp_path, monkeypatch, caplog):
    (failures := shared_state.Failures(tmp_path / 'gone' / 'failed')).report('the store is gone')
    assert failures.message() == 'the store is gone'
    for error in (locks.WaitedTooLong(), OSError('read-only')):
        monkeypatch.setattr(locks, 'hold_lock', Mock(side_effect=error))
        with shared_state.one_job_at_a_time():
            pass
    ends = ['other processes will not see this failure', *2 * ['continuing without the lock']]
    assert [message.rpartition('; ')[2] for message in caplog.messages] == ends


@pytest.mark.usefixtures('many_datasets')
def test_position_that_a_killed_job_left_in_shared_memory_is_not_resumed(tmp_path, monkeypatch):
    folder = write_samples(tmp_path)
    # Streaming takes the first number without a dataset. No other test has a number as high.
    number = 200_000 + os.getpid() % 100_000
    monkeypatch.setattr(prefix, '_check_and_find', lambda *arguments: number)
    position = {'epoch': 0, 'num_canonical_nodes': 1, 'sample_in_epoch': 8, 'shuffle_seed': 17}
    leftover = Path(f'/dev/shm/{number:06}_resume')
    leftover.write_bytes(json.dumps(position).encode().ljust(4096, b'\0'))
    try:
        loader = loader_over(None, folder)
        assert loader.dataset._shm_prefix_int > number
        assert served(loader) == expected()
    finally:
        leftover.unlink()


@pytest.mark.usefixtures('many_datasets')
@pytest.mark.parametrize('workers', [0, 1])
def test_dataset_leaves_no_lock_files(tmp_path, workers):
    loader = loader_over(None, write_samples(tmp_path), workers=workers)
    name = f'{loader.dataset._shm_prefix_int:06}_*'
    assert served(loader) == expected()
    assert list(Path(tempfile.gettempdir()).glob(name)), 'Streaming creates them'
    del loader
    gc.collect()
    assert not list(Path(tempfile.gettempdir()).glob(name))
    assert not list(Path('/dev/shm').glob(name))
