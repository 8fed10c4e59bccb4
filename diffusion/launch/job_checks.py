"""Reading and checking a job's YAML; every mistake is found before anything is submitted."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffusion.config.load import Recipe, RecipeError, check_devices, read_values
from diffusion.config.load import load as load_recipe
from diffusion.config.schema import Gatherer, Problem, build_dataclass, did_you_mean, join
from diffusion.errors import UserError
from diffusion.launch.backends import NAMES, backend_of
from diffusion.launch.backends.base import Backend
from diffusion.launch.job_spec import Job, JobSpec, JobStage, override_words, seconds_of
from diffusion.planning.gpus import GPU, find_gpu, load_gpus

VARIABLE = re.compile(r'[A-Za-z_][A-Za-z0-9_]*')
SECRET_NAME = re.compile(r'(?i)(^|_)(token|secret|password|passwd|credentials?|api_?key|access_key|private_key)($|_)')
SECRET_VALUE = re.compile(r'\b(AKIA[0-9A-Z]{16}|hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{30,})')


@dataclass(frozen=True)
class CheckedSpec:
    """A spec without mistakes, and the jobs it makes."""

    spec: JobSpec
    backend: Backend
    jobs: tuple[Job, ...]
    recipes: tuple[Recipe, ...]
    """The recipe of each job."""
    gpu: GPU | None
    missing_secrets: tuple[Problem, ...]
    """Secrets that the user must set before the jobs can be submitted."""


def load_job_spec(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job's YAML, the files it extends, and `key=value` overrides; the recipe is not read.

    Raises:
        RecipeError: Every mistake in the spec.
    """
    raw, gather = read_values(path, overrides), Gatherer()
    if 'recipe' not in raw and 'backend' not in raw and {'model', 'dataset', 'trainer'} & set(raw):
        what = f"it is a recipe; a job's YAML names it (recipe: {path}) and a back end, as those in yamls/launch do"
        raise RecipeError([Problem('', what)], path)
    name, options = _backend(raw.pop('backend', None), gather)
    spec: JobSpec = build_dataclass(JobSpec, raw, '', gather)
    spec.backend, spec.options = name, options
    gather.problems += gather.missing
    if not gather.problems:
        gather.problems += _problems(spec)
    if gather.problems:
        raise RecipeError(gather.problems, path)
    return spec


def check_jobs(spec: JobSpec, path: str | Path, *, environ: Mapping[str, str] | None = None) -> CheckedSpec:
    """Make the jobs of a spec, after all checks that need no cluster.

    Args:
        spec: The result of `load_job_spec`.
        path: Path of the spec, for messages.
        environ: The environment that the job is submitted from (default: this process's).

    Raises:
        RecipeError: Every mistake in the spec and in each recipe.
    """
    gpu, problems = _gpu(spec)
    if gpu is not None:
        spec = replace(spec, gpu=gpu.name)  # in the planner's own spelling
    jobs, recipes, wrong = _jobs(spec)
    backend = backend_of(spec.backend)
    problems += wrong + _shared_folders(jobs) + (backend.problems(jobs) if jobs else [])
    if problems:
        raise RecipeError(problems, path)
    missing = _missing_secrets(spec, os.environ if environ is None else environ)
    return CheckedSpec(spec, backend, tuple(jobs), tuple(recipes), gpu, tuple(missing))


def _backend(value: Any, gather: Gatherer) -> tuple[str, Any]:
    """Read `backend:`, which is a name or a mapping of `name` and options; return the name and the options."""
    options = dict(value) if isinstance(value, dict) else {'name': value}
    name = options.pop('name', None)
    if name not in NAMES:
        known = did_you_mean(str(name), NAMES) if name is not None else f'known: {", ".join(NAMES)}'
        gather.problem('backend.name', f'{name!r} is no back end; {known}')
        return '', None
    return str(name), build_dataclass(backend_of(str(name)).Options, options, 'backend', gather)


def _problems(spec: JobSpec) -> list[Problem]:
    """Find mistakes that the types alone do not exclude."""
    gather = Gatherer()
    for where, value in (
        ('nodes', spec.nodes),
        ('gpus_per_node', spec.gpus_per_node),
        ('hang_seconds', spec.hang_seconds),
        ('schedule.notice_seconds', spec.schedule.notice_seconds),
        *((f'stages.{name}.nodes', stage.nodes) for name, stage in spec.stages.items()),
    ):
        if isinstance(value, int) and value < 1:
            gather.problem(where, f'{value} is not positive')
    if spec.price_usd_per_gpu_hour is not None and spec.price_usd_per_gpu_hour < 0:
        gather.problem('price_usd_per_gpu_hour', f'{spec.price_usd_per_gpu_hour} is negative')
    if spec.restart.max_restarts < 0:
        gather.problem('restart.max_restarts', f'{spec.restart.max_restarts} is negative; 0 never starts again')
    for code in spec.restart.on_exit:
        if not code.isdecimal() or not 1 <= int(code) <= 255:
            gather.problem(join('restart.on_exit', code), 'is no exit status; write one from 1 to 255')
    limits = {'schedule.time_limit': spec.schedule.time_limit}
    limits |= {f'stages.{name}.time_limit': stage.time_limit for name, stage in spec.stages.items()}
    for where, limit in limits.items():
        try:
            _ = None if limit is None else seconds_of(limit)
        except UserError as error:
            gather.problem(where, str(error))
    _check_recipes(spec, gather)
    _check_variables(spec, gather)
    for target in spec.mounts:
        if not target.startswith('/'):
            gather.problem(join('mounts', target), 'is no absolute path on a node; write what is mounted behind it')
    return gather.problems


def _check_recipes(spec: JobSpec, gather: Gatherer) -> None:
    if not spec.stages and spec.recipe is None:
        gather.problem('recipe', 'is missing; give the path of a recipe, such as yamls/phase1.yaml, or stages')
    for name, stage in spec.stages.items():
        if re.fullmatch(r'[a-z]([a-z0-9-]*[a-z0-9])?', name) is None:
            gather.problem(join('stages', name), 'is no name of a stage; use a-z, 0-9 and dashes between them')
        if spec.recipe is None and stage.recipe is None:
            gather.problem(f'stages.{name}.recipe', 'is missing, and there is none for all stages either')


def _check_variables(spec: JobSpec, gather: Gatherer) -> None:
    for section, variables in (('env', spec.env), ('secrets', spec.secrets)):
        for name in variables:
            if VARIABLE.fullmatch(name) is None:
                gather.problem(join(section, name), 'is no name of an environment variable')
            if name.startswith('DIFFUSION_'):
                gather.problem(join(section, name), 'is set by the launcher; use the key of the spec that means it')
    for name in spec.env:
        if name in spec.secrets:
            gather.problem(join('env', name), 'is under secrets too; leave one of them out')
        elif SECRET_NAME.search(name):
            gather.problem(
                join('env', name), f'looks like a secret, and would be written out; put {name} under secrets'
            )
    written = {
        'env': spec.env,
        'overrides': spec.overrides,
        'stages': {name: {'overrides': stage.overrides} for name, stage in spec.stages.items()},
        'backend': vars(spec.options) if spec.options else {},
    }
    for where, text in _texts(written):
        if SECRET_VALUE.search(text):
            gather.problem(where, 'holds what looks like a secret, and would be written out; name it under secrets')


def _texts(value: Any, where: str = '') -> list[tuple[str, str]]:
    """List all strings in plain values, with their paths."""
    if isinstance(value, Mapping):
        return [found for key, item in value.items() for found in _texts(item, join(where, key))]
    if isinstance(value, list):
        return [found for index, item in enumerate(value) for found in _texts(item, f'{where}[{index}]')]
    return [(where, value)] if isinstance(value, str) else []


def _gpu(spec: JobSpec) -> tuple[GPU | None, list[Problem]]:
    if spec.gpu is None:
        return None, []
    try:
        gpu = find_gpu(spec.gpu, load_gpus(), or_file=False)
    except UserError as error:
        return None, [Problem('gpu', str(error).removeprefix('--gpu: '))]
    if spec.gpus_per_node > gpu.gpus_per_node:
        what = f'{spec.gpus_per_node} is more than the {gpu.gpus_per_node} of a machine with {gpu.name}; use more nodes'
        return gpu, [Problem('gpus_per_node', what)]
    return gpu, []


def _jobs(spec: JobSpec) -> tuple[list[Job], list[Recipe], list[Problem]]:
    """Make the jobs and recipes of all stages, and list their mistakes."""
    stages = spec.stages or {'main': JobStage()}
    jobs: list[Job] = []
    recipes: list[Recipe] = []
    wrong: list[Problem] = []
    for name, stage in stages.items():
        where = f'stages.{name}' if spec.stages else ''
        path = stage.recipe or spec.recipe or ''
        overrides = spec.overrides | stage.overrides
        if jobs and 'init_from' not in overrides:
            overrides['init_from'] = jobs[-1].run_dir
        words = override_words(overrides)
        nodes = stage.nodes or spec.nodes
        try:
            recipe = load_recipe(path, words)
            problems = _recipe_problems(recipe, spec, nodes * spec.gpus_per_node)
        except RecipeError as error:
            wrong += [Problem(join(where, 'recipe'), f'{path}: {problem}') for problem in error.problems]
            continue
        wrong += [Problem(join(where, 'recipe'), f'{path}: {problem}') for problem in problems]
        recipes.append(recipe)
        jobs.append(
            Job(
                name=f'{spec.name}-{name}' if spec.stages else spec.name,
                stage=name,
                recipe=path,
                overrides=words,
                nodes=nodes,
                time_limit_seconds=seconds_of(limit)
                if (limit := stage.time_limit or spec.schedule.time_limit)
                else None,
                run_dir=str(recipe.run_dir),
                after=jobs[-1].name if jobs else None,
                spec=spec,
            )
        )
    return jobs, recipes, wrong


def _recipe_problems(recipe: Recipe, spec: JobSpec, world_size: int) -> list[Problem]:
    problems = check_devices(recipe, world_size)
    if recipe.task == 'train' and spec.restart.max_restarts and not recipe.trainer.get('autoresume'):
        what = 'is not on, so that a restart would begin anew; set it, or restart.max_restarts: 0 in the job'
        problems.append(Problem('trainer.autoresume', what))
    return problems


def _shared_folders(jobs: Sequence[Job]) -> list[Problem]:
    problems = []
    owners: dict[str, Job] = {}
    for job in jobs:
        owner = owners.setdefault(job.run_dir, job)
        if owner is not job:
            what = f'saves to {job.run_dir}, as stages.{owner.stage} does; give it another overrides.name'
            problems.append(Problem(f'stages.{job.stage}', what))
    return problems


def _missing_secrets(spec: JobSpec, environ: Mapping[str, str]) -> list[Problem]:
    """Find secrets that the back end takes from the submitting environment and that are not set there."""
    return [
        Problem(join('secrets', name), 'is not in the environment that the job is submitted from; export it')
        for name, source in spec.secrets.items()
        if source is None and not environ.get(name)
    ]
