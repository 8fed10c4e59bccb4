"""Status of each node in training, in small JSON files in the run's folder, which `diffusion status` reads.

The first rank of each node rewrites `status/node-N.json` about every ten seconds, in a separate thread, because storage
that hangs must not block training.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from diffusion.runs import run_lock
from diffusion.storage.places import files_of_run, is_url

FOLDER = 'status'
NODE_VARIABLE = 'DIFFUSION_NODE'
"""Environment variable that the node entry point sets for its workers: node index and number of nodes, such as
`0/16`."""
INTERVAL_SECONDS = 10.0
"""Longest interval between two writes; the interval starts at one second and doubles after each write."""
BUCKET_INTERVAL_SECONDS = 30.0
"""Longest interval for an object store, which charges for requests: 120 writes per hour and node, each a PUT and a GET
request, cost 0.0006 USD in S3."""
_JOIN_SECONDS = 3.0
"""Maximum wait for the last write, so that storage that hangs does not delay the end of the run."""
STARTING, TRAINING, EVALUATING, SAVING, ENDED = 'starting', 'training', 'evaluating', 'saving', 'ended'


@dataclass
class NodeStatus:
    """Content of a node's status file. Elapsed times are in seconds on the node's monotonic clock.

    Attributes:
        node: Index of the node, from 0.
        pid: Process that wrote the file, the first rank of the node.
        boot: Boot id of the machine; processes with the same boot id share the monotonic clock.
        owner: Token in the run's lock when the process started training; empty if it could not be read.
        doing: starting, training, evaluating, saving or ended.
        batch: Number of batches that the run has completed.
        total_batches: Number of batches of the whole training, or None if unknown.
        seconds_per_batch: Recent average without evaluations and saves, or None before the second batch.
        seconds_since_batch: Time from the end of the last batch (or the start of training) to this write.
        written_at: Time of this write on the node's monotonic clock.
        written: Time of this write in seconds since 1970.
    """

    node: int
    nodes: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    boot: str = field(default_factory=run_lock.boot_id)
    owner: str = ''
    doing: str = STARTING
    batch: int = 0
    total_batches: int | None = None
    seconds_per_batch: float | None = None
    seconds_since_batch: float = 0.0
    written_at: float = 0.0
    written: float = 0.0

    def silent_seconds(self, modified: float | None) -> float:
        """Return the time since the node's last batch; `modified` is when the file was written, None if unknown."""
        same_clock = bool(self.boot) and self.boot == run_lock.boot_id()
        written = self.written if modified is None else modified
        age = time.monotonic() - self.written_at if same_clock else time.time() - written
        return self.seconds_since_batch + max(0.0, age)


def position_of_node(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return the index of this rank's node and the number of nodes; None if this is not the first rank of its node."""
    rank, world = int(environ.get('RANK', '0')), int(environ.get('WORLD_SIZE', '1'))
    if NODE_VARIABLE in environ:
        # Nodes of a local job share one machine, so LOCAL_RANK numbers the ranks of all nodes together.
        node, nodes = map(int, environ[NODE_VARIABLE].split('/'))
        return (node, nodes) if rank == node * (world // nodes) else None
    local_world = int(environ.get('LOCAL_WORLD_SIZE', '1'))
    nodes = max(1, world // local_world)
    return (rank // local_world, nodes) if rank % local_world == 0 else None


class StatusWriter:
    """Thread that writes this node's status to the run's folder; the training thread updates the status.

    Args:
        on_write: Function that is called in the thread after each write.
    """

    def __init__(self, run: Path | str, status: NodeStatus, *, on_write: Callable[[], None] = lambda: None) -> None:
        self.run, self.status, self.on_write = run, status, on_write
        self.last_batch_at = time.monotonic()
        """Time when the last batch ended, on the monotonic clock."""
        self._created = False
        """True once the status has been written, so that its folder exists."""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._write_until_done, name='status', daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write the status for the last time, and wait at most a few seconds for this."""
        self.status.doing = ENDED
        self._done.set()
        self._thread.join(_JOIN_SECONDS)

    def _write_until_done(self) -> None:
        owner = run_lock.owner_of(self.run)
        self.status.owner = '' if owner is None else owner.token
        interval = 1.0
        while True:
            done = self._done.is_set()
            self._write()
            self.on_write()
            if done:
                return
            self._done.wait(interval)
            interval = min(BUCKET_INTERVAL_SECONDS if is_url(self.run) else INTERVAL_SECONDS, 2 * interval)

    def _write(self) -> None:
        now = time.monotonic()
        self.status.seconds_since_batch = now - self.last_batch_at
        self.status.written_at, self.status.written = now, time.time()
        with contextlib.suppress(OSError):  # the disk may be full, or the storage temporarily unavailable
            # If the run's folder has been unmounted, do not create it.
            if self._created and not is_url(self.run) and not (Path(self.run) / FOLDER).is_dir():
                return
            name = f'{FOLDER}/node-{self.status.node}.json'
            files_of_run(self.run).write(name, json.dumps(asdict(self.status)) + '\n', flush=False)
            self._created = True


def read_statuses(run: Path | str) -> list[tuple[NodeStatus, float]]:
    """Return each node's status and the time since its last batch, ordered by node."""
    found, files = [], files_of_run(run)
    for name, version in files.list(FOLDER).files.items():
        if not name.startswith('node-'):
            continue
        with contextlib.suppress(OSError, ValueError, TypeError):  # it is being replaced, or is not a status file
            status = NodeStatus(**json.loads(files.read(f'{FOLDER}/{name}') or b''))
            found.append((status, status.silent_seconds(version.modified)))
    # Ignore files left behind by an earlier attempt with more nodes; the newest file has the current number of nodes.
    newest = max((status for status, _ in found), key=lambda each: each.written, default=None)
    nodes = 0 if newest is None else newest.nodes
    return sorted(((status, age) for status, age in found if status.node < nodes), key=lambda each: each[0].node)
