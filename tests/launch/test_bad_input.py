"""Mistakes in a job YAML are found before submission and reported with key, problem and fix."""

import sys
from pathlib import Path

import pytest
from commands import refusal

from diffusion.cli import main
from diffusion.config.load import RecipeError
from diffusion.launch.job_checks import check_jobs, load_job_spec
from tests.golden import check_golden
from tests.launch.specs import ABSENT

TOKEN = 'hf_' + 'a' * 32
VALUE = '${oc.env:HOSTILE}'
SCHEDULE = {'queue': 'q', 'priority': 1001, 'preemptible': True, 'time_limit': '3d'}
WRONG = {
    'image': None,
    'gpu': 'rtx-4090',
    'workdir': '/work',
    'schedule': SCHEDULE,
    'secrets': {'A': 'a b', 'B': None},
    'mounts': {'/x': 'nfs://x', '/y': 's3://b/c'},
}
MISTAKES = {
    'local': [
        WRONG,
        {'image': 'image', 'schedule': {'preemptible': True}},
        {'stages': {'one': {'time_limit': '1h'}}},
    ],
    'slurm': [
        {'backend': {'name': 'slrum'}},
        {'backend': {'name': None}},
        {
            'nodes': '???',
            'env': {'N': 3},
            'schedule': {'que': 'gpu'},
            'backend': {'partition': 'gpu'},
            'restart': {'on_exit': {'75': 'again'}},
            'overrides': {'name': TOKEN},
            'stages': {'one': {'overrides': {'x': TOKEN}}},
        },
        {
            'nodes': 0,
            'gpus_per_node': -1,
            'hang_seconds': 0,
            'price_usd_per_gpu_hour': -1,
            'schedule': {'notice_seconds': 0, 'time_limit': '3 days'},
            'restart': {'max_restarts': -1, 'on_exit': {'0': 'retry', '255': 'retry', '256': 'stop', 'x': 'stop'}},
            'mounts': {'runs': '/runs'},
            'recipe': None,
            'stages': {'A_': {'nodes': 0, 'time_limit': '0h'}, 'one-': {'recipe': 'yamls/quickstart.yaml'}},
            'env': {
                'WANDB': '0123456789' * 4,
                'A B': 'x',
                'DIFFUSION_JOB': 'x',
                'HF_TOKEN': 'x',
                'A': TOKEN,
                'OK': 'x',
                'BOTH': 'x',
            },
            'secrets': {'1A': None, 'DIFFUSION_A': None, 'BOTH': None},
        },
        {'recipe': None, 'restart': {'max_restarts': 0, 'standby': True}},
        {
            'overrides': {'model.resolutoin': 64},
            'stages': {
                'one': {'overrides': {'sed': 1}},
                'two': {'recipe': 'yamls/quickstrat.yaml'},
                'three': {'recipe': 'yamls/phase1.yaml'},
            },
        },
        {
            'overrides': {
                'global_batch': 40,
                'notify.webhook': 'A',
                'notify.command': 'B',
                'trainer.autoresume': False,
            }
        },
        {'overrides': {'notify.webhook': 'A', 'notify.command': 'B'}, 'env': {'A': 'x'}, 'backend': {'logs': 'a b'}},
        {'overrides': {'global_batch': 48, 'loader.num_canonical_nodes': 16}, 'nodes': 3},
        {'stages': {name: {'overrides': {'name': run}} for name, run in zip('abc', ('x', 'y', 'x'), strict=True)}},
        {'stages': {name: {'overrides': {'name': 'x'}} for name in ('first', 'second')}, 'gpu': 'a100-80gbb'},
        {'gpus_per_node': 16, 'name': 'a' * 65, 'image': 'image'},
        {'gpu': 'b200', 'torch': '2.7.0'},
        {'gpu': 'b200', 'torch': 'new'},
        WRONG,
        {
            'image': 'image',
            'workdir': 'a b',
            'schedule': {'queue': 'a b', 'priority': 'a#', 'preemptible': True},
            'backend': {'raw': {'comment': 'a"b', '-C': 'ib', 'x': True}, 'account': 'a b', 'gpu_type': '\\'},
            'mounts': {'/a b': '/c', '/d': 'e'},
        },
        {'schedule': {'preemptible': True}},
    ],
    'kubernetes': [
        WRONG | {'name': 'Job'},
        {
            'name': 'a' * 50,
            'mounts': {'/workspace/runs': ABSENT, '/data': 'pvc://runs', '/x': 's3://b'},
            'secrets': {'A': None},
            'backend': {'raw': {'pods': {}, 'pod': {'a': 1}}},
        },
        {
            'env': {'A': VALUE},
            'secrets': {'A': VALUE},
            'image': f'registry/{VALUE}',
            'workdir': VALUE,
            'name': VALUE,
            'nodes': f'${{oc.decode:{VALUE}}}',
            'recipe': VALUE,
            'schedule': {'queue': VALUE},
            'mounts': {'/workspace/runs': f'pvc://{VALUE}'},
            'backend': {'raw': {'pod': {'a': '${backend.raw.pod.b}', 'b': VALUE}}},
            'stages': {'one': {'time_limit': VALUE, 'overrides': {'name': VALUE}}},
            'overrides': {'seed': VALUE},
        },
        {'overrides': {'loggers.wandb.entity': '${oc.env:NOT_SET}'}},
        {'overrides': {'loggers.wandb.entity': VALUE, 'loggers.wandb.group': '${oc.env:HOME}'}},
        {
            'backend': {'raw': {'container': {'env': [{'name': 'HF_TOKEN', 'value': 'x'}]}}},
            'image': 'https://user:hunter2@registry/image',
            'overrides': {'loggers.wandb.init_kwargs': {'api_key': 'hunter2'}},
            'mounts': {'/workspace/runs': 'https://a.blob.core.windows.net/c?sv=1&sig=' + 'aB3%2F' * 8},
        },
    ],
    'sagemaker': [
        {'backend': {'role': ABSENT}},
        {'schedule': {'time_limit': None}, 'gpus_per_node': 4, 'secrets': {'A': None}},
        {'gpu': None, 'name': 'a_b', 'mounts': {'/x': 'fsx://fs-0a/b', '/workspace/runs': 's3://b/c'}},
        {'gpu': 'rtx-4090'},
        WRONG | {'backend': {'instance_type': 'ml.p9', 'keep_alive_seconds': 60}},
    ],
    'skypilot': [
        {'name': 'a---b', 'schedule': {'priority': 'high'}, 'restart': {'on_exit': {'137': 'retry'}}},
        {'backend': {'network_tier': 'bst', 'recovery': 'FAIL'}},
        {'schedule': {'priority': -1001}, 'mounts': {'/workspace/runs': ABSENT, '/data': 's3://b/c'}},
        WRONG,
    ],
    'mcli': [
        {'name': 'a_b', 'gpus_per_node': 4, 'schedule': {'queue': None}},
        {'gpu': 'l40s'},
        {'gpu': None},
        WRONG,
    ],
}
"""Changes of a valid job spec by backend; those in one mapping must all be reported at once."""


def error_message(path, *overrides):
    """Return the error message of `diffusion launch` for an invalid spec."""
    with pytest.raises(RecipeError) as raised:
        check_jobs(load_job_spec(path, overrides), path, environ={})
    return str(raised.value)


def test_all_mistakes_of_a_spec_are_reported_at_once_with_key_and_fix(write_spec, tmp_path, monkeypatch):
    monkeypatch.setenv('HOSTILE', '4711')  # which no message may show
    texts = {}
    for backend, cases in MISTAKES.items():
        messages = [(changes, error_message(write_spec(backend, **changes))) for changes in cases]
        text = '\n'.join(f'{changes}\n{message}\n' for changes, message in messages)
        texts[f'{backend}.txt'] = text.replace(f'{tmp_path}/', '').replace(repr(ABSENT), 'ABSENT')
    check_golden(Path(__file__).parent / 'golden' / 'mistakes', texts)


def test_unset_secret_stops_launch_but_not_dry_run(write_spec, capsys, monkeypatch):
    monkeypatch.delenv('MY_SECRET', raising=False)
    path = write_spec('slurm', secrets={'MY_SECRET': None, 'OTHER': None})
    monkeypatch.setenv('OTHER', 'x')
    assert main(['launch', str(path), '--dry-run']) == 0
    expected = 'secrets.MY_SECRET: is not set in the environment; export it before submitting'
    assert f'required before submission: {expected}' in capsys.readouterr().out
    assert main(['launch', str(path)]) == 2
    captured = capsys.readouterr()
    assert f'nothing was submitted:\n  {expected}' in captured.err
    assert 'OTHER' not in captured.err


def test_no_job_is_submitted_if_one_is_invalid(write_spec, tmp_path, capsys, add_program):
    add_program('sbatch', f'#!/bin/bash\ntouch {tmp_path}/submitted\n')
    good = write_spec('slurm').rename(tmp_path / 'good.yaml')
    bad = write_spec('slurm', nodes=0)
    assert 'nodes: 0 is not positive' in refusal(capsys, 'launch', good, bad)
    assert not (tmp_path / 'submitted').exists()


def test_job_that_cannot_be_submitted_is_reported_with_the_way_out(write_spec, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'boto3', None)
    monkeypatch.setenv('PATH', str(tmp_path / 'empty'))
    for backend, options, message in (
        ('slurm', {'logs': str(tmp_path)}, 'error: sbatch is not on PATH; run this on a login node of the cluster'),
        ('sagemaker', {}, 'sagemaker needs boto3; pip install boto3'),
        ('mcli', {}, 'mcli runs cannot be submitted; pass --out DIR'),
    ):
        assert main(['launch', str(write_spec(backend, backend=options))]) == 2
        assert message in capsys.readouterr().err
