"""TFRecord files of images and captions: plain ones, and datasets of TensorFlow Datasets, read without TensorFlow.

A record is its length (uint64), the masked CRC-32C of these 8 bytes, the payload, and the masked CRC-32C of the
payload; all numbers are little-endian (tensorflow/core/lib/io/record_writer.h). `parse_example` reads the few message
types of tensorflow/core/example, so that neither TensorFlow nor protobuf is needed.
"""

import gzip
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from google_crc32c import value as crc32c

from diffusion.errors import UserError
from diffusion.prepare.extra_columns import json_value
from diffusion.prepare.file_listing import File, as_utf8, single_file_part
from diffusion.prepare.image_table import ColumnNames
from diffusion.prepare.source import Entry, Part, column_list, texts_of
from diffusion.prepare.webdataset import GZIP, MAX_CONTENT

IMAGES = ('image', 'jpg', 'jpeg', 'png', 'webp', 'image/encoded', 'image_bytes', 'image_raw', 'img')
CAPTIONS = ('captions', 'caption', 'txt', 'text', 'image/caption')
KEYS = ('key', '__key__')
"""IMAGES, CAPTIONS and KEYS are common names of features, in order of precedence."""
INFO = 'dataset_info.json'
MAX_VALUES = 100
"""Longest list of values that is kept as metadata; longer ones, such as embeddings, are dropped."""
CHECKED = 10
"""Number of records at the start of a file to check: UserError if none has an image, or none has a caption."""
_NAME = re.compile(r'(?P<base>.*)\.(?:tfrecords?|tfrec)(?:-(?P<shard>\d+)-of-(?P<of>\d+))?(?:\.gz)?', re.IGNORECASE)


def is_tfrecord(name: str) -> bool:
    return _NAME.fullmatch(name.rpartition('/')[2]) is not None


def tfrecord_parts(
    files: Sequence[File], listed: Sequence[File], read: Callable[[File], bytes]
) -> tuple[list[Part], list[str]]:
    """Return a part per file, and notes about missing files.

    Args:
        listed: All files of the dataset; if there is a dataset_info.json, the record counts are taken from it.
    """
    infos = {file.name.removesuffix(INFO): file for file in listed if file.name.endswith(INFO)}
    folders = {_folder(file) for file in files} & infos.keys()
    if len(folders) > 1:
        raise UserError(
            f'{files[0].url}: is one of several datasets or versions: {", ".join(map(repr, sorted(folders)))}; give '
            'the folder of one'
        )
    lengths = {name: length for each in folders for name, length in _lengths(read(infos[each]), infos[each]).items()}
    present: dict[tuple[str, int], set[int]] = {}
    parts = []
    for file in files:
        part = single_file_part(file, '.tfrecord')
        found = _NAME.fullmatch(file.name.rpartition('/')[2])
        if found is not None and found['shard'] is not None:
            shard = found['base'], int(found['of']), int(found['shard'])
            part = replace(part, where={**part.where, 'records': lengths.get(shard)})
            present.setdefault((_folder(file) + shard[0], shard[1]), set()).add(shard[2])
        parts.append(part)
    return parts, [
        f'{base}: has {len(numbers)} of {of} TFRecord files; number {min(set(range(of)) - numbers)} is missing'
        for (base, of), numbers in present.items()
        if len(numbers) < of
    ]


def tfrecord_entries(path: Path, part: Part, names: ColumnNames) -> Iterator[Entry]:
    """Yield an entry per record, even if damaged; if reading fails or records are missing, add an entry for this."""
    stem, number = part.where['stem'], 0
    seen: set[str] = set()
    features: dict[str, None] = {}
    try:
        for payload in read_records(path):
            try:
                record = None if payload is None else parse_example(payload)
                entry = Entry(f'{stem}/row-{number}', problem='record_damaged')
                if record is not None:
                    entry = _entry(record, names, stem, number)
                    features |= dict.fromkeys(record)
            except NotAnExample:
                entry = Entry(f'{stem}/row-{number}', problem='not_an_example')
            if entry.key in seen:
                entry.problem = 'duplicate_key'
            seen.add(entry.key)
            number += 1
            if number == CHECKED and features:
                _check_features(part.where['url'], features, names)
            yield entry
    except DamagedRecords as damage:
        yield Entry(f'{stem} at record {number}', problem=f'part_{damage}')
        return
    expected = part.where.get('records')
    if number < (1 if expected is None else expected):
        # The file may have been cut off between two records, which only the dataset's own count shows.
        yield Entry(f'{stem} at record {number}', problem='part_empty' if expected is None else 'part_cut_off')


def _entry(features: dict[str, list[Any]], names: ColumnNames, stem: str, number: int) -> Entry:
    image, key = _found(features, names.image, IMAGES), _found(features, names.key, KEYS)
    columns = _caption_names(features, names)
    name = f'row-{number}' if key is None or not features[key] else as_utf8(str(_text(features[key][0])))
    entry = Entry(f'{stem}/{name}')
    for column in columns:
        texts = [text for value in features.get(column, []) for text in texts_of(_text(value))]
        entry.captions += texts
        entry.caption_columns += [column] * len(texts) if columns[1:] else []
    images = [] if image is None else features[image]
    for name, values in features.items():
        if name in (image, key, *columns) or len(values) > MAX_VALUES:
            continue
        try:
            plain = [each.decode() if isinstance(each, bytes) else each for each in values]
        except UnicodeDecodeError:
            continue  # another image or array
        entry.metadata[name] = json_value(plain[0] if len(plain) == 1 else plain)
    if len(images) == 1 and isinstance(images[0], bytes):
        entry.image = images[0]
    else:
        entry.problem = 'several_images' if images[1:] else 'no_image'
    return entry


def _found(features: dict[str, Any], given: str | None, common: Sequence[str]) -> str | None:
    """Return the given name or the first common one among the features; None if there is none."""
    return next((name for name in ([given] if given else common) if name in features), None)


def _caption_names(features: dict[str, Any], names: ColumnNames) -> list[str]:
    if names.caption:
        return column_list(names.caption)
    found = _found(features, None, CAPTIONS)
    return [] if found is None else [found]


def _text(value: Any) -> Any:
    """Decode bytes; those that are not UTF-8 become surrogates, which the check of captions finds."""
    return value.decode('utf-8', 'surrogateescape') if isinstance(value, bytes) else value


def _check_features(where: str, features: dict[str, None], names: ColumnNames) -> None:
    """Raise UserError if the records at the start of a file have no image feature, or no caption feature."""
    wrong = {}
    if _found(features, names.image, IMAGES) is None:
        wrong['--image-column'] = names.image or ', '.join(IMAGES)
    if names.caption != () and not any(name in features for name in _caption_names(features, names)):
        wrong['--caption-column'] = ', '.join(column_list(names.caption) or CAPTIONS)
    for option, wanted in wrong.items():
        raise UserError(f'{where}: records have no feature {wanted}, only {", ".join(sorted(features))}; set {option}')


def _lengths(content: bytes, file: File) -> dict[tuple[str, int, int], int]:
    """Return the number of records by (dataset and split, number of files, number of the file)."""
    try:
        info = json.loads(content)
        return {
            (f'{info["name"]}-{split["name"]}', len(split['shardLengths']), number): int(length)
            for split in info.get('splits', [])
            for number, length in enumerate(split.get('shardLengths', []))
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f'{file.url}: is not a file of TensorFlow Datasets ({error!r}); copy it again') from error


def _folder(file: File) -> str:
    return file.name[: file.name.rfind('/') + 1]


_HEADER, _CHECKSUM = struct.Struct('<QI'), struct.Struct('<I')
_FIXED_BYTES = {1: 8, 5: 4}
"""Sizes of protobuf fields of fixed size by wire type."""


class DamagedRecords(Exception):
    """Raised if the rest of a file is unreadable; says cut_off, damaged, unreadable (the whole file) or too_large."""


class NotAnExample(ValueError):
    """A payload is not a `tf.train.Example`."""


def masked_crc32c(content: bytes) -> int:
    """Return the CRC-32C of some bytes, rotated by 15 bits and shifted by a constant, as TFRecord files store it."""
    crc = crc32c(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_records(path: Path) -> Iterator[bytes | None]:
    """Yield the payload of each record of a file, which may be gzip-compressed; None if its checksum is wrong.

    Raises:
        DamagedRecords: After the records before the damage, if the file ends within a record or a length is wrong.
    """
    with path.open('rb') as file:
        start = file.read(_HEADER.size)
        file.seek(0)
        # The length of a record of 559,903 bytes equals the start of a gzip file, but only a record has its checksum.
        is_gzip = start.startswith(GZIP) and not _is_header(start)
        stream = gzip.GzipFile(fileobj=file) if is_gzip else file
        try:
            is_first = True
            while header := stream.read(_HEADER.size):
                if len(header) == _HEADER.size and not _is_header(header):
                    raise DamagedRecords('unreadable' if is_first else 'damaged')
                yield _read_payload(stream, header)
                is_first = False
        except EOFError as error:  # a truncated gzip stream
            raise DamagedRecords('cut_off') from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DamagedRecords('damaged') from error


def _is_header(header: bytes) -> bool:
    """Return True if the bytes are a record's length followed by the right checksum."""
    return len(header) == _HEADER.size and masked_crc32c(header[:8]) == _HEADER.unpack(header)[1]


def _read_payload(stream: IO[bytes] | gzip.GzipFile, header: bytes) -> bytes | None:
    length = _HEADER.unpack(header)[0] if len(header) == _HEADER.size else 0
    if length > MAX_CONTENT:
        raise DamagedRecords('too_large')
    content = stream.read(length + _CHECKSUM.size)
    if len(header) < _HEADER.size or len(content) < length + _CHECKSUM.size:
        raise DamagedRecords('cut_off')
    payload = content[:length]
    return payload if masked_crc32c(payload) == _CHECKSUM.unpack(content[length:])[0] else None


def parse_example(payload: bytes) -> dict[str, list[Any]]:
    """Return the features of a `tf.train.Example` by name; values are bytes, floats or integers.

    Raises:
        NotAnExample: The bytes are not such a message.
    """
    try:
        # An Example has Features in field 1, and these have a map in field 1.
        features = [value for number, value in _fields(memoryview(payload)) if number == 1]
        return dict(_feature(entry) for each in features for number, entry in _fields(each) if number == 1)
    except (IndexError, TypeError, UnicodeDecodeError, struct.error) as error:
        raise NotAnExample(str(error)) from error


def _feature(entry: memoryview) -> tuple[str, list[Any]]:
    """Return name and values of a feature, from its entry in a protobuf map: field 1 is the name, 2 the Feature."""
    name, values = '', []
    for number, content in _fields(entry):
        if number == 1:
            name = str(content, 'utf-8')
        elif number == 2:
            # A Feature has one field: 1 for a list of bytes, 2 of floats, 3 of integers.
            for kind, listed in _fields(content):
                values = [each for field, value in _fields(listed) if field == 1 for each in _values(kind, value)]
    return name, values


def _values(kind: int, value: Any) -> list[Any]:
    """Return the values in one field of a list; numbers are mostly packed, several in one field."""
    if kind == 1:
        return [bytes(value)]
    if kind == 2:
        return list(struct.unpack(f'<{len(value) // 4}f', value))
    found, at = [value] if isinstance(value, int) else [], 0
    while not isinstance(value, int) and at < len(value):
        number, at = _varint(value, at)
        found.append(number)
    return [each - 2**64 if each >= 2**63 else each for each in found]


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) for each field of a message; a value is an integer, or bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        size = _FIXED_BYTES.get(tag & 7)
        if tag & 7 == 2:
            size, at = _varint(message, at)
        if size is None or at + size > len(message):
            raise NotAnExample(f'field {tag >> 3} of wire type {tag & 7} ends after the message')
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return an integer in base 128, least significant digit first, and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise NotAnExample('an integer has more than ten bytes')
