"""Counts of models by configuration: those that ship with the package, and those counted once per machine.

A file per model holds what `diffusion.models.cost_counting` answers: facts, FLOPs by shape, activations by shape and
precision. What is in neither place is counted by that module in a process of its own, since this one has no torch.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.config import registry
from diffusion.config.signatures import source_file
from diffusion.errors import UserError
from diffusion.storage.atomic import write_whole

SHIPPED = Path(__file__).with_name('model_counts')
LIBRARIES = ('torch', 'diffusers', 'transformers')
"""Other versions of these may compute a model in another way."""
SECTIONS = ('facts', 'flops', 'activations')
START_SECONDS, FLOPS_SECONDS, ACTIVATIONS_SECONDS = 15, 2, 8
"""Importing torch and building the model; counting a shape; counting a shape in a precision. SD2 on a slow core."""


class CountingFailed(RuntimeError):
    """A model's forward pass could not be counted."""


@dataclass(frozen=True)
class ModelKey:
    """Everything that decides a model's counts.

    Attributes:
        name: The registered name.
        kwargs: The keywords that change the architecture.
        imports: The recipe's modules, which register it.
        contents: Contents of configuration files that `kwargs` names.
    """

    name: str
    kwargs: Mapping[str, Any]
    imports: tuple[str, ...] = ()
    contents: tuple[str, ...] = ()

    @property
    def file_name(self) -> str:
        content = json.dumps([self.name, dict(self.kwargs), self.contents], sort_keys=True, default=str)
        return f'{self.name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}.json'

    @property
    def cached(self) -> Path:
        """The file of this machine's own counts."""
        return counts_folder() / self.file_name

    def made_with(self) -> dict[str, str]:
        """Versions of libraries and a hash of the model's source; counts made with others are made again."""
        target = registry.TARGETS['model'][self.name]
        home = target.split(':')[0] if isinstance(target, str) else target.__module__
        versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
        return versions | {'source': _source_hash((home, *self.imports))}


def counts_folder() -> Path:
    """The folder of what was counted on this machine."""
    home = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    return Path(home) / 'diffusion' / 'model_counts'


def known_counts(key: ModelKey) -> dict[str, Any]:
    """The counts of a model that exist already; sections are empty if there are none."""
    cached = _read(key.cached)
    fresh = cached if cached.get('made_with') and cached['made_with'] == key.made_with() else _no_counts()
    return merged(fresh, _read(SHIPPED / key.file_name))


def count(key: ModelKey, *, flops: Sequence[str], activations: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Count a model, say on stderr that it takes a while, and cache the answer.

    Args:
        key: The model.
        flops: Shapes, such as '640x384'.
        activations: Pairs of shape and precision.

    Raises:
        UserError: The model cannot be built as the recipe says.
        CountingFailed: Its forward pass ended with an error.
    """
    seconds = START_SECONDS + FLOPS_SECONDS * len(flops) + ACTIVATIONS_SECONDS * len(activations)
    print(
        f'counting FLOPs and activations of {key.name} on the meta device, about {seconds} s; cached in {key.cached}',
        file=sys.stderr,
        flush=True,
    )
    request = {'name': key.name, 'kwargs': dict(key.kwargs), 'imports': list(key.imports)}
    answer = run_counter(request | {'flops': list(flops), 'activations': list(activations)})
    if 'mistake' in answer:
        raise UserError(f'model {key.name}: {answer["mistake"]}')
    content = {'model': key.name, 'kwargs': dict(key.kwargs), 'made_with': key.made_with()}
    content |= merged(known_counts(key), answer)
    try:
        write_whole(key.cached, json.dumps(content, indent=1, default=str) + '\n')
    except OSError as error:  # such as a home folder that is read-only: the next plan counts again
        print(f'{key.cached}: not written ({error})', file=sys.stderr)
    return answer


def run_counter(request: Mapping[str, Any]) -> dict[str, Any]:
    """Let `diffusion.models.cost_counting` answer a request in a process of its own, which sees no GPU."""
    # This package first, and not (as `-m` has it) the working directory, which may hold another one of its name.
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    environment = os.environ | {'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': path, 'PYTHONSAFEPATH': '1'}
    command = [sys.executable, '-m', 'diffusion.models.cost_counting']
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, env=environment)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise CountingFailed(
            f'counting {request["name"]} failed with exit status {done.returncode}; its traceback is above'
        )
    return json.loads(done.stdout)


def merged(*counts: Mapping[str, Any]) -> dict[str, Any]:
    """Several counts as one."""
    return {section: {key: value for each in counts for key, value in each[section].items()} for section in SECTIONS}


def _no_counts() -> dict[str, Any]:
    return {section: {} for section in SECTIONS}


def _read(path: Path) -> dict[str, Any]:
    try:
        return _no_counts() | json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError):  # not there, or cut off
        return _no_counts()


@functools.cache
def _source_hash(modules: tuple[str, ...]) -> str:
    """Hash the files of modules, and those beside them in their packages, since a model is seldom a single file."""
    found = hashlib.sha256()
    for module in modules:
        file = Path(getattr(sys.modules.get(module), '__file__', None) or source_file(module))
        in_package = file.with_name('__init__.py').is_file()
        for path in sorted(file.parent.rglob('*.py')) if in_package else [file]:
            found.update(path.read_bytes())
    return found.hexdigest()[:16]
