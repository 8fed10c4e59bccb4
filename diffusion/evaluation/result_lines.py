"""Text about an evaluation: each metric, its change since an earlier one, and whether lower or higher is better."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diffusion.config.image_metrics import better_directions
from diffusion.config.sampling_checks import guidance_text
from diffusion.evaluation.evaluated_checkpoint import parse_results
from diffusion.runs.evaluation_claims import EVALUATIONS
from diffusion.storage.places import Place

MAX_EARLIER = 5
"""Maximum number of earlier evaluations that are searched for a value to compare with."""


def earlier_results(files: Place, batch: int, weights: str) -> list[dict[str, Any]]:
    """Return the results of the same weights among the last MAX_EARLIER before a batch, newest first."""
    names = (name for name in files.list(EVALUATIONS).files if name.startswith('ba') and name[2:-5].isdigit())
    batches = sorted((each for name in names if (each := int(name[2:-5])) < batch), reverse=True)
    paths = [f'{EVALUATIONS}/ba{each}.json' for each in batches[:MAX_EARLIER]]
    found = [parse_results(files.read(path), files.locate(path)) for path in paths]
    return [each for each in found if each is not None and each.get('weights') == weights]


def result_lines(results: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line per loss or metric, such as `fid 21.3000  lower is better, ↓ better than 24.1000 at ba1600`.

    If a metric has a 95% interval, its line includes it, and a line per category follows. The last lines are one per
    further sampling setting, with all its metrics.

    Args:
        results: Results of this evaluation alone, in the form of a results file.
        earlier: Results of earlier evaluations, newest first.
    """
    values = results['losses'] | results['metrics']
    better = better_directions(set(values))
    first = next(iter(results.get('guidance', ())), {})
    for name, value in values.items():
        line = f'{name:32s} {value:10.4f}'
        intervals = first.get('intervals', {}).get(name, {})
        if name in better:
            line += f'  {better[name]} is better'
            before = ((_comparable(each, results, name), each['checkpoint']) for each in earlier)
            found = next(((number, where) for number, where in before if number is not None), None)
            line += '' if found is None else f', {_change(value, *found, better[name])}'
        yield line + _interval_text(intervals.get(''))
        for category, mean in first.get('categories', {}).get(name, {}).items() if intervals else ():
            yield f'  {category:30s} {mean:10.4f}{_interval_text(intervals.get(category))}'
    for each in results.get('guidance', [])[1:]:
        texts = ', '.join(f'{key} {value:.4f}' for key, value in each['metrics'].items())
        words = [f'guidance {each["guidance_scale"]:g}', guidance_text(each.get('guidance'))]
        for key, word in (('num_inference_steps', 'steps'), ('noise_scheduler', ''), ('snr_shift', 'shift')):
            words += [] if each.get(key) == first.get(key) else [word, str(each.get(key))]
        yield f'{" ".join(filter(None, words)):<32s} {texts}'


def _interval_text(interval: Sequence[float] | None) -> str:
    return '' if interval is None else f'  (95% interval {interval[0]:.4f} to {interval[1]:.4f})'


def _change(value: float, before: float, where: str, better: str) -> str:
    if value == before:
        return f'= equal to {where}'
    verdict = 'better' if (value < before) == (better == 'lower') else 'worse'
    return f'{"↓" if value < before else "↑"} {verdict} than {before:.4f} at {where}'


def _comparable(earlier: Mapping[str, Any], results: Mapping[str, Any], name: str) -> float | None:
    """Return the value of a loss or metric in earlier results; None if they have no comparable one.

    A metric of generated images is only compared for the same sampling, prompts and number of images.
    """
    first = next((each for each in results.get('guidance', ()) if name in each['metrics']), None)
    if first is None:
        return (earlier.get('losses', {}) | earlier.get('metrics', {})).get(name)
    if any(earlier.get(key) != results.get(key) for key in ('images', 'prompts')):
        return None
    keys = ('guidance_scale', 'guidance', 'num_inference_steps', 'noise_scheduler', 'snr_shift')
    wanted = {key: first.get(key) for key in keys}
    defaults = wanted | {'guidance': None}  # for results of older versions
    found = [each['metrics'] for each in earlier.get('guidance', ()) if wanted.items() <= (defaults | each).items()]
    return found[-1].get(name) if found else None
