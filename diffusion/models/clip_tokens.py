"""CLIP's tokenization: the token ids that the published models were trained with, in any version of transformers."""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import ftfy
import regex
from tokenizers.models import BPE
from transformers import CLIPTokenizer, PreTrainedTokenizerBase

from diffusion.compatibility.transformers_versions import byte_pairs
from diffusion.models.clip_vocabulary import byte_letters

MAX_CACHED_WORDS = 2**16
"""Size of the word cache, about 15 MB."""
END_OF_WORD = '</w>'
WORDS = regex.compile(
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+", regex.IGNORECASE
)
"""CLIP's words (Radford et al. 2021, simple_tokenizer.py)."""


def token_ids(tokenizer: PreTrainedTokenizerBase, caption: str) -> list[int]:
    """Return the token ids of a caption, padded and truncated to the tokenizer's `model_max_length`."""
    cached = _cached_tokenizer(tokenizer)
    if cached is None:
        call: Any = tokenizer
        return call(caption, padding='max_length', truncation=True, max_length=tokenizer.model_max_length).input_ids
    return cached.token_ids(caption)


class _CachedClipTokenizer:
    """CLIP tokenizer with a bounded cache of token ids per word."""

    # The published models were trained with a tokenizer in Python that cleans text with ftfy, as transformers 4 does.
    # That of transformers 5 does not, and gives other ids for curly quotes, ligatures and control characters.

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        parts: Any = tokenizer  # transformers annotates its attributes too narrowly
        self._special: dict[str, int] = parts.added_tokens_encoder
        # A caption is split at special tokens, such as `<|endoftext|>` or the padding token `!`, before anything else.
        longest_first = sorted(self._special, key=len, reverse=True)
        self._parts = re.compile(f'({"|".join(map(re.escape, longest_first))})').split
        self._length: int = parts.model_max_length
        self._start, self._end, self._pad = parts.bos_token_id, parts.eos_token_id, parts.pad_token_id
        self._word_ids = lru_cache(MAX_CACHED_WORDS)(_encoder(tokenizer, self._special))

    def token_ids(self, caption: str) -> list[int]:
        """Return the token ids of a caption, padded and truncated."""
        room = self._length - 2  # for all but the start and end tokens
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
    """Return a text in lower case, with its Unicode errors fixed by ftfy."""
    # Skip ftfy, which takes a third of the time, for printable ASCII, in which it changes only entities such as &amp;.
    plain = text.isascii() and text.isprintable() and '&' not in text
    return (text if plain else ftfy.fix_text(text)).lower()


def _encoder(tokenizer: CLIPTokenizer, special: dict[str, int]) -> Callable[[str], list[int]]:
    """Return a function that converts a word to token ids; special tokens are words with ids of their own."""
    vocabulary, merges = byte_pairs(tokenizer)
    pairs = BPE(vocabulary, merges, end_of_word_suffix=END_OF_WORD, unk_token=str(tokenizer.unk_token))
    letters = byte_letters()

    def encode(word: str) -> list[int]:
        if word in special:
            return [special[word]]
        return [token.id for token in pairs.tokenize(''.join(letters[byte] for byte in word.encode('utf-8')))]

    return encode


@lru_cache(maxsize=8)
def _cached_tokenizer(tokenizer: PreTrainedTokenizerBase) -> _CachedClipTokenizer | None:
    """Return the tokenizer with a cache of words; None unless it is a CLIPTokenizer with right padding."""
    if type(tokenizer) is not CLIPTokenizer:
        return None
    sides = tokenizer.padding_side, tokenizer.truncation_side
    return _CachedClipTokenizer(tokenizer) if sides == ('right', 'right') else None
