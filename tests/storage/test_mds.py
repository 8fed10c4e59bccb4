"""MDS shards compared with Streaming's own writer, and the split of samples into shards."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from streaming import MDSWriter
from streaming.base.format import reader_from_json

from diffusion.storage import mds
from diffusion.storage.mds import ShardFormat

plain = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=8)
IMAGES: dict[str, tuple[str, st.SearchStrategy[Any]]] = {
    'image': ('bytes', st.binary(max_size=300)),
    'captions': ('json', st.lists(st.text(max_size=20), max_size=3)),
    'width': ('int', st.integers(0, 2**40)),
    'height': ('int', st.integers(-(2**40), 0)),
    'key': ('str', st.text(max_size=20)),
    'metadata': ('json', st.dictionaries(st.text(max_size=5), plain, max_size=3)),
}
ANY_SHAPE = arrays.array_shapes(max_dims=4, max_side=5) | st.sampled_from([(300,), (2, 300), (70_000,)])


def array(dtype: type, shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)


LATENTS: dict[str, tuple[str, st.SearchStrategy[Any]]] = {
    'captions': ('json', st.lists(st.text(max_size=20), max_size=3)),
    'key': ('str', st.text(max_size=20)),
    'moments': ('ndarray:float16:4,2,3', st.builds(array, st.just(np.float16), st.just((4, 2, 3)), st.integers(0, 99))),
    'row': ('ndarray:uint8:7', st.builds(array, st.just(np.uint8), st.just((7,)), st.integers(0, 99))),
    'text': ('ndarray:float32', st.builds(array, st.just(np.float32), ANY_SHAPE, st.integers(0, 99))),
}


def samples_of(columns: dict[str, tuple[str, st.SearchStrategy[Any]]]) -> st.SearchStrategy[list[dict[str, Any]]]:
    sample = st.fixed_dictionaries({name: values for name, (_, values) in columns.items()})
    return st.lists(sample, min_size=1, max_size=9)


def write_with_streaming(folder: Path, found: list[dict[str, Any]], shards: ShardFormat) -> None:
    columns, limit = dict(shards.columns), shards.size_limit
    with MDSWriter(out=str(folder), columns=columns, hashes=list(mds.HASHES), size_limit=limit) as writer:
        for sample in found:
            writer.write(sample)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@given(found=samples_of(IMAGES), size_limit=st.integers(900, 3000))
@hypothesis_settings(max_examples=12, deadline=None)
def test_shards_equal_those_of_streaming_byte_for_byte(tmp_path_factory, found, size_limit):
    shards = ShardFormat({name: encoding for name, (encoding, _) in IMAGES.items()}, size_limit)
    encoded = [shards.encode(sample) for sample in found]
    # MDSWriter writes an empty shard before a sample that is larger than a shard.
    assume(shards.header_bytes(1) + max(map(len, encoded)) <= size_limit)
    ours, theirs = (tmp_path_factory.mktemp(name) for name in ('ours', 'theirs'))
    entries = []
    for number, span in enumerate(shards.cut(np.array([len(each) for each in encoded]))):
        name, chosen = mds.shard_name(number), encoded[span.start : span.stop]
        entries.append(shards.write_shard(ours / name, chosen, [len(each) for each in chosen], name=name))
    (ours / 'index.json').write_text(mds.index_text(entries))
    write_with_streaming(theirs, found, shards)
    assert contents(ours) == contents(theirs)
    assert [shards.decode(each) for each in encoded] == found


@given(found=samples_of(LATENTS))
@hypothesis_settings(max_examples=12, deadline=None)
def test_array_bytes_equal_streamings(tmp_path_factory: pytest.TempPathFactory, found: list[dict[str, Any]]) -> None:
    columns = {name: encoding for name, (encoding, _) in LATENTS.items()}
    ours, theirs = (tmp_path_factory.mktemp(name) for name in ('ours', 'theirs'))
    mds.write_dataset(ours, found, columns)
    write_with_streaming(theirs, found, ShardFormat(columns))
    assert contents(ours) == contents(theirs)


def test_writing_a_dataset_replaces_an_existing_one(tmp_path: Path) -> None:
    for word in ('first', 'second'):
        mds.write_dataset(tmp_path / 'out', [{'key': word}], {'key': 'str'})
    (shard,) = json.loads((tmp_path / 'out/index.json').read_text())['shards']
    assert mds.algorithm_for(shard['raw_data']['hashes'], 'sha1') == 'sha1'
    assert reader_from_json(str(tmp_path), 'out', shard)[0] == {'key': 'second'}


@pytest.mark.parametrize('value', [np.zeros(3, np.float32), np.zeros((3, 1), np.float16), np.zeros(0, np.float16)])
def test_arrays_with_another_type_or_shape_are_refused(value: np.ndarray) -> None:
    with pytest.raises(AssertionError, match=str(value.dtype)):
        ShardFormat({'moments': 'ndarray:float16:3'}).encode({'moments': value})


def test_large_samples_get_a_shard_and_wrong_sizes_are_refused(tmp_path: Path) -> None:
    shards = ShardFormat({'image': 'bytes'}, 1000)
    assert list(shards.cut(np.array([5000, 10, 10]))) == [range(0, 1), range(1, 3)]
    with pytest.raises(AssertionError, match='do not have the given sizes'):
        shards.write_shard(tmp_path / 'a', [b'abc'], [4], name='a')


@given(sizes=st.lists(st.integers(0, 2000), max_size=60), size_limit=st.integers(600, 4000))
def test_cut_fills_shards_greedily_and_keeps_every_sample(sizes: list[int], size_limit: int) -> None:
    shards = ShardFormat({'image': 'bytes'}, size_limit)
    spans = list(shards.cut(np.array(sizes, np.uint32)))
    assert [index for span in spans for index in span] == list(range(len(sizes)))

    def shard_bytes(span: range) -> int:
        return shards.header_bytes(len(span)) + sum(sizes[index] for index in span)

    for span in spans:
        assert len(span) == 1 or shard_bytes(span) <= size_limit
        if span.stop < len(sizes):
            assert shard_bytes(range(span.start, span.stop + 1)) > size_limit
