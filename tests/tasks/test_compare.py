"""`diffusion compare` from the command line: images of folders, checkpoints and exports, a page, a server, a result."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from unittest.mock import MagicMock, Mock, call

import numpy as np
import pytest
import yaml
from commands import refusals
from evaluation.comparisons import answers_text
from golden import check_golden
from PIL import Image

from diffusion import cli
from diffusion.config.load import load
from diffusion.evaluation import compared_images
from diffusion.evaluation.comparison_page import read_key
from diffusion.exit_codes import USAGE_ERROR
from diffusion.tasks import compare, compare_arguments
from diffusion.training.train import train

PROMPTS = [f'a {color} square' for color in ('red', 'green', 'blue', 'gray', 'pink', 'black', 'white', 'brown')]


@pytest.fixture
def folders(tmp_path, monkeypatch) -> Path:
    """Working folder with images of two models in `a` and `b`, and their prompts in `prompts.txt`."""
    monkeypatch.chdir(tmp_path)
    for offset, name in enumerate('ab'):
        (tmp_path / name).mkdir()
        for index in range(len(PROMPTS)):
            Image.new('RGB', (32, 32), (30 * index, 100 * offset, 90)).save(tmp_path / name / f'{index:03}.png')
    (tmp_path / 'prompts.txt').write_text('\n'.join(PROMPTS))
    (tmp_path / 'one.txt').write_text('a\n')
    return tmp_path


def run(*words: str | Path) -> int:
    return cli.main(['compare', *map(str, words)])


def build(*words: str | Path, out: str = 'page') -> int:
    return run('a', 'b', '--prompts', 'prompts.txt', '--out', out, *words)


def test_page_answers_and_result(folders, capsys, caplog):
    assert build() == 0
    printed = capsys.readouterr().out
    assert 'page/index.html: 8 pairs and 2 attention checks' in printed
    assert 'Send only this file. Keep page/key.json' in printed
    assert 'diffusion compare --serve page\n' in printed and '--analyze FILES --key page/key.json\n' in printed
    assert sorted(path.name for path in Path('page').iterdir()) == ['index.html', 'key.json']
    key = read_key(Path('page/key.json'))
    assert (key.a['source'], key.b['source'], key.prompts) == ('a', 'b', 'prompts.txt')
    assert key.b['files'] == [str(path) for path in sorted(Path('b').resolve().iterdir())]
    html = Path('page/index.html').read_text()
    assert key.comparison in html and key.token not in html

    Path('page/answers').mkdir()
    for number in range(8):
        Path(f'page/answers/{number}.json').write_text(answers_text(key, number))
    assert run('--analyze', 'page/answers', '--png', 'result.png') == 0
    printed = capsys.readouterr().out
    assert 'Image quality: A and B differ; people prefer A. Preference for A is 100.0%' in printed
    assert 'Prompt alignment: A and B differ; people prefer B.' in printed
    assert Path('result.png').stat().st_size > 10_000 and 'figure: result.png' in caplog.messages

    # Answers by hand, beside their key or with --key, in any combination of files.
    files = [*Path('page/answers').glob('*.json')]
    assert run('--analyze', *files, 'page/key.json', '--json', '--difference', '10') == 0
    content = json.loads(capsys.readouterr().out)
    assert content['questions']['quality']['needed']['difference'] == 0.1
    assert build('--checks', '8', out='more') == 0
    shutil.move('page/key.json', 'kept.json')
    assert run('--analyze', *files, '--key', 'kept.json') == 0


def test_limit_takes_evenly_spread_prompts_with_their_images(folders):
    assert build('--limit', '2', '--checks', '0') == 0
    assert sorted(pair.text for pair in read_key(Path('page/key.json')).pairs) == sorted([PROMPTS[0], PROMPTS[4]])
    assert build('--limit', '8', out='all') == 0


MISTAKES = [
    '',
    'a --prompts prompts.txt --out new',
    'nowhere b --prompts prompts.txt --out new',
    'a . --prompts prompts.txt --out new',
    'a TMP/a --prompts prompts.txt --out new',
    'a b --out new',
    'a b --prompts prompts.txt',
    'a b --prompts one.txt --out new',
    'a b --prompts prompts.txt --out a',
    *(
        f'a b --prompts prompts.txt --out new {more}'
        for more in ('--checks 9', '--limit 9', '--steps 9', '--serve page')
    ),
    *('--serve', '--serve a', '--analyze x.json --serve', '--analyze a --port 80'),
    *('a --analyze x.json', '--analyze none.json', '--analyze empty --key page/key.json'),
    *('--analyze hers.json --key page/key.json', '--analyze mine.json --key prompts.txt'),
    *(f'--analyze mine.json --key page/key.json {more}' for more in ('', '--png a', '--png mine.json/b.png')),
    *(f'--analyze mine.json --key page/key.json --difference {points}' for points in (50, 0)),
]


def test_mistake_is_one_message_before_anything_is_made(folders, capsys):
    assert build() == 0 and build(out='other') == 0
    key, other = (read_key(Path(name, 'key.json')) for name in ('page', 'other'))
    Path('hers.json').write_text(answers_text(other, 1))
    Path('mine.json').write_text(answers_text(key, 1))
    Path('empty').mkdir()
    capsys.readouterr()
    found = refusals(capsys, folders, [f'compare {words}'.strip() for words in MISTAKES])
    found = found.replace(other.comparison, 'OTHER').replace(key.comparison, 'OURS')
    check_golden(Path(__file__).parent / 'golden/compare-mistakes', {'messages.txt': found})
    assert not Path('new').exists()


def test_port_in_use_or_several_processes_are_found_before_the_page_is_built(folders, capsys, monkeypatch):
    with socket.create_server(('127.0.0.1', 0)) as other:
        port = other.getsockname()[1]
        assert build('--serve', '--port', port, out='new') == USAGE_ERROR
    assert f'--port: cannot serve on 127.0.0.1:{port} (Address already in use); use another' in capsys.readouterr().err
    monkeypatch.setenv('WORLD_SIZE', '2')
    assert build(out='new') == USAGE_ERROR
    assert 'compare: runs in one process; start it as `diffusion compare`, without a' in capsys.readouterr().err
    assert not Path('new').exists()


def test_page_is_not_replaced_while_people_may_answer_it(folders, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(compare, 'page_chunks', Mock(side_effect=KeyboardInterrupt))
        assert build() == 130 and capsys.readouterr().err.endswith('interrupted\n')
    assert not Path('page/index.html').exists()
    (folders / 'page/images').mkdir(exist_ok=True)
    assert build() == 0, 'an interrupted call is continued'
    before = Path('page/index.html').read_bytes()
    assert build() == USAGE_ERROR
    assert '--out: page has a page already, which people may be answering; serve it with' in capsys.readouterr().err
    assert Path('page/index.html').read_bytes() == before
    shutil.copy('page/key.json', 'key.json')
    shutil.rmtree('page')
    assert build() == 0
    shutil.copy('key.json', 'page/key.json')
    assert run('--serve', 'page') == USAGE_ERROR
    assert '--serve: page/key.json is not the key of page/index.html' in capsys.readouterr().err


def test_equal_images_are_reported_and_if_all_are_equal_leave_no_page(folders, capsys, caplog):
    shutil.copy('a/001.png', 'b/001.png')
    assert build(out='some') == 0
    assert 'the images of A and B are the same for 1 of 8 prompts' in caplog.text
    shutil.rmtree('b')
    shutil.copytree('a', 'b')
    assert build() == USAGE_ERROR
    assert 'A and B: have the same images, pixel by pixel; compare two different models' in capsys.readouterr().err
    assert not Path('page/index.html').exists()


def test_server_takes_answers_until_ctrl_c(folders):
    assert build() == 0
    key = read_key(Path('page/key.json'))
    command = [sys.executable, '-m', 'diffusion', 'compare', '--serve', 'page', '--port', '0']
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stderr is not None
        lines = [server.stdout.readline() for _ in range(3)]
        assert lines[0].startswith('Send this address to people') and lines[2].startswith('Ctrl-C ends the server; ')
        address = lines[1].strip()
        assert address.startswith('http://127.0.0.1:') and key.token in address
        with urllib.request.urlopen(address) as page:
            assert page.read() == Path('page/index.html').read_bytes()
        body = answers_text(key, 1).encode()
        with urllib.request.urlopen(address.replace('/?', '/answers?'), data=body) as reply:
            assert reply.read() == b'saved'
        server.send_signal(signal.SIGINT)
        printed = server.stdout.read()
        assert server.wait(20) == 0, server.stderr.read()
    assert 'Answers of 1 person are in page/answers.' in printed
    assert 'Analyze them with:\n  diffusion compare --analyze page/answers' in printed
    assert [path.read_text() for path in Path('page/answers').iterdir()] == [answers_text(key, 1)]


def test_page_is_served_to_this_machine_by_default(folders, monkeypatch):
    assert build() == 0
    monkeypatch.setattr(compare_arguments, 'check_address', (calls := Mock()).check)
    monkeypatch.setattr(compare, 'serve_page', calls.serve)
    monkeypatch.setattr(signal, 'signal', calls.handle)
    assert run('--serve', 'page') == 0
    assert calls.mock_calls == [
        call.check('127.0.0.1', 8765),
        call.handle(signal.SIGTERM, signal.default_int_handler),
        call.serve(Path('page'), host='127.0.0.1', port=8765),
    ]


def test_addresses_of_other_hosts_are_printed_for_people(folders, capsys, monkeypatch):
    assert build() == 0
    token, server = read_key(Path('page/key.json')).token, MagicMock()
    server.__enter__.return_value = Mock(server_port=80, serve_forever=Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(compare, 'make_server', lambda *_, **__: server)
    for host, shown, is_any in (('::', '[::]', True), ('0.0.0.0', '0.0.0.0', True), ('::1', '[::1]', False)):
        capsys.readouterr()
        compare.serve_page(Path('page'), host=host, port=0)
        expected = 'Send this address to people, who each open it in their own browser:\n'
        expected += f'  http://{shown}:80/?token={token}\n'
        expected += "  (replace the host by this machine's name or address)\n" * is_any
        expected += 'Ctrl-C ends the server; the same command starts it again at the same address.\n\n'
        expected += 'Answers of 0 people are in page/answers. Analyze them with:\n'
        assert capsys.readouterr().out == expected + '  diffusion compare --analyze page/answers\n'


# -- checkpoints and exports --


@pytest.fixture(scope='module')
def trained(tmp_path_factory, tiny_recipe) -> Path:
    """Folder of a run with checkpoints of batches 1 and 2, beside an export of the latter and a file of prompts."""
    folder = tmp_path_factory.mktemp('compared')
    content = tiny_recipe(folder, name='run')
    content['trainer'] |= {'max_duration': '2ba', 'save_interval': '1ba'}
    content['optimizer']['lr'] = 0.05  # batches 1 and 2 draw different images
    content['generate'] = {'num_inference_steps': 2, 'guidance_scale': 3.0, 'guidance_rescale': 0.5}
    (folder / 'recipe.yaml').write_text(yaml.safe_dump(content))
    train(load(folder / 'recipe.yaml')).close()
    assert cli.main(['export', str(folder / 'run'), '--out', str(folder / 'export')]) == 0
    (folder / 'prompts.txt').write_text('\n'.join(f'prompt {index}' for index in range(10)))
    return folder


@pytest.mark.slow
def test_checkpoints_are_compared_with_equal_seeds_and_images_are_kept(trained, tmp_path, monkeypatch):
    out = tmp_path / 'page'
    words = [trained / 'run' / 'ba1', trained / 'run', '--prompts', trained / 'prompts.txt', '--out', out]
    words += ['--seed', '7']

    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compare, 'page_chunks', interrupted)
        assert run(*words) == 130
    assert not (out / 'index.html').exists()
    images = sorted(out.glob('images/*/*/*/*.png'))
    assert len(images) == 20
    before = {path: path.stat().st_mtime_ns for path in images}
    shutil.rmtree(images[-1].parent)  # the last batch, with 2 images
    assert run(*words) == 0
    assert len(before.keys() & set(out.glob('images/*/*/*/*.png'))) == 20
    assert sum(path.stat().st_mtime_ns != before[path] for path in before) == 2

    key = read_key(out / 'key.json')
    assert key.a['source'] == f'{trained}/run/ba1, training weights'
    assert key.b['source'] == f'{trained}/run/ba2, training weights'
    sampling = {'num_inference_steps': 2, 'guidance_scale': 3.0, 'guidance_rescale': 0.5, 'seed': 7}
    for side in (key.a, key.b):
        assert side['sampling'].items() >= sampling.items()
    for path in images[:10]:
        with Image.open(path) as image:
            assert image.info['seed'] == str(7 + int(path.stem))
    assert all(name not in (out / 'index.html').read_text() for name in ('ba1,', 'ba2,', str(trained)))


def test_export_draws_the_images_of_its_checkpoint(trained, tmp_path):
    # The export samples with its own settings, so the same are set for both.
    out = tmp_path / 'page'
    words = ['--prompts', trained / 'prompts.txt', '--limit', '2', '--steps', '2', '--guidance', '1', '--seed', '7']
    words += ['--out', out]
    assert run(trained / 'export', trained / 'run' / 'ba1', *words) == 0
    other = tmp_path / 'other'
    assert run(trained / 'run' / 'ba2', trained / 'run' / 'ba1', *words[:-1], other) == 0
    for export, checkpoint in zip(
        sorted(out.glob('images/a/*/*/*')), sorted(other.glob('images/a/*/*/*')), strict=True
    ):
        exported, drawn = (np.asarray(compared_images.read_image(path), dtype=int) for path in (export, checkpoint))
        assert abs(exported - drawn).max() <= 2
    key = read_key(out / 'key.json')
    assert key.a['source'] == f'{trained}/export, exported' and key.a['sampling']['seed'] == 7


def test_wrong_sampling_is_refused_before_a_model_is_loaded(trained, tmp_path, capsys):
    words = ['ba1 --steps 0', 'ba1 --guidance nan', 'ba1 --seed 4294967295', 'ba2']
    prompts = f'--prompts {trained}/prompts.txt --out {tmp_path}/new'
    found = refusals(capsys, trained, [f'compare TMP/run TMP/run/{each} {prompts}' for each in words])
    found = found.replace(prompts.replace(str(trained), 'TMP'), '...')
    check_golden(Path(__file__).parent / 'golden/compare-sampling', {'messages.txt': found})
    assert not (tmp_path / 'new').exists()
