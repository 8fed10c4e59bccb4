"""Vocabulary of CLIP's tokenizer, read from the open_clip package without importing it."""

import functools
import gzip
import json
from importlib.util import find_spec
from pathlib import Path


def vocabulary_files() -> tuple[str, str]:
    """Return the contents of CLIP's vocab.json and merges.txt."""
    tokens, merges = vocabulary()
    return json.dumps({token: index for index, token in enumerate(tokens)}), '\n'.join(['#version: 0.2', *merges, ''])


@functools.cache
def vocabulary() -> tuple[list[str], list[str]]:
    """Return CLIP's tokens in order of their ids, and its merges, such as `t h`, in order of application."""
    package = find_spec('open_clip')
    assert package is not None and package.origin is not None, 'open-clip-torch is a core dependency'
    source = Path(package.origin).parent / 'bpe_simple_vocab_16e6.txt.gz'
    # After a header line, the file has 49152 - 256 - 2 merges that transformers' tokenizer uses too.
    merges = gzip.decompress(source.read_bytes()).decode('utf-8').split('\n')[1 : 49152 - 256 - 2 + 1]
    letters = list(byte_letters().values())
    tokens = letters + [letter + '</w>' for letter in letters] + [merge.replace(' ', '') for merge in merges]
    # open_clip names these <start_of_text> and <end_of_text>; with those names, transformers would add new ids.
    return [*tokens, '<|startoftext|>', '<|endoftext|>'], merges


def byte_letters() -> dict[int, str]:
    """Return a printable character per byte, in the order of token ids; printable bytes come first, as themselves."""
    printable = [*range(ord('!'), ord('~') + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
