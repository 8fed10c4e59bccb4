"""Add a delivery of images to a finished dataset with new shards and indexes; old shards stay unchanged.

The delivery is converted in a work folder, as for a new dataset, and compared with the dataset's images. Its shards and
tables are then put into the dataset. They take effect when first the record (`dataset_record`) and then the indexes are
replaced. If the process is killed, each bucket is either in the old or in the new state, and running the same command
again finishes the work. If another process changes the dataset meanwhile, the comparison is repeated.
"""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from diffusion.config.load import RecipeError
from diffusion.errors import UserError
from diffusion.prepare import report_content
from diffusion.prepare.catalog import TRAIN, Catalog
from diffusion.prepare.counts_report import PrepareReport, report_page, utc_now
from diffusion.prepare.dataset_record import (
    RecordedDataset,
    comparable_settings,
    delivery_folder,
    with_indexes,
    write_delivery,
)
from diffusion.prepare.dataset_reports import caption_lines, finish_change, report_of, write_report_files
from diffusion.prepare.image_hashes import duplicates, find_known
from diffusion.prepare.image_record import EarlierImages, write_images
from diffusion.prepare.input_plan import InputPlan, SavedPlan, at_planned_version
from diffusion.prepare.pipeline import Preparation
from diffusion.prepare.report_content import MAX_CAPTIONS, caption_list
from diffusion.prepare.settings import PrepareSettings, check_settings
from diffusion.prepare.source import NamedCount, PartList, Source, count_named
from diffusion.prepare.work_dir import Share, WorkFolder
from diffusion.prepare.worker_pool import Run
from diffusion.storage.atomic import remove, write_atomically
from diffusion.storage.retry import PreconditionFailed
from diffusion.storage.shard_writer import differences

log = logging.getLogger(__name__)

DUPLICATE_KEY = 'duplicate_key'
REMOVED = 'removed'
PRESENT = 'already in the dataset'
"""The report's label for images that the dataset has already, with the same key and pixels; they count as skipped."""
COMPUTED = 'columns_from'
"""Setting with the path of a Python file that computes columns; a dataset records the file's hash, not its path."""
BASE = 'base'
"""File in the work folder that names the delivery's folder; this name depends on the dataset's version."""


def append(
    settings: PrepareSettings, *, source: Source | None = None, run: Run | None = None, share: Share | None = None
) -> PrepareReport | None:
    """Add a source's images to the dataset at `settings.out`, or resume an interrupted addition.

    All added images are for training. The held-out images do not change, and `hold_out` must equal the dataset's.

    Args:
        settings: Settings of the preparation; those that affect samples must equal the dataset's.

    Returns:
        This delivery's report, with 0 inputs if the dataset has all of them; None after converting only a `share`.
    """
    if problems := check_settings(settings):
        raise RecipeError(problems, 'diffusion prepare')
    if settings.overwrite:
        raise UserError('overwrite: cannot be combined with --append; give one of them')
    work = WorkFolder(settings.work_folder)
    dataset = RecordedDataset(settings.out, work.path / 'fetched')
    check_same_settings(settings, dataset)
    dataset.folder.check_conditions()
    with work.locked(share):
        source = source or settings.open_source()
        work.check_kind(is_append=True)
        return _Addition(settings, source, run, work, dataset).execute(share)


def inherited_settings(out: str) -> dict[str, Any]:
    """Return, by name, the settings that all deliveries of the dataset at `out` share, except `columns_from`."""
    settings = dict(RecordedDataset(out, Path()).record.settings)
    del settings[COMPUTED]  # the record has the Python file's name and hash, but not its path
    return settings


def check_same_settings(settings: PrepareSettings, dataset: RecordedDataset) -> None:
    """Raise UserError that lists each setting that affects samples and differs from the dataset's."""
    there, now = dataset.record.settings, comparable_settings(settings.content_settings())
    if there['sizes'] != now['sizes']:  # with one size, `buckets` is saved as `largest`; do not report that
        now['buckets'] = there['buckets']
    if there[COMPUTED] and not now[COMPUTED]:
        file = there[COMPUTED]['file']
        raise UserError(f'out: {dataset.folder} has columns that {file} computes; add --columns-from with its path')
    if lines := differences(there, now, saved_in='there'):
        raise UserError(
            f'out: {dataset.folder} was prepared with other settings:\n  ' + '\n  '.join(lines) + '\n'
            "leave these settings out to use the dataset's, or prepare a separate dataset with another out"
        )


class _Addition(Preparation):
    """Steps of one `append` call, during which the work folder is locked."""

    def __init__(
        self, settings: PrepareSettings, source: Source, run: Run | None, work: WorkFolder, dataset: RecordedDataset
    ) -> None:
        super().__init__(replace(settings, hold_out=0), source, run, work)
        self.given = settings
        self.dataset = dataset
        self.first: dict[str, int] = {}
        self.present = NamedCount()
        self.repeated_keys = 0

    def execute(self, share: Share | None) -> PrepareReport | None:
        """Run all remaining steps; return the report, or None after converting only one machine's share."""
        start = time.monotonic()
        # Finish the change of an earlier command, such as `--append`, that was killed before it replaced the indexes.
        finish_change(self.dataset)
        self.source = at_planned_version(self.source, self.work)
        plan = self.remaining_plan()
        if share is None:
            self.forget_other_plan(plan)
        if not plan.parts:
            return self.nothing_to_do()
        write_atomically(self.work.append, '')
        plan.write_or_check(self.work)
        with self.work.cleared_after_errors(share):
            self.convert_parts(plan, share)
            if share is not None:
                return None
            report = self.add(plan, start)
        self.work.remove()
        return report

    def remaining_plan(self) -> InputPlan:
        """Return an input plan of the parts that are new or changed since earlier deliveries of the same source."""
        plan = InputPlan.make(self.settings, self.source)
        known = self.dataset.known_parts(plan.settings['source'])
        heads = enumerate(plan.parts.heads)
        remaining = [number for number, head in heads if head.stamp not in known.get(head.name, ())]
        return replace(plan, parts=PartList(plan.parts[number] for number in remaining))

    def forget_other_plan(self, plan: InputPlan) -> None:
        """Remove an earlier start's work if it had the same settings, but other package versions or parts to convert.

        The parts differ if the input has changed since, or if the dataset now has some of them.
        """
        if not self.work.plan.exists():
            return
        saved = SavedPlan.read(self.work.plan)
        if saved.settings != plan.settings or saved.fingerprint == plan.fingerprint:
            return
        self.discard_other_version()
        # The input may have grown since an earlier start that was killed before putting anything into the dataset.
        if plan.parts:
            log.warning('%s: the input changed since the last (interrupted) run; starting over', self.work.path)
        self.work.clear()

    def nothing_to_do(self) -> PrepareReport:
        return PrepareReport(
            source=self.settings.source.title,
            arguments={'out': self.settings.out},
            max_rejected=self.settings.max_rejected,
            inputs=0,
            notes=[f'{self.settings.out}: has all parts of the input already; nothing to do'],
        )

    def add(self, plan: InputPlan, start: float) -> PrepareReport:
        """Add the converted delivery; repeat if another process changed the dataset without adding this delivery."""
        while True:
            try:
                return self.add_to_version(plan, start)
            except PreconditionFailed as error:
                log.warning('%s; comparing the images to add with the new version of the dataset', error)
                self.dataset.refresh()
                check_same_settings(self.given, self.dataset)  # the dataset may have been prepared again
                if not self.remaining_plan().parts:  # another process added the same delivery
                    self.discard_other_version()
                    return self.nothing_to_do()

    def add_to_version(self, plan: InputPlan, start: float) -> PrepareReport:
        """Add the converted delivery; raise PreconditionFailed if the dataset has changed since it was read."""
        self.token = self.dataset.token(plan.fingerprint)
        folder = delivery_folder(len(self.dataset.record.deliveries), self.token)
        base = self.work.path / BASE
        if not base.exists() or base.read_text(encoding='utf-8') != folder:
            self.discard_other_version()
            write_atomically(base, folder)
        self.first = {bucket: self.dataset.next_shard(bucket) for bucket in self.buckets}
        catalog = Catalog.read(self.folders(plan), self.buckets)
        earlier = self.dataset.earlier_images()
        self.present, self.repeated_keys = reject_known(catalog, earlier)
        repeats = self.drop_duplicates(catalog, earlier)
        counts = self.pack_shards(catalog)
        report, entries = self.report_and_entries(catalog, plan, TRAIN, counts)
        staging = self.outputs[TRAIN].staging.dataset
        delivery = write_delivery(staging, len(self.dataset.record.deliveries), self.token, plan, entries)
        write_images(staging / delivery.images, catalog, self.shards_of_samples(catalog), self.buckets, split=TRAIN)
        self.add_notes(report, plan)
        report.seconds, report.date = time.monotonic() - start, utc_now()
        report.save(staging / delivery.report)
        # Put all files of the delivery into the dataset before the record refers to them.
        for path in sorted(path for path in staging.rglob('*') if path.is_file()):
            self.dataset.folder.put(path.relative_to(staging).as_posix(), path)
        grown = replace(self.dataset.record, deliveries=[*self.dataset.record.deliveries, delivery])
        self.dataset.commit(with_indexes(grown, self.dataset.entries(grown.deliveries)))
        self.dataset.update_indexes()
        total = self.write_reports(catalog, repeats)
        report.notes.append(
            f'added to {self.settings.out}, which has {total.pictures} images of {len(total.deliveries)} deliveries now'
        )
        return report

    def discard_other_version(self) -> None:
        staging, base = self.outputs[TRAIN].staging, self.work.path / BASE
        packed = (path.relative_to(staging.packed).as_posix() for path in staging.packed.rglob('*.mds.json'))
        # Shards and tables may already be in the dataset. Keep those in use: another process may have added the same
        # delivery to the same version, and thus the same files.
        used = self.dataset.shard_names()
        self.dataset.folder.delete(sorted({name.removesuffix('.json') for name in packed} - used))
        folder = base.read_text(encoding='utf-8') if base.exists() else None
        if folder and not any(delivery.images.startswith(f'{folder}/') for delivery in self.dataset.record.deliveries):
            self.dataset.folder.remove_folder(folder)
        for path in (staging.packed, staging.dataset):
            remove(path)

    def first_shard(self, bucket: str) -> int:
        return self.first[bucket]

    def drop_duplicates(self, catalog: Catalog, earlier: EarlierImages) -> list[tuple[int, str]]:
        """Reject images that duplicate an image of the dataset or of the delivery, or an image that has been removed.

        With `duplicates: none`, reject only copies of removed images. Return (row number, key of the original) for the
        first few duplicates, for the report.
        """
        kept = catalog.kept
        names = ('exact_hash', 'perceptual_hash', 'is_flat')
        exact, perceptual, is_flat = (catalog.columns[name][kept] for name in names)
        # Removed images are recognized by their pixels even if duplicates are not searched for.
        mode = self.settings.duplicates
        first = 0 if mode != 'none' else len(earlier) - earlier.removed_count
        known_exact, known_perceptual, known_is_flat = (earlier.hashes[name][first:] for name in names)
        count = len(known_exact)
        # Search only for duplicates of the new images. A search among all pairs, as for a new dataset, would take
        # minutes and 16 GB with a hundred million old images, even for a small delivery.
        near = mode == 'near'
        known = known_exact, known_perceptual, ~known_is_flat & near
        limit = self.settings.max_distance
        repeats = find_known(known, (exact, perceptual, ~is_flat & near), max_distance=limit)
        if mode == 'none':
            catalog.reject(kept[repeats >= 0], REMOVED)
            return []
        new = np.flatnonzero(repeats < 0)
        among_new = duplicates(exact[new], perceptual[new], ~is_flat[new] & near, max_distance=limit)
        repeats[new] = np.where(among_new < 0, -1, count + new[among_new])
        of_removed = earlier.is_removed(repeats) & (repeats >= 0) & (repeats < count)
        catalog.reject(kept[of_removed], REMOVED)
        rows = np.flatnonzero((repeats >= 0) & ~of_removed)

        def original(index: int) -> str:
            at = int(repeats[rows[index]])
            return earlier.name(at) if at < count else catalog.key(kept[at - count])

        return catalog.reject_duplicates(kept[rows], original)

    def make_report(self, catalog: Catalog, plan: InputPlan, split: int) -> PrepareReport:
        """Return the delivery's report; images that the dataset already has count as skipped."""
        report = super().make_report(catalog, plan, split)
        if self.present.count:
            report.passed_over = dict(report.passed_over)
            count_named(report.passed_over, PRESENT, self.present.count, self.present.names)
        return report

    def add_notes(self, report: PrepareReport, plan: InputPlan) -> None:
        """Add notes to the report about images rejected for keys that the dataset has, and changed package versions."""
        if self.repeated_keys:
            report.notes.append(
                f'{self.repeated_keys} images have the key of another image of the dataset, with other pixels; put a '
                'prefix before the keys of this delivery (--key-prefix monday/), or remove the old images first '
                '(diffusion data remove)'
            )
        former = self.dataset.json(self.dataset.record.deliveries[-1].report)['versions']
        pairs = {name: (former.get(name, now), now) for name, now in plan.versions.items()}
        changed = [f'{name} {before} -> {now}' for name, (before, now) in pairs.items() if before != now]
        if changed:
            report.notes.append(
                f'prepared with other packages than the delivery before ({", ".join(changed)}): pixels may differ in '
                'rounding, so that copies of its images may not be found by their pixels'
            )

    def write_reports(self, catalog: Catalog, repeats: list[tuple[int, str]]) -> PrepareReport:
        """Write report and captions.txt of the whole dataset, with thumbnails of this delivery; return the report."""
        report = report_of(self.dataset)
        page = report_page(
            report,
            self.settings.out,
            buckets=report_content.of_buckets(catalog, self.buckets),
            held_out=[],
            rejected=report_content.of_reasons(catalog, repeats),
        )
        lines = set(caption_lines(self.dataset))
        new = [caption for caption in caption_list(catalog).splitlines() if caption not in lines]
        lines.update(new[: max(0, MAX_CAPTIONS - len(lines))])
        write_report_files(self.dataset, report, page, sorted(lines))
        return report


def reject_known(catalog: Catalog, earlier: EarlierImages) -> tuple[NamedCount, int]:
    """Reject a delivery's images whose keys the dataset has, or had before their images were removed.

    Returns:
        The images whose key and pixels equal those of an image in the dataset (these do not count as rejected), and the
            number of images rejected because their key belongs to an image with different pixels.
    """
    kept = catalog.kept
    same_key = earlier.find_keys(catalog.key_hashes()[kept])
    known = same_key >= 0
    is_removed = known & earlier.is_removed(same_key)
    is_equal = np.zeros(len(kept), bool)
    is_equal[known] = earlier.hashes['exact_hash'][same_key[known]] == catalog.columns['exact_hash'][kept[known]]
    catalog.reject(kept[is_removed], REMOVED)
    repeated = kept[known & ~is_removed & ~is_equal]
    catalog.reject(repeated, DUPLICATE_KEY)
    catalog.reject(kept[known & ~is_removed & is_equal], PRESENT)
    return catalog.rejected.pop(PRESENT, NamedCount()), len(repeated)
