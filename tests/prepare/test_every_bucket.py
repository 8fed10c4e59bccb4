"""An image is in every bucket that it fills, is decoded once, and counts once."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from drawn import DrawnSource, draw, here, keys, run
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from diffusion.prepare import process_sample
from diffusion.prepare.counts_report import PrepareReport
from diffusion.prepare.pipeline import prepare
from diffusion.prepare.settings import settings_of


def shapes_of(report: PrepareReport) -> list[tuple[int, int, int]]:
    """Return (resolution, width, height) of each bucket of a report."""
    found = []
    for name in [*report.buckets, *report.empty_buckets]:
        size, _, shape = name.partition('/')
        width, height = shape.split('x') if shape else [size.removesuffix('px')] * 2
        found.append((int(size.removesuffix('px')), int(width), int(height)))
    return found


@given(
    sizes=st.sets(st.sampled_from([24, 32, 48]), max_size=1).map({16, 64}.union),
    aspects=st.sampled_from(['none', ['64x40', '40x64', '48x48']]),
    first=st.integers(0, 1000),
    store=st.sampled_from(['resized', 'original']),
)
@hypothesis_settings(max_examples=2, deadline=None)
def test_accepted_image_is_in_exactly_the_resolutions_that_it_fills(
    sizes: set[int], aspects: Any, first: int, store: str
) -> None:
    class Shifted(DrawnSource):
        def entry(self, key: str, number: int) -> Any:
            return super().entry(f'image-{first + number}', first + number)

    with TemporaryDirectory() as folder:
        out = Path(folder, 'out')
        report = run(out, Shifted(2, 6, broken=5), sizes=sorted(sizes), aspects=aspects, store=store)
        stored = keys(out)
        filled: dict[str, list[int]] = {}
        for name, found in stored.items():
            for key in found:
                filled.setdefault(key, []).append(int(name.partition('px')[0]))
        broken = {f'image-{n}' for n in range(first, first + 12) if n % 5 == 0}
        for number in range(first, first + 12):
            width, height = draw(number).size
            fits = {s for s, w, h in shapes_of(report) if s <= min(width, height) and w <= width and h <= height}
            expected = set() if f'image-{number}' in broken else fits
            # Sorted lists: once per resolution, so in one shape of each.
            assert sorted(filled.get(f'image-{number}', [])) == sorted(expected)
        assert report.inputs == 12 == report.pictures + sum(entry.count for entry in report.rejected.values())
        assert report.pictures == len(filled)
        assert report.buckets == {name: len(found) for name, found in stored.items()}


@pytest.mark.parametrize('aspects', [pytest.param('none', marks=pytest.mark.slow), 'sdxl'])
def test_bucket_has_the_same_bytes_without_the_other_sizes(tmp_path: Path, aspects: str) -> None:
    run(tmp_path / 'both', DrawnSource(2, 10), sizes=[16, 32], aspects=aspects)
    for size in (16, 32):
        run(tmp_path / str(size), DrawnSource(2, 10), sizes=[size], aspects=aspects)
        assert shards(tmp_path / 'both' / f'{size}px') == shards(tmp_path / str(size) / f'{size}px')


def shards(folder: Path) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob('*.mds'))}
    assert found
    return found


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


@pytest.mark.slow
def test_openmoji_with_two_sizes_equals_both_sizes_prepared_alone(tmp_path: Path) -> None:
    for name, sizes in (('both', [16, 32]), ('16px', [16]), ('32px', [32])):
        values = {'source': {'kind': 'openmoji', 'limit': 4}, 'out': str(tmp_path / name), 'sizes': sizes}
        prepare(settings_of(values), run=here)
    for name in ('16px', '32px'):
        assert shards(tmp_path / 'both' / name) == shards(tmp_path / name / name)


def test_buckets_make_no_difference_for_one_size() -> None:
    source = {'kind': 'folder', 'location': 'photos'}
    plans = [
        settings_of({'source': source, 'out': 'out', 'sizes': sizes, 'buckets': buckets}).content_settings()
        for sizes in ([256], [256, 512])
        for buckets in ('every', 'largest')
    ]
    assert [plan['buckets'] for plan in plans] == ['largest', 'largest', 'every', 'largest']
