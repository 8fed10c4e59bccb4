"""Prompt sets for evaluations: files as published by benchmark authors, a dataset's captions, and our own set."""

import csv
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion.errors import UserError
from diffusion.evaluation.question_rules import BenchmarkQuestion, has_questions, item_and_question
from diffusion.storage.text_tables import csv_rows, is_misread

if TYPE_CHECKING:
    from diffusion.data.streams import BucketedDataset

log = logging.getLogger(__name__)

OWN = 'own'
"""Name that selects this package's prompts wherever a prompt file can be given."""
CVTG = 'CVTG-2K'
"""Value of `benchmark` in the metadata of prompts that were read from the `data_list` of a JSON file."""
OWN_PROMPTS = Path(__file__).with_name('prompts.csv')
"""120 prompts in 12 categories, such as colors, counting and text."""
PROMPT_COLUMNS = ('prompt', 'prompts', 'caption', 'text')
"""Case-insensitive names of the prompt column; the first match is used (DrawBench has `Prompts`)."""
CATEGORY_COLUMNS = ('category', 'tag')
"""Case-insensitive names of the column with the category; the first match is used (GenEval has `tag`)."""
DELIMITERS = {'.csv': ',', '.tsv': '\t'}


@dataclass(frozen=True)
class Prompt:
    """Prompt for an evaluation.

    Args:
        category: Category within the prompt set, or an empty string.
        metadata: The prompt's whole row in a JSON or JSONL file, needed by scorers; empty for other file types.
        questions: Questions of DPG-Bench or TIFA about an image of the prompt; empty for other files.
    """

    text: str
    category: str = ''
    metadata: dict[str, Any] = field(default_factory=dict)
    questions: tuple[BenchmarkQuestion, ...] = ()


def own_prompts() -> list[Prompt]:
    """Return this package's 120 prompts, in 12 categories of 10."""
    return read_prompts(OWN_PROMPTS)


def read_prompts(file: Path, column: str | None = None) -> list[Prompt]:
    """Read prompts from a file.

    A `.txt` file has one prompt per line. A `.csv` or `.tsv` file starts with a line of column names, a `.jsonl` file
    has one object per line, and a `.json` file is a list of objects, or has one as `data_list`; prompts are in
    `column`, or the first existing one of `PROMPT_COLUMNS`, and categories in the first one of `CATEGORY_COLUMNS`.
    DrawBench, PartiPrompts, GenEval, LongText-Bench, CVTG-2K, DPG-Bench and TIFA can be read as published; the last two
    have a row per question. Of CVTG-2K, `file` can be the folder: its prompts are in `CVTG/2.json` and the like, and
    `CVTG/2` is their category.

    Raises:
        UserError: The file does not exist, has another type, lacks the column, or has an empty prompt.
    """
    files = sorted(file.glob('*/[0-9].json')) if file.is_dir() else [file] if file.is_file() else []
    if not files:
        raise UserError(f'{file}: does not exist; give a .txt, .csv, .tsv or .jsonl with prompts, or CVTG-2K')
    readers = {'.txt': _text_rows, '.jsonl': _json_rows, '.json': _list_rows, **dict.fromkeys(DELIMITERS, _table_rows)}
    if files[0].suffix.lower() not in readers:
        raise UserError(f'{file}: is not a .txt, .csv, .tsv, .jsonl or .json')
    try:
        rows = [row for each in files for row in readers[each.suffix.lower()](each)]
    except UnicodeDecodeError as error:
        raise UserError(f'{file}: is not UTF-8 ({error}); save it as UTF-8') from error
    if rows and has_questions(rows[0][1]):
        return _prompts_with_questions(rows, column)
    prompts = [_prompt(where, row, column) for where, row in rows]
    if not prompts:
        raise UserError(f'{file}: has no prompts')
    return prompts


def _prompts_with_questions(rows: Sequence[tuple[str, dict[str, Any]]], column: str | None) -> list[Prompt]:
    """Return the prompts in rows of questions, in order of first appearance."""
    prompts: dict[str, Prompt] = {}
    questions: dict[str, dict[int, BenchmarkQuestion]] = {}
    for where, row in rows:
        item, question = item_and_question(where, row)
        prompts.setdefault(item, _prompt(where, row, column))
        own = questions.setdefault(item, {})
        number = question.number or len(own) + 1
        own[number] = replace(question, number=number)
    for item, own in questions.items():
        if unknown := {parent for each in own.values() for parent in each.parents} - own.keys() - {0}:
            log.warning('%s: its questions depend on %s, which it does not have; this is ignored', item, unknown)
    return [replace(prompt, questions=tuple(questions[item].values())) for item, prompt in prompts.items()]


def caption_prompts(dataset: 'BucketedDataset', count: int) -> list[Prompt]:
    """Return the first caption of each of `count` images, evenly spaced in a dataset."""
    # Import late: this import needs torch, which is not needed to read prompt files.
    from diffusion.data.caption_choice import captions_of

    if count > int(dataset.size):
        raise UserError(
            f'{count} prompts are more than the {dataset.size} images of the dataset; use at most that many'
        )
    chosen = (index * int(dataset.size) // count for index in range(count))
    return [Prompt(captions_of(dataset.get_item(index), dataset.where(index))[0]) for index in chosen]


def _prompt(where: str, row: dict[str, Any], column: str | None) -> Prompt:
    """Return the prompt in a row; `where` is its file and line."""
    named = {name.strip().lower(): name for name in reversed(row)}
    names = [column] if column is not None else [named[name] for name in PROMPT_COLUMNS if name in named]
    if not names or names[0] not in row:
        wanted = f'column {column!r}' if column is not None else f'column {" or ".join(PROMPT_COLUMNS)}'
        raise UserError(f'{where}: has no {wanted}, only {", ".join(row)}; name the column of the prompts')
    text = row[names[0]]
    if not isinstance(text, str) or not text.strip():
        raise UserError(f'{where}: its {names[0]} is {text!r}, not a prompt; correct or remove the line')
    if is_misread(text):
        raise UserError(f'{where}: its {names[0]} {text[:40]!r} is not UTF-8 text; save the file as UTF-8')
    category = next((row[named[name]] for name in CATEGORY_COLUMNS if name in named), '')
    metadata = row if Path(where.rpartition(' line ')[0]).suffix in ('.json', '.jsonl') else {}
    return Prompt(text.strip(), category.strip() if isinstance(category, str) else '', metadata)


def _text_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file.read_text(encoding='utf-8-sig').splitlines(), start=1):
        if line.strip():
            yield f'{file} line {number}', {'prompt': line}


def _table_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    # Read TSV files without quoting: in PartiPrompts, quotation marks inside fields are literal.
    quoting = csv.QUOTE_NONE if file.suffix.lower() == '.tsv' else csv.QUOTE_MINIMAL
    return csv_rows(file, str(file), delimiter=DELIMITERS[file.suffix.lower()], quoting=quoting)


def _json_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file.read_text(encoding='utf-8-sig').split('\n'), start=1):
        where = f'{file} line {number}'
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f'{where}: is not JSON ({error}); write one object per line') from error
        if not isinstance(row, dict):
            raise UserError(f'{where}: is {type(row).__name__}, not an object with a prompt')
        yield where, row


def _list_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        content = json.loads(file.read_text(encoding='utf-8-sig'))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f'{file}: is not JSON ({error}); download it again') from error
    rows = content.get('data_list') if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f'{file}: has no list of prompts, also not under "data_list" as in CVTG-2K; write a .jsonl')
    added = {'benchmark': CVTG, 'category': f'{file.parent.name}/{file.stem}'} if isinstance(content, dict) else {}
    yield from ((f'{file} line {number}', {**added, **row}) for number, row in enumerate(rows, start=1))


def categories(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Return the prompt indices of each category; categories are in order of first appearance."""
    found: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        found.setdefault(prompt.category, []).append(index)
    return found
