"""Preflight checks in real processes over gloo, with one fault at a time."""

import datetime
import faulthandler
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from ranks import free_port

from diffusion.compatibility import nvml
from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR, FAILED, PREEMPTED
from diffusion.launch import gpu_health
from diffusion.launch.gpu_health import Finding, findings_exit_status, findings_json, findings_table
from diffusion.models.families.sd2 import builder  # noqa: F401  imported once, so that forked processes need not
from diffusion.preflight import __main__ as program
from diffusion.preflight import collective_checks, node_checks, storage_checks
from diffusion.preflight.collective_checks import CollectiveLimits, RankMeasurements, compare_ranks
from diffusion.preflight.storage_checks import FolderView, compare_views
from diffusion.runs import environment
from diffusion.storage.bucket_clients import S3Client
from diffusion.storage.local_files import WORKING_FOLDER_VARIABLE
from diffusion.storage.places import files_of_run
from tests.data.processes import Forked
from tests.golden import check_golden
from tests.nvml_driver import Driver

GOLDEN = Path(__file__).parent / 'golden'


@pytest.fixture
def recipe(write_recipe):
    return load(write_recipe())


def bad(findings):
    return [finding for finding in findings if not finding.ok]


def test_healthy_node_passes(recipe):
    found = node_checks.check_node(recipe, kind='none', processes=2, nvml=None)
    assert findings_exit_status(found) == 0, findings_table(found)
    assert [finding.check for finding in found] == ['shared memory', 'disk', 'disk', 'checkpoints', 'data', 'weights']
    assert {finding.where for finding in found} == {environment.machine_name(os.environ)}
    assert not list(recipe.run_dir.iterdir()), 'the test file is deleted'


def test_too_little_memory_or_disk_space_is_a_finding(recipe, monkeypatch):
    monkeypatch.setenv('TMPDIR', '/tmp')
    monkeypatch.setattr(node_checks, 'checkpoint_bytes', lambda recipe: 3 * 2**30)

    def missing(free, recipe):
        monkeypatch.setattr(node_checks.shutil, 'disk_usage', lambda path: SimpleNamespace(free=free))
        return bad([*node_checks.check_shared_memory(2), *node_checks.check_disks(recipe)])

    counts = [len(missing(free, recipe)) for free in (2**29 - 1, 2**29, 2**30, 6 * 2**30 - 1, 6 * 2**30)]
    assert counts == [3, 2, 1, 1, 0]
    memory, temporary, run = missing(2**26, recipe)
    assert (memory.check, memory.status) == ('shared memory', CONFIG_ERROR)
    assert memory.detail == '67.1 MB free of 536.9 MB; use docker run --shm-size or a Memory volume'
    assert temporary.detail == '/tmp: 67.1 MB free of 1.1 GB; delete files'
    assert run.detail == f'{recipe.run_dir}: 67.1 MB free of 6.4 GB; delete files'
    _, temporary, run = missing(2**26, replace(recipe, runs_dir='s3://bucket/runs'))
    assert temporary.detail.endswith('delete files')
    assert run.detail.endswith(f'delete files, or set {WORKING_FOLDER_VARIABLE} to a folder on a larger disk')


def test_check_that_raises_is_a_finding_and_other_checks_run(recipe, monkeypatch):
    monkeypatch.setattr(node_checks.shutil, 'disk_usage', Mock(side_effect=OSError(116, 'Stale file handle')))
    found = node_checks.check_node(recipe, kind='none', processes=2, nvml=None)
    assert {finding.check for finding in bad(found)} == {'disk', 'shared memory'}
    assert all('Stale file handle' in finding.detail for finding in bad(found))
    assert {'checkpoints', 'data'} <= {finding.check for finding in found if finding.ok}


def test_cuda_initialization_error_is_a_finding_of_its_rank(monkeypatch):
    monkeypatch.setenv('RANK', '11')
    monkeypatch.setattr(torch.cuda, 'set_device', Mock(side_effect=RuntimeError('CUDA error: device 3\nis away')))
    (found,) = bad(program.check_cuda(3))
    assert (found.check, found.detail) == ('cuda', 'CUDA error: device 3 is away')
    assert found.where.endswith(' rank 11')


def test_unwritable_run_folder_is_a_finding(recipe):
    recipe.run_dir.parent.mkdir(parents=True)
    recipe.run_dir.write_text('a file where the folder should be')
    (found,) = bad(node_checks.check_run_folder(recipe))
    assert 'cannot be written' in found.detail
    assert found.status == BAD_HARDWARE


@pytest.mark.parametrize(
    ('fault', 'message', 'status'), [(('GET shard.00000', 403), 'AccessDenied', FAILED), (None, '', 0)]
)
def test_first_shard_is_read_from_the_bucket(store, pictures, write_recipe, tmp_path, fault, message, status):
    stream = {'remote': store.upload(pictures[32]), 'local': str(tmp_path / 'cache'), 'resolution': 32}
    recipe = load(write_recipe(streams={'far': stream}))
    if fault:
        store.fail(*fault)
    found = node_checks.check_node(recipe, kind='none', processes=1, nvml=None)
    assert findings_exit_status(found) == status, findings_table(found)
    assert all(message in finding.detail and 'streams.far' in finding.detail for finding in bad(found))
    assert not (tmp_path / 'cache').exists()


def test_shard_shorter_than_in_its_index_is_a_finding(store, pictures, write_recipe, tmp_path):
    remote = store.upload(pictures[32])
    store.put(remote, 'shard.00000.mds', b'short')
    recipe = load(write_recipe(streams={'far': {'remote': remote, 'local': str(tmp_path), 'resolution': 32}}))
    (found,) = bad(node_checks.check_first_shard('far', recipe.streams['far']))
    assert f'{remote}/shard.00000.mds: read 5 of' in found.detail


@pytest.fixture
def run_two(write_recipe, tmp_path):
    """Run the preflight in two processes over gloo, as two nodes; return their exit statuses and the findings."""

    def run(inject: Callable[[int], None] = lambda rank: None, *, level='fast', kind='none', recipe=None):
        path, port = recipe or write_recipe(), free_port()

        def work(rank: int) -> None:
            # A fork does not copy OpenMP's threads; an operation that uses them would wait for them forever.
            torch.set_num_threads(1)
            faulthandler.dump_traceback_later(100, exit=True)
            program.TIMEOUT = datetime.timedelta(seconds=60)
            os.environ |= {'RANK': str(rank), 'WORLD_SIZE': '2', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1'}
            os.environ |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port), environment.GPU: kind}
            os.environ[environment.MACHINE] = f'node{rank}'
            storage_checks.MOST_BYTES = dict.fromkeys((False, True), 2**24)
            inject(rank)
            (tmp_path / f'status-{rank}').write_text(str(program.main([level, str(path)])))

        processes = [Forked(lambda rank=rank: work(rank)) for rank in range(2)]
        assert [process.wait() for process in processes] == [0, 0]
        statuses = [int((tmp_path / f'status-{rank}').read_text()) for rank in range(2)]
        report = json.loads(files_of_run(load(path).run_place).read(program.REPORT) or b'')
        return statuses, [Finding(**each) for each in report['findings']]

    return run


def slow_matmul(rank):
    measure = collective_checks.measure_matmul
    collective_checks.measure_matmul = lambda *args: (measure(*args)[0] * (0.1 if rank else 1), measure(*args)[1])


def wrong_all_reduce(rank):
    reduce = collective_checks.dist.all_reduce
    collective_checks.dist.all_reduce = lambda message, group: [reduce(message, group=group), message[-1].add_(rank)]


def skewed_clock(rank):
    now = collective_checks.time.time
    collective_checks.time.time = lambda: now() + 100 * rank


def little_shared_memory(rank):
    node_checks.SHM_BYTES = 2**60 if rank else 1


def full_disk(rank):
    usage = shutil.disk_usage
    node_checks.shutil.disk_usage = lambda path: usage(path) if path == node_checks.SHM else SimpleNamespace(free=0)


def gpu_driver(**second):
    """Return a fault with a fake driver of one GPU on each node; the first is healthy, the second has these faults."""

    def inject(rank):
        os.environ.pop('CUDA_VISIBLE_DEVICES', None)
        driver = Driver(**(second if rank else {}))
        driver.gpus = driver.gpus[1 : 1 if second.get('gone') and rank else 2]
        nvml.load_nvml = lambda: driver
        gpu_health.RELEASE_SECONDS = 0.0

    return inject


BOTH = [BAD_HARDWARE, BAD_HARDWARE]
SECOND = [PREEMPTED, BAD_HARDWARE]
NO_NODES = [FAILED, FAILED]
"""Exit statuses for a fault on all nodes: it is in something shared, so no node should be excluded."""


@pytest.mark.parametrize(
    ('inject', 'check', 'expected'),
    [
        pytest.param(slow_matmul, 'speed', SECOND, marks=pytest.mark.slow),
        pytest.param(wrong_all_reduce, 'all-reduce', SECOND, marks=pytest.mark.slow),
        (little_shared_memory, 'shared memory', [PREEMPTED, CONFIG_ERROR]),
        pytest.param(gpu_driver(gone=True), 'gpu count', SECOND, marks=pytest.mark.slow),
        (full_disk, 'disk', NO_NODES),
        # With two ranks there is no majority: both clocks are 50 s from the median.
        pytest.param(skewed_clock, 'clock', BOTH, marks=pytest.mark.slow),
    ],
)
def test_faulty_node_is_reported_and_the_other_retries(run_two, inject, check, expected):
    statuses, found = run_two(inject, kind='h100-sxm' if check == 'gpu count' else 'none')
    assert {finding.check for finding in bad(found)} == {check}, findings_table(found)
    assert all('node1' in finding.where for finding in bad(found)) or expected in (BOTH, NO_NODES)
    assert statuses == expected


@pytest.mark.parametrize('level', ['fast', pytest.param('deep', marks=pytest.mark.slow)])
def test_healthy_nodes_pass_within_a_minute(run_two, level):
    begin = time.monotonic()
    statuses, found = run_two(level=level)
    assert statuses == [0, 0], findings_table(found)
    assert {'versions', 'clock', 'speed', 'results', 'all-reduce'} <= {finding.check for finding in found}
    assert {'shared folder', 'write speed'} <= {finding.check for finding in found}
    assert ('link' in {finding.check for finding in found}) == (level == 'deep')
    assert time.monotonic() - begin < 60


@pytest.fixture
def bucket_recipe(store, write_recipe, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(WORKING_FOLDER_VARIABLE, str(tmp_path / 'local'))
    monkeypatch.setattr(storage_checks, 'MOST_BYTES', dict.fromkeys((False, True), 2**24))
    return write_recipe(runs_dir=f'{store.bucket("home")}/runs')


def test_bucket_of_a_run_is_checked_with_a_conditional_write(store, bucket_recipe):
    found = node_checks.check_node(load(bucket_recipe), kind='none', processes=1, nvml=None)
    assert findings_exit_status(found) == 0, findings_table(found)
    (only,) = [finding for finding in found if finding.check == 'bucket']
    assert only.detail == 's3://home/runs/run: conditional writes, reading and deleting work'
    assert not store.objects('home')
    assert any(finding.check == 'disk' and '/local/' in finding.detail for finding in found)


@pytest.mark.parametrize(
    ('words', 'message'),
    [('PUT .preflight', 'refuses access'), ('GET .preflight', 'refuses access'), ('DELETE .preflight', 'be deleted')],
)
def test_bucket_that_refuses_or_fails_is_a_finding(store, bucket_recipe, words, message):
    store.fail(words, 500 if 'DELETE' in words else 403)
    (found,) = bad(node_checks.check_run_folder(load(bucket_recipe)))
    assert (found.check, found.status) == ('bucket', FAILED)
    assert message in found.detail and 's3://home/runs/run/.preflight-' in found.detail


@pytest.mark.parametrize(
    ('ignored', 'message'),
    [
        ({'if_absent': False, 'if_tag': None}, 'ignores If-None-Match and If-Match'),
        ({'if_tag': None}, 'the store ignores If-Match,'),
        (None, 'refuses If-Match with the etag that it returns'),
    ],
)
def test_store_that_ignores_conditions_or_does_not_recognize_its_etags_is_a_finding(
    store, bucket_recipe, monkeypatch, ignored, message
):
    write, head = S3Client.write, S3Client.head
    if ignored is None:
        monkeypatch.setattr(S3Client, 'head', lambda *words: head(*words)._replace(tag='W/"weak'))
    else:
        monkeypatch.setattr(S3Client, 'write', lambda *words, **conditions: write(*words, **(conditions | ignored)))
    (found,) = bad(node_checks.check_run_folder(load(bucket_recipe)))
    assert found.status == CONFIG_ERROR and message in found.detail and 'two jobs could train it' in found.detail
    assert not store.objects('home')


def test_nodes_without_a_shared_folder_pass_with_a_bucket(run_two, bucket_recipe, store):
    def own_disk(rank):
        os.environ[WORKING_FOLDER_VARIABLE] += f'/node{rank}'

    statuses, found = run_two(own_disk, recipe=bucket_recipe)
    assert statuses == [0, 0], findings_table(found)
    assert {'bucket', 'same store', 'write speed'} <= {finding.check for finding in found}
    assert 'shared folder' not in {finding.check for finding in found}
    (speed,) = [finding for finding in found if finding.check == 'write speed']
    assert speed.detail.startswith('s3://home/runs/run: ') and ' GB/s' in speed.detail
    assert {*store.objects('home')} == {'runs/run/preflight.json'}


@pytest.mark.slow
def test_node_that_reaches_another_store_is_found(run_two, bucket_recipe):
    def other_store(rank):
        plain = storage_checks.object_store.read

        def read(url, **keywords):
            if rank and 'node0' in url:
                raise UserError(f'{url}: there is no such bucket or object (404)')
            return plain(url, **keywords)

        storage_checks.object_store.read = read

    statuses, found = run_two(other_store, recipe=bucket_recipe)
    (only,) = bad(found)
    assert (only.check, only.where) == ('same store', 'node1') and 'S3_ENDPOINT_URL' in only.detail
    assert statuses == [PREEMPTED, FAILED]


def view(number, *seen, begun=False, kind='nfs4'):
    files = frozenset(f'file{each}' for each in (number, *seen))
    return FolderView(f'node{number}', f'{kind} server:/export', begun, f'file{number}', files)


VIEWS = {
    'a single node': [view(0)],
    'one folder': [view(0, 1, 2), view(1, 0, 2), view(2, 0, 1)],
    'last node': [view(0, 1), view(1, 0), view(2, kind='ext4')],
    'first node': [view(0), view(1, 2), view(2, 1)],
    'run is on one node': [view(0, begun=True), view(1, 2), view(2, 1)],
    'own folders': [view(0), view(1)],
    'own folders, of which two have a run': [view(0, begun=True), view(1, begun=True)],
    'two file systems': [view(0), view(1, kind='ext4')],
    'one direction': [view(0, 1), view(1)],
    'two groups': [view(0, 1), view(1, 0), view(2, 3), view(3, 2), view(4, 3)],
}


def test_node_that_sees_another_folder_is_named_as_reviewed():
    found = {name: compare_views(Path('runs/a'), views) for name, views in VIEWS.items()}
    texts = [
        f'{name}: exit status {findings_exit_status(each)}\n{findings_table(each)}\n' for name, each in found.items()
    ]
    check_golden(GOLDEN / 'shared-folder', {'findings.txt': '\n'.join(texts)})


def test_file_system_of_a_folder_is_that_of_the_last_and_deepest_mount():
    mounts = 'overlay / overlay rw\nserver:/a /data nfs rw\nserver:/b /data nfs4 rw\n'
    mounts += 'tmpfs /data/a\\040b tmpfs rw\ndisk /database ext4 rw\n'
    with patch.object(Path, 'read_text', return_value=mounts):
        found = [storage_checks.file_system_of(Path(each)) for each in ('/data/runs', '/data/a b', '/srv')]
    assert found == ['nfs4 server:/b', 'tmpfs tmpfs', 'overlay overlay']
    with patch.object(Path, 'read_text', side_effect=OSError):
        assert storage_checks.file_system_of(Path('/data')) == 'an unknown file system'


def test_speed_of_storage_is_measured_with_growing_files(tmp_path, monkeypatch):
    cases = ((0.9, 99, 4 / 3, [1]), (1, 4, 4 / 3, [1, 4]), (9, 4, 8 / 5, [1, 4]), (0, 0, 1, [1]))
    for seconds, most, written, uploaded in cases:
        store, clock, sizes = Mock(), Mock(monotonic=Mock(side_effect=itertools.count(0, 0.5))), []
        store.write.side_effect = lambda url, path, sizes=sizes, **_: sizes.append(path.stat().st_size / 2**10)
        for name, fake in (('object_store', store), ('CHUNK_BYTES', 2**10), ('time', clock)):
            monkeypatch.setattr(storage_checks, name, fake)
        assert storage_checks.measure_write_speed(tmp_path, seconds, most * 2**10) == 2**10 * written
        speed = storage_checks.measure_upload_speed('s3://b/run', tmp_path, seconds, most * 2**10)
        assert (speed, sizes) == (2**11 * uploaded[-1], uploaded) and not [*tmp_path.iterdir()]
        assert store.delete.call_args.args == store.write.call_args.args[:1]


@pytest.mark.parametrize(('sharded', 'remedy'), [(False, 'set parallelism.checkpoints'), (True, 'raise hang_')])
def test_save_that_takes_longer_than_the_notice_or_the_limit_is_a_warning(recipe, monkeypatch, sharded, remedy):
    monkeypatch.setenv(environment.HANG_SECONDS, '100')
    monkeypatch.setenv(environment.NOTICE_SECONDS, '30')
    recipe = replace(recipe, parallelism=replace(recipe.parallelism, checkpoints='sharded' if sharded else 'whole'))
    gather, measure = Mock(return_value=[2e9, None, 1e9]), Mock(return_value=5.0)
    for name, fake in (('dist', Mock()), ('gather', gather), ('measure_write_speed', measure)):
        monkeypatch.setattr(storage_checks, name, fake)
    for rank, local_rank, writes, size, end in (
        ('0', '0', True, None, ' nodes'),
        ('8', '0', sharded, 60 * 10**9, '; a save of 60.0 GB takes about 30 s'),
        ('1', '1', False, 800 * 10**9, "about 400 s, longer than the scheduler's notice (30 s), so a preempted run"),
        ('9', '1', False, 802 * 10**9, f'a save (400 s), so the run ends; {remedy}'),
    ):
        monkeypatch.setenv('RANK', rank)
        monkeypatch.setenv('LOCAL_RANK', local_rank)
        (found,) = storage_checks.check_write_speed(recipe, size, deep=True)
        assert f'{recipe.run_dir}: 2 GB/s from 2 nodes' in found.detail and end in found.detail
        assert found.warns == ('run' in end) and gather.call_args.args == (5.0 if writes else None,)
        assert found.ok and findings_table([found]).startswith('WARN' if found.warns else 'ok')
    measure.assert_called_with(recipe.run_dir, 4.0, 2**31)


def test_missing_ranks_are_listed(write_recipe, monkeypatch, capsys, alone):
    monkeypatch.setenv('WORLD_SIZE', '4')
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '2')
    monkeypatch.setattr(program, 'TIMEOUT', datetime.timedelta(seconds=1))
    assert program.main(['fast', str(write_recipe())]) == FAILED
    assert 'after 1 s, ranks 1, 2, 3 (node 0, 1 of 2) have not joined' in capsys.readouterr().err
    monkeypatch.setenv('RANK', '1')
    assert program.main(['fast', str(write_recipe())]) == FAILED
    assert 'cannot connect to rank 0' in capsys.readouterr().err


def measured(rank, **changes):
    values = {
        'clock': 99.0,
        'versions': ('Python 3.10', 'torch 2.7.0'),
        'teraflops': 700.0,
        'product': 0,
        'sum_is_right': True,
    }
    values |= {'rank': rank, 'host': f'node{rank // 8}', 'bus': 4e11, 'node_bus': 4e11, 'link': 4e10}
    return RankMeasurements(**(values | changes))


DEVIATIONS = {
    'none': {},
    'speed': {'teraflops': 629.0},
    'node bus': {'node_bus': 3.59e11},
    'link': {'link': 3.5e10},
    'product of another rank': {'product': 6},
    'product that varies': {'product': -1},
    'sum': {'sum_is_right': False, 'bus': 1e11},
    'late clock': {'clock': 108.0},
    'early clock': {'clock': 93.9},
    'versions': {'versions': ('Python 3.10', 'torch 2.6.0')},
    'at the limits': {'teraflops': 630.0, 'clock': 104.0, 'node_bus': None, 'link': 3.6e10, 'bus': 1e11},
}
"""Changes of the measurements of one of sixteen ranks."""


def test_deviating_rank_is_reported_as_reviewed():
    limits, texts = CollectiveLimits.of('cuda'), []
    cases = {
        name: [measured(rank, **(changes if rank == 11 else {})) for rank in range(16)]
        for name, changes in DEVIATIONS.items()
    }
    cases |= {'single rank': [measured(0)], 'single bad rank': [measured(0, product=-1)]}
    cases['no links'] = [measured(rank, node_bus=None, link=None) for rank in range(2)]
    cases['two ranks'] = [measured(0), measured(8, clock=100.5, product=5, teraflops=100.0)]
    for name, ranks in cases.items():
        found = compare_ranks(ranks, limits)
        texts.append(f'{name}: exit status {findings_exit_status(found)}\n{findings_table(found)}\n')
    last = findings_json(compare_ranks(cases['two ranks'], limits))
    check_golden(GOLDEN / 'ranks', {'findings.txt': '\n'.join(texts), 'findings.json': last})


def take(monkeypatch, *seconds, **collectives) -> CollectiveLimits:
    """Let the measured operations take these seconds, one after the other."""
    clock = Mock(side_effect=[moment for each in seconds for moment in (7.0, 7.0 + each)])
    fake = SimpleNamespace(process_time=clock, perf_counter=clock, monotonic=Mock(side_effect=itertools.count()))
    monkeypatch.setattr(collective_checks, 'time', fake)
    monkeypatch.setattr(collective_checks, 'dist', SimpleNamespace(**collectives))
    return CollectiveLimits(0.25, 16, 2**12, 3, 0.0, links=True)


def test_matmul_is_measured_and_every_50th_product_compared(monkeypatch):
    cases = ((0.0, 3, (0.1, 2.0, 4.0, 0.5)), (6.0, 3, (*(0.1,) * 6, 4.0, 0.2, 0.5)), (0.0, 50, (*(1.0,) * 50, 0.5)))
    for minimum, repeats, seconds in cases:
        limits, count = replace(take(monkeypatch, *seconds), repeats=repeats, seconds=minimum), itertools.count()
        monkeypatch.setattr(torch.Tensor, '__matmul__', lambda *_, count=count: torch.tensor(next(count) // 50))
        expected = pytest.approx(2 * 16**3 / 0.5 / 1e12, rel=1e-9), 0 if repeats < 50 else -1
        assert collective_checks.measure_matmul('cpu', limits) == expected


@pytest.mark.parametrize(('others', 'right'), [(1 + 3 + 4, True), (9, False)])  # each rank sends its rank + 1
def test_all_reduce_is_measured_by_its_fastest_and_a_wrong_sum_is_found(monkeypatch, others, right):
    faked = {'get_process_group_ranks': lambda group: [0, 1, 2, 3], 'get_rank': lambda: 1}
    faked['all_reduce'] = lambda message, group: message.add_(others if len(message) == 2**10 else 0)
    limits = take(monkeypatch, 0.1, 2.0, 4.0, 0.5, **faked)
    assert collective_checks.measure_all_reduce('cpu', limits, Mock()) == (right, 2 * 3 / 4 * 2**12 / 0.5)


@pytest.mark.parametrize(('rank', 'partners'), [(0, [2]), (2, [0, 4]), (3, [1, 5]), (4, [6, 2]), (6, [4])])
def test_links_to_both_neighbors_of_four_nodes_are_measured(monkeypatch, rank, partners):
    faked = {'P2POp': lambda *words: words, 'isend': 'send', 'irecv': 'receive', 'barrier': Mock()}
    faked |= {'batch_isend_irecv': Mock(return_value=[]), 'get_rank': lambda: rank, 'get_world_size': lambda: 8}
    limits = take(monkeypatch, *(0.1, *(4.0,) * 19, 2.0, 0.1, *(1.0,) * 20)[: 21 * len(partners)], **faked)
    found = collective_checks._neighbor_bandwidth('cpu', replace(limits, repeats=100), 2, Mock())
    assert found == 2**12 / (1.0 if len(partners) == 2 else 2.0), 'of 20 exchanges after a first one'
    calls = faked['batch_isend_irecv'].call_args_list[::21]
    posted = [(kind, len(message), to) for call in calls for kind, message, to, _ in call.args[0]]
    assert posted == [(kind, 2**10, other) for other in partners for kind in ('send', 'receive')]
