"""Mistakes in a job's YAML: found before anything is submitted, and answered with where, what and the way out."""

import sys

import pytest

from diffusion.cli import main
from diffusion.config.load import RecipeError
from diffusion.launch.job_checks import check_jobs, load_job_spec
from tests.launch.specs import ABSENT

RUNS = {'/workspace/runs': 'pvc://runs'}


def answer(path, *overrides):
    """What `diffusion launch` would say of a spec that is wrong."""
    with pytest.raises(RecipeError) as raised:
        check_jobs(load_job_spec(path, overrides), path, environ={})
    return str(raised.value)


@pytest.mark.parametrize(
    ('backend', 'changes', 'expected'),
    [
        ('slurm', {'node': 2}, "node: unknown key; did you mean 'nodes'?"),
        ('slurm', {'schedule': {'que': 'gpu'}}, "schedule.que: unknown key; did you mean 'queue'?"),
        ('slurm', {'backend': {'partition': 'gpu'}}, 'backend.partition: unknown key'),
        ('slurm', {'nodes': 0}, 'nodes: 0 is not positive'),
        ('slurm', {'nodes': 'two'}, "nodes: 'two' is not an integer"),
        ('slurm', {'nodes': '???'}, 'nodes: is still ???'),
        ('slurm', {'recipe': None}, 'recipe: is missing; give the path of a recipe'),
        ('slurm', {'recipe': 'yamls/none.yaml'}, 'recipe: yamls/none.yaml: yamls/none.yaml cannot be read'),
        ('slurm', {'gpu': 'a100-80gbb'}, "gpu: no GPU is called 'a100-80gbb'; did you mean 'a100-80gb'?"),
        ('slurm', {'price_usd_per_gpu_hour': -1}, 'price_usd_per_gpu_hour: -1 is negative'),
        ('slurm', {'gpus_per_node': 16}, 'gpus_per_node: 16 is more than the 8 of a machine with a100-80gb'),
        (
            'slurm',
            {'schedule': {'time_limit': '3 days'}},
            "schedule.time_limit: '3 days' is not a time; write a number",
        ),
        ('slurm', {'restart': {'max_restarts': -1}}, 'restart.max_restarts: -1 is negative'),
        ('slurm', {'restart': {'on_exit': {'0': 'retry'}}}, 'restart.on_exit.0: is no exit status'),
        ('slurm', {'restart': {'on_exit': {'75': 'again'}}}, "restart.on_exit.75: 'again' is not one of retry"),
        ('slurm', {'env': {'A B': 'x'}}, 'env.A B: is no name of an environment variable'),
        ('slurm', {'env': {'N': 3}}, 'env.N: 3 is not a string; put it in quotes'),
        ('slurm', {'env': {'DIFFUSION_JOB': 'x'}}, 'env.DIFFUSION_JOB: is set by the launcher'),
        ('slurm', {'env': {'HF_TOKEN': 'x'}}, 'env.HF_TOKEN: looks like a secret, and would be written out'),
        ('slurm', {'overrides': {'name': 'hf_' + 'a' * 32}}, 'overrides.name: holds what looks like a secret'),
        (
            'slurm',
            {'stages': {'one': {'overrides': {'name': 'hf_' + 'a' * 32}}}},
            'stages.one.overrides.name: holds what looks like a secret',
        ),
        ('slurm', {'secrets': {'A': 'vault/a'}}, 'secrets.A: Slurm has no secrets; leave it null'),
        ('slurm', {'schedule': {'queue': 'a b'}}, "schedule.queue: 'a b' cannot stand in an #SBATCH line"),
        ('slurm', {'backend': {'raw': {'comment': 'a"b'}}}, "backend.raw.comment: 'a\"b' cannot stand in an #SBATCH"),
        ('slurm', {'backend': {'raw': {'-C': 'ib'}}}, 'backend.raw.-C: is no long option of sbatch'),
        ('slurm', {'mounts': RUNS}, 'mounts: need an image'),
        ('slurm', {'image': 'image'}, 'mounts: nothing is mounted at /workspace/runs, where job saves'),
        ('slurm', {'schedule': {'preemptible': True}}, 'schedule.preemptible: is chosen in Slurm by a partition'),
        ('kubernetes', {'image': None}, 'image: is missing; a pod needs one'),
        (
            'kubernetes',
            {'mounts': {'/workspace/runs': ABSENT, '/data': 'pvc://runs'}},
            'mounts: nothing is mounted at /workspace/runs',
        ),
        ('kubernetes', {'mounts': {'runs': 'pvc://runs'}}, 'mounts.runs: is no absolute path on a node'),
        ('kubernetes', {'mounts': {'/workspace/runs': 's3://b'}}, "mounts./workspace/runs: 's3://b' cannot be mounted"),
        ('kubernetes', {'secrets': {'A': None}}, 'secrets.A: None is not where Kubernetes has it; write secret/key'),
        ('kubernetes', {'backend': {'raw': {'pods': {}, 'pod': {'a': 1}}}}, 'backend.raw.pods: is not one of jobset'),
        ('kubernetes', {'schedule': {'priority': 5}}, 'schedule.priority: 5 is a number'),
        ('sagemaker', {'backend': {'role': ABSENT}}, 'backend.role: is missing; give the ARN of the role'),
        (
            'sagemaker',
            {'schedule': {'time_limit': None}},
            "schedule.time_limit: is missing; SageMaker's own is one day",
        ),
        ('sagemaker', {'gpus_per_node': 4}, 'gpus_per_node: 4 of the 8 GPUs of ml.p4de.24xlarge'),
        ('sagemaker', {'gpu': 'rtx-4090'}, 'backend.instance_type: is missing; no machine of SageMaker is known'),
        ('sagemaker', {'secrets': {'A': None}}, 'secrets.A: SageMaker shows a job its environment in the open'),
        ('sagemaker', {'schedule': {'queue': 'q'}}, 'schedule.queue: is unknown to SageMaker'),
        (
            'sagemaker',
            {'mounts': {'/x': 'fsx://fs-0a/b', '/workspace/runs': 's3://b/c'}},
            'mounts./x: FSx is mounted at',
        ),
        ('skypilot', {'name': 'a---b'}, "name: 'a---b' is no name in SkyPilot; use letters and digits with a dash"),
        ('skypilot', {'backend': {'network_tier': 'bst'}}, "backend.network_tier: 'bst' is not one of standard, best"),
        ('skypilot', {'backend': {'recovery': 'FAIL'}}, "backend.recovery: 'FAIL' is not one of FAILOVER, EAGER_NEXT"),
        ('skypilot', {'restart': {'on_exit': {'137': 'retry'}}}, 'restart.on_exit.137: SkyPilot ends the other nodes'),
        ('skypilot', {'schedule': {'priority': 'high'}}, "schedule.priority: 'high' is no priority of SkyPilot"),
        ('skypilot', {'schedule': {'time_limit': '3d'}}, 'schedule.time_limit: is unknown to SkyPilot'),
        ('mcli', {'schedule': {'queue': None}}, 'schedule.queue: is missing; give the cluster'),
        (
            'mcli',
            {'gpus_per_node': 4},
            'gpus_per_node: 4 of the 8 of a machine; several nodes are whole machines: use 8',
        ),
        ('mcli', {'gpu': 'l40s'}, 'backend.gpu_type: is missing; there is no usual name of l40s'),
        ('local', {'image': 'image'}, 'image: is not used on this machine'),
        ('local', {'schedule': {'queue': 'q'}}, 'schedule.queue: there is no scheduler on this machine'),
        ('local', {'schedule': {'preemptible': True}}, 'schedule.preemptible: there is no scheduler on this machine'),
        (
            'local',
            {'stages': {'one': {'time_limit': '1h'}}},
            'schedule.time_limit: there is no scheduler on this machine',
        ),
    ],
)
def test_a_mistake_is_named_with_its_place(backend, changes, expected, write_spec):
    found = answer(write_spec(backend, **changes))
    assert f'  {expected}' in found


def test_every_mistake_is_in_one_answer(write_spec):
    found = answer(write_spec('kubernetes', name='Job', image=None, schedule={'preemptible': True}))
    for expected in ("name: 'Job' is no name in Kubernetes", 'image: is missing', 'schedule.preemptible: is chosen'):
        assert expected in found


def test_a_recipe_that_check_refuses_is_not_submitted(write_spec):
    path = write_spec('slurm', overrides={'global_batch': 40, 'model.resolutoin': 64})
    assert "recipe: yamls/quickstart.yaml: model.resolutoin: unknown key; did you mean 'resolution'?" in answer(path)
    path = write_spec('slurm', overrides={'global_batch': 40})
    expected = 'recipe: yamls/quickstart.yaml: global_batch: 40 does not divide over 16 devices; use 32 or 48'
    assert expected in answer(path)


def test_values_that_a_recipe_still_misses_are_named(write_spec):
    found = answer(write_spec('slurm', recipe='yamls/phase1.yaml'))
    assert 'recipe: yamls/phase1.yaml: streams.laion.remote: is still ???; give the object store folder' in found


def test_a_recipe_that_would_begin_anew_after_a_restart_is_refused(write_spec):
    path = write_spec('slurm', overrides={'trainer.autoresume': False})
    assert 'trainer.autoresume: is not on, so that a restart would begin anew' in answer(path)
    check_jobs(load_job_spec(path, ['restart.max_restarts=0']), path)


def test_an_unknown_back_end_gets_the_nearest(write_spec):
    path = write_spec('slurm')
    assert "backend.name: 'slrum' is no back end; did you mean 'slurm'?" in answer(path, 'backend.name=slrum')


def test_two_stages_do_not_share_a_folder(write_spec):
    stages = {'first': {'overrides': {'name': 'one'}}, 'second': {'overrides': {'name': 'one'}}}
    found = answer(write_spec('slurm', stages=stages))
    assert 'stages.second: saves to runs/one, as stages.first does; give it another overrides.name' in found


def test_a_mistake_in_a_stage_has_its_place(write_spec):
    stages = {'first': {'overrides': {'name': 'one'}}, 'second': {'overrides': {'name': 'two', 'sed': 1}, 'nodes': 0}}
    assert 'stages.second.nodes: 0 is not positive' in answer(write_spec('slurm', stages=stages))
    stages['second']['nodes'] = 1
    found = answer(write_spec('slurm', stages=stages))
    assert "stages.second.recipe: yamls/quickstart.yaml: sed: unknown key; did you mean 'seed'?" in found


@pytest.mark.parametrize('backend', ['slurm', 'skypilot', 'mcli', 'local'])
def test_a_secret_that_is_not_there_stops_the_launch_and_no_dry_run(backend, write_spec, capsys, monkeypatch):
    monkeypatch.delenv('MY_SECRET', raising=False)
    path = write_spec(backend, secrets={'MY_SECRET': None, 'OTHER': None})
    monkeypatch.setenv('OTHER', 'x')
    assert main(['launch', str(path), '--dry-run']) == 0
    needed = 'secrets.MY_SECRET: is not in the environment that the job is submitted from; export it'
    assert f'before it can be submitted: {needed}' in capsys.readouterr().out
    assert main(['launch', str(path)]) == 2
    captured = capsys.readouterr()
    assert f'nothing was submitted:\n  {needed}' in captured.err
    assert 'OTHER' not in captured.err


def test_null_in_a_yaml_is_no_secret_elsewhere(write_spec, capsys):
    path = write_spec('kubernetes', secrets={'A': 'aws/key'})
    assert main(['launch', str(path), '--dry-run']) == 0
    assert 'before it can be submitted' not in capsys.readouterr().out


def test_nothing_is_submitted_where_one_of_two_jobs_is_wrong(write_spec, tmp_path, capsys, monkeypatch):
    programs = tmp_path / 'bin'
    programs.mkdir()
    (programs / 'sbatch').write_text(f'#!/bin/bash\ntouch {tmp_path}/submitted\n')
    (programs / 'sbatch').chmod(0o755)
    monkeypatch.setenv('PATH', str(programs), prepend=':')
    good = write_spec('slurm').rename(tmp_path / 'good.yaml')
    bad = write_spec('slurm', nodes=0)
    assert main(['launch', str(good), str(bad)]) == 2
    assert 'nodes: 0 is not positive' in capsys.readouterr().err
    assert not (tmp_path / 'submitted').exists()


@pytest.mark.parametrize(
    ('backend', 'tool', 'way_out'),
    [
        ('slurm', 'sbatch', 'run this on a login node of the cluster'),
        ('kubernetes', 'kubectl', 'install kubectl'),
        ('skypilot', 'sky', 'pip install skypilot'),
    ],
)
def test_a_missing_tool_says_what_to_install(backend, tool, way_out, write_spec, capsys, monkeypatch, tmp_path):
    path = write_spec(backend, backend={'logs': str(tmp_path / 'logs')} if backend == 'slurm' else {})
    monkeypatch.setenv('PATH', str(tmp_path / 'empty'))
    assert main(['launch', str(path)]) == 2
    assert f'error: {tool}: is not on PATH; {way_out}' in capsys.readouterr().err


def test_a_missing_sdk_says_which_extra(write_spec, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'boto3', None)
    assert main(['launch', str(write_spec('sagemaker'))]) == 2
    assert 'sagemaker needs boto3; pip install boto3' in capsys.readouterr().err


def test_mcli_is_rendered_and_not_submitted(write_spec, capsys):
    assert main(['launch', str(write_spec('mcli'))]) == 2
    assert 'runs of mcli are rendered only; use --out DIR' in capsys.readouterr().err
