"""FLOPs of built models against torch's counter on the modules themselves."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from diffusion.models import batch_keys
from diffusion.models.families.adapter import DenoiserAdapter, DenoiserSizes
from diffusion.models.families.sd2.builder import tiny
from diffusion.models.flops import FlopCount, empty_copy, text_encoder_flops, vae_encoder_flops

SMALL: dict[str, Any] = {'block_out_channels': [32], 'layers_per_block': 0, 'text_width': 32, 'text_layers': 1}


def counted(call, *inputs):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(*inputs)
    return counter.get_total_flops()


class Other(nn.Module):
    """Denoiser other than a U-Net that counts its calls."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)
        self.register_buffer('table', torch.zeros(3))

    def forward(self, noisy, timesteps, text_embeds, return_dict=True):
        type(self).calls += 1
        return (self.convolution(noisy),)


class OtherFamily(DenoiserAdapter):
    denoiser_class, block_classes, takes_text_mask = Other, (), False

    def sizes(self, denoiser):
        return DenoiserSizes(in_channels=4, out_channels=4, text_width=8)

    def keywords(self, timesteps, condition):
        return {'timesteps': timesteps, 'text_embeds': condition.embeds}

    def pipeline(self, model):
        raise NotImplementedError


def test_any_denoiser_is_counted_once_per_shape():
    count = FlopCount(Other(), OtherFamily())
    before = Other.calls
    assert [count(8, 8, 5), count(8, 8, 5), count(8, 16, 5)] == [2 * 9 * 16 * 64, 2 * 9 * 16 * 64, 2 * 9 * 16 * 128]
    assert Other.calls == before + 2


def test_later_changes_to_the_denoiser_do_not_change_its_count():
    """Changes such as compiling it, or hooks of FSDP."""
    denoiser = Other()
    count = FlopCount(denoiser, OtherFamily())
    denoiser.register_forward_pre_hook(lambda *_: pytest.fail('the original was called'))
    denoiser.forward = None  # type: ignore[assignment]
    assert count(8, 8, 5) == 2 * 9 * 16 * 64


def test_flops_of_encoders_match_torch(small_vae):
    model = tiny(vae=str(small_vae), **SMALL)
    image = torch.zeros(1, 3, 64, 96)
    assert vae_encoder_flops(model.vae, height=8, width=12) == counted(model.vae.encode, image)
    # torch does not count fused attention on a CPU; this VAE has no attention.
    tokens = torch.zeros(1, 1, 16, dtype=torch.int64, device='meta')
    assert text_encoder_flops(model.text, length=16) == counted(empty_copy(model.text, 'meta'), tokens)


@pytest.mark.usefixtures('alone')
def test_flops_of_a_batch_are_counted_when_fsdp2_has_sharded_a_trained_text_encoder(small_vae):
    """FSDP2 refuses to copy a module that it has sharded."""
    model = tiny(vae=str(small_vae), **SMALL)
    tokens = torch.ones(2, 1, 16, dtype=torch.int64)
    batch = {batch_keys.IMAGE: torch.zeros(2, 3, 32, 32, dtype=torch.uint8), batch_keys.INPUT_IDS: tokens}
    expected = model.flops_per_batch(batch)
    model._flops._counted.clear()
    torch.distributed.init_process_group('gloo')
    fully_shard(model.text)
    fully_shard(model)
    assert model.flops_per_batch(batch) == expected
