"""An image is in every bucket that it fills, is decoded once, and counts once."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from drawn import DrawnSource, keys, run, snapshot

from diffusion.prepare import process_sample
from diffusion.prepare.settings import settings_of


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


def test_buckets_make_no_difference_for_one_size() -> None:
    source = {'kind': 'folder', 'location': 'photos'}
    plans = [
        settings_of({'source': source, 'out': 'out', 'sizes': sizes, 'buckets': buckets}).content_settings()
        for sizes in ([256], [256, 512])
        for buckets in ('every', 'largest')
    ]
    assert [plan['buckets'] for plan in plans] == ['largest', 'largest', 'every', 'largest']
