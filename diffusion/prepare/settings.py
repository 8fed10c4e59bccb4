"""Settings of `diffusion prepare`; fields are keys of its YAML file and command-line options."""

import dataclasses
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from diffusion.config.image_shapes import STEP, parse_shape
from diffusion.config.interpolation import dotted
from diffusion.config.load import RecipeError
from diffusion.config.options import DIR, DIR_OR_URL, FILE, Option
from diffusion.config.schema import Gatherer, Problem, build_dataclass, did_you_mean
from diffusion.config.secrets import secret_problems
from diffusion.config.yaml_files import UnreadableYAML, merge_and_resolve, read_chain
from diffusion.errors import UserError
from diffusion.prepare.extra_columns import file_problem, source_hash
from diffusion.prepare.filters import Filters
from diffusion.prepare.image_decoding import MAX_PIXELS
from diffusion.prepare.image_hashes import MAX_DISTANCE
from diffusion.prepare.optional_formats import OptionalFormat, image_suffixes, require_packages
from diffusion.prepare.source import CaptionText, Source, column_list
from diffusion.storage import object_store
from diffusion.storage.local_files import why_not_writable
from diffusion.storage.places import is_url

SETTINGS_OF_SOURCE = {
    'folder': ('location', 'caption', 'captions', 'caption_text', 'caption_suffix', 'caption_column'),
    'webdataset': ('location', 'captions', 'captions_key', 'caption_text', 'caption_suffix', 'caption_column'),
    'parquet': ('location', 'captions', 'captions_key', 'image_column', 'key_column', 'caption_column'),
    'tfrecord': (
        *('location', 'split', 'token_variable', 'captions', 'captions_key'),
        *('image_column', 'key_column', 'caption_column'),
    ),
    'huggingface': (
        *('location', 'split', 'config', 'token_variable', 'captions', 'captions_key', 'image_column', 'key_column'),
        *('caption_column', 'caption_text', 'caption_suffix'),
    ),
    'openmoji': ('select', 'split', 'limit', 'offset', 'seed'),
}

LATER_SETTINGS = {
    'captions': None,
    'captions_key': None,
    'key_column': None,
    'resize': 'lanczos',
    'lossless_format': 'png',
}
"""Settings added after version 0.1, with defaults. Plans and records leave out those that have the default, so that
images can still be added to datasets that were prepared before."""
OPENMOJI_SPLITS = ('all', 'train', 'heldout')
NAMED_ASPECTS = ('none', 'sdxl')


@dataclass(frozen=True)
class SourceSettings:
    """Settings of the image source: kind, location, and options for each kind."""

    kind: Literal['folder', 'webdataset', 'parquet', 'tfrecord', 'huggingface', 'openmoji']
    """folder: image files; webdataset: tar files from img2dataset; parquet: Parquet files with an image column;
    tfrecord: TFRecord files with an image feature, such as those of TensorFlow Datasets; huggingface: a split of a
    Hugging Face dataset, on the Hub or in a folder; openmoji: emoji from an installed package, rendered at each size.
    """
    location: Annotated[str, Option('SRC', positional=True, files=True)] = ''
    """Folder, file, pattern, or object store folder such as s3://bucket/laion; empty for openmoji. For huggingface and
    tfrecord: org/dataset[@revision], hf://datasets/org/dataset[@revision]/path, or a folder from `hf download` or
    `save_to_disk`."""
    caption: Annotated[str | None, Option('TEXT')] = None
    """folder only: caption of images that have no caption file beside them, such as "a photograph of my cat" (default:
    none; these images are rejected)."""
    captions: Annotated[str | None, FILE] = None
    """folder: a .csv file with columns file and caption, or a .jsonl file with file and caption or captions; the names
    file_name and text are accepted too (default: a .txt or .json file beside each image or, if there are none,
    metadata.jsonl or metadata.csv in the folder). For other sources, tables with a key and captions in each row,
    which replace the source's own captions: a .parquet, .csv or .jsonl file, a folder or pattern of them, in an object
    store too, or a dataset on the Hub, such as hf://datasets/org/captions. For folder, such tables must be in a folder
    or at a URL. Their columns in `filters.columns`, such as answers to questions of `diffusion caption`, become
    metadata. With tables of `diffusion caption`, the column original in `caption_column` keeps the source's own
    captions too."""
    captions_key: Annotated[str | None, Option('NAME')] = None
    """Column of the tables in `captions` with the key of an image (default: key, __key__, image_id, id, file_name or
    file)."""
    caption_text: CaptionText = 'whole'
    """folder, webdataset, huggingface: content of .txt files. whole: one caption, which may have several lines; lines:
    one caption per line, among which training chooses; first: only the first line is used."""
    caption_suffix: Annotated[str, Option('SUFFIX')] = 'txt'
    """folder, webdataset, huggingface: suffix of an image's text file, such as caption; case is ignored."""
    image_column: Annotated[str | None, Option('NAME')] = None
    """parquet, huggingface, tfrecord: name of the image column or feature (default: found by common names)."""
    key_column: Annotated[str | None, Option('NAME')] = None
    """parquet, huggingface, tfrecord: column or feature with a unique key of the image (default: key, otherwise the
    number of the row)."""
    caption_column: Annotated[str | list[str] | None, Option('NAME', repeated=True)] = None
    """Name of the caption column, or of several, among which training chooses by `dataset.caption_weights`: columns of
    a table or caption file, features of a record, or keys of the .json file beside an image, with txt for its .txt file
    (default: found by common names)."""
    config: Annotated[str | None, Option('NAME')] = None
    """huggingface only: configuration to read (default: the dataset's default, or its only one)."""
    token_variable: Annotated[str | None, Option('NAME')] = None
    """huggingface and tfrecord: environment variable with a token for gated and private datasets (default: HF_TOKEN, or
    the token saved by `hf auth login`)."""

    select: Literal['distinct', 'named', 'all'] = 'distinct'
    """openmoji only. distinct: named emoji, one per family, without flags, letters and near-duplicates; named: all
    emoji with names, except skin tones; all: everything, with the caption 'emoji' for unnamed emoji.
    """
    split: Annotated[str | None, Option('NAME')] = None
    """huggingface, tfrecord: split to read; splits are never mixed (default: train, or the only one). openmoji: heldout
    has 1 in 16 families of variants, train the others (default: all)."""
    limit: int | None = None
    """openmoji only: maximum number of emoji (default: the whole selection)."""
    offset: int = 0
    """openmoji only: number of emoji to skip at the start of the selection."""
    seed: int = 17
    """openmoji only: seed for the order of the selection."""

    @property
    def caption_columns(self) -> list[str]:
        """The caption columns if there are several, else an empty list: samples need not record the only one."""
        named = column_list(self.caption_column)
        return named if len(named) > 1 else []

    @property
    def joins_by_key(self) -> bool:
        """True if `captions` are tables to join with images by key; False if it is None, or a file with image paths."""
        given = self.captions or ''
        return bool(given) and (self.kind != 'folder' or is_url(given) or Path(given).is_dir())

    @property
    def title(self) -> str:
        return 'OpenMoji' if self.kind == 'openmoji' else self.location

    def open(
        self,
        *,
        sizes: Sequence[int],
        formats: Sequence[str] = (),
        work: Path | None = None,
        metadata: Sequence[str] = (),
    ) -> Source:
        """Return the source that the settings describe; `sizes` is for openmoji, `formats` are optional image formats.

        An index of the tables in `captions`, with the columns `metadata`, is written to the folder `work` or TMPDIR.
        """
        if self.captions is None or not self.joins_by_key:
            return self._open(sizes, formats, self.caption_column)
        from diffusion.prepare.caption_table import CaptionedSource, CaptionTable

        columns, folder = tuple(column_list(self.caption_column)), work or Path(tempfile.gettempdir())
        table = CaptionTable(self.captions, columns, self.captions_key, self.token_variable, folder, tuple(metadata))
        return CaptionedSource(self.open_images(sizes=sizes, formats=formats), table)

    def open_images(self, *, sizes: Sequence[int], formats: Sequence[str]) -> Source:
        """Return the source without the tables in `captions`; it also yields images that have no caption."""
        return self._open(sizes, formats, () if self.joins_by_key else self.caption_column or ())

    def _open(self, sizes: Sequence[int], formats: Sequence[str], caption_column: str | Sequence[str] | None) -> Source:
        given: dict[str, Any] = {name: getattr(self, name) for name in SETTINGS_OF_SOURCE[self.kind]}
        if self.kind != 'openmoji':
            given['caption_column'] = caption_column
            given.pop('captions_key', None)
            if self.kind != 'folder':
                del given['captions']
            elif self.joins_by_key:
                given['captions'] = None
        if 'caption_suffix' in given:
            given |= {'caption_suffix': self.caption_suffix.lower(), 'image_suffixes': image_suffixes(formats)}
        if self.kind == 'openmoji':
            from diffusion.prepare.openmoji import OpenMojiSource

            given['split'] = self.split or 'all'
            return OpenMojiSource(tuple(sizes), **given)
        if self.kind in ('huggingface', 'tfrecord'):
            from diffusion.prepare.huggingface_source import HuggingFaceSource

            if self.kind == 'tfrecord':
                given['layouts'] = ('tfrecord',)
            return HuggingFaceSource(**given)
        if self.kind == 'folder':
            from diffusion.prepare.folder_source import FolderSource

            return FolderSource(**given)
        if self.kind == 'webdataset':
            from diffusion.prepare.webdataset import WebDatasetSource

            return WebDatasetSource(**given)
        from diffusion.prepare.parquet import ParquetSource

        return ParquetSource(**given)


@dataclass(frozen=True)
class PrepareSettings:
    """All settings of `diffusion prepare`, from YAML file and options."""

    source: SourceSettings
    """Source of the images."""
    out: Annotated[str, DIR_OR_URL]
    """Output dataset: a local or object store folder, such as s3://bucket/mds; must be empty or not exist."""
    sizes: Annotated[list[int], Option('PX')]
    """Side lengths of the resolution buckets, in pixels; images are never upscaled."""
    buckets: Literal['every', 'largest'] = 'every'
    """every: store an image at each resolution that needs no upscaling, so that training at 256 px also has the images
    of 512 px; largest: only at the largest of these, which takes less space and suits recipes that mix resolutions. For
    openmoji, both are the same, since each emoji is drawn at every size.
    """
    aspects: Annotated[str | list[str], Option('SHAPE')] = 'none'
    """Aspect ratio buckets per resolution. none: images keep their own aspect ratio; sdxl: the shapes in the SDXL
    paper; or a list of shapes at the largest size, such as 640x384, which are scaled for the other sizes. Each shape
    gets its own folder of shards; recipes read them with `aspects: true`.
    """
    step: Annotated[int, Option('PX')] = STEP
    """Sides of all buckets are multiples of this, in pixels: 8 for U-Nets; 16 for transformers such as PRX, whose
    patches are 2x2 latent cells; 32 or 64 with an autoencoder that downsamples by 32."""
    key_prefix: Annotated[str, Option('TEXT')] = ''
    """Prefix for the key of each image, such as monday/, to distinguish deliveries that use the same file names."""
    work: Annotated[str | None, DIR] = None
    """Work folder, which needs as much disk space as the dataset (default: name of the output plus .work)."""
    parts: Annotated[str | None, Option('URL')] = None
    """Object store folder, such as s3://bucket/laion-parts, for converted images until they are packed into shards. The
    work folder then needs no space for them, and machines without a shared folder can convert shares of one input
    (default: keep them in the work folder)."""
    overwrite: bool = False
    """Replace an existing dataset."""
    workers: int | None = None
    """Number of worker processes (default: one per core)."""
    formats: list[OptionalFormat] = field(default_factory=list)
    """Formats to read besides JPEG, PNG, WebP, GIF, BMP, TIFF and AVIF: heic, jxl (JPEG XL) and svg, which need the
    packages in the extra `formats`. SVG drawings are stored in every bucket. Files in other formats are skipped and
    counted in the report."""
    background: Annotated[str, Option('COLOR')] = 'white'
    """Background color for transparent images."""
    max_pixels: int = MAX_PIXELS
    """Maximum width times height; larger images are rejected before they are decoded."""
    filters: Filters = field(default_factory=Filters)
    """Limits for images and captions."""
    columns_from: Annotated[str | None, Option('FILE.py', files=True)] = None
    """Python file with a function `columns(images, captions)` that computes metadata columns for batches of images,
    such as scores for filters.columns. The file is executed (default: none)."""
    store: Literal['resized', 'original'] = 'resized'
    """resized: scale images down to their bucket; original: keep the bytes of files that need no correction."""
    fast_jpeg: bool = False
    """Decode JPEGs at least four times as large as their largest bucket at 1/2, 1/4 or 1/8 of their size. This is much
    faster for camera photographs, and differences are smaller than JPEG's own loss. Pixel hashes and columns_from
    functions use the smaller image."""
    jpeg_quality: Annotated[int, Option('Q')] = 95
    """Quality of stored JPEG and WebP images, 1 to 100."""
    lossless_format: Literal['png', 'jpeg', 'webp'] = 'png'
    """Format in which images of PNG and SVG files are stored: png keeps every pixel; jpeg and webp take less space, at
    jpeg_quality. The report has the bytes saved and the PSNR of a sample."""
    resize: Literal['lanczos', 'bilinear'] = 'lanczos'
    """Filter for scaling down; both average over all pixels of the original, and lanczos is sharper."""
    duplicates: Literal['none', 'exact', 'near'] = 'none'
    """Duplicates to remove: none, exact (equal pixels), or near (also similar images)."""
    max_distance: int = 4
    """Maximum number of differing bits out of 64 between the perceptual hashes of duplicates, if duplicates: near."""
    hold_out: int = 0
    """Number of images to write to a second dataset, OUT-held-out, instead of the training set: those with the smallest
    key hashes. With duplicates: none, the training set may contain copies of held-out images; with exact or near,
    copies are rejected.
    """
    max_rejected: Annotated[float, Option('FRACTION')] = 0.01
    """Maximum fraction of inputs that may be unusable, such as truncated images and missing captions; above it, the
    exit status is 3. Inputs that other settings filter out, such as duplicates and small images, do not count."""
    shard_mb: float = 256.0
    """Maximum size of a shard in MB."""
    license: Annotated[str | None, Option('TEXT')] = None
    """License of the images, shown in the report (default: none)."""

    @property
    def shard_bytes(self) -> int:
        return round(self.shard_mb * 10**6)

    @property
    def worker_count(self) -> int:
        return self.workers or len(os.sched_getaffinity(0))

    @property
    def is_remote(self) -> bool:
        return is_url(self.out)

    @property
    def held_out(self) -> str:
        if self.is_remote:
            return f'{self.out.rstrip("/")}-held-out'
        out = Path(self.out)
        # Resolve symbolic links: the work folder must be beside the link's target, since the dataset is moved from
        # there by a rename.
        out = out.resolve() if out.is_symlink() or out.name in ('', '..') else out
        return f'{out}-held-out'

    @property
    def fills_every_bucket(self) -> bool:
        """True if an image is stored at each resolution that needs no upscaling, False if only at the largest one."""
        return self.buckets == 'every' and self.source.kind != 'openmoji'

    @property
    def work_folder(self) -> Path:
        if self.work is not None:
            return Path(self.work).resolve()
        out = Path(self.out).resolve()
        return out.with_name(f'{out.name}.work')

    def open_source(self) -> Source:
        metadata = tuple(self.filters.columns)
        return self.source.open(sizes=self.sizes, formats=self.formats, work=self.work_folder, metadata=metadata)

    def content_settings(self) -> dict[str, Any]:
        """Return the settings that affect the dataset's bytes; other settings may change when resuming."""
        values = dataclasses.asdict(self)
        for name in ('out', 'work', 'parts', 'overwrite', 'workers', 'max_rejected', 'license'):
            del values[name]
        # Settings without effect may change when resuming too: leave them out, or give them a fixed value.
        accepted = {'kind', *SETTINGS_OF_SOURCE[self.source.kind]} - {'token_variable'}
        if self.source.captions is not None and 'original' not in column_list(self.source.caption_column):
            accepted -= {'caption_text', 'caption_suffix'}
        if self.source.caption is None:  # datasets of version 0.1.0 do not have this setting
            accepted -= {'caption'}
        values['source'] = {name: value for name, value in values['source'].items() if name in accepted}
        for section in (values, *([values['source']] if self.source.kind != 'folder' else [])):
            for name in LATER_SETTINGS.keys() & section.keys():
                if section[name] == LATER_SETTINGS[name]:
                    del section[name]
        if self.source.kind == 'openmoji':
            values['source']['split'] = self.source.split or 'all'
        if not self.fills_every_bucket or len(self.sizes) == 1:
            values['buckets'] = 'largest'
        if self.columns_from is not None:
            values['columns_from'] = {'file': Path(self.columns_from).name, 'sha256': source_hash(self.columns_from)}
        return values


def load_settings(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    inherit: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
) -> PrepareSettings:
    """Load settings from a YAML file, from the files that it extends, and from `key=value` overrides.

    Args:
        inherit: Called with the settings; returns defaults for settings given neither in the file nor in overrides.
    """
    try:
        contents = read_chain(Path(path))
    except UnreadableYAML as error:
        raise RecipeError([Problem('', str(error))], path) from error
    if inherit is not None:
        with suppress(UnreadableYAML):  # `settings_of` will raise the same error again
            contents = [inherit(merge_and_resolve(contents, overrides).values), *contents]
    return settings_of(*contents, overrides=overrides, path=path)


def settings_of(
    *contents: dict[str, Any], overrides: Sequence[str] = (), path: str | Path = 'diffusion prepare'
) -> PrepareSettings:
    """Build settings from dictionaries; later dictionaries and `overrides` take precedence.

    Raises:
        RecipeError: The settings are invalid; the message lists all mistakes after `path`.
    """
    try:
        resolved = merge_and_resolve(contents, overrides)
    except UnreadableYAML as error:
        raise RecipeError([Problem('', str(error))], path) from error
    # Reject environment variables: the report and plan must say where images came from, but never show their values.
    what = 'cannot use an environment variable, since the report of the dataset records it; pass the value as KEY=VALUE'
    problems = [Problem(dotted(each), what) for each in resolved.from_environment] + secret_problems(resolved.values)
    if problems:
        raise RecipeError(problems, path)
    gather = Gatherer()
    settings = build_dataclass(PrepareSettings, resolved.values, '', gather)
    if problems := gather.problems + gather.missing or check_settings(settings):
        raise RecipeError(problems, path)
    return settings


def check_settings(settings: PrepareSettings) -> list[Problem]:
    """Return all mistakes in the settings, such as values out of range; types must already be validated."""
    gather = Gatherer()
    _check_source(settings.source, gather)
    _check_sizes(settings, gather)
    _check_numbers(settings, gather)
    _check_color(settings.background, gather)
    try:
        settings.filters.check()
    except UserError as error:
        gather.problem('', str(error))
    if settings.columns_from is not None and (problem := file_problem(settings.columns_from)):
        gather.problem('columns_from', problem)
    _check_folders(settings, gather)
    _check_hold_out(settings, gather)
    try:
        require_packages(settings.formats)
    except UserError as error:
        gather.problem('', str(error))
    return gather.problems


def _check_source(source: SourceSettings, gather: Gatherer) -> None:
    accepted = SETTINGS_OF_SOURCE[source.kind]
    for field_ in dataclasses.fields(source):
        name = field_.name
        if name != 'kind' and name not in accepted and getattr(source, name) != field_.default:
            gather.problem(
                f'source.{name}', f'is not a setting of {source.kind}, which takes {" and ".join(accepted)}; remove it'
            )
    if 'location' in accepted and not source.location:
        gather.problem('source.location', 'is missing; give a folder, a file, or an object store folder')
    named = column_list(source.caption_column)
    if source.caption_column == [] or len(set(named)) < len(named) or '' in named:
        gather.problem('source.caption_column', f'{source.caption_column} is not a column or several different ones')
    if not re.fullmatch('[A-Za-z0-9_-]+', source.caption_suffix) or source.caption_suffix.lower() == 'json':
        gather.problem('source.caption_suffix', f'{source.caption_suffix!r} is not a suffix of text files; give txt')
    if source.kind == 'openmoji' and source.split not in (None, *OPENMOJI_SPLITS):
        near = did_you_mean(source.split, OPENMOJI_SPLITS)
        gather.problem('source.split', f'{source.split!r} is not one of {", ".join(OPENMOJI_SPLITS)}; {near}')
    if source.token_variable is not None and not re.fullmatch(r'[A-Za-z_][A-Za-z0-9_]{0,63}', source.token_variable):
        gather.problem(
            'source.token_variable', 'is not the name of an environment variable; use a name such as HF_TOKEN'
        )


def _check_sizes(settings: PrepareSettings, gather: Gatherer) -> None:
    if settings.step < STEP or settings.step % STEP:
        gather.problem('step', f'{settings.step} is not a positive multiple of {STEP}')
        return
    wrong = [size for size in settings.sizes if size < settings.step or size % settings.step]
    if not settings.sizes or wrong:
        what = f'{wrong or "the list is empty"}; sizes must be positive multiples of {settings.step}, in pixels'
        gather.problem('sizes', what)
    elif len(set(settings.sizes)) != len(settings.sizes):
        gather.problem('sizes', f'{settings.sizes} contains a size twice; list each size once')
    if isinstance(settings.aspects, str) and settings.aspects not in NAMED_ASPECTS:
        near = did_you_mean(settings.aspects, NAMED_ASPECTS)
        gather.problem('aspects', f'{settings.aspects!r}: {near}, or a list of shapes such as [640x384]')
    if settings.aspects == []:
        gather.problem('aspects', 'the list is empty; use none, sdxl, or shapes such as [640x384]')
    for index, text in enumerate(settings.aspects if isinstance(settings.aspects, list) else []):
        try:
            parse_shape(text)
        except UserError as error:
            gather.problem(f'aspects[{index}]', str(error))


def _check_numbers(settings: PrepareSettings, gather: Gatherer) -> None:
    if settings.fast_jpeg and settings.store == 'original':
        gather.problem('fast_jpeg', 'has no use with store: original, which keeps the files; leave one of them out')
    if settings.lossless_format != 'png' and settings.store == 'original':
        gather.problem(
            'lossless_format', 'has no use with store: original, which keeps the files; leave one of them out'
        )
    ranges = {
        'workers': (1, 4096),
        'max_pixels': (1, 2**31),
        'jpeg_quality': (1, 100),
        'max_distance': (0, MAX_DISTANCE),
        'hold_out': (0, 10**9),
        'max_rejected': (0, 1),
        'shard_mb': (0.001, 4000),
    }
    for name, (low, high) in ranges.items():
        value = getattr(settings, name)
        if value is not None and not low <= value <= high:
            gather.problem(name, f'{value} is out of range; give {low} to {high}')


def _check_color(color: str, gather: Gatherer) -> None:
    from PIL import ImageColor

    try:
        channels = len(ImageColor.getrgb(color))
    except ValueError:
        channels = 0
    if channels != 3:
        gather.problem('background', f'{color!r} is not an opaque color; use a name such as white, or #rrggbb')


def _check_folders(settings: PrepareSettings, gather: Gatherer) -> None:
    """Add mistakes in parts, work, overwrite and out to `gather`, such as an output that contains the input."""
    if settings.parts is not None and not is_url(settings.parts):
        gather.problem('parts', f'{settings.parts} is not in an object store; give a URL such as s3://bucket/parts')
    elif settings.parts is not None and f'{settings.parts.rstrip("/")}/'.startswith(f'{settings.out.rstrip("/")}/'):
        gather.problem(
            'parts', f'{settings.parts} is inside of out, which holds the dataset alone; give another folder'
        )
    if settings.is_remote:
        if settings.work is None:
            gather.problem(
                'work',
                f'is missing; out is {settings.out}, so give a local folder: --work DIR (work: DIR in a YAML file)',
            )
        if settings.overwrite:
            gather.problem(
                'overwrite',
                'is not supported for object stores, which cannot replace a folder atomically; give an empty out',
            )
        return
    source = settings.source
    inputs = [path for path in (source.location, source.captions) if path and not is_url(path)]
    outputs = [settings.out, *([settings.held_out] if settings.hold_out else [])]
    for path, out in itertools.product(inputs, outputs):
        if Path(path).resolve().is_relative_to(Path(out).resolve()):
            gather.problem('out', f'{out} contains the input {path}; give another folder')
    if (problem := why_not_writable(Path(settings.out).absolute().parent)) is not None:
        gather.problem('out', problem)


def _check_hold_out(settings: PrepareSettings, gather: Gatherer) -> None:
    if not settings.hold_out:
        return
    if settings.source.kind == 'openmoji':
        gather.problem(
            'hold_out', 'is not supported for openmoji, since it would separate variants of a drawing; use source.split'
        )
    if settings.is_remote and not object_store.split(settings.out)[1]:
        gather.problem(
            'hold_out', f'needs a folder beside out, and {settings.out} is a whole bucket; give a folder in it as out'
        )
