"""Text encoders of Stable Diffusion 3: two CLIP models and an optional T5 (Esser et al. 2024, appendix B.3).

Shapes: B batch, E text encoders, L text tokens, D text width, P width of the pooled text.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerBase, T5EncoderModel

from diffusion.errors import UserError
from diffusion.models.text_conditioner import TextConditioner, TextOutput


class Sd3TextConditioner(TextConditioner):
    """Two CLIP text encoders and T5, whose outputs are concatenated along the sequence.

    The penultimate hidden states of the two CLIP models are concatenated along the width and padded with zeros to T5's
    width; T5's last hidden states follow as additional tokens. The pooled text consists of the projections of both CLIP
    models.

    Args:
        t5: T5's encoder; if None, zeros replace its tokens, as in the diffusers pipeline.
        tokenizers: One tokenizer per encoder. Those of the CLIP models have the same length; T5's may differ.
        width: D, which must be T5's width.
        t5_length: Number of T5 tokens, even if `t5` is None.
    """

    equal_lengths = False

    def __init__(
        self,
        clips: Sequence[CLIPTextModelWithProjection],
        t5: T5EncoderModel | None,
        tokenizers: Sequence[PreTrainedTokenizerBase],
        *,
        width: int,
        t5_length: int,
    ) -> None:
        super().__init__([*clips, *([] if t5 is None else [t5])], tokenizers)
        lengths = [tokenizer.model_max_length for tokenizer in tokenizers]
        if len(clips) != 2 or lengths[0] != lengths[1]:
            raise UserError(
                f'text encoders: {len(clips)} CLIP models with tokenizers of lengths {lengths[: len(clips)]}; use two, '
                'with tokenizers of the same length'
            )
        if t5 is not None and (t5.config.d_model != width or lengths[2] != t5_length):
            raise UserError(
                f'text encoders: T5 has width {t5.config.d_model} and a tokenizer of length {lengths[2]}; expected '
                f'{width} and {t5_length}'
            )
        clip_width = sum(clip.config.hidden_size for clip in clips)
        if clip_width > width:
            raise UserError(
                f'text encoders: the CLIP models have width {clip_width} together, T5 has {width}; use a wider T5'
            )
        self.t5_length = t5_length
        self._width = width

    @property
    def t5(self) -> nn.Module | None:
        return self.encoders[2] if len(self.encoders) == 3 else None

    @property
    def width(self) -> int:
        """Width D of the text embeddings, which is T5's width."""
        return self._width

    @property
    def pooled_width(self) -> int:
        """Width P of the pooled text, summed over the CLIP models."""
        return sum(clip.config.projection_dim for clip in self.encoders[:2])  # type: ignore[union-attr]

    @property
    def output(self) -> str:
        return 'penultimate+pooled+t5' if self.t5 is not None else 'penultimate+pooled+zeros'

    def embeddings_per_caption(self, token_length: int) -> int:
        clip_length = min(token_length, self.tokenizers[0].model_max_length)
        return clip_length + (self.t5_length if self.t5 is None else min(token_length, self.t5_length))

    def forward(self, input_ids: Tensor) -> TextOutput:
        """Return text embeddings [B, L, D] and pooled text [B, P] for token ids [B, E, longest length]."""
        self._check_ids(input_ids)
        clip_ids = input_ids[:, :, : self.tokenizers[0].model_max_length]
        outputs: list[Any] = [
            clip(clip_ids[:, i], output_hidden_states=True) for i, clip in enumerate(self.encoders[:2])
        ]
        embeds = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        embeds = functional.pad(embeds, (0, self.width - embeds.shape[-1]))
        if self.t5 is None:
            rest = embeds.new_zeros(len(embeds), self.t5_length, self.width)
        else:
            # Pass no mask: Stable Diffusion 3 was trained with the embeddings of padding tokens too.
            rest = self.t5(input_ids[:, 2, : self.t5_length]).last_hidden_state
        pooled = torch.cat([output.text_embeds for output in outputs], dim=-1)
        return TextOutput(torch.cat([embeds, rest], dim=1), pooled)
