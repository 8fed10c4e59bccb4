"""The recipe: its sections, how a YAML becomes one, and every check that needs no heavy import."""

import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from diffusion import registry
from diffusion.schema import MISSING, Gatherer, Problem, build, join
from diffusion.yaml_files import UnreadableYAML, merge, read_chain

__all__ = ['Component', 'Problem', 'Recipe', 'RecipeError', 'StreamConfig', 'check_devices', 'check_paths', 'load', 'to_yaml']

SINGLE = ('model', 'dataset', 'eval_dataset', 'optimizer', 'scheduler')
PLURAL = {'algorithms': 'algorithm', 'callbacks': 'callback', 'loggers': 'logger', 'evaluators': 'evaluator'}
SUPPLIED = {
    'model': (),
    'dataset': ('buckets', 'batch_size', 'tokenizers', 'seed'),
    'optimizer': ('params',),
    'logger': (),
}
"""Keywords of components that the program gives."""
ELSEWHERE = {
    'model': 'model',
    'train_dataloader': 'streams and dataset',
    'eval_dataloader': 'eval_streams and eval_dataset',
    'optimizers': 'optimizer',
    'schedulers': 'scheduler',
    'algorithms': 'algorithms',
    'callbacks': 'callbacks',
    'loggers': 'loggers',
    'run_name': 'name',
    'seed': 'seed',
    'device_train_microbatch_size': 'device_train_microbatch_size',
    'parallelism_config': 'parallelism',
    'load_path': 'init_from (another run) or trainer.autoresume (this one)',
}
"""Keywords of the Trainer that are said in another section."""
DURATION = re.compile(r'^\d+(\.\d+)?(ba|ep|sp|tok|dur|iter|sec)$')
DURATION_KEYS = ('max_duration', 'eval_interval', 'save_interval', 't_warmup', 't_max', 'ema_start', 'half_life', 'every')


class RecipeError(ValueError):
    """A recipe with mistakes; the message lists them all."""

    def __init__(self, problems: Iterable[Problem], path: str | Path = '') -> None:
        self.problems = list(problems)
        lines = [str(problem) for problem in self.problems]
        count = f'{len(lines)} mistakes' if len(lines) > 1 else 'a mistake'
        super().__init__('\n  '.join([f'{path or "the recipe"} has {count}:', *lines]))


@dataclass
class Component:
    """Something with a registered name and keywords."""

    name: str
    """a registered name."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Its keywords."""


@dataclass
class StreamConfig:
    """One folder of MDS shards, seen at one resolution."""

    resolution: int
    """the side in pixels of the squares that the model sees, such as 256."""
    remote: str | None = None
    """the object store folder that holds index.json, such as s3://bucket/mds; null for data that is local."""
    local: str | None = None
    """the local folder: of the data itself, or of the cache of `remote`."""
    proportion: float | None = None
    """Share of this stream in an epoch, relative to the other streams' proportions."""
    repeat: float | None = None
    """How often an epoch goes over this stream."""
    choose: int | None = None
    """Samples an epoch takes of this stream."""
    download_retry: int = 2
    """Tries after a failed download."""
    download_timeout: float = 60.0
    """Seconds until a download counts as failed."""
    validate_hash: str | None = None
    """Hash to check downloaded shards with: sha1 or xxh64, as they were written."""


@dataclass
class LoaderConfig:
    """How samples are read and ordered."""

    num_workers: int | None = None
    """Processes a device that read; null chooses from the cores."""
    prefetch_factor: int | None = None
    """Batches each worker reads ahead."""
    timeout_seconds: int = 600
    """Longest wait for a worker's batch."""
    predownload: int | None = None
    """Samples whose shards are fetched ahead."""
    cache_limit: str | None = None
    """Largest size of the local cache, such as 500gb, at least four times the largest shard."""
    shuffle: bool = True
    """Shuffle the training data."""
    shuffle_algo: Literal['py1e', 'py1br', 'py1b', 'py1s', 'py2s', 'naive'] = 'py1e'
    """Streaming's shuffling algorithm."""
    shuffle_seed: int | None = None
    """Seed of the order; null is the run's seed."""
    shuffle_block_size: int | None = None
    """Samples that are shuffled together; null lets Streaming choose."""
    num_canonical_nodes: int | None = None
    """Order is cut in this many parts; fixed, it is the same on any number of nodes."""
    batching_method: Literal['per_stream', 'random', 'stratified'] = 'per_stream'
    """per_stream never mixes resolutions in a batch."""


@dataclass
class ParallelismConfig:
    """How the model is spread over devices."""

    strategy: Literal['ddp', 'fsdp2', 'fsdp1'] = 'ddp'
    """ddp: a copy on every device; fsdp2: sharded."""
    reshard_after_forward: bool = True
    """Shard weights again after the forward pass (FULL_SHARD); false keeps them until the step (SHARD_GRAD_OP)."""


@dataclass
class PrecomputeConfig:
    """`task: precompute`: which pictures become latents, and where these go."""

    streams: dict[str, StreamConfig] = field(default_factory=dict)
    """The streams of pictures."""
    out: str = ''
    """the folder for the latents, one sub-folder a stream."""
    posterior: Literal['sample', 'mean'] = 'sample'
    """sample stores mean and log-variance, so that every epoch draws anew; mean stores half as much."""
    dtype: Literal['float16', 'float32'] = 'float16'
    """Of what is stored."""
    batch_size: int = 64
    """Pictures encoded at once."""


@dataclass
class GenerateConfig:
    """`task: generate`, and the defaults of `diffusion generate`."""

    prompts: list[str] = field(default_factory=list)
    """Captions to draw."""
    negative_prompt: str = ''
    """What guidance moves away from."""
    out: str | None = None
    """Folder for the pictures; null is `generated` in the run's folder."""
    guidance_scale: float = 7.5
    """1 turns guidance off."""
    guidance_rescale: float = 0.0
    """Share of pulling the guided prediction's deviation back."""
    num_inference_steps: int = 50
    """Steps of the scheduler."""
    num_images_per_prompt: int = 1
    """Pictures a caption."""
    seed: int = 0
    """Of the first picture; the others count up."""
    noise_scheduler: str = 'ddim'
    """ddim, dpm++, euler, ... or a class of diffusers."""
    weights: Literal['ema', 'training'] | None = None
    """null takes averaged weights where there are any."""


@dataclass
class Recipe:
    """Everything about a run."""

    name: str
    """the name of the run, which its folder is called by."""
    global_batch: int
    """the samples an optimizer step sees, over all devices."""
    model: Component
    """the model: name and keywords."""
    task: Literal['train', 'precompute', 'evaluate', 'generate'] = 'train'
    """What run.py does."""
    seed: int = 17
    """Of everything that is random."""
    imports: list[str] = field(default_factory=list)
    """Modules to import first, which register components of yours."""
    runs_dir: str = 'runs'
    """Where the folders of runs are."""
    device_train_microbatch_size: int | Literal['auto'] | None = None
    """Samples a device takes at once; null takes its whole share of the batch."""
    init_from: str | None = None
    """Checkpoint or folder of another run whose weights this one starts from."""
    checkpoint: str | None = None
    """What to evaluate or to generate with; null is the run's latest."""
    dataset: Component = field(default_factory=lambda: Component('image_text'))
    """Kind of the training data, and how samples are made of it."""
    streams: dict[str, StreamConfig] = field(default_factory=dict)
    """Training data by name."""
    eval_dataset: Component | None = None
    """Kind of the evaluation data; null is the training dataset's without what is random about it."""
    eval_streams: dict[str, StreamConfig] = field(default_factory=dict)
    """Evaluation data by name."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How samples are read and ordered."""
    optimizer: Component = field(default_factory=lambda: Component('adamw', {'lr': 1.0e-4, 'weight_decay': 0.01}))
    """The optimizer."""
    scheduler: Component | None = None
    """The learning rate's schedule; null keeps it constant."""
    algorithms: dict[str, Component] = field(default_factory=dict)
    """Composer algorithms by name."""
    callbacks: dict[str, Component] = field(default_factory=dict)
    """Composer callbacks by name."""
    loggers: dict[str, Component] = field(default_factory=dict)
    """Where metrics go."""
    evaluators: dict[str, Component] = field(default_factory=dict)
    """What `task: evaluate` measures besides the validation losses."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """How the model is spread over devices."""
    precompute: PrecomputeConfig = field(default_factory=PrecomputeConfig)
    """What `task: precompute` does."""
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    """What `task: generate` draws."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Keywords of composer.Trainer."""
    missing: list[Problem] = field(default_factory=list, repr=False, compare=False)
    """Values that are still ???, where that was allowed."""

    @property
    def run_dir(self) -> Path:
        """Where the run's checkpoints, metrics and pictures are."""
        return Path(self.runs_dir) / self.name


def load(path: str | Path, overrides: Sequence[str] = (), *, allow_missing: bool = False) -> Recipe:
    """Read a recipe, what it extends, and overrides; check all that can be checked without heavy imports.

    Args:
        path: A YAML file.
        overrides: `key=value` with dots for depth and YAML for values: `trainer.max_duration=20ba`.
        allow_missing: Leave `???` where it stands, and list it in `recipe.missing`.

    Raises:
        RecipeError: With every mistake found.
    """
    try:
        raw = merge(read_chain(Path(path)), overrides)
    except UnreadableYAML as error:
        raise RecipeError([Problem('', str(error))], path) from error
    gather = Gatherer()
    recipe = build(Recipe, _with_components(raw, gather), '', gather)
    gather.problems += _import_all(raw.get('imports') or [])
    if not gather.problems:
        gather.problems += check_components(recipe)
    if not gather.problems and not gather.missing:
        gather.problems += check(recipe)
    problems = gather.problems if allow_missing else gather.problems + gather.missing
    if problems:
        raise RecipeError(problems, path)
    recipe.missing = gather.missing
    return recipe


def check_components(recipe: Recipe) -> list[Problem]:
    """Names and keywords of components, and keywords of the Trainer."""
    problems = []
    for where, kind, component in _components(recipe):
        what = registry.unknown(kind, component.name)
        if what is not None:
            problems.append(Problem(where, what))
            continue
        supplied = SUPPLIED.get(kind, ())
        if kind in ('callback', 'logger') and 'folder' in registry.signature(kind, component.name).names():
            supplied = ()
        problems += registry.check_keywords(where, kind, component.name, component.kwargs, supplied=supplied)
    for key in recipe.trainer.keys() & ELSEWHERE.keys():
        problems.append(Problem(join('trainer', key), f'is said elsewhere: set {ELSEWHERE[key]}'))
    rest = {key: value for key, value in recipe.trainer.items() if key not in ELSEWHERE}
    return problems + registry.check_keywords('trainer', 'trainer', 'composer', {'model': None} | rest)


def check(recipe: Recipe) -> list[Problem]:
    """What the types alone do not say."""
    gather = Gatherer()
    if recipe.global_batch <= 0:
        gather.problem('global_batch', f'{recipe.global_batch} is not positive')
    microbatch = recipe.device_train_microbatch_size
    if isinstance(microbatch, int) and microbatch <= 0:
        gather.problem('device_train_microbatch_size', f'{microbatch} is not positive')
    if not 0 <= recipe.seed < 2**32:
        gather.problem('seed', f'{recipe.seed} is not in [0, 2**32)')
    if not re.fullmatch(r'[A-Za-z0-9._-]+', recipe.name):
        gather.problem('name', f'{recipe.name!r}; use letters, digits, dots, dashes and underscores: it names a folder')
    _check_task(recipe, gather)
    for section, streams in _stream_sections(recipe):
        _check_streams(section, streams, gather)
    for where, value in _durations(recipe):
        if isinstance(value, str) and not DURATION.match(value):
            gather.problem(where, f"{value!r} is not a duration; write a number and its unit, such as 1000ba or 2ep")
    return gather.problems


def check_devices(recipe: Recipe, world_size: int) -> list[Problem]:
    """Whether the batch divides over the devices, and a device's share into microbatches."""
    batch, microbatch = recipe.global_batch, recipe.device_train_microbatch_size
    if recipe.task != 'train' and recipe.task != 'evaluate':
        return []
    if batch % world_size:
        near = sorted({max(world_size, batch // world_size * world_size), (batch // world_size + 1) * world_size})
        choices = ' or '.join(str(value) for value in near)
        return [Problem('global_batch', f'{batch} does not divide over {world_size} devices; use {choices}')]
    share = batch // world_size
    if isinstance(microbatch, int) and share % microbatch:
        divisors = [size for size in range(1, share + 1) if share % size == 0]
        near = min(divisors, key=lambda size: abs(size - microbatch))
        what = f"{microbatch} does not divide a device's {share} samples ({batch} over {world_size} devices); use {near}"
        return [Problem('device_train_microbatch_size', what)]
    return []


def check_paths(recipe: Recipe) -> list[Problem]:
    """Local data and checkpoints that the task needs and that are not there."""
    gather = Gatherer()
    for section, streams in _stream_sections(recipe):
        for name, stream in streams.items():
            if stream.remote is None and stream.local is not None:
                _check_index(f'{section}.{name}.local', Path(stream.local), gather)
    if recipe.task == 'train' and recipe.init_from is not None:
        _check_checkpoint('init_from', recipe.init_from, gather)
    if recipe.task in ('evaluate', 'generate'):
        _check_checkpoint('checkpoint', recipe.checkpoint or str(recipe.run_dir), gather)
    return gather.problems


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe, defaults included, as YAML that `load` reads back to an equal one."""
    import yaml

    values: dict[str, Any] = {}
    for item in dataclasses.fields(recipe):
        if item.repr:
            values[item.name] = _plain(getattr(recipe, item.name))
    return yaml.safe_dump(json.loads(json.dumps(values)), sort_keys=False, allow_unicode=True, width=100)


def _plain(value: Any) -> Any:
    if isinstance(value, Component):
        return {'name': value.name} | value.kwargs
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _with_components(raw: Mapping[str, Any], gather: Gatherer) -> dict[str, Any]:
    """The raw values with components as {name, kwargs}; their keywords stand beside the name in a YAML."""
    values = dict(raw)
    for section in SINGLE:
        if isinstance(values.get(section), dict):
            values[section] = _component(values[section], None, section, gather)
    for section in PLURAL:
        entries = values.get(section)
        if entries is None and section in values:
            values[section] = {}
        if isinstance(entries, dict):
            values[section] = {
                key: _component({} if value is None else value, str(key), join(section, key), gather)
                for key, value in entries.items()
                if value is not False
            }
    for section in ('streams', 'eval_streams', 'trainer', 'imports'):
        if section in values and values[section] is None:
            del values[section]
    return values


def _component(value: Any, name: str | None, where: str, gather: Gatherer) -> Any:
    if not isinstance(value, dict):
        if value != MISSING:
            gather.problem(where, f'{value!r} is not a mapping of keywords' + ('' if name is None else ' (false removes it)'))
        return {'name': name or '', 'kwargs': {}}
    kwargs = {str(key): item for key, item in value.items() if key != 'name'}
    if 'name' not in value and name is None:
        gather.problem(join(where, 'name'), f'is missing; known: {", ".join(registry.names(where.replace("eval_", "")))}')
        return {'name': '', 'kwargs': kwargs}
    return {'name': value.get('name', name), 'kwargs': kwargs}


def _components(recipe: Recipe) -> list[tuple[str, str, Component]]:
    """Where, kind and component of all that a recipe names."""
    single = [(section, section.removeprefix('eval_'), getattr(recipe, section)) for section in SINGLE]
    plural = [
        (join(section, key), kind, component)
        for section, kind in PLURAL.items()
        for key, component in getattr(recipe, section).items()
    ]
    return [item for item in single if item[2] is not None] + plural


def _import_all(modules: list[Any]) -> list[Problem]:
    problems = []
    # Like python itself: modules beside where the command was given.
    if modules and '' not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for index, module in enumerate(modules):
        try:
            importlib.import_module(str(module))
        except ImportError as error:
            problems.append(Problem(f'imports[{index}]', f'{module} cannot be imported ({error}); is it on PYTHONPATH?'))
    return problems


def _stream_sections(recipe: Recipe) -> list[tuple[str, dict[str, StreamConfig]]]:
    """The streams that the task reads."""
    if recipe.task == 'precompute':
        return [('precompute.streams', recipe.precompute.streams)]
    if recipe.task == 'generate':
        return []
    streams = [('eval_streams', recipe.eval_streams)]
    return streams if recipe.task == 'evaluate' else [('streams', recipe.streams), *streams]


def _check_task(recipe: Recipe, gather: Gatherer) -> None:
    if recipe.task == 'train':
        if not recipe.streams:
            gather.problem('streams', 'is empty; training needs at least one stream')
        if 'max_duration' not in recipe.trainer:
            gather.problem('trainer.max_duration', 'is missing; say how long to train, such as 1000ba')
    if recipe.task == 'precompute':
        if not recipe.precompute.streams:
            gather.problem('precompute.streams', 'is empty; name the pictures to encode')
        if not recipe.precompute.out:
            gather.problem('precompute.out', 'is missing; give the folder for the latents')
    if recipe.task == 'evaluate' and not recipe.eval_streams:
        gather.problem('eval_streams', 'is empty; evaluation needs at least one stream')
    if recipe.task == 'generate' and not recipe.generate.prompts:
        gather.problem('generate.prompts', 'is empty; give captions to draw')


def _check_streams(section: str, streams: Mapping[str, StreamConfig], gather: Gatherer) -> None:
    for name, stream in streams.items():
        where = join(section, name)
        if stream.remote is None and stream.local is None:
            gather.problem(where, 'has neither remote nor local; give the folder of its MDS shards')
        if stream.resolution <= 0 or stream.resolution % 8:
            gather.problem(join(where, 'resolution'), f'{stream.resolution} is not a multiple of 8 pixels')
        amounts = [key for key in ('proportion', 'repeat', 'choose') if getattr(stream, key) is not None]
        if len(amounts) > 1:
            gather.problem(where, f'{" and ".join(amounts)} say one thing in several ways; keep one')
        for key in amounts:
            if getattr(stream, key) <= 0:
                gather.problem(join(where, key), f'{getattr(stream, key)} is not positive; remove the stream instead')
    with_proportion = [name for name, stream in streams.items() if stream.proportion is not None]
    if with_proportion and len(with_proportion) != len(streams):
        rest = ', '.join(name for name in streams if name not in with_proportion)
        gather.problem(section, f'{rest}: without proportion beside streams that have one; give all of them one, or none')


def _durations(recipe: Recipe) -> list[tuple[str, Any]]:
    places = [(where, component.kwargs) for where, _, component in _components(recipe)] + [('trainer', recipe.trainer)]
    return [(join(where, key), kwargs[key]) for where, kwargs in places for key in DURATION_KEYS if key in kwargs]


def _check_index(where: str, folder: Path, gather: Gatherer) -> None:
    index = folder / 'index.json'
    if not index.is_file():
        way_out = 'make it with `diffusion prepare`, or latents with task=precompute'
        gather.problem(where, f'{folder} has no index.json; is it an MDS folder? {way_out}')
        return
    try:
        shards = json.loads(index.read_text(encoding='utf-8'))['shards']
        samples = sum(shard['samples'] for shard in shards)
    except (ValueError, KeyError, TypeError) as error:
        gather.problem(where, f'{index} is not an index of MDS shards ({type(error).__name__}: {error}); prepare it again')
        return
    if samples == 0:
        gather.problem(where, f'{folder} has no samples; prepare it again, or remove the stream')


def _check_checkpoint(where: str, place: str, gather: Gatherer) -> None:
    path = Path(place)
    choices = [path, path.with_name(f'{path.name}-rank0.pt'), path.with_name(f'{path.name}.pt')]
    if '://' not in place and not any(choice.exists() for choice in choices):
        gather.problem(where, f'{place} does not exist; give a checkpoint file or the folder of a run')
