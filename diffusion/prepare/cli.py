"""Command line of `diffusion prepare`; modules that handle images are imported only when the command runs."""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from diffusion.config.options import Option, Overrides, add_options, given_options
from diffusion.errors import UserError, printable

if TYPE_CHECKING:
    from diffusion.prepare.settings import PrepareSettings

SOURCES = {
    'recipe': 'prepare from a YAML file; the word `recipe` is optional',
    'folder': 'prepare image files with captions in .txt files, a CSV or a JSONL',
    'webdataset': 'prepare tar files of images and captions written by img2dataset',
    'parquet': 'prepare Parquet files with an image column',
    'tfrecord': 'prepare TFRecord files with an image feature, such as those of TensorFlow Datasets',
    'huggingface': 'prepare a split of a Hugging Face dataset, from the Hub or a folder',
    'openmoji': 'prepare emoji rendered at any size, captioned with their names',
}
"""Subcommands with help texts: `recipe`, and one per kind of source."""


@dataclass(frozen=True)
class ExecutionOptions:
    """Options of `diffusion prepare` that are not settings of the dataset."""

    append: bool = False
    """Add the images to the finished dataset at --out; settings that are not given are taken from the dataset."""
    share: Annotated[str | None, Option('I/N')] = None
    """Convert only share I of N, counted from 0, such as 3/16, on N machines with a shared work folder or with --parts.
    Then finish the dataset with the same command without --share (default: convert all)."""
    engine: Literal['processes', 'ray'] = 'processes'
    """Run the jobs in processes of this machine or on a Ray cluster."""


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(ExecutionOptions):
    """Options of `diffusion prepare recipe`."""

    recipe: Annotated[str, Option(positional=True, files=True)]
    """YAML file of the preparation: source, output and settings."""
    overrides: Overrides = field(default_factory=list)
    """Overrides of settings, such as filters.min_side=512."""


@dataclass(frozen=True)
class SourceOptions(ExecutionOptions):
    """Options of `diffusion prepare SOURCE`, besides settings."""

    set: Annotated[list[str], Option('KEY=VALUE', repeated=True)] = field(default_factory=list)
    """Set any setting, such as filters.min_side=512; can be given several times."""


def add_arguments(parser: Any) -> None:
    """Add the subcommands of `diffusion prepare` to its parser: `recipe`, and one per source kind such as `folder`."""
    sources = parser.add_subparsers(dest='source', required=True, metavar='RECIPE.yaml | SOURCE')
    for name, text in SOURCES.items():
        sources.add_parser(name, partial(_add_options, source=name), help=text)


def _add_options(parser: argparse.ArgumentParser, source: str) -> None:
    from diffusion.prepare.settings import SETTINGS_OF_SOURCE, PrepareSettings, SourceSettings

    if source == 'recipe':
        add_options(parser, RecipeOptions)
    else:
        add_options(parser, SourceSettings, only=SETTINGS_OF_SOURCE[source], required={'location': True})
        add_options(parser, PrepareSettings, required={'sizes': False})
        add_options(parser, SourceOptions)
    parser.set_defaults(call=run_prepare)


def run_prepare(args: argparse.Namespace) -> int:
    """Run `diffusion prepare`: convert images to a dataset and print the report.

    Returns:
        Exit status: 0 for success, 3 if the fraction of unusable inputs exceeds `max_rejected`, 130 if interrupted.
    """
    from diffusion.prepare.append import append
    from diffusion.prepare.pipeline import prepare
    from diffusion.prepare.work_dir import Share
    from diffusion.prepare.worker_pool import run_on_ray

    settings, options = _settings(args), ExecutionOptions(**given_options(ExecutionOptions, args))
    share = None if options.share is None else Share.parse(options.share)
    if not sys.stderr.isatty():  # progress bars appear only on a terminal
        print(f'preparing {settings.out}', file=sys.stderr)
    run = partial(run_on_ray, workers=settings.workers) if options.engine == 'ray' else None
    try:
        report = (append if options.append else prepare)(settings, run=run, share=share)
    except KeyboardInterrupt:
        print(
            f'interrupted; run the same command to resume, finished work is in {settings.work_folder}', file=sys.stderr
        )
        return 130
    if report is None:
        print(f'{settings.work_folder}: share {share} is done; after the last share, run the command without --share')
        return 0
    nothing_to_do = options.append and not report.inputs
    print(printable('\n'.join(report.notes) if nothing_to_do else report.text(settings.out)))
    return 0 if report.passed else 3


def _settings(args: argparse.Namespace) -> 'PrepareSettings':
    from diffusion.prepare.settings import PrepareSettings, SourceSettings, load_settings, settings_of

    if args.source == 'recipe':
        options = RecipeOptions(**given_options(RecipeOptions, args))
        return load_settings(options.recipe, options.overrides, inherit=_inherit if options.append else None)
    options = SourceOptions(**given_options(SourceOptions, args))
    values, source = given_options(PrepareSettings, args), given_options(SourceSettings, args)
    if values.get('aspects') in (['none'], ['sdxl']):
        values['aspects'] = values['aspects'][0]
    if len(source.get('caption_column', ())) == 1:
        source['caption_column'] = source['caption_column'][0]
    values['source'] = {'kind': args.source} | source
    if args.source == 'openmoji':
        from diffusion.prepare import openmoji

        values = openmoji.SETTINGS | values
    if options.append:
        return settings_of(_inherit(values), values, overrides=options.set)
    if 'sizes' not in values:
        raise UserError(
            '--sizes: is missing; give the side lengths of the resolution buckets in pixels, such as 256 512'
        )
    return settings_of(values, overrides=options.set)


def _inherit(values: Mapping[str, Any]) -> dict[str, Any]:
    from diffusion.prepare.append import inherited_settings

    return inherited_settings(str(values['out'])) if values.get('out') else {}
