"""A preflight of real processes over gloo, with one thing wrong at a time."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import free_port

from diffusion.config import load
from diffusion.exits import BAD_HARDWARE, CONFIG_ERROR, FAILED, PREEMPTED
from diffusion.preflight import __main__ as program
from diffusion.preflight import alone, together
from diffusion.preflight.findings import Finding, as_json, status_of, table
from diffusion.preflight.together import Limits, Measured, judge
from tests.data.processes import Forked


@pytest.fixture
def recipe(write_recipe):
    return load(write_recipe())


def bad(findings):
    return [finding for finding in findings if not finding.ok]


def test_a_sound_node_passes(recipe):
    found = alone.check_node(recipe, kind='none', processes=2, nvml=None)
    assert status_of(found) == 0, table(found)
    assert {finding.check for finding in found} == {'shared memory', 'disk', 'checkpoints', 'data'}
    assert not list(recipe.run_dir.iterdir()), 'the marker is gone'


def test_little_shared_memory_is_said(recipe, monkeypatch):
    usage = shutil.disk_usage
    little = lambda path: SimpleNamespace(free=2**26) if Path(path) == alone.SHM else usage(path)  # noqa: E731
    monkeypatch.setattr(alone.shutil, 'disk_usage', little)
    (found,) = bad(alone.check_node(recipe, kind='none', processes=2, nvml=None))
    assert (found.check, found.status) == ('shared memory', CONFIG_ERROR)
    assert 'docker run --shm-size' in found.detail


def test_a_full_disk_is_said(recipe, monkeypatch):
    usage = shutil.disk_usage
    full = lambda path: usage(path) if Path(path) == alone.SHM else SimpleNamespace(free=0)  # noqa: E731
    monkeypatch.setattr(alone.shutil, 'disk_usage', full)
    found = bad(alone.check_node(recipe, kind='none', processes=2, nvml=None))
    assert {(finding.check, finding.status) for finding in found} == {('disk', BAD_HARDWARE)}
    assert any(str(recipe.run_dir) in finding.detail for finding in found)


def test_a_folder_of_checkpoints_that_cannot_be_written(recipe):
    recipe.run_dir.parent.mkdir(parents=True)
    recipe.run_dir.write_text('a file is in the way')
    (found,) = bad(alone.checkpoints(recipe))
    assert 'cannot be written' in found.detail
    assert found.status == BAD_HARDWARE


@pytest.mark.parametrize(
    ('fault', 'told', 'status'),
    [
        (('GET shard.00000', 403), 'AccessDenied', FAILED),
        (('GET index.json', 500), 'index.json', FAILED),
        (('GET shard.00000', 'cut'), 'bytes came of', FAILED),
        (None, '', 0),
    ],
)
def test_a_bucket_is_read_from(store, pictures, write_recipe, tmp_path, fault, told, status):
    stream = {'remote': store.upload(pictures[32]), 'local': str(tmp_path / 'cache'), 'resolution': 32}
    recipe = load(write_recipe(streams={'far': stream}))
    if fault:
        store.fail(*fault)
    found = alone.check_node(recipe, kind='none', processes=1, nvml=None)
    assert status_of(found) == status, table(found)
    assert all(told in finding.detail and 'streams.far' in finding.detail for finding in bad(found))
    assert not (tmp_path / 'cache').exists()


def run_two(recipe, folder: Path, meddle: Callable[[int], None] = lambda rank: None) -> tuple[list[int], list[Finding]]:
    """Two processes over gloo, as two nodes; their statuses, and what was found."""
    port = free_port()

    def work(rank: int) -> None:
        os.environ |= {'RANK': str(rank), 'WORLD_SIZE': '2', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1'}
        os.environ |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}
        for module in (alone, together, program):
            module.socket.gethostname = lambda: f'node{rank}'
        meddle(rank)
        (folder / f'status-{rank}').write_text(str(program.main(['fast', str(recipe)])))

    processes = [Forked(lambda rank=rank: work(rank)) for rank in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    found = json.loads((load(recipe).run_dir / program.REPORT).read_text())['findings']
    return [int((folder / f'status-{rank}').read_text()) for rank in range(2)], [Finding(**each) for each in found]


def slow(rank):
    measured = together.multiply
    together.multiply = lambda *given: (measured(*given)[0] * (0.1 if rank else 1), measured(*given)[1])


def miscalculating(rank):
    measured = together.multiply
    together.multiply = lambda *given: (measured(*given)[0], measured(*given)[1] + rank)


def mishearing(rank):
    whole = together.dist.all_reduce
    together.dist.all_reduce = lambda message: [whole(message), message[3].add_(rank)]


def late(rank):
    now = together.time.time
    together.time.time = lambda: now() + 100 * rank


def small(rank):
    alone.SHM_BYTES = 2**60 if rank else 1


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ('meddle', 'check', 'expected'),
    [
        (slow, 'speed', [PREEMPTED, BAD_HARDWARE]),
        (mishearing, 'all-reduce', [PREEMPTED, BAD_HARDWARE]),
        (small, 'shared memory', [PREEMPTED, CONFIG_ERROR]),
        # Of two that disagree neither is known to be right.
        (miscalculating, 'results', None),
        (late, 'clock', [BAD_HARDWARE, BAD_HARDWARE]),
    ],
)
def test_the_node_at_fault_is_named_and_the_other_tries_again(write_recipe, tmp_path, meddle, check, expected):
    statuses, found = run_two(write_recipe(), tmp_path, meddle)
    assert {finding.check for finding in bad(found)} == {check}, table(found)
    assert BAD_HARDWARE in statuses or CONFIG_ERROR in statuses
    assert expected in (None, statuses)


@pytest.mark.slow
@pytest.mark.dist
def test_sound_nodes_pass_within_a_minute(write_recipe, tmp_path):
    statuses, found = run_two(write_recipe(), tmp_path)
    assert statuses == [0, 0], table(found)
    assert {'versions', 'clock', 'speed', 'results', 'all-reduce'} <= {finding.check for finding in found}


def measured(rank, **changes):
    values = {'clock': 0.0, 'versions': ('torch 2.7.0',), 'teraflops': 700.0, 'product': 5, 'sum_is_right': True}
    values |= {'rank': rank, 'host': f'node{rank // 8}', 'bytes_per_second': 4e11}
    return Measured(**(values | changes))


@pytest.mark.parametrize(
    ('changes', 'check', 'status'),
    [
        ({'teraflops': 600.0}, 'speed', BAD_HARDWARE),
        ({'product': 6}, 'results', BAD_HARDWARE),
        ({'sum_is_right': False}, 'all-reduce', BAD_HARDWARE),
        ({'clock': 9.0}, 'clock', BAD_HARDWARE),
        ({'versions': ('torch 2.6.0',)}, 'versions', CONFIG_ERROR),
    ],
)
def test_one_of_sixteen_that_differs_is_named(changes, check, status):
    everyone = [measured(rank, **(changes if rank == 11 else {})) for rank in range(16)]
    (found,) = bad(judge(everyone, Limits.of('cuda')))
    assert (found.check, found.where, found.status) == (check, 'node1 rank 11', status)
    assert not bad(judge([measured(rank) for rank in range(16)], Limits.of('cuda')))


def test_a_table_and_json_say_the_same():
    found = [Finding('disk', True, '1 TB', where='node0'), Finding('clock', False, '+9 s', where='node1 rank 3')]
    assert table(found).splitlines()[-1] == 'BAD  clock  node1 rank 3  +9 s'
    assert json.loads(as_json(found))['status'] == BAD_HARDWARE
