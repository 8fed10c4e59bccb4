"""`task: precompute`: store the outputs of the frozen encoders for a dataset, as MDS shards with a manifest.

Each of `precompute.streams` becomes a folder of the same name in `precompute.out`, with one subfolder per image shape
if it has several; samples keep their order. Shards contain the raw output of the VAE's encoder, so the same latents
work with any normalization, and training can draw new samples of the posterior. Caption dropout is applied in training.

A shard contains a fixed range of samples, encoded in batches that never cross shards. Therefore its bytes do not depend
on the device that writes it, the number of devices, or interruptions.
"""

import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from composer.utils import dist, get_device
from torch.utils.data import DataLoader, Dataset, default_collate
from tqdm import tqdm

from diffusion.checkpointing.run_storage import check_shared
from diffusion.config.image_shapes import BUCKETS, Shape, buckets_text
from diffusion.config.load import Component, Recipe
from diffusion.config.recipe import PrecomputeConfig
from diffusion.data.caption_choice import CAPTION_COLUMNS, captions_of, choose_caption_index
from diffusion.data.image_text import ImageTextDataset
from diffusion.data.latents import (
    MANIFEST,
    TEXT_LENGTHS,
    LatentManifest,
    features_shape,
    manifest_of,
    weights_fingerprint,
)
from diffusion.data.loader import default_num_workers, ignore_stop_signals
from diffusion.data.streams import Bucket, index_hash
from diffusion.errors import DataError, UserError
from diffusion.models import batch_keys
from diffusion.models.families.adapter import SIZES
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.representation_alignment import FeatureEncoder
from diffusion.models.text_conditioner import tokenize
from diffusion.models.vae import downsampling, has_variance, image_step, latent_channels
from diffusion.storage.atomic import remove, remove_unfinished, replace_folder
from diffusion.storage.mds import INDEX, ShardFormat, index_text
from diffusion.storage.places import LocalPlace, Place, StorePlace, is_url
from diffusion.storage.shard_writer import ShardWriter, pin_plan
from diffusion.training import components
from diffusion.training.expand_streams import by_shape

log = logging.getLogger(__name__)

MIN_TIMEOUT_SECONDS = 3600.0
"""Minimum timeout of collectives: a device that has finished waits in a barrier for the devices with more shards."""


@dataclass(frozen=True)
class StageOutput:
    """Output folder of one stage (one stream and image shape), and the state for resuming the stage."""

    final: Place
    """Final output folder. A local one gets this name when complete; in an object store, the index is written last."""
    begun: Place
    """Folder with the state of an unfinished job: the job's plan, and the index entries of finished shards."""
    shards: ShardWriter

    def put_in_place(self) -> None:
        """Rename a local output folder to its final name and remove the local state, after all files are written."""
        if isinstance(self.shards.data, LocalPlace) and isinstance(self.final, LocalPlace):
            remove_unfinished(self.shards.data.path)  # remove temporary files of killed processes
            replace_folder(self.shards.data.path, self.final.path)
        self.clear()

    def clear(self) -> None:
        """Remove the local state of a complete stage; state in an object store is kept."""
        if isinstance(self.begun, LocalPlace):
            remove(self.begun.path)


@dataclass(frozen=True)
class PrecomputeStage:
    """Stage of `task: precompute`: encode the images of one stream and shape into shards of latents."""

    bucket: Bucket
    first: int
    """ID of the stream's first sample in the combined dataset of all streams."""
    samples: int
    manifest: LatentManifest
    """Description of the latents, without the source's hash."""
    source: str
    """Hash of the image stream's index."""
    per_shard: int
    output: StageOutput

    @property
    def num_shards(self) -> int:
        return -(-self.samples // self.per_shard)

    def ids(self, shard: int) -> range:
        start = self.first + shard * self.per_shard
        return range(start, min(start + self.per_shard, self.first + self.samples))

    @property
    def missing(self) -> list[int]:
        return sorted(set(range(self.num_shards)) - self.output.shards.done())

    @property
    def plan(self) -> dict[str, Any]:
        """Settings that determine the bytes of the output shards. A job resumes only if they are unchanged."""
        settings = {'samples': self.samples, 'samples_per_shard': self.per_shard, 'index_sha256': self.source}
        return settings | {'manifest': vars(self.manifest), 'columns': dict(self.output.shards.format.columns)}


def precompute(recipe: Recipe) -> None:
    """Encode the images of a recipe's `precompute.streams` into latents, on any number of devices.

    An interrupted job resumes when it is started again.

    Raises:
        UserError: The model has no VAE, existing output has other settings, or values overflow their dtype.
        DataError: A sample cannot be decoded.
    """
    components.check_device(recipe)
    device = get_device(recipe.trainer.get('device'))
    if int(os.environ.get('WORLD_SIZE', '1')) > 1:
        dist.initialize_dist(device, max(MIN_TIMEOUT_SECONDS, recipe.trainer.get('dist_timeout', 0.0)))
    model = components.build_model(recipe)
    if not isinstance(model, LatentDiffusion):
        raise UserError(f'model.name: {recipe.model.name} has no frozen VAE; use a latent diffusion model, such as sd2')
    if recipe.precompute.latents == 'image+text' and model.train_text_encoder:
        what = 'precompute.latents: image+text needs a frozen text encoder, but this model trains its own; use image'
        raise UserError(what)
    model = cast(LatentDiffusion, device.module_to_device(model))
    dataset = _dataset(recipe)
    if not is_url(recipe.precompute.out):
        check_shared(Path(recipe.precompute.out), 'precompute.out')
    stages = [stage for stage in _stages(recipe, dataset, model) if not _is_done(stage)]
    if dist.get_global_rank() == 0:
        for stage in stages:
            pin_plan(stage.output.begun, stage.plan, where='precompute.out')
    dist.barrier()  # no rank may write shards before rank 0 has checked the plan of an unfinished job
    _encode(recipe, dataset, model, stages)
    dist.barrier()  # wait for the shards of all ranks, which rank 0 needs for the index
    if dist.get_global_rank() == 0:
        for stage in stages:
            _finish(stage)
        _list_shapes(recipe, dataset)
    shutil.rmtree(_scratch(recipe), ignore_errors=True)


def _dataset(recipe: Recipe) -> ImageTextDataset:
    """Build the unshuffled dataset of all images to encode; sample IDs continue from stream to stream."""
    settings = recipe.precompute
    keywords = {'crop': settings.crop, 'min_crop_scale': settings.min_crop_scale, 'caption_choice': 'first'}
    dataset = components.build_dataset(
        recipe,
        streams=settings.streams,
        component=Component('image_text', keywords),
        batch_size=settings.batch_size,
        shuffle=False,
    )
    dataset.caption_columns = dataset.open_caption_columns(settings.caption_columns)
    for bucket, columns in zip(dataset.buckets, dataset.caption_columns, strict=True):
        if missing := [name for name in settings.caption_columns if name not in columns.listed]:
            raise UserError(
                f'precompute.caption_columns: precompute.streams.{bucket.name} has no captions {", ".join(missing)}; '
                'write them with diffusion caption, or remove the name'
            )
    return dataset


def _stages(recipe: Recipe, dataset: ImageTextDataset, model: LatentDiffusion) -> list[PrecomputeStage]:
    settings = recipe.precompute
    stages, first = [], 0
    samples_of = dataset.samples_per_stream.tolist()
    for bucket, samples, tables in zip(dataset.buckets, samples_of, dataset.caption_columns, strict=True):
        manifest = manifest_of(
            model.vae,
            shape=str(bucket.shape),
            posterior=_posterior(model, settings),
            dtype=settings.dtype,
            crop=settings.crop if settings.crop == 'center' else f'random, {settings.min_crop_scale}, {recipe.seed}',
            text=model.text if settings.latents == 'image+text' else None,
            text_padding='removed' if settings.latents == 'image+text' and model.ignores_padding else 'kept',
            captions=', '.join([settings.captions, *(f'{name} ({of})' for name, of in tables.fingerprint().items())]),
            image_sizes=model.adapter.takes_sizes,
        )
        if model.image_encoder is not None:
            manifest = replace(manifest, **_features_record(model, model.image_encoder, bucket.shape))
        columns = _columns(model, bucket.shape, settings)
        if tables.listed or CAPTION_COLUMNS in dataset.columns_of(bucket):
            columns[CAPTION_COLUMNS] = 'json'
        output = _output(recipe, bucket.name, ShardFormat(columns))
        per_shard = _samples_per_shard(model, bucket.shape, settings)
        stages.append(PrecomputeStage(bucket, first, samples, manifest, index_hash(bucket.stream), per_shard, output))
        first += samples
    return stages


def _features_record(model: LatentDiffusion, encoder: FeatureEncoder, shape: Shape) -> dict[str, Any]:
    settings = model.representation_alignment
    assert settings is not None, 'the image encoder is that of the alignment'
    return {
        'image_encoder': weights_fingerprint(encoder),
        'image_encoder_source': '@'.join(part for part in (settings.encoder, settings.revision) if part),
        'features_shape': features_shape(encoder, shape, token_side=model.token_side),
    }


def _output(recipe: Recipe, name: str, shards: ShardFormat) -> StageOutput:
    """Return the output of the stream `name`: a local folder shared by all nodes, or a folder in an object store."""
    final = _folder(recipe, name)
    if isinstance(final, LocalPlace):
        work = final.path.with_name(f'.{final.path.name}.unfinished')
        data, entries = LocalPlace(work / 'dataset'), LocalPlace(work / 'entries')
        return StageOutput(final, LocalPlace(work), ShardWriter(data, entries, shards))
    # Nodes that write to a store may not share a disk, so keep the state for resuming in the store too.
    # StreamingDataset ignores it, because index.json does not list it.
    begun = StorePlace(f'{final}/unfinished', _scratch(recipe) / name / 'unfinished')
    return StageOutput(final, begun, ShardWriter(final, begun, shards))


def _folder(recipe: Recipe, name: str) -> LocalPlace | StorePlace:
    """Return the subfolder `name` of the output. An object store's folder is written through a local folder."""
    out = recipe.precompute.out
    if is_url(out):
        return StorePlace(f'{out.rstrip("/")}/{name}', _scratch(recipe) / name)
    return LocalPlace(Path(out, name))


def _scratch(recipe: Recipe) -> Path:
    """Return this rank's local folder for files that are uploaded or downloaded."""
    return recipe.run_dir / f'precompute-{dist.get_global_rank()}'


def _is_done(stage: PrecomputeStage) -> bool:
    """Return True if a stage's output exists; raise UserError if that output has other settings or other content."""
    final = stage.output.final
    # In an object store, the folder exists if its index does.
    if not (final.path.exists() if isinstance(final, LocalPlace) else INDEX in final.sizes()):
        return False
    try:
        found = LatentManifest.read(final.fetch(MANIFEST, again=True).parent, 'precompute.out')
    except UserError as error:
        raise UserError(f'precompute.out: {final} exists; remove it or use another folder ({error})') from error
    expected = replace(stage.manifest, source=stage.source)
    if found != expected:
        wrong = [name for name in vars(expected) if getattr(found, name) != getattr(expected, name)]
        raise UserError(
            f'precompute.out: {final} exists and holds other latents ({", ".join(wrong)} differ); '
            'remove it or use another folder'
        )
    stage.output.clear()
    log.info('%s: already done', final)
    return True


def _encode(
    recipe: Recipe, dataset: ImageTextDataset, model: LatentDiffusion, stages: Sequence[PrecomputeStage]
) -> None:
    """Encode and write this rank's part of the missing shards; no batch mixes samples of two shards."""
    todo = [(stage, number) for stage in stages for number in stage.missing]
    # All ranks must list the same missing shards. Without this barrier, a rank might list them after another rank had
    # written a shard, and the split over ranks below would assign shards twice or not at all.
    dist.barrier()
    if dist.get_global_rank() == 0 and todo:
        log.info('shards to encode: %d, on %d devices', len(todo), dist.get_world_size())
    assigned = todo[dist.get_global_rank() :: dist.get_world_size()]
    batches = [_batches(stage.ids(number), recipe.precompute.batch_size) for stage, number in assigned]
    workers = recipe.loader.num_workers
    workers = default_num_workers(dist.get_local_world_size()) if workers is None else workers
    # Use a plain DataLoader over indices, which reads exactly the samples of the missing shards, in order. A loop over
    # the StreamingDataset would pad or drop samples, to give each rank the same number.
    loader = DataLoader(
        EncoderInputs(dataset),
        collate_fn=_collate,
        batch_sampler=[batch for shard in batches for batch in shard],
        num_workers=workers,
        timeout=recipe.loader.timeout_seconds if workers else 0,
        worker_init_fn=ignore_stop_signals if workers else None,
    )
    total = sum(len(stage.ids(number)) for stage, number in assigned)
    with tqdm(total=total, desc='latents', unit='image', disable=None) as progress:
        served = iter(loader)
        for (stage, number), shard in zip(assigned, batches, strict=True):
            writer, samples = stage.output.shards, []
            for _ in shard:
                for row in _encoded(dataset, model, _next(served), recipe.precompute):
                    samples.append(writer.format.encode(row))
                    progress.update()
            writer.write(number, samples, [len(sample) for sample in samples])


def _next(served: Iterator[Any]) -> Any:
    """Return the loader's next batch; raise the DataError of a worker process with its original message."""
    try:
        return next(served)
    except DataError as error:
        # PyTorch re-raises a worker's exception with the worker's whole traceback as the message; keep only the end.
        _, _, message = str(error).rpartition(f'{type(error).__qualname__}: ')
        raise DataError(message.strip()) from error


class EncoderInputs(Dataset[tuple[dict[str, Any], dict[str, Any]]]):
    """Dataset of model inputs by sample ID, each with the captions and key, which are stored unchanged."""

    def __init__(self, dataset: ImageTextDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
        stored, item = self.dataset.read(index)
        sample = self.dataset.with_table_captions(stored, index)
        captions = captions_of(sample, self.dataset.where(index))
        columns = sample.get(CAPTION_COLUMNS, [])
        return item, {'captions': captions, 'key': str(sample.get('key', index)), CAPTION_COLUMNS: columns}


def _collate(samples: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return default_collate([item for item, _ in samples]), [row for _, row in samples]


def _encoded(
    dataset: ImageTextDataset,
    model: LatentDiffusion,
    served: tuple[Mapping[str, torch.Tensor], list[dict[str, Any]]],
    settings: PrecomputeConfig,
) -> Iterator[dict[str, Any]]:
    """Encode a batch of images, and yield one row of the output per sample."""
    batch, rows = served
    moments = model.encode(batch[batch_keys.IMAGE].to(model.device))
    if settings.posterior == 'mean':
        # The first half of the channels is means, the second half log-variances.
        moments = moments[:, : latent_channels(model.vae)]
    ids = batch[batch_keys.SAMPLE_ID].tolist()
    columns = {batch_keys.LATENT_MOMENTS: list(moments.cpu().numpy().astype(settings.dtype))}
    if model.image_encoder is not None:
        features = model.image_features(batch[batch_keys.IMAGE].to(model.device))
        columns[batch_keys.IMAGE_FEATURES] = list(features.cpu().numpy().astype(settings.dtype))
    if settings.latents == 'image+text':
        for row in rows:
            _select_captions(row, settings)
        columns |= _text(model, [row['captions'] for row in rows], settings)
    if model.adapter.takes_sizes:
        columns[batch_keys.IMAGE_SIZES] = list(batch[batch_keys.IMAGE_SIZES].numpy().astype(np.int32))
    for name, arrays in columns.items():
        for index, row, array in zip(ids, rows, arrays, strict=True):
            if not np.isfinite(array).all():
                # Raise a UserError, after which no scheduler retries: the same image would give the same values again.
                raise UserError(
                    f'{dataset.where(index)}: its {name} are not finite in {settings.dtype}; '
                    'use precompute.dtype=float32'
                )
            row[name] = array
    yield from rows


def _select_captions(row: dict[str, Any], settings: PrecomputeConfig) -> None:
    if settings.captions != 'all':
        chosen = choose_caption_index(row['captions'], settings.captions, 0)
        for name in ('captions', CAPTION_COLUMNS):
            if row[name]:
                row[name] = [row[name][chosen]]


def _text(model: LatentDiffusion, captions: list[list[str]], settings: PrecomputeConfig) -> dict[str, list[np.ndarray]]:
    """Return the text encoders' outputs for each sample's captions, by column, with one array per sample.

    The arrays are embeddings [captions, L, D] and, if the encoders provide it, pooled text [captions, P]. If the model
    ignores padding, the arrays are the embeddings without padding [sum of lengths, D], and the captions' lengths.
    """
    flat = tokenize(model.text.tokenizers, [text for texts in captions for text in texts]).to(model.device)
    outputs = [model.embed(part) for part in flat.split(settings.batch_size)]
    tensors = {batch_keys.TEXT_EMBEDS: torch.cat([output.embeds for output in outputs])}
    if model.text.pooled_width is not None:
        tensors[batch_keys.TEXT_POOLED] = torch.cat([cast(torch.Tensor, output.pooled) for output in outputs])
    ends = np.cumsum([len(texts) for texts in captions])[:-1]
    columns = {name: np.split(tensor.cpu().numpy().astype(settings.dtype), ends) for name, tensor in tensors.items()}
    if model.ignores_padding:
        masks = np.split(model.text.padding_mask(flat).cpu().numpy(), ends)
        columns[batch_keys.TEXT_EMBEDS] = [
            embeds[mask] for embeds, mask in zip(columns[batch_keys.TEXT_EMBEDS], masks, strict=True)
        ]
        columns[TEXT_LENGTHS] = [mask.sum(axis=1).astype(np.int32) for mask in masks]
    return columns


def _finish(stage: PrecomputeStage) -> None:
    final, missing = stage.output.final, stage.missing
    if missing:
        what = f'precompute.out: {len(missing)} shards of {final} are missing (first: {missing[0]}); run the job again'
        raise RuntimeError(what)
    shards = stage.output.shards
    index = index_text(shards.read_entries(range(stage.num_shards)))
    # Write the index last, because in an object store a folder with an index counts as finished.
    for name, text in ((MANIFEST, replace(stage.manifest, source=stage.source).text()), (INDEX, index)):
        shards.data.write(name, text)
    stage.output.put_in_place()
    log.info('%s: %d images of %s px, shards: %d', final, stage.samples, stage.bucket.shape, stage.num_shards)


def _list_shapes(recipe: Recipe, dataset: ImageTextDataset) -> None:
    counts = dict(zip([bucket.name for bucket in dataset.buckets], dataset.samples_per_stream.tolist(), strict=True))
    shapes = {bucket.name: bucket.shape for bucket in dataset.buckets}
    for name, stream in recipe.precompute.streams.items():
        if stream.aspects:
            buckets = {shapes[each]: {'samples': counts[each]} for each in by_shape({name: stream})}
            _folder(recipe, name).write(BUCKETS, buckets_text(stream.resolution, buckets))


def _columns(model: LatentDiffusion, shape: Shape, settings: PrecomputeConfig) -> dict[str, str]:
    size = ','.join(str(side) for side in _moments_shape(model, shape, settings))
    columns = {'captions': 'json', 'key': 'str', batch_keys.LATENT_MOMENTS: f'ndarray:{settings.dtype}:{size}'}
    if settings.latents == 'image+text':
        columns[batch_keys.TEXT_EMBEDS] = f'ndarray:{settings.dtype}'
        if model.text.pooled_width is not None:
            columns[batch_keys.TEXT_POOLED] = f'ndarray:{settings.dtype}'
        if model.ignores_padding:
            columns[TEXT_LENGTHS] = 'ndarray:int32'
    if model.adapter.takes_sizes:
        columns[batch_keys.IMAGE_SIZES] = f'ndarray:int32:{SIZES}'
    if model.image_encoder is not None:
        height, width, features = features_shape(model.image_encoder, shape, token_side=model.token_side)
        columns[batch_keys.IMAGE_FEATURES] = f'ndarray:{settings.dtype}:{height * width},{features}'
    return columns


def _moments_shape(model: LatentDiffusion, shape: Shape, settings: PrecomputeConfig) -> tuple[int, int, int]:
    """Return the shape [C, H, W] of a sample's stored moments, the output of the VAE's encoder."""
    cell, step = downsampling(model.vae), image_step(model.vae)
    if shape.width % step or shape.height % step:
        raise UserError(f'precompute.streams: {shape} px is not a multiple of {step} px, the side of a latent cell')
    channels = latent_channels(model.vae) * (1 if _posterior(model, settings) == 'mean' else 2)
    return channels, shape.height // cell, shape.width // cell


def _posterior(model: LatentDiffusion, settings: PrecomputeConfig) -> str:
    """Return what to store of the posterior: as in the recipe, or only the mean if the VAE predicts no variance."""
    return settings.posterior if has_variance(model.vae) else 'mean'


def _samples_per_shard(model: LatentDiffusion, shape: Shape, settings: PrecomputeConfig) -> int:
    """Return the samples per shard of about `shard_mb` MB, in whole batches; a sample's captions count as 512 bytes."""
    itemsize = np.dtype(settings.dtype).itemsize
    size = math.prod(_moments_shape(model, shape, settings)) * itemsize + 512
    if settings.latents == 'image+text':
        size += (model.text.length * model.text.width + (model.text.pooled_width or 0)) * itemsize
    if model.image_encoder is not None:
        size += math.prod(features_shape(model.image_encoder, shape, token_side=model.token_side)) * itemsize
    batches = int(settings.shard_mb * 10**6 / (size * settings.batch_size))
    return max(1, batches) * settings.batch_size


def _batches(ids: range, size: int) -> list[list[int]]:
    return [list(ids[start : start + size]) for start in range(0, len(ids), size)]
