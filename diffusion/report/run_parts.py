"""Parts of a run shown in a report: checkpoints and saves, evaluations, recipe, hours and cost."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from diffusion.config.sampling_checks import guidance_text
from diffusion.config.secrets import secret_problems
from diffusion.config.yaml_files import parse_yaml
from diffusion.planning.gpus import GPU, load_gpus
from diffusion.report.metric_reader import Curve, Series
from diffusion.runs.attempts import Attempt
from diffusion.runs.evaluation_claims import EVALUATIONS
from diffusion.runs.run_status import RECEIPT
from diffusion.storage.places import Listing, Place

MAX_CHECKPOINTS = 100
"""Maximum number of checkpoints to show: the newest. The receipt.json of each is read."""
TIERS = {'': 'storage of the run', 'memory_': 'memory of the nodes', 'disk_': 'disks of the nodes'}
"""Storage tiers to which a run saves checkpoints, by the prefix of their metrics: checkpoint/PREFIXsave_seconds."""
_NAME = re.compile(r'ba(\d{1,15})')
_PIN = re.compile(r'ba(\d{1,15})\.pinned')
_DAMAGED = re.compile(r'ba(\d{1,15})\.damaged')


class CheckpointReader:
    """Reads the receipt.json files of a run's checkpoints; caches them, since they never change."""

    def __init__(self, files: Place) -> None:
        self.files = files
        self._known: dict[int, dict[str, Any]] = {}

    def read(self, listing: Listing, notes: list[str]) -> list[dict[str, Any]]:
        """Return receipt.json and state of recent checkpoints, newest first; add a note for each unreadable one."""
        batches = sorted((int(each[1]) for name in listing.folders if (each := _NAME.fullmatch(name))), reverse=True)
        pinned = {int(each[1]) for name in listing.files if (each := _PIN.fullmatch(name))}
        if len(batches) > MAX_CHECKPOINTS:
            notes.append(f'Of {len(batches)} checkpoints, the newest {MAX_CHECKPOINTS} are shown.')
        found = []
        for batch in batches[:MAX_CHECKPOINTS]:
            if batch not in self._known:
                content = self.files.read(f'ba{batch}/{RECEIPT}')
                if content is None:
                    notes.append(f'ba{batch} has no {RECEIPT}: it is still being written, or damaged.')
                    found.append({'batch': batch, 'state': 'incomplete', 'pinned': batch in pinned})
                    continue
                self._known[batch] = _receipt(content, f'ba{batch}', notes)
            found.append({'batch': batch, **self._known[batch], 'pinned': batch in pinned})
        damaged = [int(each[1]) for name in listing.folders if (each := _DAMAGED.fullmatch(name))]
        return found + [{'batch': batch, 'state': 'damaged', 'pinned': False} for batch in sorted(damaged)]


def _receipt(content: bytes, name: str, notes: list[str]) -> dict[str, Any]:
    try:
        receipt = json.loads(content)
        size = sum(int(record['bytes']) for record in receipt['files'].values())
        devices = receipt.get('world_size')
        return {
            'state': 'complete',
            'saved': str(receipt.get('saved', '')),
            'bytes': min(size, 2**60),
            'devices': devices if isinstance(devices, int) and 0 < devices < 10**7 else None,
            'kind': str(receipt.get('kind', '')),
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        notes.append(f'{name}/{RECEIPT} is not a receipt: the checkpoint may be damaged.')
        return {'state': 'damaged'}


def saves_by_place(series: Mapping[str, Series]) -> list[dict[str, Any]]:
    """Return the number of saves, their durations and failures for each storage tier to which a run saved."""
    found = []
    for prefix, place in TIERS.items():
        seconds, stalls = (series.get(f'checkpoint/{prefix}{name}') for name in ('save_seconds', 'stall_seconds'))
        failed = series.get(f'checkpoint/{prefix}failed_saves')
        if seconds is None and failed is None:
            continue
        values = [*(seconds.values if seconds else ())]
        found.append(
            {
                'place': place,
                'saves': len(values),
                'last_batch': seconds.steps[-1] if seconds and seconds.steps else None,
                'mean_seconds': sum(values) / len(values) if values else None,
                'stall_seconds': sum(stalls.values) if stalls else None,
                'failed': failed.values[-1] if failed and failed.values else 0,
            }
        )
    return found


_RESULTS = re.compile(r'ba\d{1,15}\.json')
_IMAGE = re.compile(rf'{EVALUATIONS}(/\w[^/]*)+\.png')


def read_evaluations(files: Place, notes: list[str]) -> list[dict[str, Any]]:
    """Return the results of a run's evaluated checkpoints, in batch order; add a note for each unreadable file."""
    found = []
    for name in files.list(EVALUATIONS).files:
        if _RESULTS.fullmatch(name):
            place = f'{EVALUATIONS}/{name}'
            results = _results(files.read(place) or b'')
            if results is None:
                notes.append(f'{place} is not a file of results, so this evaluation is missing here.')
            else:
                found.append(results | {'checkpoint': name.removesuffix('.json'), 'batch': int(name[2:-5])})
    return sorted(found, key=lambda each: each['batch'])


def _results(content: bytes) -> dict[str, Any] | None:
    try:
        given = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or not isinstance(given.get('metrics', {}), dict):
        return None
    guidance, metrics = given.get('guidance'), _numbers(given.get('metrics'))
    sweep = [each for each in guidance if isinstance(each, dict)] if isinstance(guidance, list) else []

    def of_own_setting(key: str) -> dict[str, tuple[dict[str, Any], Any]]:
        """Return, by metric, the `sweep` row that gave the checkpoint's value, and the metric's entry in row[key]."""
        rows = [each for each in sweep[::-1] if isinstance(each.get(key), dict)]
        return {
            str(name): (row, entry)
            for row in rows
            for name, entry in row[key].items()
            if isinstance(entry, dict) and _numbers(row.get('metrics')).get(name, name) == metrics.get(name)
        }

    return {
        'weights': str(given.get('weights', '')),
        'images': _number(given.get('images')),
        'prompts': str(given.get('prompts', '')),
        'finished': _number(given.get('finished')),
        'metrics': metrics,
        'losses': _numbers(given.get('losses')),
        'guidance': [
            {
                'scale': _number(each.get('guidance_scale')),
                'method': guidance_text(each.get('guidance')),
                'steps': _number(each.get('num_inference_steps')),
                'sampler': str(each.get('noise_scheduler') or ''),
                'shift': _number(each.get('snr_shift')),
                'metrics': _numbers(each.get('metrics')),
                'intervals': {name: _intervals(ends).get('') for name, ends in _mapping(each.get('intervals')).items()},
            }
            for each in sweep
            if _number(each.get('guidance_scale')) is not None
        ],
        'categories': {name: _numbers(values) for name, (_, values) in of_own_setting('categories').items()},
        'intervals': {name: _intervals(values) for name, (_, values) in of_own_setting('intervals').items()},
        'examples': {
            name: {str(kind): _examples(row.get('folder'), both) for kind, both in kinds.items()}
            for name, (row, kinds) in of_own_setting('examples').items()
        },
    }


def _intervals(values: Any) -> dict[str, list[float]]:
    """Return 95% confidence intervals by category; the empty category is the whole metric."""
    given = {str(kind): ends for kind, ends in _mapping(values).items() if isinstance(ends, list) and len(ends) == 2}
    pairs = {kind: [end for end in map(_number, ends) if end is not None] for kind, ends in given.items()}
    return {kind: ends for kind, ends in pairs.items() if len(ends) == 2}


def _examples(folder: Any, both: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the `worst` and `best` images of a category: path in the run, prompt and score."""
    found: dict[str, list[dict[str, Any]]] = {'worst': [], 'best': []}
    for side, images in found.items():
        given = _mapping(both).get(side)
        for each in map(_mapping, given if isinstance(given, list) else ()):
            if _IMAGE.fullmatch(file := f'{folder}/{each.get("file")}'):
                images.append({'file': file, 'prompt': str(each.get('prompt')), 'score': _number(each.get('score'))})
    return found


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < 1e300 and math.isfinite(value) else None


def _numbers(values: Any) -> dict[str, float | int]:
    items = values.items() if isinstance(values, dict) else ()
    return {str(name): number for name, value in items if (number := _number(value)) is not None}


HIDDEN = '<hidden>'
MAX_CHARACTERS = 200_000
NOT_COMPARED = {'name', 'runs_dir'}
"""Keys that always differ between runs."""


def recipe_values(text: str) -> dict[str, Any]:
    try:
        content = parse_yaml(text)
    except (ValueError, yaml.YAMLError, RecursionError):  # not a recipe that this package wrote
        return {}
    return content if isinstance(content, dict) else {}


def without_secrets(text: str, values: Mapping[str, Any]) -> str:
    """Return a recipe's text, up to MAX_CHARACTERS, with HIDDEN in place of `values` that may be secrets."""
    flat = flattened(values)
    for problem in secret_problems(dict(values)):
        secret = flat.get(problem.where)
        if isinstance(secret, str) and secret:
            text = text.replace(secret, HIDDEN)
    return text[:MAX_CHARACTERS]


def flattened(values: Mapping[str, Any], where: str = '') -> dict[str, Any]:
    """Return the values in nested mappings by dotted path; lists count as values."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = f'{where}.{key}' if where else str(key)
        if isinstance(value, Mapping) and value:
            found |= flattened(value, path)
        else:
            found[path] = value
    return found


def recipe_differences(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return each key whose values differ between recipes: `key`, and `values`, one per recipe (None if missing)."""
    recipes = [flattened(recipe_values(text)) for text in texts]
    keys = [key for key in dict.fromkeys(key for each in recipes for key in each) if key not in NOT_COMPARED]
    rows = [(key, [_text(each[key]) if key in each else None for each in recipes]) for key in keys]
    return [{'key': key, 'values': values} for key, values in rows if len({*values}) > 1]


def _text(value: Any) -> str:
    """Return a value as it would be written in a recipe."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


MAX_POINTS = 400
"""Maximum number of batches whose hours are stored; a chart's axis interpolates the hours of those between."""
HOUR = 3600


def batch_hours(records: Iterable[Mapping[str, Any]]) -> Curve | None:
    """Return batches and, for each, the run's total hours so far, increasing; None if no batch was recorded.

    Time between attempts does not count. A repeated batch has the hours of its last repetition.
    """
    before, begin, latest = 0.0, None, 0.0
    points: list[tuple[int, float]] = []
    for record in records:
        times = [record.get(key) for key in ('begin', 'at', 'first_at', 'last_at')]
        if not all(isinstance(each, int | float) and 0 <= each < 1e11 for each in times):
            continue
        if begin is None or record['begin'] != begin:
            before, begin, latest = before + latest, record['begin'], 0.0
        latest = max(latest, record['at'] - begin)
        for batch, at in ((record.get('first'), record['first_at']), (record.get('last'), record['last_at'])):
            if not isinstance(batch, int) or isinstance(batch, bool) or not 0 <= batch < 2**53 or at < begin:
                continue
            hours = (before + at - begin) / HOUR
            while points and (points[-1][0] >= batch or points[-1][1] > hours):
                points.pop()
            points.append((batch, hours))
    if len(points) < 2:
        return None
    if len(points) > MAX_POINTS:
        last = len(points) - 1
        points = [points[round(index * last / (MAX_POINTS - 1))] for index in range(MAX_POINTS)]
    return Curve([batch for batch, _ in points], [round(hours, 6) for _, hours in points])


CPU = 'cpu'
_MEMORY_TOLERANCE = 0.12
"""Allowed relative difference between the memory in a product name (80GB) and the driver's value (79.1 GiB)."""


@dataclass
class RunCost:
    """Device-hours and price of a run, so far and remaining; None means unknown."""

    devices: int | None = None
    gpu: str = ''
    """GPU model, `cpu` without GPUs, or empty if unknown."""
    device_hours: float | None = None
    hours_left: float | None = None
    device_hours_left: float | None = None
    price: float | None = None
    """US dollars per device-hour."""
    price_source: str = ''


def run_cost(
    attempts: Sequence[Attempt], *, world_sizes: Iterable[int], hours_left: float | None, price: float | None
) -> RunCost:
    """Return the cost of a run so far and, if the `hours_left` are known, of the rest.

    Args:
        world_sizes: Numbers of devices in the run's receipt.json files, newest first. The first is used for attempts
            that recorded no number.
        price: US dollars per device-hour; None means the price of the run's GPUs in planning/gpus.yaml.
    """
    assumed = next(iter(world_sizes), None)
    devices = [each.devices or assumed for each in attempts]
    last = devices[-1] if devices else assumed
    known = [(each.end - each.begin) * count for each, count in zip(attempts, devices, strict=True) if count]
    cost = RunCost(
        last,
        next((each.gpu for each in reversed(attempts) if each.gpu), ''),
        sum(known) / HOUR if attempts and len(known) == len(attempts) else None,
        hours_left,
        None if hours_left is None or last is None else hours_left * last,
        price,
        '' if price is None else '--price',
    )
    if price is None and cost.gpu not in ('', CPU):
        gpu = gpu_of_product(cost.gpu, load_gpus())
        if gpu is not None and gpu.price_usd_per_hour is not None:
            cost.price, cost.price_source = gpu.price_usd_per_hour, f'{gpu.name}, {gpu.source}'
    return cost


def gpu_of_product(product: str, gpus: Mapping[str, GPU]) -> GPU | None:
    """Return the only GPU model that matches a driver's product name, such as `NVIDIA H100 80GB HBM3`, or None."""
    words = _words(product)
    if product.lower() in gpus:
        return gpus[product.lower()]
    memory = [int(word[:-2]) for word in words if re.fullmatch(r'\d+gb', word)]
    fitting = []
    for name, gpu in gpus.items():
        # A name consists of the family (`a100`, or `rtx` and `4090`), the form factor, such as `pcie`, and the memory.
        parts = _words(name)
        family = [part for part in parts if not re.fullmatch(r'\d+gb|sxm|pcie', part)]
        if not {*family} <= {*words}:
            continue
        if memory and abs(memory[0] - gpu.memory_gib) > _MEMORY_TOLERANCE * memory[0]:
            continue
        if ('pcie' in words and 'sxm' in parts) or ('pcie' in parts and 'pcie' not in words):
            continue
        fitting.append(gpu)
    return fitting[0] if len(fitting) == 1 else None


def _words(text: str) -> list[str]:
    return re.findall(r'[a-z0-9]+', re.sub(r'sxm\d', 'sxm', text.lower()))
