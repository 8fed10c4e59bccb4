"""Fingerprint of a run's data, and its comparison on resume."""

import json
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from composer.core import Timestamp
from golden import check_golden
from shards import streams_of

from diffusion.callbacks.run_recipe import SameRun
from diffusion.config.load import load
from diffusion.data.streams import BucketedDataset
from diffusion.models import batch_keys
from diffusion.storage.shard_writer import differences
from diffusion.training.components import build_loader, run_identity
from diffusion.training.train import build_trainer, train


@pytest.fixture
def identity(write_recipe, pictures):
    def build(*overrides, **sections):
        sections = {'streams': streams_of(pictures)} | sections
        recipe = load(write_recipe(**sections), overrides)
        return run_identity(recipe, build_loader(recipe))

    return build


CHANGES = ['global_batch=16', 'loader.shuffle_block_size=1000', 'dataset.flip=true', 'streams.px32.resolution=64']


def test_data_and_differences_are_as_reviewed(identity, pictures, write_recipe, monkeypatch):
    monkeypatch.setenv('CROP', 'center')
    found = identity(dataset={'name': 'image_text', 'crop': '${oc.env:CROP}'})
    assert found['data']['streams']['px32']['index_sha256'] != found['data']['streams']['px64']['index_sha256']
    shown = re.sub('[0-9a-f]{64}', 'HASH', json.dumps(found, indent=1)) + '\n'
    both = streams_of(pictures)
    alone, recipe = identity(streams={'px32': both['px32']}), load(write_recipe(streams=both))
    recipe.streams = dict(reversed(recipe.streams.items()))
    changes = {override: (found, identity(override)) for override in CHANGES}
    changes |= {'without px64': (found, alone), 'with px64': (alone, found)}
    changes['px64 first'] = (found, run_identity(recipe, build_loader(recipe)))
    text = ''
    for name, (before, now) in changes.items():
        text += '\n  '.join([f'{name}:', *differences(before['data'], now['data'])]) + '\n'
    check_golden(Path(__file__).parent / 'golden/fingerprint', {'data.json': shown, 'differences.txt': text})


def test_changed_shards_are_a_difference_and_settings_that_do_not_affect_data_are_none(identity, pictures, tmp_path):
    moved = {name: stream | {'local': str(tmp_path / name)} for name, stream in streams_of(pictures).items()}
    for side, folder in pictures.items():
        shutil.copytree(folder, tmp_path / f'px{side}')
    overrides = ['loader.num_workers=1', 'loader.predownload=64', 'dataset.crop=center', 'loader.cache_limit=1gb']
    before, index = identity(), tmp_path / 'px32/index.json'
    assert differences(before, identity(*overrides, streams=moved)) == []
    text = index.read_text()
    hashes = json.loads(text)['shards'][0]['raw_data']['hashes']
    index.write_text(text.replace(hashes['sha1'], 'another'))
    lines = differences(before['data'], identity(streams=moved)['data'])
    assert [line.split(':')[0] for line in lines] == ['streams.px32.index_sha256']


SAVED = {'seed': 17, 'data': {'global_batch': 8, 'streams': {'a': {'choose': 96}}}}


def same_run(*, allow=False, seed=17, choose=96):
    data = {'global_batch': 8, 'streams': {'a': {'choose': choose}}}
    return SameRun({'seed': seed, 'data': data}, allow_data_change=allow)


def test_resume_with_same_data_logs_nothing_and_with_unknown_data_a_warning(caplog):
    callback = same_run()
    assert callback.state_dict() == SAVED
    callback.load_state_dict(SAVED)
    assert caplog.text == ''
    callback.load_state_dict({})
    for batch in (0, 3):
        same_run().after_load(Mock(timestamp=Timestamp(batch=batch)), Mock())
    assert caplog.text.count('the checkpoint does not record its seed and data; they cannot be compared') == 2


@pytest.mark.parametrize('allow', [True, False])
def test_changed_seed_always_raises(allow):
    message = (
        'seed: 18, but the run was started with 17; set it back to resume, or start a new run under another name\n'
        '  streams.a.choose: 96 in the checkpoint, 128 now'
    )
    with pytest.raises(ValueError, match=message):
        same_run(allow=allow, seed=18, choose=128).load_state_dict(SAVED)


def test_trainer_compares_data_on_resume_and_accepts_allowed_change(write_recipe, pictures, caplog):
    path = write_recipe(streams=streams_of(pictures))
    train(load(path, ['trainer.max_duration=2ba'])).close()
    refusal = r'(?s)set allow_data_change: true to resume .*\n  global_batch: 8 in the checkpoint, 16 now'
    with pytest.raises(ValueError, match=refusal):
        build_trainer(load(path, ['global_batch=16']))
    changed = ['global_batch=16', 'loader.shuffle_seed=3', 'loader.num_canonical_nodes=4', 'allow_data_change=true']
    trainer = build_trainer(load(path, [*changed, 'trainer.max_duration=4ba']))
    assert 'shuffle_seed: 17 in the checkpoint, 3 now' in caplog.text
    dataset = trainer.state.train_dataloader.dataset  # type: ignore[union-attr]
    assert isinstance(dataset, BucketedDataset)
    trainer.fit()
    assert (dataset.shuffle_seed, dataset.num_canonical_nodes) == (3, 4), 'of the recipe, not of the checkpoint'
    # 16 of 48 samples were used before, 2 more batches follow.
    assert trainer.state.batch[batch_keys.BATCH_INDEX].unique().tolist() == [2]
    trainer.close()
