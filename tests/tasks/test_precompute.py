"""Precomputed latents: identical files on any number of devices and after kills, and the same losses as online."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from ranks import read_losses
from recipe_files import write_yaml
from shards import write_buckets, write_image_shards

from diffusion.cli import main
from diffusion.config.image_shapes import Shape
from diffusion.config.load import load
from diffusion.data.image_sheet import to_images
from diffusion.data.image_text import ImageTextDataset
from diffusion.data.latents import LatentManifest
from diffusion.storage import object_store
from diffusion.tasks.evaluate import trained_model
from diffusion.tasks.precompute import precompute
from diffusion.training.train import train

COUNTS = {Shape(32, 32): 24, Shape(64, 32): 16, Shape(32, 48): 8}


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob('*'))
        if path.is_file()
    }


@pytest.fixture(scope='module')
def content(tmp_path_factory, tiny_recipe):
    """Recipe that encodes images of three shapes and 24 squares of 64 px, in shards of 4 or 8 samples."""
    root = tmp_path_factory.mktemp('sources')
    for index, (shape, count) in enumerate(COUNTS.items()):
        write_image_shards(root / 'shapes' / str(shape), count=count, side=80, offset=100 * index)
    write_buckets(root / 'shapes', 32, {shape: {'samples': count} for shape, count in COUNTS.items()})
    write_image_shards(root / 'squares', count=24, side=70, offset=500)
    streams = {
        'shapes': {'local': str(root / 'shapes'), 'resolution': 32, 'aspects': True},
        'squares': {'local': str(root / 'squares'), 'resolution': 64},
    }
    recipe = tiny_recipe(root / 'runs', task='precompute')
    recipe['precompute'] = {'out': '???', 'streams': streams, 'batch_size': 4, 'shard_mb': 0.01, 'dtype': 'float32'}
    return recipe


@pytest.fixture
def write(content, tmp_path):
    """Function that writes the recipe; keywords replace values of its `precompute` section."""

    def write_file(name: str = 'latents', model: dict | None = None, **settings) -> Path:
        sections = {
            'runs_dir': str(tmp_path / 'runs'),
            'model': content['model'] | (model or {}),
            'precompute': content['precompute'] | {'out': str(tmp_path / name)} | settings,
        }
        return write_yaml(tmp_path / f'{name}.yaml', content | sections)

    return write_file


def test_each_sample_is_read_once_and_every_shape_is_a_folder_of_shards(write, tmp_path, monkeypatch, caplog):
    reads = Counter()
    get_item = ImageTextDataset.get_item

    def counting(dataset, index, *rest):
        reads[index] += 1
        return get_item(dataset, index, *rest)

    monkeypatch.setattr(ImageTextDataset, 'get_item', counting)
    recipe = load(write(), ['loader.num_workers=0'])
    caplog.set_level('INFO', 'diffusion.tasks.precompute')
    for _ in range(2):
        precompute(recipe)
    assert len(reads) == sum(COUNTS.values()) + 24
    assert set(reads.values()) == {1}
    out = tmp_path / 'latents'
    assert sorted(path.name for path in out.iterdir()) == ['shapes', 'squares']
    listed = json.loads((out / 'shapes/buckets.json').read_text())['buckets']
    assert {name: bucket['samples'] for name, bucket in listed.items()} == {str(s): n for s, n in COUNTS.items()}
    for shape, count in COUNTS.items():
        folder = out / 'shapes' / str(shape)
        index = json.loads((folder / 'index.json').read_text())
        assert sum(shard['samples'] for shard in index['shards']) == count
        assert {*index['shards'][0]['raw_data']['hashes']} == {'sha1', 'xxh64'}
        assert index['shards'][0]['column_names'] == ['captions', 'key', 'latent_moments']
        names = {shard['raw_data']['basename'] for shard in index['shards']} | {'index.json', 'manifest.json'}
        assert {path.name for path in folder.iterdir()} == names
        assert LatentManifest.read(folder, '').shape == str(shape)
    done = [('shapes/32x48', 8, 2), ('shapes/32x32', 24, 3), ('shapes/64x32', 16, 4), ('squares', 24, 6)]
    assert caplog.messages == [
        'shards to encode: 15, on 1 devices',
        *(f'{out}/{name}: {count} images of {name[-5:]} px, shards: {shards}' for name, count, shards in done[:3]),
        f'{out}/squares: 24 images of 64x64 px, shards: 6',
        *(f'{out}/{name}: already done' for name, *_ in done),
    ]


def test_latents_are_written_to_an_object_store_once(write, content, store, tmp_path):
    streams = {'squares': content['precompute']['streams']['squares'] | {'resolution': 32}}
    recipe = load(write(out=store.bucket('latents') + '/here/', streams=streams), ['loader.num_workers=0'])
    precompute(recipe)
    assert store.objects('latents').keys() >= {f'here/squares/{name}' for name in ('index.json', 'manifest.json')}
    assert not list((tmp_path / 'runs').glob('**/*.mds')), 'no local copies remain'
    store.requests.clear()
    precompute(recipe)
    assert not [request for request in store.requests if request.startswith('PUT')]


def test_unfinished_job_is_not_resumed_with_other_settings(write, tmp_path, monkeypatch):
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, 'No space left on device')

    with monkeypatch.context() as patch:
        patch.setattr('diffusion.storage.atomic.Path.replace', full)
        with pytest.raises(OSError, match='No space left'):
            precompute(load(write()))
    assert not list((tmp_path / 'latents').glob('**/index.json'))
    # The plan of an unfinished job with 8 samples per shard; the recipe has 4.
    (tmp_path / 'latents/.squares.unfinished').mkdir(exist_ok=True, parents=True)
    plan = {'samples': 24, 'samples_per_shard': 8}
    (tmp_path / 'latents/.squares.unfinished/plan.json').write_text(json.dumps(plan))
    with pytest.raises(ValueError, match=r'other settings .*:\n  samples_per_shard: 8 at the start, 4 now'):
        precompute(load(write()))


def test_output_of_a_trained_text_encoder_cannot_be_stored(write):
    with pytest.raises(ValueError, match=r'precompute\.latents: image\+text needs a frozen text encoder'):
        precompute(load(write(latents='image+text', model={'train_text_encoder': True})))


@pytest.mark.cpu_seconds(12)
def test_files_are_identical_on_two_ranks_after_a_kill(write, tmp_path, ranks):
    ranks.run(1, write('whole'))
    path, folder = write('killed'), tmp_path / 'killed'
    job = ranks.start(2, path, deaths={1: (12, folder)})  # writing a shard takes about ten file operations
    job.wait_for_death(1)
    job.kill()
    assert [*folder.glob('**/*.mds')] and not (folder / 'squares').exists()
    ranks.run(2, path)
    assert contents(folder) == contents(tmp_path / 'whole')


AUTOENCODERS: dict[str, dict[str, Any]] = {
    'AutoencoderKLFlux2 with 4 channels per 8x8 px': {'vae': 'small_flux2', 'vae_layout': 'channels'},
    'AutoencoderKLFlux2 with 16 channels per 16x16 px': {'vae': 'small_flux2', 'vae_layout': 'grouped'},
    'AutoencoderRAE with 64 channels per 8x8 px': {'vae': 'small_rae'},
}
"""Model settings by the name of the autoencoder in manifests and messages."""


@pytest.mark.slow
@pytest.mark.parametrize('family', ['tiny_prx', 'tiny_i1'])
@pytest.mark.parametrize('number', range(len(AUTOENCODERS)))
def test_model_trains_and_draws_on_stored_latents_of_its_autoencoder_alone(
    request, tiny_recipe, write_recipe, pictures, tmp_path, number, family
):
    (made, settings), (wanted, others) = ([*AUTOENCODERS.items()][each % 3] for each in (number, number + 1))
    model = tiny_recipe(tmp_path, small=True)['model'] | {'name': family}
    model['patch_size'] = 1 if settings.get('vae_layout') == 'grouped' else 2
    mine, other = (model | each | {'vae': str(request.getfixturevalue(each['vae']))} for each in (settings, others))
    source = {'streams': {'small': {'local': str(pictures[32]), 'resolution': 32}}, 'batch_size': 8, 'dtype': 'float32'}
    path = write_recipe('online', model=mine, precompute=source | {'out': str(tmp_path / 'latents')})
    precompute(load(path, ['task=precompute']))
    assert LatentManifest.read(tmp_path / 'latents' / 'small', '').autoencoder == made
    stored = {'small': {'local': str(tmp_path / 'latents' / 'small'), 'resolution': 32}}
    content = {'streams': stored, 'dataset': {'name': 'latents'}, 'loader': {'num_workers': 0, 'shuffle': False}}
    train(load(path, ['loader.shuffle=false'])).close()
    train(load(write_recipe('offline', model=mine, **content))).close()
    online, offline = (read_losses(tmp_path / 'runs' / name) for name in ('online', 'offline'))
    assert len(online) == 8 and offline == pytest.approx(online, rel=1e-4)
    with pytest.raises(ValueError, match=f'autoencoder is {made}, but the model has {wanted}'):
        train(load(write_recipe('other', model=other, **content)))
    run, words = tmp_path / 'runs' / 'offline', ['--steps', '3', '--guidance', '5', '--shift', '4', '--rescale', '0.5']
    words += ['--guide', 'apg', '--scheduler', 'euler', '--out', str(tmp_path / 'drawn')]
    assert main(['generate', str(run), 'a', *words]) == 0
    sampling: dict[str, Any] = {'num_inference_steps': 3, 'guidance_scale': 5.0, 'snr_shift': 4.0}
    sampling |= {'guidance_rescale': 0.5, 'guidance': {'name': 'apg'}}
    trained: Any = trained_model(load(run / 'recipe.yaml')).model
    expected = to_images(trained.generate(['a'], noise_scheduler='euler', **sampling))[0]
    with Image.open(tmp_path / 'drawn' / '00000-a.png') as drawn:
        assert drawn.tobytes() == expected.tobytes()


@pytest.mark.slow
def test_latents_in_an_object_store_equal_those_in_a_folder(write, tmp_path, store, monkeypatch):
    """Interrupt the job, too: uploaded shards are not encoded again, and the index is uploaded last."""
    precompute(load(write('whole')))
    path = write('remote', out=store.bucket('latents') + '/here')
    with monkeypatch.context() as patch:
        uploads, write_object = [], object_store.write

        def fail_after_ten_uploads(url: str, content: bytes | Path, **settings: Any) -> object:
            if len(uploads) == 10:
                raise OSError('the network is gone')
            uploads.append(url)
            return write_object(url, content, **settings)

        patch.setattr(object_store, 'write', fail_after_ten_uploads)
        with pytest.raises(OSError, match='the network is gone'):
            precompute(load(path))
    before = {item['Key']: item['LastModified'] for item in store.listed('latents')}
    assert not any(name.endswith('index.json') for name in before)
    precompute(load(path))
    for item in store.listed('latents'):
        assert not item['Key'].endswith('.mds') or item['LastModified'] == before.get(item['Key'], item['LastModified'])
    found = {
        name.removeprefix('here/'): hashlib.sha256(body).hexdigest()
        for name, body in store.objects('latents').items()
        if 'unfinished' not in name
    }
    assert found == contents(tmp_path / 'whole')
    with pytest.raises(ValueError, match=r'precompute\.out: s3://latents/here/.* holds other latents'):
        precompute(load(write('remote', out='s3://latents/here', posterior='mean')))
