"""Source for image files in a local or object store folder, with captions beside them or in one CSV or JSONL."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from diffusion.errors import UserError
from diffusion.prepare.caption_files import read_caption_rows
from diffusion.prepare.dataset_splits import refuse_mixed_splits
from diffusion.prepare.extra_columns import json_value
from diffusion.prepare.file_listing import (
    File,
    as_utf8,
    is_pattern,
    is_remote,
    list_files,
    local_copy,
    with_passed_over,
)
from diffusion.prepare.optional_formats import format_of_suffix
from diffusion.prepare.sidecars import read_sidecars
from diffusion.prepare.source import IMAGE_SUFFIXES, CaptionText, Entry, Part, PassedOver, column_list

METADATA_FILES = ('metadata.jsonl', 'metadata.csv', 'metadata.parquet')
"""Captions files of Hugging Face's imagefolder, in order of precedence."""
BESIDE = ('txt', 'json')
"""Suffixes of the files beside an image that hold its captions."""
PART_IMAGES = 1000
"""Images per part."""
DOWNLOADS = 16
"""Number of objects to download at the same time."""


@dataclass(frozen=True)
class FolderSource:
    """Images in a folder and its subfolders, in parts of 1000; the key of an image is its path relative to the folder.

    Without a captions file, the captions of `a.jpg` are read as in img2dataset's `files` format: `captions` in
    `a.json`, else those in `a.txt` (`caption_text`), else `caption` in `a.json`; other columns of `a.json` are
    metadata. A captions file is a CSV with columns `file` and `caption`, or a JSONL with `file` and `caption` or
    `captions`; other columns are metadata. If no image has such a file beside it, a `metadata.jsonl` or `metadata.csv`
    in the folder is the captions file, as in Hugging Face's imagefolder.
    """

    location: str
    captions: str | None = None
    """Captions file, local or in an object store."""
    caption_text: CaptionText = 'whole'
    """What a .txt file holds."""
    caption_column: str | Sequence[str] | None = None
    """Columns of the captions file, or keys of the .json and `txt` for the .txt; None for the rule above."""
    image_suffixes: tuple[str, ...] = IMAGE_SUFFIXES
    """Suffixes of the images, in lower case and without a dot."""

    def parts(self) -> list[Part]:
        """Split the images into parts, which jobs convert in parallel; the rows of a captions file are stored in them.

        Raises:
            UserError: There are no images, the folder cannot be listed, or the captions file is invalid.
        """
        listed, hidden = list_files(self.location, None)
        if not is_pattern(self.location):
            refuse_mixed_splits(self.location, [file.name for file in self._images(listed)], 'folder')
        return self.parts_of(listed, hidden)

    def parts_of(
        self,
        listed: Sequence[File],
        others: Sequence[PassedOver],
        *,
        metadata: Sequence[File] | None = None,
        elsewhere: Collection[str] = (),
        copy: Callable[[str], AbstractContextManager[Path]] = local_copy,
    ) -> list[Part]:
        """Split the images among some files into parts, as `parts` does with all files of the folder.

        Args:
            listed: Files, with the captions of the images.
            others: Files to count as passed over.
            metadata: Captions files of an imagefolder, each for the images in its folder and below; None finds one in
                the folder itself.
            elsewhere: Names of images that are not listed on purpose; rows about them are skipped.
            copy: Yields a local copy of a captions file, given its URL.

        Raises:
            UserError: There are no images, or a captions file is invalid.
        """
        files = {file.name: file for file in listed}
        images = self._images(files.values())
        if not images:
            suffixes = ', '.join(f'.{suffix}' for suffix in self.image_suffixes)
            formats = {format_of_suffix(file.name.rpartition('.')[2].lower()) for file in files.values()} - {None}
            hint = f'; read others with --formats {" ".join(sorted(map(str, formats)))}' if formats else ''
            raise UserError(f'{self.location}: contains no images ({suffixes}){hint}')
        if self.captions is not None:
            tables = [File(self.captions, 0, '', '')]
        elif any(f'{_stem(file)}.{suffix}' in files for file in images for suffix in BESIDE):
            tables = []
        elif metadata is not None:
            tables = list(metadata)
        else:
            tables = [files[name] for name in METADATA_FILES if name in files][:1]
        found = self._listed(tables, images, files, elsewhere, copy) if tables else self._paired(images, files)
        rows = list(found)
        runs = (rows[start : start + PART_IMAGES] for start in range(0, len(rows), PART_IMAGES))
        parts = [_part(number, run) for number, run in enumerate(runs)]
        return with_passed_over(parts, [*others, *_others(images, listed, {table.url for table in tables})])

    def read(self, part: Part) -> Iterator[Entry]:
        """Yield the images of a part in order, with their captions and metadata.

        Raises:
            UserError: The store denies access to an image.
            OSError: An image cannot be read at the moment.
        """
        images = [_ImageFile(**values) for values in part.where['pictures']]
        if not is_remote(self.location):
            yield from map(self._entry, images)
            return
        with ThreadPoolExecutor(DOWNLOADS) as threads:
            # In groups, since `map` over all images would download the whole part ahead of the reader.
            for start in range(0, len(images), DOWNLOADS):
                yield from threads.map(self._entry, images[start : start + DOWNLOADS])

    def _images(self, files: Iterable[File]) -> list[File]:
        suffixes = tuple(f'.{suffix}' for suffix in self.image_suffixes)
        return [file for file in files if file.name.lower().endswith(suffixes)]

    def _entry(self, image: '_ImageFile') -> Entry:
        """Read an image and its captions."""
        entry = Entry(image.key, metadata=image.metadata, problem=image.problem)
        entry.captions, entry.caption_columns = list(image.captions), list(image.caption_columns)
        if entry.problem is None:
            try:
                entry.image = _read(image.url, image.size)
                if image.beside:
                    text, columns = (_read(image.beside[kind]) if kind in image.beside else None for kind in BESIDE)
                    named = column_list(self.caption_column)
                    read_sidecars(entry, text, columns, rule=self.caption_text, caption_columns=named)
            except PermissionError:  # concerns only this file; other I/O errors stop the part
                entry.problem = 'unreadable'
        return entry

    def _paired(self, images: Iterable[File], files: dict[str, File]) -> Iterator['_ImageFile']:
        """Yield each image with the URLs of the .txt and .json files of its stem, which hold its captions.

        Used without a captions file. No file is read yet; an image with neither file gets the problem `no_caption`.
        """
        for file in images:
            beside = {kind: files.get(f'{_stem(file)}.{kind}') for kind in BESIDE}
            found = {kind: other for kind, other in beside.items() if other is not None}
            stamp = ' '.join([file.stamp, *(other.stamp for other in found.values())])
            image = _ImageFile(file.name, stamp, file.url, file.size, beside={k: v.url for k, v in found.items()})
            image.problem = None if found else 'no_caption'
            yield image

    def _listed(
        self,
        tables: Sequence[File],
        images: Iterable[File],
        files: Mapping[str, File],
        elsewhere: Collection[str],
        copy: Callable[[str], AbstractContextManager[Path]],
    ) -> Iterator['_ImageFile']:
        """Yield the images in the order of the captions files, then those that none lists, which are rejected.

        A row of a missing or repeated image is yielded as a rejected image too.
        """
        seen: set[str] = set()
        for table in tables:
            folder = table.name.rpartition('/')[0]
            with copy(table.url) as path:
                for row in read_caption_rows(path, column_list(self.caption_column)):
                    name = as_utf8((folder / row.path).as_posix())
                    if name in elsewhere:
                        continue
                    file = files.get(name)
                    if name in seen or file is None:
                        problem = 'missing_file' if file is None else 'duplicate_row'
                        yield _ImageFile(f'{name} ({row.where})', problem=problem)
                    else:
                        image = _ImageFile(name, file.stamp, file.url, file.size, row.captions)
                        image.metadata, image.caption_columns = json_value(row.metadata), row.caption_columns
                        yield image
                    seen.add(name)
        for file in images:
            if file.name not in seen:
                yield _ImageFile(file.name, problem='no_caption')


@dataclass
class _ImageFile:
    """Image file with its captions or their location; all values are JSON types, to be stored in the plan."""

    key: str
    stamp: str = ''
    url: str = ''
    size: int = 0
    captions: list[str] = field(default_factory=list)
    beside: dict[str, str] = field(default_factory=dict)
    """URLs of its .txt and .json file, by suffix."""
    metadata: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    caption_columns: list[str] = field(default_factory=list)
    """The column of each caption, if they are from several."""

    def content(self) -> dict[str, Any]:
        """Return the values to store in the plan."""
        # Without a field that earlier versions did not have: it would change the fingerprint of every prepared dataset.
        return {name: value for name, value in asdict(self).items() if value or name != 'caption_columns'}


def _stem(file: File) -> str:
    return file.name.rpartition('.')[0]


def _others(images: Sequence[File], files: Sequence[File], tables: Collection[str]) -> Iterator[PassedOver]:
    """Yield the files that are neither images nor hold the captions of one; `tables` are URLs of captions files."""
    used = {file.name for file in images}
    if not tables:
        used |= {f'{_stem(file)}.{suffix}' for file in images for suffix in BESIDE}
    yield from (PassedOver(file.name) for file in files if file.name not in used and file.url not in tables)


def _part(number: int, images: Sequence[_ImageFile]) -> Part:
    # The key and the name are part of the plan: renaming them would change the fingerprint of every prepared dataset.
    where = {'pictures': [image.content() for image in images]}
    stamp = xxhash.xxh3_128_hexdigest(json.dumps(where))
    return Part(f'pictures-{number:06}', where, max(1, sum(image.size for image in images)), stamp)


def _read(url: str, size: int | None = None) -> bytes:
    with local_copy(url, size=size) as path:
        return path.read_bytes()
