"""Snapshots and checkpoints of a state on the CPU and on a GPU, whose snapshots are copied into pinned memory."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_weights import weights_of
from diffusion.checkpointing.snapshot import SnapshotBuffers, StateTensors
from diffusion.config.load import load
from diffusion.loggers.metrics_file import read_metrics
from diffusion.training.train import build_trainer
from tests.checkpointing.test_snapshot import change, make_state, same


def state_on(device: str) -> dict[str, Any]:
    """Return the state of tensors, nested in containers, on a device, with tied weights."""
    state = {key: value for key, value in make_state().items() if key in ('model', 'optimizers', 'algorithms', 'flags')}
    state['model']['large'] = torch.zeros(2**24)  # 64 MiB: a copy that has not ended yet would be seen
    moved = tree_map(lambda each: each.detach().to(device) if isinstance(each, torch.Tensor) else each, state)
    moved['model']['tied.b'] = moved['model']['tied.a']
    return moved


@pytest.mark.parametrize('prepared', [True, False])
def test_snapshot_holds_the_state_at_the_time_of_the_copy(device, caplog, prepared):
    caplog.set_level(logging.WARNING, 'diffusion')
    state, buffers = state_on(device), SnapshotBuffers()
    assert StateTensors(state).on_gpu == (device == 'cuda')
    expected = tree_map(lambda each: each.cpu() if isinstance(each, torch.Tensor) else each, copy.deepcopy(state))
    assert buffers.reserve(StateTensors(state).nbytes, pinned=StateTensors(state).on_gpu)
    if prepared:
        buffers.prepare()
    found: dict[str, Any] = {}
    for _ in range(2):  # the second snapshot uses the memory again
        # Work that is queued before the copy must be in it, and work that is queued after it must not.
        state['model']['large'].add_(1)
        expected['model']['large'].add_(1)
        found = buffers.copy(state, StateTensors(state))[0]
        state['model']['large'].add_(5).sub_(5)
    change(state)
    same(expected, found)
    assert found['model']['tied.a'] is found['model']['tied.b']
    assert found['model']['large'].is_pinned() == (device == 'cuda')
    assert found['model']['conv'].is_contiguous(memory_format=torch.channels_last)
    assert not caplog.records, 'a warning says that the memory is not pinned'
    del found
    buffers.release()


def test_checkpoint_has_the_weights_of_the_model(write_recipe, device):
    trainer: dict[str, Any] = {'max_duration': '2ba', 'save_interval': '2ba', 'progress_bar': False}
    trainer |= {'device': 'cpu'} if device == 'cpu' else {'device': 'gpu', 'precision': 'amp_bf16'}
    recipe = load(write_recipe(trainer=trainer, speed={'compile': False}))
    built = build_trainer(recipe)
    built.fit()
    model: Any = built.state.model
    expected = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
    built.close()
    found = weights_of(find_checkpoint(str(recipe.run_dir)))[0]
    assert set(found) <= set(expected) and len(found) > 50
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
    stall = read_metrics(recipe.run_dir / 'metrics.jsonl')['checkpoint/stall_seconds']
    assert len(stall) == 1 and min(stall.values()) > 0
