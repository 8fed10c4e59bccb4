"""Agreement of the nodes of a job to restart in place."""

import dataclasses
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from ranks import two_free_ports
from waiting import wait_until

from diffusion.exit_codes import CONFIG_ERROR, FAILED, PREEMPTED
from diffusion.launch import node_link
from diffusion.launch.exit_file import NodeExit
from diffusion.launch.node_link import Agreement, NodeLink
from diffusion.launch.rank_discovery import NodePosition

CRASH, KILLED = NodeExit(FAILED, 'one', 'crash', 'rank 0 with 1'), NodeExit(FAILED, 'two', 'killed', 'rank 1')


class Nodes:
    """Links of the nodes of a job in this process."""

    def __init__(self, count: int) -> None:
        first = NodePosition('local', 0, count, 1, '127.0.0.1', two_free_ports())
        self.lines: list[str] = []
        self.port = first.master_port + 1
        positions = [dataclasses.replace(first, rank=rank) for rank in range(count)]
        self.links = [NodeLink(position, 'job', self.lines.append) for position in positions]
        wait_until(lambda: all(link.connected for link in self.links), shown=lambda: self.lines)

    def agree(self, *ends: NodeExit, attempt: int = 0, problems: tuple[str, ...] = ()) -> list[Agreement]:
        problems = problems or ('',) * len(ends)
        with ThreadPoolExecutor(len(ends)) as pool:
            found = []
            for link, end, problem in zip(self.links, ends, problems, strict=False):
                found.append(pool.submit(link.agree, attempt, end, problem, lambda: False))
                time.sleep(0.05)
            return [each.result(20) for each in found]


@pytest.fixture
def three() -> Iterator[Nodes]:
    found = Nodes(3)
    yield found
    for link in found.links:
        link.close()


def test_nodes_restart_when_all_have_ended_and_the_killed_rank_is_the_cause(three):
    # The crash is reported first, but follows from the kill.
    agreed = three.agree(CRASH, KILLED, CRASH)
    assert agreed == [Agreement(True, KILLED)] * 3
    again = NodeExit(FAILED, 'three', 'crash', 'rank 2 with 1')
    assert [each.first for each in three.agree(again, CRASH, CRASH, attempt=1)] == [again] * 3


def test_failure_but_no_orderly_end_is_sent_to_the_other_nodes_at_once(three):
    three.links[1].report_failure(0, NodeExit(PREEMPTED, 'one', 'preempted', ''))
    three.links[1].report_failure(1, KILLED)
    wait_until(lambda: three.links[0].failure(1) and three.links[2].failure(1))
    assert three.links[0].failure(1) == KILLED
    assert three.links[0].failure(0) is three.links[1].failure(1) is three.links[0].failure(2) is None


def test_one_node_that_cannot_restart_ends_all_without_a_wait(three):
    mistake = NodeExit(CONFIG_ERROR, 'two', 'mistake', '')
    begin = time.monotonic()
    agreed = three.agree(CRASH, mistake, problems=('', 'ended with 78'))
    assert agreed == [Agreement(False, mistake, 'node 1: ended with 78')] * 2
    assert time.monotonic() - begin < 5


def test_lost_node_ends_the_others(three):
    three.links[2].close()
    agreed = three.agree(CRASH, KILLED)
    assert agreed == [Agreement(False, agreed[0].first, 'node 2 is gone')] * 2
    threading.Timer(0.3, three.links[0].close).start()
    alone = three.links[1].agree(1, KILLED, '', lambda: False)
    assert not alone.restart
    assert alone.reason in ('the connection to the first node is lost', 'node 0 is gone', 'node 2 is gone')


def test_node_that_does_not_end_in_time_ends_the_others(three, monkeypatch):
    monkeypatch.setattr(node_link, 'AGREE_SECONDS', 0.3)
    agreed = three.agree(CRASH, KILLED)
    assert [each.reason for each in agreed] == ['node 2 has not ended after 0 s'] * 2


def test_stop_ends_the_wait(three):
    assert three.links[1].agree(0, KILLED, '', lambda: True) == Agreement(False, reason='this node was asked to stop')


@pytest.mark.parametrize(
    'text',
    [
        b'GET / HTTP/1.1\r\n\r\n',
        b'[1, 2]\n',
        b'{"event": "hello", "job": "another", "node": 1}\n',
        b'{"event": "hello", "job": "job", "node": 99}\n',
        b'{"event": "ended"}\n',
        b'\xff' * 100_000,
    ],
)
def test_stranger_on_the_port_changes_nothing(three, text):
    with socket.create_connection(('127.0.0.1', three.port)) as stranger:
        stranger.settimeout(10)
        try:
            stranger.sendall(text)
            assert not stranger.recv(1)
        except ConnectionError:
            pass
    assert three.agree(CRASH, KILLED, CRASH)[0].restart


def test_port_in_use_is_reported_and_the_job_is_not_disturbed():
    with socket.create_server(('', 0)) as other:
        position = NodePosition('local', 0, 2, 1, '127.0.0.1', other.getsockname()[1] - 1)
        lines: list[str] = []
        link = NodeLink(position, 'job', lines.append)
        assert 'no restart in place is possible: port' in lines[0]
        link.report_failure(0, KILLED)
        assert not link.agree(0, KILLED, '', lambda: False).restart
        link.close()
