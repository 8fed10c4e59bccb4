"""Changes when a run resumes: compare the recipe with the checkpoint's, and describe the learning rate."""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from composer.core import Time, Timestamp

from diffusion.callbacks.optimizer_settings import OptimizerSettings, describe_rates, one_batch_earlier
from diffusion.callbacks.run_recipe import ResumedRecipe
from diffusion.checkpointing.bucket_checkpoints import published_batches
from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_store import RECIPE, list_checkpoints
from diffusion.checkpointing.checkpoint_weights import has_averages, read_content
from diffusion.checkpointing.rank_agreement import run_on_rank_zero
from diffusion.config import registry
from diffusion.config.interpolation import dotted
from diffusion.config.load import Recipe, overlap, plain_values, to_yaml
from diffusion.config.resume_rules import (
    Change,
    Effect,
    changes,
    format_value,
    read_history,
    recipe_values,
    refused,
    rule_of,
)
from diffusion.config.yaml_files import parse_yaml, read_yaml
from diffusion.errors import UserError

log = logging.getLogger(__name__)


def compare_with_checkpoint(recipe: Recipe, checkpoint: Path | None) -> ResumedRecipe:
    """Return the changes since the recipe of a checkpoint, after checking that all are allowed; a collective.

    Ranks other than 0 get no changes. Rank 0 gets none, with a warning, if the recipe was not saved.

    Args:
        checkpoint: The checkpoint to resume from; None if Composer has loaded one of its own checkpoints.

    Raises:
        UserError: A setting that must stay the same within a run has changed. Raised on every rank.
    """
    return run_on_rank_zero(lambda: _compare(recipe, checkpoint), 'resume') or ResumedRecipe()


def check_saver(trainer: Mapping[str, Any], run_dir: Path) -> None:
    """Check that `trainer.save_folder` is still the one with which the run saved its checkpoints; a collective.

    Raises:
        UserError: `trainer.save_folder` was set, changed or removed since, so that the run would not find its
            checkpoints and would start again at batch 0.
    """
    run_on_rank_zero(lambda: _check_saver(trainer, run_dir), 'resume')


def _check_saver(trainer: Mapping[str, Any], run_dir: Path) -> None:
    folder = trainer.get('save_folder')
    way_out = 'set it back to resume, or use another name for a new run'
    if folder is not None and (present := list_checkpoints(run_dir)):
        raise UserError(
            f'trainer.save_folder: {folder}, but the checkpoints of this run are in {run_dir}, such as '
            f'{present[0].name}; {way_out}'
        )
    place = run_dir / RECIPE
    if not trainer.get('autoresume') or not place.is_file():
        return
    before = (read_yaml(place).get('trainer') or {}).get('save_folder')
    # A local folder only counts if it has files. A remote folder always counts: it is not listed, and may have
    # checkpoints.
    if before not in (None, folder) and ('://' in before or any(Path(before).glob('*'))):
        raise UserError(
            f'trainer.save_folder: {format_value(folder)}, but {place} says that this run saves its checkpoints to '
            f'{before}; {way_out}'
        )


def _compare(recipe: Recipe, checkpoint: Path | None) -> ResumedRecipe:
    """Compare a recipe with the checkpoint's recipe, or with the one in the run's folder if the checkpoint has none."""
    of_run = recipe.run_dir / RECIPE
    of_checkpoint = checkpoint / RECIPE if checkpoint is not None and checkpoint.is_dir() else of_run
    place = next((path for path in (of_checkpoint, of_run) if path.is_file()), None)
    if place is None:
        log.warning(
            '%s: there is no %s next to the checkpoint, so its model, optimizer and other settings cannot be compared '
            'with this recipe',
            *(checkpoint or recipe.run_dir, RECIPE),
        )
        return ResumedRecipe()
    saved = recipe_values(read_yaml(place))
    if saved.unknown:
        log.warning(
            '%s: written by another version; settings that this version does not know are not compared: %s',
            *(place, ', '.join(saved.unknown)),
        )
    known = [change for change in _changes(recipe, saved.values) if change.key not in saved.unknown]
    # Some changes are only allowed before weight averaging starts: find out from the checkpoint if it has started.
    # Composer's checkpoints cannot be read here (`checkpoint` is None), so such changes are rejected.
    starts = any(change.rule.effect is Effect.BEFORE_AVERAGING for change in known)
    fixed = refused(known, averaging=starts and (checkpoint is None or has_averages(read_content(checkpoint)['state'])))
    if fixed:
        where = checkpoint or place
        lines = [
            f'{each.key}: {format_value(each.saved)} in the checkpoint, {format_value(each.now)} now '
            f'({each.rule.reason})'
            for each in fixed
        ]
        raise UserError(
            f'{where}: the run was trained with other settings, which cannot change on resume; set them back, or start '
            'a new run under another name, which can take these weights with init_from:\n  ' + '\n  '.join(lines)
        )
    history = of_run if of_run.is_file() else place
    return ResumedRecipe(tuple(known), read_history(history.read_text(encoding='utf-8')))


def _changes(recipe: Recipe, saved: Mapping[str, Any]) -> list[Change]:
    """Return the changes between a recipe's saved values and its current values.

    A value from an environment variable is compared by the variable's name. If the recipe contained the literal value
    before, it counts as unchanged as long as the variable has that value.
    """
    by_name = changes(saved, recipe_values(parse_yaml(to_yaml(recipe))).values)
    by_value = {change.key for change in changes(saved, recipe_values(plain_values(recipe)).values)}
    variables = [dotted(path).partition('[')[0] for path in recipe.from_environment]
    from_variable = {each.key for each in by_name if any(overlap(each.key, name) for name in variables)}
    found = [each for each in by_name if each.key not in from_variable - by_value]
    fixed = [each for each in variables if rule_of(each).effect is Effect.FIXED]
    if fixed:
        log.warning('values set by environment variables are not compared on resume: %s', ', '.join(fixed))
    return found


def schedule_of(recipe_text: str) -> dict[str, Any]:
    """Return, by key, the settings in a recipe that determine the learning rate schedule, except the base rate."""
    values = recipe_values(parse_yaml(recipe_text)).values
    keys = ('max_duration', 'scale_schedule_ratio', 'step_schedulers_every_batch')
    return {'scheduler': values['scheduler'], **{key: values['trainer'][key] for key in keys}}


def describe_resume(recipe: Recipe) -> list[str]:
    """Describe in lines of text how a run would resume: checkpoint, changed settings and learning rate."""
    if 'save_folder' in recipe.trainer:
        return ['resume: not compared, since Composer finds the checkpoint in trainer.save_folder when the run starts']
    place = recipe.run_url or recipe.run_dir
    saved = published_batches(recipe.run_url) if recipe.run_url else list_checkpoints(recipe.run_dir)
    if not saved:
        return [f'resume: {place} has no checkpoint, so the run would start at batch 0']
    checkpoint = find_checkpoint(place)
    changes = compare_with_checkpoint(recipe, checkpoint).changes
    lines = [f'resume: from {checkpoint}, {len(changes) or "no"} changed setting{"" if len(changes) == 1 else "s"}']
    lines += [f'resume: {change} ({change.rule.effect.value}: {change.rule.reason})' for change in changes]
    return [*lines, f'resume: {_rates(recipe, checkpoint)}']


def _rates(recipe: Recipe, checkpoint: Path) -> str:
    """Return as text the learning rates of a checkpoint's last batch and of the first batch after it."""
    state: dict[str, Any] = dict(read_content(checkpoint)['state'])
    now = Timestamp()
    now.load_state_dict(state['timestamp']['Timestamp'])
    settings = dict(state['callbacks'])[OptimizerSettings.__name__]
    schedulers = dict(state.get('schedulers') or {})
    saved = next(iter(schedulers.values()))['_last_lr'][0] if schedulers else settings['groups'][0]['lr']
    rate = _rate(recipe, one_batch_earlier(now), settings['last']['batches_per_epoch'])
    return describe_rates(now.batch.value, last=settings['last']['rate'], saved=float(saved), now=rate)


def _rate(recipe: Recipe, time: Timestamp, batches_per_epoch: int | None) -> float:
    base = float(registry.keywords('optimizer', recipe.optimizer)['lr'])
    if recipe.scheduler is None:
        return base
    # Composer's schedules only read these attributes of a trainer's state.
    state: Any = SimpleNamespace(
        timestamp=time,
        max_duration=Time.from_timestring(str(recipe.trainer['max_duration'])),
        dataloader_len=None if batches_per_epoch is None else Time.from_batch(batches_per_epoch),
    )
    scheduler = registry.build('scheduler', recipe.scheduler)
    return base * scheduler(state, recipe.trainer.get('scale_schedule_ratio', 1.0))
