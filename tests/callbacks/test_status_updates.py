"""RunStatus and Heartbeat: what they record at each event of a run of three batches that resumes at batch 3."""

import time
from pathlib import Path
from unittest.mock import Mock

from composer.core import Event, Time, Timestamp, TimeUnit
from golden import check_golden

from diffusion.callbacks import status_updates
from diffusion.callbacks.status_updates import Heartbeat, RunStatus
from diffusion.runs import node_status
from diffusion.runs.attempts import Attempt

EVENTS = 'fit_start before_dataloader after_loss batch_end batch_checkpoint before_dataloader batch_end eval_start '
EVENTS += 'before_dataloader batch_end epoch_checkpoint fit_end'


def test_status_and_heartbeat_follow_the_events_of_a_run(tmp_path, monkeypatch):
    """Event n takes n seconds."""
    now, batch, lines, beats = 100.0, 3, [], []
    monkeypatch.setattr(status_updates.time, 'monotonic', lambda: now)
    monkeypatch.setattr(status_updates, 'write_rank_heartbeat', lambda *values: beats.append(values))
    make = Mock(side_effect=lambda run, status, on_write: Mock(status=status))
    monkeypatch.setattr(node_status, 'StatusWriter', make)
    of_run, heartbeat, state = RunStatus(tmp_path), Heartbeat(), Mock(max_duration=Time(2, TimeUnit.EPOCH))
    of_run.attempt, state.dataloader_len = Attempt(1, begin=0.0), None
    of_run.run_event(Event.BATCH_END, state, Mock())  # before the run starts
    for number, name in enumerate(EVENTS.split()):
        now, batch = now + number, batch + (name == 'batch_end')
        state.timestamp = Timestamp(batch=batch)
        for callback in (of_run, heartbeat):
            callback.run_event(Event(name), state, Mock())
        status, speed = of_run._writer.status, of_run._writer.status.seconds_per_batch  # type: ignore[union-attr]
        lines.append(f'{now:.0f} s, {name}: {status.doing}, batch {status.batch} of {status.total_batches}')
        lines[-1] += f', {speed or 0:.4g} s per batch; heartbeats: {beats}'
        beats.clear()
        state.dataloader_len = Time(5, TimeUnit.BATCH)  # known once the run has started
    attempt, writer = of_run.attempt, of_run._writer
    assert abs(attempt.first_at - time.time()) < 300  # type: ignore[operator]
    lines.append(f'attempt: batches {attempt.first} to {attempt.last} in {attempt.last_at - attempt.first_at:.4g} s')  # type: ignore[operator]
    lines.append(f'end of the last batch: {writer.last_batch_at:.0f} s')  # type: ignore[union-attr]
    check_golden(Path(__file__).with_name('golden') / 'status', {'events.txt': '\n'.join([*lines, ''])})
    of_run._start(state)  # a second call of fit()
    of_run.close(state, Mock())
    assert make.call_count == 1 and writer.start.called and writer.stop.called  # type: ignore[union-attr]
