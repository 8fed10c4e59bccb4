"""`${oc.env:...}` in job specs: overrides pass it on to the nodes, and no rendered file has a value of a variable."""

import pytest

from diffusion.cli import main
from diffusion.config.load import load as load_recipe
from diffusion.launch.job_checks import check_jobs, load_job_spec
from tests.launch.specs import EVERY_BACKEND
from tests.launch.test_quoting import octal_quoted, run_with_fakes, shell_script

SECRET = 'vq8-Z1-not-to-be-seen'
TEXT = '${oc.env:KEY}'
SOURCES = {'kubernetes': 'aws/key', 'sagemaker': 'prod/key'}
CPU = {'gpu': None, 'gpus_per_node': 1, 'nodes': 1}


@pytest.fixture(autouse=True)
def _variables(monkeypatch):
    monkeypatch.setenv('KEY', SECRET)


@EVERY_BACKEND
def test_override_reaches_the_node_unresolved_and_is_resolved_there(backend, prepare, tmp_path):
    overrides = {'loggers': {'wandb': {'entity': f'a {TEXT}'}}, 'generate': {'prompts': [TEXT, r'\${lit}']}}
    overrides |= {'name': 'job', 'init_from': '${overrides.loggers.wandb.entity}'}
    changes = {'overrides': overrides, 'secrets': {'KEY': SOURCES.get(backend)}}
    checked, rendered = prepare(backend, **changes, **(CPU if backend == 'local' else {}))
    text = ''.join(rendered.files.values())
    assert SECRET not in text + str(rendered)
    assert TEXT in text
    words = checked.jobs[0].arguments[2:]
    if backend in ('slurm', 'skypilot', 'mcli', 'local'):
        # A shell must not expand the text, and neither must the back end.
        program = 'srun' if backend == 'slurm' else 'python'
        script = f'export KEY={octal_quoted(SECRET)}\n' + shell_script(backend, next(iter(rendered.files.values())))
        calls = [call['words'] for call in run_with_fakes(script, tmp_path, program, 'scontrol')]
        (words,) = [call[call.index('run.py') + 1 :] for call in calls if call[0] == program]
    recipe = load_recipe(words[0], words[1:])
    assert recipe.loggers['wandb'].kwargs['entity'] == recipe.init_from == f'a {SECRET}'
    assert recipe.generate.prompts == [SECRET, '${lit}']


def test_override_on_the_command_line_of_launch_is_passed_on_unresolved(write_spec, capsys):
    path = write_spec('slurm', secrets={'KEY': None})
    overrides = [f'overrides.loggers.wandb.entity={TEXT}', 'overrides.name=run-${name}']
    assert main(['launch', str(path), *overrides, '--render']) == 0
    printed = capsys.readouterr()
    assert f"'loggers.wandb.entity={TEXT}'" in printed.out
    assert 'name=run-job' in printed.out, 'other interpolations refer to the job spec'
    assert SECRET not in printed.out + printed.err


def test_secret_of_the_job_need_not_be_set_where_it_is_submitted(write_spec, monkeypatch):
    monkeypatch.delenv('KEY')
    overrides = {'loggers.wandb.entity': TEXT, 'trainer.max_duration': TEXT}
    path = write_spec('kubernetes', overrides=overrides, secrets={'KEY': 'aws/key'})
    (job,) = check_jobs(load_job_spec(path), path).jobs
    assert job.overrides == (f'loggers.wandb.entity={TEXT}', f'trainer.max_duration={TEXT}')
