"""Preparing into an object store: indexes are uploaded last, sizes are checked, and failures can be resumed."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from drawn import DrawnSource, draw, encode, here, interrupted, report_of, settings, snapshot
from object_store import Store

from diffusion.cli import main
from diffusion.errors import DataError, ExternalError
from diffusion.exit_codes import FAILED
from diffusion.prepare import part_shards
from diffusion.prepare.append import append
from diffusion.prepare.convert_part import PartJob
from diffusion.prepare.counts_report import PrepareReport
from diffusion.prepare.part_shards import TABLES
from diffusion.prepare.pipeline import prepare
from diffusion.prepare.work_dir import Share
from diffusion.prepare.worker_pool import WorkerJob, run_job
from diffusion.storage import mds, object_store, retry
from diffusion.storage.retry import RetryPolicy

SOURCE = DrawnSource(4, 5)
CHOICES: dict[str, Any] = {'shard_mb': 0.01, 'sizes': [32], 'aspects': ['32x32', '32x24']}
SHARD = '32px/32x24/shard.00000.mds'


def run(tmp_path: Path, out: str, jobs: Callable[..., Any] = here, **values: Any) -> PrepareReport:
    return report_of(settings(out, work=str(tmp_path / 'work'), **CHOICES, **values), SOURCE, jobs)


@pytest.fixture(scope='module')
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Content of each file of the dataset in a local folder."""
    folder = tmp_path_factory.mktemp('local')
    run(folder, str(folder / 'out'))
    return snapshot(folder / 'out')


def test_store_gets_the_same_dataset_as_a_folder(tmp_path: Path, store: Store, expected: dict[str, bytes]) -> None:
    store.bucket('mds')
    store.requests.clear()
    run(tmp_path, 's3://mds/out')
    found = store.objects('mds')
    assert found.keys() == {f'out/{name}' for name in expected}
    assert_prepared(store, expected)
    indexes = sum(map(is_index, found))
    assert all(map(is_index, store.paths('PUT')[-indexes:]))
    assert not list(tmp_path.iterdir())


def is_index(name: str) -> bool:
    return name.endswith((mds.INDEX, 'buckets.json'))


def assert_prepared(store: Store, expected: dict[str, bytes]) -> None:
    found = store.objects('mds')
    assert not any(name.startswith('parts/0') for name in found)
    for name, content in expected.items():
        assert 'report' in name or found[f'out/{name}'] == content


def test_store_that_does_not_respond_ends_the_command_in_one_line(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(retry, 'FIRST_PAUSE_SECONDS', 0.0)
    store.bucket('mds')
    store.fail('GET /mds', 503)
    (tmp_path / 'a.png').write_bytes(encode(draw(0)))
    words = ['folder', str(tmp_path), '--out', 's3://mds/out', '--work', str(tmp_path / 'work'), '--sizes', '32']
    assert main(['prepare', *words]) == FAILED
    *_, message = capsys.readouterr().err.splitlines()
    assert message.startswith(f'error: {tmp_path}/work: s3://mds/out/: cannot be read, tried 4 times (')
    assert message.endswith('; fix the cause and run the same command again; finished work is kept')


@pytest.mark.slow
def test_parts_are_found_without_the_setting(tmp_path: Path, store: Store, expected: dict[str, bytes]) -> None:
    other = {'parts/other/000000/shard.00000.mds': b'of another preparation'}
    store.bucket('mds', **other)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 's3://mds/out', interrupted(3), parts='s3://mds/parts')
    assert len(store.objects('mds')) > 1
    run(tmp_path, 's3://mds/out')
    assert [name for name in store.objects('mds') if name.startswith('parts/')] == list(other)
    assert_prepared(store, expected)


def share_of(folder: Path, index: int, of: int, jobs: Callable[..., Any] = here) -> PrepareReport | None:
    values = {'out': 's3://mds/out', 'work': str(folder / 'work'), 'parts': 's3://mds/parts'}
    return prepare(settings(**CHOICES, **values), source=SOURCE, run=jobs, share=Share(index, of))


def refuse(jobs: Iterable[WorkerJob]) -> Iterator[Any]:
    """Run jobs like `here`, but none that converts a part."""
    for job in jobs:
        assert not isinstance(job, PartJob) or job.stored is not None
        yield run_job(job)


def test_machines_share_work_through_the_store(tmp_path: Path, store: Store, expected: dict[str, bytes]) -> None:
    store.bucket('mds')
    assert share_of(tmp_path / 'one', 0, 2) is None
    assert share_of(tmp_path / 'two', 1, 2) is None
    assert not list(tmp_path.rglob('*.mds')), 'the images wait in the store'
    assert not [name for name in store.objects('mds') if name.startswith('out/')]
    run(tmp_path / 'three', 's3://mds/out', refuse, parts='s3://mds/parts')
    assert_prepared(store, expected)


@pytest.mark.slow
def test_machines_add_a_delivery_through_the_store(tmp_path: Path, store: Store) -> None:
    store.bucket('mds')
    run(tmp_path, 's3://mds/out')

    def add(name: str, share: Share | None, jobs: Callable[..., Any] = here) -> PrepareReport | None:
        values = {'out': 's3://mds/out', 'work': str(tmp_path / name / 'work'), 'parts': 's3://mds/parts'}
        return append(settings(**CHOICES, **values), source=DrawnSource(6, 10), run=jobs, share=share)

    assert add('one', Share(0, 2)) is add('two', Share(1, 2)) is None
    report = add('three', None, refuse)
    assert report is not None and report.inputs == 20
    assert not any(name.startswith('parts/') for name in store.objects('mds'))


def test_preparation_resumes_from_the_store_when_its_disk_is_gone(tmp_path: Path, store: Store) -> None:
    store.bucket('mds')
    with pytest.raises(KeyboardInterrupt):
        share_of(tmp_path, 0, 1, interrupted(2))
    shutil.rmtree(tmp_path / 'work')
    converted = []

    def counted(jobs: Iterable[Any]) -> Iterator[Any]:
        for job in jobs:
            converted.append(job.number)
            yield run_job(job)

    assert share_of(tmp_path, 0, 1, counted) is None
    assert converted == [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize('damage', ['short shard', 'no tables'])
def test_damaged_part_is_made_again(tmp_path: Path, store: Store, expected: dict[str, bytes], damage: str) -> None:
    store.bucket('mds')
    assert share_of(tmp_path / 'one', 0, 1) is None
    shard, tables = (
        next(name for name in store.objects('mds') if '/000002/' in name and name.endswith(end))
        for end in ('.mds', TABLES)
    )
    victim = shard if 'shard' in damage else tables
    if damage.startswith('no'):
        store.client.delete_object(Bucket='mds', Key=victim)
    else:
        store.put('s3://mds', SHARD, b'short')
    run(tmp_path / 'two', 's3://mds/out', parts='s3://mds/parts')
    assert_prepared(store, expected)


def test_samples_of_a_stored_part_are_read_in_few_requests(tmp_path: Path, store: Store, monkeypatch: Any) -> None:
    store.bucket('mds')
    form = mds.ShardFormat({'key': 'str', 'image': 'bytes'}, 10**6)
    encoded = [form.encode({'key': f'{number:02}', 'image': bytes([number]) * 1000}) for number in range(100)]
    sizes = [len(each) for each in encoded]
    offsets = [sum(sizes[:number]) for number in range(100)]
    place = part_shards.ShardPlace(tmp_path, 's3://mds/parts/000000')
    with place.writing(mds.shard_name(0)) as path:
        entry = form.write_shard(path, encoded, sizes, name=path.name)
    (tmp_path / mds.INDEX).write_text(mds.index_text([entry]))
    assert not list(tmp_path.glob('*.mds'))
    url, fetched = 's3://mds/parts/000000', tmp_path / 'fetched'
    part_shards.store_tables(tmp_path, url)
    fetched.mkdir()
    assert not part_shards.fetch_tables(url, fetched, {mds.shard_name(0): 1}), 'a shard of another size'
    store.put(url, TABLES, b'damaged')
    assert not part_shards.fetch_tables(url, fetched, {}) and not list(fetched.iterdir())
    monkeypatch.setattr(part_shards, 'GAP_BYTES', 2 * sizes[0])
    monkeypatch.setattr(part_shards, 'SPAN_BYTES', 20 * sizes[0])

    def read(numbers: Sequence[int]) -> tuple[bool, int]:
        store.requests.clear()
        chosen = [offsets[each] for each in numbers], [sizes[each] for each in numbers]
        found = list(part_shards.read_stored(tmp_path, 0, *chosen))
        return found == [encoded[each] for each in numbers], sum(each.startswith('GET') for each in store.requests)

    assert read([7]) == (True, 1)
    assert read([0, 3, 5, 50, 99]) == (True, 3), 'one for the samples that are near each other'
    assert read(range(61)) == (True, 4), '20 samples at a time'
    store.put('s3://mds/parts/000000', mds.shard_name(0), b'short')
    with pytest.raises((DataError, ValueError)):
        read([99])
    store.client.delete_object(Bucket='mds', Key=f'parts/000000/{mds.shard_name(0)}')
    with pytest.raises(ValueError, match=f'parts/000000/shard.00000.mds.*remove {tmp_path} and start again'):
        read([7])


def test_next_start_uploads_the_rest_after_a_failure(tmp_path: Path, store: Store, expected: dict[str, bytes]) -> None:
    store.bucket('mds')
    store.fail('PUT /mds/out/32px/32x24/shard.00000', 500)
    failed = r's3://mds/out/32px/32x24/shard.00000.mds: cannot be written, tried 4 times .*InternalError.*work is kept'
    with pytest.raises(ExternalError, match=failed):
        run(tmp_path, 's3://mds/out')
    assert sum('32x24/shard.00000' in name for name in store.paths('PUT')) == RetryPolicy().tries
    assert not (tmp_path / 'work/complete').exists()
    there = store.objects('mds')
    assert there and not any(is_index(name) for name in there)
    store.faults.clear()
    store.requests.clear()
    run(tmp_path, 's3://mds/out')
    assert not {f'/mds/{name}' for name in there} & set(store.paths('PUT'))
    assert_prepared(store, expected)
    assert not (tmp_path / 'work').exists()


def test_shard_damaged_during_other_uploads_is_written_again(
    tmp_path: Path, store: Store, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = object_store.write

    def spoil(url: str, content: bytes | Path, **settings: Any) -> object:
        if url.endswith('/report.html'):
            store.put('s3://mds/out', SHARD, b'short')
        return write(url, content, **settings)

    store.bucket('mds')
    with monkeypatch.context() as patch:
        patch.setattr(object_store, 'write', spoil)
        with pytest.raises(OSError, match=rf'{SHARD}: has 5 of \d+ bytes after all uploads; run the same command'):
            run(tmp_path, 's3://mds/out')
    run(tmp_path, 's3://mds/out')
    assert_prepared(store, expected)


def test_output_that_is_not_empty_or_in_no_bucket_is_reported_before_any_work(tmp_path: Path, store: Store) -> None:
    store.bucket('mds', **{'out/something': b'x', 'outside': b'y'})
    for out, problem in {'mds/out': ': exists and is not empty', 'nowhere/out': '/: there is no such bucket'}.items():
        with pytest.raises(ValueError, match=f's3://{out}{problem}'):
            run(tmp_path, f's3://{out}')
    assert not (tmp_path / 'work').exists()
