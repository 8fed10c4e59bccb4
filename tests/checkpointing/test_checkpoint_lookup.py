"""Claims on checkpoints, which keep a run from removing what another process reads."""

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from checkpointing.run_folders import names, write
from checkpointing.saved_runs import recipe_writer
from faults import Fault, active
from waiting import wait_until

from diffusion.checkpointing import checkpoint_lookup, retention
from diffusion.checkpointing.checkpoint_lookup import LEASE_SECONDS, claimed_batches, claimed_checkpoint
from diffusion.config.checkpointing import KeepConfig
from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.runs.run_id import create_run_id
from diffusion.runs.run_lock import Owner
from diffusion.tasks import evaluate as evaluation
from diffusion.tasks import export as exporting
from diffusion.tasks.argument_checks import GenerateOptions
from diffusion.tasks.generate import run_generate
from diffusion.training.train import train
from tests.data.processes import Forked

NEWEST = KeepConfig(last=1)


@pytest.fixture
def run(tmp_path) -> Path:
    """Folder of a run with the checkpoints ba10, ba20 and ba30."""
    folder = tmp_path / 'run'
    folder.mkdir()
    create_run_id(folder)
    for batch in (10, 20, 30):
        write(folder, batch)
    return folder


def claim_files(folder: Path) -> list[Path]:
    return sorted(folder.glob('.claim-*'))


def test_claimed_checkpoint_stays_until_it_is_released(run):
    with claimed_checkpoint(run / 'ba10', 'test') as checkpoint, claimed_checkpoint(run / 'ba10', 'another'):
        assert checkpoint == run / 'ba10' and len(claim_files(run)) == 2
        retention.prune(run, NEWEST)
        assert names(run) == ['ba10', 'ba30']
    assert claim_files(run) == []
    retention.prune(run, NEWEST)
    assert names(run) == ['ba30']


def test_newest_checkpoint_of_a_run_is_claimed(run):
    with claimed_checkpoint(run, 'test') as checkpoint:
        assert checkpoint == run / 'ba30' and claimed_batches(run) == {30}
    with pytest.raises(UserError, match=r'ba40 is not a checkpoint or a run .*contains ba30, ba20, ba10'):
        claimed_checkpoint(run / 'ba40', 'test').__enter__()


def test_claim_of_a_killed_process_does_not_count(run):
    claim = claimed_checkpoint(run / 'ba10', 'test')
    process = Forked(lambda: (claim.__enter__(), time.sleep(60)))
    wait_until(lambda: claimed_batches(run) == {10})
    retention.prune(run, NEWEST)
    assert names(run) == ['ba10', 'ba30']
    process.kill()
    assert len(claim_files(run)) == 1
    retention.prune(run, NEWEST)
    assert names(run) == ['ba30'] and claim_files(run) == []


def test_claim_of_another_machine_expires_by_the_clock_of_the_file_system(run):
    owner = replace(Owner.current({}), machine='another machine')
    claim = run / '.claim-ba10-0123.json'
    claim.write_text(json.dumps({'owner': asdict(owner), 'purpose': 'test'}))
    now = run.stat().st_mtime
    os.utime(claim, (now, now - LEASE_SECONDS + 60))
    assert claimed_batches(run) == {10}
    os.utime(claim, (now, now - LEASE_SECONDS - 60))
    assert claimed_batches(run) == set() and not claim.exists()
    # The file may be read while it is written.
    claim.write_text('{"owner": {"tok')
    assert claimed_batches(run) == {10}


def test_links_pipes_and_folders_are_not_claims(run):
    """Other users may write to the folder."""
    (run / '.claim-ba10-0.json').symlink_to('/etc/passwd')
    (run / '.claim-ba10-1.json').mkdir()
    os.mkfifo(run / '.claim-ba10-2.json')
    (run / 'ba10.pinned').symlink_to('/')
    retention.prune(run, NEWEST)
    assert names(run) == ['ba30'] and len(claim_files(run)) == 3


def test_claim_is_rewritten_and_does_not_come_back(run, monkeypatch):
    monkeypatch.setattr(checkpoint_lookup, 'RENEWAL_SECONDS', 0.01)
    with claimed_checkpoint(run / 'ba10', 'test'):
        (claim,) = claim_files(run)
        os.utime(claim, (0, 0))
        wait_until(lambda: claim.stat().st_mtime > 1)
        claim.unlink()
        time.sleep(0.05)
        assert not claim.exists()
    assert claim_files(run) == []


def test_checkpoint_outside_of_a_run_is_not_claimed(run, tmp_path):
    copy = tmp_path / 'elsewhere' / 'ba10'
    copy.parent.mkdir()
    (run / 'ba10').rename(copy)
    with claimed_checkpoint(copy, 'test') as checkpoint:
        assert checkpoint == copy and [*copy.parent.iterdir()] == [copy]


def test_run_that_cannot_be_written_to_is_read_with_a_warning(run, tmp_path, caplog):
    with active(tmp_path / 'met', Fault('create', r'\.claim-', 'EROFS')), claimed_checkpoint(run, 'test') as checkpoint:
        assert checkpoint == run / 'ba30'
    assert 'ba30: cannot be claimed' in caplog.text and 'its run may remove it while it is read' in caplog.text


def test_another_checkpoint_is_found_if_the_newest_is_removed_before_it_is_claimed(run, monkeypatch):
    monkeypatch.setattr(checkpoint_lookup, 'PAUSE_SECONDS', 0.0)
    plain, found = checkpoint_lookup.holding_claim, []

    def late(checkpoint, purpose):
        found.append(checkpoint.name)
        if len(found) == 1:
            write(run, 40)
            (run / 'ba30').rename(run / 'gone')
        return plain(checkpoint, purpose)

    monkeypatch.setattr(checkpoint_lookup, 'holding_claim', late)
    with claimed_checkpoint(run, 'test') as checkpoint:
        assert checkpoint == run / 'ba40'
    assert found == ['ba30', 'ba40'] and claim_files(run) == []
    monkeypatch.setattr(checkpoint_lookup, 'still_exists', lambda checkpoint: False)
    with pytest.raises(UserError, match='/run was removed by its run 5 times in a row; name another checkpoint'):
        claimed_checkpoint(run, 'test').__enter__()
    assert len(found) == 2 + 5 and not checkpoint_lookup._counts(run / '.claim-ba30-0.json'), 'it is released'


@pytest.mark.slow
def test_evaluation_export_and_generation_claim_what_they_read(tiny_recipe, pictures, tmp_path, monkeypatch):
    """Of a run that keeps its newest checkpoint, and of which two batches are trained."""
    streams = {'small': {'local': str(pictures[32]), 'resolution': 32}}
    write = recipe_writer(tmp_path, tiny_recipe, eval_streams=streams, checkpointing={'keep': {'last': 1}})
    trained = write('run', {'save_interval': '1ba'}, algorithms={})
    train(load(trained, ['trainer.max_duration=2ba'])).close()
    recipe = load(trained)
    held: list[set[int]] = []
    load_weights = evaluation.load_weights

    def note(*arguments):
        held.append(claimed_batches(recipe.run_dir))
        load_weights(*arguments)

    def card(*arguments, **keywords):
        held.append(claimed_batches(recipe.run_dir))
        return ''

    monkeypatch.setattr(evaluation, 'load_weights', note)
    monkeypatch.setattr(exporting, 'model_card', card)
    evaluation.evaluate(load(trained, task='evaluate'))
    exporting.export(recipe.run_dir, tmp_path / 'export')
    run_generate(GenerateOptions(str(recipe.run_dir), ['a'], out=str(tmp_path / 'images'), steps=1))
    assert held == [{2}] * 4, 'evaluation, export with its card, generation'
    assert claim_files(recipe.run_dir) == []
