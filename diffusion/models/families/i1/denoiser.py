"""Adapter of i1's transformer."""

from typing import Any, Literal

from torch import Tensor

from diffusion.errors import UserError
from diffusion.models.families.adapter import Condition, DenoiserAdapter, DenoiserSizes, TokenBlocks
from diffusion.models.families.i1.original_layout import OriginalFile, from_original
from diffusion.models.families.i1.transformer import I1Block, I1Transformer2DModel, TextBlock


class I1(DenoiserAdapter):
    """Adapter of I1Transformer2DModel."""

    block_classes = (I1Block, TextBlock)
    takes_text_mask = True
    reads_padding = True  # the text adapter attends to all tokens
    fused_projections = {  # noqa: RUF012
        **dict.fromkeys(['image_qkv', 'text_qkv', 'qkv'], 3),
        **dict.fromkeys(['image_mlp.up', 'text_mlp.up', 'mlp.up'], 2),
    }
    samples_even_times = True
    reads_pickles = True
    token_blocks = TokenBlocks('blocks', per_token={'image_rotary': 1}, output=0, mirrored=True)

    def sizes(self, denoiser: I1Transformer2DModel) -> DenoiserSizes:
        config = denoiser.config
        return DenoiserSizes(
            in_channels=config['in_channels'],
            out_channels=config['in_channels'],
            text_width=config['text_width'],
            patch=config['patch_size'],
            token_width=config['hidden_size'],
        )

    def keywords(self, timesteps: Tensor, condition: Condition) -> dict[str, Any]:
        # The transformer reads the noise level off the noisy tokens.
        return {'encoder_hidden_states': condition.embeds, 'attention_mask': condition.mask}

    def from_original(self, denoiser: Any, content: Any, which: Literal['training', 'ema'], where: str) -> Any:
        return from_original(denoiser, content, which, where)

    def single_file(self, model: Any) -> Any:
        return OriginalFile(model.denoiser, model.latent_size)

    def pipeline(self, model: Any) -> Any:
        raise UserError('export: diffusers has no pipeline for i1; draw with task=generate')
