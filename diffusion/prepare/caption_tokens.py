"""Lengths of captions in tokens of CLIP, whose text encoders read 77 of them and ignore the rest."""

import functools
from collections.abc import Sequence

import numpy as np
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from diffusion.models.clip_vocabulary import vocabulary

CLIP_TOKENS = 77
"""Maximum number of tokens of CLIP's text encoders, with the start and the end token."""
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def clip_token_counts(captions: Sequence[str]) -> np.ndarray:
    """Return the number of CLIP tokens of each caption, int64, with the start and the end token."""
    encoded = _tokenizer().encode_batch_fast(list(captions))
    return np.array([len(each.ids) + 2 for each in encoded], np.int64)


@functools.cache
def _tokenizer() -> Tokenizer:
    # Built here, since transformers, whose tokenizer training uses, takes seconds to import. That one also corrects
    # broken Unicode (ftfy), which a count need not.
    tokens, merges = vocabulary()
    pairs = [(first, second) for first, _, second in (merge.partition(' ') for merge in merges)]
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, pairs, end_of_word_suffix='</w>', continuing_subword_prefix=''))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    words = pre_tokenizers.Split(Regex(_WORDS), behavior='removed', invert=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    return tokenizer
