"""Text encoders that condition the denoiser, and tokenization of captions.

Shapes: B batch, E text encoders, L text tokens, D text width (summed over encoders), P width of the pooled text.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import ftfy
import numpy as np
import regex
import torch
from torch import Tensor, nn
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from diffusion.compatibility.transformers_versions import mask_without_values, with_text_model, word_model
from diffusion.errors import UserError
from diffusion.models.clip_vocabulary import byte_letters

MAX_CACHED_WORDS = 2**16
"""Maximum number of words in the cache, about 15 MB."""
WORDS = regex.compile(
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+", regex.IGNORECASE
)
"""Regular expression for CLIP's words (Radford et al. 2021, simple_tokenizer.py)."""


def token_ids(tokenizer: PreTrainedTokenizerBase, caption: str) -> list[int]:
    """Return the token ids of a caption, padded and truncated to the tokenizer's `model_max_length`."""
    cached = _cached_tokenizer(tokenizer)
    if cached is None:
        call: Any = tokenizer
        return call(caption, padding='max_length', truncation=True, max_length=tokenizer.model_max_length).input_ids
    return cached.token_ids(caption)


class _CachedClipTokenizer:
    """CLIP tokenizer with a bounded cache of each word's token ids."""

    # The published models were trained with a Python tokenizer that cleans text with ftfy, as transformers 4 does. The
    # tokenizer of transformers 5 does not, and returns different ids for curly quotes, ligatures and control
    # characters.

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        parts: Any = tokenizer  # the type annotation in transformers is too narrow
        self._special: dict[str, int] = parts.added_tokens_encoder
        # First split a caption at special tokens, such as `<|endoftext|>` or the padding token `!`.
        longest_first = sorted(self._special, key=len, reverse=True)
        self._parts = re.compile(f'({"|".join(map(re.escape, longest_first))})').split
        self._length: int = parts.model_max_length
        self._start, self._end, self._pad = parts.bos_token_id, parts.eos_token_id, parts.pad_token_id
        self._word_ids = lru_cache(MAX_CACHED_WORDS)(_encoder(tokenizer, self._special))

    def token_ids(self, caption: str) -> list[int]:
        room = self._length - 2  # limit for all tokens except start and end
        ids = [self._start]
        for part in self._parts(caption):
            words = [part] if part in self._special else WORDS.findall(_clean(part))
            for word in words:
                ids += self._word_ids(word)
                if len(ids) > room:
                    break
        ids = [*ids[: room + 1], self._end]
        return ids + [self._pad] * (self._length - len(ids))


def _clean(text: str) -> str:
    # Skip ftfy for printable ASCII without '&', which it would not change: ftfy takes longer than all other steps of
    # tokenizing a caption. With '&', it may decode entities such as &amp;.
    plain = text.isascii() and text.isprintable() and '&' not in text
    return (text if plain else ftfy.fix_text(text)).lower()


def _encoder(tokenizer: CLIPTokenizer, special: dict[str, int]) -> Callable[[str], list[int]]:
    """Return a function that converts a word to token ids; `special` maps each special token to its id."""
    pairs = word_model(tokenizer)
    letters = byte_letters()

    def encode(word: str) -> list[int]:
        if word in special:
            return [special[word]]
        return [token.id for token in pairs.tokenize(''.join(letters[byte] for byte in word.encode('utf-8')))]

    return encode


@lru_cache(maxsize=8)
def _cached_tokenizer(tokenizer: PreTrainedTokenizerBase) -> _CachedClipTokenizer | None:
    """Return the tokenizer with a word cache; None unless it is a CLIPTokenizer with right padding."""
    if type(tokenizer) is not CLIPTokenizer:
        return None
    sides = tokenizer.padding_side, tokenizer.truncation_side
    return _CachedClipTokenizer(tokenizer) if sides == ('right', 'right') else None


class TextOutput(NamedTuple):
    """Output of text encoders: embeddings per token, [B, L, D], and per caption, [B, P] or None."""

    embeds: Tensor
    pooled: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> 'TextOutput':
        return TextOutput(function(self.embeds), None if self.pooled is None else function(self.pooled))

    def where(self, keep: Tensor, other: 'TextOutput') -> 'TextOutput':
        """Return this output for the captions whose `keep`, bool [B], is True, and that of `other` for the rest."""
        embeds = torch.where(keep[:, None, None], self.embeds, other.embeds.to(self.embeds.dtype))
        if self.pooled is None or other.pooled is None:
            return TextOutput(embeds)
        return TextOutput(embeds, torch.where(keep[:, None], self.pooled, other.pooled.to(self.pooled.dtype)))


def tokenize(tokenizers: Sequence[PreTrainedTokenizerBase], captions: Sequence[str]) -> Tensor:
    """Return token ids, int64 [B, E, L]; each tokenizer pads to its length, and zeros fill up to the longest one."""
    # Convert with NumPy: torch.tensor takes ten times as long for nested lists.
    ids = np.zeros((len(captions), len(tokenizers), longest(tokenizers)), dtype=np.int64)
    for index, tokenizer in enumerate(tokenizers):
        ids[:, index, : tokenizer.model_max_length] = [token_ids(tokenizer, caption) for caption in captions]
    return torch.from_numpy(ids)


def longest(tokenizers: Sequence[PreTrainedTokenizerBase]) -> int:
    return max(tokenizer.model_max_length for tokenizer in tokenizers)


class TextConditioner(nn.Module):
    """Text encoders whose concatenated hidden states condition the denoiser.

    The pooled text consists of the projections of encoders that have one (CLIPTextModelWithProjection).

    Args:
        encoders: Text models of transformers, such as CLIPTextModel or T5GemmaEncoder. Stable Diffusion 2's text
            encoder is published without its last layer, so its last hidden state is the output of OpenCLIP's
            penultimate layer after the final norm.
        tokenizers: One tokenizer per encoder, all of the same length.
        mask_padding: Mask a caption's padding in the encoders' own attention, as encoders trained on longer sequences
            expect. CLIP has causal attention and was trained without this mask.
        layer: Hidden states to use: `last` is the output of the last layer after the final norm; `penultimate` is the
            output of the layer before it, without norm, as in Stable Diffusion XL (only for CLIP).
    """

    equal_lengths: ClassVar[bool] = True
    """True if all tokenizers must have the same length."""

    def __init__(
        self,
        encoders: Sequence[PreTrainedModel],
        tokenizers: Sequence[PreTrainedTokenizerBase],
        *,
        mask_padding: bool = False,
        layer: Literal['last', 'penultimate'] = 'last',
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
            positions = getattr(encoder.config, 'max_position_embeddings', None)
            if positions is not None and tokenizer.model_max_length > positions:
                raise UserError(
                    f'tokenizer: captions have up to {tokenizer.model_max_length} tokens, but its text encoder takes '
                    f'at most {positions}; load both from the same source'
                )
        self.encoders = nn.ModuleList(with_text_model(encoder) for encoder in encoders)
        self.tokenizers = list(tokenizers)
        self.mask_padding = mask_padding
        self.layer: Literal['last', 'penultimate'] = layer
        if layer == 'penultimate':
            for encoder in self.encoders:
                _freeze_unused_layer(encoder)
        # A caption ends with the end-of-text token, or before the first padding token if captions have no end token.
        # Padding alone does not show the end: CLIP pads with the end-of-text token, Stable Diffusion 2 with `!`.
        first: Any = tokenizers[0]
        self._ends = first.eos_token_id in first('').input_ids
        if not self._ends and first.pad_token_id is None:
            raise UserError('tokenizer: has no padding token and adds no end token to captions; set its pad_token')

    @property
    def width(self) -> int:
        """Width D of the text embeddings, summed over the encoders."""
        encoders: Any = self.encoders
        return sum(encoder.config.hidden_size for encoder in encoders)

    @property
    def pooled_width(self) -> int | None:
        """Width P of the pooled text, summed over the encoders with a projection; None without such encoders."""
        projecting: list[Any] = [each for each in self.encoders if isinstance(each, CLIPTextModelWithProjection)]
        return sum(encoder.config.projection_dim for encoder in projecting) if projecting else None

    @property
    def output(self) -> str:
        """Description of the output, such as `penultimate+pooled`, recorded in the manifest of stored embeddings."""
        return self.layer if self.pooled_width is None else f'{self.layer}+pooled'

    @property
    def length(self) -> int:
        """Number L of text embeddings per caption."""
        return self.embeddings_per_caption(self.token_length)

    @property
    def token_length(self) -> int:
        """Number of token ids per caption and encoder, as returned by `tokenize`."""
        return longest(self.tokenizers)

    def check_vocabulary(self, input_ids: Tensor) -> None:
        """Raise UserError if token ids [B, E, L] are outside of an encoder's vocabulary; waits for the GPU."""
        # On a GPU, the embedding of such an id fails in an assertion that ends the process without naming the cause.
        for index, encoder in enumerate(self.encoders):
            config: Any = encoder.config
            lowest, highest = (int(value) for value in input_ids[:, index].aminmax())
            if lowest < 0 or highest >= config.vocab_size:
                raise UserError(
                    f'input_ids: {highest if lowest >= 0 else lowest} is not in the vocabulary of text encoder '
                    f'{index + 1}, which has {config.vocab_size} tokens; tokenize captions with model.text.tokenizers'
                )

    def fills(self, input_ids: Tensor) -> Tensor:
        """Return bool [B], True for captions in token ids [B, E, L] that fill the longest tokenizer's length."""
        lengths = [tokenizer.model_max_length for tokenizer in self.tokenizers]
        index = lengths.index(max(lengths))
        tokenizer: Any = self.tokenizers[index]
        # Check the second-to-last token: the last token is an end token or padding, which may have the same id.
        last = input_ids[:, index, lengths[index] - 2]
        return last.ne(tokenizer.pad_token_id) & last.ne(tokenizer.eos_token_id)

    def embeddings_per_caption(self, token_length: int) -> int:
        """Return the number of text embeddings for captions of `token_length` token ids."""
        return token_length

    def forward(self, input_ids: Tensor) -> TextOutput:
        """Return the text embeddings of token ids [B, E, L] (the encoders' hidden states) and the pooled text."""
        self._check_ids(input_ids)
        mask = self.padding_mask(input_ids) if self.mask_padding else None
        if input_ids.is_meta:
            mask = mask_without_values(input_ids[:, 0])
        penultimate = self.layer == 'penultimate'
        keywords = {'attention_mask': mask} | ({'output_hidden_states': True} if penultimate else {})
        outputs = [encoder(input_ids[:, i], **keywords) for i, encoder in enumerate(self.encoders)]
        embeds = [output.hidden_states[-2] if penultimate else output.last_hidden_state for output in outputs]
        pooled = [
            output.text_embeds
            for encoder, output in zip(self.encoders, outputs, strict=True)
            if isinstance(encoder, CLIPTextModelWithProjection)
        ]
        return TextOutput(torch.cat(embeds, dim=-1), torch.cat(pooled, dim=-1) if pooled else None)

    def _check_ids(self, input_ids: Tensor) -> None:
        if input_ids.ndim != 3 or input_ids.shape[1] != len(self.encoders):
            raise UserError(
                f'input_ids: shape {tuple(input_ids.shape)}; '
                f'expected [batch, {len(self.encoders)} text encoders, tokens]'
            )
        if input_ids.shape[2] > self.token_length:
            raise UserError(
                f'input_ids: {input_ids.shape[2]} tokens per caption, but the text encoder takes {self.token_length}; '
                'cut captions, as diffusion.models.text_conditioner.tokenize does'
            )

    def padding_mask(self, input_ids: Tensor) -> Tensor:
        """Return a mask of the first encoder's tokens, bool [B, L]: False for the padding of token ids [B, E, L]."""
        first: Any = self.tokenizers[0]
        if not self._ends:
            return input_ids[:, 0].ne(first.pad_token_id)
        ended = input_ids[:, 0].eq(first.eos_token_id).cumsum(dim=-1)
        return torch.cat([torch.ones_like(ended[:, :1]), ended[:, :-1] == 0], dim=-1).bool()


def _freeze_unused_layer(encoder: Any) -> None:
    """Freeze the last layer and final norm of a CLIP encoder without projection, since their output is unused."""
    if not isinstance(encoder, CLIPTextModel | CLIPTextModelWithProjection) or not encoder.config.num_hidden_layers:
        raise UserError(
            f'text encoders: {type(encoder).__name__} has no penultimate layer that can be used; use a CLIP text model'
        )
    # Without a projection, these layers get no gradients, and DDP would wait for them forever.
    if isinstance(encoder, CLIPTextModel):
        parts: Any = encoder.text_model
        parts.encoder.layers[-1].requires_grad_(False)
        parts.final_layer_norm.requires_grad_(False)
