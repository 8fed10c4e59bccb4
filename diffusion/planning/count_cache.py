"""Cache of model counts (parameters, FLOPs, activations) by configuration: shipped with this package or counted here.

One JSON file per model holds the output of `diffusion.models.cost_counting`: facts (such as parameters), FLOPs by
shape, and activations by shape and precision. Missing counts are computed by that module in a separate process, since
the planner runs without torch.
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
from diffusion.storage.atomic import write_atomically

SHIPPED = Path(__file__).with_name('model_counts')
COUNTS = '2'
"""Version of the format of counts; increase it when the names or meaning of the counts change."""
AUXILIARY = 'diffusion.models.cost_counting:COUNTERS'
"""Code that counts the networks that only losses use; a change of this code invalidates their cached counts."""
LIBRARIES = ('torch', 'diffusers', 'transformers')
"""Libraries that determine how a model computes: another version invalidates counts made on this machine."""
SECTIONS = ('facts', 'flops', 'activations')
START_SECONDS, FLOPS_SECONDS, ACTIVATIONS_SECONDS = 15, 2, 8
"""Expected seconds to start the process, to count FLOPs of a shape, and to count its activations (SD2, slow core)."""


class CountingFailed(RuntimeError):
    """Raised if counting fails in the model's forward pass, as opposed to a mistake in the recipe."""


@dataclass(frozen=True)
class ModelKey:
    """Cache key of a model: all settings that determine its FLOPs, parameters and activations.

    Attributes:
        contents: Contents of the configuration files to which `kwargs` refers.
        lora: Rank and target layers of the LoRA that is trained instead of the denoiser's weights, if any.
    """

    name: str
    kwargs: Mapping[str, Any]
    imports: tuple[str, ...] = ()
    contents: tuple[str, ...] = ()
    lora: Mapping[str, Any] | None = None

    @property
    def file_name(self) -> str:
        """Name of the JSON file with the model's counts, which contains a hash of the settings."""
        settings = [self.name, dict(self.kwargs), self.contents, *([] if self.lora is None else [dict(self.lora)])]
        content = json.dumps(settings, sort_keys=True, default=str)
        return f'{self.name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}.json'

    @property
    def request(self) -> dict[str, Any]:
        lora = {} if self.lora is None else {'lora': dict(self.lora)}
        return {'name': self.name, 'kwargs': dict(self.kwargs), 'imports': list(self.imports), **lora}

    @property
    def cached(self) -> Path:
        return counts_folder() / self.file_name

    def made_with(self) -> dict[str, str]:
        """Return the library versions by name, and a source hash; cached counts are valid until these change."""
        target = registry.TARGETS['model'].get(self.name, AUXILIARY)
        home = target.split(':')[0] if isinstance(target, str) else target.__module__
        versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
        return versions | {'source': _source_hash((home, *self.imports)), 'counts': COUNTS}


def counts_folder() -> Path:
    home = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    return Path(home) / 'diffusion' / 'model_counts'


def known_counts(key: ModelKey) -> dict[str, Any]:
    """Return a model's shipped and cached counts by section (SECTIONS); those that are not counted yet are missing."""
    # Shipped counts take precedence. They are valid for all library versions, so that planning the shipped recipes
    # never takes a minute; tests/planning/test_count_cache.py compares them with the models.
    cached = _read(key.cached)
    fresh = cached if cached.get('made_with') and cached['made_with'] == key.made_with() else _no_counts()
    return merged(fresh, _read(SHIPPED / key.file_name))


def count(key: ModelKey, *, flops: Sequence[str], activations: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Count a model in another process, cache the counts, and return the new ones by section; print the expected time.

    Args:
        flops: Shapes for which to count FLOPs, such as '640x384'.
        activations: Pairs of a shape and a `model_costs.Precision` for which to count activations.

    Raises:
        UserError: The model cannot be built with the recipe's settings.
        CountingFailed: The forward pass raised an error.
    """
    seconds = START_SECONDS + FLOPS_SECONDS * len(flops) + ACTIVATIONS_SECONDS * len(activations)
    print(
        f'counting FLOPs and activations of {key.name} on the meta device, about {seconds} s; cached in {key.cached}',
        file=sys.stderr,
        flush=True,
    )
    answer = run_counter(key.request | {'flops': list(flops), 'activations': list(activations)})
    # The other process cannot raise an exception here, so it returns a user error as text.
    if 'mistake' in answer:
        raise UserError(f'model {key.name}: {answer["mistake"]}')
    content = key.request | {'made_with': key.made_with()} | merged(known_counts(key), answer)
    try:
        write_atomically(key.cached, json.dumps(content, indent=1, default=str) + '\n')
    except OSError as error:  # the home folder may be read-only
        print(f'{key.cached} cannot be written ({error}); the next plan counts again', file=sys.stderr)
    return answer


def run_counter(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run `diffusion.models.cost_counting` in a process without GPUs, and return the counts or raise CountingFailed."""
    # `-m` puts the working directory first in sys.path, where a folder named `diffusion` could shadow this package;
    # PYTHONSAFEPATH turns that off. Pass on the rest of sys.path: the modules that the recipe imports may be there.
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    environment = os.environ | {'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': path, 'PYTHONSAFEPATH': '1'}
    command = [sys.executable, '-m', 'diffusion.models.cost_counting']
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, env=environment)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        message = f'counting {request["name"]} failed with exit status {done.returncode}; see the traceback above'
        raise CountingFailed(message)
    return json.loads(done.stdout)


def merged(*counts: Mapping[str, Any]) -> dict[str, Any]:
    """Merge counts of one model, section by section (SECTIONS); later arguments take precedence."""
    return {section: {key: value for each in counts for key, value in each[section].items()} for section in SECTIONS}


def _no_counts() -> dict[str, Any]:
    return {section: {} for section in SECTIONS}


def _read(path: Path) -> dict[str, Any]:
    """Return the model counts in a JSON file; empty counts if the file is missing or truncated."""
    try:
        return _no_counts() | json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError):  # missing or truncated
        return _no_counts()


@functools.cache
def _source_hash(modules: tuple[str, ...]) -> str:
    """Return a hash of modules' source files, including all files of the packages that contain the modules."""
    digest = hashlib.sha256()
    for module in modules:
        file = Path(getattr(sys.modules.get(module), '__file__', None) or source_file(module))
        # A model rarely consists of a single file, so hash its whole package. If a module is not in a package, its
        # folder may contain unrelated files, so hash only the module.
        in_package = file.with_name('__init__.py').is_file()
        for path in sorted(file.parent.rglob('*.py')) if in_package else [file]:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
