"""Mistakes in a job YAML are found before submission and reported with key, problem and fix."""

import sys

import pytest
from commands import refusal

from diffusion.cli import main
from diffusion.config.load import RecipeError
from diffusion.launch.job_checks import check_jobs, load_job_spec
from tests.launch.specs import ABSENT

RUNS = {'/workspace/runs': 'pvc://runs'}
QUICKSTART = 'recipe: yamls/quickstart.yaml: '
SHARING = {'stages': {'first': {'overrides': {'name': 'one'}}, 'second': {'overrides': {'name': 'one'}}}}


def error_message(path, *overrides):
    """Return the error message of `diffusion launch` for an invalid spec."""
    with pytest.raises(RecipeError) as raised:
        check_jobs(load_job_spec(path, overrides), path, environ={})
    return str(raised.value)


@pytest.mark.parametrize(
    ('backend', 'changes', 'expected'),
    [
        ('slurm', {'backend': {'name': 'slrum'}}, "backend.name: 'slrum' is not a backend; did you mean 'slurm'?"),
        ('slurm', {'overrides': {'model.resolutoin': 64}}, f'{QUICKSTART}model.resolutoin: unknown key; did you mean'),
        ('slurm', {'overrides': {'global_batch': 40}}, f'{QUICKSTART}global_batch: 40 does not divide over 16 devices'),
        ('slurm', {'overrides': {'notify.webhook': 'A'}}, f'{QUICKSTART}notify.webhook: the job has no variable A'),
        ('slurm', {'recipe': 'yamls/phase1.yaml'}, 'recipe: yamls/phase1.yaml: streams.laion.remote: is still ???'),
        ('slurm', SHARING, 'stages.second: saves to runs/one, like stages.first; set a different overrides.name'),
        ('slurm', {'stages': {'one': {'nodes': 0}}}, 'stages.one.nodes: 0 is not positive'),
        ('slurm', {'stages': {'one': {'overrides': {'sed': 1}}}}, f'stages.one.{QUICKSTART}sed: unknown key; did you'),
        ('slurm', {'schedule': {'que': 'gpu'}}, "schedule.que: unknown key; did you mean 'queue'?"),
        ('slurm', {'backend': {'partition': 'gpu'}}, 'backend.partition: unknown key'),
        ('slurm', {'nodes': 0}, 'nodes: 0 is not positive'),
        ('slurm', {'nodes': '???'}, 'nodes: is still ???'),
        ('slurm', {'recipe': None}, 'recipe: is missing; set it to the path of a recipe'),
        ('slurm', {'recipe': 'yamls/none.yaml'}, 'recipe: yamls/none.yaml: yamls/none.yaml does not exist'),
        ('slurm', {'gpu': 'a100-80gbb'}, "gpu: no GPU is called 'a100-80gbb'; did you mean 'a100-80gb'?"),
        ('slurm', {'price_usd_per_gpu_hour': -1}, 'price_usd_per_gpu_hour: -1 is negative'),
        ('slurm', {'gpus_per_node': 16}, 'gpus_per_node: 16 is more than the 8 GPUs of a machine with a100-80gb'),
        ('slurm', {'schedule': {'time_limit': '3 days'}}, "schedule.time_limit: '3 days' is not a duration"),
        ('slurm', {'restart': {'max_restarts': -1}}, 'restart.max_restarts: -1 is negative'),
        ('slurm', {'restart': {'max_restarts': 0, 'standby': True}}, 'restart.standby: restarts are turned off'),
        ('slurm', {'restart': {'on_exit': {'0': 'retry'}}}, 'restart.on_exit.0: is not an exit status'),
        ('slurm', {'restart': {'on_exit': {'75': 'again'}}}, "restart.on_exit.75: 'again' is not one of retry"),
        ('slurm', {'env': {'A B': 'x'}}, 'env.A B: is not a variable name; use letters, digits'),
        ('slurm', {'env': {'N': 3}}, 'env.N: 3 is not a string; put it in quotes'),
        ('slurm', {'env': {'DIFFUSION_JOB': 'x'}}, 'env.DIFFUSION_JOB: is set by the launcher'),
        ('slurm', {'env': {'HF_TOKEN': 'x'}}, 'env.HF_TOKEN: looks like a secret, and would be written in plain text'),
        ('slurm', {'overrides': {'name': 'hf_' + 'a' * 32}}, 'overrides.name: contains what looks like a secret'),
        ('slurm', {'stages': {'one': {'overrides': {'x': 'hf_' + 'a' * 32}}}}, 'stages.one.overrides.x: contains'),
        ('slurm', {'secrets': {'A': 'vault/a'}}, 'secrets.A: Slurm cannot store secrets; set it to null'),
        ('slurm', {'schedule': {'queue': 'a b'}}, "schedule.queue: 'a b' is invalid in an #SBATCH line"),
        ('slurm', {'backend': {'raw': {'comment': 'a"b'}}}, "backend.raw.comment: 'a\"b' is invalid in an #SBATCH"),
        ('slurm', {'backend': {'raw': {'-C': 'ib'}}}, 'backend.raw.-C: is not a long option of sbatch'),
        ('slurm', {'mounts': RUNS}, 'mounts: require a container image; set image'),
        ('slurm', {'image': 'image'}, 'mounts: nothing is mounted at /workspace/runs, where job saves'),
        ('slurm', {'schedule': {'preemptible': True}}, 'schedule.preemptible: has no effect on Slurm'),
        ('kubernetes', {'mounts': {'/workspace/runs': ABSENT, '/data': 'pvc://runs'}}, 'mounts: nothing is mounted'),
        ('kubernetes', {'mounts': {'runs': 'pvc://runs'}}, 'mounts.runs: is not an absolute path'),
        ('kubernetes', {'mounts': {'/workspace/runs': 's3://b'}}, "mounts./workspace/runs: 's3://b' cannot be mounted"),
        ('kubernetes', {'secrets': {'A': None}}, 'secrets.A: None is not a Kubernetes secret; use secret/key'),
        ('kubernetes', {'backend': {'raw': {'pods': {}, 'pod': {'a': 1}}}}, 'backend.raw.pods: is unknown; use one of'),
        ('kubernetes', {'schedule': {'priority': 5}}, 'schedule.priority: 5 is a number'),
        ('sagemaker', {'backend': {'role': ABSENT}}, 'backend.role: is missing; set the ARN of the IAM role'),
        ('sagemaker', {'schedule': {'time_limit': None}}, 'schedule.time_limit: is missing, and'),
        ('sagemaker', {'gpus_per_node': 4}, 'gpus_per_node: 4 of the 8 GPUs of ml.p4de.24xlarge'),
        ('sagemaker', {'gpu': 'rtx-4090'}, 'backend.instance_type: is missing; set it'),
        ('sagemaker', {'secrets': {'A': None}}, 'secrets.A: SageMaker shows environments in plain text'),
        ('sagemaker', {'mounts': {'/x': 'fsx://fs-0a/b', '/workspace/runs': 's3://b/c'}}, 'mounts./x: FSx is'),
        ('skypilot', {'name': 'a---b'}, "name: 'a---b' is not a valid SkyPilot name; use letters, digits"),
        ('skypilot', {'backend': {'network_tier': 'bst'}}, "backend.network_tier: 'bst' is not one of standard, best"),
        ('skypilot', {'backend': {'recovery': 'FAIL'}}, "backend.recovery: 'FAIL' is not one of FAILOVER, EAGER_NEXT"),
        ('skypilot', {'restart': {'on_exit': {'137': 'retry'}}}, 'restart.on_exit.137: SkyPilot ends the other nodes'),
        ('skypilot', {'schedule': {'priority': 'high'}}, "schedule.priority: 'high' is not a SkyPilot priority"),
        ('mcli', {'schedule': {'queue': None}}, 'schedule.queue: is missing; set it to one of the clusters'),
        ('mcli', {'gpus_per_node': 4}, 'gpus_per_node: 4 of 8 per machine; jobs of several nodes use'),
        ('mcli', {'gpu': 'l40s'}, 'backend.gpu_type: is missing; set it (there is no default for l40s)'),
        ('local', {'image': 'image'}, 'image: the local backend does not use a container image'),
        ('local', {'stages': {'one': {'time_limit': '1h'}}}, 'schedule.time_limit: the local backend'),
    ],
)
def test_mistake_is_reported_with_its_key(backend, changes, expected, write_spec):
    found = error_message(write_spec(backend, **changes))
    assert f'  {expected}' in found


@pytest.mark.parametrize(
    ('backend', 'changes', 'keys'),
    [
        ('local', {}, 'mounts schedule.queue schedule.priority schedule.preemptible schedule.time_limit secrets.A'),
        ('slurm', {}, 'mounts mounts./x mounts./y secrets.A'),
        ('slurm', {'recipe': None, 'stages': {'A_': {}}, 'env': {'A': 'x'}}, 'stages.A_ stages.A_.recipe env.A'),
        (
            'kubernetes',
            {'name': 'Job'},
            'name image schedule.preemptible schedule.priority mounts./x mounts./y secrets.A',
        ),
        ('skypilot', {}, 'image schedule.priority schedule.queue schedule.time_limit secrets.A mounts./x'),
        ('mcli', {}, 'image backend.gpu_type schedule.priority mounts./x mounts./y secrets.A'),
        (
            *('sagemaker', {'backend': {'instance_type': 'ml.p9', 'keep_alive_seconds': 60}}),
            'image workdir schedule.queue schedule.priority secrets.A mounts./y mounts./x mounts '
            'backend.keep_alive_seconds',
        ),
    ],
)
def test_all_mistakes_are_reported_at_once(write_spec, backend, changes, keys):
    schedule = {'queue': 'q', 'priority': 1001, 'preemptible': True, 'time_limit': '3d'}
    wrong = {'image': None, 'gpu': 'rtx-4090', 'workdir': '/work', 'schedule': schedule, 'secrets': {'A': 'a b'}}
    found = error_message(write_spec(backend, **wrong, mounts={'/x': 'nfs://x', '/y': 's3://b/c'}, **changes))
    assert [line.split(': ')[0].strip() for line in found.splitlines()[1:]] == keys.split()


def test_gpu_without_kernels_in_torch_is_refused_unless_the_image_has_them(write_spec):
    found = error_message(write_spec('slurm', gpu='b200', torch='2.7.0'))
    assert 'gpu: torch 2.7.0 has no kernels for b200 (compute capability 10.0' in found
    assert 'set torch in the job to the version in its image' in found
    path = write_spec('slurm', gpu='b200', torch='2.9', price_usd_per_gpu_hour=0)
    assert check_jobs(load_job_spec(path), path, environ={}).gpu is not None
    assert "torch: 'new' is not a version of torch" in error_message(write_spec('slurm', gpu='b200', torch='new'))


def test_number_of_nodes_that_cannot_share_the_samples_is_refused(write_spec):
    changes = {'global_batch': 48, 'loader.num_canonical_nodes': 16}
    found = error_message(write_spec('slurm', overrides=changes, nodes=3))
    assert 'loader.num_canonical_nodes: 16 cannot be split evenly over 3 nodes; use 48' in found
    assert found.endswith('; no change is needed with 2 x 8 devices')


def test_recipe_without_autoresume_is_refused_if_job_restarts(write_spec):
    path = write_spec('slurm', overrides={'trainer.autoresume': False})
    assert 'trainer.autoresume: is off, so a restart would start from scratch' in error_message(path)
    check_jobs(load_job_spec(path, ['restart.max_restarts=0']), path)


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


def test_missing_tool_is_reported_with_install_advice(write_spec, capsys, monkeypatch, tmp_path):
    path = write_spec('slurm', backend={'logs': str(tmp_path / 'logs')})
    monkeypatch.setenv('PATH', str(tmp_path / 'empty'))
    assert main(['launch', str(path)]) == 2
    assert 'error: sbatch is not on PATH; run this on a login node of the cluster' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('backend', 'message'),
    [
        ('sagemaker', 'sagemaker needs boto3; pip install boto3'),
        ('mcli', 'mcli runs cannot be submitted; pass --out DIR'),
    ],
)
def test_job_that_cannot_be_submitted_is_reported_with_the_way_out(write_spec, capsys, monkeypatch, backend, message):
    monkeypatch.setitem(sys.modules, 'boto3', None)
    assert main(['launch', str(write_spec(backend))]) == 2
    assert message in capsys.readouterr().err
