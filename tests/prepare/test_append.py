"""A dataset grows by deliveries: the samples are those of preparing everything at once, and old shards stay equal."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from drawn import DrawnSource, contents, draw, encode, here, interrupted, keys, report_of, settings, write_files
from golden import check_golden
from object_store import Store

from diffusion.cli import main
from diffusion.config.load import RecipeError
from diffusion.errors import UserError
from diffusion.prepare.append import append
from diffusion.prepare.counts_report import PrepareReport
from diffusion.prepare.dataset_record import RecordedDataset
from diffusion.prepare.image_record import EarlierImages, read_images
from diffusion.prepare.pipeline import prepare
from diffusion.prepare.source import Entry, NamedCount, Part, PassedOver
from diffusion.storage.atomic import new_unfinished
from diffusion.storage.places import LocalPlace

CHOICES: dict[str, Any] = {'aspects': ['32x32', '32x24'], 'duplicates': 'near', 'shard_mb': 0.01}


@dataclass(frozen=True)
class Slice(DrawnSource):
    """Images from the number `first` on; every sixth is drawn as the one before it.

    Images with numbers below `shifted_below` are drawn as those with numbers larger by `shift`.
    """

    first: int = 0
    prefix: str = ''
    shift: int = 0
    shifted_below: int = 0
    also: 'Slice | None' = None

    def parts(self) -> list[Part]:
        names = f'{self.prefix}{self.first}-{self.each}'
        firsts = range(self.first, self.first + self.parts_count * self.each, self.each)
        where = {'prefix': self.prefix, 'each': self.each}
        own = [Part(f'{names}-{first}', where | {'first': first}, self.each, self.stamp) for first in firsts]
        return own + ([] if self.also is None else self.also.parts())

    def read(self, part: Part) -> Iterator[Entry]:
        first = part.where['first']
        for number in range(first, first + part.where['each']):
            yield self.entry(f'{part.where["prefix"]}image-{number}', number)

    def entry(self, key: str, number: int) -> Entry:
        drawn = number - (number % 6 == 5) + (self.shift if number < self.shifted_below else 0)
        return Entry(key, encode(draw(drawn), 'PNG'), [f'caption of {number}', 'another caption'])


def sliced(first: int, stop: int, *, each: int = 5, **values: Any) -> Slice:
    return Slice((stop - first) // each, each, first=first, **values)


def start(out: Path | str, source: Any, **values: Any) -> PrepareReport:
    return report_of(settings(out, **CHOICES | values), source)


def add(out: Path | str, source: Any, **values: Any) -> PrepareReport:
    report = append(settings(out, **CHOICES | values), source=source, run=here)
    assert report is not None and 0 <= report.seconds < 600
    return report


def add_before_commit(monkeypatch: pytest.MonkeyPatch, out: Path, source: Any) -> None:
    """Let another process add a delivery just before the next change of a dataset is recorded."""
    commit = RecordedDataset.commit

    def second(self: Any, record: Any) -> None:
        monkeypatch.setattr(RecordedDataset, 'commit', commit)
        add(out, source, work=str(out.parent / 'other.work'))
        commit(self, record)

    monkeypatch.setattr(RecordedDataset, 'commit', second)


def all_keys(out: Path) -> set[str]:
    return {key for of in keys(out).values() for key in of}


def hashes(out: Path, pattern: str = '*.mds') -> dict[str, str]:
    files = (path for path in out.rglob(pattern) if path.is_file())
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_three_deliveries_give_the_samples_of_preparing_everything_at_once(tmp_path: Path) -> None:
    # The third delivery repeats images of the other two under other keys.
    first, second, third = sliced(0, 15), sliced(15, 35), sliced(12, 22, prefix='copy-')
    start(tmp_path / 'all', replace(first, also=replace(second, also=third)))
    start(tmp_path / 'out', first)
    for source in (second, third):
        before = hashes(tmp_path / 'out')
        add(tmp_path / 'out', source)
        after = hashes(tmp_path / 'out')
        assert before.items() <= after.items(), 'the bytes of old shards have changed'
    assert contents(tmp_path / 'out') == contents(tmp_path / 'all')
    texts = [(tmp_path / name / 'captions.txt').read_text() for name in ('all', 'out')]
    assert texts[0] == texts[1] != ''
    whole, grown = (PrepareReport.read(tmp_path / name / 'report.json') for name in ('all', 'out'))
    assert grown.rejected == whole.rejected and grown.rejected['duplicate'].count > 10
    assert (grown.inputs, grown.pictures, grown.buckets) == (whole.inputs, whole.pictures, whole.buckets)
    buckets = json.loads((tmp_path / 'out/32px/buckets.json').read_text())
    assert buckets == json.loads((tmp_path / 'all/32px/buckets.json').read_text()) | {'buckets': buckets['buckets']}
    assert sorted(path.name for path in tmp_path.iterdir()) == ['all', 'out']
    before = hashes(tmp_path / 'out', '*')
    report = add(tmp_path / 'out', second)
    assert [note.partition(': ')[2] for note in report.notes] == ['has all parts of the input already; nothing to do']
    assert (report.inputs, report.passed, hashes(tmp_path / 'out', '*')) == (0, True, before)
    (tmp_path / 'out/report.json').unlink()  # as if the process had been killed before it wrote this
    new_unfinished(tmp_path / 'out/report.json').touch()
    add(tmp_path / 'out', second)
    after = hashes(tmp_path / 'out', '*')
    assert after | {'report.html': before['report.html']} == before, 'the page lacks thumbnails'


MASKED = {
    '(?s)<style>.*</style>|<tr><th>version of.*?</tr>|(?<=src=")[^"]*': '',
    r'(?<="bytes": \{)[^}]*|(?<="versions": \{)[^}]*|(?<="seconds": )[\d.]+|(?<=images in )[\d.]+ s': 'MASKED',
    r'\b(?<!\.)([0-9a-f]{8}|[0-9a-f]{16}|[0-9a-f]{64})\b': 'HASH',
    r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ': 'TIME',
    '<tr>': '\n<tr>',
}
"""What a machine, a version or the time changes in the texts about a dataset."""


class Awkward(Slice):
    """Images of which most are unusable, each for another reason, and files that are skipped."""

    def parts(self) -> list[Part]:
        first, *others = super().parts()
        skipped = {'.svg': NamedCount(5, [f'{number}.svg' for number in range(5)])}
        return [replace(first, passed_over=skipped, notes=('a note of the source',), license='CC0'), *others]

    def entry(self, key: str, number: int) -> Any:
        found = replace(super().entry(key, number), metadata={'score': number % 13, 'language': 'en'})
        columns: dict[int, dict[str, Any]] = {
            3: {'image': b'not an image'},
            4: {'image': encode(draw(4, width=9, height=12), 'PNG')},
            6: {'image': None, 'problem': 'missing_file'},
            7: {'captions': [None, 'x']},
            8: {'captions': ['long ' * 11]},
            9: {'metadata': {'Score': 'high'}},
            14: {'captions': [f'{name} {number}' for name in 'abc'], 'caption_columns': [*'aab']},
            31: {'image': encode(draw(1).resize((50, 40)), 'PNG')},
            32: {'image': encode(draw(902, width=64, height=64), 'PNG')},
            33: {'image': encode(draw(902, width=64, height=64).resize((128, 128)), 'PNG')},
        }
        if number in (10, 11):
            return PassedOver(f'.hidden-{number}')
        return replace(found, **columns.get(number, {}))


def test_files_and_reports_of_a_dataset_that_grows_and_loses_images(tmp_path: Path, capsys: Any) -> None:
    filters = {'min_side': 10, 'min_caption': 2, 'max_caption': 50, 'columns': {'score': {'min': 1, 'max': 11}}}
    choices: dict[str, Any] = {'filters': filters, 'hold_out': 3, 'max_rejected': 0.1, 'shard_mb': 67}
    out, texts = tmp_path / 'out', {}
    prepared = start(out, Awkward(2, 15), **choices)
    files = {name: (out / name).glob('*.mds') for name in prepared.bytes}
    assert prepared.bytes == {name: sum(file.stat().st_size for file in of) for name, of in files.items()}
    texts['1 prepared.txt'], texts['1 page.html'] = prepared.text(out), (out / 'report.html').read_text()
    texts['1 report.json'] = re.sub(r'\n {4,}', ' ', (out / 'report.json').read_text())
    held_out = out.with_name('out-held-out')
    texts['1 held out.txt'] = PrepareReport.read(held_out / 'report.json').text(held_out)
    second = Awkward(1, 20, first=15, shift=1000, shifted_below=18, also=sliced(10, 20, each=10, prefix='new/'))
    texts['2 added.txt'] = add(out, second, **choices).text(out)
    texts['2 page.html'] = (out / 'report.html').read_text()
    assert main(['data', 'remove', str(out), '--key', 'image-16', 'image-28', 'image-2', '--keep-old-shards']) == 0
    texts['3 removed.txt'] = capsys.readouterr().out
    texts['3 dataset.json'] = re.sub(r'\n {2,}', ' ', (out / 'dataset.json').read_text())
    texts['3 captions.txt'] = (out / 'captions.txt').read_text()
    for path in sorted(out.rglob('images*.parquet')):
        texts[f'4 {path.relative_to(out).as_posix().replace("/", " ")}'] = '\n'.join(
            ' '.join([row['key'], *['held out'] * row['held_out'], *map('{}:{}'.format, row['buckets'], row['shards'])])
            for row in read_images(path).to_pylist()
        )
    for pattern, text in MASKED.items():
        texts = {re.sub(pattern, text, name): re.sub(pattern, text, found) for name, found in texts.items()}
    texts = {name: found.replace(str(tmp_path), 'FOLDER') for name, found in texts.items()}
    check_golden(Path(__file__).parent / 'golden/grown', texts)


def test_images_that_are_there_under_the_same_key_are_passed_over(tmp_path: Path) -> None:
    """A folder that grows: its files come in other parts each time, and only the new ones are added."""
    start(tmp_path / 'out', sliced(0, 10), duplicates='none')
    (former,) = (tmp_path / 'out').glob('deliveries/*/report.json')
    former.write_text(former.read_text().replace('"numpy": "', '"numpy": "0.'))
    report = add(tmp_path / 'out', sliced(0, 15, each=15), duplicates='none', max_rejected=0.0)
    assert (report.inputs, report.pictures, report.passed, report.rejected) == (15, 5, True, {})
    assert f'than the delivery before (numpy 0.{np.__version__} -> {np.__version__}): pixels may' in report.notes[0]
    assert report.notes[1:] == [f'added to {tmp_path}/out, which has 15 images of 2 deliveries now']
    assert report.passed_over['already in the dataset'].count == 10
    assert PrepareReport.read(tmp_path / 'out' / 'report.json').pictures == 15


def test_equal_key_of_another_image_is_rejected_and_counted(tmp_path: Path) -> None:
    start(tmp_path / 'out', sliced(0, 10))
    report = add(tmp_path / 'out', sliced(8, 18, shift=1000, shifted_below=13))
    assert report.rejected['duplicate_key'].names == ['image-8', 'image-9']
    assert {'image-8', 'image-9', 'image-10', 'image-16'} <= all_keys(tmp_path / 'out')
    prefixed = add(tmp_path / 'out', sliced(8, 18, each=10, shift=1000, shifted_below=13), key_prefix='late/')
    assert 'duplicate_key' not in prefixed.rejected and {'late/image-8', 'late/image-9'} <= all_keys(tmp_path / 'out')


@pytest.mark.parametrize('count', [0, 1, 50])
def test_last_earlier_image_with_a_key_is_found(count: int) -> None:
    known, asked = np.random.default_rng(0).integers(0, 40, count), np.arange(-1, 41)
    last = {key: index for index, key in enumerate(known.tolist())}
    found = EarlierImages({'key_hash': known}, [], 0).find_keys(asked)
    assert found.tolist() == [last.get(key, -1) for key in asked.tolist()]


def test_append_with_other_settings_lists_each_difference_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path / 'out', sliced(0, 10))
    before = hashes(tmp_path / 'out', '*')
    lines = ['duplicates: near there, exact now', 'filters.min_side: 1 there, 9 now', 'sizes: [16, 32] there, [16] now']
    others: dict[str, Any] = {'sizes': [16], 'duplicates': 'exact', 'filters': {'min_side': 9}}
    for values, expected in ((others, lines), ({'buckets': 'largest'}, ['buckets: every there, largest now'])):
        with pytest.raises(UserError, match='out was prepared with other settings:\n') as raised:
            add(tmp_path / 'out', sliced(10, 20), **values)
        assert [line.strip() for line in str(raised.value).splitlines()[1:-1]] == expected
    with pytest.raises(RecipeError, match='workers: 0 is out of range'):
        append(replace(settings(tmp_path / 'out', **CHOICES), workers=0))
    monkeypatch.setattr(LocalPlace, 'check_conditions', Mock(side_effect=UserError('no conditional writes')))
    with pytest.raises(UserError, match='no conditional writes'):
        add(tmp_path / 'out', sliced(10, 20))
    assert hashes(tmp_path / 'out', '*') == before
    assert not (tmp_path / 'out.work').exists()


def test_append_needs_a_dataset_with_a_record(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'out: has no dataset.json, .* To fix: prepare the first delivery without'):
        add(tmp_path / 'out', sliced(0, 10))
    start(tmp_path / 'out', sliced(0, 10))
    (tmp_path / 'out/dataset.json').write_text('{"version": 1}')
    with pytest.raises(UserError, match=r'dataset.json: has format 1, .* reads format 2. To fix: prepare'):
        add(tmp_path / 'out', sliced(10, 20))
    (tmp_path / 'out/dataset.json').write_text('{"version": 2, "deliveries": 3}')
    with pytest.raises(UserError, match=r'dataset.json: is damaged .*; restore it'):
        add(tmp_path / 'out', sliced(10, 20))
    with pytest.raises(UserError, match='overwrite: cannot be combined with --append'):
        add(tmp_path / 'out', sliced(0, 10), overwrite=True)


def test_held_out_images_stay_held_out_and_their_copies_are_not_trained_on(tmp_path: Path) -> None:
    start(tmp_path / 'out', sliced(0, 20), hold_out=4)
    held = {key for of in contents(tmp_path / 'out-held-out').values() for key in of}
    numbers = sorted(int(key.removeprefix('image-')) for key in held)
    before = hashes(tmp_path / 'out-held-out', '*')

    class Copies(Slice):
        def read(self, part: Part) -> Iterator[Entry]:
            yield from (self.entry(f'new-{number}', number) for number in [*numbers, 40])

    report = add(tmp_path / 'out', Copies(1, 5, prefix='new-'), hold_out=4)
    assert report.rejected['duplicate'].names == [f'new-{n} (duplicate of image-{n})' for n in numbers]
    assert report.pictures == 1
    assert hashes(tmp_path / 'out-held-out', '*') == before
    with pytest.raises(UserError, match='hold_out: 4 there, 5 now'):
        add(tmp_path / 'out', Copies(1, 5), hold_out=5)


def test_another_process_may_append_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """The second one compares its images with those of the first, so that none is in the dataset twice."""
    start(tmp_path / 'out', sliced(0, 10))
    add_before_commit(monkeypatch, tmp_path / 'out', sliced(10, 30))
    # Its first ten images are those of the other process, under other keys.
    report = add(tmp_path / 'out', sliced(20, 40, prefix='second-'))
    assert report.rejected['duplicate'].count >= 10 and report.pictures <= 10
    assert 'comparing the images to add with the new version of the dataset' in caplog.text
    found = all_keys(tmp_path / 'out')
    assert 'image-28' in found and 'second-image-30' in found and 'second-image-28' not in found
    assert len(PrepareReport.read(tmp_path / 'out/report.json').deliveries) == 3
    files = {f'{folder}/{shard["raw_data"]["basename"]}' for folder, shard in indexed(tmp_path / 'out')}
    assert files == set(hashes(tmp_path / 'out')), 'no shards of the first comparison are left'
    assert len([*(tmp_path / 'out/deliveries').iterdir()]) == 3


def test_two_processes_with_the_same_delivery_add_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue may hand out a message twice; both processes write the same files for the same version."""
    start(tmp_path / 'out', sliced(0, 5))
    add_before_commit(monkeypatch, tmp_path / 'out', sliced(5, 10))
    assert add(tmp_path / 'out', sliced(5, 10)).notes[0].endswith('nothing to do')
    start(tmp_path / 'all', sliced(0, 10))
    assert contents(tmp_path / 'out') == contents(tmp_path / 'all')
    assert sorted(path.name for path in tmp_path.iterdir()) == ['all', 'out']


def test_unfinished_work_is_finished_or_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path / 'out', sliced(0, 10))
    with pytest.raises(KeyboardInterrupt):
        append(settings(tmp_path / 'out', **CHOICES), source=sliced(10, 20), run=interrupted(1))
    assert (tmp_path / 'out.work/plan.json').exists()
    with pytest.raises(UserError, match=r'out.work: has an unfinished addition to a dataset; finish it with --append'):
        start(tmp_path / 'out', sliced(0, 10), overwrite=True)
    add(tmp_path / 'out', sliced(10, 25))
    assert 'out.work: the input changed since the last (interrupted) run; starting over' in caplog.text
    start(tmp_path / 'all', sliced(0, 25))
    assert contents(tmp_path / 'out') == contents(tmp_path / 'all')
    # Work on another source is not thrown away, even if there is nothing to add from this one.
    with pytest.raises(KeyboardInterrupt):
        append(settings(tmp_path / 'out', **CHOICES), source=sliced(25, 35), run=interrupted(1))
    another = settings(tmp_path / 'out', source={'kind': 'folder', 'location': 'another'}, **CHOICES)
    with pytest.raises(UserError, match=r'settings.source.location: drawn at the start, another now'):
        append(another, source=sliced(0, 15, prefix='b-'), run=here)
    assert add(tmp_path / 'out', sliced(25, 35)).inputs == 10
    assert not (tmp_path / 'out.work').exists()
    with pytest.raises(KeyboardInterrupt):
        prepare(settings(tmp_path / 'out', overwrite=True, **CHOICES), source=sliced(0, 20), run=interrupted(1))
    with pytest.raises(UserError, match=r'out.work: has an unfinished preparation; finish it without --append'):
        add(tmp_path / 'out', sliced(10, 20))


def indexed(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for index in sorted(out.rglob('index.json')):
        for shard in json.loads(index.read_text())['shards']:
            yield index.parent.relative_to(out).as_posix(), shard


@pytest.mark.slow
def test_store_gets_the_same_dataset_as_a_folder_and_old_objects_stay(tmp_path: Path, store: Store) -> None:
    store.bucket('mds')
    work = {'work': str(tmp_path / 'work')}
    for out, more in (('s3://mds/out', work), (tmp_path / 'out', {})):
        start(out, sliced(0, 10), **more)
    before = {name: body for name, body in store.objects('mds').items() if name.endswith('.mds')}
    store.requests.clear()
    for out, more in (('s3://mds/out', work), (tmp_path / 'out', {})):
        add(out, sliced(10, 20), **more)
    found = store.objects('mds')
    assert before.items() <= found.items()
    written = set(store.paths('PUT'))
    assert written and not written & {f'/mds/{name}' for name in before}
    for name in hashes(tmp_path / 'out', '*'):
        assert 'report' in name or found[f'out/{name}'] == (tmp_path / 'out' / name).read_bytes(), name


@pytest.mark.slow
def test_append_that_a_store_refuses_is_finished_by_the_next_start(tmp_path: Path, store: Store) -> None:
    store.bucket('mds')
    work: dict[str, Any] = {'work': str(tmp_path / 'work'), 'sizes': [32]}
    start('s3://mds/out', sliced(0, 10), **work)
    before = store.objects('mds')
    fault = store.fail('PUT /mds/out/dataset.json', 403)
    with pytest.raises(UserError, match=r's3://mds/out/dataset.json: the store refuses access \(403\)'):
        add('s3://mds/out', sliced(10, 20), **work)
    assert {name: body for name, body in store.objects('mds').items() if name in before} == before
    store.faults.remove(fault)
    fault = store.fail('PUT /mds/out/32px/32x32/index.json', 403)
    with pytest.raises(UserError, match='32px/32x32/index.json: the store refuses access'):
        add('s3://mds/out', sliced(10, 20), **work)
    store.faults.remove(fault)
    assert add('s3://mds/out', sliced(10, 20), **work).notes[0].endswith('nothing to do')
    start(tmp_path / 'all', sliced(0, 20), sizes=[32])
    found = {name.removeprefix('out/'): body for name, body in store.objects('mds').items()}
    assert contents(write_files(tmp_path / 'copy', found)) == contents(tmp_path / 'all')
    assert json.loads(found['report.json'])['pictures'] == len(all_keys(tmp_path / 'all'))
