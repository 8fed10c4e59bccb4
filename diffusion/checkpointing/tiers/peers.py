"""Exchange of checkpoint files between nodes over gloo, separate from training's communication.

Files are sent in chunks whose first byte says whether the sender could read the data. A rank that fails still sends all
chunks, marked as bad, since its peer would wait for them.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, cast

import torch
from composer.utils import dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from diffusion.checkpointing.checkpoint_store import FileRecord, HashingWriter, flush
from diffusion.storage.direct_file import open_for_writing

CHUNK_BYTES = 16 * 2**20
TIMEOUT = timedelta(minutes=10)
"""Maximum wait for a message from a peer, which may still be writing its own files. Once the Trainer has been built,
the recipe's timeout for collectives replaces this one."""
_GOOD = 1
"""First byte of a chunk that could be read; it is 0 in other chunks."""


@dataclass(frozen=True)
class Peers:
    """The rank that stores copies of this rank's files, and the rank whose files this rank stores."""

    to: int
    source: int


def choose_peers(nodes: Sequence[Sequence[int]], domains: Sequence[str], rank: int) -> Peers | None:
    """Return a rank's peers: the ranks at its position on two other nodes, in other failure domains if possible.

    The result is None if there is only one node, or if the nodes have different numbers of ranks.

    The nodes form a ring, sorted by domain. Each node sends its files n nodes ahead, where n is the size of the largest
    domain, so the target is in another domain. If one domain has more than half of the nodes, some pairs are in the
    same domain.

    Args:
        domains: The failure domain of each node, such as its rack; equal strings if unknown.
    """
    if len(nodes) < 2 or len({len(each) for each in nodes}) != 1:
        return None
    ring = sorted(range(len(nodes)), key=lambda node: (domains[node], node))
    sizes = [list(domains).count(domain) for domain in set(domains)]
    # If all nodes are in one domain, the next node is as good a choice as any.
    shift = 1 if len(sizes) == 1 else min(max(sizes), len(nodes) // 2)
    own = next(place for place, node in enumerate(ring) if rank in nodes[node])
    position = nodes[ring[own]].index(rank)
    ahead, behind = (ring[(own + step) % len(ring)] for step in (shift, -shift))
    return Peers(to=nodes[ahead][position], source=nodes[behind][position])


def new_group() -> ProcessGroup | None:
    """Create a group of all ranks for exchanging files; return None for a single rank. All ranks must call this."""
    if dist.get_world_size() == 1:
        return None
    return cast(ProcessGroup, torch.distributed.new_group(backend='gloo', timeout=TIMEOUT))


def exchange_files(
    folder: Path, files: Mapping[str, FileRecord], peers: Peers, group: ProcessGroup | None, check: Callable[[], None]
) -> None:
    """Send files in a folder to a peer, and receive another peer's files into the same folder; can run in a thread.

    Both peers must call this too. A rank that has nothing to send, or whose save has failed, passes no files.

    Args:
        group: A group of all ranks that no other thread uses.
        check: Called before each chunk; an exception that it raises is raised again once the exchange is complete.

    Raises:
        OSError: A file cannot be read or written, or was received with different content.
        RuntimeError: A peer cannot be reached.
    """
    outgoing = _Outgoing(folder, files, check)
    theirs = _exchange_offers(files, peers, group)
    incoming = _Incoming(folder, theirs)
    sizes, expected = _chunk_sizes(files), _chunk_sizes(theirs)
    with closing(outgoing), closing(incoming):
        for number in range(max(len(sizes), len(expected))):
            sending = None
            if number < len(sizes):
                sending = _send(outgoing.chunk(sizes[number]), peers.to, group)
            if number < len(expected):
                incoming.receive(expected[number], peers.source, group)
            if sending is not None:
                sending.wait()
    for error in (outgoing.error, incoming.error):
        if error is not None:
            raise error


def send_file(path: Path, record: FileRecord, to: int, group: ProcessGroup | None) -> None:
    """Send a file to a rank, which must call `receive_file`; both raise OSError if the file cannot be read."""
    files = {path.name: record}
    with closing(_Outgoing(path.parent, files, lambda: None)) as outgoing:
        for chunk_size in _chunk_sizes(files):
            torch.distributed.send(outgoing.chunk(chunk_size), to, group=group)
    if outgoing.error is not None:
        raise outgoing.error


def receive_file(path: Path, expected: FileRecord, source: int, group: ProcessGroup | None) -> None:
    """Receive a file from a rank and write it; raise OSError if its content is not as expected."""
    unfinished = f'.{path.name}.unfinished'
    with closing(_Incoming(path.parent, {unfinished: expected})) as incoming:
        for chunk_size in _chunk_sizes({path.name: expected}):
            incoming.receive(chunk_size, source, group)
    if incoming.error is not None:
        (path.parent / unfinished).unlink(missing_ok=True)
        raise incoming.error
    os.replace(path.parent / unfinished, path)


def _exchange_offers(own: Mapping[str, FileRecord], peers: Peers, group: ProcessGroup | None) -> dict[str, FileRecord]:
    """Send this rank's file names, sizes and hashes to one peer, and return those received from the other."""
    text = bytearray(json.dumps({name: asdict(record) for name, record in own.items()}).encode())
    sending = _send(torch.tensor([len(text)]), peers.to, group)
    length = torch.zeros(1, dtype=torch.int64)
    torch.distributed.recv(length, peers.source, group=group)
    sending.wait()
    sending = _send(torch.frombuffer(text, dtype=torch.uint8), peers.to, group)
    content = torch.empty(int(length), dtype=torch.uint8)
    torch.distributed.recv(content, peers.source, group=group)
    sending.wait()
    return {name: FileRecord(**record) for name, record in json.loads(bytes(content.numpy())).items()}


def _send(tensor: Tensor, to: int, group: ProcessGroup | None) -> Work:
    sending = torch.distributed.isend(tensor, to, group=group)
    assert sending is not None  # isend returns None only on ranks outside the group, but all ranks are in it
    return sending


def _chunk_sizes(files: Mapping[str, FileRecord]) -> list[int]:
    """Return the sizes of the chunks in which files are sent, file by file; an empty file has no chunks."""
    sizes = [each.bytes for each in files.values()]
    return [min(CHUNK_BYTES, size - start) for size in sizes for start in range(0, size, CHUNK_BYTES)]


class _Files:
    """Files in a folder that are sent or received one after the other; `error` keeps the first error."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._remaining = 0
        self.error: BaseException | None = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _Outgoing(_Files):
    """Files to send, read in chunks that are marked as bad after an error."""

    def __init__(self, folder: Path, files: Mapping[str, FileRecord], check: Callable[[], None]) -> None:
        super().__init__(folder)
        self._check = check
        self._left = [(name, record.bytes) for name, record in files.items() if record.bytes]

    def chunk(self, size: int) -> Tensor:
        data = bytearray(size + 1)
        if self.error is None:
            try:
                self._check()
                self._read(memoryview(data)[1:])
                data[0] = _GOOD
            except Exception as error:
                self.error = error
        return torch.frombuffer(data, dtype=torch.uint8)

    def _read(self, buffer: memoryview) -> None:
        if not self._remaining:
            self.close()
            name, self._remaining = self._left.pop(0)
            self._file = (self._folder / name).open('rb')
        assert self._file is not None
        filled = self._file.readinto(buffer)  # type: ignore[attr-defined]
        if filled != len(buffer):
            raise OSError(f'{self._file.name}: is shorter than when it was written')
        self._remaining -= filled


class _Incoming(_Files):
    """Files to receive, written as their chunks arrive; after an error nothing more is written."""

    def __init__(self, folder: Path, files: Mapping[str, FileRecord]) -> None:
        super().__init__(folder)
        self._left = list(files.items())
        self._writer: HashingWriter | None = None
        self._keep_error(self._open_next)

    def receive(self, size: int, source: int, group: ProcessGroup | None) -> None:
        chunk = torch.empty(size + 1, dtype=torch.uint8)
        torch.distributed.recv(chunk, source, group=group)
        self._keep_error(lambda: self._write(chunk))

    def _keep_error(self, work: Callable[[], None]) -> None:
        if self.error is None:
            try:
                work()
            except Exception as error:
                self.error = error

    def _write(self, chunk: Tensor) -> None:
        data = chunk.numpy().data
        assert self._writer is not None and self._file is not None
        if data[0] != _GOOD:
            raise OSError(f'{self._file.name}: the node that has this file cannot read it')
        self._writer.write(data[1:])  # type: ignore[arg-type]
        self._remaining -= len(data) - 1
        if not self._remaining:
            self._complete()
            self._open_next()

    def _open_next(self) -> None:
        """Create the next file, and complete it immediately if it is empty."""
        while self._left and not self._remaining:
            name, record = self._left[0]
            self._file = open_for_writing(self._folder / name)
            self._writer, self._remaining = HashingWriter(self._file), record.bytes
            if not record.bytes:
                self._complete()

    def _complete(self) -> None:
        assert self._writer is not None and self._file is not None
        name, expected = self._left.pop(0)
        flush(self._file)
        self._file.close()
        if self._writer.record() != expected:
            raise OSError(f'{self._folder / name}: changed on its way from another node (xxh3_128 differs)')
