"""Comparison of whole outputs with files that were reviewed."""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
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


def figure_text(figure: Any) -> str:
    """Return the parts of a figure of matplotlib, each with its place, color and size, one per line."""
    from matplotlib.colors import to_hex
    from matplotlib.text import Text

    rows: list[tuple[object, ...]] = [('figure', *figure.get_size_inches())]
    for axes in figure.axes:
        spines = [name for name, spine in axes.spines.items() if spine.get_visible()]
        rows.append(('axes', *axes.get_xlim(), *axes.get_ylim(), *spines, axes.get_axisbelow()))
        rows += [('bar', *each.get_bbox().bounds, to_hex(each.get_facecolor())) for each in axes.patches]
        for line in (*axes.lines, *(grid for grid in axes.get_ygridlines()[:1] if grid.get_visible())):
            style = (line.get_linewidth(), line.get_linestyle(), line.get_marker(), line.get_markersize())
            rows.append(('line', to_hex(line.get_color()), line.get_alpha(), *style, *line.get_xydata()[:2].ravel()))
        rows += [('ends', *each.get_segments()[0].ravel()) for each in axes.collections]
        rows += [('ticks', *ticks) for ticks in (axes.get_xticks(), axes.get_yticks())]
    for text in figure.findobj(Text):
        place = text.get_position() if any(text in axes.texts for axes in figure.axes) else ()
        style = (text.get_fontsize(), text.get_fontweight(), to_hex(text.get_color()), text.get_ha(), text.get_va())
        rows += [('text', repr(text.get_text()), *style, *place)] if text.get_text() and text.get_visible() else []
    for legend in (*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())):
        rows.append(('legend', legend.get_frame_on(), legend._ncols))
    return ''.join(' '.join(f'{x:.4g}' if isinstance(x, float) else str(x) for x in row) + '\n' for row in rows)


def check_transcripts(folder: Path, outcome: Callable[[str], Iterable[object]]) -> None:
    """Compare what a function returns for each unindented line of a folder's files with the indented lines below it."""

    def played(line: str) -> str:
        return '\n  '.join([line, *map(str, outcome(line))])

    lines = {file.name: re.findall(r'(?m)^\S.*', file.read_text(encoding='utf-8')) for file in folder.iterdir()}
    check_golden(folder, {name: '\n\n'.join(map(played, each)) + '\n' for name, each in lines.items()})
