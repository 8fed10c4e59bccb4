"""Update a dataset's report.json, report.html and captions.txt after images were added or removed."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from diffusion.prepare.catalog import DUPLICATE
from diffusion.prepare.counts_report import HTML_REPORT, REPORT, PrepareReport, report_page
from diffusion.prepare.dataset_record import Entries, RecordedDataset
from diffusion.prepare.report_content import CAPTIONS
from diffusion.prepare.source import NamedCount, summed_counts, summed_details
from diffusion.storage.atomic import write_atomically


def finish_change(dataset: RecordedDataset) -> None:
    """If the last change was interrupted, update indexes and report (without thumbnails), and delete obsolete files."""
    dataset.folder.clean()
    dataset.update_indexes()
    report = report_of(dataset)
    if not _is_current(dataset, report):
        page = report_page(report, report.arguments['out'], buckets={}, held_out=[], rejected={})
        write_report_files(dataset, report, page, caption_lines(dataset))
    dataset.delete_obsolete()


def report_of(dataset: RecordedDataset) -> PrepareReport:
    """Return the report of a whole dataset, merged from its deliveries' reports."""
    paths = dataset.paths(delivery.report for delivery in dataset.record.deliveries)
    reports = [PrepareReport.read(path) for path in paths]
    counts = {'removed': dataset.record.removed_count, 'removed_held_out': dataset.record.removed_held_out}
    return merged_report(reports, dataset.entries(), **counts)


def write_report_files(dataset: RecordedDataset, report: PrepareReport, page: str, captions: Sequence[str]) -> None:
    """Write report.html, captions.txt and, last, report.json, which tells `finish_change` that all of them exist."""
    folder = dataset.scratch
    write_atomically(folder / HTML_REPORT, page)
    write_captions(dataset, captions)
    report.save(folder / REPORT)
    for name in (HTML_REPORT, REPORT):
        dataset.folder.put(name, folder / name)


def write_captions(dataset: RecordedDataset, captions: Sequence[str]) -> None:
    path = dataset.scratch / CAPTIONS
    write_atomically(path, ''.join(f'{caption}\n' for caption in captions))
    dataset.folder.put(CAPTIONS, path)


def caption_lines(dataset: RecordedDataset) -> list[str]:
    found = dataset.folder.read(CAPTIONS)
    return [] if found is None else found.decode().splitlines()


def _is_current(dataset: RecordedDataset, report: PrepareReport) -> bool:
    """Return True if report.json counts the same deliveries and images as `report`, or the dataset never changed."""
    if len(report.deliveries) == 1 and dataset.record.removed is None:
        return True  # the dataset has not changed since its preparation wrote report.json
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


def merged_report(
    reports: Sequence[PrepareReport], entries: Entries, *, removed: int, removed_held_out: int
) -> PrepareReport:
    """Merge the deliveries' reports by summing; removed images still count, except in `pictures` and the buckets."""
    first, last = reports[0], reports[-1]
    samples = {bucket: sum(shard['samples'] for shard in shards) for bucket, shards in entries.items()}
    empty = [bucket for report in reports for bucket in report.empty_buckets if not samples.get(bucket)]
    held_out = first.held_out
    if held_out is not None:
        held_out = replace(held_out, pictures=held_out.pictures - removed_held_out)
    licenses = list(dict.fromkeys(report.license for report in reports if report.license))
    return PrepareReport(
        source=', '.join(dict.fromkeys(report.source for report in reports)),
        arguments=last.arguments | {name: first.arguments.get(name) for name in ('out', 'hold_out')},
        max_rejected=last.max_rejected,
        versions=last.versions,
        license='; '.join(licenses) or (None if any(report.license is None for report in reports) else ''),
        pictures=sum(report.pictures for report in reports) - removed,
        buckets={bucket: count for bucket, count in samples.items() if count},
        empty_buckets=list(dict.fromkeys([*empty, *(bucket for bucket, count in samples.items() if not count)])),
        bytes={
            bucket: sum(shard['raw_data']['bytes'] for shard in shards) for bucket, shards in entries.items() if shards
        },
        held_out=held_out,
        rejected=summed_counts(report.rejected for report in reports),
        details=summed_details(report.details for report in reports),
        repaired=summed_counts({'': report.repaired} for report in reports)[''],
        passed_over=summed_counts(report.passed_over for report in reports),
        inputs=sum(report.inputs for report in reports),
        notes=list(dict.fromkeys(note for report in reports for note in report.notes)),
        statistics=_merged_statistics([report.statistics for report in reports]),
        fingerprint=first.fingerprint if len(reports) == 1 and not removed else None,
        date=last.date,
        seconds=last.seconds,
        deliveries=[delivery_line(report) for report in reports],
        removed=removed,
    )


def delivery_line(report: PrepareReport) -> dict[str, Any]:
    rejected = {reason: entry.count for reason, entry in sorted(report.rejected.items())}
    return {
        'date': report.date,
        'source': report.source,
        'inputs': report.inputs,
        'kept': report.pictures + (0 if report.held_out is None else report.held_out.pictures),
        'duplicates': rejected.pop(DUPLICATE, 0),
        'rejected': sum(rejected.values()),
        'passed_over': sum(files.count for files in report.passed_over.values()),
    }


def _merged_statistics(statistics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return histograms by quantity, with summed counts; if several are merged, only 0% and 100% quantiles remain."""
    merged: dict[str, Any] = {}
    for name in statistics[0]:
        found = [each[name] for each in statistics if sum(each.get(name, {}).get('counts', ()))]
        if not found:
            continue
        quantiles = [each['quantiles'] for each in found]
        ends = {'0%': min(each['0%'] for each in quantiles), '100%': max(each['100%'] for each in quantiles)}
        merged[name] = {
            'edges': found[0]['edges'],
            'counts': [sum(counts) for counts in zip(*(each['counts'] for each in found), strict=True)],
            'quantiles': quantiles[0] if len(found) == 1 else ends,
        }
    return merged


def without_names(report: PrepareReport, keys: frozenset[str]) -> PrepareReport:
    """Return a report with these keys removed from its lists of examples; counts do not change."""

    def kept(counts: dict[str, NamedCount]) -> dict[str, NamedCount]:
        return {
            kind: NamedCount(found.count, [name for name in found.names if not _names_any(name, keys)])
            for kind, found in counts.items()
        }

    return PrepareReport(
        **{name: value for name, value in vars(report).items() if name not in ('rejected', 'repaired', 'passed_over')},
        rejected=kept(report.rejected),
        repaired=kept({'': report.repaired})[''],
        passed_over=kept(report.passed_over),
    )


def _names_any(name: str, keys: frozenset[str]) -> bool:
    """Return True if an example in a report is one of these keys, or `KEY (duplicate of KEY)` with one of them."""
    key, _, original = name.removesuffix(')').partition(' (duplicate of ')
    return name in keys or key in keys or original in keys
