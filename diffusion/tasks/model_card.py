"""Model card of an export: README.md with Hugging Face Hub front matter, generated from the recipe and the run."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

import diffusion
from diffusion.checkpointing.checkpoint_lookup import run_of_checkpoint
from diffusion.checkpointing.checkpoint_store import RECEIPT
from diffusion.config import registry
from diffusion.config.checks import image_streams
from diffusion.config.families import families, pipeline_of
from diffusion.config.load import Recipe, hide_environment
from diffusion.config.model_checks import objective_settings
from diffusion.config.recipe import Component, StreamConfig
from diffusion.config.sampling_checks import guidance_text
from diffusion.config.weight_sources import REPOSITORY, hub_repository
from diffusion.prepare.counts_report import REPORT, PrepareReport
from diffusion.runs.attempts import ATTEMPTS, format_duration, read_attempts, time_breakdown
from diffusion.tasks.argument_checks import LORA_WEIGHTS, read_json_object

CARD = 'README.md'
AUTOENCODER, LORA, SINGLE_FILE = 'AutoencoderKL', 'LoRA', 'single file'
"""Kinds of exports other than pipelines. (The kind of a pipeline is the name of its class.)"""


def model_card(
    recipe: Recipe,
    checkpoint: Path,
    *,
    weights: str,
    source: str,
    written: str,
    file: str,
    num_parameters: int | None = None,
) -> str:
    """Return the model card of an export as Markdown.

    It names streams, published sources and training settings, but no paths and no values from environment variables.

    Args:
        weights: Description of the exported weights, such as `ema`.
        source: Repository or folder from which users load the export.
        written: Kind of export: the class of a pipeline, `AutoencoderKL`, `LoRA` or `single file`.
        file: Name of the file, if the export is a LoRA or a single file.
    """
    run = run_of_checkpoint(checkpoint)
    sections = [
        f'# {recipe.name}',
        f'{_about(written, file)}, trained with diffusion {diffusion.__version__} on MosaicML Composer.',
        *_usage(recipe, source, written, file),
        '## Training',
        _table(_training(recipe, checkpoint, weights, num_parameters)),
        *_data(recipe),
        *_evaluation(run),
        *_license(recipe),
    ]
    front = yaml.safe_dump(_front_matter(recipe, written), sort_keys=False)
    return hide_environment(recipe, f'---\n{front}---\n\n' + '\n\n'.join(sections) + '\n')


def _about(written: str, file: str) -> str:
    return {
        LORA: 'A LoRA for pipelines of diffusers' + (' and for ComfyUI' if file != LORA_WEIGHTS else ''),
        SINGLE_FILE: 'A text-to-image model in one file, in the layout that '
        f'{"its original code" if file.endswith(".pt") else "ComfyUI"} reads',
        AUTOENCODER: 'An autoencoder for diffusers',
    }.get(written, f'A `{written}` {"for" if pipeline_of(written).module else "of"} diffusers')


def _front_matter(recipe: Recipe, written: str) -> dict[str, Any]:
    found: dict[str, Any] = {'library_name': 'diffusers'}
    if written != AUTOENCODER:
        found['pipeline_tag'] = 'text-to-image'
    if (base := _base_model(recipe)) is not None:
        relation = 'adapter' if written == LORA else 'finetune'
        found |= {'base_model': base, 'base_model_relation': relation}
    licenses = _licenses()
    found |= next((licenses[source] for source in _sources(recipe) if source in licenses), {})
    if written == LORA:
        found['tags'] = ['lora']
    return found


def _usage(recipe: Recipe, source: str, written: str, file: str) -> list[str]:
    """Return the section that shows how to generate an image; empty for exports that cannot generate images."""
    settings = recipe.generate
    call = f'num_inference_steps={settings.num_inference_steps}, guidance_scale={settings.guidance_scale:g}'
    prompt = repr(settings.prompts[0] if settings.prompts else 'a lighthouse at sunset')
    notes: list[str] = []
    if written == LORA:
        base = _base_model(recipe) or 'BASE_MODEL'
        lines = [
            'from diffusers import DiffusionPipeline\n',
            f'pipeline = DiffusionPipeline.from_pretrained({base!r})',
            f'pipeline.load_lora_weights({source!r}, weight_name={file!r})',
        ]
    elif written in (AUTOENCODER, SINGLE_FILE):
        return []
    else:
        pipeline = pipeline_of(written)
        keywords = registry.signature('model', recipe.model.name).defaults() | recipe.model.kwargs
        missing = [
            part for key, parts in pipeline.optional_parts.items() if keywords.get(key) is False for part in parts
        ]
        call_to_load = loading(written, source, missing)
        lines = [f'from diffusers import {call_to_load.partition(".")[0]}\n', f'pipeline = {call_to_load}']
        own = {'guidance_rescale': settings.guidance_rescale} if pipeline.takes_guidance_rescale else {}
        call += arguments(own | pipeline.call(keywords))
        if pipeline.module:
            notes = [
                '`trust_remote_code=True` runs the Python files beside the weights, which are copied from diffusion '
                f'{diffusion.__version__}.'
            ]
    lines.append(f'image = pipeline({prompt}, {call}).images[0]')
    method, rescale = guidance_text(settings.guidance), settings.guidance_rescale
    lacking = [] if method in ('', 'cfg') else [f'guidance `{method}`']
    lacking += [f'`guidance_rescale={rescale:g}`'] if rescale and 'guidance_rescale' not in call else []
    if settings.guidance_scale > 1 and lacking:
        notes.append(
            f'The recipe samples with {" and ".join(lacking)}. This call applies plain classifier-free guidance, for '
            'which another scale may be better.'
        )
    return ['## Use', '```python\n' + '\n'.join(lines) + '\n```', *notes]


def loading(kind: str, source: str, missing: Iterable[str] = ()) -> str:
    """Return the source code of a call that loads an export of class `kind`, with None for the `missing` components."""
    values: dict[str, Any] = dict.fromkeys(missing)
    if pipeline_of(kind).module:
        kind, values = 'DiffusionPipeline', values | {'trust_remote_code': True}
    return f'{kind}.from_pretrained({source!r}{arguments(values)})'


def arguments(values: Mapping[str, Any]) -> str:
    """Return keyword arguments as source code, each after a comma, so that they can follow another argument."""
    return ''.join(f', {key}={value!r}' for key, value in values.items())


def _training(recipe: Recipe, checkpoint: Path, weights: str, num_parameters: int | None) -> dict[str, str]:
    receipt = read_json_object(checkpoint / RECEIPT)
    count = '' if num_parameters is None else f', {num_parameters:,} parameters in the denoiser'
    rows = {'model': f'`{recipe.model.name}`{count}', 'weights': weights}
    if named := re.match(r'ba(\d+)', checkpoint.resolve().name):
        batches = int(named[1])
        samples = batches * recipe.global_batch
        rows['batches'] = f'{batches:,} of {recipe.global_batch:,} images, {samples:,} images in total'
    sides = dict.fromkeys(f'{stream.resolution} px' for stream in recipe.streams.values())
    if sides:
        rows['resolution'] = ', '.join(sides)
    if objective := objective_settings(recipe.model):
        defaults = registry.settings_of('model', Component(recipe.model.name), 'objective')
        kind = f'{objective.pop("path")}, prediction type {objective.pop("prediction_type")}'
        other = [f'{key} {value}' for key, value in objective.items() if value != defaults[key]]
        rows['objective'] = ', '.join([kind, *other])
    optimizer = recipe.optimizer
    settings = registry.signature('optimizer', optimizer.name).defaults() | optimizer.kwargs
    shown = [
        f'{key} {[*value] if isinstance(value, tuple) else value}'
        for key, value in settings.items()
        if value is not None and value is not False
    ]
    rows['optimizer'] = ', '.join([optimizer.name, *shown])
    if recipe.lora is not None:
        rows['LoRA'] = f'rank {recipe.lora.rank}, alpha {recipe.lora.alpha:g}, of {", ".join(recipe.lora.targets)}'
    if recipe.algorithms:
        rows['algorithms'] = ', '.join(each.name for each in recipe.algorithms.values())
    if (precision := recipe.trainer.get('precision')) is not None:
        rows['precision'] = str(precision)
    if isinstance(receipt.get('world_size'), int):
        rows['devices'] = str(receipt['world_size'])
    attempts = run_of_checkpoint(checkpoint) / ATTEMPTS
    if attempts.is_file() and (recorded := read_attempts(attempts.parent)):
        rows['training time'] = format_duration(time_breakdown(recorded)[0].productive)
    rows['seed'] = str(recipe.seed)
    return rows


def _data(recipe: Recipe) -> list[str]:
    streams = image_streams(recipe).items()
    reports = {name: report for name, stream in streams if (report := _report_of(stream)) is not None}
    names = [*recipe.streams]
    if not names and not reports:
        return []
    lines = [f'Streams: {", ".join(names)}.'] if names else []
    for name, report in reports.items():
        rejected = sum(each.count for each in report.rejected.values())
        reasons = ', '.join(f'{reason} {each.count:,}' for reason, each in sorted(report.rejected.items()))
        lines.append(
            f'- {name}: {report.pictures:,} images'
            + (f', {report.held_out.pictures:,} held out' if report.held_out else '')
            + (f'; {rejected:,} inputs rejected ({reasons})' if rejected else '')
            + (f'. {" ".join(report.license.split())}' if report.license else '')
        )
    return ['## Data', '\n'.join(lines)]


def _report_of(stream: StreamConfig) -> PrepareReport | None:
    if stream.local is None:
        return None
    for folder in (Path(stream.local), Path(stream.local).parent):
        try:
            return PrepareReport.read(folder / REPORT)
        except (OSError, ValueError, KeyError, TypeError):  # the report is missing or from another program
            continue
    return None


def _evaluation(run: Path) -> list[str]:
    metrics = read_json_object(run / 'evaluation.json')
    numbers = {name: f'{value:.4g}' for name, value in metrics.items() if isinstance(value, int | float)}
    if not numbers:
        return []
    return ['## Evaluation', f'Of the {metrics.get("weights", "exported")} weights:', _table(numbers)]


def _license(recipe: Recipe) -> list[str]:
    lines, licenses = [], _licenses()
    for source in _sources(recipe):
        known = licenses.get(source)
        name = 'see its page' if known is None else known.get('license_name', known['license'])
        lines.append(f'- [{source}](https://huggingface.co/{source}): {name}')
    if not lines:
        return ['## License', 'Not stated. Set it here and as `license` in the front matter before you publish this.']
    return ['## License', 'This model contains, or starts from, weights of:', '\n'.join(lines)]


def _licenses() -> dict[str, Mapping[str, str]]:
    return {source: front for family in families() for source, front in family.licenses.items()}


def _sources(recipe: Recipe) -> list[str]:
    found = [] if (base := _base_model(recipe)) is None else [base]
    name, kwargs = recipe.model.name, recipe.model.kwargs
    defaults = registry.signature('model', name).defaults() if registry.is_own('model', name) else {}
    for key, revision in (('pretrained', 'revision'), ('vae', 'vae_revision')):
        source = kwargs.get(key, defaults.get(key))
        # List a source only if it is the default or has a revision: others may be folders on the training machine.
        has_revision = kwargs.get(revision) not in (None, defaults.get(revision))
        if _is_repository(source) and (source == defaults.get(key) or has_revision):
            found.append(str(source))
    return [*dict.fromkeys(found)]


def _base_model(recipe: Recipe) -> str | None:
    """Return the Hub repository with the weights from which training started, or None."""
    start = recipe.initial_weights
    repository = None if start is None else hub_repository(start)
    return repository if _is_repository(repository) else None


def _is_repository(source: Any) -> bool:
    """Return True if a value is the name of a Hub repository; False for a local folder or anything else."""
    return isinstance(source, str) and REPOSITORY.fullmatch(source) is not None and not Path(source).exists()


def _table(rows: Mapping[str, str]) -> str:
    cells = {name: ' '.join(text.split()).replace('|', '\\|') for name, text in rows.items()}
    return '\n'.join(['| | |', '|---|---|', *(f'| {name} | {cell} |' for name, cell in cells.items())])
