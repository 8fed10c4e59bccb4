"""`diffusion check`: command lines, printed output and exit statuses; shell completion, as bash does it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import output_of, refusal, refusals
from golden import check_golden
from recipe_files import all_values

from diffusion.cli import main, make_parser
from diffusion.config.load import load
from diffusion.exit_codes import FAILED

YAMLS = Path(__file__).parents[1] / 'yamls'
GOOD = """
name: run
global_batch: 8
model: {name: tiny, resolution: 64}
streams: {a: {remote: s3://bucket/mds, resolution: 64}}
trainer: {max_duration: 8ba}
"""
MISTAKES = {
    'syntax': GOOD + 'loader: [',
    'text': 'just words',
    'empty': '',
    'date-key': '2024-01-01: 1',
    'circle': 'extends: circle.yaml',
    'extends-list': 'extends: [a.yaml]',
}


@pytest.fixture
def write(tmp_path):
    def write_file(text, name='recipe.yaml'):
        (tmp_path / name).write_text(text, encoding='utf-8')
        return str(tmp_path / name)

    return write_file


@pytest.fixture
def local(write, pictures):
    """Path of a recipe that trains on a local folder of 40 images."""
    stream = f'local: {pictures[32]}, resolution: 32'
    return write(
        GOOD.replace('remote: s3://bucket/mds, resolution: 64', stream).replace('resolution: 64', 'resolution: 32')
    )


def test_valid_recipe_is_printed_and_timed(write, capsys):
    path = write(GOOD)
    out = output_of(capsys, 'check', path, 'seed=3')
    assert all_values(load(write(out, 'printed.yaml'))) == all_values(load(path, ['seed=3']))
    assert out.splitlines()[-1].startswith(f'# {path}: ok, checked in ')
    note, last = output_of(capsys, 'check', path, '--quiet').splitlines()
    assert note == '# not looked at: data in object stores (streams.a); add --data' and ': ok, checked in ' in last


def test_notes_warnings_and_missing_values_are_printed(write, local, tmp_path, pictures, capsys):
    write(GOOD, 'good.yaml')
    write(GOOD.replace('tiny,', 'tiny, caption_dropout: 0.3, block_out_channels: [32],'), 'base.yaml')
    write('extends: base.yaml\nmodel: {name: tiny_prx}', 'other.yaml')
    write('{"shards": [{"samples": 0, "raw_data": {"bytes": 0}}]}', 'index.json')
    problems = ['streams.a.local=/nope', 'streams.a.local=TMP', 'streams.a.resolution=64']
    few = ['trainer.max_duration=5000ba', 'trainer.max_duration=5001ba', 'trainer.max_duration=60sec']
    few += ['global_batch=41', 'global_batch=40 trainer.max_duration=1000ep', '--strict']
    commands = ['TMP/other.yaml', 'TMP/other.yaml model.caption_dropout=0.3', 'diffusion:phase1']
    commands += ['TMP/good.yaml callbacks.speed_monitor.window_size=???']
    shown = ''
    for words in (*commands, *(f'{local} {more}' for more in (*few, *problems))):
        out = output_of(capsys, 'check', '--quiet', *words.replace('TMP', str(tmp_path)).split())
        shown += f'diffusion check --quiet {words}\n{out}\n'
    strict = [f'{local} {more}' for more in problems] + ['diffusion:phase1']
    shown += refusals(capsys, tmp_path, [f'check --quiet --strict {words}' for words in strict])
    shown = re.sub(r'in \d+\.\d s', 'in N s', shown).replace(str(tmp_path), 'TMP').replace(str(pictures[32]), 'IMAGES')
    check_golden(Path(__file__).parent / 'tasks/golden/check', {'output.txt': shown})
    assert 'remote: ???\n' in output_of(capsys, 'check', YAMLS / 'phase1.yaml')


def test_mistakes_are_answered_in_a_line_with_the_way_out(write, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in (*'abcde', 'run', 'void'):
        Path(f'{name}.yaml').touch()
    Path('wrong').mkdir()
    for name, text in MISTAKES.items():
        write(text, f'wrong/{name}.yaml')
    write(GOOD, 'wrong/good.yaml')
    words = ['', 'chek a.yaml', 'prepare foldr photos', 'prepare . --out x', 'data lok a.yaml', 'data train']
    words += ['completion bash x', *(f'check a.yaml {option}' for option in ('--strickt', '--zzz', '--seed=3'))]
    files = ['runn.yaml', 'yamls/quickstart.yaml', 'nothing-like-it.yaml', 'empty/a.yaml', 'void.yaml', '.']
    words += [f'check {file}' for file in (*files, *(f'TMP/wrong/{name}.yaml' for name in MISTAKES))]
    good = 'TMP/wrong/good.yaml'
    words += [
        f'check {order}' for order in (f'{good} --quiet seed=x', f'--quiet {good} seed=x', f'{good} seed=x --quiet')
    ]
    large = ['check', str(tmp_path / 'wrong/good.yaml'), 'global_batch=1536', '--gpus', '96', '--quiet']
    output_of(capsys, *large)
    wrong = ('loader.num_canonical_nodes=64', 'parallelism.strategy=fsdp2 parallelism.replicas=5')
    words += [f'{" ".join(large)} {more}' for more in wrong]
    check_golden(
        Path(__file__).parent / 'tasks/golden/check-mistakes', {'messages.txt': refusals(capsys, tmp_path, words)}
    )


def test_data_in_an_object_store_is_checked_on_request(write, pictures, store, capsys):
    """The store has 40 images of 32 px."""
    url = store.upload(pictures[32])
    path = write(GOOD.replace('remote: s3://bucket/mds, resolution: 64', f'remote: {url}, resolution: 32'))
    words = ['check', path, 'model.resolution=32', '--quiet', '--data']
    store.requests.clear()
    out = output_of(capsys, *words, 'global_batch=41')
    assert ': ok, checked in ' in out and 'a batch of 41 repeats some of the 40 images' in out
    assert {request.partition(' ')[0] for request in store.requests} == {'GET'}
    for override, problem in (
        ('streams.a.resolution=64', f'streams.a.resolution: 64x64, but the images in {url} have shorter sides of at'),
        (f'streams.a.remote={url}/x', f'streams.a.remote: {url}/x has no index.json; is it an MDS folder?'),
        ('streams.a.remote=s3://none/x', 'streams.a.remote: s3://none/x/index.json: there is no such bucket'),
        ('streams.a.aspects=true', f'streams.a.remote: {url} has no buckets.json'),
    ):
        assert problem in refusal(capsys, *words, override, '--strict')
    store.put(url, 'manifest.json', b'{}')
    latents = ['dataset.name=latents', 'model={name: tiny_prx, representation_alignment: {encoder: x, block: 1}}']
    assert 'the latents of streams.a have none' in refusal(capsys, *words, *latents, '--strict')
    store.fail('index.json', 503)
    assert main([*words, 'streams.a.download_retry=0']) == FAILED
    assert f'error: {url}/index.json: cannot be read, tried 1 time' in capsys.readouterr().err


ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which('bash') is None, reason='bash is not installed')
@pytest.mark.parametrize(
    ('line', 'expected'),
    [
        ('diffusion ', {*make_parser().commands.choices}),
        ('diffusion da', {'data'}),
        ('diffusion data lo', {'look'}),
        ('diffusion plan --gp', {'--gpu', '--gpus', '--gpus-file'}),
        ('diffusion profile yamls/phase1.yaml --out yamls/f', {'yamls/finetune.yaml'}),
        ('diffusion check yamls/phase1', {'yamls/phase1.yaml', 'yamls/phase1-latents.yaml'}),
    ],
)
def test_bash_completes_commands_options_and_files(capsys, tmp_path, line, expected):
    script = tmp_path / 'completion.bash'
    script.write_text(output_of(capsys, 'completion', 'bash'))
    words = line.split(' ')
    ask = f'source {script}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_diffusion; echo "${{COMPREPLY[@]}}"'
    # Nothing of Python is on PATH: the script is static.
    environment = {'PATH': os.path.dirname(shutil.which('bash') or '') + ':/usr/bin:/bin'}
    command = ['bash', '-c', ask, 'bash', *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert {*done.stdout.split()} - {'-h', '--help', '--version'} == expected
