"""Activation memory against the bytes that autograd keeps of real tensors, and against torch.compile's partitioner."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import nn

from diffusion.errors import UserError
from diffusion.models.activation_memory import count_activations
from diffusion.models.families.adapter import adapter_of
from diffusion.models.families.i1.transformer_i1 import I1Transformer2DModel

SMALL: dict[str, Any] = {
    'down_block_types': ['CrossAttnDownBlock2D', 'CrossAttnDownBlock2D', 'DownBlock2D'],
    'up_block_types': ['UpBlock2D', 'CrossAttnUpBlock2D', 'CrossAttnUpBlock2D'],
    'block_out_channels': [32, 64, 64],
    'attention_head_dim': [1, 2, 2],
    'cross_attention_dim': 64,
    'use_linear_projection': True,
}
SMALLEST: dict[str, Any] = {
    'down_block_types': ['CrossAttnDownBlock2D', 'DownBlock2D'],
    'up_block_types': ['UpBlock2D', 'CrossAttnUpBlock2D'],
    'block_out_channels': [32, 64],
    'layers_per_block': 1,
    'attention_head_dim': [1, 2],
}
SIZE, TEXT = (4, 16, 24), (16, 64)


def unet(**changes):
    made = UNet2DConditionModel(**(SMALL | changes)).train()
    made.fsdp_wrap_fn = adapter_of(made).is_block  # type: ignore[assignment]
    return made


def inputs_of(module, batch):
    return ((torch.empty(batch, *SIZE), torch.zeros(batch), torch.empty(batch, *TEXT)), {})


def count(module, precision):
    return count_activations(module, lambda batch: inputs_of(module, batch), precision)


def kept(module, batch, *, autocast):
    """Return the bytes that autograd keeps of real tensors, without the parameters."""
    weights = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage  # keep a reference, so that no other storage reuses its address
        return tensor

    context = torch.autocast('cpu', torch.bfloat16) if autocast else nullcontext()
    inputs = (torch.randn(batch, *SIZE), torch.zeros(batch), torch.randn(batch, *TEXT))
    with context, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*inputs)[0]
    return sum(storage.nbytes() for key, storage in storages.items() if key not in weights)


@pytest.mark.parametrize(
    ('autocast', 'changes'),
    [
        pytest.param(True, SMALLEST, id='smallest'),
        pytest.param(True, {}, id='bfloat16-linear', marks=pytest.mark.slow),
        pytest.param(False, {'use_linear_projection': False}, id='float32-conv', marks=pytest.mark.slow),
    ],
)
def test_kept_bytes_match_autograd_with_and_without_checkpointed_blocks(autocast, changes):
    module = unet(**changes)
    two, four = (kept(module, batch, autocast=autocast) for batch in (2, 4))
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    found = count(module, 'half+low_precision_norms' if autocast else 'float32')
    assert not module.is_gradient_checkpointing
    assert all(torch.equal(before[name], parameter) for name, parameter in module.named_parameters())
    real = (four - two) // 2
    # Means and standard deviations of norms are float32 in real tensors but have the input's dtype in torch 2.7's fake
    # tensors.
    assert found.kept == (pytest.approx(real, rel=0.005) if autocast else real)
    assert found.copies == two - 2 * real

    module.enable_gradient_checkpointing()
    two, four = (kept(module, batch, autocast=autocast) for batch in (2, 4))
    real = (four - two) // 2
    assert found.kept_between == (pytest.approx(real, rel=0.005) if autocast else real)
    assert found.copies_between == two - 2 * real
    assert 0 < found.kept_inside < found.kept - found.kept_between


class Block(nn.Module):
    """Normalization, activation and matrix product, of B x 8 numbers each."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(1, 8)
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.linear(nn.functional.silu(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, blocks=1):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.fsdp_wrap_fn = lambda module: isinstance(module, Block)

    def forward(self, x):
        return self.blocks(x)


def stack_inputs(batch):
    return (torch.empty(batch, 8, requires_grad=True),), {}


@pytest.mark.parametrize(
    ('precision', 'numbers', 'copies'),
    [
        # The inputs of norm, SiLU and product; mean and standard deviation.
        ('float32', 4 * (3 * 8 + 2), 0),
        # The input is float32 up to the product, whose input is a 16-bit copy.
        ('half', 4 * (2 * 8 + 2) + 2 * 8, 2 * 64),
        ('half+low_precision_norms', 4 * (2 * 8 + 2) + 2 * 8, 2 * 64),
        # SiLU's input is recomputed from the norm's.
        ('float32+compile', 4 * (2 * 8 + 2), 0),
        ('half+compile', 4 * (8 + 2) + 2 * 8, 2 * 64),
    ],
)
def test_bytes_of_a_block_match_a_count_by_hand(precision, numbers, copies):
    found = count_activations(Stack(), stack_inputs, precision)
    assert (found.kept, found.copies) == (numbers, copies)
    assert precision != 'float32' or found.largest == 4 * 8


def test_float32_norms_keep_more_if_their_input_has_16_bits():
    """The second block's input has 16 bits: CUDA's autocast converts it to float32, and keeps the copy."""

    def of_second_block(precision):
        one, two = (count_activations(Stack(number), stack_inputs, precision) for number in (1, 2))
        return two.kept - one.kept

    assert of_second_block('half') == 4 * (2 * 8 + 2) + 2 * 8
    assert of_second_block('half+low_precision_norms') == 2 * 3 * 8 + of_second_block('half+compile') - 2 * 2 * 8
    assert of_second_block('half') > of_second_block('half+low_precision_norms') > of_second_block('half+compile')


def test_blocks_that_checkpointing_does_not_reach_are_an_error():
    module = unet(**SMALLEST)
    module.enable_gradient_checkpointing = lambda gradient_checkpointing_func=None: None
    with pytest.raises(UserError, match=r'^UNet2DConditionModel: enable_gradient_checkpointing\(\) does not reach'):
        count(module, 'float32')


def test_blocks_of_i1_are_measured_under_checkpointing():
    module = I1Transformer2DModel(in_channels=4, text_width=16, text_length=8, hidden_size=64, num_heads=2, depth=5)
    found = count_activations(
        module, lambda batch: ((torch.empty(batch, 4, 8, 8), torch.ones(batch, 8, 16)), {}), 'half'
    )
    assert found.kept_inside > 0
    assert found.kept > found.kept_between
    last_but_one = [layer for layer in module.blocks[3].modules() if isinstance(layer, nn.Linear)]
    assert found.copies_inside == 2 * sum(layer.weight.numel() for layer in last_but_one), 'the largest block'


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=100, specialize_float=True)
def test_bytes_of_compiled_blocks_match_torchs_partitioner():
    """The partitioner runs before kernels are generated; this backend generates none."""
    module = unet(**SMALLEST)
    found = count(module, 'half+compile')
    for block in module.modules():
        if module.fsdp_wrap_fn(block):
            block.forward = torch.compile(block.forward, dynamic=False, backend='aot_eager_decomp_partition')
    two, four = (kept(module, batch, autocast=True) for batch in (2, 4))
    assert found.kept == pytest.approx((four - two) / 2, rel=0.03)
