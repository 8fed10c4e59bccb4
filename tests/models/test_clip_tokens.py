"""Token ids of captions against those of open_clip's tokenizer, which is OpenAI's."""

import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from open_clip.tokenizer import SimpleTokenizer

from diffusion.models.pretrained import clip_tokenizer
from diffusion.models.text_conditioner import token_ids, tokenize

OURS, SHORT = clip_tokenizer(), clip_tokenizer(max_length=8)
OPEN_CLIP = SimpleTokenizer()
PAD, START, END = 0, 49406, 49407
SPECIAL = {'!': PAD, '<|STARTOFTEXT|>': START, '<|endoftext|>': END, '＜|endoftext|＞': END}
WORDS = ['photo', "john's", '“quoted”', 'ﬁsh', '日本', '...', '3,000', '', *SPECIAL]


def ids_of(words, length):
    """Return the padded and truncated ids of words that are encoded one by one."""
    ids = [each for word in words for each in ([SPECIAL[word]] if word in SPECIAL else OPEN_CLIP.encode(word))]
    ids = [START, *ids[: length - 2], END]
    return ids + [PAD] * (length - len(ids))


# Unlike this tokenizer and that of transformers 4, open_clip's replaces entities such as &quot; that ftfy leaves.
@settings(max_examples=40, deadline=None)
@given(st.text(st.characters(exclude_characters='&', exclude_categories=['Cs']), max_size=60))
@example('a\x00b\tc\r\nd\x1b[31m')
@example('İstanbul naïve ß x²')
@example('word ' * 100)
def test_ids_of_any_text_match_open_clip(caption):
    assert token_ids(OURS, caption) == ids_of(re.split('(!)', caption), 77)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=12))
def test_ids_of_cached_and_special_words_match_open_clip(words):
    assert token_ids(OURS, ' '.join(words)) == ids_of(words, 77)
    assert token_ids(SHORT, ' '.join(words)) == ids_of(words, 8)


def test_entity_is_the_character_that_it_stands_for():
    assert token_ids(OURS, 'a &amp; b') == ids_of(['a', '&', 'b'], 77)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters='&'), max_size=80))
def test_ftfy_changes_no_printable_ascii(text):
    """The shortcut in `_clean` depends on this."""
    import ftfy

    assert ftfy.fix_text(text) == text


def test_batch_of_ids_is_contiguous_int64_per_encoder():
    ids = tokenize([OURS, clip_tokenizer()], ['a cat', 'a dog'])
    assert ids.dtype == torch.int64 and ids.shape == (2, 2, 77) and ids.is_contiguous()
    assert ids[1, 0].tolist() == ids_of(['a', 'dog'], 77)


@pytest.mark.parametrize('side', ['padding_side', 'truncation_side'])
def test_tokenizer_with_left_padding_or_truncation_is_called_directly(side):
    left = clip_tokenizer(max_length=8)
    setattr(left, side, 'left')
    for caption in ('one', 'one two three four five six seven eight nine'):
        own = left(caption, padding='max_length', truncation=True, max_length=8).input_ids
        assert token_ids(left, caption) == own
