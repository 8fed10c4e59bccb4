"""Complete preparations: resume, errors, locks, shares and divided parts; every input is accounted for."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from drawn import (
    Backwards,
    DrawnSource,
    draw,
    encode,
    encoded_image,
    interrupted,
    report_of,
    run,
    samples,
    settings,
    snapshot,
)
from golden import check_golden
from PIL import Image
from waiting import wait_until

from diffusion.errors import DataError, ExternalError, UserError
from diffusion.prepare import convert_part as part_module
from diffusion.prepare import input_plan
from diffusion.prepare.catalog import Catalog
from diffusion.prepare.convert_part import PartJob
from diffusion.prepare.counts_report import PrepareReport
from diffusion.prepare.image_decoding import decode_image
from diffusion.prepare.part_shards import ShardPlace
from diffusion.prepare.pipeline import prepare
from diffusion.prepare.source import Entry, Part
from diffusion.prepare.work_dir import Share, WorkFolder
from diffusion.prepare.worker_pool import run_job
from diffusion.storage.mds import ShardFormat


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_both_datasets_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    choices: dict[str, Any] = {'aspects': 'sdxl', 'duplicates': 'near', 'shard_mb': 0.01, 'hold_out': 9}
    for workers in (1, 2):
        prepare(settings(tmp_path / str(workers), workers=workers, **choices), source=DrawnSource(6, 8, broken=7))
    assert snapshot(tmp_path / '1') == snapshot(tmp_path / '2')
    assert snapshot(tmp_path / '1-held-out') == snapshot(tmp_path / '2-held-out')
    assert names(tmp_path) == ['1', '1-held-out', '2', '2-held-out']


def repeated(number: int) -> bytes:
    """Return an image, or for odd numbers the one before, smaller and compressed more."""
    image = draw(number // 2, width=96, height=80)
    return encode(image.resize((72, 60)), 'JPEG') if number % 2 else encode(image, 'PNG')


def test_near_duplicates_are_rejected_with_the_key_of_their_original(tmp_path: Path) -> None:
    report = run(tmp_path / 'out', DrawnSource(4, 9, image=repeated), duplicates='near', max_distance=8)
    assert report.rejected['duplicate'].count == 18
    assert report.rejected['duplicate'].names[0] == 'image-1 (duplicate of image-0)'
    assert [sample['key'] for sample in samples(tmp_path / 'out/32px')] == [f'image-{n}' for n in range(0, 36, 2)]


def test_exact_duplicates_are_images_with_equal_pixels(tmp_path: Path) -> None:
    def same(number: int) -> bytes:
        return encode(draw(number // 3, width=64, height=64), ('PNG', 'BMP', 'JPEG')[number % 3])

    report = run(tmp_path / 'out', DrawnSource(2, 6, image=same), duplicates='exact')
    assert report.rejected['duplicate'].names == [f'image-{n + 1} (duplicate of image-{n})' for n in (0, 3, 6, 9)]
    assert run(tmp_path / 'all', DrawnSource(2, 6, image=same), duplicates='none').rejected == {}


def test_store_original_keeps_bytes_unless_the_image_needs_correction(tmp_path: Path) -> None:
    turned = draw(1, width=40, height=64)
    exif = turned.getexif()
    exif[0x0112] = 6
    found = {
        'plain': encode(draw(1, width=64, height=40), 'JPEG'),
        'png': encode(draw(2, width=64, height=40), 'PNG'),
        'turned': encode(turned, 'JPEG', exif=exif),
        'clear': encode(draw(3, width=64, height=40).convert('RGBA'), 'PNG'),
        'bmp': encode(draw(4, width=64, height=40), 'BMP'),
    }

    class Given(DrawnSource):
        def read(self, part: Part) -> Iterator[Entry]:
            return (Entry(key, image, ['x']) for key, image in found.items())

    run(tmp_path / 'out', Given(1, 5), store='original')
    stored = {sample['key']: sample for sample in samples(tmp_path / 'out/32px')}
    assert {key for key in found if stored[key]['image'] == found[key]} == {'plain', 'png'}
    assert all((sample['width'], sample['height']) == (64, 40) for sample in stored.values())


def test_lossless_images_are_stored_as_chosen_and_a_sample_is_measured(tmp_path: Path) -> None:
    images = [encode(draw(number, width=64, height=48), 'PNG' if number else 'JPEG') for number in range(12)]
    source = DrawnSource(2, 6, image=images.__getitem__)
    png, webp = (run(tmp_path / kind, source, sizes=[32], lossless_format=kind) for kind in ('png', 'webp'))
    stored, recoded = (samples(tmp_path / kind / '32px') for kind in ('png', 'webp'))
    assert [sample['image'][8:12] == b'WEBP' for sample in recoded] == [False, *[True] * 11]
    pixels = [[decode_image(sample['image']).image for sample in found[1:]] for found in (stored, recoded)]
    errors = [np.square(np.float32(a) - np.float32(b)).mean() for a, b in zip(*pixels, strict=True)]
    measured = [*range(4), *range(5, 9)]  # four of each part; the first image is a JPEG
    sizes = [sum(len(found[1 + at]['image']) for at in measured) for found in (stored, recoded)]
    decibels = np.mean([10 * np.log10(255**2 / errors[at]) for at in measured])
    text = f'webp of quality 95: {sizes[1]:,} instead of {sizes[0]:,} bytes ({1 - sizes[1] / sizes[0]:.0%} less)'
    assert f'PNG images are stored as {text} at {decibels:.1f} dB PSNR, in a sample of 8 images' in webp.notes
    assert not [note for note in png.notes if 'PSNR' in note]


def test_images_longer_than_their_format_allows_are_rejected(tmp_path: Path) -> None:
    strips = [encode(draw(1, width=width, height=16), 'PNG') for width in (16_383, 16_384, 65_500, 65_501)]
    for kind, kept in (('webp', 1), ('png', 3)):
        report = run(tmp_path / kind, DrawnSource(1, 4, image=strips.__getitem__), sizes=[16], lossless_format=kind)
        assert report.rejected['too_long'].names == [f'image-{number}' for number in range(kept, 4)]


def test_images_are_resized_by_the_chosen_filter(tmp_path: Path) -> None:
    image, found = draw(0, width=60, height=40), []
    for resize in ('lanczos', 'bilinear'):
        run(tmp_path / resize, DrawnSource(1, 1, image=lambda _: encode(image, 'PNG')), sizes=[16], resize=resize)
        found.append(samples(tmp_path / resize / '16px')[0]['image'])
        stored = decode_image(found[-1]).image
        expected = image.resize((24, 16), getattr(Image.Resampling, resize.upper()))
        assert np.abs(np.asarray(stored, np.int16) - np.asarray(expected, np.int16)).max() <= 1
    assert found[0] != found[1]


def test_report_notes_a_filter_for_a_column_that_no_image_has(tmp_path: Path) -> None:
    filters = {'columns': {'beauty': {'min': 1}}, 'missing': 'keep'}
    report = run(tmp_path / 'out', filters=filters)
    assert report.notes[0].startswith('filters.columns.beauty: no image has this column')
    assert 'filters.columns.beauty' in report.text('out')


def test_interrupted_preparation_resumes_from_finished_parts(tmp_path: Path) -> None:
    source = DrawnSource(5, 6)
    (tmp_path / 'gone').mkdir()
    (tmp_path / 'gone/drawn-3').touch()
    stopping = DrawnSource(5, 6, gone=str(tmp_path / 'gone'))
    with pytest.raises(ValueError, match=r'part 3 \(drawn-3\): cannot be read \(drawn-3: no such file\)'):
        run(tmp_path / 'out', stopping)
    done = {path: path.stat().st_ino for path in (tmp_path / 'out.work/parts').iterdir()}
    assert [path.name for path in sorted(done)] == ['000000', '000001', '000002']
    assert not (tmp_path / 'out').exists()
    read: list[str] = []

    def watched(jobs: Any) -> Iterator[Any]:
        for job in jobs:
            read.append(job.name)
            yield run_job(job)

    prepare(settings(tmp_path / 'out', workers=1), source=source, run=watched)
    assert read[:2] == ['part 3 (drawn-3)', 'part 4 (drawn-4)'] and 'shard' in read[2]
    run(tmp_path / 'whole', source)
    assert snapshot(tmp_path / 'out') == snapshot(tmp_path / 'whole')


def test_resumed_preparation_does_not_search_for_duplicates_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_after_parts(jobs: Any) -> Iterator[Any]:
        for job in jobs:
            if not isinstance(job, PartJob):
                raise KeyboardInterrupt
            yield run_job(job)

    choices: dict[str, Any] = {'duplicates': 'near', 'max_distance': 8}
    source = DrawnSource(2, 8, image=repeated)
    run(tmp_path / 'whole', source, **choices)
    with pytest.raises(KeyboardInterrupt):
        prepare(settings(tmp_path / 'out', **choices), source=source, run=stop_after_parts)
    monkeypatch.setattr(Catalog, '_search', None)
    assert run(tmp_path / 'out', source, **choices).rejected['duplicate'].count == 8
    assert snapshot(tmp_path / 'out') == snapshot(tmp_path / 'whole')


def test_every_file_is_flushed_before_it_is_renamed_into_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a power failure could leave an empty file under its final name."""
    flushed, missed = set(), set()

    def find_unflushed(pattern: str) -> None:
        files = (path for path in tmp_path.glob(pattern) if path.is_file())
        missed.update(path.name for path in files if path.stat().st_ino not in flushed)

    def checking_run(jobs: Any) -> Iterator[Any]:
        for done in map(run_job, jobs):
            for pattern in ('parts/*/*', 'plan.json'):
                find_unflushed(f'out.work/{pattern}')
            yield done

    monkeypatch.setattr(os, 'fsync', lambda descriptor: flushed.add(os.fstat(descriptor).st_ino))
    prepare(settings(tmp_path / 'out', aspects='sdxl'), source=DrawnSource(2, 6, broken=5), run=checking_run)
    find_unflushed('out/**/*')
    assert not missed and len(flushed) > 10


def test_changed_plan_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(settings(tmp_path / 'out'), source=DrawnSource(3, 4), run=interrupted(0))
    assert names(tmp_path / 'out.work') == ['lock', 'parts', 'plan.json']
    for source, message in (
        (DrawnSource(3, 4), 'settings.jpeg_quality: 95 at the start, 80 now'),
        (DrawnSource(4, 4), 'parts.drawn-3: missing at the start, 1 now'),
        (DrawnSource(2, 4), 'parts.drawn-2: 1 at the start, missing now'),
        (DrawnSource(3, 4, stamp='2'), 'parts.drawn-0: 1 at the start, 2 now'),
        (Backwards(3, 4), 'the order of the input'),
    ):
        with pytest.raises(ValueError, match=f'other settings or another input:\n  {message}'):
            run(tmp_path / 'out', source, jpeg_quality=80 if 'quality' in message else 95)
    run(tmp_path / 'out', DrawnSource(3, 4), workers=1, max_rejected=0.5)  # which change no byte


def test_same_command_again_does_nothing(tmp_path: Path) -> None:
    first = run(tmp_path / 'out')
    before = snapshot(tmp_path / 'out')
    again = run(tmp_path / 'out', workers=1)
    assert (again.pictures, again.buckets, again.rejected) == (first.pictures, first.buckets, first.rejected)
    assert again.notes == ['already prepared from the same input with the same settings; nothing to do']
    assert snapshot(tmp_path / 'out') == before and names(tmp_path) == ['out']


def test_outputs_that_are_not_replaced_say_why(tmp_path: Path) -> None:
    found: list[str] = []

    def refuse(name: str, *, place: str = 'out', stamp: str = '1', **values: Any) -> None:
        with pytest.raises(UserError) as error:
            report_of(settings(tmp_path / place, **{'sizes': [16]} | values), DrawnSource(1, 4, stamp=stamp))
        found.append(f'{name}: {error.value}\n'.replace(f'{tmp_path}/', '').replace(numpy, 'NOW'))

    numpy = run(tmp_path / 'out', DrawnSource(1, 4), sizes=[16]).versions['numpy']
    path, other = tmp_path / 'out/report.json', {'kind': 'folder', 'location': 'other'}
    refuse('settings', jpeg_quality=80, license='CC0', source=other)
    refuse('source', source=other)
    refuse('files', stamp='2')
    path.write_text(
        path.read_text()
        .replace(f'"numpy": "{numpy}"', '"numpy": "1.0"')
        .replace('"fingerprint": "', '"fingerprint": "0')
    )
    refuse('versions')
    path.write_text('[]')
    refuse('damaged report')
    path.unlink()
    refuse('no report', overwrite=True)
    path.parent.with_name('file').touch()
    refuse('file', place='file')
    refuse('below a file', place='file/out')
    refuse('mount', place='/proc', work=str(tmp_path / 'work'))
    assert names(tmp_path) == ['file', 'out']
    check_golden(Path(__file__).parent / 'golden/outputs', {'refused.txt': ''.join(found)})


def test_read_error_of_a_part_is_retried_and_named_if_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Flaky(DrawnSource):
        """Source whose parts fail a few times after two images, as an object store may."""

        def read(self, part: Part) -> Iterator[Entry]:
            found = super().read(part)
            yield from islice(found, 2)
            if failures[part.name]:
                failures[part.name] -= 1
                raise ConnectionResetError('the store closed the connection')
            yield from found

    pauses: list[float] = []
    monkeypatch.setattr(part_module, 'time', SimpleNamespace(sleep=pauses.append))
    failures = {'drawn-0': 1, 'drawn-1': 1}
    report = run(tmp_path / 'out', Flaky(2, 5))
    assert (report.inputs, report.pictures, pauses) == (10, 10, [1.0, 1.0])
    failures['drawn-0'] = 4
    with pytest.raises(DataError, match=r'part 0 \(drawn-0\): cannot be read \(the store closed .* is kept'):
        run(tmp_path / 'other', Flaky(2, 5))
    assert pauses[2:] == [1.0, 2.0, 4.0]


def test_a_process_that_dies_is_known_by_the_image_it_reads_or_the_one_before(tmp_path: Path) -> None:
    notes: list[str] = []
    source = DrawnSource(1, 2)
    job = PartJob(0, source.parts()[0], source, settings(tmp_path / 'out'), tmp_path / 'part')
    counts = job(notes.append)
    expected = [f'{what} {key!r}' for key in ('image-0', 'image-1') for what in ('image', 'the entry after image')]
    assert notes == expected
    assert job(notes.append) == counts and notes == expected, 'a finished part is not read again'


def test_the_first_of_two_machines_that_convert_the_same_part_finishes_it(tmp_path: Path) -> None:
    source = DrawnSource(1, 3)
    job = PartJob(0, source.parts()[0], source, settings(tmp_path / 'out'), tmp_path / 'part')

    class Raced(DrawnSource):
        def read(self, part: Part) -> Iterator[Entry]:
            assert job(print).inputs == 3
            yield from super().read(part)

    assert replace(job, source=Raced(1, 2))(print).inputs == 3 and names(tmp_path) == ['part']


def test_a_shard_of_a_part_is_written_when_the_next_sample_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_module, 'SHARD_BYTES', 10)
    shards = part_module.ShardBuffer(ShardPlace(tmp_path, None), ShardFormat({'key': 'str'}, 10))
    places = [shards.add(bytes(size)) for size in (4, 6, 1, 11, 1)]
    assert places == [(0, 0, 4), (0, 4, 6), (1, 0, 1), (2, 0, 11), (3, 0, 1)]
    for _ in range(2):
        shards.flush()
        assert names(tmp_path) == [f'shard.0000{number}.mds' for number in range(4)]


def test_unexpected_error_names_the_image(tmp_path: Path) -> None:
    class Failing(DrawnSource):
        def entry(self, key: str, number: int) -> Entry:
            return Entry(key, encode(draw(number)), 3)  # type: ignore[arg-type]

    with pytest.raises(RuntimeError, match=r"part \d \(drawn-\d\), image 'image-\d+': TypeError"):
        run(tmp_path / 'out', Failing())


def test_image_that_always_kills_its_process_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"part 1 \(drawn-1\): its process died 3 times at image 'image-7'.*killed by SIGKILL"
    ):
        prepare(settings(tmp_path / 'out'), source=DrawnSource(3, 5, deadly='image-7'))
    assert '000000' in names(tmp_path / 'out.work/parts')


def test_file_size_limit_is_reported_and_leaves_no_part(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(ExternalError, match=r'out.work: .*File too large.* finished work is kept'):
            run(tmp_path / 'out', DrawnSource(1, 40))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path / 'out.work/parts') == []
    run(tmp_path / 'out', DrawnSource(1, 40))


def test_shares_of_several_machines_give_the_same_dataset(tmp_path: Path) -> None:
    source = DrawnSource(5, 8)
    for index in (2, 0, 1):
        assert prepare(settings(tmp_path / 'out'), source=source, share=Share(index, 3)) is None
    assert not (tmp_path / 'out').exists()
    work = WorkFolder(tmp_path / 'out.work')
    assert names(work.parts) == [f'{n:06}' for n in range(5)]
    run(tmp_path / 'out', source)
    run(tmp_path / 'whole', source)
    assert snapshot(tmp_path / 'out') == snapshot(tmp_path / 'whole')


def test_shares_lock_out_themselves_and_full_runs_but_not_other_shares(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path / 'work')
    with work.locked(Share(0, 2)), work.locked(Share(1, 2)):
        for share in (None, Share(1, 2)):
            with pytest.raises(ValueError, match='work: another process is preparing'), work.locked(share):
                pass


def test_unfinished_files_of_a_killed_share_are_removed_only_by_that_share(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path / 'work')
    left = [work.parts / f'{number:06}.unfinished-1' for number in (2, 3)]
    for path in left:
        path.mkdir(parents=True)
    work.clear_unfinished(Share(1, 2))
    assert [path.exists() for path in left] == [True, False]
    work.clear_unfinished()
    assert names(work.parts) == []


INTERRUPTED = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from drawn import DrawnSource
from diffusion.cli import main
from diffusion.prepare import settings
settings.SourceSettings.open = lambda self, **options: DrawnSource(4, 10, seconds=0.1)
if __name__ == '__main__':
    sys.exit(main(['prepare', 'folder', 'drawn', '--out', sys.argv[2], '--sizes', '16', '--workers', '2']))
"""


def test_ctrl_c_prints_how_to_resume(tmp_path: Path) -> None:
    (tmp_path / 'script.py').write_text(INTERRUPTED)
    command = [sys.executable, str(tmp_path / 'script.py'), str(Path(__file__).parent), str(tmp_path / 'out')]
    # Start it in a new process group, so that the signal reaches all its processes, as Ctrl-C in a terminal does.
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: list(tmp_path.glob('out.work/parts/00000*')), 30)
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert output == (
        f'preparing {tmp_path}/out\n'
        f'interrupted; run the same command to resume, finished work is in {tmp_path}/out.work\n'
    )
    assert run(tmp_path / 'out', DrawnSource(4, 10), sizes=[16]).pictures == 40


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


def prepared(images: Path, out: Path, jobs: list[str], **values: Any) -> PrepareReport:
    """Prepare the images in this process, and record the names of the parts that are converted."""

    def recording(job: Any) -> Any:
        jobs.extend([job.part.name] if isinstance(job, PartJob) else [])
        return run_job(job)

    source = {'kind': 'folder', 'location': str(images)}
    given = {'source': source, 'out': str(out), 'sizes': [16], 'shard_mb': 0.01, **values}
    return report_of(given, run=partial(map, recording))


@pytest.mark.parametrize(
    ('count', 'most', 'pieces'), [(1, 999, 256), (3, 999, 85), (63, 999, 4), (64, 999, 0), (1, 2, 2), (1, 1, 0)]
)
def test_few_parts_are_divided_into_pieces_for_all_cores(tmp_path: Path, count: int, most: int, pieces: int) -> None:
    class Divisible(DrawnSource):
        def divide(self, part: Part, wanted: int) -> list[Part]:
            return [part] * min(wanted, most)

    plan = input_plan.InputPlan.make(settings(tmp_path), Divisible(count))
    found = input_plan.pieces_of(plan, Divisible(count))
    ends = [f'.{piece:03}' for piece in range(pieces)] or ['']
    assert [piece.name for piece in found] == [f'{number:06}{end}' for number in range(count) for end in ends]
    assert {piece.is_whole for piece in found} == {not pieces}


def test_divided_folder_gives_the_same_dataset(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    divided: list[str] = []
    report = prepared(images, tmp_path / 'divided', divided, duplicates='near', hold_out=5)
    assert divided == [f'pictures-000000.{number}' for number in range(4)], '32 images each, and the rest'
    monkeypatch.setattr(input_plan, 'FEW_PARTS', 0)
    whole: list[str] = []
    expected = prepared(images, tmp_path / 'whole', whole, duplicates='near', hold_out=5)
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
