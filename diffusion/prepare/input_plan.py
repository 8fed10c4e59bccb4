"""What a preparation set out to do, written before it begins, so that it is not gone on with as something else."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from diffusion.errors import UserError
from diffusion.prepare.counts_report import versions_of
from diffusion.prepare.settings import PrepareSettings
from diffusion.prepare.source import Part, Source
from diffusion.prepare.work_dir import WorkFolder, read_json
from diffusion.storage.atomic import new_unfinished, write_whole

PACKAGES = ('numpy', 'pillow', 'pyarrow', 'simplejpeg', 'xxhash')
"""What the bytes of a dataset depend on."""
SHOWN = 5


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
            raise UserError(f'{settings.source.location}: several parts are called {twice}; rename one')
        return cls(settings.what_it_makes(), versions_of(*PACKAGES), parts)

    @property
    def fingerprint(self) -> str:
        """Of everything in it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def agree_with(self, work: WorkFolder) -> None:
        """Begin a work folder, or make sure that it is this plan's.

        Raises:
            UserError: It is another plan's; the message says what differs.
        """
        if not work.plan.exists():
            unfinished = new_unfinished(work.plan)
            write_whole(unfinished, json.dumps(asdict(self), indent=1) + '\n')
            try:
                os.link(unfinished, work.plan)  # several machines may begin at once; one of them is first
            except FileExistsError:
                pass
            finally:
                unfinished.unlink()
        content = read_json(work.plan)
        begun = InputPlan(content['settings'], content['versions'], [Part(**part) for part in content['parts']])
        if begun.fingerprint == self.fingerprint:
            return
        differences = list(self._differences(begun))
        more = f'\n  and {len(differences) - SHOWN} more' if len(differences) > SHOWN else ''
        raise UserError(
            f'{work.path}: holds a preparation that was begun otherwise:\n  '
            + '\n  '.join(differences[:SHOWN])
            + f'{more}\nundo that and start again to go on with it, or remove {work.path} to begin anew'
        )

    def _differences(self, begun: 'InputPlan') -> Iterator[str]:
        """In words, from what was begun to this."""
        for section in ('settings', 'versions'):
            old, new = _flat(getattr(begun, section)), _flat(getattr(self, section))
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    yield f'{section}.{name} was {old.get(name)!r}, is {new.get(name)!r}'
        old, new = ({part.name: part for part in plan.parts} for plan in (begun, self))
        yield from (f'part {name} is gone' for name in old if name not in new)
        yield from (f'part {name} is new' for name in new if name not in old)
        changed = (name for name in old if name in new and old[name] != new[name])
        yield from (f'part {name} has changed ({old[name].stamp}, now {new[name].stamp})' for name in changed)
        if [*old] != [*new] and old.keys() == new.keys():
            yield 'the parts have another order'


def _flat(values: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    """Nested settings by their path, `filters.min_side`."""
    flat = {}
    for name, value in values.items():
        flat |= _flat(value, f'{prefix}{name}.') if isinstance(value, dict) else {f'{prefix}{name}': value}
    return flat
