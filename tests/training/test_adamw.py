"""AdamW: the same weights and state as torch's to the last bit, on tensors and on DTensors."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from diffusion.training.adamw import AdamW

SHAPES = ((4, 3), (5,), (2, 3, 2), ())
STEPS = 5
SETTINGS = {
    'fused': {'fused': True},
    'amsgrad': {'fused': True, 'amsgrad': True, 'weight_decay': 0.3, 'betas': (0.8, 0.9), 'eps': 1e-4},
    'maximize': {'fused': True, 'maximize': True},
    'foreach': {'foreach': True},
    'plain': {},
}


def parameters(shapes=SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def gradients(step: int, shapes=SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def train(optimizer: torch.optim.Optimizer, steps: range, *, without: tuple[tuple[int, int], ...] = ()) -> None:
    """Make steps whose gradients depend on their number; `without` are pairs of step and weight without gradient."""
    weights = [weight for group in optimizer.param_groups for weight in group['params']]
    for step in steps:
        optimizer.zero_grad()
        assert all(weight.grad is None for weight in weights)
        for index, (weight, gradient) in enumerate(zip(weights, gradients(step), strict=True)):
            if (step, index) not in without:
                weight.grad = gradient.to(weight, copy=True)
        for group in optimizer.param_groups:
            group['lr'] = 0.1 / (1 + step)  # as a scheduler does
        assert optimizer.step(lambda: 3.0) == 3.0


def make(kind: type[torch.optim.Optimizer], **settings) -> torch.optim.Optimizer:
    weights = parameters()
    weights[3].data = weights[3].data.double()
    return kind([{'params': weights[:2]}, {'params': weights[2:], 'weight_decay': 0.0}], **settings)


def assert_same(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    one, other = ours.state_dict(), theirs.state_dict()
    assert one['param_groups'] == other['param_groups']
    torch.testing.assert_close(one['state'], other['state'], rtol=0, atol=0)
    weights, others = ([each for group in every.param_groups for each in group['params']] for every in (ours, theirs))
    torch.testing.assert_close(weights, others, rtol=0, atol=0)


@pytest.mark.parametrize('settings', SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize('without', [(), ((0, 1),), ((2, 0), (2, 2), (4, 3))], ids=['all', 'first step', 'later steps'])
def test_weights_and_state_equal_those_of_torch_to_the_last_bit(settings, without):
    ours, theirs = make(AdamW, **settings), make(torch.optim.AdamW, **settings)
    for optimizer in (ours, theirs):
        train(optimizer, range(STEPS), without=without)
    assert_same(ours, theirs)


@pytest.mark.parametrize('settings', [SETTINGS['fused'], SETTINGS['plain']])
def test_state_is_exchanged_with_torch_in_the_middle_of_a_run(settings):
    whole = make(torch.optim.AdamW, **settings)
    train(whole, range(STEPS))
    for first, second in ((AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW), (AdamW, AdamW)):
        before, after = make(first, **settings), make(second, **settings)
        train(before, range(2))
        train(after, range(3))  # other values, which loading replaces
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        for group, other in zip(after.param_groups, before.param_groups, strict=True):
            for weight, value in zip(group['params'], other['params'], strict=True):
                weight.data.copy_(value.data)
        train(after, range(2, STEPS))
        assert_same(after, whole)
        after.zero_grad(set_to_none=False)
        assert not any(weight.grad.any() for group in after.param_groups for weight in group['params'])


def test_shards_that_are_replaced_are_updated(one_rank_mesh):
    """FSDP2 gives a parameter another shard, for example when its module is moved."""
    sharded = nn.Parameter(distribute_tensor(torch.ones(4, 2), one_rank_mesh, [Shard(0)]))
    optimizer = AdamW([sharded], lr=0.1, fused=True)
    for _ in range(3):
        before = sharded.full_tensor().clone()  # type: ignore[operator]
        sharded._local_tensor = sharded.to_local().clone()  # type: ignore[operator]
        sharded.grad = torch.ones_like(sharded)
        optimizer.step()
        assert (sharded.full_tensor() < before).all()  # type: ignore[operator]


def test_infinite_gradients_found_by_a_loss_scaler_skip_the_step(monkeypatch):
    ours, theirs = (kind(parameters(), fused=True) for kind in (AdamW, torch.optim.AdamW))
    for optimizer in (ours, theirs):
        for step, inf in enumerate((0.0, 1.0, 0.0)):
            setattr(optimizer, 'found_inf', torch.tensor(inf))  # noqa: B010, as torch's GradScaler does
            setattr(optimizer, 'grad_scale', torch.tensor(8.0))  # noqa: B010
            train(optimizer, range(step, step + 1))
            monkeypatch.setattr(ours, '_init_group', None)  # later steps use the tensors collected by the first
    assert_same(ours, theirs)
    assert float(ours.state_dict()['state'][0]['step']) == 2


@pytest.mark.parametrize('settings', [SETTINGS['fused'], SETTINGS['plain']])
def test_shards_are_updated_like_tensors_and_the_state_remains_sharded(settings, one_rank_mesh, monkeypatch):
    shapes = SHAPES[:3]
    plain = torch.optim.AdamW(parameters(shapes), **settings)
    weights = [nn.Parameter(distribute_tensor(each.data, one_rank_mesh, [Shard(0)])) for each in parameters(shapes)]
    sharded = AdamW(weights, **settings)
    for step in range(STEPS):
        for optimizer in (plain, sharded):
            for weight, gradient in zip(optimizer.param_groups[0]['params'], gradients(step, shapes), strict=True):
                sharding = optimizer is sharded
                weight.grad = distribute_tensor(gradient, one_rank_mesh, [Shard(0)]) if sharding else gradient
            optimizer.step()
        if settings.get('fused'):
            monkeypatch.setattr(sharded, '_init_group', None)  # later steps use the shards collected by the first
    for weight, expected in zip(weights, plain.param_groups[0]['params'], strict=True):
        assert torch.equal(weight.full_tensor(), expected)  # type: ignore[operator]
        assert torch.equal(sharded.state[weight]['exp_avg'].full_tensor(), plain.state[expected]['exp_avg'])


@pytest.fixture
def one_rank_mesh():
    store = HashStore()
    torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)
    return init_device_mesh('cpu', (1,))  # conftest.py leaves the group after the test
