"""Read-only HTTP server for live report pages, for this machine or, with a token, for others."""

import contextlib
import gzip
import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from diffusion.errors import ExternalError, UserError
from diffusion.evaluation.page_server import PageServer
from diffusion.report.page import json_text, report_page
from diffusion.report.report_source import Page, ReportSource

POLL_SECONDS = 5.0
BUCKET_SECONDS = 60.0
"""Interval between reads of an object store: runs copy files there about once per minute, and each read costs money."""
LOCAL_HOSTS = ('127.0.0.1', 'localhost', '::1')


class ServedPage:
    """Page whose content is read when a request needs it, but at most once per interval of `seconds`."""

    def __init__(self, source: ReportSource, seconds: float) -> None:
        self.source, self.seconds = source, seconds
        self._lock = threading.Lock()
        self._page: Page | None = None
        self._read_at = 0.0

    def content(self) -> Page:
        """Return the content, at most `seconds` old; while the storage fails, return the last content, if any."""
        with self._lock:
            if self._page is None or time.monotonic() - self._read_at >= self.seconds * 0.8:
                try:
                    self._page = self.source.read()
                except (UserError, ExternalError) as error:
                    if self._page is None:
                        raise
                    notes = [run['notes'] for run in self._page.data.get('runs', [])] or [self._page.data['notes']]
                    notes[0][:] = [str(error), *(note for note in notes[0] if note != str(error))][:20]
                self._read_at = time.monotonic()
            return self._page


class ReportServer(PageServer):
    """Server for a report page at `/` and, if it is a table of runs, for each run's page at `/run/NAME/`.

    Args:
        host: Address to listen on; for addresses other than localhost, the page's URL contains a token.
        port: Port; 0 means any free port.
        run_page: Function that returns a run's page by name, or None if the run does not exist.
    """

    daemon_threads = True

    def __init__(
        self, host: str, port: int, main: ServedPage, run_page: Callable[[str], ServedPage | None] = lambda name: None
    ) -> None:
        self.main, self.run_page = main, run_page
        self.is_local = host in LOCAL_HOSTS
        self.token = '' if self.is_local else secrets.token_urlsafe(16)
        super().__init__(host, port, _Handler)

    @property
    def url(self) -> str:
        host, port = self.server_address[0], self.server_address[1]
        host = socket.gethostname() if host in ('0.0.0.0', '::') else str(host)
        text = f'[{host}]' if ':' in host else host
        return f'http://{text}:{port}/' + (f'?token={self.token}' if self.token else '')


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer  # type: ignore[assignment]
    protocol_version = 'HTTP/1.1'
    timeout = 60

    def do_GET(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):  # ignore that the browser closed the connection
            self._answer()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: each open page sends a request every few seconds."""

    def _answer(self) -> None:
        url = urlsplit(self.path)
        if not self._is_allowed(parse_qs(url.query)):
            return self._send(HTTPStatus.FORBIDDEN, b'open the address that the server has printed\n', 'text/plain')
        path, page = url.path, self.server.main
        if path.startswith('/run/'):
            name, _, path = path.removeprefix('/run/').partition('/')
            page, path = self.server.run_page(unquote(name)), f'/{path}'
        if page is None:
            return self._send(HTTPStatus.NOT_FOUND, b'no such run\n', 'text/plain')
        try:
            content = page.content()
        except (UserError, ExternalError) as error:
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE, f'{error}\n'.encode(), 'text/plain; charset=utf-8')
        if path == '/':
            html = report_page(
                content.data, title=page.source.title, places=page.source.places, live_seconds=page.seconds
            )
            return self._send(HTTPStatus.OK, html.encode(), 'text/html; charset=utf-8')
        if path == '/data.json':
            body = json_text(content.data).encode()
            # Compute the ETag without the time of reading, which changes even if the run does not.
            same = json_text({key: each for key, each in content.data.items() if key != 'generated'}).encode()
            tag = f'"{hashlib.sha256(same).hexdigest()[:32]}"'
            if self.headers.get('If-None-Match') == tag:
                return self._send(HTTPStatus.NOT_MODIFIED, b'', 'application/json', tag=tag)
            return self._send(HTTPStatus.OK, body, 'application/json', tag=tag)
        image = content.images.get(path.removeprefix('/images/').removesuffix('.webp'))
        if image is None or not path.startswith('/images/'):
            return self._send(HTTPStatus.NOT_FOUND, b'not found\n', 'text/plain')
        # The image's name is a hash of its content, so the browser may cache it.
        return self._send(HTTPStatus.OK, image, 'image/webp', cache='private, max-age=86400, immutable')

    def _is_allowed(self, query: dict[str, list[str]]) -> bool:
        """Return True if a request has the token or, if the server has none, a local host name in its Host header."""
        if self.server.token:
            given = (query.get('token') or [''])[0]
            return hmac.compare_digest(given.encode(), self.server.token.encode())
        # Prevent DNS rebinding: if another site's name resolves to this machine, its page sends that name as Host.
        host = self.headers.get('Host', '').rsplit(':', 1)[0].strip('[]')
        return host in LOCAL_HOSTS

    def _send(self, status: HTTPStatus, body: bytes, kind: str, *, cache: str = 'no-store', tag: str = '') -> None:
        compressed = len(body) > 4096 and 'gzip' in self.headers.get('Accept-Encoding', '') and kind != 'image/webp'
        if compressed:
            body = gzip.compress(body, compresslevel=1)
        self.send_response(status)
        headers = {'Content-Type': kind, 'Content-Length': str(len(body)), 'Cache-Control': cache}
        headers |= {'X-Content-Type-Options': 'nosniff', 'Referrer-Policy': 'no-referrer', 'X-Frame-Options': 'DENY'}
        headers |= {'Content-Encoding': 'gzip'} if compressed else {}
        headers |= {'ETag': tag} if tag else {}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body)


def run_address(name: str) -> str:
    return f'run/{quote(name, safe="")}/'
