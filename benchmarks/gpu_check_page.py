"""Page of a GPU check: one HTML file without scripts that loads nothing."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_check_summary import (
    absences,
    count_tests,
    failed_slices,
    full_row,
    largest_losses,
    step_tables,
    training_runs,
)
from slice_runner import FAILED, PASSED, Result
from step_references import PUBLISHED_GPUS, published_utilization

STYLE = Path(__file__).with_name('gpu_check_page.css')
NOTHING = '–'
"""Shown in place of a figure that was not measured."""
LIBRARIES = ('driver', 'cuda', 'cudnn', 'nccl')
STAGES = ('forward', 'backward', 'optimizer')
MOST_IDLE = 0.1
"""Share of a step for which a GPU may be idle before the page says that it waits for the host."""
SHOWN_SHARE = 0.005
"""Fraction of a step below which a stage of a training run is not shown."""


def gpu_check_page(results: Sequence[Result], conditions: Mapping[str, Any], *, date: str, missing: int = 0) -> str:
    """Return the page.

    Args:
        results: Results of the slices that have run.
        conditions: Versions and devices, with the keys machine (see `gpu_check_machine.describe`), version and commit.
        date: Time of the page.
        missing: Number of slices that have not run.
    """
    machine = conditions['machine']
    gpus = machine['gpus']
    parts = [
        _verdict(results, missing),
        '' if gpus else _note('CPU form: everything is small, and the figures say nothing about the speed of a GPU.'),
        _losses_section(results),
        *(_step_section(table) for table in step_tables(results)),
        _training_section(training_runs(results)),
        _tests_section(results),
        _slices_section(results),
        _versions_section(conditions),
    ]
    heading = f'{html.escape(_gpu_names(gpus))} · {html.escape(date)}'
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>GPU check: {html.escape(_gpu_names(gpus))}</title>
<style>
{STYLE.read_text(encoding='utf-8')}</style>
</head>
<body>
<header><h1>GPU check</h1><p class="muted">{heading}</p></header>
<main>
{''.join(part for part in parts if part)}
</main>
</body>
</html>
"""


def _gpu_names(gpus: Sequence[Mapping[str, Any]]) -> str:
    names = [gpu['name'] for gpu in gpus]
    return ', '.join(f'{names.count(name)} × {name}' for name in dict.fromkeys(names)) or 'no GPU'


def _verdict(results: Sequence[Result], missing: int) -> str:
    tests, failures = count_tests(results), failed_slices(results)
    state = _mark(not failures, f'{len(results) - len(failures)} of {len(results)} slices passed')
    line = f'{state}; tests: {tests[PASSED]} passed, {tests[FAILED]} failed, {tests["skipped"]} skipped.'
    if missing:
        slices = 'slice has' if missing == 1 else 'slices have'
        line += f' <strong>{missing} {slices} not run yet</strong>: run make gpu-check again.'
    return f'<p>{line}</p>\n'


def _losses_section(results: Sequence[Result]) -> str:
    losses = largest_losses(results)
    if not losses:
        return ''
    items = ''.join(
        f'<li><strong>{100 * loss.share:.1f}%</strong> of a step ({1e3 * loss.seconds:.1f} ms): '
        f'{html.escape(loss.name)} <span class="muted">({html.escape(loss.source)})</span></li>\n'
        for loss in losses
    )
    number = {1: 'The largest loss', 2: 'The two largest losses', 3: 'The three largest losses'}[len(losses)]
    return f'<h2>{number} of time</h2>\n<ol>\n{items}</ol>\n'


def _step_section(table: Mapping[str, Any]) -> str:
    pixels = table['pixels']
    head = [
        '',
        'micro-<br>batch',
        'images/s<br>per GPU',
        'MFU, %',
        'speedup',
        'ms/step',
        *(f'{each},<br>ms' for each in STAGES),
    ]
    head += ['GPU busy,<br>ms', 'peak,<br>GiB', 'planned,<br>GiB', 'peak over<br>planned, %']
    rows = []
    published = published_utilization(pixels) if table['on_gpu'] else None
    if published:
        rate, mfu = published
        cells = [f'{rate:.1f}', f'{100 * mfu:.1f}', *[''] * (len(head) - 4)]
        rows.append(_row(f'published, on {PUBLISHED_GPUS} A100', ['16', *cells], reference=True))
    plain = next((row for row in table['rows'] if row['row'] == 'plain' and not row['failed']), None)
    rows += [_row(row['name'], _step_cells(row, plain)) for row in table['rows']]
    model = "Stable Diffusion 2's U-Net in bfloat16" if table['on_gpu'] else 'A small U-Net in float32'
    lines = [
        f'{model}, batch {table["batch"]}, latents and text embeddings precomputed. Each row adds a setting of '
        '<code>speed</code> to the row before; “preset without” rows have all settings but one.',
        _host_line(table),
        _absence_line(table),
    ]
    text = ''.join(f'<p>{line}</p>\n' for line in lines if line)
    return f'<h2>Training step at {pixels} px</h2>\n{text}{_table(head, rows)}'


def _step_cells(row: Mapping[str, Any], plain: Mapping[str, Any] | None) -> list[str]:
    cells = [str(row['microbatch'])]
    if row['failed']:
        return [
            *cells,
            f'<span class="bad">{html.escape(row["failed"])}</span>',
            *[NOTHING] * 8,
            _number(row['planned_gib'], 1),
            '',
        ]
    speedup = plain['step_seconds'] / row['step_seconds'] if plain else None
    mfu = None if row['mfu'] is None else 100 * row['mfu']
    peak, planned = row['peak_gib'], row['planned_gib']
    difference = f'{100 * (peak / planned - 1):+.1f}' if peak and planned else NOTHING
    cells += [_number(row['images_per_second'], 1), _number(mfu, 1), _number(speedup, 2)]
    cells += [_number(1e3 * row['step_seconds'], 1), *(_number(1e3 * row['stages'][stage], 1) for stage in STAGES)]
    return [
        *cells,
        _number(1e3 * row['gpu_seconds'] if 'gpu_seconds' in row else None, 1),
        _number(peak, 1),
        _number(planned, 1),
        difference,
    ]


def _host_line(table: Mapping[str, Any]) -> str:
    row = full_row(dict(table))
    if row is None or not table['on_gpu']:
        return ''
    busy, step = row['gpu_seconds'], row['step_seconds']
    line = f'The GPU computes in {1e3 * busy:.1f} of the {1e3 * step:.1f} ms of a step with all settings'
    if busy < (1 - MOST_IDLE) * step:
        return f'{line}: <strong>it waits for the host</strong>; larger microbatches help.'
    return f'{line}, so it hardly waits for the host.'


def _absence_line(table: Mapping[str, Any]) -> str:
    costs, full = absences(dict(table)), full_row(dict(table))
    if not costs or full is None:
        return ''
    step = full['step_seconds']
    listed = ', '.join(f'{part} {1e3 * cost:+.1f} ms ({100 * cost / step:+.1f}%)' for part, cost in costs)
    return f'The absence of <code>{costs[0][0]}</code> costs most. A step without: {listed}.'


def _training_section(runs: Sequence[Mapping[str, Any]]) -> str:
    if not runs:
        return ''
    head = [
        '',
        'devices',
        'images/s<br>per device',
        'MFU, %',
        'ms/step',
        'peak,<br>GiB',
        'save blocks<br>training, s',
        'save<br>takes, s',
        'stages, % of a step',
    ]
    rows = []
    for run in runs:
        found = run['metrics']
        prefix = 'time_share/'
        shares = {name.removeprefix(prefix): share for name, share in found.items() if name.startswith(prefix)}
        largest = sorted(shares.items(), key=lambda item: -item[1])
        stages = ', '.join(
            f'{name.replace("_", " ")} {100 * share:.0f}' for name, share in largest if share >= SHOWN_SHARE
        )
        mfu = found.get('throughput/device/mfu')
        cells = [str(run['devices']), _number(found['throughput/device/samples_per_sec'], 1)]
        cells += [_number(None if mfu is None else 100 * mfu, 1), _number(1e3 * found['throughput/step_seconds'], 1)]
        cells += [_number(found.get('memory/peak_gib'), 1), _number(found.get('checkpoint/stall_seconds'), 2)]
        cells += [_number(found.get('checkpoint/save_seconds'), 1), html.escape(stages)]
        rows.append(_row(run['strategy'], cells))
    text = '<p>Runs of <code>run.py</code> on drawn images with online encoders, a loader and one checkpoint.</p>\n'
    return f'<h2>Training runs</h2>\n{text}{_table(head, rows, style="last-words")}'


def _tests_section(results: Sequence[Result]) -> str:
    tests = [test for result in results if result.kind == 'tests' for test in result.data or ()]
    if not tests:
        return ''
    order = {FAILED: 0, 'skipped': 1, PASSED: 2}
    rows = [
        _row(
            test['name'],
            [
                _mark(test['outcome'] == PASSED, test['outcome']) if test['outcome'] != 'skipped' else 'skipped',
                f'{test["seconds"]:.1f}',
                html.escape(test['reason'][:500]),
            ],
        )
        for test in sorted(tests, key=lambda test: order[test['outcome']])
    ]
    return f'<h2>Tests</h2>\n{_table(["", "outcome", "seconds", "reason"], rows, style="words")}'


def _slices_section(results: Sequence[Result]) -> str:
    rows = [
        _row(
            result.title,
            [_mark(result.status == PASSED, result.status), f'{result.seconds:.0f}', html.escape(result.reason)],
        )
        for result in results
    ]
    outputs = ''.join(
        f'<details{" open" if number == 0 else ""}><summary>Output of {html.escape(result.name)}</summary>'
        f'<pre tabindex="0">{html.escape(result.output) or "(none)"}</pre></details>\n'
        for number, result in enumerate(failed_slices(results))
    )
    return f'<h2>Slices</h2>\n{_table(["", "state", "seconds", "reason"], rows, style="words")}{outputs}'


def _versions_section(conditions: Mapping[str, Any]) -> str:
    machine = conditions['machine']
    facts = {
        'diffusion': f'{conditions["version"]}, commit {conditions["commit"] or "unknown"}',
        'Python': machine['python'],
        **{name: version or 'not installed' for name, version in machine['packages'].items()},
        'driver, CUDA, cuDNN, NCCL': ', '.join(str(machine[name] or NOTHING) for name in LIBRARIES),
        'processor': machine['processor'],
    }
    facts |= {
        f'GPU {number}': f'{gpu["name"]}, {gpu["memory_gib"]:.1f} GiB, {gpu["capability"]}'
        for number, gpu in enumerate(machine['gpus'])
    }
    if machine['gpus']:
        facts['kernels in torch'] = ' '.join(machine['kernels'])
    rows = [_row(name, [html.escape(value)]) for name, value in facts.items()]
    return f'<h2>Versions</h2>\n{_table(["", ""], rows, style="words facts")}'


def _table(head: Sequence[str], rows: Iterable[str], *, style: str = 'figures') -> str:
    """Return a table; the cells of the head are HTML, and `style` is its class in the style sheet."""
    columns = ''.join(f'<th scope="col">{cell}</th>' if cell else '<td></td>' for cell in head)
    header = f'<thead><tr>{columns}</tr></thead>\n' if any(head) else ''
    content = f'{header}<tbody>\n{"".join(rows)}</tbody>'
    return f'<div class="scroll" tabindex="0"><table class="{style}">{content}</table></div>\n'


def _row(name: str, cells: Iterable[str], *, reference: bool = False) -> str:
    """Return a table row; the cells are HTML."""
    kind = ' class="reference"' if reference else ''
    return f'<tr{kind}><th scope="row">{html.escape(name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>\n'


def _mark(is_good: bool, text: str) -> str:
    return f'<span class="{"good" if is_good else "bad"}">{html.escape(text)}</span>'


def _note(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>\n'


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None or not math.isfinite(value) else f'{value:.{digits}f}'
