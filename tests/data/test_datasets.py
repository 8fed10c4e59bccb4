"""Datasets and loader on real shards, and the sizes of images."""

import os

import numpy as np
import pytest
import torch
from PIL import Image
from prepare.drawn import encode
from recipe_files import write_yaml
from shards import streams_of
from streaming import MDSWriter, Stream

from diffusion.config import registry
from diffusion.config.image_shapes import Shape, square
from diffusion.config.load import load
from diffusion.config.recipe import Component
from diffusion.data.bad_samples import BadSample
from diffusion.data.image_text import ImageTextDataset, image_sizes, original_size
from diffusion.data.loader import BucketedLoader, default_num_workers
from diffusion.data.streams import Bucket
from diffusion.data.transforms import CropBox
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.pretrained import tiny_tokenizers
from diffusion.storage import bucket_clients
from diffusion.storage.s3_client import S3Client
from diffusion.training.components import build_loader


def test_batches_have_one_resolution_and_all_keys(write_recipe, pictures):
    batches = list(build_loader(load(write_recipe(streams=streams_of(pictures)))))
    assert len(batches) == 8  # 40 and 24 images in batches of 8
    assert {batch[batch_keys.IMAGE].shape for batch in batches} == {(8, 3, 32, 32), (8, 3, 64, 64)}
    assert [batch[batch_keys.BATCH_INDEX].unique().tolist() for batch in batches] == [[i] for i in range(8)]
    ids = torch.cat([batch[batch_keys.SAMPLE_ID] for batch in batches])
    assert sorted(ids.tolist()) == list(range(64))
    assert batches[0][batch_keys.INPUT_IDS].shape == (8, 1, 16)
    assert batches[0][batch_keys.IMAGE].dtype == torch.uint8


def test_remote_may_use_store_unknown_to_streaming(write_recipe, pictures, tmp_path, store, monkeypatch):
    monkeypatch.setitem(bucket_clients.CLIENTS, 'az', S3Client)
    remote = store.upload(pictures[32]).replace('s3://', 'az://')
    streams = {'a': {'remote': remote, 'local': str(tmp_path / 'local'), 'resolution': 32}}
    assert len(list(build_loader(load(write_recipe(streams=streams))))) == 5
    assert len(list((tmp_path / 'local').glob('*.mds'))) == sum('.mds' in path for path in store.shard_reads())


def test_epochs_are_numbered_and_shuffled_differently(write_recipe, pictures):
    loader = build_loader(load(write_recipe(streams=streams_of(pictures))))
    first, second = list(loader), list(loader)
    assert {batch[batch_keys.EPOCH].unique().item() for batch in first} == {0}
    assert {batch[batch_keys.EPOCH].unique().item() for batch in second} == {1}
    orders = [torch.cat([b[batch_keys.SAMPLE_ID] for b in batches]).tolist() for batches in (first, second)]
    assert orders[0] != orders[1]


def test_resume_mid_epoch_with_a_worker_equals_uninterrupted_run_without(write_recipe, pictures):
    dataset = {'name': 'image_text', 'crop': 'random', 'min_crop_scale': 0.5, 'flip': True}
    path = write_recipe(streams=streams_of(pictures), dataset=dataset)
    uninterrupted = list(build_loader(load(path)))
    loader = build_loader(load(path))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    del iterator, loader
    resumed = build_loader(load(path, ['loader.num_workers=1']))
    assert state is not None
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert len(rest) == 5
    for expected, batch in zip(uninterrupted[3:], rest, strict=True):
        assert all(torch.equal(expected[name], batch[name]) for name in expected)


def test_evaluation_is_deterministic(write_recipe, pictures):
    streams = {'eval': {'local': str(pictures[32]), 'resolution': 32}}
    component = {'name': 'image_text', 'crop': 'random', 'flip': True}
    dataset = build_loader(load(write_recipe(eval_streams=streams, dataset=component)), 'eval').dataset
    assert isinstance(dataset, ImageTextDataset)
    assert (dataset.crop, dataset.flip, dataset.caption_choice) == ('center', False, 'first')


def dataset_over(folder, **settings):
    bucket = Bucket('a', Stream(local=str(folder)), square(32))
    return ImageTextDataset([bucket], batch_size=4, tokenizers=tiny_tokenizers(), shuffle=False, **settings)


def test_caption_choice_varies_between_epochs(pictures):
    loader = BucketedLoader(dataset_over(pictures[32]), batch_size=4)
    first, second = (torch.cat([batch[batch_keys.INPUT_IDS] for batch in loader]) for _ in range(2))
    same = (first == second).all(dim=(1, 2)) if first.ndim == 3 else first == second
    assert 5 < int(same.sum()) < 35, 'with two captions each, about half keep their caption'


def test_problems_name_the_stream_and_the_sample(tmp_path):
    with pytest.raises(ValueError, match='streams.a: .*'):
        dataset_over(tmp_path / 'nothing')
    with MDSWriter(out=str(tmp_path / 'd'), columns={'image': 'bytes'}) as writer:
        writer.write({'image': b'x'})
    with pytest.raises(ValueError, match='its samples have the columns image, but captions or caption is required'):
        dataset_over(tmp_path / 'd')
    with MDSWriter(out=str(tmp_path / 'e'), columns={'image': 'bytes', 'caption': 'str'}) as writer:
        writer.write({'image': b'no picture', 'caption': 'a'})
    with pytest.raises(BadSample, match=r'streams.a: sample 0 \(row 0 of shard.00000.mds\): the image cannot be'):
        dataset_over(tmp_path / 'e')[0]


def test_default_worker_count_leaves_one_core_per_device():
    assert default_num_workers(1) == max(0, min(8, len(os.sched_getaffinity(0)) - 1))
    assert default_num_workers(10_000) == 0


def test_epoch_follows_stream_proportions(write_recipe, pictures):
    streams = streams_of(pictures)
    for name, proportion in (('px32', 1.0), ('px64', 3.0)):
        streams[name]['proportion'] = proportion
    batches = list(build_loader(load(write_recipe(streams=streams))))
    large = sum(batch[batch_keys.IMAGE].shape[-1] == 64 for batch in batches)
    assert large / len(batches) == pytest.approx(0.75, abs=0.1)


def write_ramps(folder, sizes):
    """Write images whose red value is the column in percent of the width, and whose green value is that of the row."""
    columns = {'image': 'bytes', 'captions': 'json', 'key': 'str', 'metadata': 'json'}
    with MDSWriter(out=str(folder), columns=columns, hashes=['sha1']) as writer:
        for index, (width, height) in enumerate(sizes):
            pixels = np.zeros((height, width, 3), np.uint8)
            pixels[..., 0] = (np.arange(width) + 0.5)[None] / width * 250
            pixels[..., 1] = (np.arange(height) + 0.5)[:, None] / height * 250
            image = encode(Image.fromarray(pixels), 'PNG')
            stored = {'source_width': 3 * width, 'source_height': 3 * height}
            writer.write({'image': image, 'captions': ['a'], 'key': str(index), 'metadata': stored})
    return folder


def test_crop_coordinates_locate_the_pixels(tmp_path, tiny_recipe, many_datasets):
    """The position of each crop, read from its colors, is the one that the sizes state, mirrored or not."""
    encoded = [(160, 96), (96, 200), (400, 200), (64, 64)] * 2
    data = write_ramps(tmp_path / 'data', encoded)
    content = tiny_recipe(tmp_path / 'runs')
    content['model'] |= {'name': 'tiny_sdxl', 'text_layers': 2}
    content['dataset'] |= {'crop': 'random', 'flip': True, 'min_crop_scale': 0.5}
    content['streams'] = {'ramps': {'local': str(data), 'resolution': 40, 'shape': '48x32'}}
    content['loader']['shuffle'] = False
    content['seed'] = 0  # mirrors some of the images
    (batch,) = build_loader(load(write_yaml(tmp_path / 'recipe.yaml', content)))
    mirrored = 0
    images = zip(encoded, batch[batch_keys.IMAGE], batch[batch_keys.IMAGE_SIZES], strict=True)
    for (width, height), image, sizes in images:
        pixels = image.numpy().astype(float)
        flipped = pixels[0, :, -1].mean() < pixels[0, :, 0].mean()
        mirrored += flipped
        # The color is linear in the column or row of the original, so that its zero is where the original begins.
        red, green = pixels[0].mean(0), pixels[1].mean(1)
        (slope, start), (down, above) = (np.polyfit(np.arange(len(each)) + 0.5, each, 1) for each in (red, green))
        # In the mirrored image, the column 0 has the color 250.
        left, top = ((start - 250) / slope if flipped else start / slope), above / down
        assert (sizes[:2].tolist(), sizes[4:].tolist()) == ([3 * height, 3 * width], [32, 48])
        assert sizes[2:4].tolist() == pytest.approx([top, left], abs=1.5)
    assert 0 < mirrored < len(encoded)


def test_mirrored_crop_is_that_of_the_mirrored_image():
    box, shape = CropBox(left=10, top=4, width=60, height=40), Shape(30, 20)
    assert image_sizes(box, shape, image=(100, 50)).tolist() == [50, 100, 2, 5, 20, 30]
    assert image_sizes(box, shape, image=(100, 50), flipped=True).tolist() == [50, 100, 2, 15, 20, 30]
    assert image_sizes(box, shape, image=(100, 50), original=(1000, 500)).tolist() == [500, 1000, 2, 5, 20, 30]


def test_original_size_is_that_of_prepare_if_it_is_recorded():
    assert original_size({'metadata': {'source_width': 1, 'source_height': 480}}) == (1, 480)
    for metadata in (None, {'source_width': 640}, {'source_width': '640'}, {'source_width': 0, 'source_height': 480}):
        assert original_size({'metadata': metadata}) is None
    assert original_size({}) is None


def test_model_without_sizes_gets_none(write_recipe):
    assert batch_keys.IMAGE_SIZES not in next(iter(build_loader(load(write_recipe()))))


class WithoutSizes(ImageTextDataset):
    def __init__(self, buckets, *, batch_size, tokenizers=(), seed=17, elastic=False, **streaming):
        super().__init__(buckets, batch_size=batch_size, tokenizers=tokenizers, seed=seed, elastic=elastic)


def test_dataset_without_sizes_is_refused_for_a_model_with_them(write_recipe, tiny_recipe, tmp_path, monkeypatch):
    recipe = load(write_recipe(model=tiny_recipe(tmp_path)['model'] | {'name': 'tiny_sdxl', 'text_layers': 2}))
    recipe.dataset = Component('without_sizes', {})
    monkeypatch.setitem(registry.TARGETS['dataset'], 'without_sizes', WithoutSizes)
    with pytest.raises(UserError, match='without_sizes takes no keyword image_sizes, but the model tiny_sdxl'):
        build_loader(recipe)
