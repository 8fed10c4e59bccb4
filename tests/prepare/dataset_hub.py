"""A Hugging Face Hub on localhost with datasets, for huggingface_hub: its API, listings in pages, gates and faults."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from hub_client import forget_sessions, skip_certificates
from local_server import LocalServer

TOKEN = 'hf_of_a_reader'
LARGE_BYTES = 1000
"""Size from which a file is stored as a large file, with its SHA-256 in the listing."""
PAGE_FILES = 5
"""Files per page of a listing."""


@dataclass
class HubDataset:
    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files at other revisions than main."""

    def commits(self) -> dict[str, dict[str, bytes]]:
        return {commit_of(files): files for files in (self.files, *self.revisions.values())}

    def commit(self, revision: str) -> str | None:
        """Return the commit of a revision; None if there is none."""
        if revision in self.commits():
            return revision
        named = {'main': self.files, **self.revisions}
        return commit_of(named[revision]) if revision in named else None


def commit_of(files: dict[str, bytes]) -> str:
    """Return a commit hash that depends on the names and contents of the files."""
    text = ''.join(f'{name} {hashlib.sha1(content).hexdigest()}\n' for name, content in sorted(files.items()))
    return hashlib.sha1(text.encode()).hexdigest()


class HubServer(LocalServer):
    """Server of datasets by name, with a script of misbehavior."""

    def __init__(self, datasets: dict[str, HubDataset]) -> None:
        super().__init__()
        self.datasets = datasets
        self.faults: list[int | str] = []
        """Answers to the next requests of files: an HTTP status, `cut` (half a body) or `wrong` (another body)."""
        self.api_faults: list[int] = []
        """HTTP statuses of the next requests of the API."""
        self.tokens: set[str | None] = set()
        """Tokens that were sent."""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        address = urlsplit(request.path)
        pieces = [unquote(piece) for piece in address.path.strip('/').split('/')]
        self.requests.append(f'{request.command} {unquote(address.path)}')
        token = request.headers.get('Authorization', '').removeprefix('Bearer ') or None
        self.tokens.add(token)
        is_api = pieces[:2] == ['api', 'datasets']
        name = '/'.join(pieces[2:4] if is_api else pieces[1:3])
        dataset = self.datasets.get(name)
        if is_api and self.api_faults:
            return self.send(request, self.api_faults.pop(0), b'')
        if dataset is None or (dataset.private and token != TOKEN):
            return self.send(request, 401 if token is None else 404, b'', {'X-Error-Code': 'RepoNotFound'})
        if is_api:
            return self._api(request, name, dataset, pieces[4:], parse_qs(address.query))
        self._file(request, dataset, pieces[4], '/'.join(pieces[5:]), token)

    def _api(self, request: Any, name: str, dataset: HubDataset, pieces: list[str], query: dict[str, Any]) -> None:
        commit = dataset.commit(pieces[1] if pieces else 'main')
        if commit is None:
            return self.send(request, 404, b'', {'X-Error-Code': 'RevisionNotFound'})
        files = dataset.commits()[commit]
        if not pieces or pieces[0] == 'revision':
            siblings = [{'rfilename': each} for each in files]
            content: Any = {'id': name, 'sha': commit, 'gated': dataset.gated and 'auto', 'siblings': siblings}
            return self.send(request, 200, json.dumps(content).encode())
        assert pieces[0] == 'tree' and query['recursive'] == ['true']
        start = int(query.get('cursor', ['0'])[0])
        listed = [*({'type': 'directory', 'oid': '0' * 40, 'size': 0, 'path': 'data'},), *map(entry_of, files.items())]
        headers = {}
        if start + PAGE_FILES < len(listed):
            following = f'{self.url}/api/datasets/{name}/tree/{commit}?recursive=true&cursor={start + PAGE_FILES}'
            headers['Link'] = f'<{following}>; rel="next"'
        self.send(request, 200, json.dumps(listed[start : start + PAGE_FILES]).encode(), headers)

    def _file(self, request: Any, dataset: HubDataset, revision: str, path: str, token: str | None) -> None:
        fault = self.faults.pop(0) if self.faults and request.command == 'GET' else None
        if isinstance(fault, int):
            return self.send(request, fault, b'')
        if dataset.gated and token != TOKEN:
            return self.send(request, 401 if token is None else 403, b'', {'X-Error-Code': 'GatedRepo'})
        commit = dataset.commit(revision)
        body = None if commit is None else dataset.commits()[commit].get(path)
        if body is None or commit is None:
            code = 'RevisionNotFound' if commit is None else 'EntryNotFound'
            return self.send(request, 404, b'', {'X-Error-Code': code})
        listed = entry_of((path, body))
        etag = listed.get('lfs', listed)['oid']
        headers = {'X-Repo-Commit': commit, 'ETag': f'"{etag}"'}
        if 'lfs' in listed:
            headers |= {'X-Linked-Etag': f'"{etag}"', 'X-Linked-Size': str(len(body))}
        if fault == 'wrong':
            body = bytes(len(body))
        if found := re.fullmatch(r'bytes=(\d+)-', request.headers.get('Range', '')):
            start = int(found[1])
            headers['Content-Range'] = f'bytes {start}-{len(body) - 1}/{len(body)}'
            return self.send(request, 206, body[start:], headers)
        self.send(request, 200, body, headers, cut=fault == 'cut')


def entry_of(file: tuple[str, bytes]) -> dict[str, Any]:
    """Return a file's entry in a listing: with Git's hash, and the SHA-256 of a large file."""
    path, content = file
    blob = hashlib.sha1(f'blob {len(content)}\0'.encode() + content).hexdigest()
    entry: dict[str, Any] = {'type': 'file', 'oid': blob, 'size': len(content), 'path': path}
    if len(content) >= LARGE_BYTES:
        entry['lfs'] = {'oid': hashlib.sha256(content).hexdigest(), 'size': len(content), 'pointerSize': 134}
    return entry


@contextlib.contextmanager
def serving(datasets: dict[str, HubDataset], monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Context with a running `HubServer` that this process uses as the Hub, without a token and without pauses."""
    from huggingface_hub import constants

    from diffusion.storage import retry

    hub = HubServer(datasets)
    monkeypatch.setenv('HF_ENDPOINT', hub.url)
    monkeypatch.delenv('HF_TOKEN', raising=False)
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(constants, 'HF_TOKEN_PATH', '/nowhere/token')
    monkeypatch.setattr(retry, 'LONGEST_PAUSE_SECONDS', 0.01)
    skip_certificates(monkeypatch)
    forget_sessions()
    try:
        yield hub
    finally:
        forget_sessions()
        hub.close()
