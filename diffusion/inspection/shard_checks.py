"""One shard, read in full: its files against the index, and every sample of it."""

import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from streaming.base.compression import decompress
from streaming.base.format import FileInfo
from streaming.base.format.mds.reader import MDSReader

from diffusion.config.image_shapes import parse_shape
from diffusion.config.recipe import StreamConfig
from diffusion.data.bad_samples import BadSample
from diffusion.data.caption_choice import captions_of
from diffusion.data.transforms import JPEG_START, Undecodable, decode
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.storage.download import RemoteFolder
from diffusion.storage.integrity import damage
from diffusion.storage.retry import GaveUp, RetryPolicy

Manifest = Mapping[str, Any]


def source_of(stream: StreamConfig) -> RemoteFolder:
    """Return the folder that a stream comes from: its remote, if it has one, and not the cache of it."""
    return RemoteFolder(
        stream.remote or stream.local or '', RetryPolicy(1 + stream.download_retry, stream.download_timeout)
    )


@dataclass(frozen=True, order=True)
class Defect:
    """Something wrong with a shard, or with rows of it in a line."""

    shard: str
    first: int
    """Row; -1 for the shard as a whole."""
    last: int
    what: str
    harmless: bool = False
    """The loader serves it all the same."""

    def __str__(self) -> str:
        lines = f', rows {self.first}-{self.last}' if self.last > self.first else f', row {self.first}'
        return f'{self.shard}{lines if self.first >= 0 else ""}: {self.what}'


@dataclass
class ShardResult:
    """What reading a shard gave."""

    samples: int = 0
    bytes: int = 0
    defects: list[Defect] = field(default_factory=list)


def read_index(source: RemoteFolder) -> list[dict[str, Any]]:
    """The entries of a stream's shards.

    Raises:
        UserError: There is no index, or it is none of MDS shards.
    """
    try:
        with source.files('index.json') as folder:
            entries = json.loads((folder / 'index.json').read_text(encoding='utf-8'))['shards']
            for entry in entries:
                MDSReader.from_json('', '', entry)
    except (OSError, UserError) as error:
        raise UserError(f'{source.url}: index.json cannot be read ({error})') from error
    except Exception as error:  # whatever is missing in it
        raise UserError(f'{source.url}: index.json is no index of MDS shards ({error!r})') from error
    return entries


def stream_manifest(source: RemoteFolder) -> Manifest:
    """What the latents of a stream were made by.

    Raises:
        UserError: There is no manifest, or it is of another version.
    """
    from diffusion.data.latents import MANIFEST, LatentManifest  # brings all of diffusers

    try:
        with source.files(MANIFEST) as folder:
            return vars(LatentManifest.read(folder, source.url))
    except GaveUp as error:
        raise UserError(f'{source.url}: {MANIFEST} cannot be read ({error})') from error


def check_shard(source: RemoteFolder, entry: Mapping[str, Any], manifest: Manifest | None) -> ShardResult:
    """Read a shard: its size and hash, and every sample."""
    raw, name = FileInfo(**entry['raw_data']), entry['raw_data']['basename']
    reading = ShardResult()
    stored = FileInfo(**entry['zip_data']) if entry.get('zip_data') else raw
    # Streaming may have unpacked a local shard already.
    if stored is not raw and '://' not in source.url and Path(source.url, raw.basename).exists():
        stored = raw
    try:
        with source.files(stored.basename) as folder, tempfile.TemporaryDirectory() as scratch:
            found = damage(folder / stored.basename, stored)
            if found is not None:
                reading.defects.append(Defect(stored.basename, -1, -1, found))
            if stored is not raw and (folder / stored.basename).exists():
                _unpack(folder / stored.basename, Path(scratch, raw.basename), entry['compression'])
                folder = Path(scratch)
            if (folder / raw.basename).exists():
                reading.bytes = (folder / raw.basename).stat().st_size
                problems = _row_problems(MDSReader.from_json(str(folder), '', dict(entry)), manifest, reading)
                reading.defects += _merge_rows(name, problems)
    except (GaveUp, UserError) as error:
        reading.defects.append(Defect(name, -1, -1, f'it cannot be downloaded ({error})'))
    except Exception as error:  # of a decompressor, on damaged data
        reading.defects.append(Defect(name, -1, -1, f'it cannot be read ({error!r})'))
    return reading


def _unpack(packed: Path, to: Path, algorithm: str) -> None:
    to.write_bytes(decompress(algorithm, packed.read_bytes()))


def _row_problems(
    reader: MDSReader, manifest: Manifest | None, reading: ShardResult
) -> Iterator[tuple[int, str, bool]]:
    for row in range(reader.size):
        try:
            sample = reader[row]
        except IndexError:
            yield row, 'it is behind the end of the file', False
            continue
        except Exception as error:  # whatever the encodings of its columns raise
            yield row, f'it cannot be read ({error!r})', False
            continue
        reading.samples += 1
        for what, harmless in sample_problems(sample, manifest):
            yield row, what, harmless


def _merge_rows(shard: str, problems: Iterator[tuple[int, str, bool]]) -> Iterator[Defect]:
    """One line for rows that follow each other and have the same problem, as behind the end of a file cut short."""
    open_lines: dict[tuple[str, bool], Defect] = {}
    for row, what, harmless in problems:
        before = open_lines.get((what, harmless))
        if before is not None and before.last == row - 1:
            open_lines[what, harmless] = Defect(shard, before.first, row, what, harmless)
            continue
        if before is not None:
            yield before
        open_lines[what, harmless] = Defect(shard, row, row, what, harmless)
    yield from open_lines.values()


def sample_problems(sample: Mapping[str, Any], manifest: Manifest | None) -> Iterator[tuple[str, bool]]:
    """What is wrong with a sample, and whether the loader serves it all the same."""
    return itertools.chain(
        _image_problems(sample) if 'image' in sample else (),
        _caption_problems(sample) if {'captions', 'caption'} & sample.keys() else (),
        _latent_problems(sample, manifest) if manifest is not None else (),
    )


def _image_problems(sample: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    encoded, complaint, size = sample['image'], None, None
    if isinstance(encoded, bytes) and encoded.startswith(JPEG_START):
        try:
            height, width = simplejpeg.decode_jpeg(encoded, colorspace='GRAY').shape[:2]
            size = width, height
        except ValueError as error:
            complaint = str(error)
    if size is None:
        try:
            size = decode(encoded).size
        except Undecodable as error:
            yield f'its picture cannot be decoded ({error})', False
            return
    if complaint is not None:
        yield f'its picture is decoded, but libjpeg says: {complaint}', True
    told = sample.get('width'), sample.get('height')
    if all(isinstance(side, int | np.integer) for side in told) and told not in (size, size[::-1]):
        yield f'its picture has {size[0]}x{size[1]} pixels, its columns say {told[0]}x{told[1]}', True


def _caption_problems(sample: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    try:
        captions = captions_of(dict(sample), 'captions')
    except BadSample as error:
        yield str(error).removeprefix('captions: '), False
        return
    if not any(caption.strip() for caption in captions):
        yield 'its captions are empty', True


def _latent_problems(sample: Mapping[str, Any], manifest: Manifest) -> Iterator[tuple[str, bool]]:
    for name in (batch_keys.LATENT_MOMENTS, batch_keys.TEXT_EMBEDS):
        if name in sample and not np.isfinite(sample[name]).all():
            yield f'its {name} are not finite', False
    if batch_keys.LATENT_MOMENTS not in sample:
        yield f'it has no {batch_keys.LATENT_MOMENTS}', False
        return
    shape = sample[batch_keys.LATENT_MOMENTS].shape
    channels = len(manifest['latent_mean']) * (2 if manifest['posterior'] == 'sample' else 1)
    pictures = parse_shape(manifest['shape'])
    cells = {(pictures.height // cell, pictures.width // cell) for cell in (1, 2, 4, 8, 16, 32, 64)}
    if len(shape) != 3 or shape[0] != channels or tuple(shape[1:]) not in cells:
        yield (
            (
                f'its {batch_keys.LATENT_MOMENTS} have shape {list(shape)}; the manifest says {channels} channels '
                f'of pictures of {pictures} px'
            ),
            False,
        )
