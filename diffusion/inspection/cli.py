"""Command line of `diffusion data`; a subcommand imports torch only after its arguments have been checked."""

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from diffusion.config.checks import image_streams
from diffusion.config.declarations import AtLeast, Fraction
from diffusion.config.load import Recipe, RecipeError, load
from diffusion.config.options import DIR, DIR_OR_URL, Count, Option, RecipeFile, add_command
from diffusion.config.path_checks import check_stream_folders
from diffusion.config.recipe import StreamConfig
from diffusion.config.schema import MISSING, Problem, did_you_mean
from diffusion.errors import UserError, printable
from diffusion.planning.gpus import find_gpu, load_gpus
from diffusion.prepare.remove_cli import DatasetPlace, check_dataset, run_remove

Sections = dict[str, dict[str, StreamConfig]]
SECTIONS = ('streams', 'eval_streams', 'precompute.streams')
LOOK_NEEDS = {
    'streams': ('dataset',),
    'eval_streams': ('dataset', 'eval_dataset'),
    'precompute.streams': ('precompute.crop', 'precompute.min_crop_scale'),
}
"""Recipe paths, besides `model`, `loader` and `seed`, that must not be ??? for `data look`, by section of streams."""


def add_arguments(parser: Any) -> None:
    """Add the subcommands `verify`, `look`, `bench`, `measure-latents`, `pack`, `pairs` and `remove` to a parser."""
    commands = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
    for name, (function, text) in COMMANDS.items():
        commands.add_parser(name, partial(add_command, function=function), help=text)


@dataclass(frozen=True)
class DataOptions:
    """Options that select a recipe and its streams."""

    recipe: RecipeFile
    """YAML file of the recipe."""
    words: Annotated[list[str], Option('STREAM|KEY=VALUE', positional=True, trailing=True)] = field(
        default_factory=list
    )
    """Streams to use (default: all), and overrides of recipe values, such as dataset.crop=random."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(DataOptions):
    """Options of `diffusion data verify`."""

    sample: Annotated[float, Fraction()] = 1.0
    """Fraction of the shards to check."""
    seed: Annotated[int, AtLeast(0)] = 0
    """Seed for choosing the shards."""
    jobs: Count = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Number of processes (default: one per core)."""


def run_verify(options: VerifyOptions) -> int:
    """Run `diffusion data verify`; return 3 if a shard is damaged, else 0."""
    recipe, names = _recipe_and_names(options)
    sections = _select(recipe, names, unused=('resolution', 'shape', 'repeat', 'choose', 'validate_hash'))
    from diffusion.inspection.verify import verify

    return verify(sections, sample=options.sample, seed=options.seed, jobs=options.jobs)


@dataclass(frozen=True, kw_only=True)
class LookOptions(DataOptions):
    """Options of `diffusion data look`."""

    out: Path
    """PNG or HTML file to write."""
    samples: Count = 8
    """Number of samples per bucket."""
    seed: Annotated[int, AtLeast(0)] = 0
    """Seed for choosing the samples."""
    decode: bool = False
    """Decode latents to images even if the VAE must be downloaded (default: only if it is local)."""


def run_look(options: LookOptions) -> int:
    if options.out.suffix not in ('.png', '.html'):
        raise UserError(f'--out: {options.out} has the extension {options.out.suffix or "none"!r}; use .png or .html')
    if options.out.is_dir():
        raise UserError(f'--out: {options.out} is a folder; choose another name')
    if not options.out.parent.is_dir() or not os.access(options.out.parent, os.W_OK):
        raise UserError(f'--out: {options.out.parent} is not a writable folder; create it, or choose another one')
    recipe, names = _recipe_and_names(options)
    chosen = _select(recipe, names)
    _check_complete(
        recipe.missing, ('model', 'loader', 'seed', *(path for section in chosen for path in LOOK_NEEDS[section]))
    )
    _check_folders(chosen, options.recipe)
    from diffusion.inspection.preview import look

    look(recipe, chosen, options.out, samples=options.samples, seed=options.seed, decode=options.decode)
    return 0


@dataclass(frozen=True, kw_only=True)
class BenchOptions(DataOptions):
    """Options of `diffusion data bench`."""

    workers: Annotated[list[int] | None, AtLeast(0)] = None
    """Worker counts to benchmark (default: 0, 1, 2, 4, ... up to the number of cores)."""
    batches: Count = 20
    """Number of batches to time for each worker count."""
    gpu: str = 'h100-sxm'
    """GPU to compare with, using the names of `diffusion plan`."""
    gpus_file: Path | None = None
    """File with more GPUs or other prices, in the format of gpus.yaml."""
    mfu: Annotated[float, Fraction()] = 0.4
    """Fraction of peak FLOP/s reached in training."""


def run_bench(options: BenchOptions) -> int:
    gpu = find_gpu(options.gpu, load_gpus(options.gpus_file))
    recipe, names = _recipe_and_names(options)
    chosen = _select(recipe, names, sections=['streams'])
    _check_complete(recipe.missing, ('model', 'loader', 'seed', 'dataset', 'global_batch', 'name', 'runs_dir'))
    _check_folders(chosen, options.recipe)
    from diffusion.inspection.bench import bench

    recipe = replace(recipe, streams=chosen['streams'])
    workers = options.workers or [0, *(2**power for power in range(len(os.sched_getaffinity(0)).bit_length()))]
    bench(recipe, gpu=gpu, workers=workers, batches=options.batches, mfu=options.mfu)
    return 0


@dataclass(frozen=True)
class MeasureOptions:
    """Options of `diffusion data measure-latents`."""

    vae: Annotated[str, Option(positional=True)]
    """Folder or Hub repository of an autoencoder, as for model.vae."""
    dataset: DatasetPlace
    """Folder or URL of a dataset that `diffusion prepare` wrote."""
    resolution: Annotated[Count, Option('PX')]
    """Side of the images in pixels."""
    revision: str | None = None
    """Commit of the repository."""
    samples: Count = 2000
    """Number of random images."""
    batch_size: Count = 16
    """Images per batch."""
    seed: Annotated[int, AtLeast(0)] = 0
    """Seed for choosing the images."""


def run_measure(options: MeasureOptions) -> int:
    check_dataset(options.dataset)
    from diffusion.inspection.latent_measurement import measure_latents

    settings = {name: value for name, value in vars(options).items() if name not in ('vae', 'dataset')}
    measure_latents(options.vae, options.dataset, **settings)
    return 0


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """Options of `diffusion data pack`."""

    dataset: DatasetPlace
    """Folder or URL of a dataset that `diffusion caption` has captioned."""
    captions: Annotated[list[str], Option('COLUMN')]
    """Columns of captions to write into shards; original stands for all captions that are in the shards already."""
    out: Annotated[str, DIR_OR_URL]
    """Folder or URL of the new dataset."""
    share: Annotated[str | None, Option('I/N')] = None
    """Write only share I of N of the shards, counted from 0, such as 3/16, on N machines. Then finish the dataset with
    the same command without --share (default: write all)."""


def run_pack(options: PackOptions) -> int:
    check_dataset(options.dataset)
    from diffusion.prepare.caption_packing import pack
    from diffusion.prepare.work_dir import Share

    share = None if options.share is None else Share.parse(options.share)
    count, left_out = pack(options.dataset, options.out, options.captions, share=share)
    if share is not None:
        print(f'{options.out}: share {share} is done; after the last share, run the command without --share')
        return 0
    print(f'{options.out}: {count:,} samples')
    if left_out:
        named = ', '.join(left_out[:10]) + (', ...' if left_out[10:] else '')
        print(printable(f'left out {len(left_out):,} samples without these captions: {named}; original keeps them'))
    return 0


@dataclass(frozen=True, kw_only=True)
class PairsOptions:
    """Options of `diffusion data pairs`."""

    places: Annotated[list[str], Option('PLACE', positional=True, files=True)]
    """Folders of diffusion compare with answers, folders of generated images with --score, or .parquet or .jsonl files
    with two images per row."""
    out: Annotated[Path, DIR]
    """Folder of the new dataset, for dataset.name: preference_pairs."""
    score: str | None = None
    """Score of generated images: the best image of a prompt is preferred over the worst one."""
    min_difference: float = 0.0
    """Minimum difference of two images' scores, or of the fractions of answers for them; other pairs are left out."""


def run_pairs(options: PairsOptions) -> int:
    if options.out.exists():
        raise UserError(f'--out: {options.out} exists; give another folder')
    from diffusion.prepare.preference_pairs import write_pairs

    counts = write_pairs(options.places, options.out, score=options.score, min_difference=options.min_difference)
    print(printable(f'{options.out}: {counts.pop("written"):,} pairs'))
    for reason, count in sorted(counts.items()):
        print(f'left out {count:,} pairs {reason}')
    return 0


COMMANDS: dict[str, tuple[Callable[..., int], str]] = {
    'verify': (run_verify, 'check shards: sizes, hashes, every image, caption and latent'),
    'look': (run_look, 'draw samples of each bucket as the model sees them'),
    'bench': (run_bench, 'measure loading speed and compare it with the demand of a GPU'),
    'measure-latents': (run_measure, "check that an autoencoder's latents have mean 0 and variance 1"),
    'pack': (run_pack, 'write a dataset again with captions of diffusion caption in its shards'),
    'pairs': (run_pairs, 'write pairs of a preferred and a rejected image from answers, scores or a table'),
    'remove': (run_remove, 'remove images from a dataset, by key or by their pixels'),
}


def _recipe_and_names(options: DataOptions) -> tuple[Recipe, list[str]]:
    """Return the recipe, with the KEY=VALUE overrides in `options.words`, and the stream names in `options.words`."""
    recipe = load(options.recipe, [word for word in options.words if '=' in word], allow_missing=True)
    return recipe, [word for word in options.words if '=' not in word]


def _select(
    recipe: Recipe, names: Sequence[str], *, sections: Sequence[str] = SECTIONS, unused: Collection[str] = ()
) -> Sections:
    """Return a recipe's streams with these names, by section.

    Without names, return the streams that its task reads and the streams of images from which its latents are made;
    streams with values that are still ??? are left out.

    Args:
        names: Names of streams, with or without their recipe key: `photos`, or `eval_streams.photos`.
        unused: Stream settings that the caller does not use; their values may be ???.
    """
    every = {
        'streams': recipe.streams,
        'eval_streams': recipe.eval_streams,
        'precompute.streams': recipe.precompute.streams,
    }
    found = {section: dict(every[section]) for section in sections if every[section] and every[section] != MISSING}
    if not names and recipe.task != 'precompute' and 'precompute.streams' in found:
        found['precompute.streams'] = image_streams(recipe) if recipe.dataset.name == 'latents' else {}
    if not found:
        _check_complete(recipe.missing, sections)
        raise UserError(f'{sections[0]}: the recipe has no streams; add at least one')
    known = {f'{section}.{name}' for section, streams in found.items() for name in streams}
    bare = {name for streams in found.values() for name in streams}
    for name in names:
        if name not in known | bare:
            place = 'the recipe' if len(sections) > 1 else f"the recipe's {sections[0]}"
            raise UserError(f'{name}: no such stream in {place}; {did_you_mean(name, bare | known)}')
    chosen: Sections = {}
    incomplete: list[Problem] = []
    for section, streams in found.items():
        for name, stream in streams.items():
            where = f'{section}.{name}'
            if not names or name in names or where in names:
                problems = [
                    each for each in _missing(recipe.missing, [where]) if each.where.split('.')[-1] not in unused
                ]
                incomplete += problems
                if not problems:
                    chosen.setdefault(section, {})[name] = stream
    if incomplete and (names or not chosen):
        raise RecipeError(incomplete)
    for problem in incomplete:
        print(f'skipped: {printable(str(problem))}', file=sys.stderr)
    return chosen


def _check_complete(missing: Sequence[Problem], paths: Collection[str]) -> None:
    """Raise RecipeError if a value at or inside one of these recipe paths, such as `model`, is still ???."""
    if problems := _missing(missing, paths):
        raise RecipeError(problems)


def _missing(missing: Sequence[Problem], paths: Collection[str]) -> list[Problem]:
    """Return the problems in `missing` (values that are still ???) at or inside one of these recipe paths."""
    return [each for each in missing if any(f'{each.where}.'.startswith(f'{path}.') for path in paths)]


def _check_folders(sections: Mapping[str, Mapping[str, Any]], path: str) -> None:
    """Raise RecipeError if a local folder of the streams is missing or has no samples."""
    problems = [problem for name, streams in sections.items() for problem in check_stream_folders(name, streams)]
    if problems:
        raise RecipeError(problems, path)
