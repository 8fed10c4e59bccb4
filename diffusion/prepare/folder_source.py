"""Source for image files in a local or object store folder, with captions beside them or in a caption file."""

import itertools
import json
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from diffusion.errors import UserError
from diffusion.prepare.caption_files import NO_PATH, read_caption_rows, read_sidecars
from diffusion.prepare.dataset_splits import refuse_mixed_splits
from diffusion.prepare.extra_columns import json_value
from diffusion.prepare.file_listing import File, as_utf8, expand_braces, is_pattern, list_files, list_sorted, local_copy
from diffusion.prepare.optional_formats import format_of_suffix
from diffusion.prepare.source import (
    IMAGE_SUFFIXES,
    CaptionText,
    Entry,
    NamedCount,
    Part,
    PartList,
    PassedOver,
    column_list,
    count_named,
    is_hidden,
)
from diffusion.storage.places import is_url

METADATA_FILES = ('metadata.jsonl', 'metadata.csv', 'metadata.parquet')
BESIDE = ('txt', 'json')
"""Kinds of caption files beside an image: text (with the suffix from the settings) and JSON."""
OTHER_TEXT = 'caption'
"""Suffix of text files that other programs write beside images; read only if selected in the settings."""
TABLE_KINDS = ('.csv', '.jsonl', '.json', '.parquet', '.tsv', '.xlsx')
"""Suffixes of files that may be caption tables with an unexpected name."""
PART_IMAGES = 1000
MIN_IMAGES = 32
"""Minimum number of images per piece when a part is divided; smaller jobs are not worth the overhead."""
DOWNLOADS = 16


@dataclass(frozen=True)
class FolderSource:
    """Images in a folder and its subfolders, in parts of 1000; an image's key is its path relative to the folder.

    Without a caption file, captions of `a.jpg` are read as in img2dataset's `files` format: `captions` in `a.json`,
    otherwise `a.txt` (`caption_text`), otherwise `caption` in `a.json`; other keys of `a.json` become metadata. A
    caption file is a CSV, JSONL or Parquet file with columns `file` and `captions` or `caption`; other columns become
    metadata. If no image has captions beside it, a `metadata.jsonl`, `metadata.csv` or `metadata.parquet` in the folder
    is used as caption file, as in Hugging Face's imagefolder.
    """

    location: str
    captions: str | None = None
    caption_text: CaptionText = 'whole'
    caption_column: str | Sequence[str] | None = None
    """Columns of the caption file, or keys of .json files and `txt` for .txt files; None: see the class docstring."""
    image_suffixes: tuple[str, ...] = IMAGE_SUFFIXES
    caption_suffix: str = 'txt'
    caption: str | None = None
    """Caption of images without caption files beside them; None rejects these images. Unused with a caption file."""

    def parts(self) -> Sequence[Part]:
        """Split the images into parts, to be converted by parallel jobs; parts include the caption file's rows.

        A long list of files is kept in TMPDIR or, with a caption file, in memory: its rows may refer to any image.
        """
        if expand_braces(self.location) != [self.location] and not os.path.exists(self.location):
            listed, others = list_files(self.location, None)
            refuse_mixed_splits(self.location, [file.name for file in self._images(listed)], 'folder')
            return self.parts_of(listed, others)
        files, broken = list_sorted(self.location)
        first = list(itertools.islice(files, 2))
        if len(first) == 1 and first[0].url in (self.location, os.path.normpath(self.location)):
            return self.parts_of(first, broken)
        visible = (file for file in files if not is_hidden(file.name))
        has_table = False
        image_of_folder: dict[str, str] = {}
        for file in visible:
            if self._is_image(file):
                image_of_folder.setdefault(file.name.rpartition('/')[0], file.name)
            has_table = has_table or file.name.lower() in METADATA_FILES
        if not is_pattern(self.location):
            # An image's split depends only on its folder, so one image per folder is enough.
            refuse_mixed_splits(self.location, [*image_of_folder.values()], 'folder')
        if self.captions is None and image_of_folder:
            parts, captioned = self._parts_in_order(files, broken)
            if captioned or not has_table:
                return parts
        hidden = [PassedOver(file.name) for file in files if is_hidden(file.name)]
        return self.parts_of([file for file in files if not is_hidden(file.name)], [*hidden, *broken])

    def parts_of(
        self,
        listed: Sequence[File],
        others: Sequence[PassedOver],
        *,
        metadata: Sequence[File] | None = None,
        elsewhere: Collection[str] = (),
        copy: Callable[[str], AbstractContextManager[Path]] = local_copy,
    ) -> PartList:
        """Split the images among the given files into parts; `parts` does the same for the whole folder.

        Args:
            listed: Images and files with their captions.
            others: Further files, counted as skipped.
            metadata: Caption files in imagefolder format, each for the images in and below its folder. None means the
                one at the top of this source's folder, if any. Unused if `captions` is set, or if any image has
                captions beside it.
            elsewhere: Names of images that were left out on purpose; caption file rows about them are skipped.
            copy: Yields a local copy of a caption file, given its URL.
        """
        files = {file.name: file for file in listed}
        images = self._images(files.values())
        if not images:
            suffixes = ', '.join(f'.{suffix}' for suffix in self.image_suffixes)
            formats = {format_of_suffix(file.name.rpartition('.')[2].lower()) for file in files.values()} - {None}
            hint = f'; read others with --formats {" ".join(sorted(map(str, formats)))}' if formats else ''
            raise UserError(f'{self.location}: contains no images ({suffixes}){hint}')
        beside = texts_beside(images, files.values(), self.caption_suffix)
        if self.captions is not None:
            tables = [File(self.captions, 0, '', '')]
        elif beside:
            tables = []
        elif metadata is not None:
            tables = list(metadata)
        else:
            tables = metadata_in('', files.values())
        notes: list[str] = []
        found = (
            self._listed(tables, images, files, elsewhere, copy, notes)
            if tables
            else (_with_captions(image, beside.get(_stem(image), {}), self.caption) for image in images)
        )
        parts = _parts(found)
        passed_over: dict[str, NamedCount] = {}
        read = [*images, *(file for each in beside.values() for file in each.values() if not tables)]
        for file in (*others, *_others(read, listed, {table.url for table in tables})):
            count_named(passed_over, file.kind, 1, [file.key])
        parts.report_in_first(
            passed_over=passed_over, notes=(*notes, *self._notes(passed_over, bool(beside or tables)))
        )
        return parts

    def read(self, part: Part) -> Iterator[Entry]:
        images = [_ImageFile(**values) for values in part.where['pictures']]
        if not is_url(self.location):
            yield from map(self._entry, images)
            return
        with ThreadPoolExecutor(DOWNLOADS) as threads:
            # Download in groups: mapping over all images would download the whole part ahead of the reader.
            for start in range(0, len(images), DOWNLOADS):
                yield from threads.map(self._entry, images[start : start + DOWNLOADS])

    def divide(self, part: Part, count: int) -> list[Part]:
        """Split a part into at most `count` parts in order, each (except the last) with at least 32 images."""
        return divide_images(part, count)

    def _parts_in_order(self, files: Iterable[File], broken: Iterable[PassedOver]) -> tuple[PartList, bool]:
        """Split sorted files into parts, with captions found beside the images; also return True if any were found."""
        passed_over: dict[str, NamedCount] = {}
        captioned = False

        def images() -> Iterator[_ImageFile]:
            nonlocal captioned
            for image in self._paired_in_order(files, passed_over):
                captioned = captioned or bool(image.beside)
                yield image

        parts = _parts(images())
        for link in broken:
            count_named(passed_over, link.kind, 1, [link.key])
        parts.report_in_first(passed_over=passed_over, notes=self._notes(passed_over, captioned))
        return parts, captioned

    @cached_property
    def _endings(self) -> tuple[str, ...]:
        return tuple(f'.{suffix}' for suffix in self.image_suffixes)

    def _is_image(self, file: File) -> bool:
        return file.name.lower().endswith(self._endings)

    def _images(self, files: Iterable[File]) -> list[File]:
        return [file for file in files if self._is_image(file)]

    def _notes(self, passed_over: Mapping[str, NamedCount], captioned: bool) -> tuple[str, ...]:
        """Return hints about skipped files that may contain captions and, unless `captioned`, about adding captions."""
        notes = []
        others = passed_over.get(f'.{OTHER_TEXT}')
        if others is not None:
            notes.append(
                f'{others.count} .{OTHER_TEXT} files were not read; read them with --caption-suffix {OTHER_TEXT}'
            )
        if not captioned and self.caption is None:
            found = [name for kind in TABLE_KINDS if kind in passed_over for name in passed_over[kind].names]
            have = f'it has {", ".join(found[:3])}, which --captions reads if it is a .csv, .jsonl or .parquet'
            missing = 'write the captions in one of these ways, or give all images the same with --caption TEXT'
            notes.append(
                f'{self.location}: no image has a .{self.caption_suffix} or .json beside it, and the folder has no '
                f'{", ".join(METADATA_FILES)}; {have if found else missing}'
            )
        return tuple(notes)

    def _entry(self, image: '_ImageFile') -> Entry:
        entry = Entry(image.key, metadata=image.metadata, problem=image.problem)
        entry.captions, entry.caption_columns = list(image.captions), list(image.caption_columns)
        if self.caption_column == () and entry.problem == 'no_caption':  # another source provides the captions
            entry.problem = None
        if entry.problem is None:
            try:
                entry.image = _read(image.url, image.size)
                if image.beside:
                    text, columns = (_read(image.beside[kind]) if kind in image.beside else None for kind in BESIDE)
                    named = column_list(self.caption_column)
                    read_sidecars(entry, text, columns, rule=self.caption_text, caption_columns=named)
            except PermissionError:  # reject only this image; other I/O errors stop the conversion of the part
                entry.problem = 'unreadable'
        return entry

    def _paired_in_order(self, files: Iterable[File], passed_over: dict[str, NamedCount]) -> Iterator['_ImageFile']:
        """Yield each image with the caption files beside it (not yet read); count other files in `passed_over`.

        Files need not be held in memory, because in sorted order, files with the same stem are close together.
        """
        # All names that begin with an image's stem and a dot, including its captions, are consecutive. Two such spans
        # of names are either nested or disjoint.
        spans: list[_Span] = []
        waiting: deque[tuple[File, _Span]] = deque()

        def close() -> None:
            span = spans.pop()
            span.open = False
            for other in () if span.has_image else span.beside.values():
                _pass_over(passed_over, other)

        for file in files:
            while spans and not file.name.startswith(spans[-1].prefix):
                close()
            while waiting and not waiting[0][1].open:
                image, span = waiting.popleft()
                yield _with_captions(image, span.beside, self.caption)
            kind = kind_beside(file, self.caption_suffix)
            is_image = self._is_image(file)
            if is_hidden(file.name) or not (is_image or kind):
                _pass_over(passed_over, file)
                continue
            prefix = f'{_stem(file)}.'
            if not spans or spans[-1].prefix != prefix:
                spans.append(_Span(prefix))
            if is_image:
                spans[-1].has_image = True
                waiting.append((file, spans[-1]))
            elif kind and (extra := _put_beside(spans[-1].beside, kind, file)) is not None:
                _pass_over(passed_over, extra)
        while spans:
            close()
        yield from (_with_captions(image, span.beside, self.caption) for image, span in waiting)

    def _listed(
        self,
        tables: Sequence[File],
        images: Sequence[File],
        files: Mapping[str, File],
        elsewhere: Collection[str],
        copy: Callable[[str], AbstractContextManager[Path]],
        notes: list[str],
    ) -> Iterator['_ImageFile']:
        """Yield images in the order of the caption files; then, for rejection, images that no caption file lists.

        Unusable rows are also yielded for rejection. If no row matches an image, a hint is added to `notes`.
        """
        unknown = None
        seen: set[str] = set()
        by_suffix: dict[str, str] = {}
        for table in tables:
            folder = table.name.rpartition('/')[0]
            with copy(table.url) as path:
                for row in read_caption_rows(path, column_list(self.caption_column)):
                    names = [as_utf8(os.path.normpath(os.path.join(folder, path))) for path in row.paths]
                    if any(name in elsewhere for name in names):
                        continue
                    name = next((name for name in names if name in files), names[-1])
                    # Accept a suffix that differs in case, such as a.JPG for a.jpg; the first such row builds an index
                    # of the files.
                    if name not in files and not row.problem:
                        by_suffix = by_suffix or {_lower_suffix(each): each for each in files}
                        name = by_suffix.get(_lower_suffix(name), name)
                    file = None if row.problem in NO_PATH else files.get(name)
                    if name in seen or file is None or row.problem is not None:
                        problem = 'missing_file' if file is None else 'duplicate_row'
                        problem = problem if name in seen else row.problem or problem
                        yield _ImageFile(f'{name} ({row.where})', problem=problem)
                    else:
                        image = _ImageFile(name, file.stamp, file.url, file.size, row.captions)
                        image.metadata, image.caption_columns = json_value(row.metadata), row.caption_columns
                        yield image
                    if file is not None:
                        seen.add(name)
                    elif unknown is None:
                        unknown = f'{row.where}: no row names an image of the folder: it has {row.file!r}'
        if unknown is not None and not seen:
            example = next((file.name for file in images), '')
            notes.append(f'{unknown}, and the folder {example!r}; write paths relative to the folder')
        for file in images:
            if file.name not in seen:
                yield _ImageFile(file.name, problem='no_caption')


def _lower_suffix(name: str) -> str:
    stem, dot, suffix = name.rpartition('.')
    return f'{stem}{dot}{suffix.lower()}'


@dataclass
class _ImageFile:
    """Image file with its captions or their location; all values are JSON types, so they can be stored in the plan."""

    key: str
    stamp: str = ''
    url: str = ''
    size: int = 0
    captions: list[str] = field(default_factory=list)
    beside: dict[str, str] = field(default_factory=dict)
    """URLs of the image's text and .json files, by kind (see `BESIDE`)."""
    metadata: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    caption_columns: list[str] = field(default_factory=list)

    def content(self) -> dict[str, Any]:
        # Omit empty caption columns: a plan may have ten million images, most of them without such columns.
        return {name: value for name, value in vars(self).items() if value or name != 'caption_columns'}


@dataclass
class _Span:
    """Files whose names begin with the same stem and a dot."""

    prefix: str
    beside: dict[str, File] = field(default_factory=dict)
    has_image: bool = False
    open: bool = True
    """True until a file outside the span is listed."""


def _with_captions(file: File, beside: Mapping[str, File], caption: str | None) -> _ImageFile:
    """Return an image with its caption files (by kind); if it has none, `caption` or the problem no_caption is set."""
    found = {kind: beside[kind] for kind in BESIDE if kind in beside}
    stamp = ' '.join([file.stamp, *(other.stamp for other in found.values())])
    image = _ImageFile(file.name, stamp, file.url, file.size, beside={kind: each.url for kind, each in found.items()})
    if not found:
        image.captions, image.problem = ([], 'no_caption') if caption is None else ([caption], None)
    return image


def _pass_over(counts: dict[str, NamedCount], file: File) -> None:
    count_named(counts, PassedOver(file.name).kind, 1, [file.name])


def _stem(file: File) -> str:
    return file.name.rpartition('.')[0]


def kind_beside(file: File, caption_suffix: str) -> str | None:
    """Return `txt` for a caption text file, `json` for a .json file, or None for others; case is ignored."""
    suffix = file.name.rpartition('.')[2].lower()
    return 'txt' if suffix == caption_suffix else 'json' if suffix == 'json' else None


def texts_beside(images: Iterable[File], files: Iterable[File], caption_suffix: str) -> dict[str, dict[str, File]]:
    """Return the caption files beside the images, by stem (name without suffix) and then by kind (see `BESIDE`)."""
    stems = {_stem(image) for image in images}
    found: dict[str, dict[str, File]] = {}
    for file in files:
        kind = kind_beside(file, caption_suffix)
        if kind is not None and _stem(file) in stems:
            _put_beside(found.setdefault(_stem(file), {}), kind, file)
    return found


def metadata_in(folder: str, files: Iterable[File]) -> list[File]:
    """Return a list with the first of `METADATA_FILES` that a folder has, ignoring case, or an empty list."""
    prefix = f'{folder}/' if folder else ''
    names = [f'{prefix}{name}' for name in METADATA_FILES]
    found = {
        f'{prefix}{file.name.removeprefix(prefix).lower()}': file for file in files if file.name.startswith(prefix)
    }
    return [found[name] for name in names if name in found][:1]


def _put_beside(beside: dict[str, File], kind: str, file: File) -> File | None:
    """Add a file to an image's caption files; if it has `a.txt` and `a.TXT`, keep `a.txt` and return the other."""
    other = beside.get(kind)
    if other is not None and other.name.rpartition('.')[2].islower():
        return file
    beside[kind] = file
    return other


def _others(read: Iterable[File], files: Iterable[File], tables: Collection[str]) -> Iterator[PassedOver]:
    """Yield the files to report as skipped: those that are neither in `read` nor caption files (URLs in `tables`)."""
    used = {file.name for file in read}
    yield from (PassedOver(file.name) for file in files if file.name not in used and file.url not in tables)


def _parts(images: Iterable[_ImageFile]) -> PartList:
    parts, rest = PartList(), iter(images)
    while run := list(itertools.islice(rest, PART_IMAGES)):
        # This key and the name below are part of the plan: renaming them changes the fingerprint of every dataset.
        where = {'pictures': [image.content() for image in run]}
        stamp = xxhash.xxh3_128_hexdigest(json.dumps(where))
        size = max(1, sum(image.size for image in run))
        parts.append(Part(f'pictures-{len(parts):06}', where, size, stamp))
    return parts


def divide_images(part: Part, count: int) -> list[Part]:
    images = part.where['pictures']
    step = max(MIN_IMAGES, math.ceil(len(images) / count))
    found = []
    for number, start in enumerate(range(0, len(images), step)):
        some = images[start : start + step]
        size = max(1, sum(image['size'] for image in some))
        found.append(replace(part, name=f'{part.name}.{number}', where={**part.where, 'pictures': some}, size=size))
    return found


def _read(url: str, size: int | None = None) -> bytes:
    with local_copy(url, size=size) as path:
        return path.read_bytes()
