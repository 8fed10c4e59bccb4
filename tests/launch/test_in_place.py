"""Restarts in place: when a node does not agree to one."""

import errno
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from diffusion.config.load import load
from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR, FAILED, PREEMPTED
from diffusion.launch import in_place
from diffusion.launch.in_place import InPlaceRestarts
from diffusion.launch.node_settings import Settings
from diffusion.launch.rank_discovery import NodePosition
from diffusion.launch.workers import Outcome
from diffusion.runs.attempts import Attempt
from tests.launch.specs import changed

KILLED = Outcome(FAILED, 'killed', 'rank 0 by SIGKILL')


@pytest.fixture
def restarts(tmp_path: Path, tiny_recipe) -> Callable[..., InPlaceRestarts]:
    """Create the restarts of a job of one node."""

    def create(**variables: str) -> InPlaceRestarts:
        path = tmp_path / 'recipe.yaml'
        path.write_text(yaml.safe_dump(tiny_recipe(tmp_path / 'runs', name='run')))
        environ = {'DIFFUSION_STANDBY': '1', 'DIFFUSION_ON_EXIT': '75=retry,76=elsewhere,78=stop,*=retry'} | variables
        position, command = NodePosition('local', 0, 1, 1, '127.0.0.1', 29500), ['run.py', str(path)]
        recipe = load(path, environ=environ)
        return InPlaceRestarts(position, Settings.from_environ(environ), command, recipe, environ, lambda _: None)

    return create


def reason(found: InPlaceRestarts, outcome: Outcome = KILLED, last: int | None = 10) -> str:
    """Return why a node does not restart in place after an attempt that ended at a batch, or an empty string."""
    agreement = found.agree(outcome, Attempt(0, time.time(), last=last), lambda: False)
    assert agreement.restart == (not agreement.reason)
    return agreement.reason


@pytest.mark.parametrize(
    ('outcome', 'agrees'),
    [
        (KILLED, True),
        (Outcome(FAILED, 'crash', 'rank 0 with 1'), True),
        (Outcome(PREEMPTED, 'preempted'), False),
        (Outcome(PREEMPTED, 'hang', 'no heartbeat'), False),
        (Outcome(BAD_HARDWARE, 'hardware'), False),
        (Outcome(CONFIG_ERROR, 'mistake'), False),
    ],
)
def test_only_a_crash_or_a_kill_restarts_in_place(restarts, outcome, agrees):
    assert (reason(restarts(), outcome) == '') == agrees


def test_recipe_that_cannot_be_read_goes_to_the_scheduler(restarts, monkeypatch):
    def fail(*arguments, **keywords):
        raise OSError(errno.ESTALE, 'Stale file handle')

    found = restarts()
    monkeypatch.setattr(in_place, 'load', fail)
    assert 'cannot be read' in reason(found)


def test_attempt_before_the_first_batch_goes_to_the_scheduler(restarts):
    assert reason(restarts(), last=None) == 'the ranks have begun no batch'


def test_attempt_that_got_no_further_goes_to_the_scheduler(restarts):
    found = restarts()
    assert [reason(found, last=last) for last in (10, 12)] == ['', '']
    assert reason(found, last=12) == 'two attempts in a row ended at batch 12 or before'


@pytest.mark.parametrize(('name', 'value'), [('ON_EXIT', '1=stop,*=retry'), ('MAX_RESTARTS', '0')])
def test_settings_that_forbid_restarts_forbid_them_in_place(restarts, name, value):
    assert reason(restarts(**{f'DIFFUSION_{name}': value}))


@pytest.mark.parametrize('change', [{'seed': 4}, {'unknown': 1}])
def test_changed_recipe_goes_to_the_scheduler(restarts, tmp_path, change):
    found, path = restarts(), tmp_path / 'recipe.yaml'
    path.write_text(yaml.safe_dump(changed(yaml.safe_load(path.read_text()), change)))
    assert reason(found) == f'{path} has changed, or cannot be read'
