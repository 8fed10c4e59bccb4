"""Caption the shards of a dataset that have no tables yet: all of them, or one machine's share.

Finished tables in the dataset are the state that all machines share, so any of them can be stopped and restarted. When
every shard has its table, the column is listed in captions.json, from which training reads it.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash
from tqdm import tqdm

from diffusion.captioning.settings import CaptionSettings
from diffusion.captioning.shard_task import ShardTask, fetched_shards
from diffusion.errors import UserError
from diffusion.language_models.engine import Engine, Question
from diffusion.prepare.shard_rewriting import indexed_folders
from diffusion.prepare.work_dir import LOCK, Share
from diffusion.storage import locks
from diffusion.storage.atomic import remove
from diffusion.storage.caption_tables import FOLDER, Receipt, finished, plan_hash, publish, read_receipts, stem_of
from diffusion.storage.local_files import working_folder
from diffusion.storage.mds import INDEX
from diffusion.storage.places import is_url, place_at
from diffusion.storage.shard_writer import PLAN, pin_plan

JOURNALS = 'answers'
NO_SHARE = Share(0, 1)


class CaptionRun:
    """A dataset to caption with some settings.

    Args:
        place: Path or URL of the dataset.
        share: Share of the shards that this machine captions.
        work: Local folder for answers of unfinished shards (None: beside a local dataset, or in the user's cache).
    """

    def __init__(
        self, place: str, settings: CaptionSettings, *, share: Share | None = None, work: str | None = None
    ) -> None:
        self.place = place.rstrip('/')
        self.settings = settings
        self.share = share_of_rank(share or NO_SHARE, os.environ)
        self.work = work_folder(self.place) if work is None else Path(work).resolve()
        self.dataset = place_at(self.place, self.work / f'fetched-{self.share.index}-of-{self.share.of}')
        self.plans = {column: settings.plan(column) for column in settings.columns}
        self.written: dict[str, list[Receipt]] = {column: [] for column in settings.columns}
        """Receipts of the tables that this process has written, by column."""
        self.listed: list[str] = []
        """Columns with a table for every shard of the dataset, so that training can use them."""

    def indexes(self) -> dict[str, list[dict[str, Any]]]:
        """Read the index entries of the shards, by the path of their folder relative to the dataset."""
        found = {each.name: each.entries for each in indexed_folders(self.dataset, self.place)}
        if not found:
            raise UserError(f'{self.place}: has no {INDEX}; give a dataset that diffusion prepare has written')
        return found

    def check_plans(self, *, record: bool) -> None:
        """Raise UserError if the dataset has another plan of a column; with `record`, record plans that it lacks."""
        for column, plan in self.plans.items():
            folder = place_at(f'{self.place}/{FOLDER}/{column}')
            if record or folder.read(PLAN) is not None:
                pin_plan(folder, plan, where=f'columns.{column}', alone=False)

    def remaining(self) -> list[ShardTask]:
        """Return this share's shards without a table for one of the columns."""
        tasks: list[ShardTask] = []
        for bucket, entries in self.indexes().items():
            entries = [entry for entry in entries if self.share.includes(shard_number(bucket, entry))]
            receipts = {column: read_receipts(self.dataset, bucket, column) for column in self.plans}
            for entry in entries:
                stem = stem_of(entry['raw_data']['basename'])
                columns = {
                    column: self.settings.prompts[column]
                    for column, plan in self.plans.items()
                    if not finished(receipts[column].get(stem), plan_hash(plan), entry)
                }
                if columns:
                    folder = self.work / JOURNALS
                    tasks.append(ShardTask(len(tasks), bucket, entry, columns, self.plans, folder))
        return tasks

    def execute(self, engine: Engine) -> None:
        """Caption the remaining images, write their tables, and list the columns that are complete then."""
        with self.locked():
            self.dataset.check_conditions()
            self.check_plans(record=False)
            tasks = self.remaining()
            total = sum(task.entry['samples'] * len(task.columns) for task in tasks)
            with tqdm(total=total, desc='captions', unit='', disable=None) as bar:
                questions = self._questions(tasks, bar)
                for number, answer in enumerate(engine.answers(questions)):
                    if number == 0:  # before the first answer, the model or the endpoint may be misspelled
                        self.check_plans(record=True)
                    task = tasks[answer.question.shard]
                    task.record(answer)
                    bar.update()
                    self._finish_if_complete(task)
            indexes = self.indexes()  # images may have been added or removed meanwhile
            for column, plan in self.plans.items():
                listed = [publish(self.dataset, name, column, plan, entries) for name, entries in indexes.items()]
                self.listed += [column] if all(listed) else []
            if self.share.of == 1 and len(self.listed) == len(self.plans):
                self._remove_work()

    def sample_questions(self, count: int) -> Iterator[Question]:
        """Yield questions about up to `count` of the remaining images, for a measurement; record nothing."""
        with tempfile.TemporaryDirectory() as folder:
            tasks = [replace(task, folder=Path(folder)) for task in self.remaining()[:1]]
            for task, path in fetched_shards(self.dataset, tasks):
                yield from islice(task.questions(path), count * len(task.columns))

    def _questions(self, tasks: Sequence[ShardTask], bar: Any) -> Iterator[Question]:
        for task, path in fetched_shards(self.dataset, tasks):
            yield from task.questions(path, on_known=bar.update)
            # All answers may have been in the journal, or may have come while the last image was read.
            self._finish_if_complete(task)

    def _finish_if_complete(self, task: ShardTask) -> None:
        for column, receipt in task.finish(self.dataset).items() if task.is_complete else ():
            self.written[column].append(receipt)

    def _remove_work(self) -> None:
        """Remove this program's files from the work folder, and the folder if it is empty then."""
        for path in [self.work / JOURNALS, *self.work.glob('fetched-*'), *self.work.glob(f'{LOCK}*')]:
            remove(path)
        with suppress(OSError):
            self.work.rmdir()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the work folder: different shares may run together, but none twice, nor beside a run of everything."""

        def fail() -> None:
            raise UserError(
                f'{self.work}: another process is captioning share {self.share} of this dataset; wait until it ends'
            )

        self.work.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            for name, shared in ((LOCK, self.share.of > 1), (f'{LOCK}-{self.share.index}-of-{self.share.of}', False)):
                if not stack.enter_context(locks.hold_lock(self.work / name, fail, shared=shared)):
                    raise UserError(f'{self.work}: the file system has no locks (flock); give another one with --work')
            yield


def share_of_rank(share: Share, environ: Mapping[str, str]) -> Share:
    """Divide a share among the processes that torchrun has started; without torchrun, return the share."""
    ranks, rank = int(environ.get('WORLD_SIZE', 1)), int(environ.get('RANK', 0))
    return Share(share.index * ranks + rank, share.of * ranks)


def shard_number(bucket: str, entry: Mapping[str, Any]) -> int:
    """Return a number of a shard that appends do not change, by which machines divide the shards."""
    # Add the bucket's hash: if every bucket has few shards, their numbers alone would put them into one share.
    number = entry['raw_data']['basename'].split('.')[1]
    return xxhash.xxh32_intdigest(bucket) + (int(number) if number.isdecimal() else xxhash.xxh32_intdigest(number))


def work_folder(place: str) -> Path:
    """Return the default folder for unfinished work on the dataset at a path or URL."""
    if is_url(place):
        return working_folder(place, 'captions')
    path = Path(place).resolve()
    return path.with_name(f'{path.name}.captions-work')
