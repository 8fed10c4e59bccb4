"""Load and validate job specs, so that mistakes are found before anything is submitted."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffusion.config.interpolation import Interpolation, KeyPath, Resolved, dotted, escaped
from diffusion.config.load import Recipe, RecipeError, check_devices, check_paths, read_values
from diffusion.config.load import load as load_recipe
from diffusion.config.schema import Gatherer, Problem, build_dataclass, did_you_mean, join
from diffusion.config.secrets import has_secret_name, secret_format, secret_problems
from diffusion.errors import UserError
from diffusion.launch.backends import NAMES, backend_of
from diffusion.launch.backends.base import Backend
from diffusion.launch.job_spec import Job, JobSpec, JobStage, override_words, seconds_of
from diffusion.planning.gpus import GPU, find_gpu, load_gpus, missing_kernels

VARIABLE = re.compile(r'[A-Za-z_][A-Za-z0-9_]*')


@dataclass(frozen=True)
class CheckedSpec:
    """Job spec that has passed all checks, with its jobs and its launch backend."""

    spec: JobSpec
    backend: Backend
    jobs: tuple[Job, ...]
    recipes: tuple[Recipe, ...]
    """The recipe of each job."""
    gpu: GPU | None
    missing_secrets: tuple[Problem, ...]
    """Secrets that must be set before the jobs can be submitted."""

    def data_problems(self) -> list[str]:
        """Return the problems that `diffusion check` finds in local data; empty if jobs read no local data."""
        folder = Path(self.spec.workdir or '.')
        if self.spec.backend not in ('local', 'slurm') or self.spec.image is not None or not folder.is_dir():
            return []
        found, written, here = [], list[str](), Path.cwd()
        os.chdir(folder)  # `contextlib.chdir` needs Python 3.11
        try:
            for job, recipe in zip(self.jobs, self.recipes, strict=True):
                # Leave out paths that an earlier stage writes: a later one reads its checkpoint or latents.
                problems = [each for each in check_paths(recipe) if not any(place in each.what for place in written)]
                found += [f'{job.name}: {problem}' for problem in problems]
                written.append(recipe.precompute.out if recipe.task == 'precompute' else recipe.run_place)
        finally:
            os.chdir(here)
        return found


def load_job_spec(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Load a job spec from its YAML file, the files it extends and `key=value` overrides, without loading its recipes.

    Raises:
        RecipeError: The spec has mistakes; the message lists all of them.
    """
    resolved, gather = read_values(path, overrides), Gatherer()
    raw = resolved.values
    if 'recipe' not in raw and 'backend' not in raw and {'model', 'dataset', 'trainer'} & set(raw):
        message = f'this is a recipe; use a job YAML with recipe: {path} and a backend, like those in yamls/launch'
        raise RecipeError([Problem('', message)], path)
    gather.problems += _keep_interpolations(resolved)
    gather.problems += secret_problems({key: value for key, value in raw.items() if key not in ('env', 'secrets')})
    name, options = _read_backend(raw.pop('backend', None), gather)
    spec: JobSpec = build_dataclass(JobSpec, raw, '', gather)
    spec.backend, spec.options = name, options
    gather.problems += gather.missing
    if not gather.problems:
        gather.problems += _spec_problems(spec)
    if gather.problems:
        raise RecipeError(gather.problems, path)
    return spec


def check_jobs(spec: JobSpec, path: str | Path, *, environ: Mapping[str, str] | None = None) -> CheckedSpec:
    """Check a job spec and its recipes as far as possible without a cluster; return the spec with its jobs.

    Raises:
        RecipeError: The spec or its recipes have mistakes; the message lists all of them.
    """
    gpu, problems = _find_gpu(spec)
    if gpu is not None:
        spec = replace(spec, gpu=gpu.name)  # use the normalized name, by which backends look up instance types
    jobs, recipes, mistakes = _make_jobs(spec)
    backend = backend_of(spec.backend)
    problems += mistakes + _shared_run_folders(jobs) + (backend.problems(jobs) if jobs else [])
    if problems:
        raise RecipeError(problems, path)
    present = os.environ if environ is None else environ
    missing = tuple(
        Problem(join('secrets', name), 'is not set in the environment; export it before submitting')
        for name, source in spec.secrets.items()
        if source is None and not present.get(name)
    )
    return CheckedSpec(spec, backend, tuple(jobs), tuple(recipes), gpu, missing)


def _keep_interpolations(resolved: Resolved) -> list[Problem]:
    """Restore `${oc.env:...}` in recipe overrides, for the nodes to resolve; return a problem for each elsewhere."""
    problems = []
    for where, text in resolved.from_environment.items():
        parent: Any = resolved.values
        for key in where[:-1]:
            parent = parent[key]
        parent[where[-1]] = text
        if where[0] != 'overrides' and (where[0] != 'stages' or where[2:3] != ('overrides',)):
            what = 'contains ${oc.env:...}, whose value would be written to the files of the job in plain text'
            way_out = 'list a secret by its name in secrets, and pass any other value on the command line'
            problems.append(Problem(dotted(where), f'{what}; {way_out}'))
    return problems


def _read_backend(value: Any, gather: Gatherer) -> tuple[str, Any]:
    """Return the backend name and options from `backend:` of a job spec: a name, or a mapping of `name` and options."""
    options = dict(value) if isinstance(value, dict) else {'name': value}
    name = options.pop('name', None)
    if name not in NAMES:
        known = did_you_mean(str(name), NAMES) if name is not None else f'use one of {", ".join(NAMES)}'
        gather.problem('backend.name', f'{name!r} is not a backend; {known}')
        return '', None
    return str(name), build_dataclass(backend_of(str(name)).Options, options, 'backend', gather)


def _spec_problems(spec: JobSpec) -> list[Problem]:
    gather = Gatherer()
    for where, value in (
        ('nodes', spec.nodes),
        ('gpus_per_node', spec.gpus_per_node),
        ('hang_seconds', spec.hang_seconds),
        ('schedule.notice_seconds', spec.schedule.notice_seconds),
        *((f'stages.{name}.nodes', stage.nodes) for name, stage in spec.stages.items()),
    ):
        if isinstance(value, int) and value < 1:
            gather.problem(where, f'{value} is not positive; use a positive integer')
    if spec.price_usd_per_gpu_hour is not None and spec.price_usd_per_gpu_hour < 0:
        gather.problem('price_usd_per_gpu_hour', f'{spec.price_usd_per_gpu_hour} is negative; use 0 or more')
    if spec.restart.max_restarts < 0:
        gather.problem('restart.max_restarts', f'{spec.restart.max_restarts} is negative; use 0 for no restarts')
    if spec.restart.standby and spec.restart.max_restarts == 0:
        gather.problem('restart.standby', 'restarts are turned off by restart.max_restarts: 0; remove one of them')
    for code in spec.restart.on_exit:
        if not code.isdecimal() or not 1 <= int(code) <= 255:
            gather.problem(join('restart.on_exit', code), 'is not an exit status; use 1 to 255')
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
            message = 'use the absolute path on the node as the key, and its source as the value'
            gather.problem(join('mounts', target), f'is not an absolute path; {message}')
    return gather.problems


def _check_recipes(spec: JobSpec, gather: Gatherer) -> None:
    if not spec.stages and spec.recipe is None:
        message = 'is missing; set it to the path of a recipe such as yamls/phase1.yaml, or define stages'
        gather.problem('recipe', message)
    for name, stage in spec.stages.items():
        if re.fullmatch(r'[a-z]([a-z0-9-]*[a-z0-9])?', name) is None:
            gather.problem(join('stages', name), 'is not a valid stage name; use a-z, 0-9 and inner dashes')
        if spec.recipe is None and stage.recipe is None:
            gather.problem(f'stages.{name}.recipe', 'is missing; set it here, or set recipe for all stages')


def _check_variables(spec: JobSpec, gather: Gatherer) -> None:
    """Report invalid names of environment variables, and values in a job spec that look like secrets."""
    for section, variables in (('env', spec.env), ('secrets', spec.secrets)):
        for name in variables:
            if VARIABLE.fullmatch(name) is None:
                gather.problem(join(section, name), 'is not a variable name; use letters, digits and underscores')
            if name.startswith('DIFFUSION_'):
                gather.problem(join(section, name), 'is set by the launcher; use the corresponding key of the spec')
    for name, value in spec.env.items():
        if name in spec.secrets:
            gather.problem(join('env', name), 'is also in secrets; remove one of them')
        elif has_secret_name(name, value) or secret_format(value, name=name):
            message = f'looks like a secret, and would be written in plain text; move {name} to secrets'
            gather.problem(join('env', name), message)


def _find_gpu(spec: JobSpec) -> tuple[GPU | None, list[Problem]]:
    """Return a job spec's GPU model (None for CPUs) and the mistakes in `gpu`, `torch` and `gpus_per_node`."""
    if spec.gpu is None:
        return None, []
    try:
        gpu = find_gpu(spec.gpu, load_gpus(), or_file=False)
    except UserError as error:
        return None, [Problem('gpu', str(error).removeprefix('--gpu: '))]
    try:
        no_kernels = missing_kernels(gpu, spec.torch)
    except UserError as error:
        return gpu, [Problem('torch', str(error))]
    if no_kernels is not None:
        return gpu, [Problem('gpu', f'{no_kernels}, and set torch in the job to the version in its image')]
    if spec.gpus_per_node > gpu.gpus_per_node:
        limit = f'the {gpu.gpus_per_node} GPUs of a machine with {gpu.name}'
        return gpu, [Problem('gpus_per_node', f'{spec.gpus_per_node} is more than {limit}; use more nodes')]
    return gpu, []


def _make_jobs(spec: JobSpec) -> tuple[list[Job], list[Recipe], list[Problem]]:
    """Return the jobs of all stages of a job spec, their recipes, and the mistakes found in these."""
    stages = spec.stages or {'main': JobStage()}
    jobs: list[Job] = []
    recipes: list[Recipe] = []
    mistakes: list[Problem] = []
    for name, stage in stages.items():
        where = join(f'stages.{name}' if spec.stages else '', 'recipe')
        path = stage.recipe or spec.recipe or ''
        overrides = spec.overrides | stage.overrides
        # A later stage starts from the previous stage's weights unless it sets init_from. The previous stage's run
        # folder is known already, although that stage has not run yet.
        if jobs and 'init_from' not in overrides:
            overrides['init_from'] = _run_folder(recipes[-1])
        words = override_words(overrides)
        nodes, limit = stage.nodes or spec.nodes, stage.time_limit or spec.schedule.time_limit
        try:
            # Leave out the job's secrets: only the nodes need their values, not this check.
            environ = {name: value for name, value in os.environ.items() if name not in spec.secrets} | spec.env
            recipe = load_recipe(path, words, environ=environ, set_later=spec.secrets)
            problems = _recipe_problems(recipe, spec, nodes)
        except RecipeError as error:
            mistakes += [Problem(where, f'{path}: {problem}') for problem in error.problems]
            continue
        problems += _variables_not_set(recipe.from_environment, spec)
        mistakes += [Problem(where, f'{path}: {problem}') for problem in problems]
        recipes.append(recipe)
        jobs.append(
            Job(
                name=f'{spec.name}-{name}' if spec.stages else spec.name,
                stage=name,
                recipe=path,
                overrides=words,
                nodes=nodes,
                time_limit_seconds=seconds_of(limit) if limit else None,
                run_dir=recipe.run_place,
                task=recipe.task,
                after=jobs[-1].name if jobs else None,
                spec=spec,
            )
        )
    return jobs, recipes, mistakes


def _variables_not_set(from_environment: Mapping[KeyPath, Interpolation], spec: JobSpec) -> list[Problem]:
    """Return a problem for each environment variable that a recipe needs but the job does not set on its nodes."""
    # Slurm and the local backend pass this process's environment on to the job, so no variable is missing.
    if spec.backend in ('slurm', 'local'):
        return []
    known = {*spec.env, *spec.secrets, 'HOME', 'HOSTNAME', 'LOGNAME', 'PATH', 'PWD', 'SHELL', 'TMPDIR', 'USER'}
    return [
        Problem(dotted(where), f'needs {name}, which the job does not set on its nodes; add {name} to env or secrets')
        for where, text in from_environment.items()
        for name in sorted(set(re.findall(r'\$\{oc\.env:(\w+)\}', text)) - known)
    ]


def _run_folder(recipe: Recipe) -> str:
    """Return the folder or URL of a recipe's run, with `${oc.env:...}` unresolved, for use in another recipe."""
    parts = {key: recipe.from_environment.get((key,)) for key in ('runs_dir', 'name')}
    if not any(parts.values()):
        return recipe.run_place
    return Interpolation('/'.join(text or escaped(getattr(recipe, key)) for key, text in parts.items()))


def _recipe_problems(recipe: Recipe, spec: JobSpec, nodes: int) -> list[Problem]:
    """Return why a valid recipe does not suit a job: its batch size, no autoresume, or missing variables of notify."""
    problems = check_devices(recipe, nodes * spec.gpus_per_node, spec.gpus_per_node)
    if recipe.task == 'train' and spec.restart.max_restarts and not recipe.trainer.get('autoresume'):
        message = 'is off, so a restart would start from scratch; turn it on, or set restart.max_restarts: 0 in the job'
        problems.append(Problem('trainer.autoresume', message))
    for key, name in (('webhook', recipe.notify.webhook), ('command', recipe.notify.command)):
        if name is not None and name not in spec.secrets and name not in spec.env:
            message = f'the job has no variable {name}; add it to secrets in the job'
            problems.append(Problem(f'notify.{key}', message))
    return problems


def _shared_run_folders(jobs: Sequence[Job]) -> list[Problem]:
    """Return a problem for each job that has the same run folder as an earlier job of the spec."""
    problems, owners = [], dict[str, Job]()
    for job in jobs:
        owner = owners.setdefault(job.run_dir, job)
        if owner is not job:
            message = f'saves to {job.run_dir}, like stages.{owner.stage}; set a different overrides.name'
            problems.append(Problem(f'stages.{job.stage}', message))
    return problems
