"""Captions to tokens: what transformers' CLIP tokenizer says, in an eighth of its time.

The published models were trained with the tokenizer in Python, which cleans text by ftfy; the one in Rust does not, and
gives other ids for curly quotes, ligatures and control characters. What costs time in Python is looked up here instead.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from transformers import CLIPTokenizer, PreTrainedTokenizerBase

MOST_WORDS = 2**16
"""Words whose tokens are kept, some 15 MB; transformers keeps all that it has ever seen."""


def token_ids(tokenizer: PreTrainedTokenizerBase, caption: str) -> list[int]:
    """Tokens of a caption, padded and cut to the tokenizer's length."""
    words = _words_of(tokenizer)
    if words is None or words.has_special(caption):
        limit = tokenizer.model_max_length
        return tokenizer(caption, padding='max_length', truncation=True, max_length=limit).input_ids
    return words.token_ids(caption)


class _ClipWords:
    """A CLIP tokenizer with a memory for words."""

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        parts: Any = tokenizer  # the attributes below have no types
        self._special = tuple(parts.added_tokens_encoder)
        self._length: int = parts.model_max_length
        self._start, self._end, self._pad = parts.bos_token_id, parts.eos_token_id, parts.pad_token_id
        self._split: Callable[[str], list[str]] = parts.pat.findall
        self._fix: Callable[[str], str] = parts.fix_text
        self._of_word = lru_cache(MOST_WORDS)(_encoder(parts))

    def has_special(self, caption: str) -> bool:
        """Whether it holds `<|endoftext|>` or the like, or what the tokenizer pads with, such as `!`."""
        return any(token in caption for token in self._special)

    def token_ids(self, caption: str) -> list[int]:
        room = self._length - 2
        ids = [self._start]
        for word in self._split(self._clean(caption)):
            ids += self._of_word(word)
            if len(ids) > room:
                break
        ids = [*ids[: room + 1], self._end]
        return ids + [self._pad] * (self._length - len(ids))

    def _clean(self, caption: str) -> str:
        # Of printable ASCII ftfy changes nothing but &amp; and its like, and takes a third of the time to find out.
        plain = caption.isascii() and caption.isprintable() and '&' not in caption
        return (caption if plain else self._fix(caption)).lower()


def _encoder(parts: Any) -> Callable[[str], list[int]]:
    """The tokens of a word, by the tokenizer's own rules, without its memory."""
    special = frozenset(parts.added_tokens_encoder)

    def encode(word: str) -> list[int]:
        letters = ''.join(parts.byte_encoder[byte] for byte in word.encode('utf-8'))
        pieces = parts.bpe(letters).split(' ')
        if letters not in special:
            parts.cache.pop(letters, None)
        return parts.convert_tokens_to_ids(pieces)

    return encode


@lru_cache(maxsize=8)
def _words_of(tokenizer: PreTrainedTokenizerBase) -> _ClipWords | None:
    """None for a tokenizer of another kind."""
    if type(tokenizer) is not CLIPTokenizer or getattr(tokenizer, 'fix_text', None) is None:
        return None
    sides = tokenizer.padding_side, tokenizer.truncation_side
    return _ClipWords(tokenizer) if sides == ('right', 'right') else None
