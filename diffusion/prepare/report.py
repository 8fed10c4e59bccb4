"""What a preparation made and what it left out, as report.json and as a few lines of text."""

import json
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

NAMES_SHOWN = 20


@dataclass
class Rejected:
    """Pictures left out for one reason: how many, and the names of the first."""

    count: int = 0
    names: list[str] = field(default_factory=list)


@dataclass
class Report:
    """Counts of a preparation; a picture stored at several sizes counts once in `pictures`."""

    source: str
    arguments: dict[str, Any]
    max_rejected: float = 1.0
    """Largest share of rejected pictures at which the preparation passes."""
    versions: dict[str, str] = field(default_factory=dict)
    licence: str | None = None
    pictures: int = 0
    buckets: dict[str, int] = field(default_factory=dict)
    """Pictures in each folder, `256px` for one."""
    rejected: dict[str, Rejected] = field(default_factory=dict)
    seconds: float = 0.0

    def reject(self, reason: str, name: str) -> None:
        """Count a picture that is left out."""
        rejected = self.rejected.setdefault(reason, Rejected())
        rejected.count += 1
        if len(rejected.names) < NAMES_SHOWN:
            rejected.names.append(name)

    @property
    def rejected_share(self) -> float:
        """Rejected pictures as a share of all, in [0, 1]."""
        count = sum(rejected.count for rejected in self.rejected.values())
        return count / max(1, count + self.pictures)

    @property
    def passed(self) -> bool:
        """Whether no more was rejected than `max_rejected` allows."""
        return self.rejected_share <= self.max_rejected

    def save(self, path: Path) -> None:
        """Write the report as JSON."""
        content = {
            'source': self.source,
            'arguments': self.arguments,
            'versions': self.versions,
            'licence': self.licence,
            'pictures': self.pictures,
            'buckets': self.buckets,
            'rejected': {reason: vars(rejected) for reason, rejected in sorted(self.rejected.items())},
            'rejected_share': self.rejected_share,
            'max_rejected': self.max_rejected,
            'passed': self.passed,
            'seconds': round(self.seconds, 1),
        }
        path.write_text(json.dumps(content, indent=2) + '\n')

    def text(self, out: Path) -> str:
        """The report for a reader."""
        buckets = ', '.join(f'{name} {count}' for name, count in self.buckets.items())
        lines = [f'{out}: {self.pictures} pictures in {self.seconds:.1f} s ({buckets})', *self.rejections()]
        if not self.passed:
            lines.append(
                f'too many were rejected: {self.rejected_share:.1%} is above --max-rejected {self.max_rejected:.1%}; '
                f'the dataset holds the rest, see {out / "report.json"}'
            )
        if self.licence:
            lines.append(self.licence)
        return '\n'.join(lines)

    def rejections(self) -> list[str]:
        """One line a reason, with the first names."""
        lines = []
        for reason, rejected in sorted(self.rejected.items()):
            names = ', '.join(rejected.names[:3]) + (', ...' if rejected.count > 3 else '')
            lines.append(f'rejected, {reason}: {rejected.count} ({names})')
        return lines


def versions_of(*distributions: str) -> dict[str, str]:
    """Installed versions of what the bytes of a dataset depend on."""
    return {name: version(name) for name in distributions}
