"""Checkpointer in a Composer project that uses nothing else of this library, as docs/extending.md shows it."""

import re
import signal
from pathlib import Path

import pytest
import torch

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_weights import weights_of
from diffusion.errors import UserError
from diffusion.runs.run_lock import hold_run_lock
from diffusion.storage.local_files import WORKING_FOLDER_VARIABLE

PAGE = Path(__file__).parents[2] / 'docs' / 'extending.md'
KILLED = """
import os, signal
from composer import Callback
class Kill(Callback):
    def batch_end(self, state, logger):
        if state.timestamp.batch == 17:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def script(place: str) -> str:
    block = next(each for each in re.findall(r'```python\n(.*?)```', PAGE.read_text(), re.S) if 'Checkpointer' in each)
    assert block.count("'runs/own'") == 1
    return block.replace("'runs/own'", repr(place))


@pytest.fixture
def run(forkserver, tmp_path):
    """Function that runs a script, and returns its exit status."""

    def start(name: str, text: str) -> int | None:
        (tmp_path / f'{name}.py').write_text(text)
        return forkserver.start(tmp_path / f'{name}.py', output=tmp_path / f'{name}.log', environment={}).poll(120)

    return start


@pytest.mark.slow
def test_killed_script_resumes_to_the_weights_of_an_uninterrupted_one(run, tmp_path, store, monkeypatch):
    monkeypatch.setenv(WORKING_FOLDER_VARIABLE, str(tmp_path / 'node'))
    root = store.bucket('bucket')
    assert run('whole', script(f'{root}/whole')) == 0, (tmp_path / 'whole.log').read_text()
    killed = script(f'{root}/killed').replace('callbacks=[', 'callbacks=[Kill(), ')
    assert run('killed', KILLED + killed) == -signal.SIGKILL, (tmp_path / 'killed.log').read_text()
    assert find_checkpoint(f'{root}/killed').name == 'ba10'
    assert run('again', script(f'{root}/killed')) == 0, (tmp_path / 'again.log').read_text()
    ours, theirs = (weights_of(find_checkpoint(f'{root}/{name}'))[0] for name in ('killed', 'whole'))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_killed_script_resumes_from_the_memory_of_the_node(run, tmp_path):
    (tmp_path / 'node').mkdir()
    tiers = 'from diffusion.config.checkpointing import TierConfig, TiersConfig\n'
    tiers += f'tiers = TiersConfig(memory=TierConfig(save_interval="1ba", folder={str(tmp_path / "node")!r}))\n'
    text = tiers + script(str(tmp_path / 'run')).replace("resume='auto'", "resume='auto', tiers=tiers")
    assert run('killed', KILLED + text.replace('callbacks=[', 'callbacks=[Kill(), ')) == -signal.SIGKILL
    logs = 'import logging\nlogging.basicConfig(level=logging.INFO)\n'
    assert run('again', logs + text) == 0, (tmp_path / 'again.log').read_text()
    assert re.search(r'resumed from \S+/node/\S+/ba16\b', (tmp_path / 'again.log').read_text())
    assert find_checkpoint(tmp_path / 'run').name == 'ba100'


def test_second_job_at_the_same_place_is_refused(tmp_path):
    with hold_run_lock(tmp_path / 'run'), pytest.raises(UserError, match='trains this run'):
        exec(script(str(tmp_path / 'run')), {})
    with hold_run_lock(tmp_path / 'run'):
        pass
