"""HTTP server for a page, with a clear error message if its address cannot be used."""

import socket
import socketserver
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from diffusion.errors import UserError


class PageServer(ThreadingHTTPServer):
    """Server bound to its address; call `serve_forever` to start it.

    Args:
        host: Address to listen on; `0.0.0.0` means all addresses of this machine.
        port: Port; 0 means any free port.

    Raises:
        UserError: The port is in use, or the address does not belong to this machine.
    """

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        if ':' in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), handler)
        except OSError as error:
            problem = f'cannot serve on {host}:{port} ({error.strerror or error})'
            remedy = 'use another one (0 for any that is free), or another --host'
            # Raise `from None`: with an OSError as cause, this user error would be classified as a transient fault.
            raise UserError(f'--port: {problem}; {remedy}') from None

    def server_bind(self) -> None:
        """Bind the socket; unlike the base class, do not look up the host name of the address by DNS."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        # A browser closing its connection is not an error, but the base class would print a traceback.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]
