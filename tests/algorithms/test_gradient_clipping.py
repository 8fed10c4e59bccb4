"""GradientClipping: the gradients of torch's functions, with one collective for clipping and the loss guard."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.algorithms import GradientClipping as ComposerGradientClipping
from composer.core import Event, Precision
from torch import nn

from diffusion.algorithms.gradient_clipping import GradientClipping, Gradients, summarize_gradients
from diffusion.config.load import Component
from diffusion.config.registry import build, resolve
from diffusion.errors import UserError


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 7), nn.Conv2d(3, 4, 3), nn.LayerNorm(6))
    for weight in layers.parameters():
        weight.grad = torch.randn_like(weight)
    list(layers.parameters())[-1].grad = None
    return layers


def state_of(layers: nn.Module, **more: Any) -> Any:
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    values = {'callbacks': [], 'precision': Precision.FP32, 'fsdp_config_version': 0}
    return SimpleNamespace(model=layers, optimizers=[optimizer], **(values | more))


def gradients(layers: nn.Module) -> list[Any]:
    return [weight.grad for weight in layers.parameters()]


@pytest.mark.parametrize('kind', ['norm', 'value', 'adaptive'])
@pytest.mark.parametrize('threshold', [0.01, 1.0, 1e6])
def test_gradients_equal_composers_to_the_last_bit(kind, threshold):
    ours, theirs = model(), model()
    GradientClipping(kind, threshold).apply(Event.AFTER_TRAIN_BATCH, state_of(ours), None)  # type: ignore[arg-type]
    ComposerGradientClipping(kind, threshold).apply(Event.AFTER_TRAIN_BATCH, state_of(theirs), None)  # type: ignore[arg-type]
    pairs = list(zip(gradients(ours), gradients(theirs), strict=True))
    assert pairs.pop() == (None, None)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert all(map(torch.equal, gradients(ours)[:3], gradients(model())[:3])) == (threshold == 1e6)


PARTS = """
import sys, torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from types import SimpleNamespace
from composer.core import Event, Precision
from diffusion.algorithms.gradient_clipping import GradientClipping

torch.distributed.init_process_group('gloo')
mesh = init_device_mesh('cpu', (torch.distributed.get_world_size(),))

def layers():
    # 7 rows and 5 elements do not divide over the ranks; the last vector has fewer elements than there are ranks.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Conv2d(3, 4, 3), nn.LayerNorm(5), nn.PReLU(1), nn.Linear(6, 3))
    gradients = [torch.randn_like(weight) * 10 ** (i % 3 - 1) for i, weight in enumerate(model.parameters())]
    model[4].weight.data.zero_()
    gradients[4] = torch.zeros_like(gradients[4])
    return model, gradients

for threshold in (0.01, 0.5, 1e9):
    # The paper's rule, written out: a factor for each row, and one for a vector.
    model, gradients = layers()
    expected = []
    for weight, gradient in zip(model.parameters(), gradients):
        rows = (1, -1) if weight.ndim == 1 else (len(weight), -1)
        norm = gradient.double().reshape(rows).square().sum(1, keepdim=True).sqrt()
        limit = threshold * weight.detach().double().reshape(rows).square().sum(1, keepdim=True).sqrt()
        factor = torch.where(norm > limit, limit / norm, torch.ones_like(norm))
        expected.append((gradient.double().reshape(rows) * factor).reshape(gradient.shape))
    model, gradients = layers()
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    parameters = list(model.parameters())
    for weight, gradient in zip(parameters, gradients):
        weight.grad = distribute_tensor(gradient, mesh, weight.placements)
    # A matrix sharded within its rows, and one that every rank has as a whole.
    for placement in (Shard(1), Replicate()):
        other = nn.Parameter(distribute_tensor(layers()[0][0].weight.detach(), mesh, [placement]))
        other.grad = distribute_tensor(layers()[1][0], mesh, [placement])
        parameters.append(other)
        expected.append(expected[0])
    optimizer = SimpleNamespace(param_groups=[{'params': parameters}])
    state = SimpleNamespace(
        model=model, optimizers=[optimizer], callbacks=[], precision=Precision.FP32, fsdp_config_version=2
    )
    GradientClipping('adaptive', threshold).apply(Event.AFTER_TRAIN_BATCH, state, None)
    for weight, right in zip(parameters, expected, strict=True):
        error = (weight.grad.full_tensor() - right).abs().max() / right.abs().max().clamp(min=1e-30)
        assert error < 2e-7, (threshold, weight.shape, weight.placements, error)
    GradientClipping('norm', 1e-3).apply(Event.AFTER_TRAIN_BATCH, state, None)
    norm = sum(weight.grad.full_tensor().double().square().sum() for weight in parameters) ** 0.5
    assert abs(norm / 1e-3 - 1) < 1e-3, (threshold, norm)
print('same')
"""


def test_adaptive_clipping_of_shards_equals_the_papers_formula(ranks):
    assert all('same' in output for output in ranks.start_program(2, '-c', PARTS).end())


def test_fsdp1_of_a_program_is_refused():
    state = state_of(model(), fsdp_config_version=1)
    with pytest.raises(UserError, match='FSDP1 is not supported; use FSDP2'):
        GradientClipping('norm', 0.1).apply(Event.AFTER_TRAIN_BATCH, state, None)  # type: ignore[arg-type]


class Source:
    """Callback that has a summary of the gradients; their norm over all ranks is ten times that of this rank."""

    def __init__(self) -> None:
        self.calls = 0

    def gradients_of_batch(self, state: Any) -> tuple[Gradients, torch.Tensor]:
        self.calls += 1
        summary = summarize_gradients(gradients(state.model))
        return summary._replace(is_sharded=True), 100 * summary.squared_norm


@pytest.mark.parametrize('precision', [Precision.FP32, Precision.AMP_FP16])
def test_norm_of_sharded_gradients_is_that_of_the_loss_guard_unless_a_loss_scaler_has_yet_to_unscale_them(precision):
    layers, source = model(), Source()
    before = float(summarize_gradients(gradients(layers)).squared_norm) ** 0.5
    state = state_of(layers, callbacks=[source], precision=precision)
    GradientClipping('norm', 1.0).apply(Event.AFTER_TRAIN_BATCH, state, None)  # type: ignore[arg-type]
    assert source.calls == (precision == Precision.FP32)
    clipped = float(summarize_gradients(gradients(layers)).squared_norm) ** 0.5
    assert clipped == pytest.approx(before / ((10 if source.calls else 1) * before + 1e-6), rel=1e-5)


def test_recipes_build_it_and_wrong_settings_are_refused():
    assert resolve('algorithm', 'gradient_clipping') is GradientClipping
    with pytest.raises(UserError, match='clipping_threshold: 0 is not greater than 0'):
        build('algorithm', Component('gradient_clipping', {'clipping_type': 'norm', 'clipping_threshold': 0}))
    with pytest.raises(UserError, match="clipping_type: 'nrm' is not one of norm, value, adaptive"):
        GradientClipping('nrm', 1.0)  # type: ignore[arg-type]
