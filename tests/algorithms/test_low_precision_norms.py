"""Values and gradients of the denoiser's low-precision norms against float32 norms."""

from types import SimpleNamespace

import pytest
import torch
from composer.core import Event, Precision
from torch import nn

from diffusion.algorithms.low_precision_norms import (
    DenoiserLowPrecisionGroupNorm,
    LowPrecisionGroupNormLayer,
    LowPrecisionLayerNormLayer,
    replace_norms,
)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('width', [320, 2560])
@pytest.mark.parametrize('kind', ['group', 'layer'])
def test_values_and_gradients_match_float32(kind, width, dtype):
    torch.manual_seed(0)
    plain = nn.GroupNorm(32, width) if kind == 'group' else nn.LayerNorm(width)
    nn.init.normal_(plain.weight, 1.0, 0.2)
    nn.init.normal_(plain.bias, 0.0, 0.2)
    fast = nn.Sequential(type(plain)(*([32, width] if kind == 'group' else [width])))
    fast[0].load_state_dict(plain.state_dict())
    replace_norms(fast, nn.GroupNorm, LowPrecisionGroupNormLayer)
    replace_norms(fast, nn.LayerNorm, LowPrecisionLayerNormLayer)
    values = torch.randn(2, width, 8, 8) if kind == 'group' else torch.randn(2, 16, width)
    weights = torch.randn_like(values)
    results = []
    for module in (plain, fast):
        x = values.clone().requires_grad_()
        with torch.autocast('cpu', dtype, enabled=module is fast):
            y = module(x)
        (y.float() * weights).sum().backward()
        results.append((y, x.grad, *(parameter.grad for parameter in module.parameters())))
    assert results[1][0].dtype == dtype
    tolerance = 0.03 if dtype == torch.bfloat16 else 0.004
    for reference, low in zip(*results, strict=True):
        assert (low.float() - reference).norm() / reference.norm() < tolerance


def test_algorithm_replaces_only_exact_classes_in_16_bits_and_state_dict_names_stay(make_model, caplog):
    caplog.set_level('INFO')
    model, algorithm = make_model(), DenoiserLowPrecisionGroupNorm()
    before, count = list(model.state_dict()), sum(type(layer) is nn.GroupNorm for layer in model.denoiser.modules())
    assert [algorithm.match(event, None) for event in (Event.INIT, Event.FIT_START)] == [True, False]  # type: ignore[arg-type]
    for precision, message in (('fp32', 'no effect'), ('amp_bf16', f'replaced {count} '), ('amp_fp16', 'replaced 0 ')):
        state = SimpleNamespace(model=model, precision=Precision(precision))
        algorithm.apply(Event.INIT, state, None)  # type: ignore[arg-type]
        assert message in caplog.messages[-1]
    assert len(caplog.messages) == 3 and count > 10
    assert list(model.state_dict()) == before
    assert not any(isinstance(layer, LowPrecisionGroupNormLayer) for layer in model.vae.modules())
