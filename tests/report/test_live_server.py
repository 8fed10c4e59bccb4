"""Served reports: live updates, several runs, tokens, foreign hosts, and ports in use."""

import contextlib
import gzip
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
from browser import browser_context, needs_browser
from playwright.sync_api import expect
from synthetic_run import append_metrics, write_run, write_sheet

from diffusion.errors import ExternalError, UserError
from diffusion.report.cli import ReportServer, ServedPage, run_address
from diffusion.report.report_source import RunsSource, TableSource

WIDTH_OF_IMAGE = 'image => image.decode().then(() => image.naturalWidth)'


@pytest.fixture
def run(tmp_path) -> Path:
    return write_run(tmp_path / 'sd2', batches=80, evaluations=False, sheets=2)


@contextlib.contextmanager
def serving(server: ReportServer) -> Iterator[ReportServer]:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def served(*places: Path, host: str = '127.0.0.1', seconds: float = 0.2) -> ReportServer:
    return ReportServer(host, 0, ServedPage(RunsSource([str(place) for place in places]), seconds))


def get(server: ReportServer, path: str, method: str = 'GET', **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection('127.0.0.1', urlsplit(server.url).port or 0, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, dict(answer.getheaders())


@pytest.mark.slow
@needs_browser
def test_page_shows_what_is_added_to_the_run(run):
    with serving(served(run)) as server, browser_context() as (context, left):
        page = context.new_page()
        page.goto(server.url)
        page.wait_for_selector('#chart-loss canvas')
        expect(page.locator('#live')).to_have_text('live')
        assert page.locator('#samples-batch').inner_text() == 'batch 80 (2 of 2)'
        page.locator('#smoothing').fill('5')
        card = page.locator('#chart-loss')
        card.get_by_role('button', name='log scale').click()
        append_metrics(run, {'step': 80, 'loss/train/total': 0.0123}, {'step': 81, 'loss/train/total': 0.0456})
        write_sheet(run, 82, ['a frog'])
        expect(page.locator('#summary .tile').nth(1)).to_contain_text('0.0456')
        expect(page.locator('#samples-batch')).to_have_text('batch 82 (3 of 3)')
        assert page.locator('#samples img').first.evaluate(WIDTH_OF_IMAGE) == 96
        assert page.locator('#smoothing').input_value() == '5'
        assert card.get_by_role('button', name='log scale').get_attribute('aria-pressed') == 'true'
        shutil.rmtree(run)
        expect(page.locator('.notes')).to_contain_text('none of the files of a run')
        assert left == []


@pytest.mark.slow
@needs_browser
def test_table_leads_to_live_pages_of_its_runs(run):
    folder = run.parent
    write_run(folder / 'second one', batches=80, evaluations=False, sheets=0)
    table = TableSource(str(folder), price=None, link=run_address)
    pages = {name: ServedPage(RunsSource([str(folder / name)]), 5.0) for name in ('sd2', 'second one')}
    server = ReportServer('127.0.0.1', 0, ServedPage(table, 5.0), pages.get)
    with serving(server), browser_context() as (context, left):
        page = context.new_page()
        page.goto(server.url)
        page.get_by_role('link', name='second one').click()
        page.wait_for_selector('#chart-loss canvas')
        assert page.title() == 'second one'
        page.goto(f'{server.url}run/sd2/')
        page.wait_for_selector('#samples img')
        assert page.locator('#samples img').first.evaluate(WIDTH_OF_IMAGE) == 96
        assert get(server, '/run/..%2F..%2Fetc/')[0] == 404
        assert left == []


def test_data_is_sent_once_until_it_changes(run):
    with serving(served(run, seconds=0.0)) as server:
        status, body, headers = get(server, '/data.json', **{'Accept-Encoding': 'gzip'})
        assert status == 200
        assert headers['Content-Encoding'] == 'gzip' and headers['Content-Length'] == str(len(body))
        assert 'Content-Encoding' not in get(server, '/data.json')[2]
        assert json.loads(gzip.decompress(body))['runs'][0]['name'] == 'sd2'
        assert get(server, '/data.json', **{'If-None-Match': headers['ETag']})[0] == 304
        append_metrics(run, {'step': 80, 'loss/train/total': 0.5})
        assert get(server, '/data.json', **{'If-None-Match': headers['ETag']})[0] == 200


def test_storage_that_fails_is_named_and_the_last_content_stays(run, monkeypatch):
    source, error = RunsSource([str(run)]), ExternalError('the storage is away')
    monkeypatch.setattr(source, 'read', Mock(side_effect=[error, source.read(), error, error]))
    with serving(ReportServer('127.0.0.1', 0, ServedPage(source, 0.0))) as server:
        assert get(server, '/data.json')[:2] == (503, b'the storage is away\n')
        for notes in ([], [str(error)], [str(error)]):
            assert json.loads(get(server, '/data.json')[1])['runs'][0]['notes'] == notes


def test_content_is_read_again_after_four_fifths_of_the_interval():
    page = ServedPage(Mock(read=Mock(side_effect='abc')), 1000.0)
    assert [page.content(), page.content()] == ['a', 'a']
    page._read_at -= 799.0
    assert page.content() == 'a'
    page._read_at -= 2.0
    assert [page.content(), page.content()] == ['b', 'b']


def test_server_is_read_only_and_serves_no_other_file(run):
    with serving(served(run)) as server:
        assert [get(server, '/', method)[0] for method in ('POST', 'PUT', 'DELETE')] == [501] * 3
        assert get(server, '/', 'HEAD')[:2] == (200, b'')
        [(key, image), *_] = server.main.content().images.items()
        status, body, headers = get(server, f'/images/{key}.webp', **{'Accept-Encoding': 'gzip'})
        assert (status, body, headers['Content-Type']) == (200, image, 'image/webp')
        for path in ('/metrics.jsonl', '/../sd2/recipe.yaml', '/images/..%2Frecipe.yaml', '/images/', '/run/sd2/'):
            assert get(server, path)[0] == 404, path
        # A web page whose own name was made to point at this server must not read it.
        assert get(server, '/data.json', Host='evil.example:80')[0] == 403
        assert get(server, '/data.json', Host='localhost:1')[0] == 200


def test_another_host_needs_the_token(run):
    with serving(served(run, host='0.0.0.0')) as server:
        token = urlsplit(server.url).query
        assert token.startswith('token=') and len(token) > 20
        assert [get(server, path)[0] for path in ('/', '/data.json', '/?token=x', f'/?{token}')] == [403, 403, 403, 200]


def test_host_of_another_machine_is_an_error_with_a_way_out(run):
    for host in ('no.such.host.invalid', '192.0.2.1'):
        with pytest.raises(UserError, match='--port: cannot serve on .*, or another --host'):
            ReportServer(host, 0, ServedPage(RunsSource([str(run)]), 5.0))


def test_command_serves_a_table_and_its_runs_until_ctrl_c(run):
    command = [sys.executable, '-m', 'diffusion', 'report', str(run.parent), '--serve', '--port', '0', '--price', '2']
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(f'{run.parent}: http://127.0.0.1:') and line.endswith('/ (Ctrl-C ends it)\n')
    server = Mock(url=line.split()[1])
    table, page = (json.loads(get(server, f'{path}/data.json')[1]) for path in ('', '/run/sd2'))
    assert table['rows'][0]['link'] == 'run/sd2/' and page['runs'][0]['cost']['price'] == 2
    assert get(server, '/run/..%2Fsd2/')[0] == get(server, '/run/sd3/')[0] == 404
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0
