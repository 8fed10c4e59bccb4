"""Command-line interface of `diffusion prepare`; imports the modules that handle images only when the command runs."""

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diffusion.errors import UserError, printable

if TYPE_CHECKING:
    from diffusion.prepare.settings import PrepareSettings

SETTINGS = (
    *('out', 'sizes', 'buckets', 'aspects', 'step', 'overwrite', 'workers', 'fast_jpeg', 'jpeg_quality', 'duplicates'),
    *('hold_out', 'max_rejected', 'formats', 'columns_from'),
)
"""Settings with a command-line option of the same name; the others are set with --set."""
SOURCE_OPTIONS = (
    *('location', 'captions', 'caption_text', 'caption_suffix', 'image_column', 'caption_column'),
    *('config', 'token_variable', 'select', 'split', 'limit', 'offset', 'seed'),
)
"""Options that only some source kinds have."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `diffusion prepare` to its parser: `recipe`, and one per source kind such as `folder`."""
    sources = parser.add_subparsers(dest='source', required=True, metavar='RECIPE.yaml | SOURCE')
    _add_recipe(sources.add_parser('recipe', help='prepare from a YAML file; the word `recipe` is optional'))
    _add_folder(sources.add_parser('folder', help='prepare image files with captions in .txt files, a CSV or a JSONL'))
    _add_webdataset(
        sources.add_parser('webdataset', help='prepare tar files of images and captions written by img2dataset')
    )
    _add_parquet(sources.add_parser('parquet', help='prepare Parquet files with an image column'))
    _add_huggingface(
        sources.add_parser('huggingface', help='prepare a split of a Hugging Face dataset, from the Hub or a folder')
    )
    _add_openmoji(sources.add_parser('openmoji', help='prepare emoji rendered at any size, captioned with their names'))


def run_prepare(args: argparse.Namespace) -> int:
    """Run `diffusion prepare`: convert images to a dataset, print the report, and return the exit status.

    Returns:
        Exit status: 0, 3 if more than the fraction `max_rejected` of the inputs was rejected, or 130 if interrupted.

    Raises:
        UserError: An argument or the input is invalid.
    """
    from diffusion.prepare.append import append
    from diffusion.prepare.engines import run_on
    from diffusion.prepare.pipeline import prepare
    from diffusion.prepare.work_dir import Share

    settings = _settings(args)
    share = None if args.share is None else Share.parse(args.share)
    if not sys.stderr.isatty():  # progress bars are shown only on a terminal
        print(f'preparing {settings.out}', file=sys.stderr)
    try:
        report = (append if args.append else prepare)(settings, run=run_on(args.engine, settings), share=share)
    except KeyboardInterrupt:
        print(
            f'interrupted; run the same command to resume, finished work is in {settings.work_folder}', file=sys.stderr
        )
        return 130
    if report is None:
        print(f'{settings.work_folder}: share {share} is done; after the last share, run the command without --share')
        return 0
    nothing_to_do = args.append and not report.inputs
    print(printable('\n'.join(report.notes) if nothing_to_do else report.text(settings.out)))
    return 0 if report.passed else 3


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('recipe', help='YAML file of the preparation: source, output and settings')
    parser.add_argument(
        'overrides', nargs='*', metavar='KEY=VALUE', help='override a setting, such as filters.min_side=512'
    )
    _add_execution_options(parser)


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('location', metavar='SRC', help='folder of images; subfolders are included')
    parser.add_argument(
        '--captions',
        metavar='FILE',
        help='.csv with columns file and caption, or .jsonl with file and caption or captions; also named file_name '
        'and text (default: a .txt or .json file beside each image, or if there are none, metadata.jsonl or '
        'metadata.csv in the folder)',
    )
    _add_caption_column(parser)
    _add_caption_text(parser)
    _add_shared_options(parser)


def _add_webdataset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'location', metavar='SRC', help='folder of tar files, local or in an object store: s3://bucket/laion'
    )
    _add_caption_column(parser)
    _add_caption_text(parser)
    _add_shared_options(parser)


def _add_parquet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'location', metavar='SRC', help='folder or pattern of .parquet files, local or in an object store'
    )
    _add_column_options(parser)
    _add_shared_options(parser)


def _add_huggingface(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'location',
        metavar='DATASET',
        help='ORG/NAME or ORG/NAME@REVISION on the Hub; files of it, such as '
        'hf://datasets/ORG/NAME@REVISION/data/train-*.parquet; or a folder that `hf download` or `save_to_disk` wrote',
    )
    parser.add_argument(
        '--split', metavar='NAME', help='split to read; others are never mixed in (default: train, or the only one)'
    )
    parser.add_argument(
        '--config', metavar='NAME', help='configuration to read (default: the default one, or the only one)'
    )
    parser.add_argument(
        '--token-variable',
        metavar='NAME',
        help='name of the environment variable with a token for gated and private datasets (default: HF_TOKEN, or the '
        'login of `hf auth login`)',
    )
    _add_column_options(parser)
    _add_caption_text(parser)
    _add_shared_options(parser)


def _add_column_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--image-column', metavar='NAME', help='name of the image column (default: detect by common names)'
    )
    _add_caption_column(parser)


def _add_caption_column(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--caption-column',
        action='append',
        metavar='NAME',
        help='caption column of a table, or key of the .json beside an image, where txt is the .txt beside it; repeat '
        'it for several, of which training chooses by dataset.caption_weights (default: detect by common names)',
    )


def _add_caption_text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--caption-text',
        choices=('whole', 'lines', 'first'),
        help='what a .txt file holds; whole: one caption; lines: a caption per line, of which training chooses; '
        'first: the first line alone (default: whole)',
    )
    parser.add_argument(
        '--caption-suffix',
        metavar='SUFFIX',
        help='suffix of the text file of an image, such as caption (default: txt)',
    )


def _add_shared_options(parser: argparse.ArgumentParser) -> None:
    """Add the options shared by all source kinds; an omitted option keeps the default of its setting."""
    parser.add_argument('--out', required=True, metavar='DIR', help='output dataset; contains one folder per size')
    parser.add_argument(
        '--sizes',
        type=int,
        nargs='+',
        metavar='PX',
        help='side lengths of the resolution buckets, in pixels; required except with --append',
    )
    parser.add_argument(
        '--buckets',
        choices=('every', 'largest'),
        help='sizes that an image is stored at: every one that needs no upscaling, or the largest of them '
        '(default: every)',
    )
    parser.add_argument('--overwrite', action='store_true', help='replace the existing dataset at --out')
    parser.add_argument(
        '--aspects',
        nargs='+',
        metavar='SHAPE',
        help='aspect-ratio buckets: none, sdxl, or shapes as width x height, such as 640x384 (default: none)',
    )
    parser.add_argument(
        '--step',
        type=int,
        metavar='PX',
        help='divisor of the sides of all buckets: 16 for a transformer with patches of 2x2 cells (default: 8)',
    )
    parser.add_argument('--workers', type=int, metavar='N', help='number of worker processes (default: one per core)')
    parser.add_argument('--duplicates', choices=('none', 'exact', 'near'), help='duplicates to remove (default: none)')
    parser.add_argument(
        '--hold-out',
        type=int,
        metavar='N',
        help='write N images to a second dataset, DIR-held-out, instead of the training set (default: 0)',
    )
    parser.add_argument(
        '--max-rejected',
        type=float,
        metavar='FRACTION',
        help='exit with status 3 if a larger fraction of inputs is rejected (default: 0.01)',
    )
    parser.add_argument(
        '--formats',
        nargs='+',
        choices=('heic', 'jxl', 'svg'),
        help='image formats to read besides JPEG, PNG, WebP, GIF, BMP, TIFF and AVIF; they need the extra `formats`',
    )
    parser.add_argument(
        '--columns-from',
        metavar='FILE.py',
        help='run this Python file, whose function columns(images, captions) computes columns of each image, such as '
        'scores for filters.columns',
    )
    parser.add_argument(
        '--fast-jpeg',
        action='store_true',
        default=None,  # `--append` without it uses that of the dataset
        help='decode JPEGs that are at least four times as large as needed at 1/2, 1/4 or 1/8 of their size: much '
        'faster for camera photographs, with differences below what JPEG itself changes',
    )
    parser.add_argument('--jpeg-quality', type=int, metavar='Q', help='quality of stored JPEGs, 1 to 100 (default: 95)')
    parser.add_argument(
        '--set',
        action='append',
        default=[],
        metavar='KEY=VALUE',
        help='set any other setting, such as filters.min_side=512; can be given several times',
    )
    _add_execution_options(parser)


def _add_execution_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--append',
        action='store_true',
        help='add the images to the finished dataset at --out; settings that are left out are those of the dataset',
    )
    parser.add_argument(
        '--share',
        metavar='I/N',
        help='convert only share I of N, counted from 0, such as 3/16, for N machines with a common work folder or '
        'with --set parts=URL; the same command without --share then finishes the dataset',
    )
    parser.add_argument(
        '--engine',
        choices=('processes', 'ray'),
        default='processes',
        help='run the jobs in processes of this machine or on a Ray cluster (default: %(default)s)',
    )


def _add_openmoji(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--select',
        choices=('distinct', 'named', 'all'),
        help='distinct: named emoji, one per family, without flags, letters and near-duplicates; named: all with a '
        "name, except skin tones; all: everything, with the caption 'emoji' for unnamed ones (default: distinct)",
    )
    parser.add_argument(
        '--split',
        choices=('all', 'train', 'heldout'),
        help='heldout: 1 of 16 families of variants; train: the others (default: all)',
    )
    parser.add_argument('--limit', type=int, metavar='N', help='use at most N emoji (default: all)')
    parser.add_argument('--offset', type=int, metavar='N', help='skip the first N emoji of the selection (default: 0)')
    parser.add_argument('--seed', type=int, help='seed of the order of the selection (default: 17)')
    _add_shared_options(parser)


def _settings(args: argparse.Namespace) -> 'PrepareSettings':
    from diffusion.prepare.settings import load_settings, settings_of

    if args.source == 'recipe':
        return load_settings(args.recipe, args.overrides, inherit=_inherit if args.append else None)
    values: dict[str, Any] = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    if values.get('aspects') in (['none'], ['sdxl']):
        values['aspects'] = values['aspects'][0]
    options = {name: getattr(args, name, None) for name in SOURCE_OPTIONS}
    if options['caption_column'] is not None and len(options['caption_column']) == 1:
        options['caption_column'] = options['caption_column'][0]
    values['source'] = {'kind': args.source} | {name: value for name, value in options.items() if value is not None}
    if args.source == 'openmoji':
        from diffusion.prepare import openmoji

        values |= openmoji.SETTINGS
    if args.append:
        return settings_of(_inherit(values), values, overrides=args.set)
    if args.sizes is None:
        raise UserError(
            '--sizes: is missing; give the side lengths of the resolution buckets in pixels, such as 256 512'
        )
    return settings_of(values, overrides=args.set)


def _inherit(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the dataset that is added to, for those that are left out."""
    from diffusion.prepare.append import inherited_settings

    return inherited_settings(str(values['out'])) if values.get('out') else {}
