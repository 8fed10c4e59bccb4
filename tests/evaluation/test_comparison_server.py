"""Server of a comparison page: token, limits, refused answers, and files of answers."""

import http.client
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from evaluation.comparisons import COMPARISON, answers_of, answers_text, make_key, rater_name

from diffusion.evaluation import comparison_server
from diffusion.evaluation.comparison_answers import MAX_BYTES, parse_answers
from diffusion.evaluation.comparison_server import AnswerFolder, make_server

KEY = make_key()
PAGE = b'<title>page</title>'
WITH_TOKEN = '/answers?token=the-token'


class Site:
    def __init__(self, port: int, folder: Path) -> None:
        self.port, self.folder = port, folder

    def request(self, method: str, path: str, body: str | bytes | None = None, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=20)
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        return reply.status, text

    def raw(self, request: bytes) -> bytes:
        with socket.create_connection(('127.0.0.1', self.port), timeout=20) as connection:
            connection.sendall(request)
            reply = b''
            while received := connection.recv(65536):
                reply += received
            return reply

    def names(self) -> list[str]:
        """Return everything that was written, also beside the folder of answers."""
        return sorted(str(path.relative_to(self.folder.parent)) for path in self.folder.parent.rglob('*.*'))


@contextmanager
def serving(folder: Path):
    with make_server(PAGE, AnswerFolder(folder, KEY), host='127.0.0.1', port=0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield Site(server.server_port, folder)
        server.shutdown()


@pytest.fixture
def site(tmp_path):
    with serving(tmp_path / 'page' / 'answers') as site:
        yield site


def test_page_is_served_with_the_token_alone_which_is_never_logged(site, caplog, capfd):
    caplog.set_level('DEBUG')
    assert site.request('GET', '/?token=the-token') == (200, PAGE.decode())
    wrong = ('', 'the-toke', 'the-tokeN', '%C3%A9', '%ED%A0%80')
    for path in ('/', '/?t=1', *(f'/?token={token}' for token in wrong)):
        status, text = site.request('GET', path)
        assert (status, text) == (403, 'this link is incomplete or belongs to another page; ask for a new one')
    assert site.request('POST', '/answers?token=x', answers_text(KEY, 1))[0] == 403
    for path in ('/key.json', '/../key.json', '/answers/', '//etc/passwd', '/%2e%2e/key.json'):
        assert site.request('GET', f'{path}?token=the-token')[0] == 404
    assert site.request('POST', '/?token=the-token', answers_text(KEY, 1))[0] == 404
    assert site.names() == []
    assert site.request('POST', WITH_TOKEN, answers_text(KEY, 1))[0] == 200
    assert f'{rater_name(1)}: 12 of 12 answers' in caplog.text and 'refused a request of 127.0.0.1' in caplog.text
    assert 'the-toke' not in caplog.text + ''.join(capfd.readouterr())


def test_answers_are_written_one_file_per_person_up_to_a_limit(site, monkeypatch):
    monkeypatch.setattr(comparison_server, 'MAX_RATERS', 2)
    replies = [site.request('POST', WITH_TOKEN, answers_text(KEY, number)) for number in (1, 2, 3, 1)]
    assert replies[0] == (200, 'saved') and [status for status, _ in replies] == [200, 200, 507, 200]
    assert site.names() == [f'answers/{rater_name(number)}.json' for number in (1, 2)]
    content = (site.folder / f'{rater_name(2)}.json').read_bytes()
    assert parse_answers(content, 'file', COMPARISON, len(KEY.pairs)) == answers_of(KEY, 2)


def test_later_answers_of_a_person_replace_fewer_or_as_many(site, caplog):
    caplog.set_level('INFO')
    path = site.folder / f'{rater_name(1)}.json'
    assert site.request('POST', WITH_TOKEN, answers_text(KEY, 1, pairs=3))[0] == 200
    assert site.request('POST', WITH_TOKEN, answers_text(KEY, 1))[0] == 200
    status, text = site.request('POST', WITH_TOKEN, answers_text(KEY, 1, pairs=2))
    assert (status, text) == (409, 'more of your answers were saved earlier; those are kept')
    assert path.read_text() == answers_text(KEY, 1)
    corrected = answers_text(KEY, 1, lambda *_: 'tie')
    assert site.request('POST', WITH_TOKEN, corrected)[0] == 200
    assert path.read_text() == corrected
    logged = [
        *(f'{rater_name(1)}: {count} of 12 answers' for count in (6, 12)),
        f'refused a request of 127.0.0.1: {text}',
    ]
    assert caplog.messages == logged, 'the first and the last answers'


def test_other_answers_and_huge_endless_and_cut_requests_are_refused(site):
    for body, message in (
        ('[' * 200_000, 'these answers: is not an answer file as written by the page'),
        (answers_text(KEY, 1).replace('"first"', '"second"', 1), 'was modified after the page wrote it'),
    ):
        status, text = site.request('POST', WITH_TOKEN, body)
        assert status == 400 and message in text
    start = f'POST {WITH_TOKEN} HTTP/1.1\r\nHost: a\r\n'.encode()
    assert site.raw(start + f'Content-Length: {MAX_BYTES + 1}\r\n\r\n'.encode()).startswith(b'HTTP/1.0 413 ')
    assert site.raw(start + b'Content-Length: ' + b'9' * 5000 + b'\r\n\r\n').startswith(b'HTTP/1.0 413 ')
    for length in (b'', b'Content-Length: -1\r\n', b'Content-Length: many\r\n', b'Transfer-Encoding: chunked\r\n'):
        assert site.raw(start + length + b'\r\n').startswith(b'HTTP/1.0 411 ')
    with socket.create_connection(('127.0.0.1', site.port)) as connection:
        connection.sendall(start + b'Content-Length: 100\r\n\r\n{"comparison"')
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100).startswith(b'HTTP/1.0 400 ')
    assert site.raw(b'GET /' + b'a' * 70_000 + b' HTTP/1.1\r\n\r\n').startswith(b'HTTP/1.0 414 ')
    assert site.names() == []
    assert site.request('POST', WITH_TOKEN, answers_text(KEY, 1))[0] == 200, 'the server goes on'


def test_request_that_does_not_arrive_ends_after_a_while_and_blocks_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison_server, 'TIMEOUT_SECONDS', 0.3)
    with serving(tmp_path / 'answers') as site, socket.create_connection(('127.0.0.1', site.port)) as slow:
        slow.sendall(f'POST {WITH_TOKEN} HTTP/1.1\r\nContent-Length: 1000\r\n\r\n'.encode())
        began = time.monotonic()
        assert site.request('GET', '/?token=the-token')[0] == 200
        assert slow.recv(100) == b'' and time.monotonic() - began < 10


def test_answers_that_cannot_be_written_are_not_reported_as_saved(site, monkeypatch, caplog):
    full = Mock(side_effect=OSError(28, 'No space left on device'))
    monkeypatch.setattr(comparison_server, 'write_atomically', full)
    status, text = site.request('POST', WITH_TOKEN, answers_text(KEY, 1))
    assert status == 500 and text == 'the server could not write them (No space left on device)'
    assert 'cannot be written (No space left on device)' in caplog.text


def test_a_closed_connection_is_no_error_of_the_server(tmp_path, capsys):
    with make_server(PAGE, AnswerFolder(tmp_path, KEY), host='127.0.0.1', port=0) as server:
        for error in (ConnectionResetError('reset'), ValueError('a mistake')):
            try:
                raise error
            except (ConnectionError, ValueError):
                server.handle_error(None, ('127.0.0.1', 1))
    assert 'ValueError: a mistake' in (printed := capsys.readouterr().err) and 'reset' not in printed


def test_link_in_the_folder_of_answers_is_not_followed(site):
    outside = site.folder.parent / 'outside.txt'
    site.folder.mkdir(parents=True)
    outside.write_text('kept')
    (site.folder / f'{rater_name(1)}.json').symlink_to(outside)
    assert site.request('POST', WITH_TOKEN, answers_text(KEY, 1))[0] == 200
    assert outside.read_text() == 'kept'
