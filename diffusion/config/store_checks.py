"""Checks of the streams that a recipe reads from object stores, based on their indexes and first samples.

The store is only read. These files and samples are copied to a temporary folder, where the checks of local data run.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import NamedTuple

from diffusion.config.checks import remote_streams
from diffusion.config.image_shapes import BUCKETS, read_buckets
from diffusion.config.path_checks import SAMPLES_LOOKED_AT, check_paths
from diffusion.config.recipe import Recipe, StreamConfig
from diffusion.config.schema import Problem
from diffusion.errors import UserError
from diffusion.storage import object_store
from diffusion.storage.retry import RetryPolicy, is_missing_object

INDEX = 'index.json'
MANIFEST = 'manifest.json'
MAX_BEGINNING_BYTES = 2**26
"""Maximum number of bytes to read from a shard for its first samples; larger samples are not copied or checked."""


class CopiedStreams(NamedTuple):
    """A recipe with its remote streams replaced by partial local copies, and problems of those that cannot be read."""

    recipe: Recipe
    refused: list[Problem]
    urls: dict[str, str]
    """URL of each copied stream, by the path of its copy."""

    def check(self) -> list[Problem]:
        """Return the problems of streams that cannot be read, then those in the copies, with URLs instead of paths."""
        found = list(self.refused)
        for problem in check_paths(self.recipe):
            what = problem.what
            for folder, url in self.urls.items():
                what = what.replace(folder, url)
            found.append(Problem(problem.where, what))
        return found


@contextmanager
def copied_streams(recipe: Recipe) -> Iterator[CopiedStreams]:
    """Copy index files and first samples of a recipe's remote streams to a temporary folder, for the `with` block.

    Raises:
        GaveUp: A store does not respond, or has a fault.
    """
    copied: dict[str, StreamConfig] = {}
    refused, urls = [], {}
    with TemporaryDirectory(prefix='diffusion-check-') as scratch:
        for where, stream in remote_streams(recipe).items():
            folder = Path(scratch, where)
            try:
                _copy_beginning(stream, folder)
            except UserError as error:
                refused.append(Problem(f'{where}.remote', str(error)))
                continue
            copied[where] = replace(stream, remote=str(folder))
            urls[str(folder)] = str(stream.remote)

        def changed(section: str, streams: Mapping[str, StreamConfig]) -> dict[str, StreamConfig]:
            return {name: copied.get(f'{section}.{name}', stream) for name, stream in streams.items()}

        yield CopiedStreams(
            replace(
                recipe,
                streams=changed('streams', recipe.streams),
                eval_streams=changed('eval_streams', recipe.eval_streams),
                precompute=replace(recipe.precompute, streams=changed('precompute.streams', recipe.precompute.streams)),
            ),
            refused,
            urls,
        )


def _copy_beginning(stream: StreamConfig, folder: Path) -> None:
    """Copy those files of a stream that the checks read; skip files that do not exist."""
    url, retry = str(stream.remote).rstrip('/'), RetryPolicy(1 + stream.download_retry, stream.download_timeout)

    def copy(name: str) -> bool:
        try:
            content = object_store.read(f'{url}/{name}', retry=retry)
        except UserError as error:
            if error.__cause__ is not None and is_missing_object(error.__cause__):
                return False
            raise
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return True

    folder.mkdir()
    if stream.aspects:
        copy(BUCKETS)
        with suppress(UserError):  # `check_paths` reports a damaged list of buckets
            for shape in read_buckets(folder):
                if copy(f'{shape}/{INDEX}'):
                    copy(f'{shape}/{MANIFEST}')
    elif copy(INDEX):
        copy(MANIFEST)
        _copy_first_samples(url, folder, retry)
    else:
        copy(BUCKETS)  # without an index, `check_paths` advises `aspects` if this file exists


def _copy_first_samples(url: str, folder: Path, retry: RetryPolicy) -> None:
    """Copy the first shard's first samples, unless they are compressed, damaged (training reports it) or too large."""
    try:
        shards = json.loads((folder / INDEX).read_bytes())['shards']
        entry = next(each for each in shards if each['samples'])
        name = entry['raw_data']['basename']
        # Do not trust an index from a store: its file names must not lead outside the folder.
        if entry['zip_data'] is not None or PurePosixPath(name).name != name:
            return
        (count,) = struct.unpack('<I', object_store.read(f'{url}/{name}', span=(0, 4), retry=retry))
        count = min(SAMPLES_LOOKED_AT, count)
        table = object_store.read(f'{url}/{name}', span=(4, 4 * (count + 2)), retry=retry)
        *_, end = struct.unpack(f'<{count + 1}I', table)
    except (ValueError, KeyError, TypeError, StopIteration, struct.error) as error:
        if isinstance(error, UserError):
            raise
        return
    if end <= MAX_BEGINNING_BYTES:
        (folder / name).write_bytes(object_store.read(f'{url}/{name}', span=(0, end), retry=retry))
