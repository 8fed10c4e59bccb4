"""Quoting: overrides and environment variables reach the job unchanged, through shells and Kubernetes."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from diffusion.config.load import load as load_recipe

HOSTILE = [
    'it\'s $(touch pwned) `touch pwned` $HOME ${HOME} \\ " ; & | > pwned * ~ # !',
    '$(POD_IP) $$(POD_IP) $$ $',
    'two\nlines\n',
    '--flag=x',
    '-- \t é 漢',
    'line\x85break\u2028',
    '${oc.env:HOME}',
    "$'\\n'",
    '',
]
characters = st.characters(blacklist_categories=['Cs'], blacklist_characters='\0')
# A value that is still to be set is written ???, and refused.
words = st.text(characters, max_size=8).filter(lambda text: text != '???')
text_lists = st.lists(words, min_size=1, max_size=2)
"""Short enough that one argument stays within the SageMaker limit after escaping."""
SHELLS = ('slurm', 'skypilot', 'mcli', 'local')
few = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def hostile(texts):
    """Return changes of a job that put the texts into overrides and environment variables, with `$` escaped."""
    literal = [re.sub(r'(\\*)\$\{', r'\1\1\\${', text) for text in texts]
    overrides = {'name': 'hostile', 'generate': {'prompts': literal, 'negative_prompt': literal[0]}}
    return {'overrides': overrides, 'env': {f'WORD_{index}': text for index, text in enumerate(literal)}}


def run_with_fakes(script: str, folder: Path, *names: str) -> list[dict[str, Any]]:
    """Run a script with fake programs on PATH; return their calls in order."""
    programs = folder / 'bin'
    programs.mkdir(exist_ok=True)
    calls = folder / 'calls'
    calls.unlink(missing_ok=True)
    for name in names:
        lines = ['#!/bin/bash', f'printf "%s\\0" {name} "$@" >> {calls}', f'echo -n E >> {calls}', f'env -0 >> {calls}']
        (programs / name).write_text('\n'.join([*lines, f'echo -n E >> {calls}', '']))
        (programs / name).chmod(0o755)
    environment = os.environ | {'PATH': f'{programs}:{os.environ["PATH"]}', 'SLURM_JOB_ID': '7'}
    subprocess.run(['bash'], input=script.encode(), cwd=folder, env=environment, capture_output=True, check=False)
    assert not (folder / 'pwned').exists(), 'the shell executed user input'
    parts = calls.read_bytes().decode().split('\0E')
    return [
        {'words': words.split('\0'), 'env': dict(entry.split('=', 1) for entry in env.split('\0'))}
        for words, env in zip(parts[::2], parts[1::2], strict=False)
    ]


def shell_script(backend: str, text: str) -> str:
    """Return the script that bash executes for a rendered file."""
    if backend in ('slurm', 'local'):
        return text
    document = yaml.safe_load(text)
    variables = document.get('envs') or document.get('env_variables')
    # Both platforms set the variables without a shell. The folder exists only in the image.
    quoted = '\n'.join(f'export {name}={octal_quoted(value)}' for name, value in variables.items())
    command = document.get('run') or document['command']
    return f'{quoted}\n' + command.replace('cd /workspace && exec ', '', 1)


def octal_quoted(value: str) -> str:
    """Return a bash word, independent of shlex: every byte as an octal escape."""
    return "$'" + ''.join(f'\\{byte:03o}' for byte in value.encode()) + "'"


@pytest.mark.parametrize(
    'backend', [pytest.param(each, marks=pytest.mark.slow) if each != 'slurm' else each for each in SHELLS]
)
@few
@given(texts=text_lists)
@example(texts=HOSTILE)
@example(texts=['0E0', '1e3', '.5', '2026-01-01', 'yes'])
def test_shell_passes_overrides_and_variables_unchanged(backend, texts, prepare, tmp_path):
    changes = hostile(texts) | ({'gpu': None, 'gpus_per_node': 1, 'nodes': 1} if backend == 'local' else {})
    checked, rendered = prepare(backend, **changes)
    program = 'srun' if backend == 'slurm' else 'python'
    script = shell_script(backend, next(iter(rendered.files.values())))
    (call,) = [each for each in run_with_fakes(script, tmp_path, program, 'scontrol') if each['words'][0] == program]
    assert [call['env'][f'WORD_{index}'] for index in range(len(texts))] == texts
    start = call['words'].index('run.py')
    assert call['words'][start - 1] == '--'
    assert call['words'][start + 1 :] == [checked.jobs[0].recipe, *checked.jobs[0].overrides]
    recipe = load_recipe(call['words'][start + 1], call['words'][start + 2 :])
    assert (recipe.generate.prompts, recipe.generate.negative_prompt) == (texts, texts[0]), 'as parsed by run.py'


@pytest.mark.parametrize('backend', ['skypilot', 'mcli'])
def test_workdir_with_special_characters(backend, prepare, tmp_path):
    folder = tmp_path / 'a b;touch pwned'
    folder.mkdir()
    mounts = {'mounts': {str(tmp_path): 'volume://runs'}} if backend == 'skypilot' else {}
    _, rendered = prepare(backend, workdir=str(folder), **mounts)
    (call,) = run_with_fakes(shell_script(backend, rendered.files['job.yaml']), tmp_path, 'python')
    assert call['env']['PWD'] == str(folder)


def test_logs_folder_with_special_characters(prepare, tmp_path):
    _, rendered = prepare('slurm', backend={'logs': 'a;>pwned'})
    (tmp_path / 'a;>pwned').mkdir()
    call = run_with_fakes(rendered.files['job.sbatch'], tmp_path, 'srun', 'squeue', 'scontrol')[0]
    assert call['env']['DIFFUSION_EXIT_FILE'].startswith(str(tmp_path / 'a;>pwned'))


def expanded(text: str, variables: dict[str, str]) -> str:
    """Return the text after the expansion of $(NAME) by the kubelet; see its third_party/forked/golang/expansion."""
    out, cursor = '', 0
    while cursor < len(text):
        if text[cursor] != '$' or cursor + 1 == len(text):
            out, cursor = out + text[cursor], cursor + 1
        elif text[cursor + 1] == '$':
            out, cursor = out + '$', cursor + 2
        elif text[cursor + 1] == '(' and ')' in text[cursor + 2 :]:
            end = text.index(')', cursor + 2)
            name = text[cursor + 2 : end]
            out, cursor = out + variables.get(name, f'$({name})'), end + 1
        else:
            out, cursor = out + text[cursor : cursor + 2], cursor + 2
    return out


@pytest.mark.slow
@few
@given(texts=text_lists)
@example(texts=HOSTILE)
def test_kubernetes_passes_overrides_and_variables_unchanged(texts, prepare):
    checked, rendered = prepare('kubernetes', **hostile(texts))
    pod = yaml.safe_load(rendered.files['job.yaml'])['spec']['replicatedJobs'][0]['template']['spec']['template']
    container = pod['spec']['containers'][0]
    variables = {'POD_IP': '10.0.0.1', 'HOME': '/root'}
    assert [expanded(word, variables) for word in container['args']] == checked.jobs[0].command
    env = {entry['name']: entry.get('value', '') for entry in container['env']}
    assert [expanded(env[f'WORD_{index}'], variables) for index in range(len(texts))] == texts


@few
@given(texts=text_lists)
@example(texts=HOSTILE)
def test_sagemaker_passes_overrides_and_variables_unchanged(texts, prepare):
    checked, rendered = prepare('sagemaker', **hostile(texts))
    request = json.loads(rendered.files['job.json'])
    assert request['AlgorithmSpecification']['ContainerArguments'] == checked.jobs[0].arguments
    assert [request['Environment'][f'WORD_{index}'] for index in range(len(texts))] == texts
