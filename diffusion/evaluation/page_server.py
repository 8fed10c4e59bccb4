"""HTTP server of a page, bound to an address with a clear message if that fails."""

import socket
import socketserver
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from diffusion.errors import UserError


class PageServer(ThreadingHTTPServer):
    """Server that is bound to its address; `serve_forever` serves.

    Args:
        host: Address to listen at; `0.0.0.0` for all of this machine.
        port: Port; 0 for any free one.

    Raises:
        UserError: The port is in use, or the address is not one of this machine.
    """

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        if ':' in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), handler)
        except OSError as error:
            problem = f'cannot serve on {host}:{port} ({error.strerror or error})'
            remedy = 'use another one (0 for any that is free), or another --host'
            # Raise `from None`: with the OSError as its cause, this mistake would be classified as a transient fault.
            raise UserError(f'--port: {problem}; {remedy}') from None

    def server_bind(self) -> None:
        """Bind the socket, without asking a name server for the name of the address as the base class does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        # A browser that closes its connection is not an error; the base class would print its traceback.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]
