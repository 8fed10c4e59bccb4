"""Source for Hugging Face datasets on the Hub or in a local folder: one split of one configuration.

The split's files are read by the readers of the other sources: Parquet files, webdataset tar files, TFRecord files,
image files with captions, or Arrow files written by `save_to_disk`. Files on the Hub are read at one fixed commit, one
part at a time.

The package `datasets` is not used: it stops at the first damaged file, image or row, silently drops files that match no
split and images not listed in any row, and needs another package per object store.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from diffusion.errors import DataError, GaveUp, UserError
from diffusion.prepare.dataset_choice import LAYOUTS, Choice, Chooser, DatasetListing, is_metadata
from diffusion.prepare.file_listing import File, single_file_part, with_passed_over
from diffusion.prepare.folder_source import FolderSource, divide_images, metadata_in, texts_beside
from diffusion.prepare.hub_repository import Hub, endpoint, is_on_hub, parse_name
from diffusion.prepare.image_table import ColumnNames
from diffusion.prepare.parquet import arrow_entries, check_columns, images_of, parquet_entries, parquet_parts
from diffusion.prepare.source import IMAGE_SUFFIXES, CaptionText, Entry, Part, PassedOver
from diffusion.prepare.tfrecord import tfrecord_entries, tfrecord_parts
from diffusion.prepare.webdataset import WebDatasetSource
from diffusion.storage.places import is_url
from diffusion.storage.retry import error_text

FOOTER_BYTES = 2**18
"""Number of bytes to read from the end of a Parquet file on the Hub for its columns; few files have larger footers."""
IMAGES_AT_ONCE = 64


@dataclass(frozen=True)
class HuggingFaceSource:
    """One split of a Hugging Face dataset: `org/dataset[@revision]`, a `hf://datasets/` path or pattern, or a folder.

    A folder is either a repository snapshot from `hf download` or a dataset saved by `save_to_disk`. Files of other
    splits and configurations are skipped and counted. Images have the same keys as with the source for
    the file format (FolderSource, ParquetSource, WebDatasetSource).
    """

    location: str
    split: str | None = None
    config: str | None = None
    token_variable: str | None = None
    image_column: str | None = None
    caption_column: str | Sequence[str] | None = None
    caption_text: CaptionText = 'whole'
    image_suffixes: tuple[str, ...] = IMAGE_SUFFIXES
    caption_suffix: str = 'txt'
    key_column: str | None = None
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    """Kinds of data files, such as parquet, to choose from; only one is read, and files of the others are skipped."""
    commit: str | None = None
    """Commit on the Hub, used instead of the revision in the location."""

    @property
    def _hub(self) -> Hub:
        return Hub(self.token_variable)

    @property
    def _columns(self) -> ColumnNames:
        return ColumnNames(self.image_column, self.caption_column, self.key_column)

    @property
    def _captions(self) -> dict[str, Any]:
        """Keyword arguments for readers of captions in files beside the images."""
        return {
            'caption_text': self.caption_text,
            'caption_column': self.caption_column,
            'caption_suffix': self.caption_suffix,
        }

    def pinned_to(self, parts: Iterable[Mapping[str, Any]]) -> 'HuggingFaceSource':
        """Return the source pinned to the commit that an earlier start planned, given the parts of its saved plan."""
        places = (place for part in parts for place in (part['where'], *part['where'].get('pictures', ())))
        planned = next((parse_name(place['url']) for place in places if place.get('url', '').startswith('hf://')), None)
        wanted = None if os.path.exists(self.location) else parse_name(self.location)
        if planned is None or wanted is None or planned.repository != wanted.repository:
            return self
        return replace(self, commit=planned.revision)

    def parts(self) -> list[Part]:
        """List the dataset, choose the configuration and the split, and split its files into parts."""
        dataset = self._listing()
        suffixes = self.image_suffixes, self.caption_suffix
        chooser = Chooser(dataset, self.location, self.split, self.config, *suffixes, self.layouts)
        choice = chooser.choose()
        missing: list[str] = []
        if choice.layout == 'folder':
            parts = list(self._image_parts(choice, dataset, chooser))
        elif choice.layout == 'tfrecord':
            parts, missing = tfrecord_parts(choice.files, dataset.files, dataset.read)
            parts = with_passed_over(parts, [*dataset.hidden, *choice.others])
        else:
            suffix = LAYOUTS[choice.layout][0]
            for_file = parquet_parts if choice.layout == 'parquet' else lambda file: [single_file_part(file, suffix)]
            parts = [part for file in choice.files for part in for_file(file)]
            parts = with_passed_over(parts, [*dataset.hidden, *choice.others])
        if choice.layout == 'parquet':
            self._check_columns(choice.files[0])
        notes = (f'{dataset.title}, split {choice.split}', *parts[0].notes, *missing)
        parts = [replace(parts[0], notes=notes, license=dataset.license), *parts[1:]]
        return [replace(part, where={'layout': choice.layout, **part.where}) for part in parts]

    def divide(self, part: Part, count: int) -> list[Part]:
        """Split a part of image files into at most `count` parts in order; other parts are one file and stay whole."""
        return divide_images(part, count) if 'pictures' in part.where else [part]

    def read(self, part: Part) -> Iterator[Entry | PassedOver]:
        """Yield a part's images with captions and metadata, with the reader for the part's file format."""
        where = part.where
        if where['layout'] == 'folder':
            yield from self._read_images(part)
            return
        file = File(where['url'], where['size'], part.stamp, where['stem'])
        with self._hub.copies([file]) as paths:
            if where['layout'] == 'webdataset':
                tars = WebDatasetSource('', image_suffixes=self.image_suffixes, **self._captions)
                yield from tars.read_tar(paths[file.url], where['stem'])
                return
            if where['layout'] == 'tfrecord':
                yield from tfrecord_entries(paths[file.url], part, self._columns)
                return
            on_hub = is_on_hub(file.url)
            images = partial(self._hub.read_beside, file.url) if on_hub else images_of(self.location, file.url)
            entries = parquet_entries if where['layout'] == 'parquet' else arrow_entries
            yield from entries(paths[file.url], part, self._columns, images=images)

    def _listing(self) -> DatasetListing:
        try:
            return DatasetListing.open(self.location, self._hub, self.commit)
        except GaveUp as error:
            reason = error_text(error.__cause__ or error)[:200]
            raise DataError(
                f'{self.location}: the Hub at {endpoint()} does not answer ({reason}); start '
                'again later, or give a folder that `hf download` wrote'
            ) from error

    def _image_parts(self, choice: Choice, dataset: DatasetListing, chooser: Chooser) -> Sequence[Part]:
        """Split image files into parts, with captions from files beside them or from metadata files."""
        images, others = choice.files, [*dataset.hidden, *choice.others]
        paired = texts_beside(images, dataset.files, self.caption_suffix)
        beside = [file for each in paired.values() for file in each.values()]
        metadata = _metadata_of(images, dataset.files)
        if not beside and not metadata and self.caption_column != ():
            names = {file.name for file in images}
            found = [file.name for file in dataset.files if file.name not in names][:3]
            raise UserError(
                f'{self.location}: has images without captions; they need a metadata.jsonl or metadata.csv with '
                f'file_name and text, or a .{self.caption_suffix} or .json beside each image'
                + (f'; it has {", ".join(found)}' if found else '')
            )
        used = {file.name for file in [*images, *beside, *metadata]}
        elsewhere = {file.name for file in chooser.data_files('folder', dataset.files)} - used
        folder = FolderSource(self.location, image_suffixes=self.image_suffixes, **self._captions)
        return folder.parts_of(
            [*images, *beside, *metadata],
            [other for other in others if other.key not in used],
            metadata=metadata,
            elsewhere=elsewhere,
            copy=dataset.copy,
        )

    def _read_images(self, part: Part) -> Iterator[Entry]:
        """Yield a part's images; images on the Hub are downloaded in groups."""
        images = part.where['pictures']
        for start in range(0, len(images), IMAGES_AT_ONCE):
            group = images[start : start + IMAGES_AT_ONCE]
            with self._hub.copies([file for image in group for file in _files_on_hub(image)]) as paths:
                local = [
                    {
                        **image,
                        'url': str(paths.get(image.get('url', ''), image.get('url', ''))),
                        'beside': {kind: str(paths.get(url, url)) for kind, url in image.get('beside', {}).items()},
                    }
                    for image in group
                ]
                location = '' if paths else self.location
                folder = FolderSource(location, image_suffixes=self.image_suffixes, **self._captions)
                yield from folder.read(replace(part, where={'pictures': local}))

    def _check_columns(self, file: File) -> None:
        if file.size and is_on_hub(file.url):
            check_columns(pa.BufferReader(self._hub.read_end(file, FOOTER_BYTES)), self._columns, file.url)
        elif file.size and not is_url(file.url):
            check_columns(file.url, self._columns, file.url)


def _metadata_of(images: Sequence[File], files: Sequence[File]) -> list[File]:
    """Return the caption files that apply to some images, at most one per folder, inner folders first."""
    tables = [file for file in files if is_metadata(file)]
    prefixes = sorted({table.name.removesuffix(table.name.rpartition('/')[2]) for table in tables}, reverse=True)
    used = [prefix for prefix in prefixes if any(image.name.startswith(prefix) for image in images)]
    return [table for prefix in used for table in metadata_in(prefix.rstrip('/'), tables)]


def _files_on_hub(image: Mapping[str, Any]) -> list[File]:
    """Return `File`s of a planned image and its caption files on the Hub; empty if the image is not on the Hub."""
    if not is_on_hub(image.get('url', '')):
        return []
    # `stamp` has the stamps of the image and its caption files, separated by spaces.
    beside, stamps = image.get('beside', {}).values(), image['stamp'].split(' ')
    sizes = [image.get('size', 0), *[-1] * len(beside)]
    return [File(*each, '') for each in zip([image['url'], *beside], sizes, stamps, strict=True)]
