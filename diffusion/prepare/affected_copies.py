"""Find latents that were made from a dataset whose images are removed, and runs that were trained on it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from diffusion.errors import UserError
from diffusion.prepare.remove_by_scan import index_folders
from diffusion.storage.places import is_url, place_at

MANIFEST = 'manifest.json'
"""File of latents that identifies the index of the images that they were made from (`data.latents`)."""
STREAMS = ('streams', 'eval_streams', 'precompute.streams')
"""Sections of a recipe that name datasets."""


def latents_of(indexes: Mapping[str, Sequence[str]], places: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each folder of latents that were made from a dataset, and the bucket that they were made from.

    Args:
        indexes: SHA-256 of every index that each bucket of the dataset has had.
        places: Folders or URLs to search for latents.

    Raises:
        UserError: A folder has no latents.
    """
    for place in places:
        names = index_folders(place)
        sources = {name: source for name in names if (source := _source(place, name)) is not None}
        if not sources:
            raise UserError(f'--latents: {place} has no {MANIFEST} beside shards; give the output of task: precompute')
        for name, source in sources.items():
            for bucket, hashes in indexes.items():
                if source in hashes:
                    yield f'{place.rstrip("/")}/{name}'.rstrip('/'), bucket


def runs_with(places: Sequence[str], runs_dir: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each run that reads one of some datasets by its recipe, and the streams that do.

    Args:
        places: Folders or URLs of datasets; a stream that reads a folder below one is found too.
        runs_dir: Folder of runs, each with its recipe.yaml.

    Raises:
        UserError: The folder does not exist.
    """
    if not runs_dir.is_dir():
        raise UserError(f'--runs-dir: {runs_dir} is not a folder; give the runs_dir of the recipes')
    for path in sorted(runs_dir.glob('*/recipe.yaml')):
        try:
            recipe = yaml.safe_load(path.read_text(encoding='utf-8'))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f'{path}: is not a recipe ({error}); repair or remove it') from error
        found = [
            f'{section}.{name}'
            for section in STREAMS
            for name, stream in _streams(recipe, section).items()
            if any(_reads(stream, place) for place in places)
        ]
        if found:
            yield path.parent.name, found


def _source(place: str, name: str) -> str | None:
    """Return the hash of the index that latents were made from; None for a folder of other shards."""
    content = place_at(place).read(f'{name}/{MANIFEST}'.lstrip('/'))
    return None if content is None else json.loads(content).get('source')


def _streams(recipe: Any, section: str) -> Mapping[str, Any]:
    """Return the streams of a section of a recipe; empty if it has none."""
    for key in section.split('.'):
        recipe = recipe.get(key) if isinstance(recipe, Mapping) else None
    return recipe if isinstance(recipe, Mapping) else {}


def _reads(stream: Any, place: str) -> bool:
    """Return True if a stream reads a dataset or a folder below it."""
    if not isinstance(stream, Mapping):
        return False
    for text in (stream.get('remote'), stream.get('local')):
        if not isinstance(text, str):
            continue
        if is_url(place) or is_url(text):
            if f'{text.rstrip("/")}/'.startswith(f'{place.rstrip("/")}/'):
                return True
        elif Path(text).resolve().is_relative_to(Path(place).resolve()):
            return True
    return False
