"""Run a preparation: plan -> parts -> duplicates -> shards -> indexes and report -> output.

The plan lists the input in parts, such as tars. One job per part converts its images; duplicates are then rejected, and
the samples of each bucket (images of one resolution or shape) are packed into final shards.

A preparation can be stopped at any point, and the next start resumes it. Each step renames its result to the final name
only when it is complete. The dataset depends only on the input and the settings, not on the number of processes, the
order in which they finish, or interruptions; only `seconds` in the report varies.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from diffusion.config.load import RecipeError
from diffusion.errors import UserError
from diffusion.prepare import report_thumbnails
from diffusion.prepare.bucket_choice import Buckets
from diffusion.prepare.catalog import Catalog
from diffusion.prepare.convert_part import PartJob, read_counts
from diffusion.prepare.counts_report import REPORT, PrepareReport
from diffusion.prepare.histograms import statistics_of
from diffusion.prepare.html_report import report_page
from diffusion.prepare.input_plan import InputPlan
from diffusion.prepare.output_folders import Output, output_of, shard_writer
from diffusion.prepare.pack_shards import ShardJob, plan_shards, write_indexes
from diffusion.prepare.settings import PrepareSettings, check_settings
from diffusion.prepare.source import Source
from diffusion.prepare.work_dir import Share, WorkFolder
from diffusion.prepare.worker_pool import WorkerJob, run_jobs
from diffusion.storage.atomic import write_whole
from diffusion.storage.shard_writer import ShardWriter

HTML_REPORT = 'report.html'
Run = Callable[[Iterable[WorkerJob]], Iterator[Any]]
"""Function that runs jobs in any order and yields their results."""


def prepare(
    settings: PrepareSettings, *, source: Source | None = None, run: Run | None = None, share: Share | None = None
) -> PrepareReport | None:
    """Prepare a dataset from images and captions, or resume a preparation that was stopped.

    Args:
        settings: Settings of the preparation.
        source: Source to read instead of `settings.source`.
        run: Function that runs the jobs (default: processes on this machine).
        share: Convert only this share of the input, such as 3/16, then return. For several machines with a common work
            folder; when all shares are done, a call without `share` finishes the preparation.

    Returns:
        The report, or None if `share` is given.

    Raises:
        UserError: A setting is invalid, the output is not empty, an input does not exist, or no image is left.
        DataError: A part cannot be read at the moment, or the processes that read it died.
        OSError: The disk is full or fails. Finished work is kept for the next start.
    """
    problems = check_settings(settings)
    if problems:
        raise RecipeError(problems, 'diffusion prepare')
    work = WorkFolder(settings.work_folder)
    run = run or partial(run_jobs, workers=settings.worker_count)
    try:
        with work.locked(share):
            source = source or settings.source.open(sizes=settings.sizes)
            return _Preparation(settings, source, run, work, output_of(settings, work)).execute(share)
    except OSError as error:
        raise OSError(
            f'{work.path}: {error}; fix the cause and run the same command again; finished work is kept'
        ) from error


class _Preparation:
    """The steps of one call of `prepare`, which holds the lock of the work folder."""

    def __init__(self, settings: PrepareSettings, source: Source, run: Run, work: WorkFolder, output: Output) -> None:
        self.settings = settings
        self.source = source
        self.run = run
        self.work = work
        self.output = output
        self.buckets = Buckets(settings.sizes, settings.aspects).names

    def execute(self, share: Share | None) -> PrepareReport | None:
        """Run all steps that are not done yet; return the report, or None after converting one machine's share."""
        start = time.monotonic()
        # `complete` is written last. If it exists, an earlier start was killed while it moved the dataset into place,
        # and the input need not be listed again.
        if not self.work.complete.exists():
            plan = InputPlan.make(self.settings, self.source)
            # A plan means that a preparation was stopped here: resume it, even if an earlier dataset is in the output.
            finished = None if self.work.plan.exists() else self.output.finished_report(plan.fingerprint)
            if finished is not None:
                finished.notes.append('already prepared from the same input with the same settings; nothing to do')
                return finished
            self.output.check()
            plan.write_or_check(self.work)
            self.work.clear_unfinished(share)
            try:
                self.convert_parts(plan, share)
                if share is not None:
                    return None
                self.finish_dataset(plan, start)
            except BaseException:
                # The next start would remove these files too, but the disk may be full now.
                self.work.clear_unfinished(share)
                raise
        report = PrepareReport.read(self.work.complete)
        self.output.put_in_place()
        self.work.remove()
        return report

    def convert_parts(self, plan: InputPlan, share: Share | None) -> None:
        """Convert each part of the input, or of this machine's share, into its own folder; skip parts that are done."""
        self.work.parts.mkdir(exist_ok=True)
        numbers = [number for number in range(len(plan.parts)) if share is None or share.includes(number)]
        remaining = [number for number in numbers if not self.work.part(number).is_dir()]
        remaining_size = sum(plan.parts[number].size for number in remaining)
        total_size = sum(plan.parts[number].size for number in numbers)
        jobs = (
            PartJob(number, plan.parts[number], self.source, self.settings, self.work.part(number))
            for number in remaining
        )
        inputs = rejected = 0
        # `closing` stops the workers as soon as an error or Ctrl-C leaves this block, instead of when the generator is
        # garbage collected.
        with (
            tqdm(
                total=total_size,
                initial=total_size - remaining_size,
                desc='parts',
                unit='B',
                unit_scale=True,
                disable=None,
            ) as bar,
            closing(self.results(jobs)) as results,
        ):
            for done in results:
                inputs += done.inputs
                rejected += done.rejected.total()
                rate = inputs / max(bar.format_dict['elapsed'], 1e-3)
                bar.set_postfix_str(f'{rate:.0f} images/s, {rejected / max(1, inputs):.1%} rejected', refresh=False)
                bar.update(done.size)

    def results(self, jobs: Iterable[WorkerJob]) -> Generator[Any, None, None]:
        """Run jobs and yield their results; closing the generator stops the jobs."""
        yield from self.run(jobs)

    def finish_dataset(self, plan: InputPlan, start: float) -> None:
        """Remove duplicates, and write the final shards, indexes and report into the work folder."""
        catalog = Catalog.read([self.work.part(number) for number in range(len(plan.parts))], self.buckets)
        repeats = catalog.drop_duplicates(
            self.settings.duplicates, max_distance=self.settings.max_distance, saved=self.work.duplicates
        )
        report = self.make_report(catalog, plan)
        if not report.pictures:
            self.work.remove()
            lines = [f'{report.source}: every image was rejected; nothing was written', *report.rejections()]
            raise UserError('\n'.join(lines))
        counts = self.pack_shards(catalog)
        entries = {name: self.writer(name).read_entries(range(counts[name])) for name in report.buckets}
        write_indexes(entries, self.work.dataset)
        report.bytes = {name: sum(shard['raw_data']['bytes'] for shard in entries[name]) for name in entries}
        html = report_page(
            report,
            self.settings.out,
            buckets=report_thumbnails.of_buckets(catalog, self.buckets),
            rejected=report_thumbnails.of_reasons(catalog, repeats),
        )
        write_whole(self.work.dataset / HTML_REPORT, html)
        report.seconds = time.monotonic() - start
        report.save(self.work.dataset / REPORT)
        # After the report and every shard: this file marks the dataset as complete.
        write_whole(self.work.complete, (self.work.dataset / REPORT).read_text(encoding='utf-8'))

    def writer(self, bucket: str) -> ShardWriter:
        """Return the writer of a bucket's final shards."""
        return shard_writer(self.output, self.work, bucket, size_limit=self.settings.shard_bytes)

    def pack_shards(self, catalog: Catalog) -> dict[str, int]:
        """Write the final shards that are not done yet; return the number of shards per bucket."""
        counts: dict[str, int] = {}
        total = int(catalog.columns['size'][catalog.kept].sum())
        with tqdm(total=total, desc='shards', unit='B', unit_scale=True, disable=None) as bar:

            def remaining() -> Iterator[ShardJob]:
                for code, bucket in enumerate(self.buckets):
                    writer = self.writer(bucket)
                    done = writer.done()
                    for job in plan_shards(catalog, code, bucket, work=self.work, shards=writer):
                        counts[bucket] = job.number + 1
                        if job.number in done:
                            bar.update(int(job.size.sum()))
                        else:
                            yield job

            with closing(self.results(remaining())) as results:
                for size in results:
                    bar.update(size)
        return counts

    def make_report(self, catalog: Catalog, plan: InputPlan) -> PrepareReport:
        """Return the report with all counts, except `bytes` and `seconds`, which are known only after packing."""
        found = np.bincount(catalog.bucket[catalog.kept], minlength=len(self.buckets))
        counts = dict(zip(self.buckets, found.tolist(), strict=True))
        return PrepareReport(
            source=self.settings.source.title,
            arguments={'out': self.settings.out} | plan.settings,
            max_rejected=self.settings.max_rejected,
            versions=plan.versions,
            license=self.settings.license,
            inputs=len(catalog),
            pictures=len(catalog.kept),
            buckets={name: count for name, count in counts.items() if count},
            empty_buckets=[name for name, count in counts.items() if not count],
            rejected=catalog.rejected,
            notes=self.notes(plan),
            statistics=statistics_of(catalog) if len(catalog.kept) else {},
            fingerprint=plan.fingerprint,
        )

    def notes(self, plan: InputPlan) -> list[str]:
        """Return a message for the report for each metadata column of `filters` that no input has."""
        filters = self.settings.filters
        if not filters.columns:
            return []
        done = (read_counts(self.work.part(number), part) for number, part in enumerate(plan.parts))
        columns = set().union(*(part.columns for part in done))
        return filters.unknown_column_notes(filters.columns_in(dict.fromkeys(columns)), columns)
