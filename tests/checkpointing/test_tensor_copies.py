"""Copies of tensors that run while something else happens, and what of a trainer's state is copied that way."""

import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from callbacks.guarded_run import At, run_to_end
from checkpointing.saved_runs import assert_same_tensors
from composer.core import Event, State, Timestamp

from diffusion.algorithms.ema import EMA
from diffusion.checkpointing import snapshot
from diffusion.checkpointing.snapshot import SnapshotBuffers, TensorCopies
from diffusion.checkpointing.trainer_state import changed_by_updates
from diffusion.config.load import load
from diffusion.training.train import build_trainer, train

COPY_SECONDS = 0.2


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that have copied; each copy takes COPY_SECONDS."""
    original, names = snapshot._move, []

    def move(pieces):
        time.sleep(COPY_SECONDS)
        names.append(threading.current_thread().name)
        original(pieces)

    monkeypatch.setattr(snapshot, '_move', move)
    return names


def pair(value: float, shape: tuple[int, ...] = (100, 30)) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full(shape, -1.0), torch.full(shape, value)


def test_copies_have_the_values_from_before_the_change(slow):
    pairs = [pair(1.0), pair(2.0, (2**21,)), pair(3.0, ())]
    strided = (torch.full((30, 100), -1.0), pair(4.0)[1].t())
    copies = TensorCopies([*pairs, strided], 3)
    copies.start()
    copies.start()  # the second does nothing
    assert copies.wait_before_change()
    for _, source in pairs:
        source.add_(10)
    assert copies.wait_before_change(), 'the batches after it are none of its business'
    copies.wait()
    assert [float(target.mean()) for target, _ in [*pairs, strided]] == [1, 2, 3, 4]
    assert len(slow) == 3


def test_nothing_is_copied_before_the_start_and_who_needs_it_waits():
    (target, source) = pair(1.0)
    copies = TensorCopies([(target, source)], 1)
    waiting = threading.Thread(target=copies.wait)
    waiting.start()
    assert copies.wait_before_change()
    waiting.join(0.1)
    assert waiting.is_alive() and float(target.mean()) == -1
    copies.start()
    waiting.join(10)
    assert not waiting.is_alive() and float(target.mean()) == 1


def test_change_during_the_copies_is_found(slow):
    target, source = pair(1.0)
    parameter = torch.nn.Parameter(source)
    copies = TensorCopies([(target, parameter.detach())], 1)
    copies.start()
    with torch.no_grad():
        parameter.mul_(2)
    assert not copies.wait_before_change()


@pytest.mark.parametrize('begun', [False, True])
def test_copies_that_are_given_up_leave_the_memory_to_others(slow, begun):
    target, source = pair(1.0)
    copies = TensorCopies([(target, source)], 1)
    if begun:
        copies.start()
    copies.give_up()
    found = float(target.mean())
    assert found == (1.0 if begun else -1.0)
    copies.start()
    copies.wait()
    assert float(target.mean()) == found


def test_error_of_a_thread_is_raised_by_who_needs_the_copies():
    copies = TensorCopies([(torch.zeros(3), torch.zeros(2, 4).t())], 1)
    copies.start()
    assert copies.wait_before_change()
    with pytest.raises(RuntimeError, match='must match'):
        copies.wait()


def test_weights_are_copied_during_the_next_batch_and_are_those_of_the_batch_that_is_saved(write, slow, monkeypatch):
    """The copies end after the backward pass of the next batch, so the optimizer has to wait for them."""
    sections: dict[str, Any] = {'algorithms': {'ema': {'ema_start': '1ba', 'smoothing': 0.5}}}
    sections['trainer'] = {'max_duration': '4ba'}
    blocking = load(write('blocking', **sections, checkpointing={'asynchronous': False}))
    train(blocking).close()
    slow.clear()

    # Longer than a batch takes on a busy machine.
    monkeypatch.setattr(f'{__name__}.COPY_SECONDS', 1.0)
    recipe = load(write('overlapped', **sections))
    trainer = build_trainer(recipe)
    seen: list[Any] = []
    copy = SnapshotBuffers.copy

    def observed(self, state, tensors, later):
        copied, copies = copy(self, state, tensors, later)
        seen.append((sum(source.nbytes for _, source in copies._pairs), tensors.content_bytes))
        slow.clear()
        return copied, copies

    monkeypatch.setattr(SnapshotBuffers, 'copy', observed)
    trainer.state.callbacks.append(At(Event.BATCH_START, 2, lambda: seen.append(list(slow))))
    trainer.state.callbacks.append(At(Event.BATCH_END, 3, lambda: seen.append(list(slow))))
    run_to_end(trainer)
    (late, whole), at_start, at_end = seen
    assert late > 0.99 * whole, 'all weights, moments and averages'
    assert at_start == [] and len(at_end) >= 1
    one, other = blocking.run_dir, recipe.run_dir
    assert_same_tensors(other / 'ba2', one / 'ba2')
    # The last save is logged with the number of the same batch; it has nothing to overlap with.
    lines = map(json.loads, (other / 'metrics.jsonl').read_text().splitlines())
    kinds = [f'checkpoint/{kind}_seconds' for kind in ('stall', 'save')]
    (stall, duration), last = [[line[kind] for kind in kinds] for line in lines if kinds[0] in line]
    assert 0.5 < stall < 100, 'the wait before the optimizer counts as a stall'
    assert 0 < duration < 100 and 0 < last[0] < 100


def test_only_what_the_optimizers_step_changes_is_copied_later():
    """And only within an epoch, whose end may update averages, and without algorithms of other packages."""
    model, ema = torch.nn.Linear(2, 3), EMA()
    model.register_parameter('empty', torch.nn.Parameter(torch.zeros(0)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ema.average.start(model)
    moments = [value for each in optimizer.state.values() for value in each.values()]
    late = {each.data_ptr() for each in [model.weight, model.bias, *moments, *ema.average.tensors.values()]}
    state: Any = SimpleNamespace(model=model, optimizers=[optimizer], dataloader_len=5, algorithms=[ema])
    for batch, expected in ((0, set()), (1, late), (4, late), (5, set())):
        state.timestamp = Timestamp(batch_in_epoch=batch)
        assert changed_by_updates(state) - {0} == expected - {0} and len(late) >= 8
    state.timestamp = Timestamp(batch_in_epoch=3)
    state.algorithms.append(SimpleNamespace())
    assert changed_by_updates(state) == set()


@torch.no_grad()
def change_weights(state: State) -> None:
    for weight in state.model.parameters():
        weight.mul_(1.0625)


def test_checkpoint_whose_weights_a_callback_changes_too_early_is_not_published(write, slow, caplog):
    recipe = load(write('early', {'max_duration': '6ba'}))
    built = build_trainer(recipe)
    built.state.callbacks.append(At(Event.BEFORE_FORWARD, 2, lambda: change_weights(built.state)))
    run_to_end(built)
    assert sorted(path.name for path in recipe.run_dir.glob('ba*')) == ['ba4', 'ba6']
    assert (
        'ba2: not saved, weights were changed between the start of a batch and the step of the optimizer' in caplog.text
    )
    assert 'checkpointing.asynchronous: false' in caplog.text
