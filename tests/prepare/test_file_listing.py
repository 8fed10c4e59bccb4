"""Listing and copying of local files and objects, and errors of failing stores."""

import os
import re
from pathlib import Path

import pytest
from object_store import Store

from diffusion.errors import UserError
from diffusion.prepare import file_listing
from diffusion.prepare.file_listing import File, expand_braces, local_copy, part_name, single_file_part


def touch(path: Path, content: bytes = b'x') -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def list_files(location: str, suffixes: list[str]) -> list[File]:
    return file_listing.list_files(location, suffixes)[0]


def test_folder_is_listed_recursively_and_sorted(tmp_path: Path) -> None:
    for name in ('b/1.tar', 'a.tar', 'b/0.TAR', 'b/0.parquet', '.hidden/2.tar', '.3.tar'):
        touch(tmp_path / name, name.encode())
    files = list_files(str(tmp_path), ['.tar'])
    assert [(file.name, file.size) for file in files] == [('a.tar', 5), ('b/0.TAR', 7), ('b/1.tar', 7)]
    assert [Path(file.url).read_bytes().decode() for file in files] == ['a.tar', 'b/0.TAR', 'b/1.tar']
    assert list_files(f'file://{tmp_path}/', ['.tar']) == files


def test_links_are_followed_and_broken_ones_counted(tmp_path: Path) -> None:
    touch(tmp_path / 'elsewhere' / 'deep' / 'a.tar')
    folder = tmp_path / 'folder'
    touch(folder / 'b.tar')
    (folder / 'linked').symlink_to(tmp_path / 'elsewhere')
    (folder / 'c.tar').symlink_to(tmp_path / 'elsewhere' / 'deep' / 'a.tar')
    (folder / 'linked' / 'gone.tar').symlink_to(tmp_path / 'nothing')
    (folder / 'gone').symlink_to('../nothing')
    for location in (folder, folder / '**'):
        files, others = file_listing.list_files(str(location), ['.tar'])
        assert [file.name for file in files] == ['b.tar', 'c.tar', 'linked/deep/a.tar']
        assert {each.key: each.kind for each in others} == dict.fromkeys(('gone', 'linked/gone.tar'), 'broken link')


@pytest.mark.parametrize('target', ['..', '.', '../..'])
def test_link_to_a_folder_that_contains_it_is_refused(tmp_path: Path, target: str) -> None:
    touch(tmp_path / 'folder' / 'inner' / 'a.tar')
    (tmp_path / 'folder' / 'inner' / 'link').symlink_to(target)
    with pytest.raises(UserError, match='folder/inner/link: links to a folder that contains it; remove the link'):
        list_files(str(tmp_path / 'folder'), ['.tar'])


def test_stamp_changes_with_the_content(tmp_path: Path) -> None:
    path = touch(tmp_path / 'a.tar')
    before = list_files(str(tmp_path), ['.tar'])
    assert list_files(str(tmp_path), ['.tar']) == before
    touch(path, b'y')
    os.utime(path, ns=(0, 1))
    assert list_files(str(tmp_path), ['.tar'])[0].stamp != before[0].stamp


def test_single_file_odd_folder_name_and_relative_braces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ('a.zip', 'set{1}/a.tar', 'set*/b.tar', '0.tar'):
        touch(tmp_path / name)
    assert [file.name for file in list_files(str(tmp_path / 'a.zip'), ['.tar'])] == ['a.zip']
    assert [file.name for file in list_files(str(tmp_path / 'set{1}'), ['.tar'])] == ['a.tar']
    assert [file.name for file in list_files(str(tmp_path / 'set*'), ['.tar'])] == ['b.tar']
    monkeypatch.chdir(tmp_path)
    assert [file.url for file in list_files('{0..0}.tar', ['.tar'])] == ['0.tar']
    assert [file.url for file in list_files('?.tar', ['.tar'])] == ['0.tar']


def test_braces_expand_to_files_in_order(tmp_path: Path) -> None:
    for number in range(12):
        touch(tmp_path / f'{number:03}.tar')
    files = list_files(f'{tmp_path}/{{010..011}}.tar', ['.tar'])
    assert [file.name for file in files] == ['010.tar', '011.tar']
    assert [file.name for file in list_files(f'{tmp_path}/{{003,001}}.tar', ['.tar'])] == ['003.tar', '001.tar']


def test_several_braces_expand_as_in_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_listing, 'MAX_EXPANDED', 6)
    assert expand_braces('a/{8..10}-{x,y}.tar') == [f'a/{n}-{x}.tar' for n in (8, 9, 10) for x in 'xy']
    assert expand_braces('plain') == ['plain'] and len(expand_braces('{1..6}')) == 6
    for location in ('{1..7}', '{1..4}{a,b}'):
        with pytest.raises(UserError, match='more than 6 files'):
            expand_braces(location)


@pytest.mark.parametrize(
    ('location', 'message'),
    [
        ('gone', 'there is no such folder or file'),
        ('empty', r'contains no \.tar files'),
        ('{a}.tar', r'\{a\} is neither a range such as \{00000..00099\} nor a list'),
        ('{9..1}.tar', 'is a descending range'),
        ('{0..9999999}.tar', 'more than 1000000 files'),
        ('{0..9999}/{0..9999}.tar', 'more than 1000000 files; give the folder instead'),
        ('http://host/a.tar', r'http:// is not supported; use s3://, gs://, .*hf://, or a mounted folder'),
        ('s3://', 'the bucket is missing'),
        ('*.parquet', r'no file matches; list \. and correct the pattern'),
        ('*', r'matches no \.tar files, only a\.zip'),
    ],
)
def test_bad_location_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str, message: str) -> None:
    (tmp_path / 'empty').mkdir()
    touch(tmp_path / 'a.zip')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as raised:
        list_files(location, ['.tar'])
    assert str(raised.value).startswith(location)


def test_part_names_are_plain_and_unique(tmp_path: Path) -> None:
    names = ('a.tar', 'a.tgz', 'a.TAR', 'a b.tar', 'a_b.tar', 'a/b.tar', 'ä.tar', '0' * 200 + '.tar')
    for name in names:
        touch(tmp_path / name)
    parts = [single_file_part(file, '.tar') for file in list_files(str(tmp_path), ['.tar', '.tgz'])]
    assert len({part.name for part in parts}) == len(names)
    assert all(re.fullmatch(r'[\w.-]+', part.name, re.ASCII) for part in parts)
    assert max(len(part.name) for part in parts) < 120
    assert {'a', 'a.tgz', 'a.TAR', 'a_b'} <= {part.name for part in parts}
    assert part_name('00000') == '00000'


def test_object_store_is_listed_and_copied(store: Store) -> None:
    objects = {'set/b/1.tar': b'one', 'set/a.tar': b'two!', 'settings/c.tar': b'', 'set/a.json': b'{}', 'set/': b''}
    bucket = store.bucket('pictures', **objects)
    files = list_files(f'{bucket}/set', ['.tar'])
    assert [(file.name, file.size, file.url) for file in files] == [
        ('a.tar', 4, f'{bucket}/set/a.tar'),
        ('b/1.tar', 3, f'{bucket}/set/b/1.tar'),
    ]
    assert list_files(f'{bucket}/set/', ['.tar']) == files
    assert [file.name for file in list_files(f'{bucket}/set/a.tar', ['.tar'])] == ['a.tar']
    assert [file.name for file in list_files(bucket, ['.tar'])] == ['set/a.tar', 'set/b/1.tar', 'settings/c.tar']
    with local_copy(files[0].url, size=4) as path:
        assert path.read_bytes() == b'two!'
    assert not path.exists()
    store.client.put_object(Bucket='pictures', Key='set/a.tar', Body=b'2222')
    assert list_files(f'{bucket}/set', ['.tar'])[0].stamp != files[0].stamp


@pytest.mark.slow
def test_object_store_is_listed_beyond_its_first_page(store: Store) -> None:
    bucket = store.bucket('many', **{f'{number:05}.tar': b'' for number in range(1005)})
    assert len(list_files(bucket, ['.tar'])) == 1005
    assert [file.name for file in list_files(f'{bucket}/{{01003..01004}}.tar', ['.tar'])] == ['01003.tar', '01004.tar']


def test_failed_copy_is_removed_and_reported(store: Store) -> None:
    bucket = store.bucket('pictures', **{'a.tar': b'one'})
    with pytest.raises(RuntimeError), local_copy(f'{bucket}/a.tar') as path:
        raise RuntimeError
    assert not path.parent.exists()
    with pytest.raises(OSError, match='received 3 of 5 bytes'), local_copy(f'{bucket}/a.tar', size=5):
        pass


def test_missing_object_is_reported_without_retry(store: Store) -> None:
    bucket = store.bucket('pictures', **{'a.tar': b'one'})
    for url in (f'{bucket}/gone.tar', 's3://nowhere/a.tar'):
        store.requests.clear()
        with pytest.raises(ValueError, match=rf'^{url}: there is no such bucket or object \(404\)'), local_copy(url):
            pass
        assert len(store.requests) == 1
    with pytest.raises(ValueError, match=r'^s3://nowhere: there is no such bucket'):
        list_files('s3://nowhere', ['.tar'])
    with pytest.raises(ValueError, match=r'^s3://pictures/gone: contains no \.tar files'):
        list_files(f'{bucket}/gone', ['.tar'])


def test_missing_credentials_are_reported(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bucket = store.bucket('pictures', **{'a.tar': b'one'})
    monkeypatch.setenv('AWS_EC2_METADATA_DISABLED', 'true')
    monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', str(tmp_path / 'none'))
    monkeypatch.delenv('AWS_ACCESS_KEY_ID')
    monkeypatch.delenv('AWS_SECRET_ACCESS_KEY')
    assert list_files(bucket, ['.tar']), 'public buckets need no credentials'
    store.fail('GET', 403, times=1)
    with pytest.raises(ValueError, match=r'there are no credentials .*; set AWS_ACCESS_KEY_ID'):
        list_files(bucket, ['.tar'])


def test_unusual_name_stays_in_its_own_folder(store: Store) -> None:
    bucket = store.bucket('pictures', **{'a/..': b'x', 'ü.csv': b'y', 'a?b#c;d.csv': b'z'})
    for name in ('a/..', 'ü.csv', 'a?b#c;d.csv'):
        with local_copy(f'{bucket}/{name}') as path:
            assert path.parent.name.startswith('diffusion-prepare-') and path.is_file()
            assert path.suffix == ('.csv' if 'csv' in name else '')


PATTERNS = {
    'data/train-*.parquet': ['train-0.parquet', 'train-1.parquet'],
    'data/t*-?.parquet': ['test-0.parquet', 'train-0.parquet', 'train-1.parquet'],
    '*/train-[1-9].*': ['data/train-1.parquet'],
    '*/train-[!1-9].*': ['data/train-0.parquet'],
    '**/t*-[02].parquet': ['data/deep/train-2.parquet', 'data/test-0.parquet', 'data/train-0.parquet'],
    'data/**/train-*': ['deep/train-2.parquet', 'train-0.parquet', 'train-1.parquet'],
}
"""Names of the files of a folder that match a pattern, relative to the folder before the first wildcard."""


@pytest.mark.parametrize('place', ['folder', 'store'])
def test_patterns_are_listed(tmp_path: Path, store: Store, place: str) -> None:
    paths = ['a.parquet', 'data/notes.md', 'data/deep/train-2.parquet', 'data/test-0.parquet']
    paths += ['data/train-0.parquet', 'data/train-1.parquet']
    for path in paths:
        touch(tmp_path / path)
    base = str(tmp_path) if place == 'folder' else store.bucket('pictures', **dict.fromkeys(paths, b'x'))
    found: list[File] = []
    for pattern, names in PATTERNS.items():
        found = list_files(f'{base}/{pattern}', ['.parquet'])
        assert [file.name for file in found] == names, pattern
    for file in found:
        with local_copy(file.url) as copy:
            assert copy.read_bytes() == b'x'


def test_pattern_passes_hidden_files_over(tmp_path: Path) -> None:
    for name in ('a/b.tar', '.cache/c.tar', 'a/.d.tar', 'a/e.txt'):
        touch(tmp_path / name)
    found, others = file_listing.list_files(f'{tmp_path}/**', ['.tar'])
    assert [file.name for file in found] == ['a/b.tar']
    hidden = {'.cache/c.tar': 'hidden', 'a/.d.tar': 'hidden'}
    assert {file.key: file.kind for file in others} == hidden | {'a/e.txt': '.txt'}
