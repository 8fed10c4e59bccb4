"""`diffusion check --resume`: changed settings and the learning rate of a run before it resumes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from composer.core import Time, Timestamp

from diffusion.callbacks.optimizer_settings import OptimizerSettings, describe_rates, one_batch_earlier
from diffusion.checkpointing.bucket_checkpoints import published_batches
from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_store import list_checkpoints
from diffusion.checkpointing.checkpoint_weights import read_content
from diffusion.config import registry
from diffusion.config.recipe import Recipe
from diffusion.training.resume import compare_with_checkpoint


def describe_resume(recipe: Recipe) -> list[str]:
    """Return lines about a recipe's run before it resumes: checkpoint, changed settings and learning rate.

    Raises:
        UserError: A setting has changed that is fixed for a run.
    """
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
    """Return the learning rates of the last batch of a checkpoint and of the first one after it, as text."""
    state: dict[str, Any] = dict(read_content(checkpoint)['state'])
    now = Timestamp()
    now.load_state_dict(state['timestamp']['Timestamp'])
    settings = dict(state['callbacks'])[OptimizerSettings.__name__]
    schedulers = dict(state.get('schedulers') or {})
    saved = next(iter(schedulers.values()))['_last_lr'][0] if schedulers else settings['groups'][0]['lr']
    rate = _rate(recipe, one_batch_earlier(now), settings['last']['batches_per_epoch'])
    return describe_rates(now.batch.value, last=settings['last']['rate'], saved=float(saved), now=rate)


def _rate(recipe: Recipe, time: Timestamp, batches_per_epoch: int | None) -> float:
    """Return the learning rate of a recipe's first parameter group at a time of its schedule."""
    base = float(registry.keywords('optimizer', recipe.optimizer)['lr'])
    if recipe.scheduler is None:
        return base
    # Composer's schedules read nothing else of a trainer's state.
    state: Any = SimpleNamespace(
        timestamp=time,
        max_duration=Time.from_timestring(str(recipe.trainer['max_duration'])),
        dataloader_len=None if batches_per_epoch is None else Time.from_batch(batches_per_epoch),
    )
    scheduler = registry.build('scheduler', recipe.scheduler)
    return base * scheduler(state, recipe.trainer.get('scale_schedule_ratio', 1.0))
