"""Report of a preparation: the counts of kept and rejected images by bucket and reason, as report.json and as text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from diffusion.prepare.source import NamedCount
from diffusion.storage.atomic import write_atomically

REPORT = 'report.json'


@dataclass
class HeldOut:
    """Counts of the images that were held out of a training set and written to a dataset of their own."""

    out: str
    """Folder of that dataset."""
    pictures: int
    """Number of images."""
    buckets: dict[str, int]
    """Number of samples by bucket folder."""
    bytes: dict[str, int]
    """Size of the shards in bytes, by bucket folder."""


@dataclass
class PrepareReport:
    """Report of a preparation: counts, settings and statistics of a dataset, saved as report.json beside its shards.

    `inputs` is the sum of `pictures`, held-out images, rejected inputs and skipped files.
    """

    source: str
    arguments: dict[str, Any]
    max_rejected: float = 1.0
    """Maximum fraction of rejected inputs for the preparation to pass."""
    versions: dict[str, str] = field(default_factory=dict)
    license: str | None = None
    pictures: int = 0
    """Number of images in the dataset; an image in several buckets counts once."""
    buckets: dict[str, int] = field(default_factory=dict)
    """Number of samples by bucket folder, such as `256px`."""
    empty_buckets: list[str] = field(default_factory=list)
    """Buckets without images, which have no folder."""
    bytes: dict[str, int] = field(default_factory=dict)
    """Size of the shards in bytes, by bucket folder."""
    held_out: HeldOut | None = None
    """Counts of the held-out images; None if there are none."""
    rejected: dict[str, NamedCount] = field(default_factory=dict)
    """Rejected inputs by reason."""
    details: dict[str, dict[str, int]] = field(default_factory=dict)
    """Messages of the decoder by rejection reason, with the number of images."""
    repaired: NamedCount = field(default_factory=NamedCount)
    """Images that were converted although their files have stray bytes; kept unless rejected as duplicates."""
    passed_over: dict[str, NamedCount] = field(default_factory=dict)
    """Skipped files by suffix: they are not images of a known format and do not belong to one."""
    inputs: int | None = None
    """Number of inputs (images, captions, rows or files): kept, rejected and skipped."""
    notes: list[str] = field(default_factory=list)
    """Further messages, such as a filter for a column that no image has."""
    statistics: dict[str, Any] = field(default_factory=dict)
    """Histograms of the dataset's images by quantity: edges, counts and quantiles."""
    fingerprint: str | None = None
    """Hash of the settings, the input and the package versions."""
    date: str | None = None
    """Time when the dataset was finished or last changed, in UTC."""
    seconds: float = 0.0
    """Elapsed time of the last start in seconds."""
    deliveries: list[dict[str, Any]] = field(default_factory=list)
    """Date, source and counts of each delivery of a dataset that was added to; empty for a dataset of one."""
    removed: int = 0
    """Number of images that were removed after their delivery."""

    @property
    def rejected_share(self) -> float:
        """Fraction of inputs that were rejected, in [0, 1]."""
        count = sum(rejected.count for rejected in self.rejected.values())
        accepted = self.pictures + (0 if self.held_out is None else self.held_out.pictures)
        return count / max(1, count + accepted)

    @property
    def passed(self) -> bool:
        """True if the fraction of rejected inputs is at most `max_rejected`; otherwise the exit status is 3."""
        return self.rejected_share <= self.max_rejected

    def save(self, path: Path) -> None:
        """Write the report to a file as JSON."""
        content = {
            'source': self.source,
            'arguments': self.arguments,
            'versions': self.versions,
            'license': self.license,
            'inputs': self.inputs,
            'pictures': self.pictures,
            'buckets': self.buckets,
            'empty_buckets': self.empty_buckets,
            'bytes': self.bytes,
            **({} if self.held_out is None else {'held_out': vars(self.held_out)}),
            'rejected': {reason: vars(rejected) for reason, rejected in sorted(self.rejected.items())},
            **({'details': self.details} if self.details else {}),
            **({'repaired': vars(self.repaired)} if self.repaired.count else {}),
            'passed_over': {kind: vars(files) for kind, files in sorted(self.passed_over.items())},
            'rejected_share': self.rejected_share,
            'max_rejected': self.max_rejected,
            'passed': self.passed,
            'notes': self.notes,
            'statistics': self.statistics,
            'fingerprint': self.fingerprint,
            **({'deliveries': self.deliveries} if self.deliveries else {}),
            **({'removed': self.removed} if self.removed else {}),
            'date': self.date,
            'seconds': round(self.seconds, 1),
        }
        write_atomically(path, json.dumps(content, indent=2) + '\n')

    @classmethod
    def read(cls, path: Path) -> 'PrepareReport':
        """Read a report written by `save`."""
        content = json.loads(path.read_text(encoding='utf-8'))
        for name in ('rejected', 'passed_over'):
            content[name] = {key: NamedCount(**values) for key, values in content[name].items()}
        content['repaired'] = NamedCount(**content.get('repaired', {}))
        if content.get('held_out'):
            content['held_out'] = HeldOut(**content['held_out'])
        names = {entry.name for entry in fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in names})

    def text(self, out: Path | str) -> str:
        """Return a summary of the report as text."""
        lines = [f'{out}: {self.pictures} images in {self.seconds:.1f} s ({_counts(self.buckets)})']
        if self.held_out is not None:
            held_out = self.held_out
            lines.append(f'{held_out.out}: {held_out.pictures} held-out images ({_counts(held_out.buckets)})')
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
                f'too many inputs were rejected: {self.rejected_share:.1%} is above --max-rejected '
                f'{self.max_rejected:.1%}; the dataset contains the others, see {out}/{REPORT}'
            )
        if self.license:
            lines.append(self.license)
        return '\n'.join(lines)


def rejection_lines(rejections: Mapping[str, NamedCount]) -> list[str]:
    """Return one line of text per rejection reason, with its count and the names of the first rejected inputs."""
    return count_lines('rejected', rejections)


def count_lines(title: str, counts: Mapping[str, NamedCount]) -> list[str]:
    """Return one line of text per reason or suffix, with its count and the first names."""
    return [f'{title}, {kind}: {found.count} ({found.shown})' for kind, found in sorted(counts.items())]


def versions_of(*distributions: str) -> dict[str, str]:
    """Return the installed version of each of these pip packages, by name."""
    return {name: version(name) for name in distributions}


def utc_now() -> str:
    """Return the present time in UTC, such as 2026-11-25T20:04:13Z."""
    return datetime.now(timezone.utc).strftime('%Y-%m-%dT%H:%M:%SZ')


def _counts(buckets: Mapping[str, int]) -> str:
    return ', '.join(f'{name} {count}' for name, count in buckets.items())
