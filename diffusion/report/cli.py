"""Subcommand `diffusion report`."""

import contextlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from diffusion.config.declarations import Between
from diffusion.config.options import Option, Port
from diffusion.config.schema import did_you_mean
from diffusion.errors import ExternalError, UserError
from diffusion.report.live_server import BUCKET_SECONDS, POLL_SECONDS, ReportServer, ServedPage, run_address
from diffusion.report.report_source import (
    REPORT,
    ReportSource,
    RunsSource,
    TableSource,
    runs_in,
    written_report,
)
from diffusion.report.run_reader import looks_like_a_run
from diffusion.storage.atomic import write_atomically
from diffusion.storage.local_files import check_writable
from diffusion.storage.places import PATIENT, files_of_run, is_url


@dataclass
class ReportOptions:
    """Options of `diffusion report`."""

    runs: Annotated[list[str], Option('RUN', positional=True, files=True)]
    """Folder or URL of a run, of several runs to compare them, or of a folder that contains runs, for a table."""
    out: Path | None = None
    """HTML file to write (default: report.html in the run's folder; for several runs, report.html in the current
    folder; for a URL, NAME-report.html in the current folder)."""
    price: Annotated[float | None, Between(0, 1e6), Option('USD')] = None
    """Price per GPU-hour in US dollars (default: the GPU's price in planning/gpus.yaml, if known)."""
    serve: bool = False
    """Serve the page, which then updates itself; stop with Ctrl-C."""
    port: Port = 8265
    """Port for --serve; 0 means any free port."""
    host: str = '127.0.0.1'
    """Address to listen on for --serve; addresses other than localhost require the printed token."""


def run_report(options: ReportOptions) -> int:
    """Run `diffusion report`: write a page and print its path, or serve it until Ctrl-C."""
    places = [place.rstrip('/') or place for place in options.runs]
    if len({*places}) < len(places):
        twice = next(place for place in places if places.count(place) > 1)
        raise UserError(f'report: {twice} is given twice; give each run once')
    is_table = len(places) == 1 and not _is_run(places[0])
    if options.serve:
        return _serve(options, places, is_table=is_table)
    out = options.out or _default_path(places)
    if out.is_dir():
        raise UserError(f'--out: {out} is a folder; give the path of a file, such as {out / REPORT}')
    if is_table:
        # Links are relative to the page, so they work only if the page is in the folder that contains the runs.
        beside = not is_url(places[0]) and out.absolute().parent == Path(places[0]).absolute()
        link = (lambda name: written_report(places[0], name)) if beside else (lambda name: None)
        source: ReportSource = TableSource(places[0], price=options.price, link=link)
    else:
        source = RunsSource(places, price=options.price)
    check_writable(out.parent, '--out')
    html = source.write()
    try:
        write_atomically(out, html)
    except OSError as error:
        raise ExternalError(f'{out}: cannot be written ({error.strerror})') from error
    print(out)
    return 0


def _is_run(place: str) -> bool:
    if not is_url(place) and not Path(place).is_dir():
        parent = Path(place).parent
        near = [str(each) for each in parent.iterdir() if each.is_dir()] if parent.is_dir() else []
        hint = f'; {did_you_mean(place, near)}' if near else ''
        raise UserError(f'report: {place} is not a folder{hint}')
    try:
        if looks_like_a_run(files_of_run(place, PATIENT).list()):
            return True
    except OSError:
        pass  # `runs_in` lists the folder again and raises UserError if it cannot be read
    runs_in(place)
    return False


def _default_path(places: list[str]) -> Path:
    if len(places) > 1:
        return Path(REPORT)

    place = places[0]
    return Path(f'{place.rpartition("/")[2]}-{REPORT}') if is_url(place) else Path(place, REPORT)


def _serve(options: ReportOptions, places: list[str], *, is_table: bool) -> int:

    seconds = BUCKET_SECONDS if any(map(is_url, places)) else POLL_SECONDS
    source: ReportSource = RunsSource(places, price=options.price)
    if is_table:
        source = TableSource(places[0], price=options.price, link=run_address)
    main = ServedPage(source, seconds)

    @cache
    def page_of(name: str) -> ServedPage:
        return ServedPage(RunsSource([f'{places[0]}/{name}'], price=options.price), seconds)

    def run_page(name: str) -> ServedPage | None:
        # Accept only names in the table: other names could lead outside the folder.
        return page_of(name) if is_table and name in {row['name'] for row in main.content().data['rows']} else None

    main.content()  # fail before the server starts if a run cannot be read
    with contextlib.suppress(KeyboardInterrupt), ReportServer(options.host, options.port, main, run_page) as server:
        print(f'{", ".join(places)}: {server.url} (Ctrl-C ends it)', flush=True)
        server.serve_forever(0.2)
    return 0
