"""Caption one shard: ask a model about its images, log answers in a journal, and finally write a table per column.

The journal is a local file with a line per answer. After a kill, the next process reads it and asks only for the rest.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa

from diffusion.config.prompt_files import Prompt
from diffusion.data.image_reading import UnreadableImage, read_image
from diffusion.language_models.engine import Answer, Question
from diffusion.prepare.image_hashes import exact_hash
from diffusion.storage import caption_tables
from diffusion.storage.caption_tables import ROWS, joined, plan_hash, table_key
from diffusion.storage.places import Place

SENT_AS_STORED = {'JPEG': 'image/jpeg', 'PNG': 'image/png', 'WEBP': 'image/webp'}
"""Media types of the Pillow formats in which images are sent as stored; images of other formats are sent as PNG."""


@dataclass
class ShardTask:
    """A shard of a dataset, or a part of a source, with the model's answers about its images so far."""

    number: int
    """Number in this process's list of shards."""
    bucket: str
    entry: Mapping[str, Any]
    """Entry of the shard in index.json."""
    tables: Mapping[str, str]
    """Paths of the shard's finished caption tables, by column."""
    columns: Mapping[str, Prompt]
    """Prompts of the columns for which the shard has no table yet."""
    plans: Mapping[str, Mapping[str, Any]]
    """Settings that decide the captions, by column; see `CaptionSettings.plan`."""
    folder: Path
    """Folder for the journal."""
    images: list[dict[str, Any]] = field(default_factory=list)
    """`key` and `pixel_hash` of each image, by its row in the shard."""
    found: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)
    """Lines of the journal, by row and column of the answer."""
    is_read: bool = False
    """True once all images have been read, so that all questions are known."""

    @property
    def name(self) -> str:
        return joined(self.bucket, self.entry['raw_data']['basename'])

    @property
    def journal(self) -> Path:
        """Path of the journal; it depends on the shard's hash, so a changed shard starts a new journal."""
        return self.folder / f'{joined(self.bucket, table_key("", self.entry["raw_data"])).replace("/", "--")}.jsonl'

    @property
    def is_complete(self) -> bool:
        return self.is_read and len(self.found) == len(self.images) * len(self.columns)

    def questions(self, samples: Iterable[Mapping[str, Any]]) -> Iterator[Question]:
        """Yield the questions about a shard's decoded samples that have no answer yet.

        An image that cannot be decoded is rejected without a question; `problem`, (rule, explanation), may say why.
        """
        for row, sample in enumerate(samples):
            captions = sample.get('captions') or [sample.get('caption') or '']
            try:
                decoded = read_image(sample['image'], first_frame=True)
            except UnreadableImage as error:
                self.images.append({'key': sample['key'], 'pixel_hash': 0})
                rule, text = sample.get('problem') or ('undecodable_image', str(error))
                for column, prompt in self.columns.items():
                    self.record(Answer(Question(self.number, row, column, prompt), text, rule))
                continue
            self.images.append({'key': sample['key'], 'pixel_hash': exact_hash(decoded.image, decoded.pixels)})
            media_type, image = SENT_AS_STORED.get(decoded.format), sample['image']
            if media_type is None:
                buffer = BytesIO()
                decoded.image.save(buffer, format='PNG')
                media_type, image = 'image/png', buffer.getvalue()
            for column, prompt in self.columns.items():
                if (row, column) not in self.found:
                    yield Question(self.number, row, column, prompt, image, media_type, str(captions[0]))
        self.is_read = True

    def finish(self, dataset: Place) -> dict[str, pa.Table]:
        """Write the tables, then remove the journal; return the tables by column."""
        tables = {}
        for column in self.columns:
            plan = self.plans[column]
            made = {'model': plan['model'], 'revision': plan['revision'], 'settings': json.dumps(plan, sort_keys=True)}
            made |= {'prompt': plan['prompt']['name'], 'prompt_version': plan['prompt']['version']}
            rows = [image | self.found[row, column] | made for row, image in enumerate(self.images)]
            tables[column] = pa.Table.from_pylist(rows, schema=ROWS)
            key = table_key(plan_hash(plan), self.entry['raw_data'])
            caption_tables.write_table(dataset, self.bucket, column, key, tables[column])
        self.journal.unlink(missing_ok=True)
        # Free the memory: a process captions thousands of shards. `is_complete` is then False, so this runs only once.
        self.is_read = False
        self.found.clear()
        self.images.clear()
        return tables

    def record(self, answer: Answer) -> None:
        """Append an answer to the journal, unless the journal already answers the same question."""
        row, column, rule = answer.question.row, answer.question.column, answer.rejected
        if (row, column) in self.found:
            return
        # Surrogates, which JSON can contain, cannot be stored in a table.
        text = answer.text.encode('utf-8', 'replace').decode()
        line = {'row': row, 'column': column, 'plan': plan_hash(self.plans[column]), 'rejected': rule}
        line |= {'caption': text if rule is None else None, 'answer': None if rule is None else text}
        line |= {'tokens': answer.tokens, 'prompt_tokens': answer.prompt_tokens}
        # One unbuffered write per answer: nothing is lost if the process is killed, and only the last line may be cut.
        with self.journal.open('ab', buffering=0) as file:
            file.write(json.dumps(line).encode() + b'\n')
        self.found[row, column] = line

    def read_journal(self) -> int:
        """Read the answers that earlier processes left in the journal, and return their number."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.journal.exists():
            content = self.journal.read_bytes()
            whole = content[: content.rfind(b'\n') + 1]
            os.truncate(self.journal, len(whole))
            # Skip answers for other columns or settings, and for columns whose table was already written before a kill.
            plans = {column: plan_hash(self.plans[column]) for column in self.columns}
            lines = ((line['row'], line['column'], line) for line in map(json.loads, whole.splitlines()))
            self.found = {(row, column): line for row, column, line in lines if plans.get(column) == line['plan']}
        return len(self.found)
