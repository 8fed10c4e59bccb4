"""HTTP server that serves one comparison page and collects its answers, one file per person.

It serves nothing else, uses no path from a request, and rejects requests without the comparison's token.
"""

import hmac
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from diffusion.errors import UserError
from diffusion.evaluation.comparison_answers import MAX_BYTES, QUESTIONS, Answer, answers_json, parse_answers
from diffusion.evaluation.comparison_page import ComparisonKey
from diffusion.evaluation.page_server import PageServer
from diffusion.storage.atomic import write_atomically

log = logging.getLogger(__name__)

MAX_RATERS = 10_000
"""Maximum number of raters, so that nobody with the token can fill the disk."""
TIMEOUT_SECONDS = 30.0


class Refused(Exception):
    """Raised to reject a request, with the HTTP status and a message for the rater."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class AnswerFolder:
    """Folder with one file of answers per rater, named by the rater's random ID; created with the first file."""

    def __init__(self, folder: Path, key: ComparisonKey) -> None:
        self.folder, self.key = folder, key
        self._lock = threading.Lock()

    def save(self, body: bytes) -> None:
        """Validate and save answers sent by a page; they replace the same rater's earlier answers.

        Raises:
            Refused: The answers are not valid, or fewer than the rater's earlier answers, which are then kept.
        """
        try:
            answers = self._parse(body, 'these answers')
        except UserError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from error
        if not answers:
            raise Refused(HTTPStatus.BAD_REQUEST, 'these answers are empty')
        rater = answers[0].rater  # `rater` is 16 hex digits, so the path stays inside the folder
        path = self.folder / f'{rater}.json'
        with self._lock:
            before = 0
            if path.exists():
                with suppress(UserError):  # if the file was modified by hand, replace it
                    before = len(self._parse(path.read_bytes(), str(path)))
                if before > len(answers):
                    raise Refused(HTTPStatus.CONFLICT, 'more of your answers were saved earlier; those are kept')
            elif len(self.files()) >= MAX_RATERS:
                raise Refused(HTTPStatus.INSUFFICIENT_STORAGE, f'{MAX_RATERS} people have answered already')
            try:
                write_atomically(path, answers_json(self.key.comparison, rater, answers))
            except OSError as error:
                log.error('%s: cannot be written (%s)', path, error.strerror)
                text = f'the server could not write them ({error.strerror})'
                raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, text) from error
        total = len(QUESTIONS) * len(self.key.pairs)
        # Log only a rater's first and last save: a page sends all its answers after every pair.
        if before == 0 or before < total == len(answers):
            log.info('%s: %d of %d answers', rater, len(answers), total)

    def files(self) -> list[Path]:
        return sorted(self.folder.glob('*.json'))

    def _parse(self, body: bytes, where: str) -> list[Answer]:
        return parse_answers(body, where, self.key.comparison, len(self.key.pairs))


def make_server(page: bytes, answers: AnswerFolder, *, host: str, port: int) -> PageServer:
    """Return a server for one page and its answers, bound to its address."""

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = 'comparison', ''
        timeout = TIMEOUT_SECONDS

        def do_GET(self) -> None:
            self._reply(self._page)

        def do_POST(self) -> None:
            self._reply(self._save)

        def _page(self) -> tuple[str, bytes]:
            if urlsplit(self.path).path != '/':
                raise Refused(HTTPStatus.NOT_FOUND, 'there is only one page, at /')
            return 'text/html; charset=utf-8', page

        def _save(self) -> tuple[str, bytes]:
            if urlsplit(self.path).path != '/answers':
                raise Refused(HTTPStatus.NOT_FOUND, 'answers go to /answers')
            length = self.headers.get('Content-Length', '')
            if not (length.isascii() and length.isdecimal()):
                raise Refused(HTTPStatus.LENGTH_REQUIRED, 'the length of the answers is missing')
            if len(length) > 12 or int(length) > MAX_BYTES:
                raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f'answers have at most {MAX_BYTES} bytes')
            answers.save(self.rfile.read(int(length)))
            return 'text/plain; charset=utf-8', b'saved'

        def _check_token(self) -> None:
            given = parse_qs(urlsplit(self.path).query).get('token', [''])[0]
            if not hmac.compare_digest(given.encode('utf-8', 'replace'), answers.key.token.encode()):
                text = 'this link is incomplete or belongs to another page; ask for a new one'
                raise Refused(HTTPStatus.FORBIDDEN, text)

        def _reply(self, respond: Callable[[], tuple[str, bytes]]) -> None:
            status = HTTPStatus.OK
            try:
                self._check_token()
                kind, body = respond()
            except Refused as refused:
                status, kind, body = refused.status, 'text/plain; charset=utf-8', str(refused).encode()
                self.close_connection = True
                log.warning('refused a request of %s: %s', self.client_address[0], refused)
            self.send_response(status)
            headers = {'Content-Type': kind, 'Content-Length': str(len(body)), 'Cache-Control': 'no-store'}
            headers |= {'X-Content-Type-Options': 'nosniff', 'Referrer-Policy': 'no-referrer', 'Connection': 'close'}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the base class would print URLs, which contain the token."""

    return PageServer(host, port, Handler)
