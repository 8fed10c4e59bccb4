"""Preemption: all ranks stop at the same batch with a checkpoint, and the resumed run ends with the same weights."""

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from typing import Any
from unittest.mock import Mock

import guarded_run
import pytest
import torch
from composer.callbacks import CheckpointSaver
from composer.core import Event
from guarded_run import At, assert_stops, make_data, make_trainer, run_to_end

from diffusion.callbacks.preemption import Preemption
from diffusion.exit_codes import PREEMPTED, Preempted
from diffusion.runs.stop_signals import STOP_SIGNALS
from diffusion.tasks import run_recipe

pytestmark = pytest.mark.usefixtures('restored_handlers')


def signal_at(number=signal.SIGTERM, *, batch=4, event=Event.AFTER_LOSS):
    """Return a callback that raises a signal at an event; batch 4 is the fifth, since counting starts at 0."""
    return At(event, batch, lambda: signal.raise_signal(number))


def evaluation(interval: str) -> dict[str, Any]:
    loader = torch.utils.data.DataLoader(make_data(), batch_size=8)  # type: ignore[arg-type]
    return {'eval_dataloader': loader, 'eval_interval': interval}


@pytest.mark.parametrize('number', STOP_SIGNALS)
def test_signal_finishes_the_batch_saves_and_stops(tmp_path, number):
    trainer = make_trainer(make_data(), [Preemption(), signal_at(number)], folder=tmp_path)
    cause = 'Ctrl-C' if number == signal.SIGINT else number.name
    expected = rf'stopped at batch 5 on {cause}; {tmp_path}/ba5.pt is saved, the same command resumes from it'
    assert_stops(trainer, expected, Preempted)
    assert sorted(path.name for path in tmp_path.glob('ba*.pt')) == ['ba5.pt']


@pytest.mark.parametrize(
    'batch', [4, pytest.param(5, marks=pytest.mark.filterwarnings('ignore:No batches were trained'))]
)
def test_resumed_run_ends_with_the_same_weights(tmp_path, batch):
    """Stopped in the middle of an epoch, and at its end."""
    reference = run_to_end(make_trainer(make_data(), []))
    first = make_trainer(make_data(), [Preemption(), signal_at(batch=batch)], folder=tmp_path)
    assert_stops(first, 'is saved', Preempted)
    second = make_trainer(make_data(), [Preemption()], load_path=str(tmp_path / f'ba{batch + 1}.pt'))
    assert all(map(torch.equal, run_to_end(second), reference)) and second.state.timestamp.batch == 12


@pytest.mark.parametrize(('interval', 'stops_at'), [('2ba', 4), ('1ep', 6)])
def test_signal_during_evaluation_stops_after_the_batch_before_it(tmp_path, interval, stops_at):
    signaled = signal_at(batch=stops_at, event=Event.EVAL_BATCH_END)
    trainer = make_trainer(make_data(), [Preemption(), signaled], folder=tmp_path, **evaluation(interval))
    assert_stops(trainer, f'stopped at batch {stops_at} ', Preempted)
    assert (tmp_path / f'ba{stops_at}.pt').exists()


def test_further_signals_during_and_after_the_save_are_ignored(tmp_path, monkeypatch):
    save = torch.save

    def interrupted(*args, **kwargs):
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)
        save(*args, **kwargs)

    monkeypatch.setattr(torch, 'save', interrupted)
    trainer = make_trainer(make_data(), [Preemption(), signal_at()], folder=tmp_path)
    with pytest.raises(Preempted, match='on SIGTERM; .*ba5.pt is saved'):
        trainer.fit()
    os.kill(os.getpid(), signal.SIGTERM)
    trainer.close()
    assert torch.load(tmp_path / 'ba5.pt', weights_only=False)['state']['timestamp']['Timestamp']['batch'] == 5


def test_same_batch_is_not_saved_twice(tmp_path, monkeypatch):
    saved = []
    save = CheckpointSaver._save_checkpoint
    monkeypatch.setattr(
        CheckpointSaver,
        '_save_checkpoint',
        lambda self, state, logger: (saved.append(state.timestamp.batch.value), save(self, state, logger)),
    )
    # The evaluation at the end of the epoch comes after the save of its last batch.
    settings: dict[str, Any] = evaluation('1ep') | {'save_interval': '3ba'}
    trainer = make_trainer(
        make_data(), [Preemption(), signal_at(batch=6, event=Event.EVAL_START)], folder=tmp_path, **settings
    )
    assert_stops(trainer, 'stopped at batch 6 .*ba6.pt is saved', Preempted)
    assert saved == [3, 6]


@pytest.mark.parametrize('duration', ['6ba', '1ep', '9ba', '48sp'])
def test_run_that_ends_with_this_batch_ends_as_usual(tmp_path, duration):
    last = {'9ba': 8}.get(duration, 5)
    run_to_end(make_trainer(make_data(), [Preemption(), signal_at(batch=last)], duration=duration, folder=tmp_path))
    assert (tmp_path / f'ba{last + 1}.pt').exists()


def test_signal_to_the_process_group_that_kills_loader_workers_still_saves(tmp_path):
    def signal_all():
        workers = [str(child.pid) for child in multiprocessing.active_children()]
        assert len(workers) == 1
        # Sent from another process: a worker that its parent terminates ends with status 0.
        subprocess.run(['sh', '-c', f'kill -TERM {" ".join(workers)} {os.getpid()}'], check=True)
        time.sleep(0.3)

    trainer = make_trainer(make_data(), [Preemption(), At(Event.AFTER_LOSS, 2, signal_all)], folder=tmp_path, workers=1)
    assert_stops(trainer, 'stopped at batch 3 on SIGTERM; .*ba3.pt is saved', Preempted)


def test_training_outside_of_the_main_thread_logs_a_warning(caplog):
    trainer = make_trainer(make_data(), [Preemption()], duration='2ba')
    thread = threading.Thread(target=trainer.fit)
    thread.start()
    thread.join()
    trainer.close()
    assert trainer.state.timestamp.batch == 2
    assert 'preemption signals are not handled' in caplog.text


def test_previous_signal_handlers_are_restored_after_a_run_and_used_by_a_forked_child():
    received = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: received.append(number))
    preemption = Preemption()

    def in_child():
        preemption._process = -1
        signal.raise_signal(signal.SIGTERM)

    run_to_end(make_trainer(make_data(), [preemption, At(Event.AFTER_LOSS, 0, in_child)], duration='1ba'))
    assert received == [signal.SIGTERM] and preemption.signal == 0
    for number in STOP_SIGNALS:
        signal.raise_signal(number)
    assert received[1:] == [*STOP_SIGNALS]


def test_first_ctrl_c_announces_a_save_and_the_second_ends_the_process_after_a_notice(monkeypatch, caplog, capsys):
    preemption, notices = Preemption(), Mock(side_effect=OSError)
    preemption._act_on_interrupt(signal.SIGINT)  # before the run
    saved = Mock(weights_only=False, last_checkpoint_batch=Mock(value=3), spec=CheckpointSaver)
    preemption._state = Mock(timestamp=Mock(batch=Mock(value=5)), callbacks=[saved])
    preemption.on_interrupt = notices
    monkeypatch.setattr(os, '_exit', notices.exit)
    monkeypatch.setattr(preemption, '_interrupts', Mock(is_repeated=Mock(side_effect=[False, True])))
    preemption._act_on_interrupt(signal.SIGTERM)
    assert not caplog.text
    preemption._act_on_interrupt(signal.SIGINT)
    assert 'saving a checkpoint after this batch; press Ctrl-C again' in caplog.text and not notices.called
    with pytest.raises(OSError):  # the notice failed, and the process ends nevertheless
        preemption._act_on_interrupt(signal.SIGINT)
    notices.exit.assert_called_once_with(130)
    loss = notices.call_args.args[0]
    assert 'ba3' in loss and f'ended by a second Ctrl-C: {loss}' in capsys.readouterr().err


def test_preempted_program_exits_with_status_75(monkeypatch, capsys):
    monkeypatch.setattr(run_recipe, 'checked', lambda path, overrides: None)
    for stop, status, text in (
        (Preempted('stopped at batch 3'), 75, 'stopped at batch 3\n'),
        (KeyboardInterrupt(), 130, 'interrupted\n'),
    ):
        monkeypatch.setattr(run_recipe, 'run_task', Mock(side_effect=stop))
        for rank, printed in (('0', text), ('1', '')):
            monkeypatch.setenv('RANK', rank)
            assert (run_recipe.main(['a.yaml']), capsys.readouterr().err) == (status, printed)


def test_signal_to_one_rank_stops_both_at_the_same_batch(ranks, tmp_path):
    # Each process receives further signals until it has exited.
    outputs = ranks.start_program(2, guarded_run.__file__, 'preemption', tmp_path).end(PREEMPTED)
    for rank, output in enumerate(outputs):
        assert f'rank {rank}: stopped at batch 4 on SIGTERM; {tmp_path}/ba4.pt is saved' in output
    assert sorted(path.name for path in tmp_path.glob('ba*.pt')) == ['ba4.pt']
