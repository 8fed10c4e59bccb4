"""Rendered SkyPilot tasks and MosaicML runs, validated by the rules of SkyPilot and mcli themselves."""

import dataclasses
import re
import typing

import pytest
import yaml
from commands import output_of

from diffusion.launch.backends import mcli
from diffusion.launch.backends import skypilot as backend
from diffusion.launch.backends.base import Rendered
from diffusion.planning.gpus import load_gpus


def task_of(rendered):
    return yaml.safe_load(rendered.files['job.yaml'])


def test_nothing_restarts_a_job_without_restarts(prepare):
    task, run = (task_of(prepare(name, restart={'max_restarts': 0})[1]) for name in ('skypilot', 'mcli'))
    assert task['resources']['job_recovery'] == {'max_restarts_on_errors': 0, 'recover_on_exit_codes': []}
    assert {'max_retries': 0, 'retry_on_system_failure': False}.items() <= run['scheduling'].items()


def test_unknown_key_of_task_is_found(prepare):
    with pytest.raises(AssertionError, match=r"backend\.raw\.num_node: unknown key; did you mean 'num_nodes'\?"):
        prepare('skypilot', backend={'raw': {'num_node': 3}})
    with pytest.raises(AssertionError, match=r"resources\.use_spots: unknown key; did you mean 'use_spot'\?"):
        prepare('skypilot', backend={'raw': {'resources': {'use_spots': True}}})


def test_every_gpu_has_a_name_in_skypilot():
    assert backend.ACCELERATORS.keys() == load_gpus().keys()


def test_submit_logs_and_cancel_name_the_job_and_status_excludes_longer_names(write_spec, add_program, capsys):
    program = 'echo "$@"\n[ $2 != queue ] || printf "1  -  job  RUNNING\\n2  -  job-of-another  RUNNING\\n"\n'
    add_program('sky', f'#!/bin/bash\n{program}')
    path = write_spec('skypilot')
    assert re.search(r'jobs launch \S+/job\.yaml --yes --async\n', output_of(capsys, 'launch', path))
    assert output_of(capsys, 'status', path) == '1  -  job  RUNNING\n'
    other = write_spec('skypilot', name='other')
    assert output_of(capsys, 'status', other) == "other: not in SkyPilot's queue of managed jobs\n"
    path = write_spec('skypilot')
    assert output_of(capsys, 'logs', path) == 'jobs logs --name job --no-follow\n'
    assert output_of(capsys, 'cancel', path) == 'jobs cancel --yes --name job\n'


VARIANTS = {
    'schedule': {'schedule': {'priority': -1000, 'preemptible': True}, 'restart': {'max_restarts': 0}},
    'secrets': {'secrets': {'MY_SECRET': None}, 'env': {'A': 'it\'s $(x) "y"\n', 'B': ''}},
    'workdir': {'workdir': '/a b', 'mounts': {'/a b': 'volume://runs'}},
}


@pytest.mark.slow
@pytest.mark.parametrize('variant', VARIANTS)
def test_skypilot_accepts_the_tasks(variant, prepare, skypilot):
    _, rendered = prepare('skypilot', **VARIANTS[variant])
    assert skypilot.problem(rendered.files['job.yaml']) is None


@pytest.mark.slow
def test_copied_keys_and_recovery_strategies_match_skypilot(skypilot):
    for kind in (backend.Task, backend.Resources, backend.JobRecovery):
        # Keys of services, and keys that SkyPilot adds itself.
        excluded = {'service', 'file_mounts_mapping', 'volume_mounts'} if kind is backend.Task else set()
        skypilot_keys = {key for key in skypilot.known[kind.__name__] if not key.startswith('_')}
        assert {field.name for field in dataclasses.fields(kind)} == skypilot_keys - excluded
    options = typing.get_type_hints(backend.Options)
    supported = {name for choice in typing.get_args(options['recovery']) for name in typing.get_args(choice)}
    assert {name.lower() for name in supported} == set(skypilot.known['strategies'])


@pytest.mark.parametrize(
    'raw', [{'unheard': 1}, {'compute': {'gpu': 8}}, {'scheduling': {'retries': 1}}, {'image': 'UPPER CASE'}]
)
def test_mcli_warning_is_a_mistake(raw, prepare):
    with pytest.raises(AssertionError, match=r'backend\.raw: mcli: '):
        prepare('mcli', backend={'raw': raw})


def test_mcli_does_not_change_long_names(prepare):
    run = task_of(prepare('mcli')[1])
    found = mcli.validate(Rendered({'job.yaml': yaml.safe_dump(run | {'name': 'a' * 60})}, ()))
    assert not found, 'mcli leaves the length to the platform, so MAX_NAME must check it'
