"""Subcommand `diffusion report`."""

import argparse
import contextlib
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion.config.schema import did_you_mean
from diffusion.errors import ExternalError, UserError

if TYPE_CHECKING:
    from diffusion.report.report_source import ReportSource

# The modules of the report are imported when it runs: every `diffusion` command builds this parser.
DEFAULT_PORT = 8265


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `diffusion report`."""
    parser.add_argument(
        'runs',
        nargs='+',
        metavar='RUN',
        help='folder or URL of a run; of several runs, to compare them; or a folder or URL with runs, for a table',
    )
    parser.add_argument(
        '--out',
        type=Path,
        metavar='FILE',
        help='HTML file to write (default: report.html in the folder; here for several runs; NAME-report.html here for '
        'a URL)',
    )
    parser.add_argument(
        '--price',
        type=_price,
        metavar='USD',
        help='price per GPU-hour (default: that of the GPU in planning/gpus.yaml, if it is known)',
    )
    parser.add_argument('--serve', action='store_true', help='serve the page, which then updates itself, until Ctrl-C')
    parser.add_argument(
        '--port', type=_port, default=DEFAULT_PORT, help='with --serve; 0 for any free one (default: %(default)s)'
    )
    parser.add_argument(
        '--host',
        default='127.0.0.1',
        help='with --serve: address to listen at; another one than localhost needs the token that is printed (default: '
        '%(default)s)',
    )
    parser.set_defaults(run=run_report)


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < 1e6:
        raise argparse.ArgumentTypeError(f'{text!r} is not a price in US dollars')
    return price


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f'{text!r} is not a port, a number up to 65535')
    return int(text)


def run_report(args: argparse.Namespace) -> int:
    """Run `diffusion report`: write a page and print its path, or serve it until Ctrl-C.

    Raises:
        UserError: A place is no run, the page cannot be written there, or the port is in use.
        ExternalError: The storage fails.
    """
    from diffusion.report.report_source import RunsSource, TableSource
    from diffusion.report.run_table import REPORT, TableReader, written_report
    from diffusion.storage.atomic import write_atomically
    from diffusion.storage.places import is_url
    from diffusion.storage.writable import check_writable

    places = [place.rstrip('/') or place for place in args.runs]
    if len({*places}) < len(places):
        twice = next(place for place in places if places.count(place) > 1)
        raise UserError(f'report: {twice} is given twice; give each run once')
    is_table = len(places) == 1 and not _is_run(places[0])
    if args.serve:
        return _serve(args, places, is_table=is_table)
    out = args.out or _default_path(places)
    if out.is_dir():
        raise UserError(f'--out: {out} is a folder; give the path of a file, such as {out / REPORT}')
    if is_table:
        # Links are relative to the page, so they lead to the pages of runs only from the folder that has the runs.
        beside = not is_url(places[0]) and out.absolute().parent == Path(places[0]).absolute()
        link = (lambda name: written_report(places[0], name)) if beside else (lambda name: None)
        source: ReportSource = TableSource(TableReader(places[0], price=args.price, link=link))
    else:
        source = RunsSource(places, price=args.price)
    check_writable(out.parent, '--out')
    html = source.write()
    try:
        write_atomically(out, html)
    except OSError as error:
        raise ExternalError(f'{out}: cannot be written ({error.strerror})') from error
    print(out)
    return 0


def _is_run(place: str) -> bool:
    """Return True if a place is that of a run, and not of a folder with runs.

    Raises:
        UserError: There is no such folder.
        ExternalError: The storage fails.
    """
    from diffusion.report.run_reader import looks_like_a_run
    from diffusion.report.run_table import runs_in
    from diffusion.storage.places import PATIENT, files_of_run, is_url

    if not is_url(place) and not Path(place).is_dir():
        parent = Path(place).parent
        near = [str(each) for each in parent.iterdir() if each.is_dir()] if parent.is_dir() else []
        hint = f'; {did_you_mean(place, near)}' if near else ''
        raise UserError(f'report: {place} is not a folder{hint}')
    try:
        if looks_like_a_run(files_of_run(place, PATIENT).list()):
            return True
    except OSError:
        pass  # the next listing fails too, and says so
    runs_in(place)
    return False


def _default_path(places: list[str]) -> Path:
    from diffusion.report.run_table import REPORT

    if len(places) > 1:
        return Path(REPORT)
    from diffusion.storage.places import is_url

    place = places[0]
    return Path(f'{place.rpartition("/")[2]}-{REPORT}') if is_url(place) else Path(place, REPORT)


def _serve(args: argparse.Namespace, places: list[str], *, is_table: bool) -> int:
    from diffusion.report.live_server import BUCKET_SECONDS, POLL_SECONDS, ReportServer, ServedPage, run_address
    from diffusion.report.report_source import RunsSource, TableSource
    from diffusion.report.run_table import TableReader
    from diffusion.storage.places import is_url

    seconds = BUCKET_SECONDS if any(map(is_url, places)) else POLL_SECONDS
    if is_table:
        reader = TableReader(places[0], price=args.price, link=run_address)
        main = ServedPage(TableSource(reader), seconds)
    else:
        main = ServedPage(RunsSource(places, price=args.price), seconds)

    @cache
    def page_of(name: str) -> ServedPage:
        return ServedPage(RunsSource([f'{places[0]}/{name}'], price=args.price), seconds)

    def run_page(name: str) -> ServedPage | None:
        # Only names of the table, none that lead out of the folder.
        return page_of(name) if is_table and name in {row['name'] for row in main.content().data['rows']} else None

    main.content()  # a run that cannot be read is an error now
    with contextlib.suppress(KeyboardInterrupt), ReportServer(args.host, args.port, main, run_page) as server:
        print(f'{", ".join(places)}: {server.url} (Ctrl-C ends it)', flush=True)
        server.serve_forever(0.2)
    return 0
