"""Caption one shard: read its images, keep answers in a journal, and write a table per column when all are there.

The journal is a local file with a line per answer. After a kill, the next start reads it and asks only what is missing.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa

from diffusion.config.prompt_files import Prompt
from diffusion.data.image_reading import UnreadableImage, read_image
from diffusion.errors import UserError
from diffusion.language_models.engine import Answer, Question
from diffusion.prepare.image_hashes import exact_hash
from diffusion.prepare.shard_rewriting import check_shard, encoded_samples
from diffusion.storage import caption_tables
from diffusion.storage.caption_tables import ROWS, Receipt, plan_hash, shard_identity, stem_of, table_name
from diffusion.storage.mds import ShardFormat
from diffusion.storage.places import LocalPlace, Place

SENT_AS_STORED = {'JPEG': 'image/jpeg', 'PNG': 'image/png', 'WEBP': 'image/webp'}
"""Media types by format in Pillow; images of other formats are sent as PNG."""
READABLE = frozenset({'bytes', 'str', 'int', 'json'})
"""Encodings of columns that `ShardFormat.decode` supports."""


@dataclass
class ShardTask:
    """A shard with the columns that it still lacks, and the answers so far."""

    number: int
    """Number in this process's list of shards."""
    bucket: str
    entry: Mapping[str, Any]
    columns: Mapping[str, Prompt]
    plans: Mapping[str, Mapping[str, Any]]
    """Plan by column; see `CaptionSettings.plan`."""
    folder: Path
    """Folder for the journal."""
    keys: list[str] = field(default_factory=list)
    pixel_hashes: list[int] = field(default_factory=list)
    found: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)
    """Line of the journal by row and column."""
    is_read: bool = False
    """True once all images have been read, so that all questions are known."""

    @property
    def name(self) -> str:
        file = self.entry['raw_data']['basename']
        return f'{self.bucket}/{file}' if self.bucket else file

    @property
    def journal(self) -> Path:
        """Path of the journal; another version of the shard has another journal."""
        return self.folder / f'{self.name.replace("/", "--")}-{plan_hash(shard_identity(self.entry))}.jsonl'

    @property
    def is_complete(self) -> bool:
        return self.is_read and len(self.found) == len(self.keys) * len(self.columns)

    def questions(self, path: Path, *, on_known: Callable[[int], Any] = lambda count: None) -> Iterator[Question]:
        """Yield the questions without an answer. An image that cannot be decoded is rejected without asking.

        Args:
            path: The shard's file, which is verified first.
            on_known: Called with the number of questions whose answers are in the journal.
        """
        self._check(path)
        self._read_journal()
        on_known(len(self.found))
        for row, encoded in enumerate(encoded_samples(path)):
            sample = ShardFormat.of_entry(self.entry).decode(encoded)
            self.keys.append(sample['key'])
            try:
                decoded = read_image(sample['image'], first_frame=True)
            except UnreadableImage as error:
                self.pixel_hashes.append(0)
                for column in self.columns:
                    self._record(row, column, str(error), 'undecodable_image')
                continue
            self.pixel_hashes.append(exact_hash(decoded.image, decoded.pixels))
            media_type, image = SENT_AS_STORED.get(decoded.format), sample['image']
            if media_type is None:
                buffer = BytesIO()
                decoded.image.save(buffer, format='PNG')
                media_type, image = 'image/png', buffer.getvalue()
            captions = sample.get('captions') or [sample.get('caption') or '']
            for column, prompt in self.columns.items():
                if (row, column) not in self.found:
                    yield Question(self.number, row, column, prompt, image, media_type, str(captions[0]))
        self.is_read = True

    def record(self, answer: Answer) -> None:
        question = answer.question
        tokens = {'tokens': answer.tokens, 'prompt_tokens': answer.prompt_tokens}
        self._record(question.row, question.column, answer.text, answer.rejected, **tokens)

    def finish(self, dataset: Place) -> dict[str, Receipt]:
        """Write the tables, then remove the journal; return the tables' receipts by column."""
        receipts = {}
        for column in self.columns:
            name = table_name(self.bucket, column, stem_of(self.entry['raw_data']['basename']))
            plan, shard = plan_hash(self.plans[column]), shard_identity(self.entry)
            receipts[column] = caption_tables.write_table(dataset, name, self._table(column), plan=plan, shard=shard)
        self.journal.unlink(missing_ok=True)
        # Free the memory: a process captions thousands of shards. The task is complete only once.
        self.is_read = False
        for held in (self.found, self.keys, self.pixel_hashes):
            held.clear()
        return receipts

    def _table(self, column: str) -> pa.Table:
        lines = [self.found[row, column] for row in range(len(self.keys))]
        plan = self.plans[column]
        constants = {'model': plan['model'], 'revision': plan['revision'], 'settings': json.dumps(plan, sort_keys=True)}
        constants |= {'prompt': plan['prompt']['name'], 'prompt_version': plan['prompt']['version']}
        columns = {
            'key': self.keys,
            'pixel_hash': self.pixel_hashes,
            'caption': [line['text'] if line['rejected'] is None else None for line in lines],
            'answer': [None if line['rejected'] is None else line['text'] for line in lines],
            **{name: [line[name] for line in lines] for name in ('rejected', 'tokens', 'prompt_tokens')},
            **{name: [value] * len(lines) for name, value in constants.items()},
        }
        return pa.table(columns, schema=ROWS)

    def _record(
        self, row: int, column: str, text: str, rejected: str | None, *, tokens: int = 0, prompt_tokens: int = 0
    ) -> None:
        if (row, column) in self.found:
            return
        # Surrogates, which JSON can contain, cannot be stored in a table.
        text = text.encode('utf-8', 'replace').decode()
        line = {'row': row, 'column': column, 'plan': plan_hash(self.plans[column]), 'text': text}
        line |= {'rejected': rejected, 'tokens': tokens, 'prompt_tokens': prompt_tokens}
        # One unbuffered write per answer: nothing is lost if the process is killed, and only the last line may be cut.
        with self.journal.open('ab', buffering=0) as file:
            file.write(json.dumps(line).encode() + b'\n')
        self.found[row, column] = line

    def _read_journal(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.journal.exists():
            return
        content = self.journal.read_bytes()
        whole = content[: content.rfind(b'\n') + 1]
        if len(whole) < len(content):
            os.truncate(self.journal, len(whole))
        # An earlier start may have asked for other columns or with other settings, or may have been killed after it had
        # written the table of one column.
        plans = {column: plan_hash(self.plans[column]) for column in self.columns}
        lines = map(json.loads, whole.splitlines())
        self.found = {
            (line['row'], line['column']): line for line in lines if plans.get(line['column']) == line['plan']
        }

    def _check(self, path: Path) -> None:
        """Raise UserError if the shard cannot be captioned, or DataError if it is damaged."""
        check_shard(path, self.entry, self.name)
        encodings = dict(zip(self.entry['column_names'], self.entry['column_encodings'], strict=True))
        if 'image' not in encodings or not READABLE.issuperset(encodings.values()):
            raise UserError(
                f'{self.name}: has columns {", ".join(encodings)}, which are not those of images from diffusion '
                'prepare; caption the dataset of images'
            )


def fetched_shards(dataset: Place, tasks: Sequence[ShardTask]) -> Iterator[tuple[ShardTask, Path]]:
    """Yield each task with its shard's file, downloading one shard ahead; local shards are used where they are."""
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(dataset.fetch, tasks[0].name) if tasks else None
        for number, task in enumerate(tasks, 1):
            assert ahead is not None
            path = ahead.result()
            if number < len(tasks):
                ahead = thread.submit(dataset.fetch, tasks[number].name)
            yield task, path
            if not isinstance(dataset, LocalPlace):
                path.unlink()  # all its images have been read; answers may still be missing
