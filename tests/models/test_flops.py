"""FLOPs of models that are built, by arithmetic, against torch's counter."""

from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from diffusion.models.builders import tiny
from diffusion.models.flops import FlopCount, count_on_meta, on_meta, text_encoder_flops, vae_encoder_flops


@pytest.fixture(scope='module')
def model():
    return tiny(block_out_channels=[32, 64])


def counted(call, *inputs):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(*inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize(('height', 'width'), [(8, 8), (8, 12), (9, 16)])
def test_arithmetic_and_meta_device_agree_on_the_denoiser(model, height, width):
    count = FlopCount(model.denoiser, channels=16, text_width=128)
    sample, text = torch.empty(1, 16, height, width, device='meta'), torch.empty(1, 16, 128, device='meta')
    on_device = count_on_meta(model.denoiser, sample, torch.zeros(1, device='meta'), text, return_dict=False)
    assert count(height, width, 16) == on_device > 0


def test_a_unet_with_a_part_that_is_not_known_is_counted_on_the_meta_device(model):
    config: dict[str, Any] = {key: value for key, value in model.denoiser.config.items() if not key.startswith('_')}
    configs: list[dict[str, Any]] = [config, config | {'upcast_attention': True}]
    counts = [FlopCount(UNet2DConditionModel(**each), channels=16, text_width=128)(8, 8, 16) for each in configs]
    assert counts[0] == counts[1]


class Other(nn.Module):
    """A denoiser that is no U-Net, and counts its calls."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)
        self.register_buffer('table', torch.zeros(3))

    def forward(self, noisy, timesteps, text_embeds, return_dict=True):
        type(self).calls += 1
        return (self.convolution(noisy),)


def test_any_denoiser_is_counted_once_a_shape():
    count = FlopCount(Other(), channels=4, text_width=8)
    before = Other.calls
    assert [count(8, 8, 5), count(8, 8, 5), count(8, 16, 5)] == [2 * 9 * 16 * 64, 2 * 9 * 16 * 64, 2 * 9 * 16 * 128]
    assert Other.calls == before + 2


def test_counting_leaves_the_module_as_it_was():
    module = Other()
    weights = module.convolution.weight.detach().clone()
    copied = on_meta(module)
    assert {tensor.device.type for tensor in (*copied.parameters(), *copied.buffers())} == {'meta'}
    assert module.convolution.weight.device.type == 'cpu'
    assert torch.equal(module.convolution.weight, weights)


def test_encoders_are_what_torch_counts(model):
    picture = torch.zeros(1, 3, 64, 96)
    assert vae_encoder_flops(model.vae, height=8, width=12) == counted(model.vae.encode, picture)
    # On a CPU torch does not count fused attention; the VAE here has none.
    tokens = torch.zeros(1, 1, 16, dtype=torch.int64, device='meta')
    assert text_encoder_flops(model.text, length=16) == count_on_meta(model.text, tokens)
