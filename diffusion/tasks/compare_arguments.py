"""Options of `diffusion compare`, checked without importing torch."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Annotated

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_store import RECIPE, list_checkpoints
from diffusion.config.declarations import AtLeast
from diffusion.config.options import DIR, FILE, Count, Option, Port
from diffusion.errors import UserError
from diffusion.evaluation.compared_images import has_images, numbered_images
from diffusion.evaluation.comparison_page import KEY, PAGE, read_key
from diffusion.evaluation.page_server import PageServer
from diffusion.evaluation.prompts import OWN, own_prompts, read_prompts
from diffusion.storage.atomic import UNFINISHED
from diffusion.storage.local_files import check_writable
from diffusion.tasks.argument_checks import GenerateOptions, check_generate, is_export


@dataclass(frozen=True)
class ComparedModel:
    """Model or images on side `A` or `B` of a comparison.

    Args:
        place: Path of the checkpoint, exported pipeline or folder of images.
        source: Location to show to people: the path, or the URL of a downloaded checkpoint.
        files: Image file of each prompt if `place` is a folder of images; empty for a model.
    """

    name: str
    place: Path
    source: str
    files: Sequence[Path] = ()


@dataclass(frozen=True)
class CompareSettings:
    """Settings of a comparison page, from `BuildOptions`; `source` is the origin of the prompts, for the key file."""

    a: ComparedModel
    b: ComparedModel
    prompts: Sequence[str]
    source: str
    out: Path
    guidance_scale: float | None
    num_inference_steps: int | None
    seed: int
    checks: int


@dataclass(frozen=True)
class BuildOptions:
    """Options to build a page."""

    a: Annotated[str | None, Option(positional=True, files=True)] = None
    """Run, checkpoint, exported pipeline, or folder of images numbered like the prompts."""
    b: Annotated[str | None, Option(positional=True, files=True)] = None
    """Second run, checkpoint, exported pipeline or folder of images."""
    prompts: Annotated[str | None, FILE] = None
    """File of prompts (.txt, .csv, .tsv or .jsonl), or "own" for this package's 120 prompts (required)."""
    prompt_column: Annotated[str | None, Option('NAME')] = None
    """Column with the prompts (default: found by its name)."""
    limit: Count | None = None
    """Number of prompts to use, evenly spread over the file (default: all)."""
    out: Annotated[str | None, DIR] = None
    """Output folder, which must be new or empty (required)."""
    guidance: float | None = None
    """Guidance scale of both models; 1 turns guidance off (default: each recipe's; 7.5 for an export)."""
    steps: int | None = None
    """Number of sampling steps of both models (default: each recipe's; 50 for an export)."""
    seed: int | None = None
    """Seed of the first prompt; it increases by 1 per prompt (default: 0)."""
    checks: Annotated[int | None, AtLeast(0)] = None
    """Number of attention checks, which are pairs with one damaged image (default: one per 5 prompts, but 2 to 6)."""


@dataclass(frozen=True)
class ServeOptions:
    """Options to serve a page."""

    serve: Annotated[str | None, Option('DIR', files=True, const='')] = None
    """Serve the page in this folder and collect answers; without a value, serve the page that was just built."""
    host: Annotated[str | None, Option('NAME')] = None
    """Address to serve on; 0.0.0.0 means all addresses of this machine (default: localhost)."""
    port: Port | None = None
    """Port; 0 chooses a free one (default: 8765)."""


@dataclass(frozen=True)
class AnalyzeOptions:
    """Options to analyze answers."""

    analyze: Annotated[list[str] | None, FILE] = None
    """Files of answers, or folders with such files."""
    key: Annotated[str | None, FILE] = None
    """Key file of the comparison (default: key.json in the folder of the answers or its parent)."""
    png: Annotated[str | None, FILE] = None
    """PNG file for a figure of the result (default: no figure)."""
    difference: Annotated[float | None, Option('POINTS')] = None
    """Smallest preference to detect, in percentage points above 50%; used to estimate the number of answers still
    needed (default: 5)."""
    json: bool = False
    """Print the result as JSON."""


def check_use(build: BuildOptions, serve: ServeOptions, analyze: AnalyzeOptions) -> None:
    """Raise UserError unless all options belong to one use of the command: build (and serve), serve, or analyze."""
    builds = build.a is not None or (serve.serve is None and analyze.analyze is None)
    if analyze.analyze is not None and (builds or serve.serve is not None):
        other = f'A and B ({build.a})' if build.a is not None else '--serve'
        raise UserError(f'--analyze: only reads answers; remove {other}')
    uses = (
        (build, builds, 'A and B, to build a page'),
        (serve, serve.serve is not None, '--serve'),
        (analyze, analyze.analyze is not None, '--analyze'),
    )
    for options, is_used, needed in uses:
        given = [name for name, value in vars(options).items() if value is not None and value is not False]
        if given and not is_used:
            raise UserError(f'--{given[0].replace("_", "-")}: needs {needed}; add that, or remove this option')
    if serve.serve == '' and not builds:
        raise UserError('--serve: name the folder of the page, such as --serve page')
    if not builds:
        return
    if int(os.environ.get('WORLD_SIZE', '1')) > 1:
        raise UserError('compare: runs in one process; start it as `diffusion compare`, without a launcher')
    if build.b is None:
        missing = 'A and B: are missing' if build.a is None else 'B: is missing'
        raise UserError(f'{missing}; give two of run, checkpoint, exported pipeline and folder of images')
    if serve.serve:
        raise UserError(f'--serve: serves the page that is built in --out; remove {serve.serve!r}')
    for option, example in (('prompts', 'prompts.txt'), ('out', 'page')):
        if getattr(build, option) is None:
            raise UserError(f'--{option}: is missing; add for example --{option} {example}')


def compare_settings(options: BuildOptions) -> CompareSettings:
    """Return the settings of a page to be built; raise UserError for wrong options, models or prompts."""
    a, b, source = options.a, options.b, options.prompts
    assert a is not None and b is not None and source is not None and options.out is not None, '`check_use` refuses it'
    out = Path(options.out)
    _check_out(out)
    try:
        read = own_prompts() if source == OWN else read_prompts(Path(source), options.prompt_column)
        texts = [each.text for each in read]
    except UserError as error:
        raise UserError(f'--prompts: {error}') from error
    chosen = range(len(texts))
    if options.limit is not None:
        if options.limit > len(texts):
            raise UserError(f'--limit: {options.limit} is more than the {len(texts)} prompts of {source}')
        chosen = [number * len(texts) // options.limit for number in range(options.limit)]
    if len(chosen) < 2:
        raise UserError('--prompts: one prompt gives no confidence interval; use at least 2, or better 50 or more')
    checks = max(2, min(6, len(chosen) // 5)) if options.checks is None else options.checks
    if checks > len(chosen):
        raise UserError(f'--checks: {checks} is more than the {len(chosen)} prompts; use at most as many')
    prompts = [texts[index] for index in chosen]
    one, other = (_model(name, place, texts, chosen, options) for name, place in (('A', a), ('B', b)))
    if one.place.resolve() == other.place.resolve():
        raise UserError(f'A and B: are the same ({one.source}); name two different ones')
    sampling = [option for option in ('guidance', 'steps', 'seed') if getattr(options, option) is not None]
    if sampling and one.files and other.files:
        raise UserError(f'--{sampling[0]}: A and B are folders of images, so nothing is generated; remove this option')
    return CompareSettings(one, other, prompts, source, out, options.guidance, options.steps, options.seed or 0, checks)


def _check_out(out: Path) -> None:
    """Raise UserError if a folder contains anything but the key file and images of an interrupted call."""
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
    name: str, place: str, prompts: Sequence[str], chosen: Sequence[int], options: BuildOptions
) -> ComparedModel:
    """Return the model or images of side `name` (A or B), given all prompts and the `chosen` indices of prompts."""
    path = Path(place)
    try:
        if '://' not in place and not path.exists():
            raise UserError(f'{place}: does not exist; check the path')
        # Test for a run first: a run's folder contains images too, such as its loss curve and samples.
        is_run = '://' in place or (path / RECIPE).is_file() or (path.is_dir() and bool(list_checkpoints(path)))
        if not is_run and not is_export(path) and has_images(path):
            files = numbered_images(path, prompts)
            return ComparedModel(name, path, place, [files[index] for index in chosen])
        generated = GenerateOptions(
            source=place,
            prompts=[prompts[index] for index in chosen],
            out=str(options.out),
            seed=options.seed or 0,
            steps=options.steps,
            guidance=options.guidance,
        )
        check_generate(generated)
        # Choose the checkpoint now: a run in training may have a newer one by the time A or B is loaded.
        found = Path(generated.source) if is_export(Path(generated.source)) else find_checkpoint(generated.source)
        return ComparedModel(name, found, f'{place} ({found.name})' if '://' in place else str(found))
    except UserError as error:
        raise UserError(str(error) if str(error).startswith('--') else f'{name}: {error}') from error


def check_address(host: str, port: int) -> None:
    """Check, before a page is built, that it can be served at an address; raise UserError if not."""
    PageServer(host, port, BaseHTTPRequestHandler).server_close()


def check_serving(folder: Path) -> None:
    """Raise UserError unless a folder contains a comparison page and its key file."""
    if not (folder / PAGE).is_file():
        raise UserError(f'--serve: {folder} has no {PAGE}; build the page with diffusion compare A B --out {folder}')
    key = read_key(folder / KEY)
    if f'"comparison":"{key.comparison}"' not in (folder / PAGE).read_text(encoding='utf-8'):
        raise UserError(f'--serve: {folder / KEY} is not the key of {folder / PAGE}; copy both from one folder')


@dataclass(frozen=True)
class AnalyzeSettings:
    """Settings of an analysis, from `AnalyzeOptions`, but with the difference as a fraction, such as 0.05."""

    files: Sequence[Path]
    key: Path
    png: Path | None
    difference: float
    json: bool


def analyze_settings(options: AnalyzeOptions) -> AnalyzeSettings:
    """Return the settings of an analysis; raise UserError for missing files or wrong options."""
    given = [Path(name) for name in options.analyze or ()]
    files = [file for path in given for file in (sorted(path.glob('*.json')) if path.is_dir() else [path])]
    if options.key is not None:
        key = Path(options.key)
    else:
        near = [folder / KEY for path in [*given, *files] for folder in (path, path.parent, path.parent.parent)]
        found = next((path for path in near if path.is_file()), None)
        if found is None:
            raise UserError(f'--key: there is no {KEY} near {given[0]}; give the one beside the page')
        key = found
    files = [file for file in files if file.name != KEY]
    if not files:
        raise UserError(f'--analyze: {given[0]} has no files of answers; give those that people sent')
    points = 5.0 if options.difference is None else options.difference
    if not (math.isfinite(points) and 0 < points < 50):
        raise UserError(f'--difference: {points:g} is out of range; use more than 0 and less than 50 percentage points')
    png = None if options.png is None else Path(options.png)
    if png is not None:
        check_writable(png.parent, '--png')
        if png.suffix.lower() != '.png' or png.is_dir():
            raise UserError(f'--png: {png} is not the name of a PNG file; use for example result.png')
    return AnalyzeSettings(files, key, png, points / 100, bool(options.json))
