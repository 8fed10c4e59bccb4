"""HTML report of a preparation: counts, histograms, and thumbnails per bucket and per rejection reason."""

import html
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from diffusion.data.image_sheet import Figure, html_figures, html_page
from diffusion.prepare.counts_report import HeldOut, PrepareReport

HTML_REPORT = 'report.html'
MAX_CAPTION = 200
"""Maximum length of a caption in the report, in characters."""
STYLE = """
body { margin: 2em auto; max-width: 70em; padding: 0 1em }
h1 { font-size: 1.5em } h2 { margin-top: 2em } h3 { font-size: 1em; margin: 1.2em 0 .4em }
table { border-collapse: collapse } td, th { padding: .15em .8em .15em 0; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums }
.bar { background: #4a7ebb; height: .8em; min-width: 1px }
.failed { color: #b00020; font-weight: 600 }
"""


def report_page(
    report: PrepareReport,
    out: str,
    *,
    buckets: Mapping[str, Iterable[Figure]],
    held_out: Iterable[Figure],
    rejected: Mapping[str, Iterable[Figure]],
) -> str:
    """Return the report as an HTML page.

    Args:
        report: Counts, statistics and settings to show.
        out: Name of the dataset.
        buckets: Thumbnails of the dataset's images, by bucket.
        held_out: Thumbnails of held-out images.
        rejected: Thumbnails of rejected images, by reason.
    """
    sections = [
        f'<h1>{html.escape(out)}</h1>',
        _summary(report),
        *_deliveries(report),
        '<h2>Buckets</h2>',
        _bucket_bars(report),
        f'<p>Buckets without images: {html.escape(", ".join(report.empty_buckets))}.</p>'
        if report.empty_buckets
        else '',
        *(_figures(name, shown) for name, shown in buckets.items()),
        *_held_out(report.held_out, held_out),
        '<h2>Rejected</h2>',
        _bars({reason: (entry.count, '') for reason, entry in sorted(report.rejected.items())}),
        *(_details(reason, found) for reason, found in sorted(report.details.items())),
        *(_figures(reason, shown) for reason, shown in sorted(rejected.items())),
        '<h2>Skipped</h2>',
        _bars({kind: (files.count, files.shown) for kind, files in sorted(report.passed_over.items())}),
        *(_histogram(name, values) for name, values in report.statistics.items()),
        '<h2>Settings</h2>',
        _table({**report.arguments, **{f'version of {name}': text for name, text in report.versions.items()}}),
    ]
    return html_page(f'{out}: prepared images', '\n'.join(sections), style=STYLE)


def _summary(report: PrepareReport) -> str:
    rejected = sum(entry.count for entry in report.rejected.values())
    lines = {
        'source': report.source,
        'inputs': f'{report.inputs:,}',
        'kept': f'{report.pictures:,}',
        **({'held out': f'{report.held_out.pictures:,}'} if report.held_out else {}),
        'rejected': f'{rejected:,} ({report.rejected_share:.2%}; the limit is {report.max_rejected:.2%})',
        **({'repaired': f'{report.repaired.count:,} ({report.repaired.shown})'} if report.repaired.count else {}),
        'skipped': f'{sum(files.count for files in report.passed_over.values()):,} files',
        **({'removed later': f'{report.removed:,}'} if report.removed else {}),
        'license': report.license or 'not given',
    }
    failed = '' if report.passed else '<p class="failed">More images were rejected than max_rejected allows.</p>'
    return _table(lines) + ''.join(f'<p>{html.escape(note)}</p>' for note in report.notes) + failed


def _deliveries(report: PrepareReport) -> list[str]:
    """Return the section of the deliveries of a dataset that was added to; empty for a dataset of one."""
    if len(report.deliveries) < 2:
        return []
    names = list(report.deliveries[0])
    head = ''.join(f'<th>{name.replace("_", " ")}</th>' for name in names)
    rows = [''.join(f'<td>{html.escape(str(delivery[name]))}</td>' for name in names) for delivery in report.deliveries]
    return ['<h2>Deliveries</h2>', f'<table><tr>{head}</tr>{"".join(f"<tr>{row}</tr>" for row in rows)}</table>']


def _held_out(held_out: HeldOut | None, shown: Iterable[Figure]) -> list[str]:
    """Return the section of the held-out images; empty without them."""
    return [] if held_out is None else ['<h2>Held out</h2>', _bucket_bars(held_out), _figures(held_out.out, shown)]


def _table(values: Mapping[str, Any]) -> str:
    rows = [
        f'<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>' for name, value in values.items()
    ]
    return f'<table>{"".join(rows)}</table>'


def _bucket_bars(dataset: PrepareReport | HeldOut) -> str:
    """Return an HTML table of the samples and the size of each bucket."""
    sizes = {name: f'{dataset.bytes.get(name, 0) / 1e6:,.1f} MB' for name in dataset.buckets}
    return _bars({name: (count, sizes[name]) for name, count in dataset.buckets.items()})


def _bars(counts: Mapping[str, tuple[int, str]]) -> str:
    """Return an HTML table of counts with a bar for each."""
    largest = max((count for count, _ in counts.values()), default=1) or 1
    rows = [
        f'<tr><th>{html.escape(name)}</th><td class="number">{count:,}</td><td class="number">{html.escape(extra)}</td>'
        f'<td><div class="bar" style="width: {300 * count / largest:.0f}px"></div></td></tr>'
        for name, (count, extra) in counts.items()
    ]
    return f'<table>{"".join(rows)}</table>' if rows else '<p>None.</p>'


def _histogram(name: str, values: Mapping[str, Any]) -> str:
    edges = values['edges']
    names = [
        str(low) if isinstance(low, int) and high == low + 1 else f'{low} to {high}' for low, high in pairwise(edges)
    ]
    names.append(f'{edges[-1]} or more')
    counts = {label: (count, '') for label, count in zip(names, values['counts'], strict=True) if count}
    quantiles = ', '.join(f'{share} {value:g}' for share, value in values['quantiles'].items())
    return f'<h2>{html.escape(name.capitalize())}</h2>{_bars(counts)}<p>Quantiles: {html.escape(quantiles)}</p>'


def _details(reason: str, found: Mapping[str, int]) -> str:
    """Return an HTML table of the messages of the decoder for one rejection reason."""
    rows = _bars({message: (count, '') for message, count in found.items()})
    return f'<p>Messages of the decoder, {html.escape(reason)}:</p>{rows}'


def _figures(name: str, shown: Iterable[Figure]) -> str:
    figures = [replace(figure, caption=_short(figure.caption)) for figure in shown]
    return f'<h3>{html.escape(name)}</h3>{html_figures(figures)}' if figures else ''


def _short(text: str) -> str:
    return text if len(text) <= MAX_CAPTION else f'{text[: MAX_CAPTION - 1]}…'
