"""Tars written by img2dataset, and damaged ones."""

import gzip
import json
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from golden import check_golden
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


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE, link: str = '') -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, link
    return info.tobuf(tarfile.GNU_FORMAT)


def blocks(content: bytes) -> bytes:
    return content + bytes(-len(content) % BLOCK)


def extended(*records: bytes, content: bytes = b'x', size: int = 1) -> bytes:
    """Return a pax header for each record, followed by a file whose own header states this size."""
    headers = [header('pax', len(record), tarfile.XHDTYPE) + blocks(record) for record in records]
    return b''.join([*headers, header('1.jpg', size), blocks(content), bytes(2 * BLOCK)])


def dotted(*names: str) -> bytes:
    return tar_of([(name, b'{}') for name in names])


ONE, TWO = sample('1'), sample('2')
TEXTS = [b'{', b'', b'\xff', b'[1]', b'[' * 100_000, b'1' * 9999]
TEXTS.append(b'{"a": NaN, "b": [Infinity, 1], "c": "\\ud800", "d": {"e": true}}')
WHOLE = tar_of([*ONE, *sample('2', 'x' * 5000)])
SECOND = WHOLE.index(b'2.jpg')
PACKED = gzip.compress(WHOLE, mtime=0)
JSON_CAPTIONS = [
    ('2.json', b'{"caption": "from json"}'),
    ('3.jpg', b'x'),
    ('4.jpg', b'x'),
    ('4.json', b'{"caption": null}'),
]
MARKED = [('5.jpg', b'x'), ('5.txt', b'\xef\xbb\xbfwith a mark')]
TARS: dict[str, bytes] = {
    'captions in a list or one by one': tar_of(
        [*sample('1', 'from txt', captions=['one', 'two', None]), ('2.jpg', b'x'), *JSON_CAPTIONS, *MARKED]
    ),
    'without image': tar_of([*ONE, ('2.txt', b'x'), ('2.json', b'{"a": 1}'), *sample('3')]),
    'folder in place of an image': tar_of([('1.jpg', None), ('1.txt', b'x')]),
    'link with a size and a long name': header('long/' * 40 + '1.jpg', 5000, tarfile.LNKTYPE, 'a' * 150) + tar_of(TWO),
    'text that is not UTF-8': tar_of([('1.jpg', b'x'), ('1.txt', b'caf\xe9')]),
    'text that is not UTF-8 beside JSON': tar_of(
        [('2.jpg', b'x'), ('2.txt', b'\xff'), ('2.json', b'{"captions": ["a"]}')]
    ),
    **{f'JSON {text[:70]!r}': tar_of([('1.jpg', b'x'), ('1.txt', b'y'), ('1.json', text)]) for text in TEXTS},
    'repeated keys': tar_of([*ONE, *ONE, *TWO, *ONE]),
    'scattered text': tar_of([ONE[0], *TWO, ONE[1]]),
    'scattered image': tar_of([ONE[1], *TWO, ONE[0]]),
    'dots 1': dotted('photo.v2.jpg', 'photo.v2.txt'),
    'dots 2': dotted('DSC_0001.final.JPG', 'DSC_0001.final.json', 'DSC_0001.other.jpg'),
    'dots 3': dotted('a.jpeg', 'a.txt', 'a.v2.webp', 'a.v2.txt'),
    'dots 4': dotted('a.jpg', 'a.mask.png', 'a.txt', 'b.jpg'),
    'dots 5': dotted('a.json', 'a.left.jpg', 'a.left.txt'),
    'dots 6': dotted('a.jpg', 'x.cls', 'a.txt', '1.5.jpg'),
    'dots 7': dotted('a.jpg', 'ends.'),
    'a web page': b'<html>' * 1000,
    'nothing': b'',
    'no tar by gzip': gzip.compress(b'x' * 1000),
    'damaged header': WHOLE[: SECOND + 3] + b'\0' + WHOLE[SECOND + 4 :],
    'sparse file': tar_of(ONE)[: 6 * BLOCK] + header('2.jpg', 0, tarfile.GNUTYPE_SPARSE) + bytes(2 * BLOCK),
    # TarFile would take practically forever to skip this many bytes.
    'huge size': tar_of(ONE)[: 6 * BLOCK] + header('1.bin', 2**70) + bytes(5000),
    'negative size': tar_of(ONE)[: 6 * BLOCK] + header('1.bin', -2000) + bytes(5000),
    'two tars': tar_of(ONE) + tar_of(TWO),
    'without the second end': tar_of(ONE) + tar_of(TWO)[: 6 * BLOCK],
    'wrong checksum of gzip': PACKED[:-6] + bytes([PACKED[-6] ^ 1]) + PACKED[-5:],
    **{f'pax {record!r}': extended(record) for record in (b'0 path=x\n', b'-9 path=x\n', b'x path=x\n')},
    **{f'pax {record!r}': extended(record) for record in (b'14 size=-2000\n', b'12 size=one\n')},
    'pax name': extended(b'5 a=\n14 path=2.jpg\n'),
    'pax size of nothing': extended(b'9 size=0\n', content=b'', size=512),
    'pax size': extended(b'11 size=60\n', content=b'x' * 60, size=9 * BLOCK),
    'cut behind pax headers': tar_of(ONE)[: 6 * BLOCK] + extended(b'11 size=60\n', b'14 path=2.jpg\n')[: 5 * BLOCK],
}


def shown(found: Sequence[Entry | PassedOver]) -> str:
    text = ''.join(
        f'  {each.key}: {each.problem or each.image} {each.captions} {each.metadata}\n'
        if isinstance(each, Entry)
        else f'  {each.key} is skipped: {each.kind}\n'
        for each in found
    )
    return re.sub('Error: [^}]+', 'Error', text)  # the message depends on the version of Python


def test_unusual_and_damaged_tars_are_read_as_far_as_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = tmp_path / '0.tar', ''
    for name, content in TARS.items():
        path.write_bytes(content)
        text += f'{name}\n{shown(everything(WebDatasetSource(str(path))))}'
    monkeypatch.setattr('diffusion.prepare.webdataset.MAX_CONTENT', 100)
    monkeypatch.setattr('diffusion.prepare.webdataset.MAX_NAME', 121)
    long = 'n' * 116 + '.jpg'
    found = [('1.jpg', bytes(101)), ('1.txt', b'y'), ('2.jpg', b'y' * 100), (long, b'x')]
    path.write_bytes(tar_of([*found, ('3.jpg', b'may lack its caption'), (f'n{long}', b'x')]))
    text += f'limits\n{shown(everything(WebDatasetSource(str(path))))}'
    check_golden(Path(__file__).parent / 'golden/tars', {'entries.txt': text})


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
