"""Content of report pages: of one run, of several runs compared, or the table of a folder's runs."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from diffusion.errors import UserError
from diffusion.report.page import MAX_BYTES, report_page
from diffusion.report.page_data import TOTAL_POINTS, page_data
from diffusion.report.run_reader import RunReader
from diffusion.report.run_table import TableReader

IMAGE_BYTES = 1_700_000
"""Size of the images of a page; embedded as base64, they take a third more."""


class Page(NamedTuple):
    """Data of a page, and the images that it shows by key."""

    data: dict[str, Any]
    images: dict[str, bytes]


class ReportSource(Protocol):
    """Interface of a page's content."""

    title: str
    places: list[str]

    def read(self) -> Page:
        """Return the content now.

        Raises:
            UserError: A place does not have a run. ExternalError: The storage fails.
        """
        ...

    def write(self) -> str:
        """Return the HTML of the page, in one file under `MAX_BYTES`; errors as for `read`."""
        ...


class RunsSource:
    """Content of the page of one run, or of several runs.

    Args:
        places: Folders or URLs of the runs.
        price: US dollars per device-hour; None for the price of each run's GPUs.
    """

    def __init__(self, places: Sequence[str], *, price: float | None = None) -> None:
        self.places = [*places]
        share = IMAGE_BYTES // len(places)
        self._readers = [RunReader(place, image_bytes=share, price=price) for place in places]
        names = [reader.name for reader in self._readers]
        self.title = names[0] if len(names) == 1 else ' / '.join(names)

    def read(self) -> Page:
        runs = [reader.read() for reader in self._readers]
        images = {key: image for run in runs for key, image in run.images.encoded.items()}
        return Page({'kind': 'runs', **page_data(runs)}, images)

    def write(self) -> str:
        runs = [reader.read() for reader in self._readers]
        images = {key: image for run in runs for key, image in run.images.encoded.items()}
        points = TOTAL_POINTS
        while True:
            data = {'kind': 'runs', **page_data(runs, total_points=points)}
            html = report_page(data, title=self.title, places=self.places, images=images)
            if len(html.encode()) < MAX_BYTES:
                return html
            if points < 1000:
                raise UserError(
                    f'a page of {", ".join(self.places)} would have more than {MAX_BYTES / 1e6:.0f} MB; compare fewer '
                    'runs'
                )
            points //= 2


class TableSource:
    """Content of the page with the table of all runs in a folder or bucket."""

    def __init__(self, reader: TableReader) -> None:
        self._reader = reader
        self.places = [reader.place]
        self.title = f'Runs in {reader.place}'

    def read(self) -> Page:
        return Page(self._reader.read(), {})

    def write(self) -> str:
        return report_page(self.read().data, title=self.title, places=self.places, images={})
