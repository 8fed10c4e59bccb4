"""Checks of the arguments of `diffusion generate` and `diffusion export`.

They import no torch, so that a wrong path or number is reported within a second instead of after 15.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusion.algorithms.power_function import gamma_of_width
from diffusion.checkpointing.run_folder import find_checkpoint, recipe_of_checkpoint
from diffusion.config import noise_schedulers
from diffusion.config.load import load
from diffusion.config.sampling_checks import is_flow, model_problem, num_train_timesteps, sampling_problems
from diffusion.config.sampling_limits import seeds_problem
from diffusion.errors import UserError
from diffusion.storage.writable import check_writable

OPTIONS = {'num_inference_steps': '--steps', 'guidance_scale': '--guidance', 'noise_scheduler': '--scheduler'}
"""Options of `diffusion generate`, by the key of the section `generate` that they replace."""


def is_export(folder: Path) -> bool:
    """Return True if a folder is a pipeline of diffusers, as `diffusion export` writes it."""
    return (folder / 'model_index.json').is_file()


def check_generate(args: argparse.Namespace) -> None:
    """Check the arguments of `diffusion generate`.

    Raises:
        UserError: There is no such run, checkpoint or export, or an option is out of range or contradicts another.
    """
    source = Path(args.source)
    check_writable(args.out or 'generated', '--out')
    if (problem := seeds_problem(args.seed, len(args.prompts))) is not None:
        raise UserError(f'--seed: {problem}')
    given = {'num_inference_steps': args.steps, 'guidance_scale': args.guidance, 'noise_scheduler': args.scheduler}
    given = {key: value for key, value in given.items() if value is not None}
    if is_export(source):
        if args.weights is not None:
            raise UserError(f'--weights: {source} is an export, which holds one set of weights; remove --weights')
        problems = _problems_of_export(given, _scheduler_config(source))
    else:
        recipe = load(recipe_of_checkpoint(find_checkpoint(source)), task='generate')
        if (problem := model_problem(recipe)) is not None:
            raise UserError(f'model.name: {problem}')
        problems = sampling_problems(vars(recipe.generate) | given, num_train_timesteps(recipe), flow=is_flow(recipe))
    for key, problem in problems.items():
        raise UserError(f'{OPTIONS.get(key, f"generate.{key}")}: {problem}')


def check_export(
    place: str | Path,
    out: str | Path,
    *,
    weights: str | None = None,
    ema_width: float | None = None,
    at: int | None = None,
    merge: bool = False,
) -> Path:
    """Check the arguments of `diffusion export`, and return the checkpoint.

    Args:
        place: A checkpoint or a run's folder.
        out: The output folder.
        weights: Weights that are chosen explicitly; None for the default.
        ema_width: Width of a post-hoc EMA to export.
        at: Batch of the post-hoc EMA.
        merge: Add the LoRA of the run to the weights.

    Raises:
        UserError: The folder cannot be created, there is no such checkpoint, or settings contradict each other.
    """
    out = Path(out)
    check_writable(out.parent, '--out')
    if out.is_file():
        raise UserError(f'--out: {out} is a file; give a folder that does not exist yet')
    if out.exists() and any(out.iterdir()):
        raise UserError(f'--out: {out} is not empty; remove it or give another folder')
    if ema_width is not None and weights is not None:
        raise UserError('--ema-width: it reconstructs weights from snapshots; remove --weights')
    if ema_width is None and at is not None:
        raise UserError(f'--at: batch {at} needs --ema-width; without it, give the checkpoint of that batch')
    if ema_width is not None:
        try:
            gamma_of_width(ema_width)
        except UserError as error:
            raise UserError(f'--ema-width: {error}') from error
    checkpoint = find_checkpoint(place)
    recipe = load(recipe_of_checkpoint(checkpoint), task='generate')
    if merge and recipe.lora is None:
        raise UserError(f'--merge: {checkpoint} has no LoRA, so its weights are whole; remove --merge')
    return checkpoint


def _scheduler_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of an exported pipeline's noise scheduler; empty if it cannot be read."""
    path = folder / 'scheduler' / 'scheduler_config.json'
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
    except (FileNotFoundError, ValueError):  # diffusers reports a damaged export
        return {}
    return content if isinstance(content, dict) else {}


def _problems_of_export(given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """Return error messages for sampling settings that an exported pipeline cannot use, by key."""
    flow, name = bool(config.get('use_flow_sigmas')), given.get('noise_scheduler')
    problems = sampling_problems(given, config.get('num_train_timesteps'), flow=flow)
    if flow and name is not None and noise_schedulers.class_name(name, flow=True).startswith('FlowMatch'):
        problems['noise_scheduler'] = f'{name!r} does not fit into an exported pipeline; use dpm++ or unipc'
    return problems
