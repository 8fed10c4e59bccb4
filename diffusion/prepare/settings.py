"""Settings of a preparation: the fields are the keys of its YAML and the options of its command line."""

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
    'folder': ('location', 'captions'),
    'webdataset': ('location',),
    'parquet': ('location', 'image_column', 'caption_column'),
    'openmoji': ('select', 'split', 'limit', 'offset', 'seed'),
}
"""Settings of each kind of source."""

NAMED_ASPECTS = ('none', 'sdxl')


@dataclass
class SourceSettings:
    """The source of the images."""

    kind: Literal['folder', 'webdataset', 'parquet', 'openmoji']
    """folder: image files; webdataset: tars as img2dataset writes them; parquet: files with a column of images;
    openmoji: the emoji of an installed package, drawn at each of the sizes.
    """
    location: str = ''
    """A folder, a file, or a folder of an object store such as s3://bucket/laion; openmoji has none."""
    captions: str | None = None
    """For folder: the CSV or JSONL of file and caption; null looks for a .txt beside each image."""
    image_column: str | None = None
    """For parquet: the column with the images; null looks for one of the usual names."""
    caption_column: str | None = None
    """For parquet: the column with the captions; null looks for one of the usual names."""

    select: Literal['distinct', 'named', 'all'] = 'distinct'
    """For openmoji, distinct: named, one per family, no flags, letters and near-copies; named: all that have a name,
    but no skin tones; all: also those without a name, captioned 'emoji'.
    """
    split: Literal['all', 'train', 'heldout'] = 'all'
    """For openmoji: heldout is one family of variants in sixteen, train the rest."""
    limit: int | None = None
    """For openmoji: the largest number of emoji; null takes the whole selection."""
    offset: int = 0
    """For openmoji: the number of emoji left out at the start of the selection."""
    seed: int = 17
    """For openmoji: the seed of the selection's order."""

    @property
    def title(self) -> str:
        """The name of the source in messages and reports."""
        return 'OpenMoji' if self.kind == 'openmoji' else self.location

    def open(self, *, sizes: Sequence[int]) -> Source:
        """Return the source.

        Args:
            sizes: Sides in pixels of the images that a source which draws them is to draw.
        """
        if self.kind == 'openmoji':
            from diffusion.prepare.openmoji import OpenMojiSource

            return OpenMojiSource(tuple(sizes), self.select, self.split, self.limit, self.offset, self.seed)
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
    """Settings of a preparation."""

    source: SourceSettings
    """The source of the images."""
    out: str
    """The dataset: a folder, or one of an object store such as s3://bucket/mds; it must be empty or not exist."""
    sizes: list[int]
    """Resolution buckets: sides in pixels; each image goes to the largest that it need not be enlarged for."""
    aspects: str | list[str] = 'none'
    """Shapes inside a resolution: none keeps each image's own, sdxl is that paper's table, or shapes of the largest
    size such as 640x384, scaled for the others. With shapes, each has a folder of shards, and a recipe says `aspects`.
    """
    work: str | None = None
    """The folder of unfinished work; null is the output's name with .work. It needs as much room as the dataset."""
    overwrite: bool = False
    """Replace the dataset that is there."""
    workers: int | None = None
    """Processes; null is one per core."""
    background: str = 'white'
    """The color that transparent images are put on."""
    max_pixels: int = MAX_PIXELS
    """Larger images are rejected before they are decoded."""
    filters: Filters = field(default_factory=Filters)
    """Limits that images must meet."""
    store: Literal['resized', 'original'] = 'resized'
    """resized: as large as their bucket needs; original: the file's own bytes where they need no correction."""
    jpeg_quality: int = 95
    """Quality of stored JPEGs, 1 to 100; lossless images are stored as PNG."""
    duplicates: Literal['none', 'exact', 'near'] = 'none'
    """Repeated images that are left out: none, exact (equal pixels), or near (also those that look alike)."""
    max_distance: int = 4
    """Bits out of 64 by which the perceptual hashes of images that look alike may differ."""
    max_rejected: float = 0.01
    """Largest share of images left out with which the preparation passes; above it the exit status is 3."""
    shard_mb: float = 256.0
    """Largest size of a shard, in MB."""
    license: str | None = None
    """The license of the images; goes into the report."""

    @property
    def shard_bytes(self) -> int:
        """Largest size of a shard, in bytes."""
        return round(self.shard_mb * 10**6)

    @property
    def worker_count(self) -> int:
        return self.workers or len(os.sched_getaffinity(0))

    @property
    def is_remote(self) -> bool:
        """True if the output is in an object store."""
        return is_remote(self.out)

    @property
    def work_folder(self) -> Path:
        if self.work is not None:
            return Path(self.work).resolve()
        out = Path(self.out).resolve()
        return out.with_name(f'{out.name}.work')

    def what_it_makes(self) -> dict[str, Any]:
        """Return the settings that the dataset's bytes depend on; others may change while a preparation goes on."""
        values = dataclasses.asdict(self)
        for name in ('out', 'work', 'overwrite', 'workers', 'max_rejected', 'license'):
            del values[name]
        if self.source.kind != 'openmoji':  # absent, as in the plans and fingerprints of versions that had no openmoji
            for name in OPTIONS['openmoji']:
                del values['source'][name]
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
    """Build settings from plain values, of which later ones win.

    Raises:
        RecipeError: With every mistake found; its message begins with `path`.
    """
    try:
        values = merge(contents, overrides)
    except UnreadableYAML as error:
        raise RecipeError([Problem('', str(error))], path) from error
    if 'licence' in values:  # the key's former spelling
        values['license'] = values.pop('licence')
    gather = Gatherer()
    settings = build_dataclass(PrepareSettings, values, '', gather)
    problems = gather.problems + gather.missing
    if not problems:
        problems = check_settings(settings)
    if problems:
        raise RecipeError(problems, path)
    return settings


def check_settings(settings: PrepareSettings) -> list[Problem]:
    """Return the mistakes in settings whose types are right."""
    gather = Gatherer()
    _check_source(settings.source, gather)
    _check_sizes(settings, gather)
    _check_numbers(settings, gather)
    _check_color(settings.background, gather)
    try:
        settings.filters.check()
    except UserError as error:
        gather.problem('', str(error))
    _check_folders(settings, gather)
    return gather.problems


def _check_source(source: SourceSettings, gather: Gatherer) -> None:
    takes = OPTIONS[source.kind]
    for field_ in dataclasses.fields(source):
        name = field_.name
        if name != 'kind' and name not in takes and getattr(source, name) != field_.default:
            gather.problem(f'source.{name}', f'is not for {source.kind}, which takes {" and ".join(takes)}; remove it')
    if 'location' in takes and not source.location:
        gather.problem('source.location', 'is missing; give a folder, a file, or a folder of an object store')


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


def _check_color(color: str, gather: Gatherer) -> None:
    from PIL import ImageColor

    try:
        channels = len(ImageColor.getrgb(color))
    except ValueError:
        channels = 0
    if channels != 3:
        gather.problem('background', f'{color!r} is no opaque color; write a name such as white, or #rrggbb')


def _check_folders(settings: PrepareSettings, gather: Gatherer) -> None:
    """Check that the output does not lie over the input."""
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
