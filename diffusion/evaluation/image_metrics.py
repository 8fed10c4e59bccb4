"""Evaluator `image_metrics`: generate images with one or more settings of guidance, and measure their quality."""

import itertools
import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from composer.core.precision import get_precision_context
from composer.utils import dist
from torch import Tensor

from diffusion.config.image_metrics import IMAGE_METRICS, JUDGE, image_metrics_problems
from diffusion.config.language_model import JudgeConfig, RewriteConfig
from diffusion.config.sampling_checks import guidances_of, swept
from diffusion.errors import UserError
from diffusion.evaluation.compared_images import SCORES
from diffusion.evaluation.comparison_result import BenchmarkScore
from diffusion.evaluation.evaluated_checkpoint import (
    EvaluatedCheckpoint,
    EvaluationResult,
    RaiseTogether,
    from_rank_zero,
    gather_rows,
)
from diffusion.evaluation.feature_networks import FeatureNetwork
from diffusion.evaluation.generated_images import GeneratedImages, Sampling
from diffusion.evaluation.geneval import GenEval, geneval_score
from diffusion.evaluation.geneval_rules import check_prompt
from diffusion.evaluation.image_scores import ImageScore
from diffusion.evaluation.judge import Judge
from diffusion.evaluation.metrics import DISTANCES, MetricNetwork, build_networks
from diffusion.evaluation.prompts import OWN, Prompt, caption_prompts, categories, own_prompts, read_prompts
from diffusion.evaluation.reference_images import DatasetImages, FolderImages, ReferenceImages, reference_features
from diffusion.evaluation.rendered_text import TextReader, check_text, image_scores, text_scores
from diffusion.evaluation.rewriting import GivenPrompts, Rewriter
from diffusion.runs.evaluation_claims import EVALUATIONS
from diffusion.storage.atomic import atomic_folder, write_atomically

log = logging.getLogger(__name__)

AREA_TOLERANCE = 1.25
"""Areas of generated and reference images must differ by less than this factor, as those of buckets do."""


class ImageMetrics:
    """Evaluator of generated images: FID, KID, CMMD, CLIP score and others, at one or more settings of guidance.

    All ranks generate and measure; results do not depend on the number of ranks. Every image is kept as a PNG with its
    prompt, seed, guidance and checkpoint; after an interruption, only missing images are generated. The checkpoint's
    metrics are those of the first guidance at the first scale; those of the other settings are listed separately.
    Several numbers of steps, schedulers or shifts are a sweep too: all combinations are measured.

    Args:
        metrics: Names from `diffusion.config.image_metrics.IMAGE_METRICS`.
        prompts: A `.txt`, `.csv`, `.tsv` or `.jsonl` file with prompts, a `.json` or the folder of CVTG-2K, or `own`,
            this package's 120 prompts; null means captions from the evaluation data.
        prompt_column: Column or key of the prompts; null means automatic detection.
        num_images: Number of images to generate, for the first prompts of a prompt file; null means one per prompt or,
            with captions, one per evaluation image.
        images_per_prompt: Number of images per prompt, with different seeds.
        guidance_scales: Guidance scales; 1 turns guidance off.
        guidance_rescale: Strength of rescaling the guided prediction, from 0 to 1.
        guidance: Name and settings of the guidance, such as {name: apg}; null means classifier-free guidance. A list of
            several, such as intervals, is a sweep: each is measured at all guidance scales.
        snr_shift: Shift of a flow's sampling times toward noise, or a list; null means the objective's.
        reference: Folder of reference images; null means the images of the evaluation data.
        num_references: Number of reference images, evenly spaced in the data; null means all.
        reference_features: Folder where features of the reference images are kept; runs may share it. Null means
            `evaluations/reference` in the run's folder.
        networks: Sources that override those in `diffusion.config.image_metrics.NETWORKS`, by name: a local path or
            `ORG/NAME@COMMIT`.
        num_inference_steps: Steps of the noise scheduler per image, or a list.
        noise_scheduler: Name from `diffusion.config.sampling_checks.SCHEDULERS`, or a list.
        negative_prompt: Prompt that guidance moves away from.
        size: Height and width of the images in pixels; null means the model's own.
        seed: Seed of the first image; each following image uses the next seed.
        batch_size: Images per batch. Changing it generates all images again, because it affects their last bits.
        rewrite: Language model that rewrites the prompts, or null. Scores and `layout` use the original prompts.
        judge: Vision-language model that answers the questions of `dpg`, `tifa` and `judge_score`, or null.
        layout: Also write the images in the folder layout of an external scorer: `geneval` or `t2i_compbench`.
    """

    def __init__(
        self,
        *,
        metrics: Sequence[str] = ('fid', 'clip_score'),
        prompts: str | None = None,
        prompt_column: str | None = None,
        num_images: int | None = None,
        images_per_prompt: int = 1,
        guidance_scales: Sequence[float] = (7.5,),
        guidance_rescale: float = 0.0,
        guidance: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        snr_shift: float | Sequence[float] | None = None,
        reference: str | None = None,
        num_references: int | None = None,
        reference_features: str | None = None,
        networks: Mapping[str, str] | None = None,
        num_inference_steps: int | Sequence[int] = 50,
        noise_scheduler: str | Sequence[str] = 'ddim',
        negative_prompt: str = '',
        size: Sequence[int] | None = None,
        seed: int = 0,
        batch_size: int = 32,
        rewrite: RewriteConfig | None = None,
        judge: JudgeConfig | None = None,
        layout: str | None = None,
    ) -> None:
        settings = {
            **{'metrics': metrics, 'networks': networks, 'guidance_scales': guidance_scales, 'size': size},
            **{'num_images': num_images, 'images_per_prompt': images_per_prompt, 'num_references': num_references},
            **{'batch_size': batch_size, 'layout': layout, 'prompts': prompts, 'snr_shift': snr_shift, 'judge': judge},
            **{'num_inference_steps': num_inference_steps, 'noise_scheduler': noise_scheduler},
        }
        for key, problem in image_metrics_problems(settings).items():
            raise UserError(f'{key}: {problem}')
        judged = [name for name in metrics if IMAGE_METRICS[name].network == JUDGE]
        self.metrics = [name for name in metrics if name not in judged]
        self.judge = Judge(judge, judged) if judge is not None and judged else None
        self.prompts, self.prompt_column = prompts, prompt_column
        self.num_images, self.images_per_prompt = num_images, images_per_prompt
        sweep = {
            'guidance': guidances_of({'guidance': guidance, 'guidance_scales': guidance_scales}),
            'guidance_scale': list(guidance_scales),
            'num_inference_steps': swept(num_inference_steps),
            'noise_scheduler': swept(noise_scheduler),
            'snr_shift': swept(snr_shift),
        }
        self.sweep = [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]
        self.reference, self.num_references = reference, num_references
        self.reference_features = reference_features
        self.sources = dict(networks or {})
        self.sampling = {
            'guidance_rescale': guidance_rescale,
            'negative_prompt': negative_prompt,
            'size': None if size is None else (size[0], size[1]),
            'seed': seed,
            'batch_size': batch_size,
        }
        self.rewriter = None if rewrite is None else Rewriter(rewrite)
        self.layout = layout

    def __call__(self, checkpoint: EvaluatedCheckpoint) -> EvaluationResult:
        """Generate images, keep them in the checkpoint's folder, and measure them; a collective call."""
        prompts = self._prompts(checkpoint)
        texts = [each.text for each in prompts]
        self._check_count(len(texts))
        given = GivenPrompts(texts, texts) if self.rewriter is None else self.rewriter(texts)
        if self.judge is not None:
            self.judge.check(prompts)
        device = checkpoint.model.device
        for prompt in prompts if 'geneval_hf' in self.metrics else ():
            check_prompt(prompt.text, prompt.metadata)
        if any(IMAGE_METRICS[name].network == 'rapidocr' for name in self.metrics):
            check_text(prompts)
        built: dict[str, MetricNetwork] = {}
        with checkpoint.raise_together('image_metrics: the networks were not loaded'):
            built = {name: each.to(device) for name, each in build_networks(self.metrics, self.sources).items()}
        extractors = {name: each for name, each in built.items() if isinstance(each, FeatureNetwork)}
        scorers = {name: each for name, each in built.items() if not isinstance(each, FeatureNetwork)}
        references: dict[str, Tensor] = {}
        if extractors:
            with checkpoint.raise_together('image_metrics: reference images'):
                if self.reference is None:
                    images: ReferenceImages = DatasetImages(checkpoint.dataset, self.num_references)
                else:
                    images = FolderImages(Path(self.reference), self.num_references)
                self._check_area(checkpoint, images)
            cache = Path(self.reference_features or checkpoint.run_dir / EVALUATIONS / 'reference')
            references = reference_features(cache, images, extractors, checkpoint)
        sweep = []
        for setting in self.sweep:
            sampling = Sampling(**setting, **self.sampling)
            generated = GeneratedImages.below(checkpoint.folder, given.texts, sampling, checkpoint.label)
            generated.given = given
            features, scores = self._measure(checkpoint, generated, prompts, extractors, scorers)
            benchmarks = self._benchmarks(scores, prompts)
            if 'rapidocr' in scores:
                by_metric = image_scores(scores.pop('rapidocr'))
                scores |= {name: rows for name, rows in by_metric.items() if name in self.metrics}
            values = self._values(features, scores, references, checkpoint.raise_together)
            folder = generated.folder.relative_to(checkpoint.run_dir).as_posix()
            details = {**setting, 'metrics': values, 'folder': folder}
            if isinstance(reader := scorers.get('rapidocr'), TextReader):
                details['ocr'] = reader.engine
            if self.judge is not None:
                judged = self.judge.scores(checkpoint, generated, prompts, self.images_per_prompt)
                benchmarks |= {name: each.score for name, each in judged.items()}
                scores |= {name: torch.tensor(each.images) for name, each in judged.items()}
                details['unusable'] = {name: [each.unusable, each.answers] for name, each in judged.items()}
            with checkpoint.raise_together('image_metrics: scores'):
                if scores and dist.get_global_rank() == 0:
                    path, by_image = generated.folder / SCORES, {}
                    for name, rows in scores.items():
                        by_image[name] = [None if math.isnan(each) else each for each in rows.tolist()]
                    earlier = json.loads(path.read_bytes())['scores'] if path.exists() else {}
                    write_atomically(path, json.dumps({'prompts': texts, 'scores': earlier | by_image}))
            if scores and not sweep:
                details['examples'] = {key: examples(rows.tolist(), prompts, generated) for key, rows in scores.items()}
            groups = categories(prompts)
            by_category = {
                name: {group or 'none': float(rows[indices].double().mean()) for group, indices in groups.items()}
                for name, rows in scores.items()
            }
            for name, benchmark in benchmarks.items():
                values[name] = benchmark.score
                kinds = {kind or 'none': found for kind, found in benchmark.kinds.items()}
                by_category[name] = {kind: mean for kind, (mean, _) in kinds.items()}
                by_kind = {kind: interval for kind, (_, interval) in kinds.items()}
                details.setdefault('intervals', {})[name] = {'': benchmark.interval, **by_kind}
            if several := {name: each for name, each in by_category.items() if len(each) > 1}:
                details['categories'] = several
            sweep.append(details)
            with checkpoint.raise_together(f'image_metrics: {self.layout}'):
                if self.layout is not None and dist.get_global_rank() == 0:
                    LAYOUTS[self.layout](generated, prompts, self.images_per_prompt, generated.folder / self.layout)
        source = (self.prompts or 'captions of the evaluation data') + given.note
        about = {'images': len(texts), 'prompts': source}
        return EvaluationResult(dict(sweep[0]['metrics']), {**about, 'guidance': sweep})

    def _prompts(self, checkpoint: EvaluatedCheckpoint) -> list[Prompt]:
        if self.prompts is None:
            size = int(checkpoint.dataset.size)
            count = size if self.num_images is None else -(-self.num_images // self.images_per_prompt)
            found = caption_prompts(checkpoint.dataset, count)
        else:
            found = own_prompts() if self.prompts == OWN else read_prompts(Path(self.prompts), self.prompt_column)
        repeated = [prompt for prompt in found for _ in range(self.images_per_prompt)]
        if self.num_images is not None and self.num_images > len(repeated):
            raise UserError(
                f'num_images: {self.num_images} is more than the {len(repeated)} images of {len(found)} prompts with '
                f'images_per_prompt: {self.images_per_prompt}; lower num_images or raise images_per_prompt'
            )
        return repeated[: self.num_images]

    def _check_count(self, count: int) -> None:
        if dist.get_global_rank() != 0:
            return
        for name in self.metrics:
            if count < (needed := IMAGE_METRICS[name].reliable_from):
                advice = 'compare it only with values for the same number of images, and generate %d or more to publish'
                log.warning(
                    f'%s of %d images is biased upward by the small number: {advice} values', name, count, needed
                )

    def _check_area(self, checkpoint: EvaluatedCheckpoint, images: ReferenceImages) -> None:
        """Raise UserError if the areas of the first reference image and the generated images differ too much."""
        grid = checkpoint.model.latent_grid
        size = [side * grid.cell for side in grid.shape(self.sampling['size'])[1:]]
        height, width = images[0].shape[1:]
        ratio = size[0] * size[1] / (height * width)
        if not 1 / AREA_TOLERANCE < ratio < AREA_TOLERANCE:
            raise UserError(
                f'the reference images have {height} x {width} pixels and the generated ones {size[0]} x {size[1]}; '
                'metrics would measure the difference in sharpness: use reference images of that size, or set size'
            )

    def _measure(
        self,
        checkpoint: EvaluatedCheckpoint,
        generated: GeneratedImages,
        prompts: Sequence[Prompt],
        extractors: Mapping[str, FeatureNetwork],
        scorers: Mapping[str, ImageScore | GenEval | TextReader],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return features [N, D] by network, and scores [N] or counts [N, 4] by scorer; a collective call."""
        features: dict[str, list[Tensor]] = {name: [] for name in extractors}
        scores: dict[str, list[Tensor]] = {name: [] for name in scorers}
        indices: list[int] = []
        with checkpoint.raise_together('image_metrics'), get_precision_context(checkpoint.precision):
            for own, images in checkpoint.batches_of(generated):
                indices += own
                # Metrics are defined for networks in single precision.
                with torch.autocast(checkpoint.model.device.type, enabled=False):
                    for name, network in extractors.items():
                        features[name].append(network.features(images).cpu())
                    for name, scorer in scorers.items():
                        asked, files = [prompts[each] for each in own], [*map(generated.path, own)]
                        if isinstance(scorer, GenEval):
                            found = scorer.scores(images, [each.metadata for each in asked], files)
                        elif isinstance(scorer, TextReader):
                            found = scorer.counts(images, asked, files)
                        else:
                            found = scorer.scores(images, [each.text for each in asked])
                        scores[name].append(found.cpu().view(len(own), -1))
        return (
            {name: gather_rows(rows, indices) for name, rows in features.items()},
            {name: gather_rows(rows, indices).squeeze(1) for name, rows in scores.items()},
        )

    def _benchmarks(self, scores: Mapping[str, Tensor], prompts: Sequence[Prompt]) -> dict[str, BenchmarkScore]:
        found = {}
        if 'geneval_hf' in scores:
            found['geneval_hf'] = geneval_score(scores['geneval_hf'], prompts)
        if 'rapidocr' in scores:
            found |= text_scores(scores['rapidocr'], prompts)
        return {name: each for name, each in found.items() if name in self.metrics}

    def _values(
        self,
        features: Mapping[str, Tensor],
        scores: Mapping[str, Tensor],
        references: Mapping[str, Tensor],
        raise_together: RaiseTogether,
    ) -> dict[str, float]:
        """Return the metrics by name; rank 0 computes them for all ranks. A collective call."""

        def compute() -> dict[str, float]:
            values = {}
            for name in self.metrics:
                if name in DISTANCES:
                    network = IMAGE_METRICS[name].network
                    values[name] = DISTANCES[name](features[network], references[network])
                else:
                    values[name] = float(scores[name].double().mean())
            return values

        return from_rank_zero(compute, raise_together)


EXAMPLES = 3
"""Maximum number of prompts per category that are listed with their worst image, and with their best image."""


def examples(scores: Sequence[float], prompts: Sequence[Prompt], images: GeneratedImages) -> dict[str, Any]:
    """Return, by category, one image of each prompt with the lowest (`worst`) or the highest (`best`) mean score.

    It is the prompt's worst or best image, given by `file` (relative to the folder of the images), `prompt` and
    `score`. Images whose score is NaN are left out.
    """
    found: dict[str, Any] = {}
    for category, indices in categories(prompts).items():
        by_prompt: dict[str, list[int]] = {}
        for index in indices:
            if not math.isnan(scores[index]):
                by_prompt.setdefault(prompts[index].text, []).append(index)
        if not by_prompt:
            continue
        order = sorted(by_prompt.values(), key=lambda each: math.fsum(scores[index] for index in each) / len(each))
        worst, best = order[:EXAMPLES], order[EXAMPLES:][-EXAMPLES:][::-1]
        found[category or 'none'] = {
            name: [
                {'file': str(images.path(index).relative_to(images.folder)), 'prompt': prompts[index].text}
                | {'score': scores[index]}
                for index in (choose(each, key=lambda index: scores[index]) for each in group)
            ]
            for name, group, choose in (('worst', worst, min), ('best', best, max))
        }
    return found


def write_geneval(images: GeneratedImages, prompts: Sequence[Prompt], per_prompt: int, folder: Path) -> None:
    """Write images as `00000/samples/0000.png` with `00000/metadata.jsonl`, for `evaluate_images.py` of GenEval.

    Source: https://github.com/djghosh13/geneval. The prompts must come from its `evaluation_metadata.jsonl`.

    Args:
        images: The images, `per_prompt` (4 in GenEval) consecutive ones for each prompt.
        prompts: One prompt per image.

    Raises:
        UserError: The prompts have no metadata, or an image is missing here because another node generated it.
    """
    with _replaced(folder) as unfinished:
        for index, prompt in enumerate(prompts):
            if 'include' not in prompt.metadata:
                raise UserError(
                    f'layout: the prompt {prompt.text!r} has no GenEval metadata; use evaluation_metadata.jsonl '
                    'from its authors as prompts'
                )
            target = unfinished / f'{index // per_prompt:05d}'
            if index % per_prompt == 0:
                (target / 'samples').mkdir(parents=True)
                (target / 'metadata.jsonl').write_text(json.dumps(prompt.metadata), encoding='utf-8')
            _copy(images.path(index), target / 'samples' / f'{index % per_prompt:04d}.png')


def write_t2i_compbench(images: GeneratedImages, prompts: Sequence[Prompt], per_prompt: int, folder: Path) -> None:
    """Write images as `samples/PROMPT_000012.png` for T2I-CompBench, whose scorers read the prompt from the name.

    Source: https://github.com/Karine-Huang/T2I-CompBench. Arguments and errors as for `write_geneval`.
    """
    with _replaced(folder) as unfinished:
        (unfinished / 'samples').mkdir()
        for index, prompt in enumerate(prompts):
            name = re.sub(r'[/\x00-\x1f]', ' ', prompt.text).strip()
            # File names have at most 255 bytes; the benchmark's prompts are far shorter.
            name = name.encode()[:230].decode(errors='ignore')
            _copy(images.path(index), unfinished / 'samples' / f'{name}_{index:06d}.png')


LAYOUTS: dict[str, Callable[[GeneratedImages, Sequence[Prompt], int, Path], None]] = {
    'geneval': write_geneval,
    't2i_compbench': write_t2i_compbench,
}


def _replaced(folder: Path) -> AbstractContextManager[Path]:
    """Remove the folder of an earlier evaluation; return a context manager that creates it again atomically."""
    if folder.exists():
        shutil.rmtree(folder)
    return atomic_folder(folder)


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
    except FileNotFoundError as error:
        what = f'layout: {source} is not on this node; write layouts on one node, or into a folder that all nodes share'
        raise UserError(what) from error
