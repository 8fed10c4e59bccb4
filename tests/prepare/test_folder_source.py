"""Folder source: images with captions in files beside them, or in one captions file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from object_store import Store
from prepare.drawn import entries, write_files

from diffusion.errors import UserError
from diffusion.prepare import folder_source
from diffusion.prepare.folder_source import FolderSource

GOLDEN = Path(__file__).parent / 'golden/folders'
CASES = [case for file in sorted(GOLDEN.iterdir()) for case in yaml.safe_load(file.read_text())]


@pytest.mark.parametrize('case', CASES, ids=lambda case: case.get('name') or case['error'])
def test_a_folder_gives_these_entries_skipped_files_and_notes_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]
) -> None:
    write_files(tmp_path, {name: Path(name).name for name in case.get('images', ())} | case.get('files', {}))
    monkeypatch.chdir(tmp_path)
    source = FolderSource(case.get('location', '.'), **case.get('options', {}))
    if 'error' in case:
        with pytest.raises(UserError) as raised:
            source.parts()
        assert str(raised.value) == case['error']
        return
    found, part = entries(source), source.parts()[0]
    others = [each.metadata | ({'columns': each.caption_columns} if each.caption_columns else {}) for each in found]
    assert case['entries'] == [
        [each.key, each.problem, each.captions, *filter(None, [other])]
        for each, other in zip(found, others, strict=True)
    ]
    assert all(each.image == Path(each.key).name.encode() for each in found if not each.problem)
    assert {kind: each.names for kind, each in part.passed_over.items()} == case.get('skipped', {})
    assert list(part.notes) == case.get('notes', [])


def test_parts_are_ranges_with_stamps_of_their_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_source, 'PART_IMAGES', 3)
    for number in range(7):
        write_files(tmp_path, {f'{number}.jpg': 'x' * (number + 1), f'{number}.txt': 'y'})
    source = FolderSource(str(tmp_path))
    parts = source.parts()
    assert json.loads(json.dumps([part.where for part in parts])) == [part.where for part in parts]
    assert {part.name: part.size for part in parts} == {f'pictures-00000{n}': size for n, size in enumerate((6, 15, 7))}
    assert [part.stamp for part in source.parts()] == [part.stamp for part in parts]
    write_files(tmp_path, {'4.txt': 'other'})
    changed = [part.stamp == before.stamp for part, before in zip(source.parts(), parts, strict=True)]
    assert changed == [True, False, True]
    stamps = set()
    for caption in ('one', 'two'):
        write_files(tmp_path, {'c.csv': f'file,caption\n0.jpg,{caption}\n'})
        stamps.add(FolderSource(str(tmp_path), str(tmp_path / 'c.csv')).parts()[0].stamp)
    assert len(stamps) == 2


def test_names_that_are_not_utf8_are_read_and_can_be_reported(tmp_path: Path) -> None:
    for suffix in (b'.jpg', b'.txt'):
        Path(os.fsdecode(os.fsencode(tmp_path) + b'/caf\xe9' + suffix)).write_bytes(b'x')
    found = entries(FolderSource(str(tmp_path)))
    assert [(entry.key.encode(), entry.problem, entry.captions) for entry in found] == [(b'caf\\xe9.jpg', None, ['x'])]


@pytest.mark.skipif(os.geteuid() == 0, reason='root can read every file')
def test_image_without_read_permission_is_reported(tmp_path: Path) -> None:
    write_files(tmp_path, {'a.jpg': 'x', 'a.txt': 'y'})
    (tmp_path / 'a.jpg').chmod(0)
    assert entries(FolderSource(str(tmp_path)))[0].problem == 'unreadable'


def test_deleted_image_raises_an_os_error(tmp_path: Path) -> None:
    write_files(tmp_path, {'a.jpg': 'x', 'a.txt': 'y'})
    source = FolderSource(str(tmp_path))
    part = source.parts()[0]
    (tmp_path / 'a.jpg').unlink()
    with pytest.raises(FileNotFoundError):
        list(source.read(part))


def test_folder_in_an_object_store_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_source, 'DOWNLOADS', 2)
    objects = {f'in/{number:02}.{suffix}': f'{number}'.encode() for number in range(5) for suffix in ('jpg', 'txt')}
    bucket = store.bucket('pictures', **objects, **{'c.csv': b'file,caption\n03.jpg,three\n'})
    found = entries(FolderSource(f'{bucket}/in'))
    assert [(entry.key, entry.image, entry.captions) for entry in found] == [
        (f'{number:02}.jpg', f'{number}'.encode(), [str(number)]) for number in range(5)
    ]
    named = entries(FolderSource(f'{bucket}/in', captions=f'{bucket}/c.csv'))
    assert (named[0].key, named[0].image, named[0].captions) == ('03.jpg', b'3', ['three'])
    with pytest.raises(ValueError, match=r'^s3://pictures/none.csv: there is no such bucket or object'):
        FolderSource(f'{bucket}/in', captions=f'{bucket}/none.csv').parts()
