"""`task: train`: a recipe to a Composer Trainer, and its run."""

import contextlib
import logging
import os
import sys
from typing import Any

from composer import Trainer
from composer.core import Callback, State, TimeUnit
from composer.loggers import Logger, LoggerDestination
from composer.models import ComposerModel
from composer.utils import dist, get_device
from torch.nn.parallel import DistributedDataParallel

from diffusion.callbacks.heartbeat import Heartbeat
from diffusion.callbacks.preemption import Preemption
from diffusion.callbacks.reduce_once import ReduceOnce
from diffusion.callbacks.replaced_samples import ReplacedSamples
from diffusion.callbacks.same_run import SameRun
from diffusion.callbacks.save_now import save_now
from diffusion.checkpointing.checkpoint_store import list_checkpoints
from diffusion.checkpointing.checkpointer import Checkpointer, resume_point
from diffusion.checkpointing.run_folder import RECIPE, find_checkpoint, load_weights, weights_of
from diffusion.config.load import Recipe, to_yaml
from diffusion.config.registry import build
from diffusion.data.cuda_prefetch import AheadLoader
from diffusion.data.latents import LatentsDataset
from diffusion.data.loader import BucketedLoader, as_spec
from diffusion.errors import DataError, UserError
from diffusion.launch import run_lock
from diffusion.loggers.console_lines import ConsoleLines
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.storage.atomic import write_whole
from diffusion.training import components
from diffusion.training.parallelism import parallelism_config, settle_buckets
from diffusion.training.performance import apply_speed, keep_layout, set_backends

log = logging.getLogger(__name__)

OURS = ('autoresume', 'save_interval', 'save_num_checkpoints_to_keep')
"""Keywords of the Trainer that our Checkpointer takes, unless `trainer.save_folder` asks for Composer's own."""


class RecipeKeeper(Callback):
    """Save the resolved recipe beside the checkpoints, so that exporting or resuming elsewhere needs one path."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def fit_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            write_whole(self.recipe.run_dir / RECIPE, to_yaml(self.recipe))


def train(recipe: Recipe) -> Trainer:
    """Run a recipe to its max_duration, from its newest whole checkpoint where `autoresume` finds one.

    Raises:
        UserError: The recipe cannot be run, or another job trains into its folder.
        DataError: Data could not be had, or too much of it is bad.
        Preempted: It was told to stop, and has saved.
    """
    first = os.environ.get('RANK', '0') == '0' and run_lock.HELD not in os.environ
    with run_lock.held(recipe.run_dir) if first else contextlib.nullcontext():
        return _train(recipe)


def _train(recipe: Recipe) -> Trainer:
    trainer = build_trainer(recipe)
    if _is_done(trainer.state):
        log.info('%s: done already, at %s', recipe.run_dir, trainer.state.max_duration)
        return trainer
    try:
        fit(trainer)
    except BaseException:
        try:
            trainer.close()  # loggers send what they have
        except Exception:
            log.exception('while the run was closed after the error below')
        raise
    return trainer


def fit(trainer: Trainer) -> None:
    """Train; where the data ends too early, save what was learned before every rank raises that.

    Raises:
        DataError: Data could not be had, or too much of it is bad.
    """
    try:
        trainer.fit()
    except DataError as error:
        state = trainer.state
        training = state.dataloader is state.train_dataloader
        saved = save_now(state, trainer.logger) if training and state.timestamp.batch.value else None
        if saved is None:
            raise
        raise DataError(f'{error}\n{saved} is saved; the same command goes on from there') from error


def build_trainer(recipe: Recipe) -> Trainer:
    """The Trainer of a recipe, ready to fit."""
    if int(os.environ.get('WORLD_SIZE', '1')) > 1:
        dist.initialize_dist(get_device(recipe.trainer.get('device')), recipe.trainer.get('dist_timeout', 300.0))
    checkpointer = build_checkpointer(recipe)
    model = components.build_model(recipe)
    parts = components.effective_speed(recipe)
    loader = components.build_loader(recipe, 'train', kind=AheadLoader if parts.copy_ahead else BucketedLoader)
    if isinstance(loader.dataset, LatentsDataset) and isinstance(model, LatentDiffusion):
        loader.dataset.check_encoders(model.vae, model.text, train_text_encoder=model.train_text_encoder)
    if recipe.init_from is not None and not _resumes(checkpointer):
        start_from(model, recipe.init_from)
    if recipe.parallelism.activation_checkpointing:
        checkpoint_activations(model)
    strategy = recipe.parallelism.strategy
    apply_speed(model, parts, strategy=strategy, shapes=len({bucket.shape for bucket in loader.dataset.buckets}))
    optimizer = components.build_optimizer(recipe, model)
    keep_layout(optimizer)
    schedulers = None
    if recipe.scheduler is not None:
        schedulers = build('scheduler', recipe.scheduler.name, recipe.scheduler.kwargs)
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        eval_dataloader=as_spec(components.build_loader(recipe, 'eval')) if recipe.eval_streams else None,
        optimizers=optimizer,
        schedulers=schedulers,
        algorithms=components.build_algorithms(recipe),
        callbacks=[*components.build_callbacks(recipe), *_own_callbacks(recipe, loader, checkpointer)],
        loggers=[*components.build_loggers(recipe), *_console(recipe)],
        run_name=recipe.name,
        seed=recipe.seed,
        device_train_microbatch_size=recipe.device_train_microbatch_size,
        parallelism_config=parallelism_config(recipe.parallelism),
        **_trainer_keywords(recipe),
    )
    if isinstance(trainer.state.model, DistributedDataParallel):
        settle_buckets(trainer.state.model)
    deterministic = bool(recipe.trainer.get('deterministic_mode'))
    set_backends(parts, on_gpu=components.on_gpu(recipe), deterministic=deterministic)
    return trainer


def build_checkpointer(recipe: Recipe) -> Checkpointer | None:
    """What saves and resumes the run; None where `trainer.save_folder` leaves that to Composer."""
    if 'save_folder' in recipe.trainer:
        return None
    resume = resume_point(recipe.run_dir) if recipe.trainer.get('autoresume') else None
    if resume is None and (present := list_checkpoints(recipe.run_dir)):
        raise UserError(
            f'name: {recipe.run_dir} holds {present[0].name} and {len(present) - 1} more checkpoints of another run; '
            'go on from it with trainer.autoresume: true, or give this run another name'
        )
    return Checkpointer(
        recipe.run_dir,
        save_interval=recipe.trainer.get('save_interval', '1ep'),
        num_checkpoints_to_keep=recipe.trainer.get('save_num_checkpoints_to_keep', -1),
        sharded=recipe.parallelism.checkpoints == 'sharded',
        resume=resume,
    )


def checkpoint_activations(model: ComposerModel) -> None:
    """Let a model's denoiser recompute its blocks in the backward pass."""
    if not isinstance(model, LatentDiffusion):
        raise UserError('parallelism.activation_checkpointing: only models with a denoiser have blocks to recompute')
    model.denoiser.enable_gradient_checkpointing()


def start_from(model: ComposerModel, place: str) -> None:
    """Give a model the training weights of another run; optimizer and clock stay fresh."""
    checkpoint = find_checkpoint(place)
    weights, _ = weights_of(checkpoint, 'training')
    load_weights(model, weights, f'init_from: {checkpoint}')
    log.info('weights of %s', checkpoint)


def _own_callbacks(recipe: Recipe, loader: BucketedLoader, checkpointer: Checkpointer | None) -> list[Callback]:
    """What every run has."""
    identity = components.run_identity(recipe, loader)
    same_run = SameRun(identity, allow_data_change=recipe.allow_data_change)
    found: list[Callback] = [RecipeKeeper(recipe), same_run, Preemption(), ReplacedSamples(loader.tally), Heartbeat()]
    if components.effective_speed(recipe).reduce_once:
        found.append(ReduceOnce())
    return found if checkpointer is None else [*found, checkpointer]


def _trainer_keywords(recipe: Recipe) -> dict[str, Any]:
    """The recipe's keywords of the Trainer, without those of our Checkpointer."""
    composers_own = 'save_folder' in recipe.trainer
    keywords = {key: value for key, value in recipe.trainer.items() if composers_own or key not in OURS}
    return {'progress_bar': sys.stderr.isatty()} | keywords


def _console(recipe: Recipe) -> list[LoggerDestination]:
    """A progress bar is for somebody who looks; a log file gets a line now and then."""
    shown = recipe.trainer.get('progress_bar', sys.stderr.isatty()) or recipe.trainer.get('log_to_console', False)
    return [] if shown or 'console_lines' in recipe.loggers else [ConsoleLines()]


def _is_done(state: State) -> bool:
    """Whether a run was resumed at its end; a job that is started once too often is no failure."""
    end = state.max_duration
    return end is not None and end.unit != TimeUnit.DURATION and state.timestamp.get(end.unit) >= end


def _resumes(checkpointer: Checkpointer | None) -> bool:
    # Composer looks for its own checkpoints in its own way; weights loaded for nothing are the lesser evil.
    return checkpointer is not None and checkpointer.resume is not None
