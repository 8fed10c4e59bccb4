"""Expand a stream with several aspect buckets into one stream per image shape."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from diffusion.config.image_shapes import BUCKETS, Shape, read_buckets, resolution_problem
from diffusion.config.recipe import StreamConfig
from diffusion.errors import DataError, GaveUp, UserError
from diffusion.storage.object_store import RemoteFolder
from diffusion.storage.retry import RetryPolicy

log = logging.getLogger(__name__)


def by_shape(streams: Mapping[str, StreamConfig], *, smallest: int = 1) -> dict[str, StreamConfig]:
    """Replace each stream that has several image shapes (`aspects`) by one stream per shape, such as `photos/640x384`.

    A stream's proportion is divided among its shapes by their number of samples; its other settings apply to every
    shape. Shapes with fewer than `smallest` samples are skipped with a warning.

    Raises:
        UserError: A folder has no list of its shapes, or no shape has enough samples.
        DataError: The list of shapes cannot be downloaded.
    """
    found: dict[str, StreamConfig] = {}
    for name, stream in streams.items():
        found |= _shapes_of(name, stream, smallest) if stream.aspects else {name: stream}
    return found


def _shapes_of(name: str, stream: StreamConfig, smallest: int) -> dict[str, StreamConfig]:
    """Return one stream per image shape, by name; skip shapes with fewer than `smallest` samples."""
    counts = _buckets(name, stream)
    kept = {shape: count for shape, count in counts.items() if count >= smallest}
    if not kept:
        raise UserError(
            f'streams.{name}: none of its {len(counts)} shapes has the {smallest} samples of a batch; '
            'prepare the data with fewer shapes, or use a smaller global_batch'
        )
    if len(kept) < len(counts):
        skipped = [f'{shape} ({count})' for shape, count in counts.items() if shape not in kept]
        log.warning(
            'streams.%s: skipped shapes that do not fill a batch of %d: %s; prepare data with fewer shapes',
            *(name, smallest, ', '.join(skipped)),
        )
    total = sum(kept.values())
    return {
        f'{name}/{shape}': replace(
            stream,
            aspects=False,
            shape=str(shape),
            remote=_inside(stream.remote, shape),
            local=_inside(stream.local, shape),
            proportion=None if stream.proportion is None else stream.proportion * count / total,
        )
        for shape, count in kept.items()
    }


def _buckets(name: str, stream: StreamConfig) -> dict[Shape, int]:
    try:
        is_local = stream.remote is None or '://' not in stream.remote
        folder = Path(stream.remote or stream.local or '') if is_local else _fetched(stream)
        counts = read_buckets(folder)
    except UserError as error:
        raise UserError(f'streams.{name}: {error}') from error
    except GaveUp as error:
        raise DataError(f'streams.{name}: {error}') from error
    if (problem := resolution_problem(folder, stream.resolution)) is not None:
        raise UserError(f'streams.{name}.resolution: {problem}')
    return counts


def _fetched(stream: StreamConfig) -> Path:
    """Download buckets.json, the list of a stream's image shapes, and return the local folder that contains it.

    The list is downloaded at every start, since data may have been added; if the remote fails, an earlier copy is used.
    """
    if stream.remote is None or stream.local is None:
        raise UserError('remote is set but local is not; set local to a folder for the downloaded files')
    path = Path(stream.local, BUCKETS)
    RemoteFolder(stream.remote, RetryPolicy(1 + stream.download_retry, stream.download_timeout)).refresh(BUCKETS, path)
    return path.parent


def _inside(folder: str | None, shape: Shape) -> str | None:
    return None if folder is None else f'{folder.rstrip("/")}/{shape}'
