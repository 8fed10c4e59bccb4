"""The arguments of `diffusion prepare`; modules that read and write images are imported only when it runs."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusion.prepare.settings import PrepareSettings

SETTINGS = ('out', 'sizes', 'aspects', 'overwrite', 'workers', 'jpeg_quality', 'duplicates', 'max_rejected')
"""Settings of the short forms that have an option of their own; --set gives the others."""
SOURCE_OPTIONS = (
    *('location', 'captions', 'image_column', 'caption_column'),
    *('select', 'split', 'limit', 'offset', 'seed'),
)
"""Options of one kind of source or another."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands: a recipe, and a short form per kind of source."""
    sources = parser.add_subparsers(dest='source', required=True, metavar='RECIPE.yaml | SOURCE')
    _add_recipe(sources.add_parser('recipe', help='what a YAML says; the word `recipe` may be left out'))
    _add_folder(sources.add_parser('folder', help='images of a folder with .txt beside them, or a CSV or JSONL'))
    _add_webdataset(sources.add_parser('webdataset', help='tars of images and captions, as img2dataset writes them'))
    _add_parquet(sources.add_parser('parquet', help='Parquet files with a column of images'))
    _add_openmoji(sources.add_parser('openmoji', help='emoji drawn at any size, captioned by their names'))


def run_prepare(args: argparse.Namespace) -> int:
    """Prepare and print the report; returns 0, 3 when more was rejected than allowed, or 130 when interrupted.

    Raises:
        UserError: An argument or input is wrong, or writing failed.
    """
    from diffusion.prepare.engines import run_on
    from diffusion.prepare.pipeline import prepare
    from diffusion.prepare.work_dir import Share

    settings = _settings(args)
    share = None if args.share is None else Share.parse(args.share)
    if not sys.stderr.isatty():
        print(f'preparing {settings.out}', file=sys.stderr)
    try:
        report = prepare(settings, run=run_on(args.engine, settings), share=share)
    except KeyboardInterrupt:
        print(f'interrupted; the same command goes on, what is done is in {settings.work_folder}', file=sys.stderr)
        return 130
    if report is None:
        print(f'{settings.work_folder}: share {share} is done; when all are, the command without --share does the rest')
        return 0
    print(report.text(settings.out))
    return 0 if report.passed else 3


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('recipe', help='a YAML file')
    parser.add_argument('overrides', nargs='*', metavar='KEY=VALUE', help='such as filters.min_side=512')
    _add_where(parser)


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('location', metavar='SRC', help='a folder; its sub-folders are read too')
    parser.add_argument(
        '--captions',
        metavar='FILE',
        help='.csv with columns file and caption, or .jsonl with file and caption or captions',
    )
    _add_short(parser)


def _add_webdataset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'location', metavar='SRC', help='a folder of tars, here or in an object store: s3://bucket/laion'
    )
    _add_short(parser)


def _add_parquet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('location', metavar='SRC', help='a folder of .parquet files, here or in an object store')
    parser.add_argument('--image-column', metavar='NAME', help='column of the images (default: one of the usual names)')
    parser.add_argument('--caption-column', metavar='NAME', help='of the captions (default: one of the usual names)')
    _add_short(parser)


def _add_short(parser: argparse.ArgumentParser) -> None:
    """Add the options that the short forms share; an option that is not given leaves the setting's default."""
    parser.add_argument('--out', required=True, metavar='DIR', help='the dataset; each size is a folder in it')
    parser.add_argument(
        '--sizes', type=int, nargs='+', required=True, metavar='PX', help='resolution buckets in pixels'
    )
    parser.add_argument('--overwrite', action='store_true', help='replace the dataset at --out')
    parser.add_argument('--aspects', nargs='+', metavar='SHAPE', help='none, sdxl, or shapes such as 640x384')
    parser.add_argument('--workers', type=int, metavar='N', help='processes (default: one a core)')
    parser.add_argument('--duplicates', choices=('none', 'exact', 'near'), help='which are left out (default: none)')
    parser.add_argument(
        '--max-rejected',
        type=float,
        metavar='SHARE',
        help='exit with 3 when a larger share is left out (default: 0.01)',
    )
    parser.add_argument('--jpeg-quality', type=int, metavar='Q', help='default: 95')
    parser.add_argument(
        '--set', action='append', default=[], metavar='KEY=VALUE', help='any other setting: filters.min_side=512'
    )
    _add_where(parser)


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--share', metavar='I/N', help='only the parts of one of N machines that see the work folder: 3/16'
    )
    parser.add_argument('--engine', choices=('processes', 'ray'), default='processes', help='default: %(default)s')


def _add_openmoji(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--select',
        choices=('distinct', 'named', 'all'),
        help='distinct: named, one per family, no flags, letters and near-copies; named: all with a name but skin '
        "tones; all: also those without a name, captioned 'emoji' (default: distinct)",
    )
    parser.add_argument(
        '--split',
        choices=('all', 'train', 'heldout'),
        help='heldout is one family of variants in sixteen (default: all)',
    )
    parser.add_argument('--limit', type=int, metavar='N', help='use at most N emoji')
    parser.add_argument('--offset', type=int, metavar='N', help='leave out the first N emoji of the selection')
    parser.add_argument('--seed', type=int, help="seed of the selection's order (default: 17)")
    _add_short(parser)


def _settings(args: argparse.Namespace) -> 'PrepareSettings':
    from diffusion.prepare.settings import load_settings, settings_of

    if args.source == 'recipe':
        return load_settings(args.recipe, args.overrides)
    values: dict[str, Any] = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    if values.get('aspects') in (['none'], ['sdxl']):
        values['aspects'] = values['aspects'][0]
    options = {name: getattr(args, name, None) for name in SOURCE_OPTIONS}
    values['source'] = {'kind': args.source} | {name: value for name, value in options.items() if value is not None}
    if args.source == 'openmoji':
        from diffusion.prepare import openmoji

        values |= openmoji.SETTINGS
    return settings_of(values, overrides=args.set)
