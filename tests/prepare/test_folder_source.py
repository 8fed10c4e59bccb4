"""Folder source: images with captions in files beside them, or in one captions file."""

import json
import os
from pathlib import Path

import pytest
from object_store import Store
from prepare.drawn import entries, write_files

from diffusion.prepare import folder_source
from diffusion.prepare.folder_source import FolderSource


def test_images_are_sorted_by_name_with_captions_from_txt_files(tmp_path: Path) -> None:
    write_files(tmp_path, {'b.JPG': b'b', 'b.txt': 'one\n\ntwo\n', 'a/c.png': b'c', 'a/c.txt': '\ufeffmarked'})
    write_files(tmp_path, {'d.jpg': 'd', 'd.txt': '["a dog", "a hound"]\n', 'e.jpg': 'e', 'e.txt': '[1, 2]'})
    found = entries(FolderSource(str(tmp_path)))
    assert [(entry.key, entry.image, entry.captions) for entry in found] == [
        ('a/c.png', b'c', ['marked']),
        ('b.JPG', b'b', ['one\n\ntwo\n']),
        ('d.jpg', b'd', ['a dog', 'a hound']),
        ('e.jpg', b'e', ['[1, 2]']),
    ]
    assert entries(FolderSource(f'{tmp_path}/{{d.jpg,d.txt}}')) == found[2:3]
    assert entries(FolderSource(f'{tmp_path}/e.jpg', caption='[1, 2]')) == found[3:]


def test_img2dataset_files_are_read(tmp_path: Path) -> None:
    columns = {'caption': 'a cat', 'status': 'success', 'similarity': 0.3, 'bad': float('nan')}
    write_files(tmp_path / '00000', {'1.jpg': b'x', '1.txt': 'a cat', '1.json': json.dumps(columns)})
    write_files(tmp_path / '00000', {'2.jpg': b'y', '2.json': '{"captions": ["one", "two"]}'})
    write_files(tmp_path / '00000', {'3.jpg': b'z', '3.json': '{"caption": "three"'})
    write_files(tmp_path, {'00000_stats.json': '{}', '00000.parquet': b''})
    found = entries(FolderSource(str(tmp_path)))
    assert [entry.captions for entry in found] == [['a cat'], ['one', 'two'], []]
    assert found[0].metadata == {'status': 'success', 'similarity': 0.3, 'bad': None}
    assert list(found[2].metadata) == ['bad_metadata']
    assert [entry.problem for entry in found] == [None, None, 'bad_json']


def test_images_without_caption_are_reported_without_being_read(tmp_path: Path) -> None:
    write_files(tmp_path, {'a.jpg': b'x', 'b.jpg': b'x', 'b.txt': b'caf\xe9'})
    found = entries(FolderSource(str(tmp_path)))
    assert [(entry.problem, entry.image) for entry in found] == [('no_caption', None), ('caption_not_utf8', b'x')]


def test_images_without_caption_files_take_the_given_caption(tmp_path: Path) -> None:
    write_files(tmp_path, {'a.jpg': b'a', 'sub/b.jpg': b'b', 'sub/b.txt': 'own', 'c.jpg': b'c', 'c.txt': ''})
    found = entries(FolderSource(str(tmp_path), caption='a cat'))
    assert [(entry.key, entry.captions, entry.image) for entry in found] == [
        ('a.jpg', ['a cat'], b'a'),
        ('c.jpg', [''], b'c'),
        ('sub/b.jpg', ['own'], b'b'),
    ]
    (tmp_path / 'sub' / 'b.txt').unlink()
    (tmp_path / 'c.txt').unlink()
    assert not FolderSource(str(tmp_path), caption='a cat').parts()[0].notes


@pytest.mark.parametrize('suffix', ['csv', 'jsonl'])
def test_captions_file_gives_order_and_columns(tmp_path: Path, suffix: str) -> None:
    write_files(tmp_path / 'in', {name: name for name in ('a.jpg', 'sub/b.jpg', 'unnamed.jpg')})
    rows = [('sub/b.jpg', 'second'), ('./a.jpg', 'first'), ('gone.jpg', 'gone'), ('a.jpg', 'again')]
    if suffix == 'csv':
        text = 'file,caption,score\n' + ''.join(f'{name},{caption},5.5\n' for name, caption in rows)
    else:
        text = ''.join(json.dumps({'file': name, 'captions': [caption], 'score': 5.5}) + '\n' for name, caption in rows)
    write_files(tmp_path, {f'c.{suffix}': text})
    found = entries(FolderSource(str(tmp_path / 'in'), captions=str(tmp_path / f'c.{suffix}')))
    line = 4 if suffix == 'csv' else 3
    assert [(entry.key, entry.problem, entry.captions) for entry in found] == [
        ('sub/b.jpg', None, ['second']),
        ('a.jpg', None, ['first']),
        (f'gone.jpg (c.{suffix} line {line})', 'missing_file', []),
        (f'a.jpg (c.{suffix} line {line + 1})', 'duplicate_row', []),
        ('unnamed.jpg', 'no_caption', []),
    ]
    assert found[0].image == b'sub/b.jpg'
    assert found[0].metadata == {'score': '5.5' if suffix == 'csv' else 5.5}


@pytest.mark.parametrize('name', ['metadata.jsonl', 'metadata.csv'])
def test_imagefolder_of_hugging_face_is_read(tmp_path: Path, name: str) -> None:
    rows = {
        'metadata.jsonl': '{"file_name": "train/b.png", "text": "a dog", "score": 2}\n'
        '{"file_name": "a.jpg", "text": "a cat", "score": 1}\n',
        'metadata.csv': 'file_name,text,score\ntrain/b.png,a dog,2\na.jpg,a cat,1\n',
    }
    write_files(tmp_path, {'a.jpg': b'a', 'train/b.png': b'b', 'readme.txt': 'no caption', name: rows[name]})
    found = entries(FolderSource(str(tmp_path)))
    assert [(entry.key, entry.captions) for entry in found] == [('train/b.png', ['a dog']), ('a.jpg', ['a cat'])]
    assert [str(entry.metadata['score']) for entry in found] == ['2', '1']
    part = FolderSource(str(tmp_path)).parts()[0]
    assert {kind: files.names for kind, files in part.passed_over.items()} == {'.txt': ['readme.txt']}
    # Where an image has captions beside it, another file of that name is not a captions file.
    write_files(tmp_path, {'a.txt': 'the caption', name: '?'})
    captions = {entry.key: entry.captions for entry in entries(FolderSource(str(tmp_path)))}
    assert captions == {'a.jpg': ['the caption'], 'train/b.png': []}


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


ROWS = [
    ({'file': 'a.jpg', 'caption': '[a cat'}, 'a.jpg', None),
    ({'file': 'b.jpg', 'caption': None}, 'b.jpg', 'no_caption'),
    ({'file': 'c.jpg', 'caption': 7}, 'c.jpg', 'caption_not_text'),
    ({'file': 'd.jpg', 'caption': [1, 2]}, 'd.jpg', 'caption_not_text'),
    ({'file': 'e.jpg'}, 'e.jpg', 'no_caption'),
    ({'file': '/data/f.jpg', 'caption': 'x'}, '/data/f.jpg', 'outside_folder'),
    ({'file': '../f.jpg', 'caption': 'x'}, '../f.jpg', 'outside_folder'),
    ({'file': 'C:\\f.jpg', 'caption': 'x'}, 'C:/f.jpg', 'outside_folder'),
    ({'file': None, 'caption': 'x'}, 'None', 'no_file_name'),
    ({'caption': 'x'}, 'None', 'no_file_name'),
    ('["f.jpg", "x"]', 'None', 'not_json'),
    ({'file': 'gone.jpg', 'caption': 'x'}, 'gone.jpg', 'missing_file'),
    ('{"file": "\\ud800.jpg", "caption": "half of a pair"}', '\\ud800.jpg', 'missing_file'),
    ({'file': 'g.jpg', 'caption': ['a dog', 'a hound']}, 'g.jpg', None),
    ({'file': 'sub\\h.jpg', 'caption': '["one", "two"]'}, 'sub/h.jpg', None),
    ('{"file": "f.jpg", "capt', 'None', 'not_json'),
]
"""Rows of a captions file, with the key and the problem of each."""


def test_a_row_that_cannot_be_used_is_rejected_with_its_line(tmp_path: Path) -> None:
    write_files(tmp_path / 'in', {f'{name}.jpg': 'x' for name in ('a', 'b', 'c', 'd', 'e', 'f', 'g', 'sub/h')})
    lines = [row if isinstance(row, str) else json.dumps(row) for row, _, _ in ROWS]
    write_files(tmp_path, {'c.jsonl': ''.join(f'{line}\n' for line in lines)})
    found = entries(FolderSource(str(tmp_path / 'in'), str(tmp_path / 'c.jsonl')))
    wanted = [
        (key if problem is None else f'{key} (c.jsonl line {number})', problem)
        for number, (_, key, problem) in enumerate(ROWS, start=1)
    ]
    assert [(entry.key, entry.problem) for entry in found] == [*wanted, ('f.jpg', 'no_caption')]
    captions = [entry.captions for entry in found if entry.problem is None]
    assert captions == [['[a cat'], ['a dog', 'a hound'], ['one', 'two']]


def test_short_and_undecodable_rows_of_a_csv_are_rejected(tmp_path: Path) -> None:
    write_files(tmp_path, {f'{name}.jpg': 'x' for name in 'abcd'})
    write_files(tmp_path, {'Metadata.CSV': b'file_name,text\na.jpg\nb.jpg,caf\xe9\nc.jpg,a\x00b\x00\nd.jpg,good\n'})
    assert [(entry.key, entry.problem, entry.captions) for entry in entries(FolderSource(str(tmp_path)))] == [
        ('a.jpg (Metadata.CSV line 2)', 'no_caption', []),
        ('b.jpg (Metadata.CSV line 3)', 'caption_not_utf8', []),
        ('c.jpg (Metadata.CSV line 4)', 'caption_not_utf8', []),
        ('d.jpg', None, ['good']),
    ]


def test_suffixes_are_compared_without_case(tmp_path: Path) -> None:
    write_files(tmp_path, {'a.JPG': 'x', 'a.TXT': 'one', 'b.jpg': 'x', 'b.Json': '{"caption": "two"}'})
    write_files(tmp_path, {'c.jpg': 'x', 'c.Txt': 'other', 'c.txt': 'three'})
    (tmp_path / 'gone.jpg').symlink_to('nothing')
    source = FolderSource(str(tmp_path))
    assert [entry.captions for entry in entries(source)] == [['one'], ['two'], ['three']]
    skipped = {kind: (files.count, *files.names) for kind, files in source.parts()[0].passed_over.items()}
    assert skipped == {'.txt': (1, 'c.Txt'), 'broken link': (1, 'gone.jpg')}


def test_a_captions_file_may_write_suffixes_in_another_case(tmp_path: Path) -> None:
    write_files(tmp_path, {'a.JPG': 'x', 'b.jpg': 'x', 'c.PNG': 'x', 'c.png': 'y'})
    write_files(tmp_path, {'metadata.csv': 'file_name,text\na.jpg,one\nb.JPEG,two\nb.JPG,three\nc.png,four\n'})
    assert [(entry.key, entry.problem, entry.captions) for entry in entries(FolderSource(str(tmp_path)))] == [
        ('a.JPG', None, ['one']),
        ('b.JPEG (metadata.csv line 3)', 'missing_file', []),
        ('b.jpg', None, ['three']),
        ('c.png', None, ['four']),
        ('c.PNG', 'no_caption', []),
    ]


def test_text_files_of_another_suffix_are_read_by_an_option(tmp_path: Path) -> None:
    write_files(tmp_path, {'a.jpg': 'x', 'a.caption': 'one', 'a.txt': 'tags'})
    default = FolderSource(str(tmp_path))
    assert [entry.captions for entry in entries(default)] == [['tags']]
    assert default.parts()[0].notes == ('1 .caption files were not read; read them with --caption-suffix caption',)
    source = FolderSource(str(tmp_path), caption_suffix='caption')
    assert [entry.captions for entry in entries(source)] == [['one']]
    assert {kind: files.names for kind, files in source.parts()[0].passed_over.items()} == {'.txt': ['a.txt']}


def test_notes_say_where_captions_were_found_and_expected(tmp_path: Path) -> None:
    write_files(tmp_path, {'a.jpg': 'x', 'sub/metadata.csv': 'file_name,text\na.jpg,x\n', 'metadata.json': '[]'})
    (note,) = FolderSource(str(tmp_path)).parts()[0].notes
    assert 'no image has a .txt or .json beside it' in note
    assert 'it has sub/metadata.csv, metadata.json, which --captions reads' in note
    write_files(tmp_path, {'metadata.csv': 'file_name,text\n/data/a.jpg,x\n'})
    (note,) = FolderSource(str(tmp_path)).parts()[0].notes
    assert note.startswith("metadata.csv line 2: no row names an image of the folder: it has '/data/a.jpg', and the")
