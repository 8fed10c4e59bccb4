"""`task: evaluate`: measure the validation losses of a checkpoint and run the evaluators that its recipe names."""

import json
import logging
import time
from typing import Any

from composer import Trainer
from composer.models import ComposerModel
from composer.utils import dist

from diffusion.checkpointing.checkpoint_weights import Weights, load_weights, weights_of
from diffusion.checkpointing.claims import claimed_checkpoint
from diffusion.checkpointing.run_mirror import RunMirror
from diffusion.config.load import Recipe
from diffusion.config.registry import build
from diffusion.data.loader import to_data_spec
from diffusion.loggers.progress_line import ProgressLine, has_terminal
from diffusion.storage.atomic import write_atomically
from diffusion.training import components

log = logging.getLogger(__name__)


def trained_model(recipe: Recipe, which: Weights | None = None) -> tuple[ComposerModel, Weights]:
    """Build a recipe's model with the weights of its checkpoint.

    Args:
        recipe: The recipe; its `checkpoint` is the checkpoint to load, null for the run's latest.
        which: Averaged or training weights; None loads averaged weights if the checkpoint has them.

    Returns:
        The model, and which weights were loaded.
    """
    with claimed_checkpoint(recipe.checkpoint or recipe.run_place, recipe.task) as checkpoint:
        weights, which = weights_of(checkpoint, which)
        model = components.build_model(recipe)
        if recipe.lora is not None:
            components.add_lora(recipe, model)
        # The weights may be mapped from the file until they are copied here.
        load_weights(model, weights, str(checkpoint))
    return model, which


def evaluate(recipe: Recipe) -> dict[str, float]:
    """Evaluate a recipe's checkpoint, and write `evaluation.json` into the run's folder.

    The averaged weights are evaluated if the checkpoint has them, else the training weights.

    Returns:
        The metrics by name.
    """
    components.check_device(recipe)
    began = time.time()
    model, which = trained_model(recipe)
    loader = components.build_loader(recipe, 'eval')
    # The other keywords of the recipe's Trainer are for training.
    kept: dict[str, Any] = {key: recipe.trainer[key] for key in ('device', 'precision') if key in recipe.trainer}
    loggers = [ProgressLine()] if has_terminal(recipe.trainer.get('progress_bar', True)) else []
    kept |= {'progress_bar': False, 'loggers': loggers}
    # Composer warns about a Trainer without an optimizer. This one never steps, so it allocates no state.
    optimizer = components.build_optimizer(recipe, model)
    trainer = Trainer(model=model, eval_dataloader=to_data_spec(loader), optimizers=optimizer, seed=recipe.seed, **kept)
    trainer.eval()
    metrics = {name: float(metric.compute()) for name, metric in trainer.state.eval_metrics['eval'].items()}
    if dist.get_global_rank() == 0:
        for component in recipe.evaluators.values():
            evaluator = build('evaluator', component)
            metrics |= evaluator(model, loader.dataset, recipe.run_dir)
        write_atomically(recipe.run_dir / 'evaluation.json', json.dumps({'weights': which} | metrics, indent=2) + '\n')
        if recipe.run_url is not None:
            RunMirror(recipe.run_dir, recipe.run_url).push(since=began)
        for name, value in metrics.items():
            print(f'{name:32s} {value:.4f}')
    dist.barrier()
    return metrics
