"""Parts of Composer and Streaming that a training run executes, by package: modules and lines.

    python benchmarks/library_coverage.py

It prepares 64 OpenMoji images, and trains the quickstart for 20 batches with two checkpoints, in one process. Lines are
those of functions, as the compiled code lists them: what an import executes does not count.
"""

import importlib.util
import inspect
import os
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from machine import heading

PACKAGES = ('composer', 'streaming')
RECIPE = Path(__file__).parents[1] / 'yamls' / 'quickstart.yaml'


class Tracer:
    """Trace function that records the executed lines of files below some folders."""

    def __init__(self, roots: list[Path]) -> None:
        self.lines: dict[str, set[int]] = defaultdict(set)
        self._roots = tuple(f'{root}{os.sep}' for root in roots)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(self._roots) or not is_function(frame.f_code):
            return None
        lines = self.lines[file]

        def trace_line(frame: FrameType, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return trace_line

        return trace_line(frame, event, argument)


def is_function(code: CodeType) -> bool:
    """Return True for the code of a function, False for that of a module or a class, which an import executes."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def function_lines(file: Path) -> set[int]:
    """Return the numbers of the lines of a Python file's functions that can be executed."""

    def lines_of(code: CodeType) -> Iterator[int]:
        if is_function(code):
            yield from (line for _, _, line in code.co_lines() if line)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from lines_of(constant)

    return set(lines_of(compile(file.read_bytes(), str(file), 'exec')))


def main() -> None:
    """Train, and print the table."""
    roots = {name: Path(str(importlib.util.find_spec(name).origin)).parent for name in PACKAGES}  # type: ignore[union-attr]
    tracer = Tracer([*roots.values()])
    with tempfile.TemporaryDirectory() as folder:
        threading.settrace(tracer)
        sys.settrace(tracer)
        try:
            train(folder)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
    print(f'{heading()}\n\n| package | modules used | lines executed |\n|---|---|---|')
    for name, root in roots.items():
        print(*rows(name, root, tracer.lines), sep='\n')


def train(folder: str) -> None:
    """Prepare images in a folder, and train the quickstart on them for 20 batches."""
    from diffusion.cli import main as run_command
    from diffusion.tasks.run_recipe import main as run_recipe

    images = f'{folder}/images'
    assert run_command(['prepare', 'openmoji', '--out', images, '--sizes', '64', '--limit', '64']) == 0
    settings = [f'precompute.streams.openmoji.local={images}/64px', f'precompute.out={folder}/latents']
    settings += [f'streams.openmoji.local={folder}/latents/openmoji', f'eval_streams.openmoji.local={images}/64px']
    settings.append(f'runs_dir={folder}')
    for words in (['task=precompute'], ['trainer.max_duration=20ba', 'trainer.save_interval=10ba']):
        assert run_recipe([str(RECIPE), *settings, *words]) == 0


def rows(package: str, root: Path, executed: dict[str, set[int]]) -> Iterator[str]:
    """Yield the rows of a package: one for each of its parts with executed lines, and the sum."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for file in root.rglob('*.py'):
        inside = file.relative_to(root).parts
        lines = function_lines(file)
        run = executed.get(str(file), set()) & lines
        for part in (package, f'{package}.{inside[0]}' if len(inside) > 1 else package + '.*'):
            counts[part] += Counter(modules=1, executed=bool(run), lines=len(lines), run=len(run))
    whole = counts.pop(package)
    for part, found in sorted(counts.items(), key=lambda each: -each[1]['run']):
        if found['run']:
            yield _row(f'`{part}`', found)
    yield _row(f'**{package}**', whole)


def _row(name: str, found: Counter[str]) -> str:
    used, lines = (
        f'{found[part]:,} of {found[whole]:,}' for part, whole in (('executed', 'modules'), ('run', 'lines'))
    )
    return f'| {name} | {used} | {lines} ({found["run"] / found["lines"]:.0%}) |'


if __name__ == '__main__':
    main()
