"""Table of all runs in a folder or bucket."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from diffusion.errors import ExternalError, UserError
from diffusion.report.run_reader import RunContent, RunReader, looks_like_a_run
from diffusion.storage.places import PATIENT, files_of_run, is_url

REPORT = 'report.html'
"""Name of a run's page in its folder."""
_THREADS = 8
"""Number of runs that are read at the same time; reading one is mostly waiting for the storage."""
_SHOWN_METRICS = ('fid', 'cmmd', 'clip_score', 'retrieval_top1')
"""Metrics of the last evaluation that the table shows, if it has them; else its first ones."""


def runs_in(place: str) -> list[str]:
    """Return the names of the runs in a folder or below a URL, in alphabetical order.

    Raises:
        UserError: There are none.
        ExternalError: The storage fails.
    """
    files = files_of_run(place, PATIENT)
    try:
        names = sorted(files.list().folders)
        with ThreadPoolExecutor(_THREADS) as threads:
            listings = threads.map(files.list, names)
            found = [name for name, each in zip(names, listings, strict=True) if looks_like_a_run(each)]
    except OSError as error:
        raise ExternalError(f'{place}: cannot be read ({error}); try again later') from error
    if not found:
        raise UserError(
            f'{place}: is neither a run nor a folder with runs; give the folder or URL of a run, such as runs/phase1, '
            'or of a folder with runs, such as runs'
        )
    return found


class TableReader:
    """Reader of all runs in a folder or bucket; a second `read` reads what has been added since.

    Args:
        price: US dollars per device-hour; None for the price of each run's GPUs.
        link: Function that returns the address of a run's page by its name, or None if it has none.
    """

    def __init__(self, place: str, *, price: float | None, link: Callable[[str], str | None]) -> None:
        self.place, self.price, self.link = place.rstrip('/') or place, price, link
        self._readers: dict[str, RunReader] = {}

    def read(self) -> dict[str, Any]:
        """Return the data of the page.

        Raises:
            UserError: There are no runs.
            ExternalError: The storage fails.
        """
        names = runs_in(self.place)
        for name in names:
            self._readers.setdefault(name, RunReader(f'{self.place}/{name}', price=self.price, curves=False))
        notes: list[str] = []

        def row(name: str) -> dict[str, Any] | None:
            try:
                return table_row(self._readers[name].read(), self.link(name))
            except (UserError, ExternalError) as error:
                notes.append(str(error))
                return None

        # The reader watches a run of another machine that may be dead for some seconds.
        with ThreadPoolExecutor(_THREADS) as threads:
            rows = [each for each in threads.map(row, names) if each is not None]
        return {'kind': 'table', 'generated': time.time(), 'rows': rows, 'notes': sorted(notes)}


def table_row(run: RunContent, link: str | None) -> dict[str, Any]:
    """Return the row of a run."""
    status, cost = run.status, run.cost
    cause = status.attempts[-1]['cause'] if status.attempts else None
    is_known = cost.price is not None and cost.device_hours is not None
    return {
        'name': run.name,
        'link': link,
        'state': status.state if status.state != 'ended' or cause is None else f'ended, {cause}',
        'kind': _kind(status.state, cause),
        'batch': status.batch,
        'total': status.total_batches,
        'loss': status.last_loss,
        'evaluation': _last_evaluation(run),
        'goodput': status.goodput,
        'device_hours': cost.device_hours,
        'dollars': cost.price * cost.device_hours if is_known else None,  # type: ignore[operator]
        'last_activity': status.last_activity,
    }


def _kind(state: str, cause: str | None) -> str:
    """Return the color of a state: good, bad or plain."""
    if state == 'running' or (state == 'ended' and cause == 'done'):
        return 'good'
    return 'bad' if state == 'silent' or (state == 'ended' and cause not in (None, 'preempted')) else 'plain'


def _last_evaluation(run: RunContent) -> str:
    """Return the metrics of the last evaluated checkpoint, such as `FID 12.3 (ba1600)`; empty if there is none."""
    if not run.evaluations:
        return ''
    last = run.evaluations[-1]
    values = last['metrics'] or last['losses']
    names = [name for name in _SHOWN_METRICS if name in values] or [*values][:2]
    text = ', '.join(f'{name} {values[name]:.4g}' for name in names[:2])
    return f'{text} ({last["checkpoint"]})'


def written_report(place: str, name: str) -> str | None:
    """Return the address of a run's page, relative to that of the table in the same folder; None if there is none."""
    if is_url(place):
        return None
    exists = REPORT in files_of_run(f'{place}/{name}').list().files
    return f'{_quoted(name)}/{REPORT}' if exists else None


def _quoted(name: str) -> str:
    # The prefix `./` keeps a name such as `javascript:...` from being a scheme.
    return f'./{quote(name)}'
