"""Division of an input with few parts among all cores: the same dataset, and counts that are counted once."""

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from drawn import encoded_image, report_of, snapshot

from diffusion.prepare import input_plan
from diffusion.prepare.convert_part import PartJob
from diffusion.prepare.counts_report import PrepareReport
from diffusion.prepare.worker_pool import run_job

IMAGES = 100


@pytest.fixture(scope='module')
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with images, some captions, a damaged image and two files that are skipped."""
    folder = tmp_path_factory.mktemp('images')
    for number in range(IMAGES):
        (folder / f'{number:03}.png').write_bytes(encoded_image(number) if number != 70 else b'no image')
        if number % 10:
            (folder / f'{number:03}.txt').write_text(f'image number {number}')
    (folder / 'notes.doc').write_text('notes')
    (folder / '.hidden').write_text('hidden')
    return folder


def run(images: Path, out: Path, jobs: list[str], **values: Any) -> PrepareReport:
    """Prepare the images in this process, and record the names of the parts that are converted."""

    def recording(job: Any) -> Any:
        jobs.extend([job.part.name] if isinstance(job, PartJob) else [])
        return run_job(job)

    source = {'kind': 'folder', 'location': str(images)}
    given = {'source': source, 'out': str(out), 'sizes': [16], 'shard_mb': 0.01, **values}
    return report_of(given, run=partial(map, recording))


def test_divided_folder_gives_the_same_dataset(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    divided: list[str] = []
    report = run(images, tmp_path / 'divided', divided, duplicates='near', hold_out=5)
    assert divided == [f'pictures-000000.{number}' for number in range(4)], '32 images each, and the rest'
    monkeypatch.setattr(input_plan, 'FEW_PARTS', 0)
    whole: list[str] = []
    expected = run(images, tmp_path / 'whole', whole, duplicates='near', hold_out=5)
    assert whole == ['pictures-000000']
    for name in ('inputs', 'pictures', 'rejected', 'passed_over', 'notes', 'statistics', 'fingerprint'):
        assert getattr(report, name) == getattr(expected, name), name
    assert report.passed_over['.doc'].count == report.passed_over['hidden'].count == 1
    found, there = snapshot(tmp_path / 'divided'), snapshot(tmp_path / 'whole')
    assert found.keys() == there.keys()
    other = {name.rpartition('/')[2] for name in found if found[name] != there[name]}
    assert other <= {'report.json', 'report.html', 'images.parquet'}
    tables = (pq.read_table(next((tmp_path / name).rglob('images.parquet'))) for name in ('divided', 'whole'))
    assert next(tables).equals(next(tables)), 'only its row groups differ'
