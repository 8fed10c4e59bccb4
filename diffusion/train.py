"""`task: train`: a recipe to a Composer Trainer, and its run."""

import logging
import sys
from pathlib import Path
from typing import Any

from composer import Trainer
from composer.core import Callback, State, TimeUnit
from composer.loggers import Logger, LoggerDestination
from composer.models import ComposerModel
from composer.utils import dist

from diffusion import building
from diffusion.checkpointing.runs import LATEST, RECIPE, find_checkpoint, load_weights, weights_of
from diffusion.config import Recipe, to_yaml
from diffusion.data.latents import LatentsDataset
from diffusion.data.loader import as_spec
from diffusion.loggers.console_lines import ConsoleLines
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.registry import build

log = logging.getLogger(__name__)

CHECKPOINT_NAME = 'ba{batch}-rank{rank}.pt'


class RecipeKeeper(Callback):
    """Save the resolved recipe beside the checkpoints, so that exporting or resuming elsewhere needs one path."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def fit_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            write_text(self.recipe.run_dir / RECIPE, to_yaml(self.recipe))


def train(recipe: Recipe) -> Trainer:
    """Run a recipe to its max_duration, from its latest checkpoint where `autoresume` finds one."""
    trainer = build_trainer(recipe)
    if _is_done(trainer.state):
        log.info('%s: done already, at %s', recipe.run_dir, trainer.state.max_duration)
    else:
        trainer.fit()
    return trainer


def build_trainer(recipe: Recipe) -> Trainer:
    """The Trainer of a recipe, ready to fit."""
    model = building.build_model(recipe)
    loader = building.build_loader(recipe, 'train')
    if isinstance(loader.dataset, LatentsDataset) and isinstance(model, LatentDiffusion):
        loader.dataset.check_vae(model.vae)
    if recipe.init_from is not None and not _resumes(recipe):
        start_from(model, recipe.init_from)
    schedulers = None
    if recipe.scheduler is not None:
        schedulers = build('scheduler', recipe.scheduler.name, recipe.scheduler.kwargs)
    return Trainer(
        model=model,
        train_dataloader=loader,
        eval_dataloader=as_spec(building.build_loader(recipe, 'eval')) if recipe.eval_streams else None,
        optimizers=building.build_optimizer(recipe, model),
        schedulers=schedulers,
        algorithms=building.build_algorithms(recipe),
        callbacks=[*building.build_callbacks(recipe), RecipeKeeper(recipe)],
        loggers=[*building.build_loggers(recipe), *_console(recipe)],
        run_name=recipe.name,
        seed=recipe.seed,
        device_train_microbatch_size=recipe.device_train_microbatch_size,
        parallelism_config=building.parallelism_config(recipe),
        **(_defaults(recipe) | recipe.trainer),
    )


def start_from(model: ComposerModel, place: str) -> None:
    """Give a model the training weights of another run; optimizer and clock stay fresh."""
    checkpoint = find_checkpoint(place)
    weights, _ = weights_of(checkpoint, 'training')
    load_weights(model, weights, f'init_from: {checkpoint}')
    log.info('weights of %s', checkpoint)


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f'.{path.name}.unfinished')
    unfinished.write_text(text, encoding='utf-8')
    unfinished.replace(path)


def _defaults(recipe: Recipe) -> dict[str, Any]:
    """Keywords of the Trainer that a recipe may override."""
    return {
        'save_folder': str(recipe.run_dir),
        'save_filename': CHECKPOINT_NAME,
        'save_latest_filename': 'latest-rank{rank}.pt',
        'progress_bar': sys.stderr.isatty(),
        # A run that was killed between two checkpoints does the batches in between again, and saves them again.
        'save_overwrite': True,
        'load_strict_model_weights': True,
    }


def _console(recipe: Recipe) -> list[LoggerDestination]:
    """A progress bar is for somebody who looks; a log file gets a line now and then."""
    shown = recipe.trainer.get('progress_bar', sys.stderr.isatty()) or recipe.trainer.get('log_to_console', False)
    return [] if shown or 'console_lines' in recipe.loggers else [ConsoleLines()]


def _is_done(state: State) -> bool:
    """Whether a run was resumed at its end; a job that is started once too often is no failure."""
    end = state.max_duration
    return end is not None and end.unit != TimeUnit.DURATION and state.timestamp.get(end.unit) >= end


def _resumes(recipe: Recipe) -> bool:
    return bool(recipe.trainer.get('autoresume')) and (recipe.run_dir / LATEST).exists()
