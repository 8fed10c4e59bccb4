"""What a preparation is told: its fields are the keys of its YAML and the options of its command line."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from diffusion.config.image_shapes import parse_shape
from diffusion.config.load import RecipeError
from diffusion.config.schema import Gatherer, Problem, build_dataclass, did_you_mean
from diffusion.config.yaml_files import UnreadableYAML, merge, read_chain
from diffusion.errors import UserError
from diffusion.prepare.bucket_choice import sizes_problem
from diffusion.prepare.file_listing import is_remote
from diffusion.prepare.filters import Filters
from diffusion.prepare.image_decoding import MAX_PIXELS
from diffusion.prepare.image_hashes import MAX_DISTANCE
from diffusion.prepare.source import Source
from diffusion.storage.writable import why_not_writable

OPTIONS = {
    'folder': ('captions',),
    'webdataset': (),
    'parquet': ('image_column', 'caption_column'),
}
"""What a kind of source takes beside its location."""

NAMED_ASPECTS = ('none', 'sdxl')


@dataclass
class SourceSettings:
    """Where the pictures come from."""

    kind: Literal['folder', 'webdataset', 'parquet']
    """folder: picture files; webdataset: tars as img2dataset writes them; parquet: files with a column of pictures."""
    location: str
    """A folder, a file, or a folder of an object store such as s3://bucket/laion."""
    captions: str | None = None
    """Of a folder: the CSV or JSONL of file and caption; null looks for a .txt beside each picture."""
    image_column: str | None = None
    """Of parquet: the column with the pictures; null looks for one of the usual names."""
    caption_column: str | None = None
    """Of parquet: the column with the captions; null looks for one of the usual names."""

    def open(self) -> Source:
        """What reads it."""
        if self.kind == 'folder':
            from diffusion.prepare.folder_source import FolderSource

            return FolderSource(self.location, captions=self.captions)
        if self.kind == 'webdataset':
            from diffusion.prepare.webdataset import WebDatasetSource

            return WebDatasetSource(self.location)
        from diffusion.prepare.parquet import ParquetSource

        return ParquetSource(self.location, image_column=self.image_column, caption_column=self.caption_column)


@dataclass
class PrepareSettings:
    """A preparation."""

    source: SourceSettings
    """Where the pictures come from."""
    out: str
    """The dataset: a folder, or one of an object store such as s3://bucket/mds; it must be empty or not exist."""
    sizes: list[int]
    """Resolution buckets: sides in pixels; each picture goes to the largest that it need not be enlarged for."""
    aspects: str | list[str] = 'none'
    """Shapes inside a resolution: none keeps each picture's own, sdxl is that paper's table, or shapes of the largest
    size such as 640x384, scaled for the others. With shapes, each has a folder of shards, and a recipe says `aspects`.
    """
    work: str | None = None
    """The folder of unfinished work; null is the output's name with .work. It needs as much room as the dataset."""
    overwrite: bool = False
    """Replace the dataset that is there."""
    workers: int | None = None
    """Processes; null is one a core."""
    background: str = 'white'
    """The colour that transparent pictures are put on."""
    max_pixels: int = MAX_PIXELS
    """Larger pictures are rejected before they are decoded."""
    filters: Filters = field(default_factory=Filters)
    """Which pictures are left out."""
    store: Literal['resized', 'original'] = 'resized'
    """resized: as large as their bucket needs; original: the file's own bytes where they need no correction."""
    jpeg_quality: int = 95
    """1 to 100, of what is stored as JPEG; what was lossless is stored as PNG."""
    duplicates: Literal['none', 'exact', 'near'] = 'none'
    """Which repeated pictures are left out: none, those of equal pixels, or also those that look alike."""
    max_distance: int = 4
    """Bits out of 64 by which the perceptual hashes of pictures that look alike may differ."""
    max_rejected: float = 0.01
    """Largest share of pictures left out with which the preparation passes; above it the exit status is 3."""
    shard_mb: float = 256.0
    """Largest size of a shard, in MB."""
    licence: str | None = None
    """What the pictures may be used for; goes into the report."""

    @property
    def shard_bytes(self) -> int:
        """Largest size of a shard, in bytes."""
        return round(self.shard_mb * 10**6)

    @property
    def worker_count(self) -> int:
        return self.workers or len(os.sched_getaffinity(0))

    @property
    def is_remote(self) -> bool:
        """Whether the output is in an object store."""
        return is_remote(self.out)

    @property
    def work_folder(self) -> Path:
        if self.work is not None:
            return Path(self.work).resolve()
        out = Path(self.out).resolve()
        return out.with_name(f'{out.name}.work')

    def what_it_makes(self) -> dict[str, Any]:
        """The settings that the dataset's bytes depend on; others may change while a preparation goes on."""
        values = dataclasses.asdict(self)
        for name in ('out', 'work', 'overwrite', 'workers', 'max_rejected', 'licence'):
            del values[name]
        return values


def load_settings(path: str | Path, overrides: Sequence[str] = ()) -> PrepareSettings:
    """Read a preparation's YAML, what it extends, and `key=value` overrides.

    Raises:
        RecipeError: With every mistake found.
    """
    try:
        contents = read_chain(Path(path))
    except UnreadableYAML as error:
        raise RecipeError([Problem('', str(error))], path) from error
    return settings_of(*contents, overrides=overrides, path=path)


def settings_of(
    *contents: dict[str, Any], overrides: Sequence[str] = (), path: str | Path = 'diffusion prepare'
) -> PrepareSettings:
    """The settings that plain values say, later ones first in rank.

    Raises:
        RecipeError: With every mistake found; its message begins with `path`.
    """
    try:
        values = merge(contents, overrides)
    except UnreadableYAML as error:
        raise RecipeError([Problem('', str(error))], path) from error
    gather = Gatherer()
    settings = build_dataclass(PrepareSettings, values, '', gather)
    problems = gather.problems + gather.missing
    if not problems:
        problems = check_settings(settings)
    if problems:
        raise RecipeError(problems, path)
    return settings


def check_settings(settings: PrepareSettings) -> list[Problem]:
    """The mistakes in settings whose types are right."""
    gather = Gatherer()
    _check_source(settings.source, gather)
    _check_sizes(settings, gather)
    _check_numbers(settings, gather)
    _check_colour(settings.background, gather)
    try:
        settings.filters.check()
    except UserError as error:
        gather.problem('', str(error))
    _check_folders(settings, gather)
    return gather.problems


def _check_source(source: SourceSettings, gather: Gatherer) -> None:
    for name in ('captions', 'image_column', 'caption_column'):
        if getattr(source, name) is not None and name not in OPTIONS[source.kind]:
            takes = ' and '.join(OPTIONS[source.kind]) or 'nothing else'
            gather.problem(f'source.{name}', f'is not for {source.kind}, which takes location and {takes}; remove it')


def _check_sizes(settings: PrepareSettings, gather: Gatherer) -> None:
    problem = sizes_problem(settings.sizes)
    if problem is not None:
        gather.problem('sizes', problem)
    if isinstance(settings.aspects, str) and settings.aspects not in NAMED_ASPECTS:
        near = did_you_mean(settings.aspects, NAMED_ASPECTS)
        gather.problem('aspects', f'{settings.aspects!r}: {near}, or a list of shapes such as [640x384]')
    if settings.aspects == []:
        gather.problem('aspects', 'the list is empty; write none, sdxl, or shapes such as [640x384]')
    for index, text in enumerate(settings.aspects if isinstance(settings.aspects, list) else []):
        try:
            parse_shape(text)
        except UserError as error:
            gather.problem(f'aspects[{index}]', str(error))


def _check_numbers(settings: PrepareSettings, gather: Gatherer) -> None:
    ranges = {
        'workers': (1, 4096),
        'max_pixels': (1, 2**31),
        'jpeg_quality': (1, 100),
        'max_distance': (0, MAX_DISTANCE),
        'max_rejected': (0, 1),
        'shard_mb': (0.001, 4000),
    }
    for name, (least, most) in ranges.items():
        value = getattr(settings, name)
        if value is not None and not least <= value <= most:
            gather.problem(name, f'{value} is out of range; give {least} to {most}')


def _check_colour(colour: str, gather: Gatherer) -> None:
    from PIL import ImageColor

    try:
        channels = len(ImageColor.getrgb(colour))
    except ValueError:
        channels = 0
    if channels != 3:
        gather.problem('background', f'{colour!r} is no opaque colour; write a name such as white, or #rrggbb')


def _check_folders(settings: PrepareSettings, gather: Gatherer) -> None:
    """What is written must not lie over what is read."""
    if settings.is_remote:
        if settings.work is None:
            gather.problem('work', f'is missing; out is {settings.out}, so give a local folder for unfinished work')
        if settings.overwrite:
            gather.problem('overwrite', 'an object store replaces no folder in one step; give an out that is empty')
        return
    source = settings.source
    read = [path for path in (source.location, source.captions) if path and not is_remote(path)]
    for path in read:
        if Path(path).resolve().is_relative_to(Path(settings.out).resolve()):
            gather.problem('out', f'{settings.out} holds {path}, which is read; give another folder')
    problem = why_not_writable(Path(settings.out).absolute().parent)
    if problem is not None:
        gather.problem('out', problem)
