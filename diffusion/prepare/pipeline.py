"""Run a preparation: plan -> parts -> duplicates and held-out images -> shards -> indexes and report -> output.

The plan lists the input in parts, such as tar files. One job per part converts its images. Then, duplicates are
rejected, and the samples of each bucket (images of one resolution or shape) are packed into final shards.

A preparation can be stopped at any point; the next start resumes it. A file or folder gets its final name only when
complete. The dataset depends only on input and settings, not on the number of processes, the order in which they
finish, or interruptions; only `date` and `seconds` in the report vary.
"""

import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from diffusion.config.load import RecipeError
from diffusion.errors import UserError
from diffusion.prepare import report_content
from diffusion.prepare.caption_table import CaptionedSource
from diffusion.prepare.catalog import HELD_OUT, REJECTED, TRAIN, Catalog
from diffusion.prepare.convert_part import PartJob, read_counts
from diffusion.prepare.counts_report import (
    HTML_REPORT,
    REPORT,
    HeldOut,
    PrepareReport,
    rejection_lines,
    report_page,
    utc_now,
)
from diffusion.prepare.dataset_record import (
    RECORD,
    DatasetRecord,
    comparable_settings,
    index_files,
    with_indexes,
    write_delivery,
)
from diffusion.prepare.image_record import write_images
from diffusion.prepare.input_plan import InputPlan, Piece, at_planned_version, pieces_of
from diffusion.prepare.optional_formats import format_of_suffix
from diffusion.prepare.output_folders import ShardJob, output_of, plan_shards
from diffusion.prepare.part_shards import list_stored, read_inputs
from diffusion.prepare.process_sample import Buckets, Measured, sample_columns
from diffusion.prepare.report_content import CAPTIONS, caption_list, long_captions_note, statistics_of
from diffusion.prepare.settings import PrepareSettings, check_settings
from diffusion.prepare.source import Source, summed_counts, summed_details
from diffusion.prepare.work_dir import Share, WorkFolder
from diffusion.prepare.worker_pool import Run, WorkerJob, run_jobs
from diffusion.storage.atomic import write_atomically
from diffusion.storage.mds import ShardFormat
from diffusion.storage.places import LocalPlace
from diffusion.storage.shard_writer import ShardWriter


def prepare(
    settings: PrepareSettings, *, source: Source | None = None, run: Run | None = None, share: Share | None = None
) -> PrepareReport | None:
    """Prepare a dataset from images and captions, or resume an interrupted preparation.

    Args:
        source: Source to read instead of `settings.source`.
        run: Function that runs the jobs (default: processes on this machine).
        share: Convert only this share of the input, such as 3/16. For use on several machines with a shared work folder
            or `settings.parts`; a final call without `share` finishes the preparation.

    Returns:
        The report; None after converting only a share.

    Raises:
        UserError: A setting is invalid, the output is not empty, an input does not exist, or no images are left for
            training.
        DataError: A part cannot be read right now, or the processes that read it died.
        OSError: The disk is full or failing. Finished work is kept for the next start.
    """
    if problems := check_settings(settings):
        raise RecipeError(problems, 'diffusion prepare')
    work = WorkFolder(settings.work_folder)
    with work.locked(share):
        work.check_kind(is_append=False)
        source = source or settings.open_source()
        return Preparation(settings, source, run, work).execute(share)


class Preparation:
    """Steps of one `prepare` call, during which the work folder is locked."""

    def __init__(self, settings: PrepareSettings, source: Source, run: Run | None, work: WorkFolder) -> None:
        self.settings = settings
        self.source = source
        self.run = run or partial(run_jobs, workers=settings.worker_count)
        self.work = work
        self.buckets = Buckets(settings.sizes, settings.aspects, step=settings.step).names
        self.splits = (TRAIN, HELD_OUT) if settings.hold_out else (TRAIN,)
        self.token = ''
        self.format = ShardFormat(sample_columns(settings), settings.shard_bytes)
        self.outputs = {
            TRAIN: output_of(settings.out, work.train, work, overwrite=settings.overwrite),
            HELD_OUT: output_of(settings.held_out, work.held_out, work, overwrite=settings.overwrite),
        }

    def execute(self, share: Share | None) -> PrepareReport | None:
        """Run all remaining steps; return the report, or None after converting only one machine's share."""
        start = time.monotonic()
        # `complete` is written last. If it exists, an earlier start was killed while moving the datasets into place, so
        # the input need not be listed again.
        if not self.work.complete.exists():
            self.source = at_planned_version(self.source, self.work)
            plan = InputPlan.make(self.settings, self.source)
            # If a plan exists, a preparation was interrupted: resume it, even if the output contains an earlier
            # dataset. A share has nothing to resume if another machine has already finished the preparation.
            resumed = share is None and self.work.plan.exists()
            finished = None if resumed else self.finished_report(plan)
            if finished is not None:
                finished.notes.append('already prepared from the same input with the same settings; nothing to do')
                return finished
            self.check_outputs(plan)
            plan.write_or_check(self.work)
            with self.work.cleared_after_errors(share):
                self.convert_parts(plan, share)
                if share is not None:
                    return None
                self.finish_dataset(plan, start)
        report = PrepareReport.read(self.work.complete)
        self.put_in_place(report)
        self.work.remove()
        return report

    def pieces(self, plan: InputPlan) -> list[Piece]:
        return pieces_of(plan, self.source)

    def folders(self, plan: InputPlan) -> list[Path]:
        return [self.work.parts / piece.name for piece in self.pieces(plan)]

    def finished_report(self, plan: InputPlan) -> PrepareReport | None:
        """Return the existing output's report if it was prepared with the same plan; None if not, or if `overwrite`."""
        if self.settings.overwrite:
            return None
        reports = [self.outputs[split].report() for split in self.splits]
        if reports[0] is None or not all(each and each.fingerprint == plan.content_fingerprint for each in reports):
            return None
        return replace(reports[0], max_rejected=self.settings.max_rejected)

    def check_outputs(self, plan: InputPlan) -> None:
        """Check, before any work, that the datasets can be written and no held-out image becomes a training image."""
        for split in self.splits:
            self.outputs[split].check(plan)
        if HELD_OUT not in self.splits and not self.settings.is_remote:
            former = self.outputs[HELD_OUT].report()
            if former is not None and former.arguments.get('hold_out'):
                raise UserError(
                    f'{self.settings.held_out}: was held out from an earlier dataset, and its images would now be in '
                    'training; delete this folder, or give --hold-out again'
                )

    def convert_parts(self, plan: InputPlan, share: Share | None) -> None:
        """Convert each part of the input or of this machine's share into its own folder; skip finished parts."""
        self.work.parts.mkdir(exist_ok=True)
        stored = None
        if self.settings.parts is not None:
            # Several preparations may share `parts`, so each plan has its own folder there.
            stored = f'{self.settings.parts.rstrip("/")}/{plan.fingerprint[:16]}'
            self.work.store_parts(stored)
        pieces = [piece for piece in self.pieces(plan) if share is None or share.includes(piece.number)]
        remaining = [piece for piece in pieces if not (self.work.parts / piece.name).is_dir()]
        # List parts converted by other machines or by an earlier start whose work folder was lost.
        there = list_stored(stored) if stored is not None and remaining else {}
        if share is not None:
            remaining = [piece for piece in remaining if piece.name not in there]
        remaining_size = sum(piece.part.size for piece in remaining)
        total_size = sum(piece.part.size for piece in pieces)
        jobs = (
            PartJob(
                piece.number,
                piece.content(plan),
                self.source,
                self.settings,
                self.work.parts / piece.name,
                url=None if stored is None else f'{stored}/{piece.name}',
                stored=there.get(piece.name),
            )
            for piece in remaining
        )
        inputs = rejected = 0
        # `closing` stops the workers as soon as an error or Ctrl-C leaves this block, rather than when the generator is
        # garbage-collected.
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
        """Run jobs and yield their results; close the generator to stop the jobs."""
        yield from self.run(jobs)

    def finish_dataset(self, plan: InputPlan, start: float) -> None:
        """Remove duplicates, and write final shards, indexes and report to the work folder."""
        catalog = Catalog.read(self.folders(plan), self.buckets)
        repeats = catalog.drop_duplicates(
            self.settings.duplicates, max_distance=self.settings.max_distance, saved=self.work.duplicates
        )
        self.check_accepted(catalog, [note for head in plan.parts.heads for note in head.notes])
        catalog.hold_out(self.settings.hold_out)
        counts = self.pack_shards(catalog)
        shards = self.shards_of_samples(catalog)
        reports, deliveries = {}, {}
        for split in self.splits:
            reports[split], entries = self.report_and_entries(catalog, plan, split, counts)
            dataset = self.outputs[split].staging.dataset
            for name, content in index_files(entries).items():
                write_atomically(dataset / name, content)
            deliveries[split] = write_delivery(dataset, 0, plan.fingerprint[:8], plan, entries)
            write_images(dataset / deliveries[split].images, catalog, shards, self.buckets, split=split)
            record = DatasetRecord(comparable_settings(plan.settings), [deliveries[split]])
            write_atomically(dataset / RECORD, with_indexes(record, entries).content())
        report = reports[TRAIN]
        if HELD_OUT in reports:
            held_out = reports[HELD_OUT]
            report.held_out = HeldOut(self.settings.held_out, held_out.pictures, held_out.buckets, held_out.bytes)
        html = report_page(
            report,
            self.settings.out,
            buckets=report_content.of_buckets(catalog, self.buckets),
            held_out=report_content.of_held_out(catalog),
            rejected=report_content.of_reasons(catalog, repeats),
        )
        write_atomically(self.work.train.dataset / HTML_REPORT, html)
        write_atomically(self.work.train.dataset / CAPTIONS, caption_list(catalog))
        for split, each in reports.items():
            each.seconds, each.date = time.monotonic() - start, utc_now()
            for name in (REPORT, deliveries[split].report):
                each.save(self.outputs[split].staging.dataset / name)
        # Write this file last: it marks the datasets as complete.
        write_atomically(self.work.complete, (self.work.train.dataset / REPORT).read_text(encoding='utf-8'))

    def check_accepted(self, catalog: Catalog, notes: Iterable[str]) -> None:
        """If no image is left for training, remove the work folder and raise an error that includes the notes."""
        accepted, hold_out = len(catalog.kept), self.settings.hold_out
        if accepted > hold_out:
            return
        self.work.remove()
        title = self.settings.source.title
        problem = f'{title}: every image was rejected; nothing was written'
        if accepted:
            problem = (
                f'hold_out: {title} has {accepted} accepted images, so {hold_out} cannot be held out; '
                f'give at most {accepted - 1}'
            )
        raise UserError('\n'.join([problem, *notes, *rejection_lines(catalog.rejected)]))

    def report_and_entries(
        self, catalog: Catalog, plan: InputPlan, split: int, counts: Mapping[tuple[int, str], int]
    ) -> tuple[PrepareReport, dict[str, list[dict[str, Any]]]]:
        """Return report (without `held_out`, `date`, `seconds`) and index entries of a split, training or held-out."""
        report = self.make_report(catalog, plan, split)
        entries = {
            name: self.writer(split, name).read_entries(range(self.first_shard(name), counts[split, name]))
            for name in report.buckets
        }
        report.bytes = {name: sum(shard['raw_data']['bytes'] for shard in entries[name]) for name in entries}
        return report, entries

    def first_shard(self, bucket: str) -> int:
        return 0

    def shards_of_samples(self, catalog: Catalog) -> np.ndarray:
        """Return the final shard number of each sample, uint32; meaningless for samples that are not kept."""
        found = np.zeros(len(catalog.samples.image), np.uint32)
        for split, (code, bucket) in product(self.splits, enumerate(self.buckets)):
            samples = catalog.samples_in(code, split)
            spans = self.writer(split, bucket).format.cut(catalog.samples.size[samples])
            for number, span in enumerate(spans, self.first_shard(bucket)):
                found[samples[span.start : span.stop]] = number
        return found

    def writer(self, split: int, bucket: str) -> ShardWriter:
        output = self.outputs[split]
        entries = LocalPlace(output.staging.packed / bucket)
        return ShardWriter(output.bucket(bucket), entries, self.format, self.token)

    def pack_shards(self, catalog: Catalog) -> dict[tuple[int, str], int]:
        """Write the remaining final shards; return, by split and bucket, the number of the last shard plus one."""
        counts: dict[tuple[int, str], int] = {}
        kept = catalog.split[catalog.samples.image] != REJECTED
        total = int(catalog.samples.size[kept].sum())
        with tqdm(total=total, desc='shards', unit='B', unit_scale=True, disable=None) as bar:

            def remaining() -> Iterator[ShardJob]:
                for split, (code, bucket) in product(self.splits, enumerate(self.buckets)):
                    writer = self.writer(split, bucket)
                    done = writer.done()
                    samples = catalog.samples_in(code, split)
                    name = f'held-out/{bucket}' if split == HELD_OUT else bucket
                    first = self.first_shard(bucket)
                    for job in plan_shards(catalog, samples, name, shards=writer, first=first):
                        counts[split, bucket] = job.number + 1
                        if job.number in done:
                            bar.update(int(job.size.sum()))
                        else:
                            yield job

            with closing(self.results(remaining())) as results:
                for size in results:
                    bar.update(size)
        return counts

    def make_report(self, catalog: Catalog, plan: InputPlan, split: int) -> PrepareReport:
        """Return the report of a split, training or held-out, without values that are known only after packing."""
        images = catalog.images(split)
        found = np.bincount(
            catalog.samples.bucket[catalog.split[catalog.samples.image] == split], minlength=len(self.buckets)
        )
        counts = dict(zip(self.buckets, found.tolist(), strict=True))
        report = PrepareReport(
            source=self.settings.source.title,
            arguments={'out': self.settings.out} | plan.settings,
            max_rejected=self.settings.max_rejected,
            versions=plan.versions,
            license=self.settings.license or next((head.license for head in plan.parts.heads if head.license), None),
            pictures=len(images),
            buckets={name: count for name, count in counts.items() if count},
            empty_buckets=[name for name, count in counts.items() if not count],
            statistics=statistics_of(catalog, images),
            fingerprint=plan.content_fingerprint,
        )
        if split == HELD_OUT:
            report.inputs, report.notes = len(images), [f'held out from {self.settings.out}']
        else:
            done = [read_counts(self.work.parts / piece.name, piece.part) for piece in self.pieces(plan)]
            report.rejected, report.passed_over = catalog.rejected, summed_counts(each.passed_over for each in done)
            report.details = summed_details(each.details for each in done)
            report.repaired = summed_counts({'': each.repaired} for each in done).get('', report.repaired)
            if isinstance(self.source, CaptionedSource):
                report.passed_over |= self.source.table.unused(self.input_keys(plan))
            report.inputs = len(catalog) + sum(files.count for files in report.passed_over.values())
            report.notes = self.notes(plan, report.passed_over, set().union(*(each.columns for each in done)))
            report.notes += recoding_notes(self.settings, [image for each in done for image in each.recoded])
            long_captions = long_captions_note(report.statistics)
            report.notes += [] if long_captions is None else [long_captions]
            if columns := self.settings.source.caption_columns:
                counts = catalog.caption_columns(images)
                report.notes.append('captions by column: ' + ', '.join(f'{name} {counts[name]}' for name in columns))
                report.notes += [
                    f'no image has a caption in {name!r}; correct --caption-column if this is a mistake'
                    for name in columns
                    if not counts[name]
                ]
        return report

    def notes(self, plan: InputPlan, passed_over: Iterable[str], columns: Collection[str]) -> list[str]:
        """Return notes for the report: notes from the source, and about skipped image formats, possible copies of
        held-out images, and columns that the filters use but no input has.
        """
        found = sorted(name for kind in passed_over if (name := format_of_suffix(kind)) is not None)
        notes = [note for head in plan.parts.heads for note in head.notes]
        if not self.settings.license and any(head.license == '' for head in plan.parts.heads):
            notes.append(
                f'{self.settings.source.title}: its dataset card states no license; find it out before training, and '
                'record it with --license NAME'
            )
        notes += [
            f'images of other formats were skipped; read them with --formats {name}' for name in dict.fromkeys(found)
        ]
        if self.settings.hold_out and self.settings.duplicates == 'none':
            notes.append('hold_out: duplicates were not searched, so copies of held-out images may be in training')
        filters = self.settings.filters
        return notes + filters.unknown_column_notes(filters.columns_in(dict.fromkeys(columns)), columns)

    def input_keys(self, plan: InputPlan) -> Iterator[str]:
        """Yield the keys of all inputs, including rejected ones, without the prefix added by `key_prefix`."""
        for folder in self.folders(plan):
            for key in read_inputs(folder, ['key'])['key'].to_pylist():
                yield key.removeprefix(self.settings.key_prefix)

    def put_in_place(self, report: PrepareReport) -> None:
        """Move the complete datasets from the work folder to the outputs; may be repeated after an interruption."""
        # Move the training set last, so that it never exists without its held-out images. If it replaces an existing
        # training set, first move the old one away, since it may contain images that are now held out. The report
        # says if images were held out; the settings may have changed since the start that was killed here.
        if report.held_out is not None:
            self.outputs[TRAIN].set_aside()
            self.outputs[HELD_OUT].put_in_place()
        self.outputs[TRAIN].put_in_place()


def recoding_notes(settings: PrepareSettings, measured: Sequence[Measured]) -> list[str]:
    """Return a note with the file sizes and PSNR of lossless images that were stored in a lossy format."""
    if not measured:
        return []
    png, stored, decibels = map(sum, zip(*measured, strict=True))
    return [
        f'PNG images are stored as {settings.lossless_format} of quality {settings.jpeg_quality}: {stored:,} instead '
        f'of {png:,} bytes ({1 - stored / png:.0%} less) at {decibels / len(measured):.1f} dB PSNR, in a sample of '
        f'{len(measured)} images'
    ]
