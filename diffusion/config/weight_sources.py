"""Sources of weights for `init_from` (a run, a diffusers folder, a repository, a file) and for the frozen parts."""

import re
from pathlib import Path
from typing import Any

from diffusion.config import registry
from diffusion.config.recipe import Component, InitFrom
from diffusion.config.schema import MISSING, Problem

HUB = 'hf://'
REPOSITORY = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*')
COMMIT = re.compile(r'[0-9a-f]{40}')
PICKLES = ('.bin', '.ckpt', '.pth')
"""Suffixes of files with pickled weights. Composer's `.pt` is not listed: it is read without running pickled code."""
PIPELINE = 'model_index.json'
FLUX2_REPOSITORIES = 'black-forest-labs/FLUX.2-'
"""Start of the names of Hub repositories with FLUX.2's autoencoder; this package contains its configuration."""
DENOISERS = ('unet', 'transformer')
"""Subfolders of a diffusers pipeline that may contain its denoiser."""


def with_own_config(location: Any) -> Any:
    """Return this package's folder with FLUX.2's VAE configuration for a FLUX.2 repository, else the location itself.

    Counting parameters and FLOPs needs only the configuration, and thus no access to the Hub.
    """
    is_flux2 = isinstance(location, str) and location.startswith(FLUX2_REPOSITORIES)
    return str(Path(__file__).parents[1] / 'models' / 'weights' / 'flux2_vae') if is_flux2 else location


def hub_repository(start: InitFrom) -> str | None:
    """Return the name of the repository on the Hub that `init_from` names, or None if its source is a local path."""
    if start.source.startswith(HUB) or start.revision is not None:
        name = start.source.removeprefix(HUB)
        return name.removesuffix(f'/{hub_file(start)}')
    return None


def hub_file(start: InitFrom) -> str | None:
    """Return the file FILE.pt of a source `hf://org/name/FILE.pt`, or None for a source without a file."""
    found = re.fullmatch(r'[^/]+/[^/]+/(.+\.pt)', start.source.removeprefix(HUB))
    return None if found is None else found[1]


def is_diffusers_folder(folder: Path) -> bool:
    """Return True if a folder is a pipeline or model written by diffusers' `save_pretrained`."""
    files = [PIPELINE, 'config.json', *(f'{name}/config.json' for name in DENOISERS)]
    return any((folder / name).is_file() for name in files)


def check_initial_weights(init_from: str | InitFrom | None) -> list[Problem]:
    """Return a problem for each setting of `init_from` that contradicts another one, and for an unsupported source."""
    start = InitFrom(init_from) if isinstance(init_from, str) else init_from
    if start is None:
        return []
    # A value may be ???, or None because its type was wrong; both are reported elsewhere.
    if not isinstance(start.source, str) or MISSING in (start.source, start.revision, start.weights):
        return []
    repository = hub_repository(start)
    problems = {}
    if repository is not None:
        problems = _hub_problems(start, repository)
    elif start.source.endswith(PICKLES):
        what = f'is a {Path(start.source).suffix} file, which is pickled and may run any code when it is read'
        problems['from'] = f'{start.source} {what}; convert it to safetensors'
    own = {'from': 'init_from'} if isinstance(init_from, str) else {}
    return [Problem(own.get(key, f'init_from.{key}'), what) for key, what in problems.items()]


def check_pretrained(model: Component) -> list[Problem]:
    values = registry.settings_of('model', model)
    if 'revision' not in values or not isinstance(values.get('pretrained'), str):
        return []
    problem = revision_problem(values['pretrained'], values['revision'])
    return [] if problem is None else [Problem('model.revision', problem)]


def revision_problem(source: str, revision: str | None) -> str | None:
    """Return an error message if a source of frozen parts is a repository without the required revision, else None."""
    if revision is not None or not REPOSITORY.fullmatch(source) or Path(source).is_dir():
        return None
    return (
        f'is missing; give the commit of {source} on the Hugging Face Hub that you have reviewed, 40 hex digits; if it '
        f'is a local folder, write model.pretrained=./{source}'
    )


def _hub_problems(start: InitFrom, repository: str) -> dict[str, str]:
    problems = {}
    if not REPOSITORY.fullmatch(repository):
        what = f'{start.source!r} is not the name of a repository; write hf://org/name'
        if start.revision is not None:
            what += ', or remove revision if it is a local path'
        problems['from'] = what
    elif start.revision is None:
        way_out = f'set revision to a commit from https://huggingface.co/{repository}/commits/main'
        problems['revision'] = f'is missing: the files of {start.source} may change; {way_out}'
    if start.revision is not None and not COMMIT.fullmatch(start.revision):
        what = f'{start.revision!r} is not a commit; branches and tags may change'
        problems['revision'] = f'{what}, so give the 40 hexadecimal digits of a commit'
    if start.weights == 'ema' and hub_file(start) is None:
        problems['weights'] = f'ema, but {start.source} has only one set of weights; remove weights'
    return problems


def path_problem(start: InitFrom) -> str | None:
    """Return an error message if the source of `init_from` is not usable on this machine, else None."""
    path, repository = Path(start.source), hub_repository(start)
    if repository is None:
        if '://' in start.source or path.exists():
            return None
        what = (
            f'{start.source} does not exist; give a checkpoint or the folder of a run, a folder of diffusers or a file'
        )
        may_be_name = REPOSITORY.fullmatch(start.source)
        return f'{what}; for the repository {start.source} on the Hub, set revision' if may_be_name else what
    if repository == start.source and path.exists():
        return (
            f'{start.source} is a local path, but revision is for a repository on the Hub; remove revision, or write '
            f'{HUB}{start.source}'
        )
    return None
