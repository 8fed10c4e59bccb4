"""A small Hugging Face Hub on localhost that serves one repository, takes uploads, and misbehaves on request."""

import base64
import contextlib
import hashlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from hub_client import forget_sessions, set_address, skip_certificates
from local_server import LocalServer

COMMIT = 'c0ffee' + '0' * 34
ERROR_CODES = {
    'gated': (403, 'GatedRepo'),
    'no-repository': (401, 'RepoNotFound'),
    'no-revision': (404, 'RevisionNotFound'),
}


TOKEN = 'hf_of_someone'


@dataclass
class Repository:
    """A repository that was created by an upload."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)


class Hub(LocalServer):
    """Server of the files in a folder as the repository `someone/model`, with a script of misbehavior."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.faults: list[str | int] = []
        """Answers to the next requests: an HTTP status, a key of ERROR_CODES, `hang` or `cut` (of a file's body)."""
        self.always: str | int | None = None
        """Answer to every request once `faults` is empty; None serves the files."""
        self.uploaded: dict[str, Repository] = {}
        """Repositories that were created, by name."""
        self.large: dict[str, bytes] = {}
        """Content of large files by its SHA-256."""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition('?')[0]
        body = request.rfile.read(int(request.headers.get('Content-Length', 0)))
        self.requests.append(f'{request.command} {path}')
        fault = self.faults.pop(0) if self.faults else self.always
        if fault == 'hang':
            time.sleep(1.5)
        elif isinstance(fault, int):
            self.send(request, fault, b'')
        elif fault in ERROR_CODES:
            status, code = ERROR_CODES[fault]
            self.send(request, status, b'', {'X-Error-Code': code})
        elif request.command in ('POST', 'PUT') or path == '/api/whoami-v2' or self._uploaded_at(path):
            self.take(request, path, body)
        elif path.startswith('/api/models/someone/model'):
            names = [str(each.relative_to(self.folder)) for each in sorted(self.folder.rglob('*')) if each.is_file()]
            content = {'id': 'someone/model', 'sha': COMMIT, 'siblings': [{'rfilename': name} for name in names]}
            self.send(request, 200, json.dumps(content).encode())
        elif path.startswith('/api/models/'):
            self.send(request, 404, b'', {'X-Error-Code': 'RepoNotFound'})
        else:
            file = self.folder / path.partition(f'/resolve/{COMMIT}/')[2]
            if not file.is_file():
                return self.send(request, 404, b'', {'X-Error-Code': 'EntryNotFound'})
            body = file.read_bytes()
            etag = hashlib.sha256(body).hexdigest()
            self.send(request, 200, body, {'X-Repo-Commit': COMMIT, 'ETag': f'"{etag}"'}, cut=fault == 'cut')

    def _uploaded_at(self, path: str) -> 'Repository | None':
        """Return the created repository that a path of the API is about, or None."""
        found = re.match(r'/api/models/([^/]+/[^/]+)', path)
        return None if found is None else self.uploaded.get(found[1])

    def take(self, request: BaseHTTPRequestHandler, path: str, body: bytes) -> None:
        """Answer a request of an upload, as huggingface_hub makes them; the owner of the token is `someone`."""
        if request.headers.get('Authorization') != f'Bearer {TOKEN}' and not path.startswith('/lfs/'):
            return self.send(request, 401, b'')
        repository = self._uploaded_at(path)
        content: dict[str, Any] = {}
        if path == '/api/whoami-v2':
            content = {'name': 'someone', 'orgs': [{'name': 'team'}]}
        elif path == '/api/repos/create':
            wanted = json.loads(body)
            if wanted['organization'] == 'team':
                return self.send(request, 403, b'')
            name = f'{wanted["organization"]}/{wanted["name"]}'
            status = 409 if name in self.uploaded else 200
            # huggingface_hub 0.36 sends the former, version 2 the latter.
            private = wanted.get('private') or wanted.get('visibility') == 'private'
            self.uploaded.setdefault(name, Repository(private=private))
            return self.send(request, status, json.dumps({'url': f'{self.url}/{name}'}).encode())
        elif path.endswith('/preupload/main'):
            files = [each['path'] for each in json.loads(body)['files']]
            modes = {name: 'lfs' if name.endswith('.safetensors') else 'regular' for name in files}
            content['files'] = [{'path': name, 'uploadMode': modes[name], 'shouldIgnore': False} for name in files]
        elif path.endswith('.git/info/lfs/objects/batch'):
            objects = json.loads(body)['objects']
            missing = [each for each in objects if each['oid'] not in self.large]
            for each in missing:
                each['actions'] = {'upload': {'href': f'{self.url}/lfs/{each["oid"]}'}}
            content = {'transfer': 'basic', 'objects': objects}
        elif path.startswith('/lfs/'):
            assert hashlib.sha256(body).hexdigest() == path.removeprefix('/lfs/')
            self.large[path.removeprefix('/lfs/')] = body
        elif path.endswith('/commit/main'):
            assert repository is not None
            for line in map(json.loads, body.splitlines()):
                value = line['value']
                if line['key'] == 'file':
                    repository.files[value['path']] = base64.b64decode(value['content'])
                elif line['key'] == 'lfsFile':
                    repository.files[value['path']] = self.large[value['oid']]
            name = path.removeprefix('/api/models/').partition('/commit/')[0]
            content = {'commitUrl': f'{self.url}/{name}/commit/{COMMIT}', 'commitOid': COMMIT}
        elif repository is not None:
            siblings = [{'rfilename': name} for name in repository.files]
            content = {'id': path, 'sha': COMMIT, 'private': repository.private, 'siblings': siblings}
        self.send(request, 200, json.dumps(content).encode())


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    """Context with a running `Hub` that serves the files of a folder."""
    hub = Hub(folder)
    try:
        yield hub
    finally:
        hub.close()


@contextlib.contextmanager
def serving(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Context with a running `Hub`, which huggingface_hub uses with an empty cache and retries without pauses."""
    # Imported here, because programs that only serve start faster without.
    from huggingface_hub import constants

    from diffusion.models import hub_files
    from diffusion.storage import retry
    from diffusion.storage.retry import RetryPolicy

    with serve(folder) as server:
        set_address(server.url, monkeypatch.setattr)
        monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'cache'))
        monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
        monkeypatch.setattr(constants, 'HF_HUB_ETAG_TIMEOUT', 0.3)
        monkeypatch.setattr(constants, 'HF_HUB_DOWNLOAD_TIMEOUT', 0.3)
        monkeypatch.setattr(retry, 'LONGEST_PAUSE_SECONDS', 0.01)
        monkeypatch.setattr(hub_files, 'POLICY', RetryPolicy(tries=3, timeout_seconds=0.3))
        skip_certificates(monkeypatch)
        forget_sessions()
        yield server
    forget_sessions()


@contextlib.contextmanager
def logged_in(folder: Path, monkeypatch: Any) -> Iterator[Hub]:
    """Context with a running `Hub` that huggingface_hub uses with the token of `someone`."""
    from huggingface_hub import constants

    with serve(folder) as hub:
        monkeypatch.setattr(constants, 'ENDPOINT', hub.url)
        monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
        monkeypatch.setattr(constants, 'HF_TOKEN_PATH', str(folder / 'no-token'))
        monkeypatch.setattr(constants, 'HF_HUB_DISABLE_XET', True)  # the server has the older protocol
        monkeypatch.setenv('HF_TOKEN', TOKEN)
        skip_certificates(monkeypatch)
        forget_sessions()
        yield hub
    forget_sessions()
