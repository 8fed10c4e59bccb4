"""Names of image metrics and their networks, and checks of the evaluator's settings, without importing torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from diffusion.config.sampling_checks import guidance_problem
from diffusion.config.schema import MISSING, did_you_mean


@dataclass(frozen=True)
class MetricInfo:
    """Properties of an image metric: its network (a key of `NETWORKS`), and whether lower or higher values are better.

    Args:
        reliable_from: Minimum number of images; with fewer, bias exceeds the usual differences between checkpoints.
    """

    network: str
    better: Literal['lower', 'higher'] = 'lower'
    reliable_from: int = 1


JUDGE = 'judge'
"""Value of `MetricInfo.network` for metrics that a vision-language model computes."""
IMAGE_METRICS: dict[str, MetricInfo] = {
    'fid': MetricInfo('inception', reliable_from=2048),
    'kid': MetricInfo('inception'),
    'clip_fid': MetricInfo('clip_fid', reliable_from=512),
    'cmmd': MetricInfo('cmmd'),
    'dino_mmd': MetricInfo('dino'),
    'precision': MetricInfo('inception', 'higher'),
    'recall': MetricInfo('inception', 'higher'),
    'efficientnet_distance': MetricInfo('efficientnet', reliable_from=1280),
    'clip_score': MetricInfo('clip_score', 'higher'),
    'pick_score': MetricInfo('pick_score', 'higher'),
    'hpsv3': MetricInfo('hpsv3', 'higher'),
    'hpsv2': MetricInfo('hpsv2', 'higher'),
    'image_reward': MetricInfo('image_reward', 'higher'),
    'aesthetic': MetricInfo('aesthetic', 'higher'),
    'geneval_hf': MetricInfo('geneval_hf', 'higher'),
    'word_accuracy_rapidocr': MetricInfo('rapidocr', 'higher'),
    'ned_rapidocr': MetricInfo('rapidocr', 'higher'),
    'dpg': MetricInfo(JUDGE, 'higher'),
    'tifa': MetricInfo(JUDGE, 'higher'),
    'judge_score': MetricInfo(JUDGE, 'higher'),
}
"""Metrics by name. A Fréchet distance of fewer images than features is too large: the covariance is singular.

In results, the name of a judge's metric ends with the judge, such as `dpg/Qwen3-VL-8B-Instruct`."""
HIGHER_IS_BETTER = {'retrieval_top1'}
"""Metrics of evaluators other than `image_metrics` for which higher is better."""
NETWORKS: dict[str, str | None] = {
    'inception': None,
    'clip_fid': 'openai/clip-vit-base-patch32@3d74acf9a28c67741b2f4f2ea7635f0aaf6f0268',
    'cmmd': 'openai/clip-vit-large-patch14-336@ce19dc912ca5cd21c8a653c79e251e808ccabcd1',
    'dino': 'facebook/dinov2-large@47b73eefe95e8d44ec3623f8890bd894b6ea2d6c',
    'efficientnet': None,
    'clip_score': 'openai/clip-vit-large-patch14@32bd64288804d66eefd0ccbe215aa642df71cc41',
    'pick_score': None,
    'hpsv3': None,
    'qwen2_vl': 'Qwen/Qwen2-VL-7B-Instruct@eed13092ef92e448dd6875b2a00151bd3f7db0ac',
    'hpsv2': None,
    'image_reward': None,
    'aesthetic': None,
    'geneval_hf': None,
    'rapidocr': None,
}
"""Default source of each network: a repository on the Hub and its commit; None if it comes from elsewhere."""
SWEPT = ('guidance_scales', 'num_inference_steps', 'noise_scheduler', 'snr_shift')
"""Settings that may be lists of values to compare; the evaluator measures all combinations, with each guidance."""
LAYOUTS = ('geneval', 't2i_compbench')
"""Folder layouts for generated images, as the scoring scripts of these benchmarks read them."""


def better_directions(names: set[str]) -> dict[str, str]:
    """Return `lower` or `higher`, whichever is better, by name of metric or validation loss; omit unknown names."""
    infos = {name: IMAGE_METRICS.get(name.partition('/')[0]) for name in names}
    found: dict[str, str] = {name: info.better for name, info in infos.items() if info is not None}
    found |= dict.fromkeys(names & HIGHER_IS_BETTER, 'higher')
    return found | {name: 'lower' for name in names if name == 'loss' or name.startswith('loss_t')}


def image_metrics_problems(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return error messages for wrong values in the settings of the evaluator `image_metrics`, by key."""
    found: dict[str, str | None] = {}
    metrics, networks = settings.get('metrics'), settings.get('networks')
    if metrics is not None:
        found['metrics'] = _metrics_problem(metrics)
    prompts = settings.get('prompts')
    named = metrics if isinstance(metrics, list | tuple) else ()
    if 'geneval_hf' in named and not str(prompts).endswith(('.jsonl', MISSING)):
        found['prompts'] = f'geneval_hf needs the path of evaluation_metadata.jsonl from its authors, not {prompts}'
    reading = [name for name, info in IMAGE_METRICS.items() if info.network == 'rapidocr' and name in named]
    if reading and prompts in (None, 'own'):
        found['prompts'] = f'{reading[0]} needs the path of prompts that ask for text, such as CVTG-2K, not {prompts}'
    judged = [each for each in metrics or () if each in IMAGE_METRICS and IMAGE_METRICS[each].network == JUDGE]
    if judged and settings.get('judge') is None:
        example = '{endpoint: http://localhost:8000/v1, model: NAME}'
        found['judge'] = f'is missing; {judged[0]} needs a vision-language model, such as {example}'
    if settings.get('judge') is not None and not judged and not found.get('metrics'):
        names = ' or '.join(name for name, info in IMAGE_METRICS.items() if info.network == JUDGE)
        found['judge'] = f'has nothing to do; add {names} to the metrics, or remove the judge'
    if both := {'dpg', 'tifa'} <= {*judged}:
        found['metrics'] = 'dpg and tifa need different files of prompts; measure them in two evaluations'
    for name, suffix, file in (('dpg', '.csv', 'dpg_bench.csv'), ('tifa', '.json', "TIFA's questions and answers")):
        if name in judged and not both and not str(prompts).endswith((suffix, MISSING)):
            found['prompts'] = f'{name} needs the path of {file} from its authors, not {prompts}'
    for name in networks if isinstance(networks, Mapping) else ():
        if name not in NETWORKS:
            found['networks'] = f'there is no network {name!r}; {did_you_mean(str(name), NETWORKS)}'
    scales = settings.get('guidance_scales')
    if isinstance(scales, list | tuple):
        problems = [guidance_problem(each) for each in scales if isinstance(each, int | float)]
        found['guidance_scales'] = next((each for each in problems if each is not None), None)
    for key in SWEPT:
        if isinstance(values := settings.get(key), list | tuple) and (not values or len(set(values)) < len(values)):
            found[key] = f'{list(values)} is not a list of different values'
    for key in ('num_images', 'images_per_prompt', 'num_references', 'batch_size'):
        if isinstance(value := settings.get(key), int) and value < 1:
            found[key] = f'{value} is less than 1'
    size, layout = settings.get('size'), settings.get('layout')
    if isinstance(size, list | tuple) and len(size) != 2:
        found['size'] = f'{list(size)} is not a pair; use height and width in pixels'
    if isinstance(layout, str) and layout not in (*LAYOUTS, MISSING):
        found['layout'] = f'there is no layout {layout!r}; {did_you_mean(layout, LAYOUTS)}'
    return {key: what for key, what in found.items() if what is not None}


def _metrics_problem(names: object) -> str | None:
    if not isinstance(names, list | tuple) or not names:
        return f'{names!r} is not a list of at least one metric; use for example [fid, clip_score]'
    for name in names:
        if name not in IMAGE_METRICS:
            return f'there is no metric {name!r}; {did_you_mean(str(name), IMAGE_METRICS)}'
    return f'{list(names)} names a metric twice' if len(set(names)) < len(names) else None
