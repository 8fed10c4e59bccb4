"""Shared folders on a file system and in an object store: the same behavior of both, and what is special about each."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from diffusion.errors import UserError
from diffusion.storage import locks, object_store
from diffusion.storage.places import LocalPlace, Place, StorePlace, files_of_run, place_at
from diffusion.storage.retry import PreconditionFailed
from tests.data.processes import Forked
from tests.object_store import Store


@pytest.fixture(params=['folder', 'store'])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == 'folder':
        return str(tmp_path / 'set')
    return request.getfixturevalue('store').bucket('data') + '/set'


@pytest.fixture
def place(where: str, tmp_path: Path) -> Place:
    return place_at(f'{where}/', tmp_path / 'scratch')


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob('*')}


def test_small_files_are_written_read_listed_and_deleted(place: Place, where: str) -> None:
    assert place.read('a') is place.read_version('a') is None and place.list() == place.list('none') == ({}, set())
    for name, content in {'a': 'ä', 'b/c/d': b'0123456789', 'b/e': b''}.items():
        place.write(name, content)
    place.write('b/e', b'xy', flush=False)
    place.write('a', 'in place', in_place=True)
    place.write('a', 'ö', in_place=True)
    assert place.read('a') == 'ö'.encode() and place.read('b/e') == b'xy'
    assert [place.read('b/c/d', tail_bytes=count) for count in (3, 10, 99)] == [b'789', b'0123456789', b'0123456789']
    assert place.read('none', tail_bytes=3) is None
    assert (place.list().files.keys(), place.list().folders) == ({'a'}, {'b'})
    assert (place.list('b').files.keys(), place.list('b').folders) == ({'e'}, {'c'})
    assert place.sizes() == {'a': 2, 'b/c/d': 10, 'b/e': 2}
    before = place.list().files['a']
    place.write('a', 'new')
    assert place.list().files['a'] != before
    place.delete(['a', 'none'])
    place.delete([])
    place.remove_folder('b')
    place.remove_folder('none')
    assert place.sizes() == {} and place.read('a') is None
    assert (str(place), place.locate('b/c'), place.locate()) == (where, f'{where}/b/c', where)


def test_file_is_replaced_only_from_the_version_that_was_read(place: Place) -> None:
    place.replace('a', b'one', None)
    with pytest.raises(PreconditionFailed):
        place.replace('a', b'two', None)
    found = place.read_version('a')
    assert found is not None and found.content == b'one'
    place.replace('a', b'two', found.version)
    with pytest.raises(PreconditionFailed):
        place.replace('a', b'three', found.version)
    place.delete(['a'])
    with pytest.raises(PreconditionFailed):
        place.replace('a', b'three', found.version)
    assert place.read('a') is None
    place.check_conditions()
    assert place.sizes() == {}


def test_no_change_of_many_processes_is_lost(place: Place) -> None:
    place.write('count', '0')

    def add() -> None:
        done = 0
        while done < 3:
            found = place.read_version('count')
            assert found is not None
            with suppress(PreconditionFailed):
                place.replace('count', str(int(found.content) + 1).encode(), found.version)
                done += 1

    assert [job.wait() for job in [Forked(add) for _ in range(3)]] == [0] * 3
    assert place.read('count') == b'9'


@pytest.mark.parametrize('links', [True, False])
def test_one_of_many_threads_creates_a_file(place: Place, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:
        monkeypatch.setattr(os, 'link', Mock(side_effect=OSError('a file system without hard links')))
    created: list[str] = []
    barrier = threading.Barrier(4)

    def create(content: str) -> None:
        barrier.wait()
        if place.create('folder/a', content):
            created.append(content)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(create, '0123'))
    assert len(created) == 1 and place.read('folder/a') == created[0].encode()
    assert place.sizes() == {'folder/a': 1}
    assert not place.create('folder/a', 'again', alone=True) and place.create('b', 'x', alone=True)


def test_large_files_are_written_fetched_and_moved(place: Place, tmp_path: Path) -> None:
    for content in ('one', 'two'):
        with place.writing('folder/a') as path:
            path.write_text(content)
    with suppress(KeyboardInterrupt), place.writing('folder/b') as path:
        path.write_text('half')
        raise KeyboardInterrupt
    assert place.sizes() == {'folder/a': 3} and not names_in(tmp_path) & {'scratch/folder/a', 'scratch/folder/b'}
    assert place.fetch('folder/a').read_text() == place.fetch('folder/a').read_text() == 'two'
    new = tmp_path / 'new'
    new.write_text('moved')
    place.put('other/c', new)
    assert not new.exists() and place.read('other/c') == b'moved'


def test_file_of_another_file_system_is_copied_into_the_folder(tmp_path: Path) -> None:
    memory = Path('/dev/shm', f'place-{os.getpid()}')
    if not memory.parent.is_dir() or memory.parent.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip('one file system')
    memory.write_text('moved')
    LocalPlace(tmp_path / 'set').put('a/b', memory)
    assert not memory.exists() and (tmp_path / 'set/a/b').read_text() == 'moved'


def test_what_killed_processes_have_left_is_no_file_and_is_cleaned(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    (tmp_path / 'a/b.unfinished-0123').mkdir(parents=True)
    (tmp_path / 'a/c.unfinished-0123').write_text('half')
    (tmp_path / '.d').write_text('half')
    assert place.list().files == {} and place.sizes() == {'.d': 4}
    place.clean()
    assert names_in(tmp_path) == {'a', '.d'}


def test_folder_of_a_run_is_not_created_but_its_subfolders_are(tmp_path: Path) -> None:
    run = files_of_run(tmp_path / 'run')
    assert run.read('a') is None and run.list() == ({}, set())
    for write in (run.write, run.create):
        with pytest.raises(FileNotFoundError):
            write('status/node-0.json', 'x')
    assert not (tmp_path / 'run').exists(), 'its file system may not be mounted'
    (tmp_path / 'run').mkdir()
    run.write('a/b/c', 'x')
    assert run.read('a/b/c') == b'x'


def test_links_and_pipes_in_the_folder_of_a_run_do_no_harm(tmp_path: Path) -> None:
    run = files_of_run(tmp_path)
    os.mkfifo(tmp_path / 'pipe')
    (tmp_path / 'target').write_text('precious')
    (tmp_path / 'link').symlink_to(tmp_path / 'target')
    assert run.read('pipe') == b'' and run.read('link') == b'precious'
    for name in ('pipe', 'link'):
        for access in (lambda name=name: run.read_version(name), lambda name=name: run.write(name, 'x', in_place=True)):
            with pytest.raises(UserError, match='is a link, a pipe or a folder'):
                access()
    assert (tmp_path / 'target').read_text() == 'precious'


def test_file_in_place_is_never_empty_and_stays_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, path = LocalPlace(tmp_path), tmp_path / 'run.lock'
    place.write('run.lock', 'a long content', in_place=True)
    number, plain, seen, flushed = path.stat().st_ino, os.pwrite, [], Mock()
    monkeypatch.setattr(os, 'fsync', flushed)
    monkeypatch.setattr(os, 'pwrite', lambda *args: (seen.append(path.read_text()), plain(*args))[1])
    place.write('run.lock', 'short', in_place=True)
    assert seen == ['a long content'] and path.read_text() == 'short' and path.stat().st_ino == number
    assert flushed.call_count == 1


@pytest.mark.parametrize('kind', ['run', 'dataset'])
def test_refusal_of_a_store_is_a_fault_only_for_a_run(store: Store, kind: str) -> None:
    url = store.bucket('data', **{'set/a': b'x'}) + '/set'
    place = files_of_run(url) if kind == 'run' else place_at(url)
    store.fail('/data', 403)
    reads = [place.list, place.sizes, partial(place.read, 'a'), partial(place.read_version, 'a')]
    writes = [partial(place.write, 'a', b'y'), partial(place.replace, 'a', b'y', None), partial(place.delete, ['a'])]
    for request in (*reads, *writes):
        with pytest.raises(OSError if kind == 'run' else UserError, match=r'the store refuses access \(403\)'):
            request()


def test_missing_bucket_is_refused(store: Store) -> None:
    for read in (place_at('s3://none/set').read, place_at('s3://none/set').read_version):
        with pytest.raises(UserError, match='there is no such bucket or object'):
            read('a')
    assert files_of_run('s3://none/set').read('a') is None


def test_object_that_changes_while_it_is_read_is_not_replaced(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    place = StorePlace(store.bucket('data', **{'set/a': b'old'}) + '/set')
    plain = object_store.read

    def read_late(url: str, **settings: object) -> bytes:
        store.put(place.url, 'a', b'new')
        return plain(url)

    monkeypatch.setattr(object_store, 'read', read_late)
    found = place.read_version('a')
    assert found is not None and found.content == b'new'
    with pytest.raises(PreconditionFailed):
        place.replace('a', b'mine', found.version)


def test_place_without_conditional_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks.fcntl, 'flock', Mock(side_effect=OSError('no locks')))
    place = LocalPlace(tmp_path)
    for action in (place.check_conditions, place.clean, lambda: place.replace('a', b'x', None)):
        with pytest.raises(UserError, match=r'the file system has no locks \(flock\); keep the dataset on another one'):
            action()
