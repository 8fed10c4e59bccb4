"""Checkpoint passed to evaluators, its results file, and the exchange of results between ranks."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from composer.core import Precision
from composer.utils import dist
from torch import Tensor

from diffusion.data.streams import BucketedDataset
from diffusion.evaluation.generated_images import GeneratedImages
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.runs.evaluation_claims import EVALUATIONS
from diffusion.storage.atomic import write_atomically

Result = TypeVar('Result')
RaiseTogether = Callable[[str], AbstractContextManager[None]]
"""Function that takes a name for messages and returns a context manager, which raises any rank's error on all ranks."""


def gather_rows(parts: Sequence[Tensor], indices: Sequence[int]) -> Tensor:
    """Return the rows of all ranks on every rank, ordered by index; a collective call.

    Args:
        parts: This rank's rows on the CPU, as tensors [n, D] with any n; empty if it has no rows.
        indices: Global index of each of this rank's rows; over all ranks, indices are 0, 1, 2, ...
    """
    own = torch.cat(list(parts)) if parts else None
    if dist.get_world_size() == 1:
        assert own is not None
        gathered: list[tuple[list[int], Tensor | None]] = [(list(indices), own)]
    else:
        gathered = dist.all_gather_object((list(indices), own))
    where = torch.tensor([index for order, _ in gathered for index in order])
    assert sorted(where.tolist()) == list(range(len(where))), 'each row belongs to one rank'
    return torch.cat([rows for _, rows in gathered if rows is not None])[where.argsort()]


def from_rank_zero(compute: Callable[[], Result], raise_together: RaiseTogether) -> Result:
    """Call a function on rank 0; return its (small, picklable) result on all ranks; a collective."""
    answer: list[Result | None] = [None]
    with raise_together('rank 0'):
        if dist.get_global_rank() == 0:
            answer = [compute()]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]  # type: ignore[return-value]


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """Checkpoint to evaluate, on all ranks.

    Args:
        model: The checkpoint's model on the device, in evaluation mode.
        name: The checkpoint's name: `ba` and the number of batches, such as `ba1600`.
        weights: Which weights the model has, `ema` or `training`.
        sharded: True if the denoiser is sharded over the ranks, which must then run the same forward passes.
        on_progress: Called after each batch of images, to show that the rank makes progress.
        should_stop: Returns True if this process received a stop signal and the evaluation must end early.
        raise_together: `diffusion.checkpointing.rank_agreement.raise_on_all_ranks`; the default is for a single rank.
    """

    model: LatentDiffusion
    dataset: BucketedDataset
    run_dir: Path
    name: str
    weights: str
    precision: Precision = Precision.FP32
    sharded: bool = False
    on_progress: Callable[[], None] = lambda: None
    should_stop: Callable[[], bool] = lambda: False
    raise_together: RaiseTogether = lambda where: nullcontext()

    @property
    def label(self) -> str:
        return f'{self.name}, {self.weights} weights'

    @property
    def folder(self) -> Path:
        return self.run_dir / EVALUATIONS / self.name

    def batches_of(self, images: GeneratedImages) -> Iterator[tuple[range, list[Tensor]]]:
        """Yield indices and images of this rank's batches (`own_batches`); a collective if the model is sharded."""
        for batch in images.own_batches(self.model, together=self.sharded, should_stop=self.should_stop):
            yield batch
            self.on_progress()


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics of an evaluator, and further entries for the results file, such as the metrics of each guidance scale."""

    metrics: dict[str, float]
    details: dict[str, Any] = field(default_factory=dict)


def results_of(
    checkpoint: EvaluatedCheckpoint, metrics: Mapping[str, float], details: Mapping[str, Any], *, seconds: float
) -> dict[str, Any]:
    about = {'checkpoint': checkpoint.name, 'batch': int(checkpoint.name[2:]), 'weights': checkpoint.weights}
    return {**about, 'metrics': dict(metrics), **details, 'seconds': seconds}


def write_results(run_dir: Path, name: str, results: Mapping[str, Any]) -> None:
    """Write the results of a checkpoint to `evaluations/NAME.json`.

    If the file has earlier results of the same weights, metrics that were not measured again stay in it, and so do
    guidance scales that were evaluated with other image settings. Earlier results of other weights are replaced.
    """
    path = run_dir / EVALUATIONS / f'{name}.json'
    merged = dict(results)
    earlier = parse_results(path.read_bytes() if path.exists() else None, str(path))
    if earlier is not None and earlier.get('weights') == results.get('weights'):
        merged['metrics'] = earlier.get('metrics', {}) | results.get('metrics', {})
        sweep = {each['folder']: each for each in earlier.get('guidance', [])}
        for each in results.get('guidance', []):
            before = sweep.get(each['folder'], {'metrics': {}})
            by_metric = ('metrics', 'categories', 'intervals', 'examples', 'unusable')
            kept = {key: before.get(key, {}) | each.get(key, {}) for key in by_metric if key in before or key in each}
            sweep[each['folder']] = before | each | kept
        merged = earlier | merged | {'guidance': list(sweep.values())}
    write_atomically(path, json.dumps(merged | {'finished': time.time()}, indent=2) + '\n')


def parse_results(content: bytes | None, where: str) -> dict[str, Any] | None:
    """Parse the content of a results file; None if there is none, if it is not JSON (logged), or not an object."""
    if content is None:
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        log.warning('%s: is not JSON (%s); it is ignored', where, error)
        return None
    return found if isinstance(found, dict) else None
