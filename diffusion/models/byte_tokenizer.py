"""Tokenizer for T5 with one token per byte, built without a download."""

from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ('<pad>', '</s>', '<unk>')
"""T5's special tokens, with T5's ids 0, 1 and 2."""


def byte_tokenizer(*, max_length: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte of UTF-8, ids 3 to 258, for a T5 encoder with random weights.

    T5's own vocabulary must be downloaded. Captions end with `</s>` and are padded with `<pad>`, as with T5's.
    """
    pieces = [(token, 0.0) for token in SPECIAL] + [(f'<0x{byte:02X}>', -1.0) for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=True))
    tokenizer.post_processor = processors.TemplateProcessing(single='$A </s>', special_tokens=[('</s>', 1)])  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # type: ignore[assignment]
    # Do not use T5's class: in transformers 5, it restores a saved tokenizer's vocabulary but not its byte fallback.
    special = dict(zip(('pad_token', 'eos_token', 'unk_token'), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **special)
