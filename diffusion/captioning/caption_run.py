"""Caption the shards of a dataset that have no tables of captions yet: all of them, or one machine's share.

Machines share no state except the finished tables in the dataset, so each can be stopped and restarted. Once every
shard has a table of a column, captions.json lists the column, and training can use it.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import xxhash
from tqdm import tqdm

from diffusion.captioning.settings import CaptionSettings
from diffusion.captioning.shard_task import ShardTask
from diffusion.errors import UserError
from diffusion.language_models.engine import Engine, Question
from diffusion.prepare.shard_rewriting import check_shard, encoded_samples, indexed_folders
from diffusion.prepare.work_dir import Share, share_lock
from diffusion.storage.atomic import remove
from diffusion.storage.caption_tables import FOLDER, LIST, joined, plan_hash, publish, read_list, table_key, tables_in
from diffusion.storage.local_files import working_folder
from diffusion.storage.mds import INDEX, ShardFormat
from diffusion.storage.places import LocalPlace, is_url, place_at
from diffusion.storage.shard_writer import PLAN, pin_plan

BUSY = 'another process is captioning this share of the dataset; wait until it ends'
READABLE = frozenset({'bytes', 'str', 'int', 'json'})
"""Encodings of columns that `ShardFormat.decode` supports."""


class CaptionRun:
    """Captioning of a dataset: find the shards without captions, caption their images, and write the tables.

    Args:
        place: Path or URL of the dataset.
        share: Share of the shards that this machine captions.
        work: Local folder for answers about unfinished shards (None: beside a local dataset, or in the user's cache).
    """

    def __init__(
        self, place: str, settings: CaptionSettings, *, share: Share | None = None, work: str | None = None
    ) -> None:
        self.place = place.rstrip('/')
        self.settings = settings
        given, environ = share or Share(0, 1), os.environ
        # Under torchrun, the processes divide this machine's share.
        ranks, rank = int(environ.get('WORLD_SIZE', 1)), int(environ.get('RANK', 0))
        self.share = Share(given.index * ranks + rank, given.of * ranks)
        path = Path(self.place).resolve()
        default = working_folder(place, 'captions') if is_url(place) else path.with_name(f'{path.name}.captions-work')
        self.work = default if work is None else Path(work, 'captions-work').resolve()
        self.dataset = place_at(self.place, self.work / f'fetched-{self.share.index}-of-{self.share.of}')
        self.plans = {column: settings.plan(column) for column in settings.columns}
        self.written: dict[str, Counter[str]] = {column: Counter() for column in settings.columns}
        """What this process wrote, by column: number of `captions`, of `tokens`, and of rejected answers by rule."""
        self.listed: list[str] = []
        """Columns with a table for every shard of the dataset, so that training can use them."""

    def indexes(self) -> dict[str, list[dict[str, Any]]]:
        """Return the shards' index.json entries, by the shards' folder relative to the dataset."""
        found = {each.name: each.entries for each in indexed_folders(self.dataset, self.place)}
        if not found:
            raise UserError(f'{self.place}: has no {INDEX}; give a dataset that diffusion prepare has written')
        return found

    def samples(self, tasks: Sequence[ShardTask]) -> Iterator[tuple[ShardTask, Iterator[dict[str, Any]]]]:
        """Yield each task with its decoded samples, downloading one shard ahead; read all samples before the next task.

        Raises:
            UserError: A shard does not have images as `diffusion prepare` writes them.
            DataError: A shard is damaged.
        """
        with ThreadPoolExecutor(1) as thread:
            fetches = chain((thread.submit(self.dataset.fetch, task.name) for task in tasks), [None])
            for task, (fetch, _) in zip(tasks, pairwise(fetches), strict=True):
                assert fetch is not None
                path, shards = fetch.result(), ShardFormat.of_entry(task.entry)
                check_shard(path, task.entry, task.name)
                if 'image' not in shards.columns or not READABLE.issuperset(shards.columns.values()):
                    raise UserError(
                        f'{task.name}: has columns {", ".join(shards.columns)}, which are not those of images from '
                        'diffusion prepare; caption the dataset of images'
                    )
                yield task, map(shards.decode, encoded_samples(path))
                if not isinstance(self.dataset, LocalPlace):
                    path.unlink()

    def check_plans(self, *, record: bool) -> None:
        """Raise UserError if a column was captioned with another plan (settings); `record` saves missing plans."""
        for column, plan in self.plans.items():
            folder = place_at(f'{self.place}/{FOLDER}/{column}')
            if record or folder.read(PLAN) is not None:
                pin_plan(folder, plan, where=f'columns.{column}', alone=False)

    def tasks(self) -> list[ShardTask]:
        """Return a task for each shard, with its finished tables and the columns that it still lacks."""
        tasks, hashes = list[ShardTask](), {column: plan_hash(plan) for column, plan in self.plans.items()}
        for bucket, entries in self.indexes().items():
            name = joined(bucket, LIST)
            read_list(self.dataset.read(name), self.dataset.locate(name))  # refuse a damaged one before the work
            found = {column: tables_in(self.dataset, bucket, column) for column in self.plans}
            for entry in entries:
                keys = {column: table_key(hashes[column], entry['raw_data']) for column in found}
                done = {column: found[column][key][0] for column, key in keys.items() if key in found[column]}
                missing = {column: prompt for column, prompt in self.settings.prompts.items() if column not in done}
                folder = self.work / 'answers'
                tasks.append(ShardTask(len(tasks), bucket, entry, done, missing, self.plans, folder))
        return tasks

    def remaining(self) -> list[ShardTask]:
        """Return the tasks in this process's share that lack a table for at least one column."""
        return [task for task in self.tasks() if task.columns and self.share.includes(shard_number(task))]

    def execute(self, engine: Engine) -> None:
        """Caption the remaining images, write their tables, and list complete columns in captions.json."""
        with share_lock(self.work, None if self.share.of == 1 else self.share, BUSY):
            self.dataset.check_conditions()
            self.check_plans(record=False)
            tasks = {task.number: task for task in self.remaining()}
            total = sum(task.entry['samples'] * len(task.columns) for task in tasks.values())
            with tqdm(total=total or None, desc='captions', unit='', disable=None) as bar:
                for number, answer in enumerate(engine.answers(self._questions([*tasks.values()], bar))):
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
                remove(self.work)

    def usage(self) -> str:
        """Return a message on how to train with the listed columns."""
        weights = ', '.join(f'{column}: {0.8 / len(self.listed):.2g}' for column in self.listed)
        return f'to draw captions from these columns in training: dataset.caption_weights={{original: 0.2, {weights}}}'

    def sample_questions(self, count: int) -> Iterator[Question]:
        """Yield questions to the model about up to `count` remaining images, to measure its speed; record nothing."""
        with tempfile.TemporaryDirectory() as folder:
            for task, samples in self.samples([replace(task, folder=Path(folder)) for task in self.remaining()[:1]]):
                yield from islice(task.questions(samples), count * len(task.columns))

    def _questions(self, tasks: Sequence[ShardTask], bar: Any) -> Iterator[Question]:
        for task, samples in self.samples(tasks):
            bar.update(task.read_journal())
            yield from task.questions(samples)
            # All answers may be known already: from the journal, or received while the last image was read.
            self._finish_if_complete(task)

    def _finish_if_complete(self, task: ShardTask) -> None:
        for column, table in task.finish(self.dataset).items() if task.is_complete else ():
            self.written[column] += Counter(table['rejected'].drop_null().to_pylist())
            self.written[column]['captions'] += len(table) - table['caption'].null_count
            self.written[column]['tokens'] += sum(table.filter(table['caption'].is_valid())['tokens'].to_pylist())


def shard_number(task: ShardTask) -> int:
    """Return a shard's number, which assigns it to a machine; it stays the same if shards are added to the dataset."""
    # Add the bucket's hash: if every bucket has few shards, their numbers alone would put them into one share.
    number = task.entry['raw_data']['basename'].split('.')[1]
    return xxhash.xxh32_intdigest(task.bucket) + (int(number) if number.isdecimal() else xxhash.xxh32_intdigest(number))
