"""`diffusion status` of a run's folder with any content: it ends at once, and writes no control sequence."""

import json
import os
import time

import pytest
from commands import output_of, refusal

from diffusion.cli import main

ATTEMPT = {'event': 'end', 'at': 2.0, 'number': 0, 'begin': 1.0, 'end': 2.0, 'cause': 'crash'}
OWNER = {'token': 't', 'job': 'j', 'number': '', 'attempt': 1, 'host': 'h', 'machine': '', 'pid': 1, 'started': ''}
LOSS = '{"step": 1, "loss/train/total": 2.0}\n'
SEQUENCE = '\x1b[2J\x1b]0;title\x07\u202e'
HOSTILE_RECIPE = json.dumps({'trainer': {'max_duration': SEQUENCE}})


def record(**changes):
    return json.dumps(ATTEMPT | changes)


def lock(**changes):
    return json.dumps({'owner': OWNER | {'since': 1.0} | changes})


FILES = {
    'control sequences in an attempt': {'attempts.jsonl': record(detail=SEQUENCE, cause=SEQUENCE)},
    'wrong types in attempts': {'attempts.jsonl': f'{record(begin="b", end=[])}\n{record(cause={})}\n{record()}'},
    'no records': {'attempts.jsonl': '[1]\n5\nnull\n"x"\n{}\n'},
    'deep nesting in attempts': {'attempts.jsonl': '[' * 50_000 + '\n' + '[' * 200_000},
    'attempts that are not text': {'attempts.jsonl': b'\xff\xfe\n'},
    'huge numbers in attempts': {'attempts.jsonl': record(begin=1e308) + '\n' + record(last=10**400) + '\n' + record()},
    'a number of 5000 digits': {'attempts.jsonl': f'{{"number": {"9" * 5000}}}'},
    'NaN in attempts': {'attempts.jsonl': record(begin=float('nan'))},
    'a line of 30 MB': {'attempts.jsonl': b'x' * 30_000_000},
    'a pipe as attempts': {'attempts.jsonl': None},
    'wrong types in metrics': {'metrics.jsonl': '{"step": 1, "loss/train/total": "x"}\n5\n{"step": 1e999}\n[]\n'},
    'deep nesting in metrics': {'metrics.jsonl': '[' * 60_000},
    'a pipe as metrics': {'metrics.jsonl': None},
    'control sequences in a recipe': {'metrics.jsonl': LOSS, 'recipe.yaml': HOSTILE_RECIPE},
    'a recipe that is none': {'metrics.jsonl': LOSS, 'recipe.yaml': ':::\x00'},
    'a pipe as recipe': {'metrics.jsonl': LOSS, 'recipe.yaml': None},
    'control sequences in a lock': {'run.lock': lock(host=SEQUENCE, job=SEQUENCE)},
    'wrong types in a lock': {'run.lock': lock(pid='../..', since='x')},
    'a time that is none in a lock': {'run.lock': lock(since=1e300)},
    'deep nesting in a lock': {'run.lock': '[' * 50_000},
    'a checkpoint of a huge number': {'metrics.jsonl': LOSS, f'ba{"9" * 200}/x': ''},
}


@pytest.mark.parametrize('name', FILES)
def test_status_of_hostile_folder_ends_at_once_without_control_sequences(name, tmp_path, capsys):
    run = tmp_path / 'run'
    run.mkdir()
    for file, content in FILES[name].items():
        path = run / file
        path.parent.mkdir(exist_ok=True)
        if content is None:
            os.mkfifo(path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    began = time.monotonic()
    assert main(['status', str(run)]) in (0, 2)
    assert time.monotonic() - began < 10
    printed = ''.join(capsys.readouterr())
    assert all(character.isprintable() or character == '\n' for character in printed)
    assert 'Traceback' not in printed


def test_good_records_beside_bad_ones_are_shown(tmp_path, capsys):
    shortest = json.dumps({'event': 'begin', 'at': 3.0, 'number': 1, 'begin': 2.5})
    lines = [record(begin='b'), record(status=1, detail='rank 3'), shortest, 'half a li']
    (tmp_path / 'attempts.jsonl').write_text('\n'.join(lines))
    assert '2 attempts' in (printed := output_of(capsys, 'status', tmp_path))
    assert 'process failed (rank 3), exit status 1' in printed


@pytest.mark.parametrize(
    'arguments', [['check', 'a\0b'], ['status', 'a\0b'], ['generate', 'a\0b', 'x'], ['check', '\x1b[2J']]
)
def test_hostile_argument_is_an_error_without_control_sequences(arguments, capsys):
    assert refusal(capsys, *arguments).strip().replace('\n', '').isprintable()
