"""Fast CLIP tokenization: the same token ids as transformers' Python tokenizer in an eighth of the time."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from transformers import CLIPTokenizer, PreTrainedTokenizerBase

MAX_CACHED_WORDS = 2**16
"""Size of the word cache, about 15 MB; transformers' own cache is unbounded."""


def token_ids(tokenizer: PreTrainedTokenizerBase, caption: str) -> list[int]:
    """Return the token ids of a caption, padded and truncated to the tokenizer's `model_max_length`."""
    cached = _cached_tokenizer(tokenizer)
    # transformers splits a caption at special tokens before anything else: leave such captions to it.
    if cached is None or cached.has_special(caption):
        limit = tokenizer.model_max_length
        return tokenizer(caption, padding='max_length', truncation=True, max_length=limit).input_ids
    return cached.token_ids(caption)


class _CachedClipTokenizer:
    """CLIP tokenizer with a bounded cache of token ids per word."""

    # The published models were trained with transformers' Python tokenizer, which cleans text with ftfy. The Rust one
    # does not, and gives other ids for curly quotes, ligatures and control characters. So keep the Python rules, and
    # look up the parts of them that take time.

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        parts: Any = tokenizer  # transformers does not declare the types of the attributes below
        self._special = tuple(parts.added_tokens_encoder)
        self._length: int = parts.model_max_length
        self._start, self._end, self._pad = parts.bos_token_id, parts.eos_token_id, parts.pad_token_id
        self._split: Callable[[str], list[str]] = parts.pat.findall
        self._fix: Callable[[str], str] = parts.fix_text
        self._word_ids = lru_cache(MAX_CACHED_WORDS)(_encoder(parts))

    def has_special(self, caption: str) -> bool:
        """Return True if a caption contains a special token, such as `<|endoftext|>` or the padding token `!`."""
        return any(token in caption for token in self._special)

    def token_ids(self, caption: str) -> list[int]:
        """Return the token ids of a caption that contains no special tokens, padded and truncated."""
        room = self._length - 2  # without the start and end tokens
        ids = [self._start]
        for word in self._split(self._clean(caption)):
            ids += self._word_ids(word)
            if len(ids) > room:
                break
        ids = [*ids[: room + 1], self._end]
        return ids + [self._pad] * (self._length - len(ids))

    def _clean(self, caption: str) -> str:
        """Return a caption in lower case, with its Unicode errors fixed by ftfy."""
        # ftfy changes nothing in printable ASCII except entities such as &amp;, but takes a third of the time.
        plain = caption.isascii() and caption.isprintable() and '&' not in caption
        return (caption if plain else self._fix(caption)).lower()


def _encoder(parts: Any) -> Callable[[str], list[int]]:
    """Return a function that converts a word to token ids without filling the tokenizer's own, unbounded cache."""
    special = frozenset(parts.added_tokens_encoder)

    def encode(word: str) -> list[int]:
        letters = ''.join(parts.byte_encoder[byte] for byte in word.encode('utf-8'))
        pieces = parts.bpe(letters).split(' ')
        # `bpe` adds every word to an unbounded dict, which would grow through the whole run. The special tokens are in
        # it from the start and must stay: without their entries `bpe` would split them.
        if letters not in special:
            parts.cache.pop(letters, None)
        return parts.convert_tokens_to_ids(pieces)

    return encode


@lru_cache(maxsize=8)
def _cached_tokenizer(tokenizer: PreTrainedTokenizerBase) -> _CachedClipTokenizer | None:
    """Return the faster version of a tokenizer, with a cache of words.

    None unless the tokenizer is transformers' CLIPTokenizer in Python, with ftfy and right padding.
    """
    if type(tokenizer) is not CLIPTokenizer or getattr(tokenizer, 'fix_text', None) is None:
        return None
    sides = tokenizer.padding_side, tokenizer.truncation_side
    return _CachedClipTokenizer(tokenizer) if sides == ('right', 'right') else None
