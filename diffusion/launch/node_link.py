"""Connection between the nodes of a job, used to report failures to each other and to agree on a restart in place.

Every node entry point connects to the first node's, on port MASTER_PORT + 1. A node reports the first failure among its
ranks immediately, and later that all its ranks have ended. The first node forwards the failure. When the ranks of all
nodes have ended, it tells the nodes to restart; if a node cannot restart, is lost, or does not end its ranks in time,
it tells the nodes to exit, so that the scheduler restarts the job.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from diffusion.exit_codes import BAD_HARDWARE, PREEMPTED
from diffusion.launch.exit_file import NodeExit
from diffusion.launch.rank_discovery import MAX_PORT, NodePosition

HELLO_SECONDS = 10.0
"""Time within which a new connection must identify its node."""
CONNECT_SECONDS = 900.0
"""Time within which all nodes must have connected; the slowest may have to pull its image first."""
RETRY_SECONDS = 1.0
AGREE_SECONDS = 90.0
"""Maximum time between the first and the last node to end its ranks; longer than `workers.KILL_SECONDS`."""
_MAX_BYTES = 65536
_END: dict[str, type] = {'attempt': int, 'status': int, 'machine': str, 'cause': str, 'detail': str}
_KEYS: dict[str, dict[str, type]] = {
    'hello': {'job': str, 'node': int},
    'welcome': {},
    'failed': _END,
    'ended': _END | {'problem': str},
    'decided': {'attempt': int, 'restart': bool, 'reason': str},
}
"""Keys of each message, by its `event`, and their types. Messages are checked against them because any program may
connect to the port."""
_ORDER = ('mistake', 'hardware', 'killed')
"""Causes that are reported rather than others, in this order: failures reported earlier may be their consequences."""


@dataclass(frozen=True)
class Agreement:
    restart: bool
    first: NodeExit | None = None
    reason: str = ''
    """Reason why the nodes do not restart in place; empty if they do."""


class NodeLink:
    def __init__(self, position: NodePosition, job: str, say: Callable[[str], None]) -> None:
        self._position, self._job, self._say = position, job, say
        self._changed = threading.Condition()
        self._socket: socket.socket | None = None
        self._welcome = False
        self._lost = ''
        self._failures: dict[int, NodeExit] = {}
        self._agreements: dict[int, Agreement] = {}
        self._closed = False
        self._hub: _Hub | None = None
        port = position.master_port + 1 if position.master_port < MAX_PORT else position.master_port - 1
        if position.rank == 0:
            try:
                self._hub = _Hub(port, position.nodes, job)
            except OSError as error:
                self._lost = f'port {port} is not free ({error})'
                say(f'no restart in place is possible: {self._lost}')
                return
        threading.Thread(target=self._run, args=(port,), name='node-link', daemon=True).start()

    @property
    def connected(self) -> bool:
        with self._changed:
            return self._welcome and not self._lost

    def report_failure(self, attempt: int, failure: NodeExit) -> None:
        self._send({'event': 'failed', 'attempt': attempt, **asdict(failure)})

    def failure(self, attempt: int) -> NodeExit | None:
        """Return the first failure on another node in an attempt, or None."""
        with self._changed:
            return self._failures.get(attempt)

    def agree(self, attempt: int, end: NodeExit, problem: str, poll: Callable[[], bool]) -> Agreement:
        """Report that this node's ranks have ended, and wait until the first node decides whether all restart in place.

        The wait ends early if `poll` returns True: this node was asked to stop.
        """
        if unsent := self._send({'event': 'ended', 'attempt': attempt, 'problem': problem, **asdict(end)}):
            return Agreement(False, reason=unsent)
        until = time.monotonic() + AGREE_SECONDS + RETRY_SECONDS
        with self._changed:
            while attempt not in self._agreements and not self._lost and time.monotonic() < until:
                self._changed.wait(RETRY_SECONDS)
                if poll():
                    return Agreement(False, reason='this node was asked to stop')
            return self._agreements.get(attempt, Agreement(False, reason=self._lost or 'the other nodes do not answer'))

    def close(self) -> None:
        """Leave the job; after that, the other nodes no longer restart in place."""
        self._closed = True
        with self._changed:
            if self._socket is not None:
                _shut(self._socket)
        if self._hub is not None:
            self._hub.close()

    def _send(self, message: dict[str, Any]) -> str:
        """Send a message to the first node; return the reason if that fails, else an empty string."""
        with self._changed:
            if self._lost or self._socket is None or not self._welcome:
                return self._lost or 'this node has no connection to the first node'
            try:
                _send(self._socket, message)
            except OSError as error:
                return f'the connection to the first node is lost ({error})'
            return ''

    def _run(self, port: int) -> None:
        """Connect, and handle messages from the first node until the connection ends."""
        until, address = time.monotonic() + CONNECT_SECONDS, self._position.master_addr
        address = '127.0.0.1' if self._position.rank == 0 else address
        connection: socket.socket | None = None
        while connection is None and not self._closed:
            try:
                connection = socket.create_connection((address, port), timeout=10)
            except OSError as error:
                if time.monotonic() > until:
                    self._say(f'no restart in place is possible: {address}:{port} does not answer ({error})')
                    return
                time.sleep(RETRY_SECONDS)
        if connection is None:
            return
        connection.settimeout(None)
        _keep_alive(connection)
        with self._changed:
            self._socket = connection
        with contextlib.suppress(OSError):
            _send(connection, {'event': 'hello', 'job': self._job, 'node': self._position.rank})
        for message in _messages(connection):
            with self._changed:
                if message['event'] == 'welcome':
                    self._welcome = True
                elif message['event'] == 'failed' and message.get('node') != self._position.rank:
                    self._failures.setdefault(message['attempt'], _exit_of(message))
                elif message['event'] == 'decided':
                    first = message.get('first')
                    first = _exit_of(first) if isinstance(first, dict) else None
                    self._agreements[message['attempt']] = Agreement(message['restart'], first, message['reason'])
                self._changed.notify_all()
        with self._changed:
            self._lost = self._lost or 'the connection to the first node is lost'
            self._changed.notify_all()


class _Hub:
    """Server on the first node, which forwards failures to the other nodes and decides about restarts."""

    def __init__(self, port: int, nodes: int, job: str) -> None:
        self._nodes, self._job = nodes, job
        self._lock = threading.Lock()
        self._connections: dict[int, socket.socket] = {}
        self._gone = ''
        self._failed: dict[int, dict[int, NodeExit]] = {}
        self._ended: dict[int, dict[int, str]] = {}
        self._decided: set[int] = set()
        backlog = max(128, nodes)
        try:
            self._listener = socket.create_server(
                ('', port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
        except (OSError, ValueError):  # works without IPv6; fails again if the port is taken
            self._listener = socket.create_server(('', port), backlog=backlog)
        threading.Thread(target=self._accept, name='node-hub', daemon=True).start()

    def close(self) -> None:
        _shut(self._listener)
        with self._lock:
            for connection in self._connections.values():
                _shut(connection)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                connection, _ = self._listener.accept()
                _keep_alive(connection)
                threading.Thread(target=self._serve, args=(connection,), name='node-hub', daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        messages = _messages(connection)
        connection.settimeout(HELLO_SECONDS)  # the peer may be any program
        hello = next(messages, {})
        connection.settimeout(None)
        node = hello.get('node', -1)
        if hello.get('event') != 'hello' or hello['job'] != self._job or node not in range(self._nodes):
            _shut(connection)
            return
        with self._lock, contextlib.suppress(OSError):
            self._connections[node] = connection
            _send(connection, {'event': 'welcome'})
        for message in messages:
            if message['event'] not in ('failed', 'ended'):
                break
            attempt = message['attempt']
            with self._lock:
                failed = self._failed.setdefault(attempt, {})
                # Forward only failures: after an orderly end, the ranks of the other nodes are still saving.
                if node not in failed and message['status'] not in (0, PREEMPTED, BAD_HARDWARE):
                    self._broadcast(message | {'event': 'failed', 'node': node})
                failed[node] = _exit_of(message)
                if message['event'] == 'ended':
                    self._ended.setdefault(attempt, {})[node] = message['problem']
                    # The time limit starts when any node is the first to report that its ranks have ended.
                    if len(self._ended[attempt]) == 1:
                        timer = threading.Timer(AGREE_SECONDS, self._decide, (attempt, True))
                        timer.daemon = True
                        timer.start()
            self._decide(attempt)
        with self._lock:
            self._gone = self._gone or f'node {node} is gone'
            pending = self._ended.keys() - self._decided
        for attempt in pending:
            self._decide(attempt)

    def _decide(self, attempt: int, late: bool = False) -> None:
        """Decide if all nodes restart as soon as this is certain; `late` means that AGREE_SECONDS have passed."""
        with self._lock:
            ended = self._ended.get(attempt, {})
            missing = sorted({*range(self._nodes)} - ended.keys())
            problems = [f'node {node}: {problem}' for node, problem in sorted(ended.items()) if problem]
            problems += [self._gone] * bool(self._gone)
            if late and missing:
                problems.append(f'node {", ".join(map(str, missing))} has not ended after {AGREE_SECONDS:.0f} s')
            # A restart requires that all nodes have ended their ranks; one problem suffices to decide against it.
            if attempt in self._decided or (missing and not problems):
                return
            self._decided.add(attempt)
            found = list(self._failed[attempt].values())  # within a cause, in the order of the reports
            explained = (each for cause in _ORDER for each in found if each.cause == cause)
            first = next(explained, next((each for each in found if each.status), None))
            message = {'event': 'decided', 'attempt': attempt, 'restart': not problems}
            self._broadcast(message | {'first': first and asdict(first), 'reason': '; '.join(problems)})

    def _broadcast(self, message: dict[str, Any]) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # the connection's own thread notices that the node is gone
                _send(connection, message)


def _exit_of(message: dict[str, Any]) -> NodeExit:
    return NodeExit(*(message[name] for name in ('status', 'machine', 'cause', 'detail')))


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b'\n')


def _messages(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the messages of a connection until it ends or sends an invalid message."""
    with contextlib.suppress(OSError, ValueError, RecursionError), connection.makefile('rb') as lines:
        while line := lines.readline(_MAX_BYTES):
            message = json.loads(line)
            if not isinstance(message, dict):
                return
            event = message.get('event')
            if event not in _KEYS or any(not isinstance(message.get(key), kind) for key, kind in _KEYS[event].items()):
                return
            yield message


def _keep_alive(connection: socket.socket) -> None:
    """Enable TCP keep-alive, so that reads fail within a minute after the other machine is lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (('TCP_KEEPIDLE', 20), ('TCP_KEEPINTVL', 10), ('TCP_KEEPCNT', 4)):
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _shut(connection: socket.socket) -> None:
    """Close a socket, and wake the thread that waits for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
