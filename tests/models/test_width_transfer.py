"""muP against its paper: table 3's scales by layer, changes of activations at several widths, and AdamW's groups."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.models.block_matrices import is_matrix
from diffusion.models.families.prx.builder import at_width, tiny_prx, transformer
from diffusion.models.width_transfer import scale_for_width
from diffusion.training.components import build_optimizer, width_groups

HEAD = 8
BASE = 2 * HEAD


def of_width(width: int) -> Any:
    torch.manual_seed(0)
    return transformer(4, 24, hidden_size=width, num_heads=width // HEAD, depth=2, patch_size=1)


def test_initial_weights_and_learning_rates_are_those_of_table_3():
    """Standard deviations of the initial weights, in units of the paper's, and learning rates, at 4 times the width."""
    plain, scaled = of_width(4 * BASE), of_width(4 * BASE)
    factors = scale_for_width(scaled, at_width(scaled, BASE))
    before, after = dict(plain.named_parameters()), dict(scaled.named_parameters())
    input_like = {'img_in', 'txt_in', 'time_in.in_layer'}
    for name, parameter in after.items():
        layer = name.rpartition('.')[0]
        if parameter.ndim == 1:
            init, rate = (1 if layer in input_like else 2), 1
        elif layer in input_like:
            init, rate = 1, 1
        else:
            init, rate = (0.5 if layer == 'final_layer.linear' else 1), 0.25
        if 'norm' in layer:
            init = 1
        torch.testing.assert_close(parameter, init * before[name])
        assert factors.get(name, 1) == rate, name
    same = of_width(BASE)
    assert scale_for_width(same, at_width(same, BASE)) == {}
    assert all(
        torch.equal(one, other) for one, other in zip(same.parameters(), of_width(BASE).parameters(), strict=True)
    )


def test_matrices_have_several_rows_and_columns():
    shapes = [(2, 2), (1, 2), (2, 1), (2,), (2, 1, 1, 2), (2, 1, 1)]
    assert [is_matrix(each) for each in shapes] == [True, False, False, False, True, False]
    assert [is_matrix(each, convolutions=False) for each in shapes] == [True] + [False] * 5


def sizes_after_steps(width: int, *, mup: bool) -> Tensor:
    """Return the mean changes of a transformer's output, and of the tokens after its last block, by four steps."""
    model = of_width(width)
    for block in model.blocks:
        # Gates of 0, PyTorch's, would hide the blocks in the first steps.
        nn.init.normal_(block.modulation.lin.weight, std=width**-0.5)
    factors = scale_for_width(model, at_width(model, BASE)) if mup else {}
    settings: dict[str, Any] = {'optimizer': 'adamw', 'lr': 0.02, 'weight_decay': 0.0}
    optimizer = torch.optim.AdamW(width_groups(model, factors=factors, **settings), eps=1e-15)
    generator = torch.Generator().manual_seed(1)
    noisy, target = (torch.randn(8, 4, 4, 4, generator=generator) for _ in range(2))
    text, time = torch.randn(8, 3, 24, generator=generator), torch.linspace(0, 1, 8)
    tokens: list[Tensor] = []
    model.blocks[-1].register_forward_hook(lambda _, args, output: tokens.append(output.detach()))
    outputs = []
    for _ in range(4 + 1):
        output: Any = model(noisy, timestep=time, encoder_hidden_states=text).sample
        outputs.append(output.detach())
        optimizer.zero_grad()
        nn.functional.mse_loss(output, target).backward()
        optimizer.step()
    return torch.stack([(each[-1] - each[0]).square().mean().sqrt() for each in (outputs, tokens)])


@pytest.mark.slow
def test_activations_change_alike_at_all_widths():
    """The coordinate check of Yang et al., appendix D.1: with muP, steps change activations by a size of order 1."""
    narrow, wide = (sizes_after_steps(width, mup=True) for width in (BASE, 16 * BASE))
    assert ((wide / narrow).log2().abs() < 1).all(), (narrow, wide)
    plain = sizes_after_steps(16 * BASE, mup=False)
    assert (plain > 3 * narrow).all(), (narrow, plain)


def test_groups_of_the_optimizer_follow_from_the_recipe():
    """Rates in proportion to 1 / width, the same decay per step, the group of unscaled layers first."""
    recipe = load('yamls/quickstart.yaml', ['optimizer={name: adamw, lr: 0.01, weight_decay: 0.1}'])
    model = tiny_prx(hidden_size=64, num_heads=2, depth=1, text_layers=0, mup_base_width=32)
    groups = build_optimizer(recipe, model).param_groups
    assert [group['lr'] for group in groups] == [0.01, 0.005]
    assert [group['lr'] * group['weight_decay'] for group in groups] == [pytest.approx(0.001)] * 2
    assert sum(len(group['params']) for group in groups) == len(list(model.parameters()))
    hidden = {id(each) for each in groups[1]['params']}
    assert id(model.denoiser.blocks[0].gate_proj.weight) in hidden  # type: ignore[union-attr, index]
    assert not hidden & {id(each) for each in model.text_encoder.parameters()}


def test_a_width_without_rules_is_refused():
    with pytest.raises(UserError, match='mup_base_width: 40 is not a multiple of 32, the size of a head, .* use 32'):
        tiny_prx(hidden_size=64, num_heads=2, depth=1, text_layers=0, mup_base_width=40)
    with pytest.raises(UserError, match='mup: weight of a Embedding grows in 2 dimensions, and no muP rule is known'):
        scale_for_width(nn.Embedding(8, 8), nn.Embedding(4, 4))
    with pytest.raises(UserError, match='have different layers; they may differ only in width'):
        scale_for_width(of_width(BASE), nn.Linear(2, 2))
