"""Muon against its papers: a loop over matrices, singular values, torch.optim.AdamW, and one rank against three."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.models.families.prx.builder import tiny_prx
from diffusion.training import muon as muon_module
from diffusion.training.components import build_optimizer
from diffusion.training.muon import Muon, muon_groups, orthogonalize


def reference_newton_schulz(gradient: Tensor) -> Tensor:
    """Jordan's published function, without its cast to bfloat16."""
    a, b, c = (3.4445, -4.7750, 2.0315)
    x = gradient / gradient.norm()
    if gradient.size(0) > gradient.size(1):
        x = x.T
    for _ in range(5):
        A = x @ x.T
        B = b * A + c * A @ A
        x = a * x + B @ x
    return x.T if gradient.size(0) > gradient.size(1) else x


class Reference:
    """Muon for one matrix after another: SGD momentum as Jordan writes it, and the scale of Liu et al., equation 4."""

    def __init__(self, weights: list[Tensor], *, lr: float, decay: float, momentum: float, nesterov: bool):
        self.weights, self.lr, self.decay, self.momentum, self.nesterov = weights, lr, decay, momentum, nesterov
        self.buffers = [torch.zeros_like(each) for each in weights]

    def step(self, gradients: list[Tensor]) -> None:
        for weight, gradient, buffer in zip(self.weights, gradients, self.buffers, strict=True):
            buffer.mul_(self.momentum).add_(gradient)
            update = gradient + self.momentum * buffer if self.nesterov else buffer
            matrix = update.reshape(len(update), -1)
            scaled = 0.2 * max(matrix.shape) ** 0.5 * reference_newton_schulz(matrix)
            weight.mul_(1 - self.lr * self.decay).sub_(self.lr * scaled.reshape(weight.shape))


SHAPES = [(8, 8), (24, 6), (6, 24), (8, 8), (5, 3, 3, 3), (24, 6), (8, 8), (8, 4, 2)]


def random_tensors(shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize('nesterov', [True, False])
@pytest.mark.parametrize(('dtype', 'tolerance'), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_updates_equal_those_of_a_loop_over_matrices(dtype, tolerance, nesterov, monkeypatch):
    """Also in batches of two matrices at most."""
    monkeypatch.setitem(muon_module.MAX_BATCH_ELEMENTS, 'cpu', 128)
    weights = [nn.Parameter(each) for each in random_tensors(SHAPES, dtype, 0)]
    settings = {'lr': 0.1, 'momentum': 0.8, 'nesterov': nesterov}
    expected = Reference([each.detach().clone() for each in weights], decay=0.3, **settings)
    optimizer = Muon(weights, weight_decay=0.3, **settings)
    for step in range(4):
        gradients = random_tensors(SHAPES, dtype, 1 + step)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
        expected.step(gradients)
    for weight, other in zip(weights, expected.weights, strict=True):
        assert (weight - other).norm() < tolerance * other.norm()


def test_fused_projections_are_updated_like_separate_matrices(small_vae):
    """PRX's queries, keys and values, against a loop over the three matrices; also after groups are added again."""
    model = tiny_prx(vae=str(small_vae), hidden_size=32, num_heads=2, depth=2, text_layers=0)
    fused: dict[str, int] = {'attention.img_qkv_proj.weight': 3, 'attention.txt_kv_proj.weight': 2}
    optimizer = Muon(muon_groups(model), lr=0.1, weight_decay=0.3)
    # Composer does this for FSDP2. The groups have no `parts`, which a checkpoint would restore.
    groups = [dict(group) for group in optimizer.param_groups]
    assert 'parts' not in groups[0]
    optimizer.param_groups.clear()
    for group in groups:
        optimizer.add_param_group(group)
    weights = list(groups[0]['params'])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parts = [next((n for end, n in fused.items() if names[id(each)].endswith(end)), 1) for each in weights]
    assert sorted(parts) == [1] * (len(parts) - 4) + [2, 2, 3, 3]
    pieces = [piece for each, n in zip(weights, parts, strict=True) for piece in each.detach().clone().chunk(n)]
    expected = Reference(pieces, lr=0.1, decay=0.3, momentum=0.95, nesterov=True)
    for step in range(2):
        gradients = random_tensors([tuple(each.shape) for each in weights], torch.float32, step)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
        expected.step([piece for each, n in zip(gradients, parts, strict=True) for piece in each.chunk(n)])
    found = [piece for each, n in zip(weights, parts, strict=True) for piece in each.detach().chunk(n)]
    for one, other in zip(found, pieces, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()
    assert set(muon_groups(model, split_projections=False)[0]['parts']) == {1}


@pytest.mark.parametrize('shape', [(64, 64), (200, 50), (50, 200)])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_singular_values_of_the_update_are_near_one_with_the_same_vectors(shape, dtype):
    scales = torch.tensor([1e-12, 1, 1e12])[:, None, None]
    matrices = torch.stack(random_tensors([shape] * 3, torch.float32, 3)) * scales
    result = orthogonalize(matrices.to(dtype), steps=5).float()
    values = torch.linalg.svdvals(result)
    # A square random matrix has singular values near 0, which five steps leave below 0.7.
    assert values.max() < 1.25
    assert values.quantile(0.02 if shape == (64, 64) else 0) > 0.65
    left, _, right = torch.linalg.svd(matrices / matrices.norm(dim=(1, 2), keepdim=True), full_matrices=False)
    rotated = left.mT @ result @ right.mT
    between = rotated - torch.diag_embed(rotated.diagonal(dim1=1, dim2=2))
    assert between.abs().max() < (1e-4 if dtype == torch.float32 else 0.1), 'the singular vectors are the same'
    assert torch.equal(orthogonalize(torch.zeros(1, *shape), steps=5), torch.zeros(1, *shape))


def test_bfloat16_orthogonalization_gives_nearly_the_same_float32_weights():
    updated = []
    for dtype in ('float32', 'bfloat16', 'auto'):
        weight = nn.Parameter(torch.zeros(64, 16))
        (weight.grad,) = random_tensors([(64, 16)], torch.float32, 8)
        Muon([weight], lr=1.0, newton_schulz_dtype=dtype).step()
        updated.append(weight.detach())
    plain, narrow, auto = updated
    assert 0 < (plain - narrow).norm() < 0.03 * plain.norm()
    assert torch.equal(auto, plain), 'on a CPU'


def test_tall_and_wide_matrices_cost_the_same():
    counts = []
    for shape in ((200, 50), (50, 200)):
        with FlopCounterMode(display=False) as counter:
            orthogonalize(torch.ones(1, *shape), steps=5)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize('fused', [None, True])
def test_other_parameters_are_updated_exactly_as_by_adamw(fused):
    ours, theirs = ([nn.Parameter(each) for each in random_tensors([(7,), (3, 5)], torch.float32, 5)] for _ in range(2))
    settings: dict[str, Any] = {'lr': 0.01, 'weight_decay': 0.1, 'betas': (0.8, 0.9), 'eps': 1e-6, 'fused': fused}
    optimizer = Muon([{'params': ours, 'algorithm': 'adamw'}], **settings)
    expected = torch.optim.AdamW(theirs, **settings)
    for step in range(3):
        gradients = random_tensors([(7,), (3, 5)], torch.float32, 6 + step)
        for one, other, gradient in zip(ours, theirs, gradients, strict=True):
            one.grad, other.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        expected.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert optimizer.state_dict()['state'].keys() == expected.state_dict()['state'].keys()


def test_parameters_without_gradients_keep_their_values_and_have_no_state():
    weights = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))]
    optimizer = Muon(weights)
    assert optimizer.step(lambda: 3.0) == 3.0
    assert not optimizer.state
    assert all(torch.equal(each, torch.ones_like(each)) for each in weights)


def names_of(model: nn.Module, groups: list[dict[str, Any]]) -> list[set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [{names[id(each)] for each in group['params']} for group in groups]


def test_groups_are_the_matrices_of_blocks_and_the_rest(make_model):
    model = make_model()
    model.denoiser.down_blocks[0].resnets[0].conv2.weight.requires_grad_(False)
    matrices, others = names_of(model, muon_groups(model))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert matrices | others == trained and not matrices & others
    down = 'denoiser.down_blocks.0'
    assert {f'{down}.resnets.0.conv1.weight', f'{down}.attentions.0.transformer_blocks.0.attn1.to_q.weight'} <= matrices
    assert not [name for name in matrices if 'norm' in name or name.endswith('.bias')]
    for name in ('conv_in', 'conv_out', 'time_embedding.linear_1', 'down_blocks.0.resnets.0.norm1'):
        assert f'denoiser.{name}.weight' in others
    assert any('embed' in name for name in others), 'the text encoder'
    linear, rest = names_of(model, muon_groups(model, convolutions=False))
    assert f'{down}.resnets.0.conv1.weight' in rest and linear < matrices


def test_model_without_blocks_is_refused_with_the_way_out():
    with pytest.raises(UserError, match=r'muon: Sequential has no blocks .* set `fsdp_wrap_fn`.* optimizer adamw'):
        muon_groups(nn.Sequential(nn.Linear(2, 2)))


class Other(nn.Module):
    """Model of another project: Composer's convention tells its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Embedding(3, 4)) for _ in range(2))

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Sequential)


def test_any_model_with_a_wrap_function_has_groups():
    model = Other()
    assert names_of(model, muon_groups(model)) == [
        {'blocks.0.0.weight', 'blocks.1.0.weight'},
        {'first.weight', 'first.bias', *(f'blocks.{i}.{name}' for i in (0, 1) for name in ('0.bias', '1.weight'))},
    ]


def test_plain_and_named_parameters_are_divided_by_their_shapes():
    model = nn.Sequential(nn.Linear(3, 4), nn.Conv2d(2, 2, 3), nn.Linear(3, 1))
    for params in (model.parameters(), model.named_parameters(), [{'params': model.parameters(), 'lr': 0.5}]):
        groups = Muon(params, lr=0.1, adamw_lr=0.2).param_groups
        assert [group['algorithm'] for group in groups] == ['muon', 'adamw']
        assert names_of(model, groups) == [{'0.weight', '1.weight'}, {'0.bias', '1.bias', '2.weight', '2.bias'}]
    assert [group['lr'] for group in groups] == [0.5, 0.5]
    groups = Muon(model.parameters(), lr=0.1, adamw_lr=0.2, convolutions=False).param_groups
    assert names_of(model, groups)[0] == {'0.weight'}
    assert [group['lr'] for group in groups] == [0.1, 0.2]
    assert [group['lr'] for group in Muon(model.parameters(), lr=0.1).param_groups] == [0.1, 0.1]


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'lr': 0}, 'lr: 0 is not greater than 0'),
        ({'adamw_lr': -1.0}, 'adamw_lr: -1.0 is not greater than 0'),
        ({'momentum': 1.0}, 'momentum: 1.0 is out of range; use at least 0 and less than 1'),
        ({'betas': (0.9, 1.5)}, 'betas: 1.5 is out of range'),
        ({'betas': (0.9,)}, r'betas: \[0.9\] has 1 numbers; give two'),
        ({'newton_schulz_steps': 0}, 'newton_schulz_steps: 0 is less than 1'),
        ({'newton_schulz_dtype': 'int8'}, "newton_schulz_dtype: 'int8' is not one of auto, bfloat16, float32"),
        ({'weight_decay': -0.1}, 'weight_decay: -0.1 is less than 0'),
        ({'params': [{'params': [torch.ones(3)], 'algorithm': 'muon'}]}, r'shape \[3\] is in a group with algorithm'),
        (
            {'params': [{'params': [torch.ones(4, 3)], 'algorithm': 'muon', 'parts': [3]}]},
            r'rows of .* \[4, 3\] do not',
        ),
        ({'params': [{'params': [torch.ones(4, 3)], 'parts': [2]}]}, 'parts require a group with algorithm muon, and'),
        ({'params': [{'params': [torch.ones(3)], 'algorithm': 'sgd'}]}, "algorithm 'sgd'; use muon or adamw"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Muon(**({'params': [torch.ones(2, 2)]} | settings))


def test_recipe_builds_muon_of_the_blocks(write_recipe, make_model):
    optimizer = {'name': 'muon', 'lr': 2.0e-3, 'adamw_lr': 1.0e-3, 'convolutions': False, 'betas': [0.8, 0.9]}
    recipe = load(write_recipe(optimizer=optimizer), ['speed.fused_optimizer=true'])
    model = make_model()
    built = build_optimizer(recipe, model)
    assert type(built) is Muon
    assert names_of(model, built.param_groups) == names_of(model, muon_groups(model, convolutions=False))
    for group, rate in zip(built.param_groups, (2.0e-3, 1.0e-3), strict=True):
        assert (group['lr'], group['fused'], group['betas']) == (rate, True, (0.8, 0.9))


PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from diffusion.errors import UserError
from diffusion.training.matrix_exchange import layout_of, on_whole_matrices
from diffusion.training.muon import Muon
from diffusion.training.muon import orthogonalize

dist.init_process_group('gloo')
mesh = init_device_mesh('cpu', (3,))
calls = []

def function(matrices):
    calls.append(len(matrices))
    return orthogonalize(matrices, steps=5)

torch.manual_seed(0)
for count, rows, columns, first in ((7, 5, 4, 0), (2, 2, 6, 1), (1, 9, 3, 5), (4, 4, 4, 2)):
    for dtype in (torch.float32, torch.bfloat16):
        matrices = torch.randn(count, rows, columns).to(dtype)
        expected = torch.cat([orthogonalize(each[None], steps=5) for each in matrices])
        sharded = [distribute_tensor(each, mesh, [Shard(0)]) for each in matrices]
        calls.clear()
        parts = torch.stack([each.to_local() for each in sharded])
        result = on_whole_matrices(function, parts, layout_of(sharded[0]), rows=rows, first=first)
        for each, found in zip(expected, result):
            torch.testing.assert_close(found, distribute_tensor(each, mesh, [Shard(0)]).to_local())
        assert sum(calls) <= -(-count // 3), 'each matrix is computed once, on one rank'
        calls.clear()
        copies = on_whole_matrices(function, matrices, layout_of(matrices[0]), rows=rows, first=first)
        torch.testing.assert_close(copies, expected)
        assert sum(calls) <= -(-count // 3), 'also if every rank has all of them'
        whole = layout_of(distribute_tensor(matrices[0], mesh, [Replicate()]))
        same = on_whole_matrices(function, matrices, whole, rows=rows, first=0)
        torch.testing.assert_close(same, expected)
try:
    layout_of(distribute_tensor(torch.zeros(6, 6), mesh, [Shard(1)]))
except UserError as error:
    print(error)

def train(model):
    matrices = [each for each in model.parameters() if each.ndim == 2]
    groups = [{'params': matrices, 'algorithm': 'muon', 'parts': [3 if len(each) == 6 else 1 for each in matrices]}]
    groups.append({'params': [each for each in model.parameters() if each.ndim == 1], 'algorithm': 'adamw'})
    optimizer = Muon(groups, lr=0.1)
    for step in range(3):
        model.zero_grad()
        model(torch.full((2, 5), step + 1.0)).square().sum().backward()
        optimizer.step()
    weights = [each.detach() for each in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in weights]

def build():
    torch.manual_seed(1)
    sizes = (5, 2, 7, 2, 6, 4, 2, 5, 2)
    return nn.Sequential(*(nn.Linear(one, other) for one, other in zip(sizes, sizes[1:])), nn.Tanh())

model = build()
fully_shard(model)
for one, other in zip(train(model), train(build()), strict=True):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
print('same')
"""


def test_matrices_are_computed_once_and_results_equal_those_of_one_rank(ranks):
    for output in ranks.start_program(3, '-c', PROGRAM).end():
        assert 'shard with fully_shard alone, or use AdamW' in output
        assert output.endswith('same\n')
