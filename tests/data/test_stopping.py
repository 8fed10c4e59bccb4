"""Real runs with failing data: all ranks stop at the same batch with the same message, and resume after the repair."""

import json
import re
import time
from pathlib import Path

import pytest
from ranks import largest_difference, read_losses
from recipe_files import write_yaml
from shards import CAPTIONS, draw_image
from streaming import MDSWriter

from diffusion.exit_codes import FAILED

BROKEN = {5, 23, 42, 61}
COUNT = 88


@pytest.fixture(scope='module')
def intact_and_broken_images(tmp_path_factory):
    """Return folders of shards: images, and the same images with some that cannot be decoded."""
    folders = {}
    for name, broken in (('intact', set()), ('broken', BROKEN)):
        folders[name] = tmp_path_factory.mktemp('data') / name
        columns = {'image': 'bytes', 'captions': 'json', 'key': 'str'}
        with MDSWriter(out=str(folders[name]), columns=columns, hashes=['xxh64'], size_limit=4096) as writer:
            for index in range(COUNT):
                image = draw_image(index, 32)
                image = image[:60] if index in broken else image
                writer.write({'image': image, 'captions': [CAPTIONS[index % len(CAPTIONS)]], 'key': f'p{index}'})
    return folders


@pytest.fixture
def recipe(tmp_path, tiny_recipe):
    """Return a function that writes a recipe of one epoch with eleven batches."""

    def write(name: str, stream: dict, **loader) -> Path:
        content = tiny_recipe(tmp_path / 'runs', name=name)
        content['streams'] = {'photos': {'resolution': 32} | stream}
        content['loader'] = {'num_workers': 0, 'num_canonical_nodes': 1, 'timeout_seconds': 60} | loader
        content['trainer'] |= {'max_duration': '11ba', 'save_interval': '100ba'}
        return write_yaml(tmp_path / f'{name}.yaml', content)

    return write


@pytest.mark.slow
def test_missing_shard_stops_all_ranks_until_it_is_restored(store, intact_and_broken_images, recipe, ranks, tmp_path):
    source = intact_and_broken_images['intact']
    last = sorted(path.name for path in source.glob('*.mds'))[-1]
    url = store.upload(source)
    # Prefetch only two samples: a missing shard is reported immediately, and a batch should come before that.
    settings = {'num_workers': 2, 'predownload': 2, 'shuffle': False}
    stream = {'remote': url, 'local': str(tmp_path / 'local'), 'download_retry': 1}
    ranks.run(2, recipe('intact', {'local': str(source)}, **settings))

    body = (source / last).read_bytes()
    store.delete(url, last)
    begin = time.monotonic()
    job = ranks.start(2, recipe('stopped', stream, **settings), environment=store.environment)
    statuses, output = job.wait(timeout=90), job.output()
    assert statuses == [FAILED] * 2, output
    errors = re.findall(rf'^(?:rank 1: )?error: streams.photos: {url}/{last}: .*$', output, flags=re.MULTILINE)
    assert len(errors) == 2, output
    saved = re.findall(r'ba(\d+) is saved; run the same command again to resume from it', output)
    # Workers are ahead of training, and a worker that cannot read a shard stops all processes immediately.
    assert len(saved) == 2 and len(set(saved)) == 1 and int(saved[0]) >= 1, output
    assert time.monotonic() - begin < 60

    store.put(url, last, body)
    job = ranks.start(2, recipe('stopped', stream, **settings), environment=store.environment)
    assert job.wait() == [0, 0], job.output()
    assert read_losses(tmp_path / 'runs' / 'stopped') == read_losses(tmp_path / 'runs' / 'intact')


@pytest.mark.slow
def test_replacements_are_equal_on_two_ranks_and_after_resume(intact_and_broken_images, recipe, ranks, tmp_path):
    stream, runs = {'local': str(intact_and_broken_images['broken'])}, tmp_path / 'runs'
    allowed = {'max_bad_samples': 0.5}
    ranks.run(1, recipe('one', stream, **allowed))
    ranks.run(2, recipe('two', stream, num_workers=1, **allowed))
    ranks.run(1, recipe('parts', stream, **allowed), 'trainer.max_duration=5ba')
    ranks.run(1, recipe('parts', stream, **allowed))
    losses = {name: read_losses(runs / name) for name in ('one', 'two', 'parts')}
    assert losses['parts'] == losses['one']
    assert largest_difference(losses['one'], losses['two']) < 1e-4
    notes = {name: lines_of(runs / name / 'quarantine.jsonl') for name in losses}
    for found in notes.values():
        assert {note['sample_id'] for note in found} == BROKEN and len(found) == len(BROKEN)
    by_id = {name: {note.pop('sample_id'): note for note in found} for name, found in notes.items()}
    assert by_id['one'] == by_id['two'] == by_id['parts']
    note = by_id['one'][23]
    assert (note['key'], note['stream'], note['epoch']) == ('p23', 'photos', 0)
    assert re.fullmatch(r'streams.photos: sample 23 .row \d of shard.0000\d.mds.: the image cannot .*', note['error'])
    metrics = lines_of(runs / 'parts' / 'metrics.jsonl')
    counts = [line['data/replaced_samples'] for line in metrics if 'data/replaced_samples' in line]
    assert counts == sorted(counts) and counts[-1] == len(BROKEN), 'the count continues after a resume'


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize('ranks_count', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_too_many_bad_samples_stop_all_ranks(recipe, ranks, tmp_path, ranks_count):
    with MDSWriter(out=str(tmp_path / 'bad'), columns={'image': 'bytes', 'caption': 'str'}) as writer:
        for index in range(COUNT):
            image = draw_image(index, 32)
            writer.write({'image': image[:60] if index % 3 == 0 else image, 'caption': 'a'})
    job = ranks.start(ranks_count, recipe('bad', {'local': str(tmp_path / 'bad')}))
    statuses, output = job.wait(timeout=90), job.output()
    assert statuses == [FAILED] * ranks_count
    counts = re.findall(r'error: loader.max_bad_samples: (\d+) of (\d+) samples could not be decoded', output)
    assert len(counts) == ranks_count and len(set(counts)) == 1 and int(counts[0][0]) > 8, output
    assert f'see {tmp_path}/runs/bad/quarantine.jsonl' in output
