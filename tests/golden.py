"""Comparison of whole outputs with files that were reviewed."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def check_golden(folder: Path, found: Mapping[str, str]) -> None:
    """Compare texts with the files of a folder. To accept a change, run with UPDATE_GOLDEN=1, and review the diff."""
    if os.environ.get('UPDATE_GOLDEN'):
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            file.unlink()
        for name, text in found.items():
            (folder / name).write_text(text, encoding='utf-8')
    assert {file.name: file.read_text(encoding='utf-8') for file in folder.iterdir()} == found


def readable_json(value: Any, indent: int = 0) -> str:
    """Return JSON in lines of at most 118 characters, if possible, in which nested values are indented."""
    text = json.dumps(value)
    if not isinstance(value, dict | list) or indent + len(text) < 118:
        return text
    names = [f'{json.dumps(key)}: ' for key in value] if isinstance(value, dict) else [''] * len(value)
    lines: list[str] = []
    for name, item in zip(names, value.values() if isinstance(value, dict) else value, strict=True):
        row = f'{name}{readable_json(item, indent + 1)}'
        if lines and '\n' not in lines[-1] + row and indent + len(lines[-1]) + len(row) < 116:
            lines[-1] += f', {row}'
        else:
            lines.append(row)
    return text[0] + f',\n{" " * (indent + 1)}'.join(lines) + text[-1]
