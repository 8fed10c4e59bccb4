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
    # Skip the header line, and use only the first 49152 - 256 - 2 merges, as transformers' tokenizer does.
    merges = gzip.decompress(source.read_bytes()).decode('utf-8').split('\n')[1 : 49152 - 256 - 2 + 1]
    letters = list(byte_letters().values())
    tokens = letters + [letter + '</w>' for letter in letters] + [merge.replace(' ', '') for merge in merges]
    # open_clip names the special tokens <start_of_text> and <end_of_text>; transformers would add new ids for these.
    return [*tokens, '<|startoftext|>', '<|endoftext|>'], merges


def byte_letters() -> dict[int, str]:
    """Map each byte to a printable character, in order of token ids: bytes that are printable come first, unchanged."""
    printable = [*range(ord('!'), ord('~') + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
