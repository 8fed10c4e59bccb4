"""`task: train`: build a recipe's Composer Trainer and run it."""

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from composer import ComposerModel, Trainer
from composer.callbacks import CheckpointSaver
from composer.core import Callback, State, TimeUnit
from composer.loggers import LoggerDestination
from composer.utils import dist, get_device
from torch.nn.parallel import DistributedDataParallel

from diffusion.algorithms.finite_weights import check_before_saves, check_weights
from diffusion.callbacks.compile_cache import CompileCache
from diffusion.callbacks.evaluation_results import EvaluationResults
from diffusion.callbacks.in_run_evaluation import InRunEvaluation
from diffusion.callbacks.loss_guard import LossGuard
from diffusion.callbacks.nan_guard import NaNGuard
from diffusion.callbacks.optimizer_settings import OptimizerSettings
from diffusion.callbacks.preemption import Preemption, save_now
from diffusion.callbacks.reduce_once import ReduceOnce
from diffusion.callbacks.run_recipe import RecipeKeeper, SameRun
from diffusion.callbacks.status_updates import Heartbeat, RunStatus
from diffusion.callbacks.stragglers import Stragglers
from diffusion.checkpointing.checkpoint_store import RECIPE
from diffusion.checkpointing.checkpointer import Checkpointer
from diffusion.checkpointing.rank_agreement import raise_on_all_ranks
from diffusion.checkpointing.run_storage import RunStorage, run_storage
from diffusion.checkpointing.tiers.node_tier import NodeTier, open_tiers
from diffusion.checkpointing.tiers.tier_restore import find_resume_point, stored_batches
from diffusion.config import registry
from diffusion.config.checkpointing import keep_rules
from diffusion.config.load import Recipe, hide_environment, to_yaml
from diffusion.config.model_checks import copies_reference
from diffusion.config.recipe import SPEED_PARTS, Component
from diffusion.data.bad_samples import ReplacedSamples
from diffusion.data.cuda_prefetch import CudaPrefetchLoader
from diffusion.data.latents import LatentsDataset
from diffusion.data.loader import BucketedLoader, to_data_spec
from diffusion.errors import DataError, UserError
from diffusion.loggers.progress_lines import ConsoleLines, ProgressLine, has_terminal
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.runs.heartbeats import collective_timeout
from diffusion.training import components
from diffusion.training.initial_weights import start_from
from diffusion.training.parallelism import (
    average_gradients_on_cpu,
    parallelism_config,
    set_group_timeouts,
    settle_buckets,
)
from diffusion.training.performance import EncodeTogether, apply_speed, keep_layout, reduce_step_overhead, set_backends
from diffusion.training.resume import check_saver, compare_with_checkpoint, schedule_of
from diffusion.training.training_run import TrainingRun

log = logging.getLogger(__name__)

COMPILED = 'compiled'
"""Name of the folder for compiled code in a run's folder."""
CHECKPOINTER_KEYWORDS = ('autoresume', 'save_interval', 'save_num_checkpoints_to_keep')
"""Keys of `trainer` for this package's Checkpointer; if `trainer.save_folder` is set, they go to Composer instead."""


def train(recipe: Recipe) -> Trainer:
    """Train a recipe to its max_duration, and return its Trainer, which the caller must close.

    With `trainer.autoresume`, training resumes from the run's newest complete checkpoint, if it has one.

    Raises:
        UserError: The recipe cannot be run, or another job is training in the run's folder.
        DataError: Data could not be read, or too much of it is bad.
        Preempted: A signal stopped the run, which saved a checkpoint first.
    """
    run = TrainingRun(recipe.run_place, recipe.notify, partial(hide_environment, recipe))
    with run.held():
        return _train(recipe, run)


def _train(recipe: Recipe, run: TrainingRun) -> Trainer:
    """Build a recipe's Trainer, train, and return the Trainer; call it inside `run.held()`."""
    trainer = build_trainer(recipe)
    run.connect(trainer.state.callbacks)
    if run.attempt is not None:
        run.attempt.gpu = torch.cuda.get_device_name() if trainer.state.device.name == 'gpu' else 'cpu'
    if _is_done(trainer.state):
        log.info('%s: already trained to %s', recipe.run_dir, trainer.state.max_duration)
        return trainer
    try:
        check_start(recipe, trainer.state)
        fit(trainer)
    except BaseException:
        # Only close the engine, which flushes the loggers and logs errors from closing them. Trainer.close() also has a
        # barrier for all ranks: after a bug on one rank, that rank would wait there and the others in the backward
        # pass. The bug would look like a hang, with its traceback printed only after the timeout.
        trainer.engine.close()
        raise
    return trainer


def fit(trainer: Trainer) -> None:
    """Run a Trainer to the end of training; if data cannot be read, save a checkpoint before raising the error.

    Raises:
        DataError: Data could not be read, or too much of it is bad. Raised on every rank.
    """
    try:
        trainer.fit()
    except DataError as error:
        # The training loader raises the same error in the same batch on every rank, between two steps, so all ranks can
        # save together. Errors from the evaluation loader, or before the first step, are raised without a save.
        state = trainer.state
        training = state.dataloader is state.train_dataloader
        saved = save_now(state, trainer.logger) if training and state.timestamp.batch.value else None
        if saved is None:
            raise
        raise DataError(f'{error}\n{saved} is saved; run the same command again to resume from it') from error


def build_trainer(recipe: Recipe) -> Trainer:
    """Build a recipe's Trainer with model, data and callbacks, ready for `fit`."""
    components.check_device(recipe)
    # Initialize distributed now instead of in the Trainer: the checkpointer and datasets communicate before it is
    # built.
    if int(os.environ.get('WORLD_SIZE', '1')) > 1:
        dist.initialize_dist(get_device(recipe.trainer.get('device')), dist_timeout(recipe.trainer))
    text = to_yaml(recipe)
    checkpointer = build_checkpointer(recipe, text)
    resume = None if checkpointer is None else checkpointer.resume
    # Before building anything expensive, compare the recipe with that of the checkpoint.
    keeper = RecipeKeeper(recipe.run_dir / RECIPE, text)
    if resume is None:
        check_saver(recipe.trainer, recipe.run_dir)
    else:
        keeper.resumed = compare_with_checkpoint(recipe, resume)
    model = components.build_model(recipe)
    parts = components.effective_speed(recipe)
    if os.environ.get('RANK', '0') == '0':
        for part in SPEED_PARTS:
            if getattr(recipe.speed, part) is True and not getattr(parts, part):
                log.warning('speed.%s: has no effect without a GPU', part)
    loader = _train_loader(recipe, model, copy_ahead=bool(parts.copy_ahead))
    # If Composer saves the checkpoints, `resume` is None here; if the Trainer later resumes from one, it replaces
    # these initial weights.
    if recipe.initial_weights is not None and (resume is None or copies_reference(recipe)):
        start_from(model, recipe.initial_weights)
    if copies_reference(recipe) and isinstance(model, LatentDiffusion):
        model.keep_reference()
    if recipe.lora is not None:
        components.add_lora(recipe, model)
    if recipe.parallelism.activation_checkpointing:
        if not isinstance(model, LatentDiffusion):
            raise UserError(
                'parallelism.activation_checkpointing: only models with a denoiser have blocks to recompute; use false'
            )
        model.denoiser.enable_gradient_checkpointing()
    strategy = recipe.parallelism.strategy
    apply_speed(model, parts, strategy=strategy, shapes=len({bucket.shape for bucket in loader.dataset.buckets}))
    optimizer = components.build_optimizer(recipe, model)
    keep_layout(optimizer)
    together = [] if parts.encode_batch_size is None else [EncodeTogether(parts.encode_batch_size)]
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        eval_dataloader=to_data_spec(components.build_loader(recipe, 'eval')) if recipe.eval_streams else None,
        optimizers=optimizer,
        schedulers=registry.build('scheduler', recipe.scheduler) if recipe.scheduler is not None else None,
        algorithms=[*together, *components.build_all('algorithm', recipe.algorithms, recipe.run_dir)],
        callbacks=[
            # Heartbeat comes first: it must update its file before callbacks that save a checkpoint and then raise.
            Heartbeat(),
            *with_guard(components.build_all('callback', recipe.callbacks, recipe.run_dir), recipe.run_dir),
            keeper,
            OptimizerSettings(optimizer, schedule=schedule_of(text)),
            SameRun(components.run_identity(recipe, loader), allow_data_change=recipe.allow_data_change),
            Preemption(),
            ReplacedSamples(loader.tally),
            RunStatus(recipe.run_place),
            *_in_run_evaluation(recipe),
            EvaluationResults(recipe.run_dir, recipe.run_url),
            Stragglers(),
            *([ReduceOnce()] if parts.reduce_once else []),
            *([CompileCache(recipe.run_dir / COMPILED)] if parts.compile and parts.compile_cache else []),
            *([checkpointer] if checkpointer is not None else []),
        ],
        loggers=[
            *components.build_all('logger', recipe.loggers, recipe.run_dir),
            *_console(recipe.trainer, recipe.loggers),
        ],
        run_name=recipe.name,
        seed=recipe.seed,
        device_train_microbatch_size=recipe.device_train_microbatch_size,
        parallelism_config=parallelism_config(recipe.parallelism),
        **_trainer_keywords(recipe.trainer),
    )
    if isinstance(model, LatentDiffusion):
        # Move the frozen parts: FSDP has only moved the sharded weights to the GPU.
        model.place(trainer.state.device.tensor_to_device(torch.empty(0)).device)
    set_group_timeouts(dist_timeout(recipe.trainer))
    for saver in trainer.state.callbacks:
        if isinstance(saver, CheckpointSaver) and not isinstance(saver, Checkpointer):
            check_before_saves(saver)
    reduce_step_overhead(trainer)
    average_gradients_on_cpu(trainer.state.model)
    if checkpointer is None and trainer.state.timestamp.batch.value:
        # The Trainer's constructor looks for Composer's checkpoint and loads it, so compare the recipe only now.
        try:
            keeper.resumed = compare_with_checkpoint(recipe, None)
        except BaseException:
            trainer.close()
            raise
    if isinstance(trainer.state.model, DistributedDataParallel):
        settle_buckets(trainer.state.model)
    deterministic = bool(recipe.trainer.get('deterministic_mode'))
    set_backends(parts, on_gpu=components.on_gpu(recipe.trainer), deterministic=deterministic)
    return trainer


def _train_loader(recipe: Recipe, model: ComposerModel, *, copy_ahead: bool) -> BucketedLoader:
    """Build the loader of the training data; check that stored latents suit the model's frozen encoders."""
    loader = components.build_loader(recipe, 'train', kind=CudaPrefetchLoader if copy_ahead else BucketedLoader)
    if isinstance(loader.dataset, LatentsDataset) and isinstance(model, LatentDiffusion):
        loader.dataset.check_encoders(
            model.vae, model.text, train_text_encoder=model.train_text_encoder, mask_padding=model.ignores_padding
        )
        if model.image_encoder is not None:
            loader.dataset.check_features(model.image_encoder, token_side=model.token_side)
            model.use_stored_features()
    return loader


def build_checkpointer(recipe: Recipe, text: str) -> Checkpointer | None:
    """Build the callback that saves and resumes the run, or return None if `trainer.save_folder` makes Composer save.

    Raises:
        UserError: The run's folder has checkpoints, but `trainer.autoresume` is off.
    """
    if 'save_folder' in recipe.trainer:
        return None
    storage = run_storage(recipe.run_url or recipe.run_dir)
    storage.open()
    tiers: list[tuple[NodeTier, str]] = []
    if recipe.checkpointing.tiers is not None:
        begun = bool(stored_batches(storage))
        tiers = open_tiers(recipe.checkpointing.tiers, storage.run_id, text, begun=begun)
    opened = [tier for tier, _ in tiers]
    resume = find_resume_point(storage, opened) if recipe.trainer.get('autoresume') else None
    if resume is None:
        check_unused(storage)
    return Checkpointer(
        storage,
        save_interval=recipe.trainer.get('save_interval', '1ep'),
        keep=keep_rules(recipe.checkpointing, recipe.trainer),
        sharded=recipe.parallelism.checkpoints == 'sharded',
        asynchronous=recipe.checkpointing.asynchronous,
        resume=resume,
        recipe_text=text,
        tiers=tiers,
    )


def check_start(recipe: Recipe, state: State) -> None:
    """Raise UserError if the weights at the start of training are NaN or infinite; a collective."""
    if state.timestamp.batch.value:
        where = str(state.load_path or f'batch {state.timestamp.batch.value}')
        check_weights(state, where, 'to resume from an earlier checkpoint, move this one away')
    else:
        where = (
            'the initial weights' if recipe.initial_weights is None else f'init_from: {recipe.initial_weights.source}'
        )
        check_weights(state, where, 'start from other weights')


def with_guard(callbacks: Sequence[Callback], run_dir: Path) -> list[Callback]:
    """Return the callbacks, with a `NaNGuard` added if they have neither a `NaNGuard` nor a (stricter) `LossGuard`."""
    guarded = any(isinstance(each, LossGuard | NaNGuard) for each in callbacks)
    return [*callbacks, *([] if guarded else [NaNGuard(folder=str(run_dir))])]


def check_unused(storage: RunStorage) -> None:
    """Raise UserError if a run that is not resuming already has checkpoints; a collective."""
    with raise_on_all_ranks(storage.place):
        if dist.get_global_rank() == 0 and (present := storage.list_batches()):
            raise UserError(
                f'name: {storage.place} holds ba{present[0]} and {len(present) - 1} more checkpoints of another run; '
                'resume it with trainer.autoresume: true, or use another name for this run'
            )


def _in_run_evaluation(recipe: Recipe) -> list[Callback]:
    if recipe.evaluators_interval is None:
        return []
    return [
        InRunEvaluation(
            {key: registry.build('evaluator', each) for key, each in recipe.evaluators.items()},
            every=recipe.evaluators_interval,
            run_dir=recipe.run_dir,
            sharded=recipe.parallelism.strategy != 'ddp',
            raise_together=raise_on_all_ranks,
        )
    ]


def _trainer_keywords(trainer: Mapping[str, Any]) -> dict[str, Any]:
    composer_saves = 'save_folder' in trainer
    keywords = {key: each for key, each in trainer.items() if composer_saves or key not in CHECKPOINTER_KEYWORDS}
    return keywords | {'progress_bar': False, 'dist_timeout': dist_timeout(trainer)}


def dist_timeout(trainer: Mapping[str, Any]) -> float:
    """Return the timeout for collectives in seconds: `trainer.dist_timeout`, or a time above the watchdog's limits."""
    return trainer.get('dist_timeout') or collective_timeout()


def _console(trainer: Mapping[str, Any], loggers: Mapping[str, Component]) -> list[LoggerDestination]:
    """Build the progress logger: a status line in a terminal, else log lines; none if another one is set."""
    if trainer.get('log_to_console') or 'console_lines' in loggers:
        return []
    return [ProgressLine() if has_terminal(trainer.get('progress_bar', True)) else ConsoleLines()]


def _is_done(state: State) -> bool:
    """Return True if the loaded checkpoint has reached `max_duration`: restarting a finished job then just succeeds."""
    end = state.max_duration
    return end is not None and end.unit != TimeUnit.DURATION and state.timestamp.get(end.unit) >= end
