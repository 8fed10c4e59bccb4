"""Captions and metadata of an image in the .txt and .json file beside it, in a folder or in a tar."""

from collections.abc import Sequence

from diffusion.prepare.extra_columns import read_columns
from diffusion.prepare.source import CaptionText, Entry, captions_in, captions_of_columns, texts_of

TEXT_COLUMN = 'txt'
"""Name of the .txt file among several caption columns, whose others are keys of the .json file."""


def read_sidecars(
    entry: Entry, text: bytes | None, columns: bytes | None, *, rule: CaptionText, caption_columns: Sequence[str]
) -> None:
    """Set the captions and the metadata of an entry.

    The captions are `captions` in the .json file if it is a list, else those in the .txt file, else `caption` in the
    .json file, a text or a list of texts.

    Args:
        entry: The entry; it gets a problem if the text is not UTF-8, or the only captions are in an unreadable .json.
        text: Content of the .txt file; None if there is none.
        columns: Content of the .json file; None if there is none.
        rule: What the .txt file holds.
        caption_columns: Keys of the .json file with captions, and `txt` for the .txt file; empty for the rule above.
    """
    entry.metadata = {} if columns is None else read_columns(columns)
    captions, caption = (entry.metadata.get(name) for name in ('captions', 'caption'))
    try:
        if caption_columns:
            lines = [] if text is None or TEXT_COLUMN not in caption_columns else captions_in(text, rule)
            values = entry.metadata | {TEXT_COLUMN: lines}
            entry.captions, names = captions_of_columns(values, caption_columns)
            entry.caption_columns = names if len(caption_columns) > 1 else []
        elif isinstance(captions, list):
            entry.captions = captions
        elif text is not None:
            entry.captions = captions_in(text, rule)
        else:
            value = captions if caption is None else caption
            entry.captions = [] if value is None else texts_of(value)
            if 'bad_metadata' in entry.metadata:
                entry.problem = entry.problem or 'bad_json'
    except UnicodeDecodeError:
        entry.problem = entry.problem or 'caption_not_utf8'
    for name in ('captions', 'caption', *caption_columns):
        entry.metadata.pop(name, None)
