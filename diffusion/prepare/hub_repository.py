"""Datasets on the Hugging Face Hub: names, file listings at one commit, and downloads verified against the listing."""

import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from diffusion.errors import DataError, UserError
from diffusion.prepare.file_listing import File, by_name, local_copy
from diffusion.prepare.image_table import paths_inside
from diffusion.prepare.source import Unfit
from diffusion.storage.retry import DamagedDownload, RetryPolicy

PREFIX = 'hf://datasets/'
ENDPOINT = 'https://huggingface.co'
POLICY = RetryPolicy()
DOWNLOADS = 8
"""Number of files to download at the same time per process; the Hub limits requests per user."""
HASHED_BYTES = 2**20
MAX_PATH_CHARACTERS = 1024
"""Maximum length of a path requested from the Hub: servers reject or drop requests with longer paths."""
Answer = TypeVar('Answer')


@dataclass(frozen=True)
class HubName:
    """Name of a dataset on the Hub, optionally with a revision and with a path or pattern inside the dataset."""

    repository: str
    revision: str | None = None
    path: str = ''


def parse_name(location: str) -> HubName | None:
    """Parse `org/dataset[@revision]`, `hf://datasets/org/dataset[@revision][/path]` or a dataset's URL; else None.

    Raise UserError if a location begins with hf:// but is not such a URL.
    """
    for host in (ENDPOINT, endpoint()):
        if location.startswith(f'{host}/datasets/'):
            page = re.sub(r'/(?:tree|blob|resolve)/([^/]+)', r'@\1', location.partition('?')[0].rstrip('/'), count=1)
            location = PREFIX + page.removeprefix(f'{host}/datasets/')
    name = r'([\w-][\w.-]*/[\w-][\w.-]*)'
    if not location.startswith('hf://'):
        found = re.fullmatch(rf'{name}(?:@([\w./-]+))?', location)
        return None if found is None else HubName(found[1], found[2])
    # Revisions such as refs/convert/parquet contain slashes, or %2F in URLs.
    rest = r'(?:@(refs/(?:convert|pr)/[\w.-]+|[^/]+))?(?:/(.*))?'
    found = re.fullmatch(f'{PREFIX}{name}{rest}', location, re.DOTALL)
    if found is None:
        raise UserError(f'{location}: is not the URL of a dataset; use hf://datasets/ORG/NAME, or ORG/NAME')
    return HubName(found[1], None if found[2] is None else unquote(found[2]), (found[3] or '').strip('/'))


def _name_of(url: str) -> HubName:
    """Return the repository, commit and path of a listed file."""
    name = parse_name(url)
    assert name is not None and name.revision is not None
    return name


@dataclass(frozen=True)
class Hub:
    """Client for the Hub at HF_ENDPOINT. File URLs contain a commit, so the content at a URL never changes."""

    token_variable: str | None = None
    """Environment variable with the token; None means HF_TOKEN or the token saved by `hf auth login`."""

    def list_repository(self, name: str, revision: str | None) -> tuple[str, list[File]]:
        """Return the commit of a revision (None: main), and its files with stamps `sha256:HASH` or `git:BLOB`."""
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            raise UserError(
                f'{name}: there is no such folder, and HF_HUB_OFFLINE is set; unset it, or give a folder that '
                f'`hf download {name} --repo-type dataset --local-dir FOLDER` wrote'
            )
        api, url = f'{endpoint()}/api/datasets/{name}', f'{PREFIX}{name}'
        where = '' if revision is None else f'/revision/{quote(revision, safe="")}'
        info = _ask(lambda: self._get_json(f'{api}{where}')[0], url, name, revision)
        commit = str(info.get('sha')) if isinstance(info, dict) else ''
        if not re.fullmatch(r'[0-9a-f]{40}', commit):
            raise DataError(f'{url}: the answer of {api} has no commit; check that HF_ENDPOINT is a Hub, not a proxy')
        found: list[File] = []
        query: str | None = 'recursive=true&expand=false'
        while query is not None:
            entries, query = _ask(partial(self._get_json, f'{api}/tree/{commit}?{query}'), url, name, revision)
            found += [_file(name, commit, entry) for entry in entries if entry['type'] == 'file']
        return commit, sorted(found, key=by_name)

    @contextmanager
    def copies(self, files: Sequence[File]) -> Iterator[dict[str, Path]]:
        """Yield local paths of files by URL; Hub files are downloaded to TMPDIR, verified, and removed afterward."""
        remote = [file for file in files if is_on_hub(file.url)]
        with ExitStack() as stack:
            paths = {
                file.url: stack.enter_context(local_copy(file.url, size=file.size))
                for file in files
                if not is_on_hub(file.url)
            }
            if remote:
                folder = tempfile.TemporaryDirectory(prefix='diffusion-prepare-', ignore_cleanup_errors=True)
                own = Path(stack.enter_context(folder))
                with ThreadPoolExecutor(min(DOWNLOADS, len(remote))) as threads:
                    downloaded = threads.map(lambda file: self._download(file, own), remote)
                    paths |= zip((file.url for file in remote), downloaded, strict=True)
            yield paths

    def read_beside(self, table: str, path: str) -> bytes:
        """Return the image at a path relative to a table (a URL) or to the repository; its hash is not checked.

        Raise Unfit if the path leads outside the repository, or the file does not exist.
        """
        from huggingface_hub.errors import EntryNotFoundError

        name = _name_of(table)
        root = table.removesuffix(f'/{name.path}')
        paths = paths_inside(path, name.path.rpartition('/')[0])
        if len(paths[0]) > MAX_PATH_CHARACTERS:
            raise Unfit('missing_file', f'{root} has no file with a name of {len(paths[0])} characters')
        for each in paths:
            file = File(f'{root}/{each}', -1, '', each)
            try:
                with self.copies([file]) as copies:
                    return copies[file.url].read_bytes()
            except UserError as error:
                if not isinstance(error.__cause__, EntryNotFoundError):
                    raise
        raise Unfit('missing_file', f'{root} has no file {paths[0]!r}')

    def read_end(self, file: File, size: int) -> bytes:
        """Return up to `size` bytes from the end of a file, without checking its hash."""
        from huggingface_hub import hf_hub_url

        name = _name_of(file.url)
        where = {'repo_type': 'dataset', 'revision': name.revision, 'endpoint': endpoint()}
        address = hf_hub_url(name.repository, name.path, **where)
        ranges = {'Range': f'bytes={max(0, file.size - size)}-'}
        # Keep only the end: servers that do not support ranges send the whole file.
        return _ask(lambda: self._get(address, ranges).content[-size:], file.url, name.repository, name.revision)

    def _download(self, file: File, folder: Path) -> Path:
        from huggingface_hub import hf_hub_download

        name = _name_of(file.url)

        def attempt() -> Path:
            # Give the client a separate folder per file, since it writes lock files and metadata beside copies.
            own = Path(tempfile.mkdtemp(dir=folder))
            path = hf_hub_download(
                name.repository,
                name.path,
                repo_type='dataset',
                revision=name.revision,
                local_dir=own,
                endpoint=endpoint(),
                token=token_of(self.token_variable),
                etag_timeout=POLICY.timeout_seconds,
            )
            try:
                _check(Path(path), file)
            except DamagedDownload:
                shutil.rmtree(own, ignore_errors=True)
                raise
            return Path(path)

        _turn_off_progress_bars()
        return _ask(attempt, file.url, name.repository, name.revision)

    def _get(self, url: str, headers: Mapping[str, str]) -> Any:
        """Send a request to the Hub and return the response; an error status raises huggingface_hub's exception."""
        # huggingface_hub.utils is the documented module, although it does not declare its exported names.
        from huggingface_hub.utils import (
            build_hf_headers,  # pyright: ignore[reportPrivateImportUsage]
            get_session,  # pyright: ignore[reportPrivateImportUsage]
            hf_raise_for_status,  # pyright: ignore[reportPrivateImportUsage]
        )

        # Do not use HfApi: its listing has no timeout.
        own = build_hf_headers(token=token_of(self.token_variable) or False, library_name='diffusion-recipes')
        response = get_session().get(url, headers={**own, **headers}, timeout=POLICY.timeout_seconds)
        hf_raise_for_status(response)
        return response

    def _get_json(self, url: str) -> tuple[Any, str | None]:
        """Return the JSON response to an API request, and the query for the next page, or None at the last page."""
        response = self._get(url, {})
        # Return only the query: the token must not be sent to another host.
        following = response.links.get('next', {}).get('url')
        return response.json(), None if following is None else urlsplit(following).query


def is_on_hub(url: str) -> bool:
    return url.startswith(PREFIX)


def endpoint() -> str:
    return (os.environ.get('HF_ENDPOINT') or ENDPOINT).rstrip('/')


def token_of(variable: str | None) -> str | None:
    """Return the token in the environment variable `variable`; if None, that of HF_TOKEN or `hf auth login`, if any."""
    if variable is None:
        from huggingface_hub import get_token

        return get_token()
    value = os.environ.get(variable, '').strip()
    if not value:
        raise UserError(
            f'source.token_variable: the environment variable {variable} is not set; export it, or leave this out'
        )
    return value


def _file(name: str, commit: str, entry: dict[str, Any]) -> File:
    path = entry['path']
    if path.startswith('/') or '..' in path.split('/') or '\\' in path or '\0' in path:
        raise UserError(f'{PREFIX}{name}: lists a file {path!r} outside the repository; do not use it')
    large = entry.get('lfs') or {}
    stamp = f'sha256:{large["oid"]}' if large.get('oid') else f'git:{entry["oid"]}'
    return File(f'{PREFIX}{name}@{commit}/{path}', large.get('size', entry['size']), stamp, path)


def _check(path: Path, file: File) -> None:
    size = path.stat().st_size
    if file.size >= 0 and size != file.size:
        raise DamagedDownload(f'received {size} of {file.size} bytes')
    kind, _, wanted = file.stamp.partition(':')
    if not wanted:
        return
    # Git hashes a file's type and size before its content.
    digest = hashlib.sha256() if kind == 'sha256' else hashlib.sha1(f'blob {size}\0'.encode(), usedforsecurity=False)
    with path.open('rb') as content:
        while block := content.read(HASHED_BYTES):
            digest.update(block)
    if digest.hexdigest() != wanted:
        raise DamagedDownload(f'has the hash {digest.hexdigest()} instead of {wanted}')


def _ask(request: Callable[[], Answer], url: str, name: str, revision: str | None) -> Answer:
    """Return a request's result, retrying while the Hub does not answer; raise UserError if it refuses the request."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    def attempt() -> Answer:
        try:
            try:
                return request()
            except LocalEntryNotFoundError as error:
                # Any failed metadata request raises LocalEntryNotFoundError; its cause tells why, such as a timeout.
                raise error.__cause__ or ConnectionError(str(error)) from None
            except RuntimeError as error:
                # hf_xet, which transfers large files, raises RuntimeError for all errors, even those of the network.
                raise ConnectionError(str(error)) from error
        except Exception as error:
            reason = _refusal(error, name, revision)
            if reason is None:
                raise
            raise UserError(f'{url}: {reason}') from error

    return POLICY.run(attempt, url)


def _refusal(error: Exception, name: str, revision: str | None) -> str | None:
    """Return why the Hub rejected a request and how to fix it, or None for other errors."""
    from huggingface_hub import errors

    page = f'{endpoint()}/datasets/{name}'
    status = getattr(getattr(error, 'response', None), 'status_code', None)
    if isinstance(error, errors.GatedRepoError):
        return (
            f'access is restricted: accept the terms at {page}, and set HF_TOKEN (or the variable that '
            '--token-variable names) to a token of that account, or log in with `hf auth login`'
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f'there is no revision {revision}; see {page}/commits/main'
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f'there is no such dataset on the Hub, or it is private ({status}): check the name at {page}, and set '
            'HF_TOKEN if it is private'
        )
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return f'there is no such file; see {page}/tree/{revision or "main"}'
    if status in (401, 403):
        return f'the Hub refuses access ({status}): check HF_TOKEN, and that its account may read {page}'
    return None


@cache
def _turn_off_progress_bars() -> None:
    """Turn off the progress bars of huggingface_hub, which would show one per file."""
    from huggingface_hub.utils import disable_progress_bars  # pyright: ignore[reportPrivateImportUsage]  # as above
    from tqdm import tqdm

    disable_progress_bars()
    # By default, even a disabled bar creates a system semaphore, about which Python warns when a worker ends.
    tqdm.set_lock(threading.RLock())
