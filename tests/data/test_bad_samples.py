"""Replacement of samples that cannot be decoded, and the limit on their number."""

import json
import os

import pytest
from numbered import SAMPLES, expected, loader_over, number, numbers_of, payload, served, write_samples

from diffusion.data.bad_samples import MAX_ATTEMPTS, BadSample, SampleCounts, quarantine, replacement
from diffusion.errors import DataError
from diffusion.models import batch_keys

pytestmark = pytest.mark.usefixtures('many_datasets')

BAD = frozenset({3, 17, 40})


def test_bad_sample_is_replaced_from_same_shard_under_same_id(tmp_path):
    local = write_samples(tmp_path / 'local', bad=BAD)
    loader = loader_over(None, local, substitute=True, loader={'quarantine': tmp_path / 'q.jsonl'})
    found = served(loader)
    assert sorted(found) == list(range(SAMPLES))
    assert {index for index, value in found.items() if value != expected()[index]} == BAD
    spans = loader.dataset.spanner
    for line in (tmp_path / 'q.jsonl').read_text().splitlines():
        note = json.loads(line)
        index, instead = note['sample_id'], note['served']
        assert spans[index][0] == spans[instead][0] and instead not in BAD
        assert found[index] == number(payload(instead))
        assert (note['key'], note['row'], note['epoch']) == (f'k{index}', spans[index][1], 0)
        assert note['error'] == f'streams.a: sample {index} (row {note["row"]} of {note["shard"]}): bad'
    assert (loader.tally.served, loader.tally.replaced) == (SAMPLES, 3)


def test_replacements_do_not_depend_on_workers_or_resume(tmp_path):
    local = write_samples(tmp_path / 'local', bad=BAD)
    alone = served(loader_over(None, local, substitute=True))
    assert served(loader_over(None, local, substitute=True, workers=2)) == alone
    interrupted = loader_over(None, local, substitute=True)
    iterator = iter(interrupted)
    first = [next(iterator) for _ in range(4)]
    assert not any(batch_keys.REPLACED in batch for batch in first), 'the notes are removed'
    state = interrupted.state_dict()
    assert state is not None
    resumed = loader_over(None, local, substitute=True)
    resumed.load_state_dict(state)
    rest = served(resumed)
    for batch in first:
        rest |= numbers_of(batch)
    assert rest == alone


@pytest.mark.parametrize('workers', [0, 2])
def test_without_substitution_first_bad_sample_stops_epoch(tmp_path, workers):
    local = write_samples(tmp_path / 'local', bad=BAD)
    with pytest.raises(DataError, match=r'^streams.a: sample (3|17|40) \(row \d+ of shard.0000\d.mds\): bad$'):
        served(loader_over(None, local, workers=workers))


def test_shard_with_only_bad_samples_raises(tmp_path):
    local = write_samples(tmp_path / 'local', bad=frozenset(range(20)))
    dataset = loader_over(None, local, substitute=True).dataset
    with pytest.raises(BadSample, match=rf'sample 3 .*: bad; {MAX_ATTEMPTS} other samples of its shard cannot'):
        dataset[3]


def damage(shard, index: int) -> None:
    """Overwrite the beginning of a sample's payload, so that it cannot be decoded, and keep the modification time."""
    content, times = bytearray(shard.read_bytes()), shard.stat()
    at = content.index(payload(index))
    content[at : at + 3] = b'bad'
    shard.write_bytes(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize('substitute', [True, False])
def test_shard_that_was_damaged_after_its_check_is_downloaded_again(tmp_path, substitute):
    remote, local = write_samples(tmp_path / 'remote', bad=frozenset({3})), tmp_path / 'local'
    dataset = loader_over(remote, local, substitute=substitute).dataset
    assert dataset[4]['number'] == expected()[4]
    for index in (4, 5):
        damage(local / 'shard.00000.mds', index)
    assert dataset[4]['number'] == expected()[4] and dataset[5]['number'] == expected()[5]
    if substitute:
        assert dataset[3][batch_keys.REPLACED], 'a sample that was written so is replaced as before'


def test_local_shard_that_was_damaged_after_its_check_is_named(tmp_path):
    local = write_samples(tmp_path / 'local')
    dataset = loader_over(None, local, substitute=True).dataset
    assert dataset[4]['number'] == expected()[4]
    damage(local / 'shard.00000.mds', 4)
    with pytest.raises(DataError, match=r'shard.00000.mds: .*xxh64.*restore it, or prepare the data again') as raised:
        dataset[4]
    assert not isinstance(raised.value, BadSample)


def test_missing_shard_is_not_substituted(tmp_path):
    local = write_samples(tmp_path / 'local')
    (local / 'shard.00001.mds').unlink()
    with pytest.raises(DataError, match='shard.00001.mds: the file does not exist'):
        served(loader_over(None, local, substitute=True))


def test_copy_of_a_bad_sample_is_replaced_under_its_own_number(tmp_path):
    dataset = loader_over(None, write_samples(tmp_path / 'local', bad=BAD), substitute=True).dataset
    first, copy = dataset[3], dataset[3 + 2 * SAMPLES]
    assert (copy[batch_keys.SAMPLE_ID], copy[batch_keys.OCCURRENCE]) == (3, 2)
    assert copy['number'] == first['number'] != expected()[3]


@pytest.mark.parametrize(('served', 'replaced', 'is_refused'), [(16, 8, False), (90, 9, False), (89, 9, True)])
def test_more_than_a_tenth_and_more_than_8_samples_are_too_many(served, replaced, is_refused):
    assert (SampleCounts(served, replaced).problem(0.1) is not None) == is_refused


def test_replacements_are_uniform_over_shard():
    rows = [replacement(1, sample, 0, attempt, samples=10) for sample in range(200) for attempt in (1, 2)]
    assert set(rows) == set(range(10)) and min(map(rows.count, rows)) > 20
    assert len({replacement(1, 5, epoch, 1, samples=1000) for epoch in range(9)}) > 5, 'others in each epoch'


def test_quarantine_appends_to_file_and_creates_no_folder(tmp_path, caplog):
    path = tmp_path / 'run' / 'q.jsonl'
    quarantine(path, [json.dumps({'sample_id': 1})], 1)
    assert not path.parent.exists() and 'replaced samples are not recorded' in caplog.text
    path.parent.mkdir()
    for batch in (3, 7):
        quarantine(path, [json.dumps({'sample_id': batch})], batch)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{'sample_id': 3, 'batch_in_epoch': 3}, {'sample_id': 7, 'batch_in_epoch': 7}]
