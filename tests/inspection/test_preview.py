"""`diffusion data look`: the sheet shows the samples that the loader serves."""

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import output_of, refusal
from PIL import Image
from shards import CAPTIONS, streams_of
from streaming import MDSWriter

from diffusion.cli import main
from diffusion.config.load import load
from diffusion.data.latents import LatentManifest
from diffusion.inspection.preview import SIDE
from diffusion.models import batch_keys
from diffusion.models.pretrained import load_vae
from diffusion.models.vae import decode_latents
from diffusion.training.components import build_dataset

YAMLS = Path(__file__).parents[2] / 'yamls'


def look(capsys, *words):
    return output_of(capsys, 'data', 'look', *words)


def test_each_bucket_has_a_row_with_its_own_samples(write_recipe, pictures, tmp_path, capsys):
    out, path = tmp_path / 'look.png', write_recipe(streams=streams_of(pictures))
    assert look(capsys, path, '--out', out) == f'{out}: 16 samples of 2 buckets\n'
    with Image.open(out) as image:
        assert image.height > 2 * SIDE
        image.load()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith('.')] == []
    out = tmp_path / 'look.html'
    look(capsys, path, '--out', out, '--samples', '2')
    assert [len(image) for image in images_of(out.read_text())] == [32, 32, 64, 64]


def test_preview_shows_what_dataset_serves(write_recipe, pictures, tmp_path, capsys):
    """Crops, flips and caption choice are included."""
    crop = {'crop': 'random', 'min_crop_scale': 0.5, 'flip': True}
    streams = streams_of({32: pictures[64]})
    path = write_recipe(streams=streams, dataset={'name': 'image_text', **crop})
    out = tmp_path / 'look.html'
    look(capsys, path, '--out', out, '--samples', '100')
    shown = images_of(out.read_text())
    assert len(shown) == 24
    recipe = load(path)
    dataset = build_dataset(recipe, streams=recipe.streams, component=recipe.dataset, batch_size=1, shuffle=False)
    for index, image in enumerate(shown):
        assert np.array_equal(image, dataset[index][batch_keys.IMAGE].permute(1, 2, 0).numpy())
    captions = [text.replace(' ', '') for text in re.findall('<figcaption>(.*?)</figcaption>', out.read_text())]
    first = {f'{CAPTIONS[index % len(CAPTIONS)]} {index}'.replace(' ', '') for index in range(100, 124)}
    second = {f'number{index}' for index in range(100, 124)}
    assert set(captions) <= first | second
    assert set(captions) & first and set(captions) & second


def images_of(text):
    found = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(each)))) for each in found]


def test_folder_used_in_several_sections_is_shown_in_each(write_recipe, pictures, tmp_path, capsys):
    streams = {'a': {'local': str(pictures[32]), 'resolution': 32}}
    path = write_recipe(streams=streams, eval_streams=streams, precompute={'out': 'x', 'streams': streams})
    out = tmp_path / 'look.html'
    sections = ['streams.a', 'eval_streams.a', 'precompute.streams.a']
    for words, shown in (([], sections[:2]), (['a'], sections), (['precompute.streams.a'], sections[2:])):
        look(capsys, path, *words, '--out', out, '--samples', '1')
        assert re.findall(r'<h2>(\S+)', out.read_text()) == shown, words


@pytest.mark.parametrize('decode', [True, False])
def test_latents_are_decoded_by_local_vae_or_drawn_as_channels(write_recipe, tiny_recipe, tmp_path, capsys, decode):
    folder = tmp_path / 'latents'
    columns = {batch_keys.LATENT_MOMENTS: 'ndarray:float16', 'captions': 'json'}
    with MDSWriter(out=str(folder), columns=columns) as writer:
        for value in range(3):
            moments = np.full((8, 4, 4), value / 2, np.float16)
            writer.write({batch_keys.LATENT_MOMENTS: moments, 'captions': [f'number {value}']})
    manifest = LatentManifest('v', [1.0] * 4, [2.0] * 4, shape='32x32', posterior='sample', dtype='float16')
    (folder / 'manifest.json').write_text(manifest.text())
    model = tiny_recipe(tmp_path)['model'] | ({} if decode else {'vae': 'someone/other-vae'})
    streams = {'a': {'local': str(folder), 'resolution': 32}}
    path = write_recipe(streams=streams, dataset={'name': 'latents'}, model=model)
    out = tmp_path / 'look.html'
    look(capsys, path, '--out', out, '--samples', '3')
    shown = images_of(out.read_text())
    assert {image.shape for image in shown} == {(32, 32, 3) if decode else (4, 4, 3)}
    if decode:  # the decoder's -1 is black, and 1 is white
        means = (torch.arange(3) / 2).reshape(3, 1, 1, 1).expand(3, 4, 4, 4)
        with torch.no_grad():
            pixels = decode_latents(load_vae(model['vae']).eval(), means).clamp(-1, 1).permute(0, 2, 3, 1)
        assert abs(np.stack(shown) / 127.5 - 1 - pixels.numpy()).max() < 0.01
    if not decode:  # 1/2, 1/4 and 0 standard deviations below the mean, of 6 from black to white
        assert [np.unique(image).tolist() for image in shown] == [[106], [117], [128]]
        assert 'someone/other-vae' in refusal(capsys, 'data', 'look', path, '--out', out, '--decode')


@pytest.mark.parametrize(
    ('out', 'message'),
    [
        ('look.gif', "--out: .*look.gif has the extension '.gif'; use .png or .html"),
        ('look', "--out: .*look has the extension 'none'; use .png or .html"),
        ('none/look.png', '--out: .*none is not a writable folder'),
        ('there.png', '--out: .*there.png is a folder'),
    ],
)
def test_unwritable_output_is_reported(write_recipe, pictures, tmp_path, capsys, out, message):
    (tmp_path / 'there.png').mkdir()
    path = write_recipe(streams=streams_of({32: pictures[32]}))
    assert re.search(message, refusal(capsys, 'data', 'look', path, '--out', tmp_path / out))
    assert not [entry.name for entry in tmp_path.iterdir() if 'look' in entry.name or entry.name.startswith('.')]


def phase1(*words):
    """Command line of `data look` for the recipe phase1, without access to the Hub."""
    return ['data', 'look', YAMLS / 'phase1.yaml', 'model.pretrained=null', '--samples', '1', *words]


def test_only_the_streams_that_are_shown_must_be_complete(pictures, tmp_path, capsys):
    out = tmp_path / 'look.png'
    local = ['streams.laion.remote=null', f'streams.laion.local={pictures[32]}']
    assert main([*map(str, phase1(*local, '--out', out))]) == 0
    captured = capsys.readouterr()
    assert captured.out == f'{out}: 1 samples of 1 buckets\n'
    assert captured.err.startswith('skipped: eval_streams.coco.remote: is still ???; ')
    assert main([*map(str, phase1(*local, 'laion', '--out', out))]) == 0
    assert capsys.readouterr().err == ''
    others = ['global_batch=???', 'trainer.max_duration=???', 'optimizer.lr=???', 'name=???', 'init_from=???']
    output_of(capsys, *phase1(*local, *others, 'streams.other=???', '--out', out))


@pytest.mark.parametrize(
    ('words', 'missing'),
    [
        (['coco'], ['eval_streams.coco.remote']),
        (['eval_streams.coco.remote=s3://b/c'], ['model.mask_padding']),
        ([], ['streams.laion.remote', 'eval_streams.coco.remote']),
        (['streams=???', 'eval_streams=???'], ['streams', 'eval_streams']),
    ],
)
def test_values_that_are_needed_are_named(tmp_path, capsys, words, missing):
    error = refusal(capsys, *phase1('model.mask_padding=???', *words, '--out', tmp_path / 'look.png'))
    assert re.findall(r'(\S+): is still \?\?\?', error.partition('error: ')[2]) == missing
