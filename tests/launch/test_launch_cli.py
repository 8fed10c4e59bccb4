"""Output of `diffusion launch`: what it prints and writes, and that it never contains secrets."""

import pytest

from diffusion.cli import main
from diffusion.exit_codes import CONFIG_ERROR
from diffusion.launch.backends import NAMES
from diffusion.launch.cli import CostEstimate, cost_table, estimate_cost

SOURCES = {'kubernetes': 'store/key', 'sagemaker': 'store/key'}


@pytest.mark.parametrize(
    'backend',
    [each if each in ('slurm', 'kubernetes') else pytest.param(each, marks=pytest.mark.slow) for each in NAMES],
)
def test_secret_value_is_neither_written_nor_printed(backend, write_spec, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('MY_SECRET', 'hunter2hunter2')
    path = write_spec(backend, secrets={'MY_SECRET': SOURCES.get(backend)})
    assert main(['launch', str(path), '--render', '--out', str(tmp_path / 'jobs')]) == 0
    assert main(['launch', str(path), '--dry-run']) == 0
    files = list((tmp_path / 'jobs').iterdir())
    assert files and not [file for file in files if file.suffix not in ('.sbatch', '.sh', '.yaml', '.json')]
    printed = capsys.readouterr()
    texts = [printed.out, printed.err, *(file.read_text() for file in files)]
    assert not any('hunter2' in text for text in texts)
    if SOURCES.get(backend):
        assert any('MY_SECRET' in text for text in texts), 'the variable is named'


def test_render_prints_only_the_files(write_spec, capsys):
    assert main(['launch', str(write_spec('slurm')), '--render']) == 0
    printed = capsys.readouterr().out
    assert printed.startswith('# job.sbatch\n#!/bin/bash\n')
    assert 'nothing was submitted' not in printed


def test_command_line_overrides_the_spec(write_spec, capsys):
    assert main(['launch', str(write_spec('slurm')), 'nodes=4', '--dry-run', 'overrides.seed=5']) == 0
    assert '32 x a100-80gb' in capsys.readouterr().out


def test_extending_file_can_change_the_backend(write_spec, tmp_path, capsys):
    write_spec('kubernetes', backend={'namespace': 'research'}).rename(tmp_path / 'base.yaml')
    (tmp_path / 'job.yaml').write_text(
        'extends: base.yaml\nbackend: {name: skypilot}\nmounts: {/workspace/runs: volume://x}\n'
    )
    assert main(['launch', str(tmp_path / 'job.yaml'), '--dry-run']) == 0
    assert 'job.yaml: skypilot' in capsys.readouterr().out


def test_job_without_cost_estimate_can_be_launched(prepare):
    checked, _ = prepare('slurm', overrides={'task': 'precompute'})
    found = estimate_cost(checked.jobs[0], checked.gpu)
    assert isinstance(found, str) and 'the plan is for training, not precompute' in found
    assert estimate_cost(checked.jobs[0], None) == 'runs on CPUs'
    lines, _ = cost_table(checked.jobs, None)
    assert lines[1].split()[-5:] == ['no', 'cost', 'runs', 'on', 'CPUs']


def test_cost_equals_estimate_of_planner(prepare):
    from diffusion.planning.gpus import load_gpus
    from diffusion.planning.plan import Assumptions, load_phases, make_plan

    checked, _ = prepare('slurm', nodes=4)
    gpus = load_gpus()
    plan = make_plan(load_phases(['yamls/quickstart.yaml']), Assumptions(gpu=gpus['a100-80gb'], gpus=32), gpus=gpus)
    found = estimate_cost(checked.jobs[0], checked.gpu)
    assert isinstance(found, CostEstimate)
    # The job trains; its data has been encoded before.
    assert found.cost.hours == pytest.approx(plan.expected.hours - plan.precompute.hours)
    checked, _ = prepare('slurm', nodes=4, price_usd_per_gpu_hour=7)
    expensive = estimate_cost(checked.jobs[0], checked.gpu)
    assert isinstance(expensive, CostEstimate)
    assert found.cost.usd and found.price_usd_per_gpu_hour == 2
    assert expensive.cost.usd == pytest.approx(found.cost.usd * 7 / 2)
    assert cost_table(checked.jobs, checked.gpu)[0][-1].startswith('at $7.00 per GPU-hour')


def test_stale_price_warning_names_key_of_spec(prepare, monkeypatch):
    monkeypatch.setattr('diffusion.planning.gpus.STALE_DAYS', -1)
    checked, _ = prepare('slurm')
    (warning,) = (found for found in cost_table(checked.jobs, checked.gpu)[1] if 'days old' in found)
    assert warning.endswith('set price_usd_per_gpu_hour')
    checked, _ = prepare('slurm', price_usd_per_gpu_hour=2)
    assert 'days old' not in ' '.join(cost_table(checked.jobs, checked.gpu)[1])


def test_launch_exits_with_status_of_local_job(write_spec, capsys, monkeypatch):
    monkeypatch.setattr('diffusion.launch.backends.local.run_local_jobs', lambda jobs: CONFIG_ERROR)
    assert main(['launch', str(write_spec('local'))]) == CONFIG_ERROR
    assert capsys.readouterr().err == f'error: job: exited with status {CONFIG_ERROR}\n'


def test_recipe_job_and_run_are_distinguished(write_spec, tmp_path, capsys):
    for words, expected in (
        (['launch', 'yamls/phase1.yaml'], 'this is a recipe; use a job YAML with recipe: yamls/phase1.yaml'),
        (['check', str(write_spec('slurm'))], 'which diffusion launch takes; its recipe is yamls/quickstart.yaml'),
        (['status', str(tmp_path / 'none')], 'none does not exist; use'),
        (['status', str(tmp_path)], 'has no metrics.jsonl, run.lock or checkpoint; give the folder or URL of a run'),
    ):
        assert main(words) == 2
        message = capsys.readouterr().err
        assert expected in message
        assert 'mistakes' not in message
