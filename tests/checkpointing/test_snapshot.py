"""Snapshots of a trainer's state in host memory that is used again."""

import copy
import logging

import pytest
import torch
from torch import nn

from diffusion.checkpointing import snapshot
from diffusion.checkpointing.snapshot import ALIGNMENT, SnapshotBuffers, StateTensors, reserve_on_all_ranks


class Custom:
    """An object of a callback's state, which pickling would take with its tensor."""

    def __init__(self) -> None:
        self.losses, self.mean = [1.0, 2.0], torch.ones(3)


def make_state():
    """Return nested state with the kinds of tensors and other leaves that checkpoints have."""
    torch.manual_seed(0)
    tied = torch.randn(4, 5)
    return {
        'model': {
            'tied.a': tied,
            'tied.b': tied,
            'conv': torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
            'part': torch.randn(6, 8)[1:3, ::2],
            'half': torch.randn(7).bfloat16(),
            'empty': torch.zeros(0, 3),
            'parameter': nn.Parameter(torch.randn(3)),
        },
        'optimizers': {'AdamW': {'state': {0: {'step': torch.tensor(3.0)}}, 'param_groups': [{'lr': 1e-3}]}},
        'algorithms': [('EMA', {'averages': {'ema': {'w': torch.randn(3)}}})],
        'callbacks': {'custom': Custom(), 'history': [1, 2, [3]]},
        'sparse': torch.eye(3).to_sparse(),
        'flags': (torch.tensor([True, False]), None, 'text'),
    }


def change(state):
    if isinstance(state, dict):
        for each in state.values():
            change(each)
        state['new'] = 'value'
    elif isinstance(state, list | tuple):
        for each in state:
            change(each)
        if isinstance(state, list):
            state.append('new')
    elif isinstance(state, torch.Tensor):
        if state.layout == torch.strided:
            state.detach().zero_()
        else:
            state.values().zero_()  # type: ignore[operator]
    elif isinstance(state, Custom):
        change(state.losses)
        change(state.mean)


def same(one, other):
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one.to_dense().detach(), other.to_dense().detach())
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert type(one) is type(other) and len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            same(first, second)
    elif isinstance(one, Custom):
        same(vars(one), vars(other))
    else:
        assert one == other


@pytest.mark.filterwarnings('ignore:Validating sparse tensor invariants')  # torch 2.14, about its own check
def test_snapshot_is_saved_like_the_state_and_does_not_change_with_it(tmp_path):
    state, buffers = make_state(), SnapshotBuffers()
    expected = copy.deepcopy(state)
    assert buffers.reserve(StateTensors(state).nbytes)
    found = buffers.copy(state, StateTensors(state))[0]
    assert found['model']['tied.a'] is found['model']['tied.b'], 'tied weights stay tied'
    assert found['model']['conv'].stride() == state['model']['conv'].stride()
    sizes = []
    for each in (state, found):
        saved = {key: value for key, value in each.items() if key != 'callbacks'}  # which have a class of a test
        torch.save(saved, tmp_path / 'file')
        sizes.append((tmp_path / 'file').stat().st_size)
        same(torch.load(tmp_path / 'file'), saved)
    assert sizes[1] < sizes[0] + 100, 'a tensor is not saved with its neighbors in the memory'
    change(state)
    same(expected, found)


def test_memory_is_used_again_and_grows_with_the_state():
    buffers, state = SnapshotBuffers(), {'w': torch.ones(1000)}
    copies = []
    for number in range(3):
        state['w'].fill_(number)
        assert buffers.reserve(StateTensors(state).nbytes)
        copies.append(buffers.copy(state, StateTensors(state))[0]['w'])
    assert len({each.data_ptr() for each in copies}) == 1
    assert buffers.nbytes == 4032 == -(-4000 // ALIGNMENT) * ALIGNMENT
    small = buffers.copy(state, StateTensors(state))[0]
    state['average'] = torch.full((1000,), 7.0)
    assert buffers.reserve(StateTensors(state).nbytes) and buffers.nbytes == 2 * 4032
    grown = buffers.copy(state, StateTensors(state))[0]
    assert grown['average'][0] == 7 and small['w'][0] == 2, 'the snapshot before is still whole'
    buffers.release()
    assert buffers.nbytes == 0 and grown['average'][0] == 7


def test_memory_that_the_kernel_refuses_is_reported(caplog):
    assert not SnapshotBuffers().reserve(2**62)
    assert '4294967296.00 GiB of memory for snapshots cannot be allocated (' in caplog.text


@pytest.mark.parametrize('available', [8000, 8889, None])
def test_snapshots_that_do_not_fit_into_memory_are_not_taken(monkeypatch, caplog, available):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(snapshot, 'available_memory', lambda: available)
    buffers, state = SnapshotBuffers(), {'w': torch.ones(2000)}
    assert reserve_on_all_ranks(buffers, StateTensors(state)) == (available != 8000)
    assert buffers.nbytes == (0 if available == 8000 else 8000)
    if available == 8000:
        assert 'saves block training: a snapshot needs 8.0 kB of memory' in caplog.text
        assert 'where 8.0 kB are available. To fix: ' in caplog.text
