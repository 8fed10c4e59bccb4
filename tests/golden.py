"""Comparison of whole outputs with files that were reviewed."""

import os
from collections.abc import Mapping
from pathlib import Path


def check_golden(folder: Path, found: Mapping[str, str]) -> None:
    """Compare texts with the files of a folder. To accept a change, run with UPDATE_GOLDEN=1, and review the diff."""
    if os.environ.get('UPDATE_GOLDEN'):
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            file.unlink()
        for name, text in found.items():
            (folder / name).write_text(text, encoding='utf-8')
    assert {file.name: file.read_text(encoding='utf-8') for file in folder.iterdir()} == found
