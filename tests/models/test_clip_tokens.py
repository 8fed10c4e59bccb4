"""Token ids of captions against those of transformers' own tokenizer."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diffusion.models.clip_tokens import token_ids
from diffusion.models.pretrained import clip_tokenizer
from diffusion.models.text_conditioner import tokenize

OURS, REFERENCE = clip_tokenizer(), clip_tokenizer()
SHORT = clip_tokenizer(max_length=8)
WORDS = [
    'photo',
    "john's",
    '<|endoftext|>',
    '<|STARTOFTEXT|>',
    '“quoted”',
    '&amp;',
    'ﬁsh',
    '日本',
    '!',
    '...',
    '3,000',
    '',
]


def reference_ids(tokenizer, caption):
    """Return the ids from transformers' own code."""
    length = tokenizer.model_max_length
    return tokenizer(caption, padding='max_length', truncation=True, max_length=length).input_ids


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
@example('a\x00b\tc\r\nd\x1b[31m')
@example('İstanbul naïve ß x²')
@example('＜|endoftext|＞')
@example('word ' * 100)
def test_ids_of_any_text_match_transformers(caption):
    assert token_ids(OURS, caption) == reference_ids(REFERENCE, caption)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=12).map(' '.join))
def test_ids_of_cached_words_match_transformers(caption):
    assert token_ids(OURS, caption) == reference_ids(REFERENCE, caption)
    assert token_ids(SHORT, caption) == reference_ids(SHORT, caption)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters='&'), max_size=80))
def test_ftfy_changes_no_printable_ascii(text):
    """The shortcut in `_clean` depends on this."""
    import ftfy

    assert ftfy.fix_text(text) == text


def test_cache_of_the_wrapped_tokenizer_does_not_grow():
    tokenizer = clip_tokenizer()
    before = len(tokenizer.cache)
    for number in range(200):
        token_ids(tokenizer, f'qwx{number}zy plumbus{number}')
    assert len(tokenizer.cache) == before


def test_batch_of_ids_is_contiguous_int64_per_encoder():
    ids = tokenize([OURS, REFERENCE], ['a cat', 'a dog'])
    assert ids.dtype == torch.int64 and ids.shape == (2, 2, 77) and ids.is_contiguous()
    assert ids[1, 0].tolist() == reference_ids(REFERENCE, 'a dog')


@pytest.mark.parametrize('side', ['padding_side', 'truncation_side'])
def test_tokenizer_with_left_padding_or_truncation_is_called_directly(side):
    left = clip_tokenizer(max_length=8)
    setattr(left, side, 'left')
    for caption in ('one', 'one two three four five six seven eight nine'):
        assert token_ids(left, caption) == reference_ids(left, caption)
