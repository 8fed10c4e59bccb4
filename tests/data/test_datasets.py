"""Datasets and loader on real shards."""

import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch
from streaming import MDSWriter, Stream

from diffusion.config.image_shapes import square
from diffusion.config.load import load
from diffusion.data.bad_samples import BadSample
from diffusion.data.image_text import ImageTextDataset
from diffusion.data.loader import BucketedLoader, default_num_workers
from diffusion.data.streams import Bucket
from diffusion.models import batch_keys
from diffusion.storage import bucket_clients
from diffusion.storage.s3_client import S3Client
from diffusion.training.components import build_loader


def two_buckets(pictures):
    return {f'px{side}': {'local': str(folder), 'resolution': side} for side, folder in pictures.items()}


def batches_of(loader):
    return [{name: tensor.clone() for name, tensor in batch.items()} for batch in loader]


def copy_of(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def test_batches_have_one_resolution_and_all_keys(write_recipe, pictures):
    loader = build_loader(load(write_recipe(streams=two_buckets(pictures))))
    batches = batches_of(loader)
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
    assert len(batches_of(build_loader(load(write_recipe(streams=streams))))) == 5
    assert len(list((tmp_path / 'local').glob('*.mds'))) == sum('.mds' in path for path in store.shard_reads())


def test_epochs_are_numbered_and_shuffled_differently(write_recipe, pictures):
    loader = build_loader(load(write_recipe(streams=two_buckets(pictures))))
    first, second = batches_of(loader), batches_of(loader)
    assert {batch[batch_keys.EPOCH].unique().item() for batch in first} == {0}
    assert {batch[batch_keys.EPOCH].unique().item() for batch in second} == {1}
    orders = [torch.cat([b[batch_keys.SAMPLE_ID] for b in batches]).tolist() for batches in (first, second)]
    assert orders[0] != orders[1]


def test_resume_mid_epoch_equals_uninterrupted(write_recipe, pictures):
    path = write_recipe(
        streams=two_buckets(pictures),
        dataset={'name': 'image_text', 'crop': 'random', 'min_crop_scale': 0.5, 'flip': True},
    )
    uninterrupted = batches_of(build_loader(load(path)))
    loader = build_loader(load(path))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    del iterator, loader
    resumed = build_loader(load(path))
    assert state is not None
    resumed.load_state_dict(state)
    rest = batches_of(resumed)
    assert len(rest) == 5
    for expected, batch in zip(uninterrupted[3:], rest, strict=True):
        assert all(torch.equal(expected[name], batch[name]) for name in expected)


def test_batches_do_not_depend_on_worker_count(write_recipe, pictures):
    sections = {
        'streams': two_buckets(pictures),
        'dataset': {'name': 'image_text', 'crop': 'random', 'min_crop_scale': 0.5, 'flip': True},
    }
    without_worker = batches_of(build_loader(load(write_recipe(**sections))))
    with_worker = batches_of(build_loader(load(write_recipe(**sections, loader={'num_workers': 1}))))
    for expected, batch in zip(without_worker, with_worker, strict=True):
        assert all(torch.equal(expected[name], batch[name]) for name in expected)


def test_evaluation_is_ordered_complete_and_deterministic(write_recipe, pictures):
    streams = {'eval': {'local': str(pictures[32]), 'resolution': 32}}
    recipe = load(
        write_recipe(
            global_batch=16, eval_streams=streams, dataset={'name': 'image_text', 'crop': 'random', 'flip': True}
        )
    )
    loader = build_loader(recipe, 'eval')
    batches = batches_of(loader)
    assert torch.cat([batch[batch_keys.SAMPLE_ID] for batch in batches]).tolist() == list(range(40))
    dataset = loader.dataset
    assert isinstance(dataset, ImageTextDataset)
    assert (dataset.crop, dataset.flip, dataset.caption_choice) == ('center', False, 'first')


def dataset_over(folder, **settings):
    from diffusion.models.builders import tiny_tokenizers

    bucket = Bucket('a', Stream(local=str(folder)), square(32))
    return ImageTextDataset([bucket], batch_size=4, tokenizers=tiny_tokenizers(), shuffle=False, **settings)


def test_caption_choice_varies_between_epochs(pictures):
    dataset = dataset_over(pictures[32])
    loader = BucketedLoader(dataset, batch_size=4)
    first, second = (torch.cat([batch[batch_keys.INPUT_IDS] for batch in loader]) for _ in range(2))
    same = (first == second).all(dim=(1, 2)) if first.ndim == 3 else first == second
    assert 5 < int(same.sum()) < 35, 'with two captions each, about half keep their caption'


def test_missing_folder_raises_with_stream_name(tmp_path):
    with pytest.raises(ValueError, match='streams.a: .*'):
        dataset_over(tmp_path / 'nothing')


def test_missing_caption_column_raises_at_start(tmp_path):
    with MDSWriter(out=str(tmp_path / 'd'), columns={'image': 'bytes'}) as writer:
        writer.write({'image': b'x'})
    with pytest.raises(ValueError, match='its samples have the columns image, but captions or caption is required'):
        dataset_over(tmp_path / 'd')


def test_undecodable_image_error_names_shard_and_row(tmp_path):
    with MDSWriter(out=str(tmp_path / 'd'), columns={'image': 'bytes', 'caption': 'str'}) as writer:
        writer.write({'image': b'no picture', 'caption': 'a'})
    dataset = dataset_over(tmp_path / 'd')
    with pytest.raises(
        BadSample, match=r'streams.a: sample 0 \(row 0 of shard.00000.mds\): the image cannot be decoded'
    ):
        dataset[0]


def test_missing_shard_raises_instead_of_shortening_epoch(write_recipe, pictures, tmp_path):
    remote = copy_of(pictures[32], tmp_path / 'remote')
    streams = {'a': {'remote': str(remote), 'local': str(tmp_path / 'local'), 'resolution': 32, 'download_retry': 1}}
    loader = build_loader(load(write_recipe(streams=streams)))
    victim = sorted(remote.glob('shard.*.mds'))[-1]
    victim.unlink()
    with pytest.raises((ValueError, RuntimeError, FileNotFoundError)):
        batches_of(loader)


def test_workers_persist_across_epochs(write_recipe, pictures):
    before = set(multiprocessing.active_children())
    loader = build_loader(load(write_recipe(streams=two_buckets(pictures), loader={'num_workers': 1})))
    workers = []
    for _ in range(2):
        batches_of(loader)
        workers.append({process.pid for process in set(multiprocessing.active_children()) - before})
    assert len(workers[0]) == 1
    assert workers[0] == workers[1]


def test_default_worker_count_leaves_one_core_per_device():
    import os

    cores = len(os.sched_getaffinity(0))
    assert default_num_workers(1) == max(0, min(8, cores - 1))
    assert default_num_workers(10_000) == 0


def test_epoch_follows_stream_proportions(write_recipe, pictures):
    streams = two_buckets(pictures)
    for name, proportion in (('px32', 1.0), ('px64', 3.0)):
        streams[name]['proportion'] = proportion
    batches = batches_of(build_loader(load(write_recipe(streams=streams))))
    large = sum(batch[batch_keys.IMAGE].shape[-1] == 64 for batch in batches)
    assert large / len(batches) == pytest.approx(0.75, abs=0.1)
