"""Output of `diffusion launch`: what it prints and writes, and that it never contains secrets."""

from pathlib import Path

from commands import output_of, refusal

from diffusion.cli import main
from diffusion.exit_codes import CONFIG_ERROR
from diffusion.launch.cli import JobEstimate, estimate
from tests.golden import check_golden
from tests.launch.specs import EVERY_BACKEND, changed

SOURCES = {'kubernetes': 'store/key', 'sagemaker': 'store/key'}


@EVERY_BACKEND
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


def test_command_line_overrides_the_spec_and_render_prints_only_the_files(write_spec, capsys):
    path = str(write_spec('slurm'))
    assert '32 x a100-80gb' in output_of(capsys, 'launch', path, 'nodes=4', '--dry-run', 'overrides.seed=5')
    printed = output_of(capsys, 'launch', path, '--render')
    assert printed.startswith('# job.sbatch\n#!/bin/bash\n') and 'nothing was submitted' not in printed


def test_extending_file_can_change_the_backend(write_spec, tmp_path, capsys):
    write_spec('kubernetes', backend={'namespace': 'research'}).rename(tmp_path / 'base.yaml')
    changes = 'backend: {name: skypilot}\nmounts: {/workspace/runs: volume://x}\n'
    (tmp_path / 'job.yaml').write_text(f'extends: base.yaml\n{changes}')
    assert 'job.yaml: skypilot' in output_of(capsys, 'launch', tmp_path / 'job.yaml', '--dry-run')


def test_stale_price_warning_names_key_of_spec(prepare, monkeypatch):
    monkeypatch.setattr('diffusion.planning.gpus.STALE_DAYS', -1)
    for price, ways_out in ((None, ['set price_usd_per_gpu_hour']), (2, [])):
        checked, _ = prepare('slurm', price_usd_per_gpu_hour=price)
        found = estimate(checked.jobs[0], checked.gpu)
        assert isinstance(found, JobEstimate)
        assert [text.rpartition('; ')[2] for text in found.warnings if 'days old' in text] == ways_out


LONG_JOB = {
    'recipe': 'yamls/phase1-latents.yaml',
    'overrides': {'streams.laion.remote': 's3://bucket/laion', 'eval_streams.coco.remote': 's3://bucket/coco'},
    'gpu': 'h100-sxm',
    'torch': '2.9',
}


SMALL_GPU = {'gpu': 'a10g', 'overrides': {'device_train_microbatch_size': 128}}
WHOLE = {'parallelism.strategy': 'ddp', 'parallelism.checkpoints': 'whole', 'device_train_microbatch_size': 64}
LIMITS = {
    'enough time': ('slurm', {'schedule': {'time_limit': '6d'}}),
    'one requeue': ('slurm', {}),
    'all restarts': ('slurm', {'restart': {'max_restarts': 1}}),
    'five requeues': ('slurm', {'schedule': {'time_limit': '1d'}}),
    'no restarts': ('slurm', {'restart': {'max_restarts': 0}}),
    'no requeue after a save': ('slurm', {'restart': {'on_exit': {'75': 'stop'}}}),
    'no requeue by the scheduler': ('sagemaker', {}),
    'too little memory': ('slurm', SMALL_GPU | {'schedule': {'time_limit': '300d'}}),
    'too little memory and time': ('sagemaker', SMALL_GPU),
    'too little memory without sharding': ('slurm', SMALL_GPU | {'overrides': WHOLE}),
}


def test_dry_run_compares_the_plan_with_time_limit_and_memory_as_reviewed(write_spec, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr('diffusion.planning.gpus.STALE_DAYS', float('inf'))
    texts = []
    for name, (backend, changes) in LIMITS.items():
        path = write_spec(backend, **changed(LONG_JOB | {'schedule': {'time_limit': '3d'}}, changes))
        status = main(['launch', str(path), '--dry-run'])
        texts.append(f'{name}: exit status {status}\n{"".join(capsys.readouterr())}'.replace(f'{tmp_path}/', ''))
    check_golden(Path(__file__).parent / 'golden' / 'limits', {'dry-runs.txt': '\n'.join(texts)})


def test_dry_run_warns_of_local_data_that_no_earlier_stage_writes(write_spec, tmp_path, capsys):
    latents = {'name': 'trained', 'init_from': None, 'streams.openmoji.local': 'data/openmoji-latents/openmoji'}
    job = {
        'stages': {'encode': {'overrides': {'task': 'precompute'}}, 'train': {'overrides': latents}},
        'overrides': {'precompute.out': 'data/openmoji-latents'},
        'workdir': str(tmp_path),
    }
    assert main(['launch', str(write_spec('local', **job)), '--dry-run']) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if 'index.json' in line]
    missing = 'openmoji.local: data/openmoji/64px has no index.json'
    assert [line.rpartition('; is it')[0] for line in warnings] == [
        f'warning: job-encode: precompute.streams.{missing}',
        f'warning: job-train: eval_streams.{missing}',
    ]
    path = write_spec('slurm', image='x/y', mounts={str(tmp_path): '/home'}, **job)
    assert 'index.json' not in output_of(capsys, 'launch', path, '--dry-run'), 'the image may have the data'


def test_launch_exits_with_status_of_local_job(write_spec, capsys, monkeypatch):
    monkeypatch.setattr('diffusion.launch.backends.local.LocalJob.run', lambda self: CONFIG_ERROR)
    assert main(['launch', str(write_spec('local'))]) == CONFIG_ERROR
    assert capsys.readouterr().err == f'error: job: exited with status {CONFIG_ERROR}\n'
    monkeypatch.setattr('diffusion.launch.backends.local.LocalJob.run', lambda self: 0)
    assert output_of(capsys, 'launch', write_spec('local')).endswith('\njob: done\n')


def test_recipe_job_and_run_are_distinguished(write_spec, tmp_path, capsys):
    for words, expected in (
        (['launch', 'yamls/phase1.yaml'], 'this is a recipe; use a job YAML with recipe: yamls/phase1.yaml'),
        (['check', str(write_spec('slurm'))], 'which diffusion launch takes; its recipe is yamls/quickstart.yaml'),
        (['status', str(tmp_path / 'none')], 'none does not exist; use'),
        (['status', str(tmp_path)], 'has no metrics.jsonl, run.lock or checkpoint; give the folder or URL of a run'),
    ):
        assert expected in (message := refusal(capsys, *words)) and 'mistakes' not in message
