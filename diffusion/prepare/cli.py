"""The arguments of `diffusion prepare`; torch and Streaming are imported only when it runs."""

import argparse
import sys
from pathlib import Path

from diffusion.prepare.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sub-commands `openmoji` and `folder`."""
    sources = parser.add_subparsers(dest='source', required=True, metavar='SOURCE')
    _add_openmoji(sources.add_parser('openmoji', help='emoji drawn at any size, captioned by their names'))
    _add_folder(sources.add_parser('folder', help='pictures of a folder with .txt beside them, or a CSV or JSONL'))


def run(args: argparse.Namespace) -> int:
    """Prepare and print the report: 0, or 3 when more was rejected than allowed.

    Raises:
        ValueError: An argument or input is wrong, or writing failed; nothing is left at --out then.
    """
    if not sys.stderr.isatty():
        print(f'preparing {args.out}', file=sys.stderr)
    try:
        report = _prepare_openmoji(args) if args.source == 'openmoji' else _prepare_folder(args)
    except OSError as error:
        raise ValueError(f'{args.out}: {error}; nothing is written, make room or give another --out') from error
    print(report.text(args.out))
    return 0 if report.passed else 3


def _add_openmoji(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument(
        '--select',
        choices=('distinct', 'named', 'all'),
        default='distinct',
        help='distinct: named, one a family, no flags, letters and near-copies; named: all with a name but skin tones; '
        "all: also those without a name, captioned 'emoji' (default: %(default)s)",
    )
    parser.add_argument(
        '--split',
        choices=('all', 'train', 'heldout'),
        default='all',
        help='heldout is one family of variants in sixteen (default: %(default)s)',
    )
    parser.add_argument('--limit', type=int, metavar='N', help='at most N pictures')
    parser.add_argument('--offset', type=int, default=0, metavar='N', help='leave out the first N of the selection')
    parser.add_argument('--seed', type=int, default=17, help="of the selection's order (default: %(default)s)")


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('pictures', type=Path, metavar='SRC', help='jpg, png, webp, bmp, gif; in sub-folders or not')
    _add_common(parser)
    parser.add_argument(
        '--captions',
        type=Path,
        metavar='FILE',
        help='.csv with columns file and caption, or .jsonl with file and caption or captions',
    )
    parser.add_argument(
        '--max-rejected',
        type=float,
        default=0.01,
        metavar='SHARE',
        help='exit with 3 when a larger share is left out (default: %(default)s)',
    )
    parser.add_argument('--jpeg-quality', type=int, default=95, metavar='Q', help='default: %(default)s')


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--out', type=Path, required=True, metavar='DIR', help='the dataset, a folder a size in it')
    parser.add_argument(
        '--sizes', type=int, nargs='+', required=True, metavar='PX', help='resolution buckets in pixels'
    )
    parser.add_argument('--overwrite', action='store_true', help='replace the dataset at --out')


def _prepare_openmoji(args: argparse.Namespace) -> Report:
    from diffusion.prepare.openmoji import prepare_openmoji

    return prepare_openmoji(
        args.out,
        args.sizes,
        select=args.select,
        split=args.split,
        limit=args.limit,
        offset=args.offset,
        seed=args.seed,
        overwrite=args.overwrite,
    )


def _prepare_folder(args: argparse.Namespace) -> Report:
    from diffusion.prepare.folder import prepare_folder

    return prepare_folder(
        args.pictures,
        args.out,
        args.sizes,
        captions=args.captions,
        max_rejected=args.max_rejected,
        jpeg_quality=args.jpeg_quality,
        overwrite=args.overwrite,
    )
