"""`task: evaluate`: measure the validation losses of a checkpoint and run the evaluators in the recipe."""

import functools
import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from composer import Trainer
from composer.models import ComposerModel
from composer.utils import dist, get_device
from torch import Tensor

from diffusion.algorithms.post_hoc_ema import reconstruct_average
from diffusion.algorithms.power_function import SNAPSHOT_FOLDER
from diffusion.algorithms.tread import TREAD
from diffusion.checkpointing.checkpoint_lookup import claimed_checkpoint, download_checkpoint, run_of_checkpoint
from diffusion.checkpointing.checkpoint_weights import Weights, load_weights, weights_of
from diffusion.checkpointing.rank_agreement import raise_on_all_ranks
from diffusion.checkpointing.run_mirror import RunMirror, try_to_push
from diffusion.config.load import Recipe
from diffusion.config.registry import build
from diffusion.data.loader import to_data_spec
from diffusion.errors import UserError
from diffusion.evaluation.evaluated_checkpoint import EvaluatedCheckpoint, results_of, write_results
from diffusion.evaluation.result_lines import earlier_results, result_lines
from diffusion.evaluation.retrieval import SAMPLES
from diffusion.loggers.progress_lines import ProgressLine, has_terminal
from diffusion.models.frozen_parts import evaluating
from diffusion.models.guidance import Autoguidance, Guidance
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.runs.evaluation_claims import EVALUATIONS
from diffusion.storage.atomic import write_atomically
from diffusion.storage.places import files_of_run, is_url
from diffusion.training import components

log = logging.getLogger(__name__)

MIN_TIMEOUT_SECONDS = 1800.0
"""Minimum timeout of collectives: the other ranks may wait for a rank that generates one more batch of images."""


class TrainedModel(NamedTuple):
    """Model with a checkpoint's weights, which are `ema` or `training`, and the checkpoint's name, such as `ba1600`."""

    model: ComposerModel
    weights: Weights
    checkpoint: str


def trained_model(recipe: Recipe, which: Weights | None = None) -> TrainedModel:
    """Build a recipe's model and load the weights of its `checkpoint`, or of the run's latest checkpoint.

    Args:
        which: Averaged or training weights; None loads averaged weights if the checkpoint has them.
    """
    with claimed_checkpoint(recipe.checkpoint or recipe.run_place, recipe.task) as checkpoint:
        weights, which = weights_of(checkpoint, which)
        model = components.build_model(recipe)
        if recipe.lora is not None:
            components.add_lora(recipe, model)
        # Copy the tensors while the file is open, since they may be memory-mapped.
        load_weights(model, weights, str(checkpoint))
        for algorithm in recipe.algorithms.values():
            if algorithm.name == 'tread':  # for sparse guidance; evaluation and sampling use all tokens otherwise
                TREAD(**algorithm.kwargs).install(model)
        if isinstance(model, LatentDiffusion):
            run = recipe.run_url or str(run_of_checkpoint(checkpoint))
            model.weak_weights = functools.partial(weak_weights, run)
        return TrainedModel(model, which, checkpoint.name)


def weak_weights(run: str, guidance: Guidance) -> dict[str, Tensor]:
    """Return the weights of autoguidance's weak denoiser, by name in the model, from a run's folder or URL.

    Raises:
        UserError: The run has no such checkpoint or no snapshots.
    """
    assert isinstance(guidance, Autoguidance)
    if guidance.ema_width is not None:
        folder = run_of_checkpoint(download_checkpoint(run, [SNAPSHOT_FOLDER])) if is_url(run) else Path(run)
        return reconstruct_average(folder, guidance.ema_width, at=guidance.batch).tensors
    with claimed_checkpoint(f'{run}/ba{guidance.batch}', 'autoguidance') as checkpoint:
        weights, _ = weights_of(checkpoint)
        # Copy the tensors while the file is open, since they may be memory-mapped.
        return {name: each.clone() for name, each in weights.items() if name.startswith('denoiser.')}


def evaluate(recipe: Recipe) -> dict[str, float]:
    """Evaluate a recipe's checkpoint on all ranks, write its results into the run's folder, and return the metrics.

    `evaluations/ba1600.json` contains a checkpoint's results, and `evaluation.json` the metrics of the last evaluation.
    Averaged weights are evaluated if the checkpoint has them, else the training weights.
    """
    components.check_device(recipe)
    began = time.time()
    timeout = max(MIN_TIMEOUT_SECONDS, recipe.trainer.get('dist_timeout', 0.0))
    dist.initialize_dist(get_device(recipe.trainer.get('device')), timeout)
    model, which, name = trained_model(recipe)
    loader = components.build_loader(recipe, 'eval')
    # Pass only these of the recipe's Trainer arguments: the others are for training.
    kept: dict[str, Any] = {key: recipe.trainer[key] for key in ('device', 'precision') if key in recipe.trainer}
    loggers = [ProgressLine()] if has_terminal(recipe.trainer.get('progress_bar', True)) else []
    kept |= {'progress_bar': False, 'loggers': loggers}
    # Composer warns about a Trainer without an optimizer. This optimizer never steps, so it allocates no state.
    optimizer = components.build_optimizer(recipe, model)
    trainer = Trainer(model=model, eval_dataloader=to_data_spec(loader), optimizers=optimizer, seed=recipe.seed, **kept)
    trainer.eval()
    losses = {name: float(metric.compute()) for name, metric in trainer.state.eval_metrics['eval'].items()}
    measured: dict[str, float] = {}
    details: dict[str, Any] = {}
    checkpoint = EvaluatedCheckpoint(
        cast(LatentDiffusion, model),  # type checked above
        loader.dataset,
        recipe.run_dir,
        name,
        which,
        trainer.state.precision,
        raise_together=raise_on_all_ranks,
    )
    with evaluating(model):
        for key, component in recipe.evaluators.items():
            if not isinstance(model, LatentDiffusion):
                raise UserError(f'evaluators.{key}: {recipe.model.name} does not generate images from prompts')
            result = build('evaluator', component)(checkpoint)
            measured |= result.metrics
            details |= result.details
    metrics = losses | measured
    if dist.get_global_rank() == 0:
        results = results_of(checkpoint, measured, details, seconds=time.time() - began) | {'losses': losses}
        write_results(recipe.run_dir, name, results)
        write_atomically(recipe.run_dir / 'evaluation.json', json.dumps({'weights': which} | metrics, indent=2) + '\n')
        if recipe.run_url is not None:
            try_to_push(RunMirror(recipe.run_dir, recipe.run_url), since=began)
        print('\n'.join(describe_evaluation(recipe, checkpoint, results)))
    dist.barrier()
    return metrics


def describe_evaluation(recipe: Recipe, checkpoint: EvaluatedCheckpoint, results: Mapping[str, Any]) -> list[str]:
    """Return the lines to print about an evaluation: its metrics, its files, and the command that shows all of them."""
    earlier: list[dict[str, Any]] = []
    with suppress(UserError, OSError):  # a store that does not answer must not hide the results
        earlier = earlier_results(files_of_run(recipe.run_place), results['batch'], results['weights'])
    found = [
        ('results', f'{EVALUATIONS}/{checkpoint.name}.json'),
        ('generated images', f'{EVALUATIONS}/{checkpoint.name}'),
        *([('generated and real images', SAMPLES)] if 'retrieval_top1' in results['metrics'] else []),
    ]
    place = recipe.run_place
    lines = [(label, f'{place}/{path}') for label, path in found if (recipe.run_dir / path).exists()]
    return [
        f'{checkpoint.label} of {place}:',
        *result_lines(results, earlier),
        *(f'{label:32s} {path}' for label, path in lines),
        f'{"all evaluations of the run":32s} diffusion report {place}',
    ]
