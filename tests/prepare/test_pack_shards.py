"""Final shards, and the buckets of an image, which is decoded once and counts once."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from drawn import DrawnSource, keys, run, samples, snapshot
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from diffusion.config.image_shapes import read_buckets
from diffusion.prepare import process_sample
from diffusion.prepare.process_sample import COLUMNS, Buckets
from diffusion.storage.mds import ShardFormat
from tests.storage.test_mds import contents, write_with_streaming


def test_dataset_equals_that_of_a_single_mds_writer(tmp_path: Path) -> None:
    run(tmp_path / 'out', DrawnSource(3, 20), shard_mb=0.012)
    for bucket in ('16px', '32px'):
        found = samples(tmp_path / 'out' / bucket)
        write_with_streaming(tmp_path / bucket, found, ShardFormat(COLUMNS, 12_000))
        assert contents(tmp_path / bucket) == contents(tmp_path / 'out' / bucket)
        numbers = [int(sample['key'].removeprefix('image-')) for sample in found]
        assert numbers == sorted(numbers)
    assert len(list((tmp_path / 'out').rglob('*.mds'))) > 4


def test_metadata_has_measurements_and_source_columns(tmp_path: Path) -> None:
    run(tmp_path / 'out', DrawnSource(1, 8), sizes=[16])
    sample = samples(tmp_path / 'out/16px')[3]
    metadata = sample['metadata']
    assert (metadata['aesthetic_score'], metadata['language']) == (3, 'en')
    assert metadata['caption_length'] == len('a caption of image 3')
    assert len(metadata['perceptual_hash']) == 16
    assert min(metadata['source_width'], metadata['source_height']) >= 16 == min(sample['width'], sample['height'])
    assert list(metadata) == sorted(metadata)


sides = st.integers(8, 3000)


@given(width=sides, height=sides, aspects=st.sampled_from(['none', 'sdxl', ['640x384', '384x640'], ['512x512']]))
@hypothesis_settings(max_examples=300, deadline=None)
def test_image_goes_to_one_shape_of_each_size_it_fills(width: int, height: int, aspects: str | list[str]) -> None:
    buckets = Buckets([512, 256, 1024], aspects)
    found = buckets.choose(width, height)
    fitting = {
        size: [s for s in shapes if s.width <= width and s.height <= height]
        for size, shapes in buckets.shapes.items()
        if size <= min(width, height)
    }
    assert [size for size, _ in found] == sorted(size for size, shapes in fitting.items() if shapes)
    for size, shape in found:
        assert buckets.name(size, shape) in buckets.names
        distance = min(abs(math.log(rival.aspect * height / width)) for rival in fitting[size])
        assert abs(math.log(shape.aspect * height / width)) == pytest.approx(distance)
    assert Buckets([512, 256, 1024], aspects, every=False).choose(width, height) == found[-1:]


def test_names_and_shapes_of_buckets() -> None:
    for every, of_large in ((True, ['256px', '512px']), (False, ['512px'])):
        squares = Buckets([256, 512], 'none', every=every)
        names = [[squares.name(*f) for f in squares.choose(*size)] for size in ((600, 512), (511, 4000), (4000, 255))]
        assert names == [of_large, ['256px'], []], 'they depend on the shorter side'
    names = ['256px/256x256', '256px/320x192', '512px/512x512', '512px/640x384']
    assert Buckets([256, 512], ['640x384', '512x512']).names == names, 'listed shapes apply to the largest size'
    for aspects, step in itertools.product(('sdxl', ['640x384', '712x512']), (16, 32)):
        shapes = [shape for each in Buckets([256, 512, 1024], aspects, step=step).shapes.values() for shape in each]
        assert all(shape.width % step == 0 and shape.height % step == 0 for shape in shapes)


def test_recipe_reads_the_aspect_buckets(tmp_path: Path) -> None:
    report = run(tmp_path / 'out', DrawnSource(2, 40), aspects='sdxl')
    for size in ('16px', '32px'):
        counts = {f'{size}/{shape}': count for shape, count in read_buckets(tmp_path / 'out' / size).items()}
        assert counts == {name: count for name, count in report.buckets.items() if name.startswith(size)}
        for name, count in counts.items():
            stored = samples(tmp_path / 'out' / name)
            assert len(stored) == count
            width, height = (int(side) for side in name.partition('/')[2].split('x'))
            assert all(sample['width'] >= width and sample['height'] >= height for sample in stored)
    assert set(report.empty_buckets).isdisjoint(report.buckets)
    assert not any((tmp_path / 'out' / name).exists() for name in report.empty_buckets)
    assert json.loads((tmp_path / 'out/report.json').read_text())['empty_buckets'] == report.empty_buckets


def test_bucket_has_the_same_bytes_without_the_other_sizes(tmp_path: Path) -> None:
    run(tmp_path / 'both', DrawnSource(2, 10), sizes=[16, 32], aspects='sdxl')
    for size in (16, 32):
        run(tmp_path / str(size), DrawnSource(2, 10), sizes=[size], aspects='sdxl')
        found = snapshot(tmp_path / 'both' / f'{size}px')
        assert found == snapshot(tmp_path / str(size) / f'{size}px') and any(name.endswith('.mds') for name in found)


def test_image_is_decoded_once_for_all_its_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: Counter[bytes] = Counter()
    decode = process_sample.decode_image

    def counting(encoded: bytes, **options: Any) -> Any:
        decoded[encoded] += 1
        return decode(encoded, **options)

    monkeypatch.setattr(process_sample, 'decode_image', counting)
    report = run(tmp_path / 'out', DrawnSource(1, 10), sizes=[16, 24, 32])
    assert sum(report.buckets.values()) > 15
    assert set(decoded.values()) == {1} and len(decoded) == 10


def test_largest_keeps_an_image_only_in_its_largest_bucket(tmp_path: Path) -> None:
    every = run(tmp_path / 'every', DrawnSource(2, 12), sizes=[16, 32, 64])
    largest = run(tmp_path / 'largest', DrawnSource(2, 12), sizes=[16, 32, 64], buckets='largest')
    assert largest.pictures == every.pictures == sum(largest.buckets.values()) < sum(every.buckets.values())
    stored, all_stored = keys(tmp_path / 'largest'), keys(tmp_path / 'every')
    assert stored['64px'] == all_stored['64px']
    assert set(stored['32px']) == set(all_stored['32px']) - set(all_stored['64px'])
    assert set(stored['16px']) == set(all_stored['16px']) - set(all_stored['32px'])
