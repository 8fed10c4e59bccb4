"""Text encoders that condition the denoiser, and tokenization of captions.

Shapes: B batch, E text encoders, L text tokens, D text width (summed over encoders), P width of the pooled text.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from diffusion.errors import UserError
from diffusion.models.clip_tokens import token_ids


class TextOutput(NamedTuple):
    """Output of text encoders: embeddings per token, [B, L, D], and per caption, [B, P] or None."""

    embeds: Tensor
    pooled: Tensor | None = None


def tokenize(tokenizers: Sequence[PreTrainedTokenizerBase], captions: Sequence[str]) -> Tensor:
    """Return the token ids of captions, each tokenizer's padded and truncated to its own length, int64 [B, E, L].

    L is the length of the longest tokenizer; the ids of the others are followed by zeros.
    """
    # By way of NumPy: torch.tensor takes ten times as long to read nested lists.
    ids = np.zeros((len(captions), len(tokenizers), longest(tokenizers)), dtype=np.int64)
    for index, tokenizer in enumerate(tokenizers):
        ids[:, index, : tokenizer.model_max_length] = [token_ids(tokenizer, caption) for caption in captions]
    return torch.from_numpy(ids)


def longest(tokenizers: Sequence[PreTrainedTokenizerBase]) -> int:
    """Return the length of the longest tokenizer."""
    return max(tokenizer.model_max_length for tokenizer in tokenizers)


class TextConditioner(nn.Module):
    """Text encoders whose concatenated last hidden states condition the denoiser.

    Args:
        encoders: Text models of transformers, such as CLIPTextModel or T5GemmaEncoder. Stable Diffusion 2's text
            encoder is published without its last layer, so that its last hidden state is that of OpenCLIP's penultimate
            layer after the final norm.
        tokenizers: One tokenizer per encoder, all of the same length.
        mask_padding: Hide the padding of a caption from the encoders' own attention, as models trained on longer
            sequences expect. CLIP, whose attention is causal, was trained without.
    """

    equal_lengths: ClassVar[bool] = True
    """True if all tokenizers must have the same length."""

    def __init__(
        self,
        encoders: Sequence[PreTrainedModel],
        tokenizers: Sequence[PreTrainedTokenizerBase],
        *,
        mask_padding: bool = False,
    ) -> None:
        super().__init__()
        lengths = {tokenizer.model_max_length for tokenizer in tokenizers}
        if len(encoders) != len(tokenizers) or not encoders or (self.equal_lengths and len(lengths) != 1):
            same = ', all of the same length' if self.equal_lengths else ''
            raise UserError(
                f'text encoders: {len(encoders)} encoders with {len(tokenizers)} tokenizers of lengths '
                f'{sorted(lengths)}; use one tokenizer per encoder{same}'
            )
        for encoder, tokenizer in zip(encoders, tokenizers, strict=True):
            if len(tokenizer) > encoder.config.vocab_size:
                raise UserError(
                    f'tokenizer: has {len(tokenizer)} tokens, but its text encoder embeds {encoder.config.vocab_size}; '
                    'load both from the same source'
                )
        self.encoders = nn.ModuleList(encoders)
        self.tokenizers = list(tokenizers)
        self.mask_padding = mask_padding
        # Where a caption ends is known by its end-of-text token, or by the padding token where captions have no end.
        # Not always by the padding token: CLIP pads with the end-of-text token, Stable Diffusion 2 with `!`.
        first: Any = tokenizers[0]
        self._ends = first.eos_token_id in first('').input_ids
        if not self._ends and first.pad_token_id is None:
            raise UserError('tokenizer: neither ends captions with a token nor has a padding token; set its pad_token')

    @property
    def width(self) -> int:
        """Width D of the text embeddings, summed over the encoders."""
        return sum(encoder.config.hidden_size for encoder in self.encoders)  # type: ignore[union-attr]

    @property
    def pooled_width(self) -> int | None:
        """Width P of the pooled text; None if the encoders return none."""
        return None

    @property
    def output(self) -> str:
        """Description of the output, which the manifest of stored embeddings records, such as `penultimate+pooled`."""
        return 'last'

    @property
    def length(self) -> int:
        """Number L of text embeddings per caption."""
        return self.embeddings_per_caption(self.token_length)

    @property
    def token_length(self) -> int:
        """Number of token ids per caption and encoder, as `tokenize` returns them."""
        return longest(self.tokenizers)

    def embeddings_per_caption(self, token_length: int) -> int:
        """Return the number of text embeddings for captions of `token_length` token ids."""
        return token_length

    def forward(self, input_ids: Tensor) -> TextOutput:
        """Return the text embeddings of token ids [B, E, L], the encoders' last hidden states."""
        self._check_ids(input_ids)
        mask = self.padding_mask(input_ids) if self.mask_padding else None
        states = [encoder(input_ids[:, i], attention_mask=mask) for i, encoder in enumerate(self.encoders)]
        return TextOutput(torch.cat([state.last_hidden_state for state in states], dim=-1))

    def _check_ids(self, input_ids: Tensor) -> None:
        """Raise UserError unless token ids have the shape [B, E, L]."""
        if input_ids.ndim != 3 or input_ids.shape[1] != len(self.encoders):
            raise UserError(
                f'input_ids: shape {tuple(input_ids.shape)}; '
                f'expected [batch, {len(self.encoders)} text encoders, tokens]'
            )

    def padding_mask(self, input_ids: Tensor) -> Tensor:
        """Return a mask of the first encoder's tokens, bool [B, L]: False for the padding of token ids [B, E, L]."""
        first: Any = self.tokenizers[0]
        if not self._ends:
            return input_ids[:, 0].ne(first.pad_token_id)
        ended = input_ids[:, 0].eq(first.eos_token_id).cumsum(dim=-1)
        return torch.cat([torch.ones_like(ended[:, :1]), ended[:, :-1] == 0], dim=-1).bool()
