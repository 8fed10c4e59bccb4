"""List and sort files in a local folder or an object store, and copy objects to disk for reading."""

import heapq
import itertools
import marshal
import math
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, starmap
from operator import attrgetter
from pathlib import Path
from typing import IO, NamedTuple

import xxhash

from diffusion.errors import UserError, is_wrong_path
from diffusion.prepare.source import NamedCount, Part, PassedOver, count_named, is_hidden
from diffusion.storage import object_store
from diffusion.storage.bucket_interface import ObjectInfo
from diffusion.storage.places import is_url

IN_MEMORY = 300_000
"""Maximum number of files to sort in memory; this number of files takes 120 MB."""
BLOCK = 2000


class File(NamedTuple):
    """A file in a local folder or an object store."""

    url: str
    """Path, or URL such as s3://bucket/key; can be passed to `local_copy`."""
    size: int
    stamp: str
    """Changes when the content changes: a local file's size and modification time, or an object's ETag or hash."""
    name: str
    """Path, with forward slashes, relative to the listed folder: for a pattern, the one before the first wildcard."""


by_name = attrgetter('name')


class SortedFiles(Iterable[File]):
    """Files sorted by name; can be iterated several times. Long lists are kept in a file in TMPDIR."""

    def __init__(self, files: Iterable[File]) -> None:
        rest = iter(files)
        runs: list[_Run] = []
        while len(chunk := sorted(islice(rest, IN_MEMORY), key=by_name)) == IN_MEMORY:
            runs.append(_Run(chunk))
        self._files: Iterable[File] = _Run(heapq.merge(*runs, chunk, key=by_name)) if runs else chunk

    def __iter__(self) -> Iterator[File]:
        return iter(self._files)


class _Run:
    """Sorted files in a temporary file, stored as blocks with the size of each before it."""

    def __init__(self, files: Iterable[File]) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        rest = map(tuple, files)
        while block := list(islice(rest, BLOCK)):
            data = marshal.dumps(block)
            self._file.write(len(data).to_bytes(8, 'little') + data)

    def __iter__(self) -> Iterator[File]:
        place = 0
        while True:
            self._file.seek(place)
            size = int.from_bytes(self._file.read(8), 'little')
            if not size:
                return
            block = marshal.loads(self._file.read(size))
            place += 8 + size
            yield from starmap(File, block)


MAX_EXPANDED = 1_000_000


def list_files(location: str, suffixes: Collection[str] | None) -> tuple[list[File], list[PassedOver]]:
    """Return the files at a location, sorted by name (expanded braces keep their order), and the skipped files.

    Hidden files, those in hidden folders, those with other suffixes, and broken links are skipped. Files that result
    from braces are never skipped; a missing one raises UserError.

    Args:
        location: A folder, searched recursively; a single file with any suffix; a webdataset-style pattern with braces,
            such as s3://bucket/laion/{00000..00099}.tar; or a pattern with `*`, `?` or `**`, such as
            s3://bucket/data/train-*.parquet.
        suffixes: Lowercase suffixes to keep, such as `.tar`; matched case-insensitively. None keeps all suffixes, and
            allows an empty result for a folder.
    """
    location = location.removeprefix('file://')
    # If a folder with this exact name exists, braces are part of its name.
    wanted = [location] if os.path.exists(location) else expand_braces(location)
    if wanted != [location] and is_pattern(location):
        raise UserError(f'{location}: has braces and wildcards; use one of them')
    if wanted != [location]:
        return _list_expanded(wanted, location), []
    if is_pattern(location) and not os.path.exists(location):
        return _list_matching(location, suffixes)
    listed, unread = _list(location)
    if len(listed) == 1 and listed[0].url in (location, os.path.normpath(location)):
        return listed, []
    found, others = _split_by_suffix(sorted(listed, key=by_name), suffixes)
    if not found and suffixes is not None:
        raise UserError(
            f'{location}: contains no {", ".join(sorted(suffixes))} files; give the folder that contains them'
        )
    return found, others + unread


def list_sorted(location: str) -> tuple[SortedFiles, list[PassedOver]]:
    """List all files in a folder, or those that match a pattern with wildcards, using little memory.

    Return the files sorted by name, including hidden ones, and the broken links.
    """
    location = location.removeprefix('file://')
    base, pattern = location, ''
    if is_pattern(location) and not os.path.exists(location):
        base, pattern = _split_pattern(location)

    def chosen(files: Iterable[File]) -> SortedFiles:
        return SortedFiles(file for file in files if not pattern or matches(file.name, pattern))

    broken: list[PassedOver] = []
    if is_url(base):
        files = object_store.collect_objects(base, lambda found: chosen(_files_of_store(base, found)))
    else:
        files = chosen(_walk(base or '.', broken))
    if pattern:
        _check_matches(location, base, files)
        broken = [link for link in broken if matches(link.key, pattern)]
    return files, sorted(broken, key=lambda link: link.key)


@contextmanager
def local_copy(url: str, *, size: int | None = None) -> Iterator[Path]:
    """Yield a local path of a file; an object (of `size` bytes, if known) is copied to TMPDIR for the `with` block."""
    if not is_url(url):
        yield Path(url)
        return
    folder = Path(tempfile.mkdtemp(prefix='diffusion-prepare-'))
    try:
        path = folder / (re.sub(r'[^A-Za-z0-9._-]', '_', url.rpartition('/')[2])[-100:].lstrip('.') or 'object')
        object_store.download(url, path, size=size)
        yield path
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def as_utf8(text: str) -> str:
    """Return a file name as valid UTF-8; invalid bytes and lone surrogates become backslash escapes."""
    # Python represents undecodable bytes in file names as surrogates (surrogateescape). JSON may contain other
    # surrogates, which surrogateescape rejects.
    try:
        encoded = text.encode('utf-8', 'surrogateescape')
    except UnicodeEncodeError:
        encoded = text.encode('utf-8', 'backslashreplace')
    return encoded.decode('utf-8', 'backslashreplace')


def single_file_part(file: File, suffix: str) -> Part:
    """Return a part (the unit of input that one job converts) that consists of one file, such as a tar file."""
    # Do not remove just any suffix: 00000.tar and 00000.tgz would have the same stem.
    stem = file.name.removesuffix(suffix)
    return Part(part_name(stem), {'url': file.url, 'size': file.size, 'stem': stem}, file.size, file.stamp)


def with_passed_over(parts: Sequence[Part], files: Sequence[PassedOver]) -> list[Part]:
    """Return the parts with the skipped files counted in the first part, for the report."""
    counts: dict[str, NamedCount] = {}
    for file in files:
        count_named(counts, file.kind, 1, [file.key])
    return [replace(parts[0], passed_over=counts), *parts[1:]]


def part_name(text: str) -> str:
    """Return a unique name for a part, from a text such as a file name: letters, digits, dots, dashes and a hash."""
    plain = re.sub(r'[^A-Za-z0-9.-]+', '_', text).strip('._')[-80:]
    if plain == text:
        return text
    return f'{plain}-{xxhash.xxh3_64_hexdigest(text.encode())}'


def expand_braces(location: str) -> list[str]:
    """Expand `{00..99}` and `{a,b}` in a location; return only the location itself if it has no braces."""
    pieces = re.split(r'\{([^{}]*)\}', location)
    choices = [_alternatives(piece, location) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    if math.prod(map(len, choices)) > MAX_EXPANDED:
        raise UserError(f'{location}: the braces expand to more than {MAX_EXPANDED} files; give the folder instead')
    return [''.join(choice) for choice in itertools.product(*choices)]


def is_pattern(location: str) -> bool:
    return '*' in location or '?' in location


def matches(name: str, pattern: str) -> bool:
    """Return True if a path matches a pattern of `*`, `?`, `[0-4]` (these match no slash) and `**` (any folders)."""
    expression = ''
    for piece in re.split(r'(\*\*/|\*\*|\*|\?|\[[^\]]+\])', pattern):
        if piece.startswith('[') and piece.endswith(']'):
            inside = piece[1:-1].replace('\\', '\\\\')
            expression += f'[^{inside[1:]}]' if inside.startswith('!') else f'[{inside}]'
        else:
            wildcards = {'**/': '(?:[^/]+/)*', '**': '.*', '*': '[^/]*', '?': '[^/]'}
            expression += wildcards.get(piece, re.escape(piece))
    try:
        return re.fullmatch(expression, name) is not None
    except re.error as error:
        raise UserError(f'{pattern}: is not a valid pattern ({error}); use * and ?') from error


def is_inside(name: str, path: str) -> bool:
    """Return True if a file is at a path, below it, or matches it as a pattern; an empty path includes all files."""
    if not path or name == path or name.startswith(f'{path}/'):
        return True
    return (is_pattern(path) or '[' in path) and matches(name, path)


def _list_matching(location: str, suffixes: Collection[str] | None) -> tuple[list[File], list[PassedOver]]:
    """List files that match a pattern, sorted; names are relative to the folder before the first wildcard."""
    base, pattern = _split_pattern(location)
    listed, unread = _list(base or '.')
    found = sorted((file for file in listed if matches(file.name, pattern)), key=by_name)
    _check_matches(location, base, found)
    kept, others = _split_by_suffix(found, suffixes)
    if not kept:
        wanted = 'visible' if suffixes is None else ', '.join(sorted(suffixes))
        raise UserError(f'{location}: matches no {wanted} files, only {others[0].key}')
    return kept, others + [link for link in unread if matches(link.key, pattern)]


def _split_pattern(location: str) -> tuple[str, str]:
    start = re.split(r'[*?\[]', location, maxsplit=1)[0]
    return start[: start.rfind('/') + 1], location[start.rfind('/') + 1 :]


def _check_matches(location: str, base: str, files: Iterable[File]) -> None:
    if not any(True for _ in files):
        raise UserError(f'{location}: no file matches; list {base or "."} and correct the pattern')


def _split_by_suffix(files: Iterable[File], suffixes: Collection[str] | None) -> tuple[list[File], list[PassedOver]]:
    """Return the files with one of the suffixes, and all others, including hidden ones; None keeps all suffixes."""
    endings = ('',) if suffixes is None else tuple(suffixes)
    found: list[File] = []
    others: list[PassedOver] = []
    for file in files:
        if file.name.lower().endswith(endings) and not is_hidden(file.name):
            found.append(file)
        else:
            others.append(PassedOver(file.name))
    return found, others


def _alternatives(inside: str, location: str) -> list[str]:
    span = re.fullmatch(r'(\d+)\.\.(\d+)', inside)
    if span is None and ',' in inside:
        return inside.split(',')
    if span is None:
        raise UserError(f'{location}: {{{inside}}} is neither a range such as {{00000..00099}} nor a list {{a,b}}')
    first, last = int(span[1]), int(span[2])
    if not first <= last < first + MAX_EXPANDED:
        raise UserError(
            f'{location}: {{{inside}}} is a descending range or has more than {MAX_EXPANDED} files; correct it'
        )
    return [str(number).zfill(len(span[1])) for number in range(first, last + 1)]


def _list_expanded(wanted: list[str], location: str) -> list[File]:
    """List the expanded locations; names are relative to the folder before the first brace."""
    # List this folder once instead of making one request per file.
    base = location.partition('{')[0].rpartition('/')[0] + '/'
    base = base if '/' in location.partition('{')[0] else '.'
    listed, _ = _list(base)
    by_url = {file.url: file for file in listed}
    wanted = [url if is_url(location) else os.path.normpath(url) for url in dict.fromkeys(wanted)]
    missing = [url for url in wanted if url not in by_url]
    if missing:
        raise UserError(f'{location}: {len(missing)} of {len(wanted)} files are missing, the first one is {missing[0]}')
    return [by_url[url] for url in wanted]


def _list(location: str) -> tuple[list[File], list[PassedOver]]:
    """List all files below a folder, or the file itself, and broken links."""
    if is_url(location):
        return [*_files_of_store(location, object_store.list_objects(location))], []
    broken: list[PassedOver] = []
    return [*_walk(location, broken)], sorted(broken, key=lambda link: link.key)


def _walk(location: str, broken: list[PassedOver]) -> Iterator[File]:
    """Yield the files below a local folder, following links, or the file itself; add broken links to `broken`."""
    root = os.path.normpath(location)
    if os.path.isfile(root):
        yield _file(root, os.path.basename(root))
        return
    if not os.path.isdir(root):
        raise UserError(f'{location}: there is no such folder or file')
    for folder, folders, names in os.walk(root, onerror=_raise_listing_error, followlinks=True):
        for link in (os.path.join(folder, name) for name in folders if os.path.islink(os.path.join(folder, name))):
            if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(link)):
                raise UserError(f'{link}: links to a folder that contains it; remove the link')
        for path in (os.path.normpath(os.path.join(folder, name)) for name in names):
            name = os.path.relpath(path, root).replace(os.sep, '/')
            if os.path.isfile(path):
                yield _file(path, name)
            elif os.path.islink(path):
                broken.append(PassedOver(as_utf8(name), 'broken link'))


def _file(path: str, name: str) -> File:
    status = os.stat(path)
    return File(path, status.st_size, f'{status.st_size}-{status.st_mtime_ns}', as_utf8(name))


def _raise_listing_error(error: OSError) -> None:
    if not is_wrong_path(error):
        raise error
    raise UserError(f'{error.filename}: cannot be listed ({error.strerror}); check its permissions') from error


def _files_of_store(location: str, objects: Iterable[ObjectInfo]) -> Iterator[File]:
    """Yield an object store folder's files, or the object itself, from the metadata of its objects."""
    prefix = object_store.split(location)[1]
    root = location.removesuffix(prefix).rstrip('/') + '/'
    base = prefix if not prefix or prefix.endswith('/') else f'{prefix}/'
    for key, size, tag in objects:
        name = key.rpartition('/')[2] if key == prefix else key.removeprefix(base)
        if name and not key.endswith('/'):
            yield File(root + key, size, tag or str(size), name)
