"""Reports of a dataset that grew or shrank: report.json, report.html and captions.txt, brought up to date."""

from collections.abc import Sequence
from contextlib import suppress

from diffusion.prepare.caption_list import CAPTIONS
from diffusion.prepare.counts_report import REPORT, PrepareReport
from diffusion.prepare.dataset_record import RecordedDataset
from diffusion.prepare.html_report import HTML_REPORT, report_page
from diffusion.prepare.merged_report import merged_report
from diffusion.storage.atomic import write_atomically


def finish_change(dataset: RecordedDataset) -> None:
    """Finish the last change to a dataset if the process that made it was killed: indexes, reports, obsolete files.

    Do nothing if they are up to date. The page then has no thumbnails of the images.
    """
    dataset.folder.clean()
    dataset.update_indexes()
    report = report_of(dataset)
    if not _is_current(dataset, report):
        page = report_page(report, report.arguments['out'], buckets={}, held_out=[], rejected={})
        write_report_files(dataset, report, page, caption_lines(dataset))
    dataset.delete_obsolete()


def report_of(dataset: RecordedDataset) -> PrepareReport:
    """Return the report of a whole dataset from those of its deliveries."""
    paths = dataset.paths(delivery.report for delivery in dataset.record.deliveries)
    reports = [PrepareReport.read(path) for path in paths]
    record = dataset.record
    removed = (record.removed_count, record.removed_held_out)
    return merged_report(reports, dataset.entries(), removed=removed[0], removed_held_out=removed[1])


def write_report_files(dataset: RecordedDataset, report: PrepareReport, page: str, captions: Sequence[str]) -> None:
    """Write report.json, report.html and captions.txt of a dataset; report.json last, as `finish_change` expects."""
    folder = dataset.scratch
    write_atomically(folder / HTML_REPORT, page)
    write_captions(dataset, captions)
    report.save(folder / REPORT)
    for name in (HTML_REPORT, REPORT):
        dataset.folder.put(name, folder / name)


def write_captions(dataset: RecordedDataset, captions: Sequence[str]) -> None:
    """Write captions.txt of a dataset."""
    path = dataset.scratch / CAPTIONS
    write_atomically(path, ''.join(f'{caption}\n' for caption in captions))
    dataset.folder.put(CAPTIONS, path)


def caption_lines(dataset: RecordedDataset) -> list[str]:
    """Return the captions in the dataset's captions.txt."""
    found = dataset.folder.read(CAPTIONS)
    return [] if found is None else found.decode().splitlines()


def _is_current(dataset: RecordedDataset, report: PrepareReport) -> bool:
    """Return True if the dataset's report.json counts the same deliveries and images as `report`."""
    if len(report.deliveries) == 1 and dataset.record.removed is None:
        return True  # the report of the preparation itself
    found = dataset.folder.read(REPORT)
    path = dataset.scratch / f'found-{REPORT}'
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        if found is not None:
            write_atomically(path, found)
            former = PrepareReport.read(path)
            return all(
                getattr(former, name) == getattr(report, name)
                for name in ('deliveries', 'removed', 'buckets', 'held_out')
            )
    return False
