"""Base of small HTTP servers on localhost, whose answers a subclass decides."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error, unless the client has only closed its connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class LocalServer:
    """Server in a thread that calls `answer` for each request, which adds its method and path to `requests`."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                server.answer(self)

            do_GET = do_POST = do_PUT = do_HEAD

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = _Server(('127.0.0.1', 0), Handler)
        self.url = f'http://127.0.0.1:{self._server.server_port}'
        threading.Thread(target=self._server.serve_forever, kwargs={'poll_interval': 0.02}, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        raise NotImplementedError

    def send(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: Any = None, *, cut: bool = False
    ) -> None:
        """Send an answer; `cut` closes the connection after half of the body."""
        request.send_response(status)
        for name, value in {'Content-Length': str(len(body)), **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != 'HEAD':
            request.wfile.write(body[: len(body) // 2] if cut else body)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
