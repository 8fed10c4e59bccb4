"""`diffusion data verify`: read whole shards in several processes and report every defect."""

import itertools
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from streaming.base.compression import decompress
from streaming.base.format import FileInfo
from streaming.base.format.mds.reader import MDSReader
from tqdm import tqdm

from diffusion.config.image_shapes import parse_shape
from diffusion.config.recipe import StreamConfig
from diffusion.data.bad_samples import BadSample
from diffusion.data.caption_choice import captions_of
from diffusion.data.image_reading import UnreadableImage
from diffusion.data.transforms import JPEG_START, decode
from diffusion.errors import DataError, GaveUp, UserError, printable
from diffusion.models import batch_keys
from diffusion.models.batch_keys import IMAGE, REJECTED_IMAGE
from diffusion.storage.mds import find_damage
from diffusion.storage.object_store import RemoteFolder
from diffusion.storage.retry import RetryPolicy
from diffusion.training.expand_streams import by_shape

Manifest = Mapping[str, Any]
Sections = Mapping[str, Mapping[str, StreamConfig]]


def source_of(stream: StreamConfig) -> RemoteFolder:
    """Return the folder with a stream's data: its remote if it has one, otherwise its local folder."""
    return RemoteFolder(
        stream.remote or stream.local or '', RetryPolicy(1 + stream.download_retry, stream.download_timeout)
    )


@dataclass(frozen=True, order=True)
class Defect:
    """Problem found in a shard or in a range of its rows."""

    shard: str
    first: int
    """First affected row; -1 means the whole shard."""
    last: int
    """Last affected row; -1 means the whole shard."""
    problem: str
    harmless: bool = False
    """True if the loader still serves the rows; the problem is then only a warning."""

    def __str__(self) -> str:
        rows = f', rows {self.first}-{self.last}' if self.last > self.first else f', row {self.first}'
        return f'{self.shard}{rows if self.first >= 0 else ""}: {self.problem}'


@dataclass
class ShardResult:
    samples: int = 0
    bytes: int = 0
    defects: list[Defect] = field(default_factory=list)


def read_index(source: RemoteFolder) -> list[dict[str, Any]]:
    """Return the entries of a stream's index.json, one per shard."""
    try:
        with source.files('index.json') as folder:
            if not (folder / 'index.json').is_file():  # avoid pipes: reading would block
                raise FileNotFoundError(f'{folder / "index.json"} is not a file')
            entries = json.loads((folder / 'index.json').read_text(encoding='utf-8'))['shards']
            for entry in entries:
                MDSReader.from_json('', '', entry)
                counts = entry['samples'], entry['raw_data']['bytes']
                if not all(type(count) is int and 0 <= count < 2**31 for count in counts):
                    raise ValueError(f'the numbers of samples and bytes of a shard are not in [0, 2**31): {counts}')
    except (OSError, UserError) as error:
        raise UserError(
            f'{source.url}: cannot read index.json ({error}); check the path or URL, and your access to it'
        ) from error
    except Exception as error:  # arbitrary JSON may raise any exception
        raise UserError(
            f'{source.url}: index.json is not an index of MDS shards ({error!r}); prepare the data again'
        ) from error
    return entries


def stream_manifest(source: RemoteFolder) -> Manifest:
    """Return the manifest.json of a stream of latents, which records the encoders and settings used."""
    from diffusion.data.latents import MANIFEST, LatentManifest  # slow: this imports diffusers

    try:
        with source.files(MANIFEST) as folder:
            return vars(LatentManifest.read(folder, source.url))
    except GaveUp as error:
        raise UserError(
            f'{source.url}: cannot read {MANIFEST} ({error}); check the URL and your access to it'
        ) from error


def check_shard(source: RemoteFolder, entry: Mapping[str, Any], manifest: Manifest | None) -> ShardResult:
    """Read a whole shard, and check its size, hash and samples (against the manifest, for a stream of latents)."""
    raw, name = FileInfo(**entry['raw_data']), entry['raw_data']['basename']
    result = ShardResult()
    stored = FileInfo(**entry['zip_data']) if entry.get('zip_data') else raw
    # Streaming unpacks a compressed shard into the same folder and may remove the compressed file, so check the raw
    # file.
    if stored is not raw and '://' not in source.url and Path(source.url, raw.basename).exists():
        stored = raw
    try:
        with source.files(stored.basename) as folder, tempfile.TemporaryDirectory() as scratch:
            if (found := find_damage(folder / stored.basename, stored)) is not None:
                result.defects.append(Defect(stored.basename, -1, -1, found))
            if stored is not raw and (folder / stored.basename).exists():
                packed, folder = (folder / stored.basename).read_bytes(), Path(scratch)
                (folder / raw.basename).write_bytes(decompress(entry['compression'], packed))
            # Read rows even if the shard is damaged, so that the report shows how many samples are lost.
            if (folder / raw.basename).exists():
                result.bytes = (folder / raw.basename).stat().st_size
                problems = _row_problems(MDSReader.from_json(str(folder), '', dict(entry)), manifest, result)
                result.defects += _merge_rows(name, problems)
    except (GaveUp, UserError) as error:
        result.defects.append(Defect(name, -1, -1, f'it cannot be downloaded ({error})'))
    except Exception as error:  # decompression libraries raise various exceptions for damaged data
        result.defects.append(Defect(name, -1, -1, f'it cannot be read ({error!r})'))
    return result


def _row_problems(reader: MDSReader, manifest: Manifest | None, result: ShardResult) -> Iterator[tuple[int, str, bool]]:
    """Yield (row, problem, harmless) for each problem in a shard, and count the readable samples in `result`.

    A problem is harmless if the loader still serves the sample.
    """
    for row in range(reader.size):
        try:
            sample = reader[row]
        except IndexError:
            yield row, 'it is past the end of the file', False
            continue
        except Exception as error:  # each column encoding raises its own exceptions
            yield row, f'it cannot be read ({error!r})', False
            continue
        result.samples += 1
        for problem, harmless in itertools.chain(
            *(_image_problems(sample, column) for column in (IMAGE, REJECTED_IMAGE) if column in sample),
            _caption_problems(sample) if {'captions', 'caption'} & sample.keys() else (),
            _latent_problems(sample, manifest) if manifest is not None else (),
        ):
            yield row, problem, harmless


def _merge_rows(shard: str, problems: Iterator[tuple[int, str, bool]]) -> Iterator[Defect]:
    """Merge consecutive rows with the same problem, such as missing rows of a truncated shard, into one defect."""
    ranges: dict[tuple[str, bool], Defect] = {}
    for row, problem, harmless in problems:
        previous = ranges.get((problem, harmless))
        if previous is not None and previous.last == row - 1:
            ranges[problem, harmless] = Defect(shard, previous.first, row, problem, harmless)
            continue
        if previous is not None:
            yield previous
        ranges[problem, harmless] = Defect(shard, row, row, problem, harmless)
    yield from ranges.values()


def _image_problems(sample: Mapping[str, Any], column: str) -> Iterator[tuple[str, bool]]:
    name = column.replace('_', ' ')
    # libjpeg-turbo warns about stray bytes in a JPEG; like the loader, `decode` ignores harmless ones.
    encoded, warning, size = sample[column], None, None
    if isinstance(encoded, bytes) and encoded.startswith(JPEG_START):
        try:
            height, width = simplejpeg.decode_jpeg(encoded, colorspace='GRAY').shape[:2]
            size = width, height
        except ValueError as error:
            warning = str(error)
    if size is None:
        try:
            size = decode(encoded).size
        except UnreadableImage as error:
            yield f'its {name} cannot be decoded ({error})', False
            return
    if warning is not None:
        yield f'its {name} can be decoded, but libjpeg reports: {warning}', True
    stated = (sample.get('width'), sample.get('height')) if column == IMAGE else ()
    # Width and height may be swapped: the columns may hold the size before or after the EXIF rotation.
    if stated and all(isinstance(side, int | np.integer) for side in stated) and stated not in (size, size[::-1]):
        yield f'its image has {size[0]}x{size[1]} pixels, but its columns state {stated[0]}x{stated[1]}', True


def _caption_problems(sample: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    try:
        captions = captions_of(dict(sample), 'captions')
    except BadSample as error:
        yield str(error).removeprefix('captions: '), False
        return
    if not any(caption.strip() for caption in captions):
        yield 'its captions are empty', True


def _latent_problems(sample: Mapping[str, Any], manifest: Manifest) -> Iterator[tuple[str, bool]]:
    for name in (batch_keys.LATENT_MOMENTS, batch_keys.TEXT_EMBEDS, batch_keys.TEXT_POOLED):
        if name in sample and not np.isfinite(sample[name]).all():
            yield f'its {name} are not finite', False
    if batch_keys.LATENT_MOMENTS not in sample:
        yield f'it has no {batch_keys.LATENT_MOMENTS}', False
        return
    shape = sample[batch_keys.LATENT_MOMENTS].shape
    channels = len(manifest['latent_mean']) * (2 if manifest['posterior'] == 'sample' else 1)
    images = parse_shape(manifest['shape'])
    # The manifest does not record the VAE's downscaling factor, but it is a power of two.
    sizes = {(images.height // factor, images.width // factor) for factor in (1, 2, 4, 8, 16, 32, 64)}
    if len(shape) != 3 or shape[0] != channels or tuple(shape[1:]) not in sizes:
        stored = f'its {batch_keys.LATENT_MOMENTS} have shape {list(shape)}'
        yield f'{stored}; the manifest states {channels} channels for images of {images} px', False


DEFECTS_FOUND = 3


@dataclass
class VerifyReport:
    """Result of verifying one stream; `bytes` is the uncompressed size, and `seconds` the elapsed time."""

    shards: int = 0
    total_shards: int = 0
    samples: int = 0
    bytes: int = 0
    seconds: float = 0.0
    defects: list[Defect] = field(default_factory=list)
    problem: str | None = None
    """Problem of the stream as a whole, such as an unreadable index.json; None if there is none."""

    @property
    def is_sound(self) -> bool:
        return self.problem is None and all(defect.harmless for defect in self.defects)

    def lines(self, name: str) -> Iterator[str]:
        rate = self.bytes / 1e6 / self.seconds if self.seconds else 0.0
        yield (
            f'{name}: {"ok" if self.is_sound else "DAMAGED"}; {self.shards} of {self.total_shards} shards, '
            f'{self.samples} samples, {self.bytes / 1e6:.1f} MB, {self.seconds:.1f} s ({rate:.0f} MB/s)'
        )
        if self.problem is not None:
            yield f'  {self.problem}'
        for defect in sorted(self.defects):
            yield f'  {"warning: " if defect.harmless else ""}{defect}'


def verify(sections: Sections, *, sample: float = 1.0, seed: int = 0, jobs: int = 1) -> int:
    """Check a fraction `sample` of each stream's shards (at least one) and print a report.

    Returns the exit status: 0, or DEFECTS_FOUND if a stream cannot be checked or has a defect that is not harmless.
    """
    sound = True
    with _pool(jobs) as pool:
        for section, streams in sections.items():
            for name, stream in _with_shapes(section, streams).items():
                report = verify_stream(source_of(stream), sample=sample, seed=seed, pool=pool)
                sound &= report.is_sound
                for line in report.lines(f'{section}.{name}'):
                    print(printable(line), flush=True)
    return 0 if sound else DEFECTS_FOUND


def _with_shapes(section: str, streams: Mapping[str, StreamConfig]) -> dict[str, StreamConfig]:
    """Return the streams, expanding those with several aspect ratio buckets into one stream per image shape."""
    try:
        return by_shape(streams)
    except (UserError, DataError) as error:
        raise type(error)(f'{section.removesuffix("streams")}{error}') from error


def verify_stream(source: RemoteFolder, *, sample: float, seed: int, pool: Executor) -> VerifyReport:
    report = VerifyReport()
    try:
        entries = read_index(source)
        manifest = (
            stream_manifest(source) if entries and batch_keys.LATENT_MOMENTS in entries[0]['column_names'] else None
        )
    except UserError as error:
        report.problem = str(error)
        return report
    report.total_shards = len(entries)
    chosen = random.Random(seed).sample(entries, min(len(entries), max(1, round(sample * len(entries)))))
    begin = time.monotonic()
    for result in _results(pool, [(source, entry, manifest) for entry in chosen]):
        report.shards += 1
        report.samples += result.samples
        report.bytes += result.bytes
        report.defects += result.defects
    report.seconds = time.monotonic() - begin
    if not entries:
        report.problem = 'it has no shards'
    return report


def _results(pool: Executor, tasks: Sequence[tuple[Any, ...]]) -> Iterator[ShardResult]:
    """Call `check_shard` with each task's arguments; yield results as they complete, with a progress bar."""
    futures: list[Future[ShardResult]] = [pool.submit(check_shard, *task) for task in tasks]
    try:
        for future in tqdm(as_completed(futures), total=len(futures), unit=' shards', leave=False, disable=None):
            yield future.result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            '--jobs: a process died in a decoder or ran out of memory; use --jobs 1 to see where'
        ) from error
    finally:
        # Cancel the rest after an error or Ctrl-C; otherwise, the executor checks all remaining shards before shutting
        # down.
        for future in futures:
            future.cancel()


def _pool(jobs: int) -> Executor:
    """Return an executor with this many processes; for one job, it runs calls in this process."""
    if jobs == 1:
        return _InlineExecutor()
    # A fork server imports modules only once (this takes seconds) and, unlike a plain fork, its children do not inherit
    # this process's threads and held locks.
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['diffusion.inspection.verify'])
    return ProcessPoolExecutor(jobs, mp_context=context)


class _InlineExecutor(Executor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
