"""Report of a preparation: counts of kept and rejected images by bucket and reason, as JSON, text and an HTML page."""

import html
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

from diffusion.data.image_sheet import Figure, html_figures, html_page
from diffusion.prepare.source import NamedCount, is_filter
from diffusion.storage.atomic import write_atomically

REPORT = 'report.json'


@dataclass(frozen=True)
class HeldOut:
    out: str
    pictures: int
    buckets: dict[str, int]
    bytes: dict[str, int]
    """Size of the shards in bytes, by bucket folder."""


@dataclass
class PrepareReport:
    """Report of a preparation: a dataset's counts, settings and statistics, saved as report.json beside its shards.

    `inputs` is the sum of `pictures`, held-out images, rejected inputs and skipped files.
    """

    source: str
    arguments: dict[str, Any]
    max_rejected: float = 1.0
    """Maximum fraction of inputs that may be unusable for the preparation to pass."""
    versions: dict[str, str] = field(default_factory=dict)
    license: str | None = None
    pictures: int = 0
    """Number of images in the dataset; an image in several buckets counts once."""
    buckets: dict[str, int] = field(default_factory=dict)
    empty_buckets: list[str] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=dict)
    """Size of the shards in bytes, by bucket folder."""
    held_out: HeldOut | None = None
    rejected: dict[str, NamedCount] = field(default_factory=dict)
    details: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of images for each message of a decoder, by rejection reason; only for images that cannot be decoded."""
    repaired: NamedCount = field(default_factory=NamedCount)
    """Images converted although their files contain stray bytes; kept unless rejected as duplicates."""
    passed_over: dict[str, NamedCount] = field(default_factory=dict)
    """Skipped files by suffix or another reason, such as `split test`, and images that the dataset had already."""
    inputs: int = 0
    """Number of inputs (images, captions, rows or files): kept, rejected and skipped."""
    notes: list[str] = field(default_factory=list)
    """Further messages, for example about a filter for a column that no image has."""
    statistics: dict[str, Any] = field(default_factory=dict)
    """Histograms by quantity, such as 'captions per image': lower edges of the bins, counts, and quantiles."""
    fingerprint: str | None = None
    """Hash of settings, input and package versions; None in the report on several deliveries or after a removal."""
    date: str | None = None
    """Time when the dataset was finished or last changed, in UTC."""
    seconds: float = 0.0
    deliveries: list[dict[str, Any]] = field(default_factory=list)
    """Date, source and counts of each delivery; empty until images are added to the dataset or removed from it."""
    removed: int = 0
    """Number of images that `diffusion data remove` has removed, not counting held-out ones."""

    @property
    def filtered(self) -> int:
        """Number of inputs that were rejected because the settings ask for it, such as duplicates."""
        return sum(found.count for reason, found in self.rejected.items() if is_filter(reason))

    @property
    def unusable(self) -> int:
        """Number of inputs that were rejected for other reasons, such as truncated images and missing captions."""
        return sum(found.count for reason, found in self.rejected.items() if not is_filter(reason))

    @property
    def unusable_share(self) -> float:
        """Fraction of inputs, without skipped files, that are unusable, in [0, 1]."""
        accepted = self.pictures + (0 if self.held_out is None else self.held_out.pictures)
        return self.unusable / max(1, self.unusable + self.filtered + accepted)

    @property
    def passed(self) -> bool:
        """True if the fraction of unusable inputs is at most `max_rejected`; otherwise the exit status is 3."""
        return self.unusable_share <= self.max_rejected

    def save(self, path: Path) -> None:
        content = vars(self) | {
            'rejected': dict(sorted(self.rejected.items())),
            'repaired': self.repaired if self.repaired.count else None,
            'passed_over': dict(sorted(self.passed_over.items())),
            'unusable_share': self.unusable_share,
            'passed': self.passed,
            'seconds': round(self.seconds, 1),
        }
        optional = ('held_out', 'details', 'repaired', 'deliveries', 'removed')
        content = {name: value for name, value in content.items() if value or name not in optional}
        write_atomically(path, json.dumps(content, indent=2, default=vars) + '\n')

    @classmethod
    def read(cls, path: Path) -> 'PrepareReport':
        content = json.loads(path.read_text(encoding='utf-8'))
        for name in ('rejected', 'passed_over'):
            content[name] = {key: NamedCount(**values) for key, values in content[name].items()}
        content['repaired'] = NamedCount(**content.get('repaired', {}))
        if content.get('held_out'):
            content['held_out'] = HeldOut(**content['held_out'])
        names = {entry.name for entry in fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in names})

    def text(self, out: Path | str) -> str:
        lines = [f'{out}: {self.pictures} images in {self.seconds:.1f} s ({_counts(self.buckets)})']
        if self.held_out is not None:
            held_out = self.held_out
            lines.append(f'{held_out.out}: {held_out.pictures} held-out images ({_counts(held_out.buckets)})')
        if self.rejected or self.passed_over:
            lines.append(', '.join(f'{name} {count}' for name, count in _outcomes(self).items()))
        lines += rejection_lines(self.rejected)
        lines += [
            f'{reason}: {detail} ({count})' for reason, found in self.details.items() for detail, count in found.items()
        ]
        if self.repaired.count:
            lines.append(f'repaired (stray bytes in the file): {self.repaired.count} ({self.repaired.shown})')
        lines += count_lines('skipped', self.passed_over)
        if self.empty_buckets:
            names = ', '.join(self.empty_buckets[:5]) + (', ...' if len(self.empty_buckets) > 5 else '')
            count = len(self.empty_buckets)
            lines.append(f'{count} of {count + len(self.buckets)} buckets have no images ({names})')
        lines += self.notes
        if not self.passed:
            lines.append(
                f'{self.unusable_share:.1%} of the inputs are unusable, above the limit of {self.max_rejected:.1%}; '
                f'the dataset has the others. See {out}/{HTML_REPORT}, and accept it with --max-rejected '
                f'{_rounded_up(self.unusable_share)} (max_rejected in a YAML file)'
            )
        if self.license:
            lines.append(self.license)
        return '\n'.join(lines)


def _outcomes(report: PrepareReport) -> dict[str, str]:
    """Return the number of inputs, in total and by outcome, such as kept or unusable, as texts by name."""
    return {
        'inputs': f'{report.inputs:,}',
        'kept': f'{report.pictures:,}',
        **({'held out': f'{report.held_out.pictures:,}'} if report.held_out else {}),
        'filtered': f'{report.filtered:,}',
        'unusable': f'{report.unusable:,} ({report.unusable_share:.2%}; the limit is {report.max_rejected:.2%})',
        'skipped': f'{sum(files.count for files in report.passed_over.values()):,}',
    }


def _rounded_up(share: float) -> str:
    """Return a fraction rounded up to two significant digits, such as 0.049."""
    step = 10.0 ** (math.floor(math.log10(share)) - 1)
    return f'{math.ceil(round(share / step, 6)) * step:.2g}'


def rejection_lines(rejected: Mapping[str, NamedCount]) -> list[str]:
    """Return one line of text per rejection reason: first the filters in the settings, then faults of inputs."""
    filtered = {reason: found for reason, found in rejected.items() if is_filter(reason)}
    unusable = {reason: found for reason, found in rejected.items() if not is_filter(reason)}
    return count_lines('filtered', filtered) + count_lines('unusable', unusable)


def count_lines(title: str, counts: Mapping[str, NamedCount]) -> list[str]:
    """Return one line of text per reason or suffix, with its count and the first names."""
    return [f'{title}, {kind}: {found.count} ({found.shown})' for kind, found in sorted(counts.items())]


def utc_now() -> str:
    """Return the current time in UTC, such as 2026-11-25T20:04:13Z."""
    return datetime.now(timezone.utc).strftime('%Y-%m-%dT%H:%M:%SZ')


def _counts(buckets: Mapping[str, int]) -> str:
    return ', '.join(f'{name} {count}' for name, count in buckets.items())


HTML_REPORT = 'report.html'
MAX_CAPTION = 200
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
    """Return the report as an HTML page; the keyword arguments are thumbnails, by bucket or by rejection reason."""
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
        *([] if report.held_out is None else ['<h2>Held out</h2>', _bucket_bars(report.held_out)]),
        '' if report.held_out is None else _figures(report.held_out.out, held_out),
        '<h2>Rejected</h2>',
        bars(
            {
                reason: (entry.count, 'filtered' if is_filter(reason) else 'unusable')
                for reason, entry in sorted(report.rejected.items())
            }
        ),
        *(_details(reason, found) for reason, found in sorted(report.details.items())),
        *(_figures(reason, shown) for reason, shown in sorted(rejected.items())),
        '<h2>Skipped</h2>',
        bars({kind: (files.count, files.shown) for kind, files in sorted(report.passed_over.items())}),
        *(histogram(name, values) for name, values in report.statistics.items()),
        '<h2>Settings</h2>',
        _table({**report.arguments, **{f'version of {name}': text for name, text in report.versions.items()}}),
    ]
    return html_page(f'{out}: prepared images', '\n'.join(sections), style=STYLE)


def _summary(report: PrepareReport) -> str:
    lines = {
        'source': report.source,
        **_outcomes(report),
        **({'repaired': f'{report.repaired.count:,} ({report.repaired.shown})'} if report.repaired.count else {}),
        **({'removed later': f'{report.removed:,}'} if report.removed else {}),
        'license': report.license or 'not given',
    }
    failed = '' if report.passed else '<p class="failed">More inputs are unusable than max_rejected allows.</p>'
    return _table(lines) + ''.join(f'<p>{html.escape(note)}</p>' for note in report.notes) + failed


def _deliveries(report: PrepareReport) -> list[str]:
    """Return the section about deliveries; empty if the dataset has only one."""
    if len(report.deliveries) < 2:
        return []
    names = list(report.deliveries[0])
    head = ''.join(f'<th>{name.replace("_", " ")}</th>' for name in names)
    rows = [''.join(f'<td>{html.escape(str(delivery[name]))}</td>' for name in names) for delivery in report.deliveries]
    return ['<h2>Deliveries</h2>', f'<table><tr>{head}</tr>{"".join(f"<tr>{row}</tr>" for row in rows)}</table>']


def _table(values: Mapping[str, Any]) -> str:
    rows = [
        f'<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>' for name, value in values.items()
    ]
    return f'<table>{"".join(rows)}</table>'


def _bucket_bars(dataset: PrepareReport | HeldOut) -> str:
    """Return an HTML table with the number and size of samples in each bucket."""
    sizes = {name: f'{dataset.bytes.get(name, 0) / 1e6:,.1f} MB' for name in dataset.buckets}
    return bars({name: (count, sizes[name]) for name, count in dataset.buckets.items()})


def bars(counts: Mapping[str, tuple[int, str]]) -> str:
    """Return an HTML table of counts, given as (count, further text) by name, each with a bar."""
    largest = max([1, *(count for count, _ in counts.values())])
    rows = [
        f'<tr><th>{html.escape(name)}</th><td class="number">{count:,}</td><td class="number">{html.escape(extra)}</td>'
        f'<td><div class="bar" style="width: {300 * count / largest:.0f}px"></div></td></tr>'
        for name, (count, extra) in counts.items()
    ]
    return f'<table>{"".join(rows)}</table>' if rows else '<p>None.</p>'


def histogram(name: str, values: Mapping[str, Any]) -> str:
    edges = values['edges']
    names = [
        str(low) if isinstance(low, int) and high == low + 1 else f'{low} to {high}' for low, high in pairwise(edges)
    ]
    names.append(f'{edges[-1]} or more')
    counts = {label: (count, '') for label, count in zip(names, values['counts'], strict=True) if count}
    quantiles = ', '.join(f'{share} {value:g}' for share, value in values['quantiles'].items())
    return f'<h2>{html.escape(name.capitalize())}</h2>{bars(counts)}<p>Quantiles: {html.escape(quantiles)}</p>'


def _details(reason: str, found: Mapping[str, int]) -> str:
    rows = bars({message: (count, '') for message, count in found.items()})
    return f'<p>Messages of the decoder, {html.escape(reason)}:</p>{rows}'


def _figures(name: str, shown: Iterable[Figure]) -> str:
    figures = [replace(figure, caption=_short(figure.caption)) for figure in shown]
    return f'<h3>{html.escape(name)}</h3>{html_figures(figures)}' if figures else ''


def _short(text: str) -> str:
    return text if len(text) <= MAX_CAPTION else f'{text[: MAX_CAPTION - 1]}…'
