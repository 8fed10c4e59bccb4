"""Arguments of `diffusion compare`, checked without importing torch."""

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from diffusion.errors import UserError

DEFAULT_PORT = 8765
DEFAULT_DIFFERENCE_POINTS = 5.0
OPTIONS = {
    'build': ('prompts', 'prompt_column', 'limit', 'out', 'guidance', 'steps', 'seed', 'checks'),
    '--serve': ('host', 'port'),
    '--analyze': ('key', 'png', 'difference', 'json'),
}
"""Arguments that only one of the three uses of the command reads."""


@dataclass(frozen=True)
class ComparedModel:
    """One side of a comparison.

    Args:
        name: `A` or `B`.
        place: Path of the checkpoint, of the exported pipeline, or of the folder of images.
        source: Place for people to read, which for a checkpoint that was downloaded is its URL.
        files: Image of each prompt, of a folder of images; empty for a model that generates them.
    """

    name: str
    place: Path
    source: str
    files: Sequence[Path] = ()


@dataclass(frozen=True)
class CompareSettings:
    """Settings of a comparison page.

    Args:
        a: First model.
        b: Second model.
        prompts: The prompts.
        source: Source of the prompts, for the key.
        out: Output folder.
        guidance_scale: Scale of both models; None for that of each recipe.
        num_inference_steps: Sampling steps of both models; None for those of each recipe.
        seed: Seed of the first prompt's images; each further prompt has the next one.
        checks: Number of attention checks.
    """

    a: ComparedModel
    b: ComparedModel
    prompts: Sequence[str]
    source: str
    out: Path
    guidance_scale: float | None
    num_inference_steps: int | None
    seed: int
    checks: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `diffusion compare`: building a page, serving it, and analyzing answers."""
    sides = 'run, checkpoint, exported pipeline, or folder of images that are numbered as the prompts'
    parser.add_argument('a', nargs='?', metavar='A', help=f'{sides}')
    parser.add_argument('b', nargs='?', metavar='B', help='the same for the other side')
    build = parser.add_argument_group('build a page')
    build.add_argument(
        '--prompts',
        metavar='FILE',
        help='prompts as .txt, .csv, .tsv or .jsonl; "own" for 120 prompts of this package (required)',
    )
    build.add_argument('--prompt-column', metavar='NAME', help='column of the prompts (default: found by its name)')
    build.add_argument(
        '--limit', type=_positive, metavar='N', help='use N of the prompts, evenly spread over the file (default: all)'
    )
    build.add_argument('--out', metavar='DIR', help='output folder, which must not exist or be empty (required)')
    build.add_argument(
        '--guidance',
        type=float,
        metavar='X',
        help="guidance scale of both; 1 turns guidance off (default: each recipe's; 7.5 for an export)",
    )
    build.add_argument(
        '--steps', type=int, metavar='N', help="sampling steps of both (default: each recipe's; 50 for an export)"
    )
    build.add_argument(
        '--seed', type=int, metavar='N', help='seed of the first prompt; each further prompt adds 1 (default: 0)'
    )
    build.add_argument(
        '--checks',
        type=_count,
        metavar='N',
        help='number of attention checks, pairs in which one image is damaged (default: one per 5 prompts, 2 to 6)',
    )
    serve = parser.add_argument_group('serve a page')
    serve.add_argument(
        '--serve',
        nargs='?',
        const='',
        metavar='DIR',
        help='serve the page in DIR, or the one just built, and collect answers',
    )
    serve.add_argument(
        '--host', metavar='NAME', help='address to serve on; 0.0.0.0 for all of this machine (default: localhost)'
    )
    serve.add_argument('--port', type=_port, metavar='N', help=f'port; 0 for a free one (default: {DEFAULT_PORT})')
    analyze = parser.add_argument_group('analyze answers')
    analyze.add_argument('--analyze', nargs='+', metavar='FILE', help='files of answers, or folders of them')
    analyze.add_argument(
        '--key', metavar='FILE', help='key of the comparison (default: key.json beside the answers or one folder up)'
    )
    analyze.add_argument('--png', metavar='FILE', help='also draw the result to this PNG file (default: no figure)')
    analyze.add_argument(
        '--difference',
        type=float,
        metavar='POINTS',
        help='smallest preference to detect, in percentage points above 50%% (default: 5); used to estimate how many '
        'more answers are needed',
    )
    analyze.add_argument('--json', action='store_const', const=True, help='print the result as JSON')


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a positive integer')
    return int(text)


def _count(text: str) -> int:
    return 0 if text == '0' else _positive(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f'{text!r} is not a port, 0 to 65535')
    return int(text)


def check_use(args: argparse.Namespace) -> None:
    """Check that the arguments are those of one use of the command: building (and serving), serving, or analyzing.

    Raises:
        UserError: An argument is missing, or belongs to another use.
    """
    builds = args.a is not None or (args.serve is None and args.analyze is None)
    if args.analyze is not None and (builds or args.serve is not None):
        other = f'A and B ({args.a})' if args.a is not None else '--serve'
        raise UserError(f'--analyze: reads answers and does nothing else; remove {other}')
    uses = {'build': builds, '--serve': args.serve is not None, '--analyze': args.analyze is not None}
    for use, options in OPTIONS.items():
        given = [option for option in options if getattr(args, option) is not None]
        if given and not uses[use]:
            needed = 'A and B, to build a page' if use == 'build' else use
            raise UserError(f'--{given[0].replace("_", "-")}: needs {needed}; add that, or remove it')
    if args.serve == '' and not builds:
        raise UserError('--serve: name the folder of the page, such as --serve page')
    if not builds:
        return
    if int(os.environ.get('WORLD_SIZE', '1')) > 1:
        raise UserError('compare: runs in one process; start it as `diffusion compare`, without a launcher')
    if args.b is None:
        missing = 'A and B: are missing' if args.a is None else 'B: is missing'
        raise UserError(f'{missing}; give two of run, checkpoint, exported pipeline and folder of images')
    if args.serve:
        raise UserError(f'--serve: serves the page that is built, --out; remove {args.serve!r}')
    for option, example in (('prompts', 'prompts.txt'), ('out', 'page')):
        if getattr(args, option) is None:
            raise UserError(f'--{option}: is missing; add for example --{option} {example}')


def compare_settings(args: argparse.Namespace) -> CompareSettings:
    """Return the settings of a page that is to be built.

    Raises:
        UserError: There is no such model, file or prompt, A and B are the same, the output folder is in use, or an
            option is out of range.
    """
    from diffusion.evaluation.prompts import OWN, own_prompts, read_prompts

    out = Path(args.out)
    _check_out(out)
    try:
        own = args.prompts == OWN
        texts = [each.text for each in (own_prompts() if own else read_prompts(Path(args.prompts), args.prompt_column))]
    except UserError as error:
        raise UserError(f'--prompts: {error}') from error
    chosen = range(len(texts))
    if args.limit is not None:
        if args.limit > len(texts):
            raise UserError(f'--limit: {args.limit} is more than the {len(texts)} prompts of {args.prompts}')
        chosen = [number * len(texts) // args.limit for number in range(args.limit)]
    if len(chosen) < 2:
        raise UserError('--prompts: one prompt gives no confidence interval; use at least 2, or better 50 or more')
    checks = max(2, min(6, len(chosen) // 5)) if args.checks is None else args.checks
    if checks > len(chosen):
        raise UserError(f'--checks: {checks} is more than the {len(chosen)} prompts; use at most that')
    prompts = [texts[index] for index in chosen]
    a, b = (_model(name, place, texts, chosen, args) for name, place in (('A', args.a), ('B', args.b)))
    if a.place.resolve() == b.place.resolve():
        raise UserError(f'A and B: are the same ({a.source}); name two different ones')
    sampling = [option for option in ('guidance', 'steps', 'seed') if getattr(args, option) is not None]
    if sampling and a.files and b.files:
        raise UserError(f'--{sampling[0]}: A and B are folders of images, so nothing is generated; remove it')
    return CompareSettings(
        a, b, prompts, args.prompts, out, args.guidance, args.steps, 0 if args.seed is None else args.seed, checks
    )


def _check_out(out: Path) -> None:
    """Raise UserError if a page cannot be written to a folder; images of an interrupted call may be there."""
    from diffusion.evaluation.comparison_key import KEY
    from diffusion.evaluation.comparison_page import PAGE
    from diffusion.storage.atomic import UNFINISHED
    from diffusion.storage.writable import check_writable

    check_writable(out, '--out')
    if (out / PAGE).exists():
        raise UserError(
            f'--out: {out} has a page already, which people may be answering; serve it with --serve {out}, or give '
            'another folder'
        )
    if out.exists():
        names = sorted(path.name for path in out.iterdir())
        others = [name for name in names if name not in (KEY, 'images') and UNFINISHED not in name]
        if others:
            raise UserError(f'--out: {out} is not empty ({others[0]}); give a folder that does not exist yet')


def _model(
    name: str, place: str, prompts: Sequence[str], chosen: Sequence[int], args: argparse.Namespace
) -> ComparedModel:
    """Return one side of a comparison.

    Args:
        name: `A` or `B`.
        place: Path or URL.
        prompts: All prompts of the file, whose numbers a folder of images has.
        chosen: Indices of the prompts that are used.
        args: Arguments of the command.
    """
    from diffusion.checkpointing.checkpoint_store import RECIPE, list_checkpoints
    from diffusion.checkpointing.run_folder import find_checkpoint
    from diffusion.evaluation.compared_images import has_images, numbered_images
    from diffusion.tasks.argument_checks import check_generate, is_export

    path = Path(place)
    try:
        if '://' not in place and not path.exists():
            raise UserError(f'{place}: does not exist; check the path')
        # The folder of a run has images too: its loss curve and samples.
        is_run = '://' in place or (path / RECIPE).is_file() or (path.is_dir() and bool(list_checkpoints(path)))
        if not is_run and not is_export(path) and has_images(path):
            files = numbered_images(path, prompts)
            return ComparedModel(name, path, place, [files[index] for index in chosen])
        generated = {
            **{'source': place, 'prompts': [prompts[index] for index in chosen], 'out': args.out},
            **{'seed': 0 if args.seed is None else args.seed, 'steps': args.steps, 'guidance': args.guidance},
            **{'scheduler': None, 'lora': None, 'weights': None},
        }
        arguments = argparse.Namespace(**generated)
        check_generate(arguments)
        # Choose the checkpoint here: a run that is being trained may have a newer one when A or B is loaded.
        found = Path(arguments.source) if is_export(Path(arguments.source)) else find_checkpoint(arguments.source)
        return ComparedModel(name, found, f'{place} ({found.name})' if '://' in place else str(found))
    except UserError as error:
        raise UserError(str(error) if str(error).startswith('--') else f'{name}: {error}') from error


def check_address(host: str, port: int) -> None:
    """Check that a page can be served at an address, before it is built.

    Raises:
        UserError: The address cannot be used.
    """
    from diffusion.evaluation.page_server import PageServer

    PageServer(host, port, BaseHTTPRequestHandler).server_close()


def check_serving(folder: Path) -> None:
    """Check that a folder has a page of a comparison.

    Raises:
        UserError: It does not, or the page is not that of its key.
    """
    from diffusion.evaluation.comparison_key import KEY, read_key
    from diffusion.evaluation.comparison_page import PAGE

    if not (folder / PAGE).is_file():
        raise UserError(f'--serve: {folder} has no {PAGE}; build the page with diffusion compare A B --out {folder}')
    key = read_key(folder / KEY)
    if f'"comparison":"{key.comparison}"' not in (folder / PAGE).read_text(encoding='utf-8'):
        raise UserError(f'--serve: {folder / KEY} is not the key of {folder / PAGE}; copy both from one folder')


@dataclass(frozen=True)
class AnalyzeSettings:
    """Settings of an analysis.

    Args:
        files: Files of answers.
        key: File of the comparison's key.
        png: Output file of the figure; None for none.
        difference: Distance from one half for which the answers needed are computed, such as 0.05.
        json: Print JSON instead of a table.
    """

    files: Sequence[Path]
    key: Path
    png: Path | None
    difference: float
    json: bool


def analyze_settings(args: argparse.Namespace) -> AnalyzeSettings:
    """Return the settings of an analysis.

    Raises:
        UserError: There are no answers or there is no key, or an option is out of range.
    """
    from diffusion.evaluation.comparison_key import KEY
    from diffusion.storage.writable import check_writable

    given = [Path(name) for name in args.analyze]
    files = [file for path in given for file in (sorted(path.glob('*.json')) if path.is_dir() else [path])]
    if args.key is not None:
        key = Path(args.key)
    else:
        near = [folder / KEY for path in [*given, *files] for folder in (path, path.parent, path.parent.parent)]
        found = next((path for path in near if path.is_file()), None)
        if found is None:
            raise UserError(f'--key: there is no {KEY} near {given[0]}; give the one beside the page')
        key = found
    files = [file for file in files if file.name != KEY]
    if not files:
        raise UserError(f'--analyze: {given[0]} has no files of answers; give those that people sent')
    points = DEFAULT_DIFFERENCE_POINTS if args.difference is None else args.difference
    if not (math.isfinite(points) and 0 < points < 50):
        raise UserError(f'--difference: {points:g} is out of range; use more than 0 and less than 50 percentage points')
    png = None if args.png is None else Path(args.png)
    if png is not None:
        check_writable(png.parent, '--png')
        if png.suffix.lower() != '.png' or png.is_dir():
            raise UserError(f'--png: {png} is not the name of a PNG file; use for example result.png')
    return AnalyzeSettings(files, key, png, points / 100, bool(args.json))
