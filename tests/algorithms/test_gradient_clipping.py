"""GradientClipping: the gradients of torch's functions, with one collective for clipping and the loss guard."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.algorithms import GradientClipping as ComposerGradientClipping
from composer.core import Event, Precision
from torch import nn

from diffusion.algorithms.gradient_clipping import GradientClipping
from diffusion.algorithms.gradient_norms import Gradients, summarize_gradients
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
    changed = any(
        not torch.equal(one, other) for one, other in zip(gradients(ours)[:3], gradients(model())[:3], strict=True)
    )
    assert changed == (threshold < 1e6)


class Source:
    """Callback that has a summary of the gradients; their norm over all ranks is ten times that of this rank."""

    def __init__(self) -> None:
        self.calls = 0

    def gradients_of_batch(self, state: Any) -> tuple[Gradients, torch.Tensor]:
        self.calls += 1
        summary = summarize_gradients(gradients(state.model), copies=1)
        return summary._replace(is_sharded=True), 100 * summary.squared_norm


def test_norm_of_sharded_gradients_is_that_of_the_loss_guard():
    layers, source = model(), Source()
    norm = torch.linalg.vector_norm(torch.cat([each.flatten() for each in gradients(layers) if each is not None]))
    GradientClipping('norm', 1.0).apply(Event.AFTER_TRAIN_BATCH, state_of(layers, callbacks=[source]), None)  # type: ignore[arg-type]
    assert source.calls == 1
    clipped = torch.linalg.vector_norm(torch.cat([each.flatten() for each in gradients(layers) if each is not None]))
    assert clipped == pytest.approx(float(norm) / (10 * float(norm) + 1e-6), rel=1e-5)


def test_norms_made_before_a_loss_scaler_has_unscaled_the_gradients_are_not_used():
    layers, source = copy.deepcopy(model()), Source()
    state = state_of(layers, callbacks=[source], precision=Precision.AMP_FP16)
    GradientClipping('norm', 1.0).apply(Event.AFTER_TRAIN_BATCH, state, None)  # type: ignore[arg-type]
    assert source.calls == 0


def test_recipes_build_it_and_wrong_settings_are_refused():
    assert resolve('algorithm', 'gradient_clipping') is GradientClipping
    with pytest.raises(UserError, match='clipping_threshold: 0 is not greater than 0'):
        build('algorithm', Component('gradient_clipping', {'clipping_type': 'norm', 'clipping_threshold': 0}))
    with pytest.raises(UserError, match="clipping_type: 'nrm'; use norm, value or adaptive"):
        GradientClipping('nrm', 1.0)  # type: ignore[arg-type]
