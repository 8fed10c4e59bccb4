"""Each part of `speed` in bfloat16 against the plain path, on the CPU and on a GPU."""

from dataclasses import replace

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor

from diffusion.config.recipe import SPEED_PARTS, SpeedConfig
from diffusion.training.performance import apply_speed, set_backends
from tests.training.test_performance import (
    HALF,
    NOTHING,
    _fast_compiler_and_restored_settings,  # noqa: F401
    batch_of,
    largest_error,
    overall_error,
    with_parts,
)

Gradients = tuple[float, dict[str, torch.Tensor]]


def gradients(make_model, device: str, parts: SpeedConfig, *, half: bool) -> Gradients:
    """Return the loss and the gradients of a batch with some parts of `speed`, in float32 or under autocast."""
    model = make_model()
    model.denoiser.set_attn_processor(AttnProcessor())
    apply_speed(model, parts)
    model.to(device)
    set_backends(parts, on_gpu=device == 'cuda')
    dtypes = []
    model.denoiser.conv_in.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    batch = {name: value.to(device) for name, value in batch_of(model).items()}
    with torch.autocast(device, torch.bfloat16, enabled=half):
        loss = model.loss(model(batch), batch)
    loss.backward()
    assert dtypes == [torch.bfloat16 if half else torch.float32]
    weights = model.named_parameters()
    return loss.item(), {name: weight.grad.cpu() for name, weight in weights if weight.grad is not None}


NAMES = 'channels_last', 'flash_attention', 'low_precision_norms', 'inference_mode'
SINGLE = *([name] for name in NAMES), ['tf32', 'conv_benchmark']
UNCOMPILED = [part for part in SPEED_PARTS if part != 'compile']
CASES = [
    pytest.param('cpu', UNCOMPILED, marks=pytest.mark.cpu_form),
    *(pytest.param('cpu', parts, marks=[pytest.mark.cpu_form, pytest.mark.slow]) for parts in (*SINGLE, SPEED_PARTS)),
    *(pytest.param('cuda', parts, marks=pytest.mark.gpu) for parts in (*SINGLE, SPEED_PARTS, ['compile'])),
]
"""Devices with settings; on a CPU, only one case is not slow: all settings but compilation."""
SLOW_ON_A_CPU = pytest.mark.parametrize(
    'device',
    [pytest.param('cpu', marks=[pytest.mark.cpu_form, pytest.mark.slow]), pytest.param('cuda', marks=pytest.mark.gpu)],
)


@pytest.mark.parametrize(
    ('device', 'parts'),
    CASES,
    ids=lambda value: value if isinstance(value, str) else 'all' if value is SPEED_PARTS else '+'.join(value),
)
def test_part_is_as_accurate_in_bfloat16_as_the_plain_path(make_model, device, parts):
    exact = gradients(make_model, device, NOTHING, half=False)
    plain = gradients(make_model, device, NOTHING, half=True)
    fast = gradients(make_model, device, with_parts(*parts), half=True)
    assert fast[0] == pytest.approx(exact[0], rel=2 * HALF)
    assert overall_error(fast[1], exact[1]) < 2 * overall_error(plain[1], exact[1])


@SLOW_ON_A_CPU
def test_losses_on_every_device_equal_those_on_the_cpu(make_model, device):
    """Compare in float32 without TF32: noise and timesteps are the same, so that only rounding errors differ."""
    expected = gradients(make_model, 'cpu', NOTHING, half=False)
    found = gradients(make_model, device, NOTHING, half=False)
    assert found[0] == pytest.approx(expected[0], rel=1e-4)
    assert overall_error(found[1], expected[1]) < 5e-3


@SLOW_ON_A_CPU
def test_fused_optimizer_makes_the_same_steps_on_every_device(make_model, device):
    """A large epsilon, because Adam amplifies rounding errors of small gradients."""
    found = []
    for fused in (False, True):
        model = make_model().to(device)
        set_backends(replace(NOTHING, fused_optimizer=fused), on_gpu=device == 'cuda')
        optimizer = torch.optim.AdamW(model.denoiser.parameters(), lr=1e-3, eps=1e-3, fused=fused)
        for first in range(3):
            optimizer.zero_grad()
            batch = {name: value.to(device) for name, value in batch_of(model, first=first).items()}
            model.loss(model(batch), batch).backward()
            optimizer.step()
        found.append({name: weight.detach().cpu() for name, weight in model.denoiser.named_parameters()})
    assert largest_error(*found) < 1e-4
