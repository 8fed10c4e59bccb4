"""Subcommand `diffusion report`, and its read-only server for this machine or, with a token, for others."""

import contextlib
import gzip
import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from diffusion.config.declarations import Between
from diffusion.config.options import Option, Port
from diffusion.config.schema import did_you_mean
from diffusion.errors import ExternalError, UserError
from diffusion.evaluation.page_server import PageServer
from diffusion.report.page import json_text, report_page
from diffusion.report.report_source import REPORT, Page, ReportSource, RunsSource, TableSource, runs_in, written_report
from diffusion.report.run_reader import looks_like_a_run
from diffusion.storage.atomic import write_atomically
from diffusion.storage.local_files import check_writable
from diffusion.storage.places import PATIENT, files_of_run, is_url


@dataclass(frozen=True)
class ReportOptions:
    """Options of `diffusion report`."""

    runs: Annotated[list[str], Option('RUN', positional=True, files=True)]
    """Folder or URL of a run, of several runs to compare them, or of a folder that contains runs, for a table."""
    out: Path | None = None
    """HTML file to write (default: report.html in the run's folder; for several runs, report.html in the current
    folder; for a URL, NAME-report.html in the current folder)."""
    price: Annotated[float | None, Between(0, 1e6), Option('USD')] = None
    """Price per GPU-hour in US dollars (default: the GPU's price in planning/gpus.yaml, if known)."""
    serve: bool = False
    """Serve the page, which then updates itself; stop with Ctrl-C."""
    port: Port = 8265
    """Port for --serve; 0 means any free port."""
    host: str = '127.0.0.1'
    """Address to listen on for --serve; addresses other than localhost require the printed token."""


def run_report(options: ReportOptions) -> int:
    """Run `diffusion report`: write a page and print its path, or serve it until Ctrl-C."""
    places = [place.rstrip('/') or place for place in options.runs]
    if len({*places}) < len(places):
        twice = next(place for place in places if places.count(place) > 1)
        raise UserError(f'report: {twice} is given twice; give each run once')
    is_table = len(places) == 1 and not _is_run(places[0])
    if options.serve:
        return _serve(options, places, is_table=is_table)
    out = options.out or _default_path(places)
    if out.is_dir():
        raise UserError(f'--out: {out} is a folder; give the path of a file, such as {out / REPORT}')
    if is_table:
        # Links are relative to the page, so they work only if the page is in the folder that contains the runs.
        beside = not is_url(places[0]) and out.absolute().parent == Path(places[0]).absolute()
        link = (lambda name: written_report(places[0], name)) if beside else (lambda name: None)
        source: ReportSource = TableSource(places[0], price=options.price, link=link)
    else:
        source = RunsSource(places, price=options.price)
    check_writable(out.parent, '--out')
    html = source.write()
    try:
        write_atomically(out, html)
    except OSError as error:
        raise ExternalError(f'{out}: cannot be written ({error.strerror})') from error
    print(out)
    return 0


def _is_run(place: str) -> bool:
    if not is_url(place) and not Path(place).is_dir():
        parent = Path(place).parent
        near = [str(each) for each in parent.iterdir() if each.is_dir()] if parent.is_dir() else []
        hint = f'; {did_you_mean(place, near)}' if near else ''
        raise UserError(f'report: {place} is not a folder{hint}')
    try:
        if looks_like_a_run(files_of_run(place, PATIENT).list()):
            return True
    except OSError:
        pass  # `runs_in` lists the folder again and raises UserError if it cannot be read
    runs_in(place)
    return False


def _default_path(places: list[str]) -> Path:
    if len(places) > 1:
        return Path(REPORT)

    place = places[0]
    return Path(f'{place.rpartition("/")[2]}-{REPORT}') if is_url(place) else Path(place, REPORT)


def _serve(options: ReportOptions, places: list[str], *, is_table: bool) -> int:

    seconds = BUCKET_SECONDS if any(map(is_url, places)) else POLL_SECONDS
    source: ReportSource = RunsSource(places, price=options.price)
    if is_table:
        source = TableSource(places[0], price=options.price, link=run_address)
    main = ServedPage(source, seconds)

    @cache
    def page_of(name: str) -> ServedPage:
        return ServedPage(RunsSource([f'{places[0]}/{name}'], price=options.price), seconds)

    def run_page(name: str) -> ServedPage | None:
        # Accept only names in the table: other names could lead outside the folder.
        return page_of(name) if is_table and name in {row['name'] for row in main.content().data['rows']} else None

    main.content()  # fail before the server starts if a run cannot be read
    with contextlib.suppress(KeyboardInterrupt), ReportServer(options.host, options.port, main, run_page) as server:
        print(f'{", ".join(places)}: {server.url} (Ctrl-C ends it)', flush=True)
        server.serve_forever(0.2)
    return 0


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
