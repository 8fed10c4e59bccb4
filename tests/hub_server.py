"""A small Hugging Face Hub on localhost that serves one repository and misbehaves on request."""

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = 'c0ffee' + '0' * 34
ERROR_CODES = {
    'gated': (403, 'GatedRepo'),
    'no-repository': (401, 'RepoNotFound'),
    'no-revision': (404, 'RevisionNotFound'),
}


class Hub:
    """Server of the files in a folder as the repository `someone/model`, with a script of misbehavior.

    Args:
        folder: Files of the repository.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults: list[str | int] = []
        """Answers to the next requests: an HTTP status, a key of ERROR_CODES, `hang` or `cut` (of a file's body)."""
        self.always: str | int | None = None
        """Answer to every request once `faults` is empty; None serves the files."""
        self.requests: list[str] = []
        """Method and path of every request so far."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self.url = f'http://127.0.0.1:{self.server.server_port}'
        threading.Thread(target=self.server.serve_forever, kwargs={'poll_interval': 0.02}, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition('?')[0]
        self.requests.append(f'{request.command} {path}')
        fault = self.faults.pop(0) if self.faults else self.always
        if fault == 'hang':
            time.sleep(1.5)
        elif isinstance(fault, int):
            self.send(request, fault, b'')
        elif fault in ERROR_CODES:
            status, code = ERROR_CODES[fault]
            self.send(request, status, b'', {'X-Error-Code': code})
        elif path.startswith('/api/models/someone/model'):
            names = [str(each.relative_to(self.folder)) for each in sorted(self.folder.rglob('*')) if each.is_file()]
            content = {'id': 'someone/model', 'sha': COMMIT, 'siblings': [{'rfilename': name} for name in names]}
            self.send(request, 200, json.dumps(content).encode())
        else:
            file = self.folder / path.partition(f'/resolve/{COMMIT}/')[2]
            if not file.is_file():
                return self.send(request, 404, b'', {'X-Error-Code': 'EntryNotFound'})
            body = file.read_bytes()
            etag = hashlib.sha256(body).hexdigest()
            self.send(request, 200, body, {'X-Repo-Commit': COMMIT, 'ETag': f'"{etag}"'}, cut=fault == 'cut')

    def send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        *,
        cut: bool = False,
    ) -> None:
        request.send_response(status)
        for name, value in {'Content-Length': str(len(body)), **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != 'HEAD':
            request.wfile.write(body[: len(body) // 2] if cut else body)


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    """Context with a running `Hub` that serves the files of a folder."""
    hub = Hub(folder)
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
