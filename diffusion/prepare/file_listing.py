"""List the files of a local folder or an object store with size and stamp, and copy them to disk to be read."""

import itertools
import math
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from diffusion.errors import UserError, is_wrong_path
from diffusion.prepare.source import Part
from diffusion.storage import object_store

MAX_EXPANDED = 1_000_000
"""Files that braces may stand for."""


@dataclass(frozen=True)
class File:
    """A file as a listing shows it."""

    url: str
    """What `local_copy` takes: a path, or s3://bucket/key."""
    size: int
    """Bytes."""
    stamp: str
    """Changes when the content does: size and time of a local file, the ETag of an object."""
    name: str
    """Its path below the listed location, with forward slashes."""


def list_files(location: str, suffixes: Collection[str] | None) -> list[File]:
    """List the files that have one of the suffixes, sorted by name; those of braces in their order.

    Args:
        location: A folder, searched with its sub-folders; one file, whatever its suffix; or files with numbers or
            words in braces, as webdataset's users write them: s3://bucket/laion/{00000..00099}.tar.
        suffixes: In lower case, `.tar` for one; a file's own may be in capitals. None lists all, and there may be none.
            Hidden files and what is in hidden folders are left out.

    Raises:
        UserError: There is none, one that the braces name is missing, or a store refuses.
        OSError: A store does not answer.
    """
    location = location.removeprefix('file://')
    wanted = [location] if os.path.exists(location) else expand_braces(location)
    if wanted != [location]:
        return _named(wanted, location)
    listed = _list_store(location) if is_remote(location) else _list_folder(location)
    if len(listed) == 1 and listed[0].url in (location, os.path.normpath(location)):
        return listed
    endings = ('',) if suffixes is None else tuple(suffixes)
    found = [file for file in listed if file.name.lower().endswith(endings) and not _is_hidden(file.name)]
    if not found and suffixes is not None:
        raise UserError(f'{location}: has no {", ".join(sorted(endings))} files; give the folder that has them')
    return sorted(found, key=lambda file: file.name)


@contextmanager
def local_copy(url: str, *, size: int | None = None) -> Iterator[Path]:
    """Lend a path to read a file from: a local file in place, an object as a copy in TMPDIR that is removed afterwards.

    Args:
        url: The `url` of a `File`.
        size: Bytes that an object must have.

    Raises:
        UserError: A store refuses: there is no such object, no permission, no credentials.
        OSError: A store does not answer.
    """
    if not is_remote(url):
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
    """Return a file's name as text that UTF-8 can hold, whatever bytes or JSON surrogates it is made of."""
    try:
        encoded = text.encode('utf-8', 'surrogateescape')
    except UnicodeEncodeError:
        encoded = text.encode('utf-8', 'backslashreplace')
    return encoded.decode('utf-8', 'backslashreplace')


def is_remote(location: str) -> bool:
    """Return whether a location is in an object store."""
    return '://' in location


def stem_of(file: File, suffix: str) -> str:
    """Return a file's name without the suffix, if it has that: of 00000.tar and 00000.tgz only one is 00000."""
    return file.name[: -len(suffix)] if file.name.endswith(suffix) else file.name


def whole_file(file: File, suffix: str) -> Part:
    """Return a file as a part."""
    stem = stem_of(file, suffix)
    return Part(part_name(stem), {'url': file.url, 'size': file.size, 'stem': stem}, file.size, file.stamp)


def part_name(text: str) -> str:
    """Make a part's name of a text; where letters are lost, a hash of the text tells it from others."""
    plain = re.sub(r'[^A-Za-z0-9.-]+', '_', text).strip('._')[-80:]
    if plain == text:
        return text
    return f'{plain}-{xxhash.xxh3_64_hexdigest(text.encode())}'


def expand_braces(location: str) -> list[str]:
    """Return the locations that `{00..99}` or `{a,b}` in a location stand for; the location itself without any."""
    pieces = re.split(r'\{([^{}]*)\}', location)
    choices = [_alternatives(piece, location) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    if math.prod(map(len, choices)) > MAX_EXPANDED:
        raise UserError(f'{location}: the braces stand for more than {MAX_EXPANDED} files; give their folder')
    return [''.join(choice) for choice in itertools.product(*choices)]


def _alternatives(inside: str, location: str) -> list[str]:
    span = re.fullmatch(r'(\d+)\.\.(\d+)', inside)
    if span is None and ',' in inside:
        return inside.split(',')
    if span is None:
        raise UserError(f'{location}: {{{inside}}} is neither a range such as {{00000..00099}} nor a list {{a,b}}')
    first, last = int(span[1]), int(span[2])
    if not first <= last < first + MAX_EXPANDED:
        raise UserError(f'{location}: {{{inside}}} runs backwards or over more than {MAX_EXPANDED} files; correct it')
    return [str(number).zfill(len(span[1])) for number in range(first, last + 1)]


def _named(wanted: list[str], location: str) -> list[File]:
    """List the files that the braces of a location stand for; their names begin where it has its first brace."""
    base = location.partition('{')[0].rpartition('/')[0] + '/'
    base = base if '/' in location.partition('{')[0] else '.'
    listed = _list_store(base) if is_remote(location) else _list_folder(base)
    by_url = {file.url: file for file in listed}
    wanted = [url if is_remote(location) else os.path.normpath(url) for url in dict.fromkeys(wanted)]
    missing = [url for url in wanted if url not in by_url]
    if missing:
        raise UserError(f'{location}: {len(missing)} of {len(wanted)} files are missing, the first is {missing[0]}')
    return [by_url[url] for url in wanted]


def _is_hidden(name: str) -> bool:
    return any(piece.startswith('.') for piece in name.split('/'))


def _list_folder(location: str) -> list[File]:
    """List all files below a folder, or the one file."""
    root = os.path.normpath(location)
    if os.path.isfile(root):
        return [_file(root, os.path.basename(root))]
    if not os.path.isdir(root):
        raise UserError(f'{location}: there is no such folder or file')
    found = []
    for folder, _, names in os.walk(root, onerror=_cannot_list):
        paths = (os.path.normpath(os.path.join(folder, name)) for name in names)
        found += [
            _file(path, os.path.relpath(path, root).replace(os.sep, '/')) for path in paths if os.path.isfile(path)
        ]
    return found


def _file(path: str, name: str) -> File:
    status = os.stat(path)
    return File(path, status.st_size, f'{status.st_size}-{status.st_mtime_ns}', as_utf8(name))


def _cannot_list(error: OSError) -> None:
    if not is_wrong_path(error):
        raise error
    raise UserError(f'{error.filename}: cannot be listed ({error.strerror}); check its permissions') from error


def _list_store(location: str) -> list[File]:
    """List all objects below a folder, or the one object."""
    prefix = object_store.split(location)[1]
    root = location.removesuffix(prefix).rstrip('/') + '/'
    base = prefix if not prefix or prefix.endswith('/') else f'{prefix}/'
    files = []
    for key, size, tag in object_store.list_objects(location):
        name = key.rpartition('/')[2] if key == prefix else key.removeprefix(base)
        if name and not key.endswith('/'):
            files.append(File(root + key, size, tag or str(size), name))
    return files
