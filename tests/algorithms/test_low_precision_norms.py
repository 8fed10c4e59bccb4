"""Values and gradients of the denoiser's low-precision norms against float32 norms."""

import pytest
import torch
from torch import nn

from diffusion.algorithms.low_precision_norms import (
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


def test_only_exact_classes_are_replaced_and_state_dict_names_stay(make_model):
    model = make_model()
    before = list(model.state_dict())
    count = replace_norms(model.denoiser, nn.GroupNorm, LowPrecisionGroupNormLayer)
    assert count > 10
    assert replace_norms(model.denoiser, nn.GroupNorm, LowPrecisionGroupNormLayer) == 0
    assert list(model.state_dict()) == before
    assert not any(isinstance(layer, LowPrecisionGroupNormLayer) for layer in model.vae.modules())
