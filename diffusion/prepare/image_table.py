"""Read rows with images and captions from Parquet or Arrow tables; find columns by given or common names."""

import errno
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from diffusion.config.schema import did_you_mean
from diffusion.errors import UserError
from diffusion.prepare.extra_columns import json_value
from diffusion.prepare.source import Entry, Unfit, captions_of_columns, column_list
from diffusion.storage import object_store
from diffusion.storage.retry import status_of

IMAGE_COLUMNS = ('image', 'jpg', 'jpeg', 'png', 'webp', 'image_bytes', 'img')
CAPTION_COLUMNS = ('captions', 'caption', 'txt', 'text')
KEY_COLUMN = 'key'
URL_COLUMNS = ('url', 'image_url', 'img_url', 'imageurl', 'image_link', 'urls', 'image_urls')
URL = re.compile(r'(https?|ftp)://', re.IGNORECASE)

ReadImage = Callable[[str], bytes]
"""Function that returns the image file at the path in a row, or raises `Unfit` with the reason why it cannot."""


@dataclass(frozen=True)
class ColumnNames:
    """Column names given by the user; None means that a column is found by its common names."""

    image: str | None = None
    caption: str | Sequence[str] | None = None
    """One column or several. With several, training chooses among their captions by weight. Empty reads none."""
    key: str | None = None


@dataclass(frozen=True)
class Columns:
    image: str
    captions: tuple[str, ...]
    key: str | None
    others: list[str]
    where: str

    @property
    def all(self) -> list[str]:
        return [self.image, *self.captions, *([self.key] if self.key else []), *self.others]


def find_columns(schema: pa.Schema, names: ColumnNames, where: str, *, suffix: str = '.parquet') -> Columns:
    """Return a table's columns; common names are matched case-insensitively.

    If the table has URLs instead of images, a UserError shows how to download them. `suffix` is the table's suffix.
    """
    if names.image is None and _find_column(schema, IMAGE_COLUMNS) is None:
        address = _find_column(schema, URL_COLUMNS)
        if address is not None and _is_text(schema.field(address).type):
            caption = next(iter(column_list(names.caption)), None) or _find_column(schema, CAPTION_COLUMNS)
            raise UserError(download_first(where, address, caption, suffix=suffix))
    image = _resolve_column(schema, names.image, IMAGE_COLUMNS, where, '--image-column')
    kind = schema.field(image).type
    fields = [kind.field(index).name for index in range(kind.num_fields)] if pa.types.is_struct(kind) else []
    if not _is_bytes(kind) and not _is_text(kind) and 'bytes' not in fields and 'path' not in fields:
        raise UserError(
            f'{where}: column {image!r} has type {kind}; set --image-column to a column of encoded images, or of paths '
            'of image files in the dataset'
        )
    has_none = names.caption == () and _find_column(schema, CAPTION_COLUMNS) is None
    captions = tuple(
        _resolve_column(schema, name, CAPTION_COLUMNS, where, '--caption-column')
        for name in column_list(names.caption) or ([] if has_none else [None])
    )
    key = _find_column(schema, (KEY_COLUMN,))
    if names.key is not None:
        key = _resolve_column(schema, names.key, (), where, '--key-column')
    taken = {image, *captions, key, *(name for name in schema.names if name.lower() in CAPTION_COLUMNS)}
    others = [field.name for field in schema if field.name not in taken and not _is_bytes(field.type)]
    return Columns(image, captions, key, others, where)


def download_first(where: str, url_column: str, caption_column: str | None, *, suffix: str = '.parquet') -> str:
    """Return the error message for a table of URLs, with commands that download and prepare the images."""
    caption = caption_column or 'CAPTION'
    table, first = where, ''
    if suffix == '.arrow':  # img2dataset cannot read Arrow files
        table, suffix, first = 'urls.parquet', '.parquet', 'save it as urls.parquet with to_parquet() of `datasets`, '
    return (
        f'{where}: column {url_column!r} has addresses of images, not images; {first}download them, each file of the '
        'split by img2dataset, which retries and spares the servers, then prepare what it wrote:\n'
        f'  img2dataset --url_list {shlex.quote(table)} --input_format {suffix.lstrip(".")} '
        f'--url_col {shlex.quote(url_column)} --caption_col {shlex.quote(caption)} --output_format webdataset '
        '--output_folder images --image_size 1024 --resize_only_if_bigger True --resize_mode keep_ratio\n'
        '  diffusion prepare webdataset images --out OUT --sizes 256'
    )


def entry_of(
    values: dict[str, Any], columns: Columns, stem: str, row: int, seen: set[str], read_image: ReadImage | None
) -> Entry:
    """Return a row as an entry; its key is the file's stem plus the key column's value or else the row number.

    Raise UserError if the image column contains URLs.

    Args:
        seen: Keys of earlier rows; this row's key is added.
        read_image: Reads images to which the table refers by path; None means that such rows are rejected.
    """
    key = values[columns.key] if columns.key else None
    entry = Entry(f'{stem}/row-{row}' if key is None else f'{stem}/{json_value(key)}')
    image = values[columns.image]
    path = image.get('path') if isinstance(image, dict) else image if isinstance(image, str) else None
    encoded = image.get('bytes') if isinstance(image, dict) else image
    entry.captions, names = captions_of_columns(values, columns.captions)
    entry.caption_columns = names if columns.captions[1:] else []
    entry.metadata = {name: json_value(values[name]) for name in columns.others}
    if entry.key in seen:
        entry.problem = 'duplicate_key'
    elif isinstance(encoded, bytes):
        entry.image = encoded
    elif not path or not isinstance(path, str):
        entry.problem = 'no_image'
    elif URL.match(path):
        if isinstance(image, str):
            suffix = os.path.splitext(columns.where)[1]
            raise UserError(
                download_first(columns.where, columns.image, next(iter(columns.captions), None), suffix=suffix)
            )
        entry.problem = 'image_is_an_address'
    else:
        try:
            entry.image = None if read_image is None else read_image(path)
        except Unfit as unfit:
            entry.problem = str(unfit)
        if entry.image is None and entry.problem is None:
            entry.problem = 'no_image'
    seen.add(entry.key)
    return entry


def raise_if_io_error(error: BaseException) -> None:
    """Raise a read error again if it comes from disk or network rather than from damage in the file."""
    # pyarrow also raises OSError for damaged files, but without an errno. Real I/O errors must propagate, since they
    # are retried, whereas damage is reported.
    if isinstance(error, OSError) and error.errno is not None:
        raise error


def paths_inside(path: str, folder: str) -> list[str]:
    """Return the files to which a row's path may refer, relative to the table's folder or to the dataset's root.

    Backslashes are tried as separators too. Raise Unfit if the path is absolute or leads outside the dataset.
    """
    forms = dict.fromkeys((path, path.replace('\\', '/')))
    bases = dict.fromkeys((folder, ''))
    joined = [os.path.normpath(f'{base}/{form}' if base else form) for form in forms for base in bases]
    inside = [name for name in joined if name != '..' and not name.startswith('../')]
    if any(map(os.path.isabs, forms)) or not inside or '\0' in path:
        raise Unfit('image_outside_dataset', f'the image {path!r} is outside the dataset')
    return inside


@dataclass(frozen=True)
class LocalImages:
    """Reads image files by the paths in a table's rows: relative to table or dataset, or absolute in the dataset."""

    root: str
    folder: str

    def __call__(self, path: str) -> bytes:
        # Compare paths as text, without resolving links: files of a snapshot in the Hub's cache link to files outside
        # it.
        root = os.path.abspath(self.root)
        if os.path.isabs(path) and os.path.normpath(path).startswith(root.rstrip('/') + '/'):
            names = [os.path.relpath(os.path.normpath(path), root)]
        else:
            names = paths_inside(path, self.folder)
        for name in names:
            try:
                return Path(root, name).read_bytes()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                continue
            except PermissionError as error:
                raise Unfit('unreadable') from error
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:  # a text that is too long to be a path
                    continue
                raise
        raise Unfit('missing_file', f'the dataset has no file {path!r}')


@dataclass(frozen=True)
class StoreImages:
    """Reads objects by the paths in the rows of a table in an object store; the counterpart of `LocalImages`."""

    root: str
    folder: str

    def __call__(self, path: str) -> bytes:
        for name in paths_inside(path, self.folder):
            try:
                return object_store.read(f'{self.root}/{name}')
            except UserError as error:
                if status_of(error) != 404:
                    raise
        raise Unfit('missing_file', f'the dataset has no file {path!r}')


def image_path(image: object) -> str | None:
    """Return the path or URL by which a row refers to its image; None if the row has the image's bytes or no image."""
    if isinstance(image, dict):
        image = None if isinstance(image.get('bytes'), bytes) else image.get('path')
    return image if isinstance(image, str) else None


def _resolve_column(schema: pa.Schema, given: str | None, common_names: Sequence[str], where: str, option: str) -> str:
    found = _find_column(schema, common_names) if given is None else given if given in schema.names else None
    if found is not None:
        return found
    if given is None:
        raise UserError(f'{where}: has no column {", ".join(common_names)}, only {schema.names}; set {option}')
    raise UserError(
        f'{where}: has no column {given!r}, only {schema.names}; correct {option}: {did_you_mean(given, schema.names)}'
    )


def _find_column(schema: pa.Schema, common_names: Sequence[str]) -> str | None:
    spelled = {name.lower(): name for name in reversed(schema.names)}
    return next((spelled[name] for name in common_names if name in spelled), None)


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def row_values(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return a batch's rows; times become text, and bytes of strings that are not valid UTF-8 become surrogates."""
    try:
        return _times_to_text(batch).to_pylist()
    except UnicodeDecodeError:
        columns = {name: [_value(each) for each in batch.column(name)] for name in batch.schema.names}
        return [{name: columns[name][row] for name in columns} for row in range(batch.num_rows)]


def _times_to_text(batch: pa.RecordBatch) -> pa.RecordBatch:
    # Convert times to text first: `to_pylist` cannot convert all of them, because Python has no nanoseconds.
    arrays = [
        array.cast(pa.string()) if pa.types.is_temporal(array.type) and not pa.types.is_duration(array.type) else array
        for array in batch.columns
    ]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _value(scalar: Any) -> Any:
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.StringScalar | pa.LargeStringScalar):
        return scalar.as_buffer().to_pybytes().decode('utf-8', 'surrogateescape')
    if isinstance(scalar, pa.MapScalar):
        return [(_value(pair[0]), _value(pair[1])) for pair in scalar.values]
    if isinstance(scalar, pa.ListScalar | pa.LargeListScalar | pa.FixedSizeListScalar):
        return [_value(each) for each in scalar.values]
    if isinstance(scalar, pa.StructScalar):
        return {name: _value(scalar[name]) for name in scalar}
    if isinstance(scalar, pa.DictionaryScalar):
        return _value(scalar.dictionary[scalar.index.as_py()])
    if pa.types.is_temporal(scalar.type) and not pa.types.is_duration(scalar.type):
        return scalar.cast(pa.string()).as_py()
    return scalar.as_py()
