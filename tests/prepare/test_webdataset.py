"""Tars written by img2dataset, and damaged ones."""

import gzip
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from object_store import Store
from prepare.drawn import Members, entries, tar_of

from diffusion.prepare.source import Entry, PassedOver
from diffusion.prepare.webdataset import BLOCK, DamagedTar, WebDatasetSource, members


def sample(key: str, caption: str = 'a cat', **columns: Any) -> list[tuple[str, bytes]]:
    """Return the members of a sample as img2dataset writes them, in its order."""
    metadata = {'caption': caption, 'url': f'http://host/{key}', 'key': key, 'status': 'success', **columns}
    return [
        (f'{key}.jpg', f'image {key}'.encode()),
        (f'{key}.txt', caption.encode()),
        (f'{key}.json', json.dumps(metadata, indent=4).encode()),
    ]


def read(folder: Path, content: bytes | Members, name: str = '00000.tar') -> list[Entry]:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else tar_of(content))
    return entries(WebDatasetSource(str(path)))


def everything(source: WebDatasetSource) -> list[Entry | PassedOver]:
    return [entry for part in source.parts() for entry in source.read(part)]


def problems(found: Sequence[Entry | PassedOver]) -> list[tuple[str, str | None]]:
    return [(entry.key, entry.problem) for entry in found if isinstance(entry, Entry)]


@pytest.mark.parametrize('form', [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_img2dataset_tars_are_read_in_order(tmp_path: Path, form: int) -> None:
    columns = {'width': 512, 'height': 384, 'sha256': 'ab', 'exif': '{}', 'similarity': 0.31, 'punsafe': 0.01}
    for number in (1, 0):
        found = [*sample(f'{number:05}0002', 'two', **columns), *sample(f'{number:05}0001', 'one\nline')]
        (tmp_path / f'{number:05}.tar').write_bytes(tar_of(found, form=form))
        (tmp_path / f'{number:05}.parquet').write_bytes(b'not looked at')
        (tmp_path / f'{number:05}_stats.json').write_bytes(b'{}')
    source = WebDatasetSource(str(tmp_path))
    assert [part.name for part in source.parts()] == ['00000', '00001']
    found = entries(source)
    keys = ['00000/000000002', '00000/000000001', '00001/000010002', '00001/000010001']
    assert [entry.key for entry in found] == keys
    assert [entry.captions for entry in found[:2]] == [['two'], ['one\nline']]
    assert found[0].image == b'image 000000002' and found[0].problem is None
    expected = columns | {'url': 'http://host/000000002', 'key': '000000002', 'status': 'success'}
    assert found[0].metadata == expected


def test_tars_with_equal_names_in_two_folders_have_different_keys(tmp_path: Path) -> None:
    for folder in ('a', 'b'):
        read(tmp_path / folder, sample('1'))
    source = WebDatasetSource(str(tmp_path))
    assert [entry.key for entry in entries(source)] == ['a/00000/1', 'b/00000/1']
    assert len({part.name for part in source.parts()}) == 2


def test_list_of_captions_in_json_takes_precedence(tmp_path: Path) -> None:
    found = [*sample('1', 'from txt', captions=['one', 'two', None]), ('2.jpg', b'x')]
    found += [('2.json', b'{"caption": "from json"}'), ('3.jpg', b'x'), ('4.jpg', b'x')]
    found += [('4.json', b'{"caption": null}'), ('5.jpg', b'x'), ('5.txt', b'\xef\xbb\xbfwith a mark')]
    captions = [entry.captions for entry in read(tmp_path, found)]
    assert captions == [['one', 'two', None], ['from json'], [], [], ['with a mark']]


def test_sample_without_image_is_reported(tmp_path: Path) -> None:
    found = read(tmp_path, [*sample('1'), ('2.txt', b'x'), ('2.json', b'{"a": 1}'), *sample('3')])
    assert problems(found) == [('00000/1', None), ('00000/2', 'no_image'), ('00000/3', None)]
    assert found[1].metadata == {'a': 1}
    assert problems(read(tmp_path, [('1.jpg', None), ('1.txt', b'x')])) == [('00000/1', 'no_image')], 'a folder'


def test_link_with_a_size_and_a_long_name_has_no_content(tmp_path: Path) -> None:
    info = tarfile.TarInfo('long/' * 40 + '1.jpg')
    info.type, info.size, info.linkname = tarfile.LNKTYPE, 5000, 'long/' * 40 + '0.jpg'
    found = read(tmp_path, info.tobuf(tarfile.GNU_FORMAT) + tar_of(sample('2')))
    assert problems(found) == [(f'00000/{"long/" * 40}1', 'no_image'), ('00000/2', None)]


def test_captions_that_are_not_utf8_are_reported(tmp_path: Path) -> None:
    found = [('1.jpg', b'x'), ('1.txt', b'caf\xe9')]
    found += [('2.jpg', b'x'), ('2.txt', b'\xff'), ('2.json', b'{"captions": ["a"]}')]
    assert problems(read(tmp_path, found)) == [('00000/1', 'caption_not_utf8'), ('00000/2', None)]


@pytest.mark.parametrize('text', [b'{', b'', b'\xff', b'[1]', b'[' * 100_000, b'1' * 10_000])
def test_invalid_json_loses_its_columns_but_not_the_image(tmp_path: Path, text: bytes) -> None:
    found = read(tmp_path, [('1.jpg', b'x'), ('1.txt', b'y'), ('1.json', text)])
    assert (found[0].problem, found[0].image, found[0].captions) == (None, b'x', ['y'])
    assert list(found[0].metadata) == ['bad_metadata']


def test_metadata_is_converted_to_json_types(tmp_path: Path) -> None:
    text = b'{"a": NaN, "b": [Infinity, 1], "c": "\\ud800", "d": {"e": true}}'
    found = read(tmp_path, [('1.jpg', b'x'), ('1.json', text)])
    assert found[0].metadata == {'a': None, 'b': [None, 1], 'c': '?', 'd': {'e': True}}
    json.dumps(found[0].metadata, allow_nan=False).encode()


def test_repeated_keys_and_scattered_members_are_reported(tmp_path: Path) -> None:
    found = read(tmp_path, [*sample('1'), *sample('1'), *sample('2'), *sample('1')])
    expected = [('00000/1', None), ('00000/1', 'duplicate_key'), ('00000/2', None), ('00000/1', 'duplicate_key')]
    assert problems(found) == expected
    (jpg, txt, _), other = sample('1'), sample('2')
    expected = [('00000/1', None), ('00000/2', None), ('00000/1', 'sample_scattered')]
    assert problems(read(tmp_path, [jpg, *other, txt])) == expected
    expected[0] = ('00000/1', 'no_image')
    assert problems(read(tmp_path, [txt, *other, jpg])) == expected


def test_folders_and_unusual_names_in_a_tar_are_read(tmp_path: Path) -> None:
    deep = 'deep/' * 60 + '1'
    ignored = [(name, b'ignored') for name in ('b/1.seg.png', 'b/1.npy', 'b/._1.jpg', 'readme')]
    found = [('./a/1.jpg', b'x'), ('a/1.txt', b'y'), ('b/1.jpg', b'x'), *ignored[:2], ('b', None), *ignored[2:]]
    found += [(f'{deep}.jpg', b'x'), (f'{deep}.txt', b'y'), ('\udce9.jpg', b'x')]
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        read_back = read(tmp_path, tar_of(found, form=form))
        assert problems(read_back) == [(f'00000/{key}', None) for key in ('a/1', 'b/1', deep, '\\xe9')]
        assert [entry.captions for entry in read_back] == [['y'], [], ['y'], []]
        passed = [file for file in everything(WebDatasetSource(str(tmp_path))) if isinstance(file, PassedOver)]
        names = {'b/1.npy': '.npy', 'b/._1.jpg': 'hidden', 'readme': 'without suffix', 'b/1.seg.png': '.png'}
        assert {file.key.removeprefix('00000/'): file.kind for file in passed} == names


@pytest.mark.parametrize(
    ('members', 'samples', 'passed'),
    [
        (['photo.v2.jpg', 'photo.v2.txt'], ['photo.v2'], []),
        (['DSC_0001.final.JPG', 'DSC_0001.final.json', 'DSC_0001.other.jpg'], ['DSC_0001.final', 'DSC_0001.other'], []),
        (['a.jpeg', 'a.txt', 'a.v2.webp', 'a.v2.txt'], ['a', 'a.v2'], []),
        (['a.jpg', 'a.mask.png', 'a.txt', 'b.jpg'], ['a', 'b'], ['a.mask.png']),
        (['a.json', 'a.left.jpg', 'a.left.txt'], ['a', 'a.left'], []),
        (['a.jpg', 'x.cls', 'a.txt', '1.5.jpg'], ['a', '1.5'], ['x.cls']),
    ],
)
def test_names_with_dots_are_read(tmp_path: Path, members: list[str], samples: list[str], passed: list[str]) -> None:
    (tmp_path / '0.tar').write_bytes(tar_of([(name, b'{}') for name in members]))
    found = everything(WebDatasetSource(str(tmp_path)))
    assert [entry.key for entry in found if isinstance(entry, Entry)] == [f'0/{key}' for key in samples]
    assert [file.key for file in found if isinstance(file, PassedOver)] == [f'0/{name}' for name in passed]


@pytest.mark.parametrize('name', ['00000.tar.gz', '00000.tgz', '00000.tar'])
def test_gzipped_tars_are_read(tmp_path: Path, name: str) -> None:
    packed = gzip.compress(tar_of([*sample('1'), *sample('2')]))
    assert [entry.key.rpartition('/')[2] for entry in read(tmp_path, packed, name)] == ['1', '2']


def test_file_that_is_not_a_tar_or_damaged_is_reported(tmp_path: Path) -> None:
    assert problems(read(tmp_path, b'<html>' * 1000)) == [('00000 at byte 0', 'part_unreadable')]
    assert problems(read(tmp_path, b'')) == [('00000 at byte 0', 'part_cut_off')]
    assert problems(read(tmp_path, gzip.compress(b'x' * 1000))) == [('00000 at byte 0', 'part_unreadable')]
    whole = bytearray(tar_of([*sample('1'), *sample('2', 'x' * 5000)]))
    packed, second = bytearray(gzip.compress(whole, mtime=0)), whole.index(b'2.jpg')
    whole[second + 3] ^= 1
    assert problems(read(tmp_path, bytes(whole))) == [(f'00000 at byte {second}', 'part_damaged')], 'a header'
    packed[-6] ^= 1
    assert read(tmp_path, bytes(packed))[-1].problem == 'part_damaged', 'the checksum'


@pytest.mark.parametrize('packed', [False, True])
def test_truncated_tar_yields_samples_before_the_cut_and_reports_its_offset(tmp_path: Path, packed: bool) -> None:
    whole = tar_of([*sample('1'), *sample('2', 'long ' * 300), *sample('3')])
    second, third = (whole.index(f'{key}.jpg'.encode()) for key in '23')
    ends = {'00000/1': second, '00000/2': third}
    for cut in (1, 511, 512, 700, 3 * BLOCK, second, second + 511, second + 512, third, third + 600):
        content = gzip.compress(whole[:cut], mtime=0)[:-8] if packed else whole[:cut]
        *served, last = read(tmp_path, content)
        assert last.problem == 'part_cut_off', cut
        byte = int(last.key.removeprefix('00000 at byte '))
        assert byte % BLOCK == 0 and byte <= cut, cut
        assert [entry.key for entry in served] == [key for key, end in ends.items() if end + BLOCK <= cut], cut
        assert all(entry.problem is None for entry in served)


def test_header_with_a_huge_or_negative_size_ends_quickly(tmp_path: Path) -> None:
    # TarFile would take practically forever to skip this many bytes.
    at = f'00000 at byte {6 * BLOCK}'
    for size, expected in ((2**70, [('00000/0', None), (at, 'part_cut_off')]), (-2000, [(at, 'part_damaged')])):
        info = tarfile.TarInfo('1.bin')
        info.size = size
        content = tar_of(sample('0'))[: 6 * BLOCK] + info.tobuf(tarfile.GNU_FORMAT) + bytes(5000)
        assert problems(read(tmp_path, content)) == expected


def test_concatenated_tars_are_both_read(tmp_path: Path) -> None:
    first, second = tar_of(sample('1')), tar_of(sample('2'))
    assert problems(read(tmp_path, first + second)) == [('00000/1', None), ('00000/2', None)]
    end = len(first) + second.rindex(b'}') // BLOCK * BLOCK + BLOCK
    found = read(tmp_path, (first + second)[:end])
    assert problems(found) == [('00000/1', None), (f'00000 at byte {end}', 'part_cut_off')], 'without the second end'


def extended(record: bytes) -> bytes:
    """Return a pax header with one record, followed by a file."""
    header = tarfile.TarInfo('pax')
    header.type, header.size = tarfile.XHDTYPE, len(record)
    return header.tobuf(tarfile.USTAR_FORMAT) + record.ljust(BLOCK, b'\0') + tar_of([('1.jpg', b'x')])


@pytest.mark.parametrize('record', [b'0 path=x\n', b'-9 path=x\n', b'x path=x\n', b'14 size=-2000\n', b'12 size=one\n'])
def test_invalid_pax_headers_are_reported(tmp_path: Path, record: bytes) -> None:
    assert problems(read(tmp_path, extended(record))) == [('00000 at byte 0', 'part_damaged')]
    assert problems(read(tmp_path, extended(b'5 a=\n14 path=2.jpg\n'))) == [('00000/2', None)]


def test_too_large_image_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('diffusion.prepare.webdataset.MAX_CONTENT', 100)
    found = read(tmp_path, [('1.jpg', bytes(101)), ('1.txt', b'y'), ('2.jpg', bytes(100))])
    assert problems(found) == [('00000/1', 'file_too_large'), ('00000/2', None)]


NAMES = st.sampled_from(
    ['1.jpg', '1.txt', '2.jpg', '2.json', 'a/3.png', 'x' * 60 + '/' + 'x' * 90 + '.jpg', 'ü.jpg', 'dir']
)
CONTENTS = st.binary(max_size=1500) | st.sampled_from([b'', bytes(512), b'x' * 512])


@settings(max_examples=30, deadline=None)
@given(found=st.lists(st.tuples(NAMES, CONTENTS), max_size=6), form=st.sampled_from([0, 1, 2]), packed=st.booleans())
def test_members_equal_those_of_tarfile(
    tmp_path_factory: pytest.TempPathFactory, found: list[tuple[str, bytes]], form: int, packed: bool
) -> None:
    content = tar_of(found, form=form)
    path = tmp_path_factory.mktemp('tars') / 'a.tar'
    path.write_bytes(gzip.compress(content) if packed else content)
    with tarfile.open(path) as tar:
        expected = [(info.name, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]
    assert [(member.name, member.content) for member in members(path)] == expected == found


@settings(max_examples=25, deadline=2000)
@given(data=st.data())
def test_damaged_tar_raises_only_damaged_tar(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    form = data.draw(st.sampled_from([0, 1, 2]))
    content = bytearray(tar_of([*sample('1'), ('y' * 60 + '/' + 'y' * 80 + '.jpg', b'x'), *sample('2')], form=form))
    for _ in range(data.draw(st.integers(1, 3))):
        header = data.draw(st.sampled_from(range(0, len(content) // BLOCK, 1))) * BLOCK
        at = header + data.draw(st.sampled_from([*range(100, 160), *range(512)])) % BLOCK
        content[at] = data.draw(st.integers(0, 255))
        is_checked = data.draw(st.booleans()) and any(content[header : header + BLOCK])
        if is_checked:  # a damaged header with a valid checksum
            content[header + 148 : header + 156] = b' ' * 8
            content[header + 148 : header + 155] = b'%06o\0' % sum(content[header : header + BLOCK])
    path = tmp_path_factory.mktemp('tars') / 'a.tar'
    path.write_bytes(content)
    try:
        for _ in members(path):
            pass
    except DamagedTar as damage:
        assert damage.byte <= len(content)  # noqa: PT017


def test_tars_in_an_object_store_are_read(store: Store) -> None:
    objects = {'laion/00000.tar': tar_of(sample('1')), 'laion/00001.tar': tar_of(sample('2'))}
    bucket = store.bucket('pictures', **objects, **{'laion/00000.parquet': b''})
    for location in (f'{bucket}/laion', f'{bucket}/laion/{{00000..00001}}.tar'):
        assert problems(entries(WebDatasetSource(location))) == [('00000/1', None), ('00001/2', None)]
    source = WebDatasetSource(f'{bucket}/laion')
    part = source.parts()[0]
    store.client.delete_object(Bucket='pictures', Key='laion/00000.tar')
    with pytest.raises(ValueError, match=r'^s3://pictures/laion/00000\.tar: there is no such bucket or object'):
        list(source.read(part))


def test_text_members_of_another_suffix_are_read_by_an_option(tmp_path: Path) -> None:
    (tmp_path / 'a.TAR').write_bytes(tar_of([('1.JPG', b'x'), ('1.Caption', b'one'), ('1.txt', b'tags')]))
    (found,) = entries(WebDatasetSource(str(tmp_path), caption_suffix='caption'))
    assert (found.image, found.captions) == (b'x', ['one'])
    (found,) = entries(WebDatasetSource(str(tmp_path)))
    assert found.captions == ['tags']
