"""Options of `diffusion generate`, `diffusion evaluate` and `diffusion export`, and checks of the options.

This module does not import torch, so that a wrong path or number is reported within a second instead of after 15.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from diffusion.algorithms.power_function import SNAPSHOT_FOLDER, gamma_of_width
from diffusion.checkpointing.checkpoint_lookup import (
    download_checkpoint,
    find_checkpoint,
    recipe_of_checkpoint,
    run_of_checkpoint,
)
from diffusion.config.declarations import AtLeast
from diffusion.config.families import Family, families, family_of_model, pipeline_of
from diffusion.config.load import Recipe, load
from diffusion.config.options import DIR, FILE, Count, Option, Overrides
from diffusion.config.sampling_checks import (
    guidance_problems,
    is_flow,
    model_problem,
    num_train_timesteps,
    sampling_problems,
    scheduler_class_name,
    seeds_problem,
)
from diffusion.config.signatures import source_file
from diffusion.config.weight_sources import REPOSITORY
from diffusion.config.yaml_files import parse_yaml, read_yaml
from diffusion.errors import UserError
from diffusion.storage.local_files import check_writable

Weights = Literal['ema', 'training']
CheckpointPlace = Annotated[str, Option('CHECKPOINT', positional=True, files=True)]
BATCH_OR_LATEST = re.compile(r'ba\d+|latest')
OPTIONS = {'num_inference_steps': '--steps', 'guidance_scale': '--guidance', 'noise_scheduler': '--scheduler'}
OPTIONS |= {'guidance_rescale': '--rescale', 'guidance': '--guide', 'snr_shift': '--shift'}
"""Keys of the recipe's `generate` section, with the option of `diffusion generate` that overrides each."""
MODEL_INDEX = 'model_index.json'
LORA_WEIGHTS = 'pytorch_lora_weights.safetensors'
SAFETY_CHECKER = ('stable_diffusion', 'StableDiffusionSafetyChecker')
"""Safety checker of published Stable Diffusion pipelines, as in model_index.json: module of diffusers, and class."""
UNSCALED = ('ddim', 'ddpm', 'dpm++', 'pndm', 'unipc')
"""Noise schedulers that leave the denoiser's input unscaled. Diffusers' DiT pipelines work only with these."""


def exported_pipelines() -> dict[str, Family]:
    return {pipeline: family for family in families() for pipeline in family.pipelines}


def is_export(folder: Path) -> bool:
    """Return True if a folder is a diffusers pipeline, as written by `diffusion export`."""
    return (folder / MODEL_INDEX).is_file()


def check_pipeline(folder: Path) -> str:
    """Check that loading a pipeline from a folder runs no untrusted code; return the name of the pipeline's class.

    Raises:
        UserError: The pipeline is not supported, or has a class that is neither from diffusers or transformers nor from
            an unchanged copy of this package's code.
    """
    place = folder / MODEL_INDEX
    content = read_json_object(place)
    name = content.pop('_class_name', None)
    if isinstance(name, list) and name:
        _check_code(folder, name, pipeline_of(str(name[-1])).module)
        name = str(name[-1])
    if not name:
        raise UserError(f'{place}: has no pipeline class; export the run again')
    known = exported_pipelines()
    if name not in known:
        raise UserError(f'{folder}: is a {name}; use a folder of {", ".join(known)}')
    part_modules = known[name].pipelines[name].part_modules
    for part, value in content.items():
        if isinstance(value, list) and value and part in part_modules:
            _check_code(folder / part, value, part_modules[part])
            continue
        if isinstance(value, list) and value != [None, None] and not _is_known_class(value):
            named = '.'.join(map(str, value))
            raise UserError(
                f'{place}: {part} is {named}, which would run code that is not of diffusers or transformers; use a '
                'folder whose parts are classes of these two'
            )
        if isinstance(value, list) and (code := folder / part / f'{value[0]}.py').exists():
            raise UserError(f'{code}: is code that comes with the weights, and such code is never run; remove the file')
    return name


def _check_code(folder: Path, name: list[Any], module: str) -> None:
    """Raise UserError unless the code file `name[0]`.py in a folder equals the source of this package's `module`."""
    file = folder / f'{name[0]}.py'
    if not module or not file.is_file() or file.read_bytes() != source_file(module).read_bytes():
        raise UserError(
            f'{folder}: is a {name[-1]}, but its code in {file.name} is not that of this version of the package and is '
            'not run; export the run again'
        )


def _is_known_class(value: list[Any]) -> bool:
    """Return True if a component in model_index.json, [library, class], is from diffusers or transformers."""
    if len(value) != 2 or not all(isinstance(each, str) for each in value):
        return False
    # Refuse AutoModel and the like, which would import any class given in the component's configuration.
    is_class = re.fullmatch(r'(?!Auto(?!encoder))[A-Z]\w*', value[1]) is not None
    return tuple(value) == SAFETY_CHECKER or (value[0] in ('diffusers', 'transformers') and is_class)


def is_single_file(out: str | Path) -> bool:
    """Return True if the suffix of an export's output means a single file: `.safetensors`, or `.pt` (for --layout)."""
    return Path(out).suffix in ('.safetensors', '.pt')


@dataclass
class GenerateOptions:
    """Options of `diffusion generate`."""

    source: Annotated[str, Option('DIR_OR_CHECKPOINT', positional=True, files=True)]
    """Folder of an export, or folder or URL of a checkpoint or a run."""
    prompts: Annotated[list[str], Option('PROMPT', positional=True)]
    """Prompts; one image is generated per prompt."""
    out: Annotated[str, DIR] = 'generated'
    """Output folder for the PNG files."""
    seed: int = 0
    """Seed of the first image; it increases by 1 per image."""
    steps: int | None = None
    """Number of sampling steps (default: the recipe's; 50 for an export)."""
    guidance: float | None = None
    """Guidance scale; 1 turns guidance off (default: the recipe's; 7.5 for an export)."""
    rescale: float | None = None
    """Strength of guidance rescaling, 0 to 1 (default: the recipe's; 0 for an export of i1; not for other exports)."""
    guide: Annotated[str | None, Option('NAME_OR_YAML')] = None
    """Method of guidance: apg, or "{name: interval, low: 0.2, high: 1}" (default: the recipe's; not for an export)."""
    shift: float | None = None
    """SNR shift of a flow's sampling times (default: the recipe's; not for an export)."""
    negative: Annotated[str, Option('TEXT')] = ''
    """Negative prompt for all images (default: none)."""
    scheduler: Annotated[str | None, Option('NAME')] = None
    """Noise scheduler: ddim, dpm++, euler, ... or a diffusers class name (default: the recipe's or export's)."""
    lora: Annotated[str | None, Option('DIR_OR_FILE', files=True)] = None
    """Exported LoRA to add to an exported pipeline (default: none)."""
    weights: Weights | None = None
    """Weights to generate with: ema (averaged) or training (default: ema if the checkpoint has them)."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Values of the given options in `OPTIONS`, by key of the recipe's `generate` section."""
        own = {key: getattr(self, option.removeprefix('--')) for key, option in OPTIONS.items()}
        if self.guide is not None:
            try:
                value = parse_yaml(self.guide)
            except yaml.YAMLError as error:
                raise UserError(f'--guide: {self.guide!r} is not YAML; write for example "{{name: apg}}"') from error
            own['guidance'] = {'name': value} if isinstance(value, str) else value
        return {key: value for key, value in own.items() if value is not None}


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of the evaluator `image_metrics`."""

    metrics: Annotated[list[str] | None, Option('NAMES', commas=True)] = None
    """Comma-separated: fid, kid, clip_fid, cmmd, dino_mmd, precision, recall, clip_score, pick_score, hpsv3,
    hpsv2, image_reward, aesthetic, geneval_hf, word_accuracy_rapidocr, ned_rapidocr, dpg, tifa, judge_score,
    efficientnet_distance (default: the evaluators of the run's recipe)."""
    guidance_scales: Annotated[list[float] | None, Option('NUMBERS', flag='--guidance', commas=True)] = None
    """Comma-separated guidance scales; the metrics at the first one are the checkpoint's results (default: 7.5)."""
    prompts: Annotated[str | None, FILE] = None
    """File of prompts (.txt, .csv, .tsv, .jsonl or .json), folder of CVTG-2K, or "own" for this package's 120 prompts
    (default: captions of the evaluation data)."""
    prompt_column: Annotated[str | None, Option('NAME')] = None
    """Column with the prompts (default: found by its name)."""
    num_images: Annotated[Count | None, Option(flag='--images')] = None
    """Number of images to generate (default: one per prompt)."""
    images_per_prompt: Count | None = None
    """Number of images per prompt, with different seeds (default: 1); GenEval takes 4."""
    reference: Annotated[str | None, DIR] = None
    """Folder of reference images (default: images of the evaluation data)."""
    num_inference_steps: Annotated[list[int] | None, Option('NUMBERS', flag='--steps', commas=True), AtLeast(1)] = None
    """Comma-separated numbers of steps; the metrics at the first one are the checkpoint's results (default: 50)."""
    batch_size: Count | None = None
    """Images per batch and device (default: 32)."""
    networks: Annotated[dict[str, str], Option('NAME=SOURCE', flag='--network')] = field(default_factory=dict)
    """Path or ORG/NAME@COMMIT of a network: inception, clip_fid, cmmd, dino, clip_score, pick_score, hpsv3,
    qwen2_vl, hpsv2, image_reward, aesthetic, geneval_hf; can be repeated (default: the published networks)."""
    judge: Annotated[str | None, FILE] = None
    """YAML file with the model that answers the questions of dpg, tifa and judge_score; its keys are those of
    `judge` in the evaluator image_metrics (default: none)."""
    layout: Annotated[str | None, Option('NAME')] = None
    """Benchmark, geneval or t2i_compbench, in whose folder layout the images are also written (default: none)."""

    def given(self) -> dict[str, Any]:
        """Return the evaluator's arguments that were given as options; raise UserError if the metrics are missing."""
        given = {name: value for name, value in vars(self).items() if value not in (None, {})}
        if self.judge is not None:
            given['judge'] = read_yaml(Path(self.judge))
        if given and self.metrics is None:
            raise UserError('--metrics: the other options need it; add for example --metrics fid,clip_score')
        return given


@dataclass(frozen=True)
class CheckpointOptions:
    """Options that select the checkpoint to evaluate."""

    checkpoint: CheckpointPlace
    """Folder or URL of a checkpoint, or of a run (its latest checkpoint is used)."""
    overrides: Overrides = field(default_factory=list)
    """Overrides of values of the run's recipe, such as global_batch=64."""


@dataclass(frozen=True)
class ExportOptions:
    """Options of `diffusion export`."""

    place: CheckpointPlace
    """Folder or URL of a checkpoint, or of a run (its latest checkpoint is used)."""
    out: Annotated[str, Option('DIR_OR_FILE', files=True)]
    """Output folder, which must be new or empty, or a file NAME.safetensors in the layout that ComfyUI reads."""
    weights: Weights | None = None
    """Weights to export: ema (averaged) or training (default: ema if the checkpoint has them)."""
    ema_width: float | None = None
    """Width of a post-hoc EMA to export, as a fraction of the training so far, such as 0.1; needs snapshots by the
    post_hoc_ema algorithm."""
    at: Annotated[int | None, Option('BATCH')] = None
    """Batch for which --ema-width reconstructs the average (default: the last snapshot at or before the checkpoint)."""
    layout: Annotated[str | None, Option('NAME')] = None
    """Layout of an output file NAME.pt for a model's original code: i1 (default: diffusers or ComfyUI, by --out)."""
    dtype: Literal['float32', 'float16', 'bfloat16'] = 'float32'
    """Data type of the exported weights."""
    merge: bool = False
    """Merge the run's LoRA into the weights and export the whole pipeline (default: export only the LoRA)."""
    push: Annotated[str | None, Option('ORG/NAME')] = None
    """Repository on the Hugging Face Hub to which the export and its model card are uploaded; a new repository is
    private (default: no upload)."""
    public: bool = False
    """Make a new repository of --push public."""


def check_generate(options: GenerateOptions) -> None:
    """Check the options of `diffusion generate`; raise UserError for wrong or contradictory ones.

    A URL in `options.source` is downloaded and replaced by the path of the local copy.
    """
    if '://' in options.source:
        options.source = str(find_checkpoint(options.source))
    source = Path(options.source)
    check_writable(options.out, '--out')
    if (problem := seeds_problem(options.seed, len(options.prompts))) is not None:
        raise UserError(f'--seed: {problem}')
    given = options.sampling
    if is_export(source):
        if options.weights is not None:
            raise UserError(f'--weights: {source} is an export, which holds one set of weights; remove --weights')
        name = check_pipeline(source)
        rescales = exported_pipelines()[name].pipelines[name].takes_guidance_rescale
        unused = ['guidance', 'snr_shift'] if rescales else ['guidance', 'guidance_rescale', 'snr_shift']
        if refused := [OPTIONS[key] for key in unused if key in given]:
            raise UserError(f'{refused[0]}: a {name} has no such argument; generate from the run')
        if options.lora is not None:
            _check_lora(options.lora, name)
        problems = _problems_of_export(given, name, read_json_object(source / 'scheduler' / 'scheduler_config.json'))
    else:
        if options.lora is not None:
            raise UserError(f'--lora: {source} is not an exported pipeline; a run uses its own LoRA without --lora')
        if (source / LORA_WEIGHTS).is_file():
            raise UserError(
                f'{source}: is a LoRA without its base model; use the exported base model with --lora {source}, or '
                'the folder of the run'
            )
        if is_single_file(source) and source.is_file():
            raise UserError(
                f'{source}: is a single file, which does not record how to sample; give the run, or export it to a '
                'folder'
            )
        recipe = load(recipe_of_checkpoint(find_checkpoint(source)), task='generate')
        if (problem := model_problem(recipe.model)) is not None:
            raise UserError(f'model.name: {problem}')
        flow = is_flow(recipe.model)
        for problem in guidance_problems(given.get('guidance'), '--guide', flow=flow):
            raise UserError(str(problem))
        problems = sampling_problems(vars(recipe.generate) | given, num_train_timesteps(recipe.model), flow=flow)
    for key, problem in problems.items():
        raise UserError(f'{OPTIONS.get(key, f"generate.{key}")}: {problem}')


def evaluation_recipe(options: CheckpointOptions, evaluation: EvaluationOptions) -> Recipe:
    """Return the recipe for `diffusion evaluate`: the checkpoint's recipe with the evaluator from the options."""
    checkpoint, given = find_checkpoint(options.checkpoint), evaluation.given()
    place = str(options.checkpoint) if '://' in options.checkpoint else str(run_of_checkpoint(checkpoint).absolute())
    if '://' in place and BATCH_OR_LATEST.fullmatch(place.rpartition('/')[2]):
        place = place.rpartition('/')[0]
    runs_dir, _, name = place.rstrip('/').rpartition('/')
    overrides = [f'runs_dir={json.dumps(runs_dir)}', f'name={json.dumps(name)}', *options.overrides]
    overrides += [f'evaluators.image_metrics.{key}={json.dumps(value)}' for key, value in given.items()]
    # Set `task` when loading, so that sections that evaluation does not read may be incomplete.
    recipe = load(recipe_of_checkpoint(checkpoint), ['task=evaluate', *overrides])
    recipe.checkpoint = str(checkpoint)
    if not any(word.startswith('trainer.device=') for word in options.overrides):
        recipe.trainer.pop('device', None)  # drop the recipe's device: this machine may have another kind
    if given:
        recipe.evaluators = {'image_metrics': recipe.evaluators['image_metrics']}
    return recipe


def check_export(options: ExportOptions) -> Path:
    """Check the options of `diffusion export`, and return the checkpoint; raise UserError for wrong options."""
    place, out, ema_width = options.place, Path(options.out), options.ema_width
    check_writable(out.parent, '--out')
    if out.is_file():
        kind = 'file' if is_single_file(out) else 'folder'
        raise UserError(f'--out: {out} is a file; give a {kind} that does not exist yet')
    if out.exists() and is_single_file(out):
        raise UserError(f'--out: {out} is a folder; give a file that does not exist yet')
    if out.exists() and any(out.iterdir()):
        raise UserError(f'--out: {out} is not empty; remove it or give another folder')
    if ema_width is not None and options.weights is not None:
        raise UserError('--ema-width: reconstructs weights from snapshots; remove --weights')
    if ema_width is None and options.at is not None:
        raise UserError(f'--at: batch {options.at} needs --ema-width; without it, give the checkpoint of that batch')
    if ema_width is not None:
        try:
            gamma_of_width(ema_width)
        except UserError as error:
            raise UserError(f'--ema-width: {error}') from error
    if options.push is not None and not REPOSITORY.fullmatch(options.push):
        raise UserError(f'--push: {options.push!r} is not the name of a repository; write org/name')
    if options.public and options.push is None:
        raise UserError('--public: makes a repository on the Hub public; add --push org/name')
    if '://' in place and ema_width is not None:
        checkpoint = download_checkpoint(place, folders=[SNAPSHOT_FOLDER])
    else:
        checkpoint = find_checkpoint(place)
    recipe = load(recipe_of_checkpoint(checkpoint), task='generate')
    whole = recipe.lora is None or options.merge
    family = family_of_model(recipe.model.name)
    _check_layout(options, family, recipe, whole=whole)
    has_layout = (family.single_file or options.layout is not None) and model_problem(recipe.model) is None
    if is_single_file(out) and whole and not has_layout:
        raise UserError(f'--out: no program reads the model {recipe.model.name} from a single file; give a folder')
    if options.merge and recipe.lora is None:
        raise UserError(f'--merge: {checkpoint} has no LoRA, so there is nothing to merge; remove --merge')
    return checkpoint


def _check_layout(options: ExportOptions, family: Family, recipe: Recipe, *, whole: bool) -> None:
    """Raise UserError unless --layout and the suffix of --out fit each other and the model."""
    layout, is_pickle = options.layout, Path(options.out).suffix == '.pt'
    known = ', '.join(name for each in families() for name in each.layouts)
    if layout is None and is_pickle:
        raise UserError(f'--out: {options.out} is a .pt file, which needs --layout {known}; or give a folder')
    if layout is None:
        return
    if layout not in family.layouts:
        own = ', '.join(family.layouts)
        way_out = f'use {own}' if own else 'remove --layout'
        raise UserError(f'--layout: {layout!r} is not a layout of the model {recipe.model.name}; {way_out}')
    if not is_pickle:
        raise UserError(f'--layout: {layout} is a layout of .pt files, but --out is {options.out}; use --out NAME.pt')
    if not whole:
        raise UserError(f'--layout: {layout} has no place for a LoRA; add --merge')


def missing_parts(folder: Path) -> list[str]:
    """Return the names of components that were omitted from an exported pipeline, such as Stable Diffusion 3's T5."""
    # diffusers writes an omitted optional component as [null, null] in this file.
    return [name for name, value in read_json_object(folder / MODEL_INDEX).items() if value == [None, None]]


def lora_file(path: Path) -> Path:
    return path / LORA_WEIGHTS if path.is_dir() else path


def is_flow_scheduler(config: Mapping[str, Any]) -> bool:
    return bool(config.get('use_flow_sigmas')) or str(config.get('_class_name')).startswith('FlowMatch')


def _check_lora(path: str, pipeline: str) -> None:
    if not lora_file(Path(path)).is_file():
        raise UserError(f'--lora: {lora_file(Path(path))} does not exist; give the output of diffusion export')
    if lora_file(Path(path)).suffix != '.safetensors':
        raise UserError(
            f'--lora: {path} is not a .safetensors file, and pickled files may run code; give the output of diffusion '
            'export, or convert the file'
        )
    if not exported_pipelines()[pipeline].pipelines[pipeline].loads_lora:
        raise UserError(f'--lora: diffusers cannot load a LoRA into a {pipeline}; export the run with --merge instead')


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of an export or a run; empty if it cannot be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):  # diffusers reports damaged exports
        return {}
    return content if isinstance(content, dict) else {}


def _problems_of_export(given: Mapping[str, Any], pipeline: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Return error messages, by key, for `given` settings that do not suit an export with scheduler config `config`."""
    flow, name = is_flow_scheduler(config), given.get('noise_scheduler')
    problems = sampling_problems(given, config.get('num_train_timesteps'), flow=flow)
    if name is None or 'noise_scheduler' in problems:
        return problems
    is_flow_match = scheduler_class_name(name, flow=flow).startswith('FlowMatch')
    # FlowMatch schedulers accept only velocity predictions. They cannot scale the input, as U-Net pipelines require.
    family = exported_pipelines()[pipeline]
    refuses_flow_match = family.u_net or config.get('prediction_type') == 'sample'
    is_other = scheduler_class_name(name, flow=flow) != config.get('_class_name')
    if is_other and not family.pipelines[pipeline].takes_other_schedulers:
        problems['noise_scheduler'] = f'{name!r} does not fit into a {pipeline}; use euler, or generate from the run'
    elif is_flow_match and refuses_flow_match:
        problems['noise_scheduler'] = f'{name!r} does not fit into an exported pipeline; use dpm++ or unipc'
    elif not flow and not family.u_net and name not in UNSCALED:
        problems['noise_scheduler'] = f'{name!r} does not fit into a {pipeline}; use {", ".join(UNSCALED)}'
    return problems
