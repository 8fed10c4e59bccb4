"""Write a dataset of preference pairs: prompts with a preferred and a rejected image, for Diffusion-DPO."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from diffusion.data.image_reading import UnreadableImage, read_image
from diffusion.errors import UserError
from diffusion.evaluation.compared_images import SCORES
from diffusion.evaluation.comparison_answers import MAX_FAILED_CHECKS, failed_checks, read_answers
from diffusion.evaluation.comparison_page import KEY, read_key
from diffusion.prepare.convert_part import SHARD_BYTES, ShardBuffer
from diffusion.prepare.part_shards import ShardPlace
from diffusion.storage.atomic import atomic_folder
from diffusion.storage.mds import INDEX, ShardFormat, index_text

COLUMNS = {
    **{'image': 'bytes', 'rejected_image': 'bytes', 'captions': 'json'},
    **{'width': 'int', 'height': 'int', 'key': 'str', 'metadata': 'json'},
}
"""MDS encodings by column; `width` and `height` are the preferred image's."""
BATCH_ROWS = 64
PICK_A_PIC = ('jpg_0', 'jpg_1', 'label_0')
"""Columns of Pick-a-Pic: two images, and 1 if the first is preferred, 0 if the second is, 0.5 for a tie."""


@dataclass(frozen=True)
class Pair:
    """A preferred and a rejected image, as bytes or files, and the difference between their scores or votes."""

    prompt: str
    preferred: bytes | Path
    rejected: bytes | Path
    difference: float
    source: str


def write_pairs(places: Sequence[str], out: Path, *, score: str | None, min_difference: float) -> Counter[str]:
    """Write the pairs in `places` to a new folder of shards; return how many were written and, by reason, left out.

    Each of the `places` is a folder of `diffusion compare` with its answers, a folder of generated images with their
    scores, or a Parquet or JSON Lines file with two images per row.

    Args:
        score: Name of the score that decides which image is preferred; None for answers and tables.
        min_difference: Pairs whose difference is 0 or smaller than this are left out.

    Raises:
        UserError: One of the `places` has no pairs, a file does not exist, or no pair is left.
    """
    counts: Counter[str] = Counter()
    format_ = ShardFormat(COLUMNS, SHARD_BYTES)
    with atomic_folder(out) as folder:
        shards = ShardBuffer(ShardPlace(folder, None), format_)
        for number, pair in enumerate(_pairs(places, score)):
            if pair.difference <= 0 or pair.difference < min_difference:
                counts['without a difference' if pair.difference <= 0 else 'below --min-difference'] += 1
                continue
            images = [each if isinstance(each, bytes) else _read(each) for each in (pair.preferred, pair.rejected)]
            try:
                preferred, _ = (read_image(each, first_frame=True) for each in images)
            except UnreadableImage:
                counts['with an unreadable image'] += 1
                continue
            counts['written'] += 1
            values = {'image': images[0], 'rejected_image': images[1], 'captions': [pair.prompt]}
            values |= {'width': preferred.width, 'height': preferred.height, 'key': f'{number:09}'}
            metadata = {'source': pair.source, 'difference': pair.difference}
            shards.add(format_.encode(values | {'metadata': metadata}))
        if not counts['written']:
            left_out = ', '.join(f'{count} {reason}' for reason, count in counts.items()) or 'there are none'
            raise UserError(f'{places[0]}: no pair is left to write ({left_out})')
        shards.flush()
        (folder / INDEX).write_text(index_text(shards.entries))
    return counts


def _pairs(places: Sequence[str], score: str | None) -> Iterator[Pair]:
    if score is not None:
        yield from _pairs_of_scores([Path(place) for place in places], score)
        return
    for place in map(Path, places):
        if (place / KEY).is_file():
            yield from _pairs_of_answers(place)
        elif place.suffix in ('.parquet', '.jsonl') and place.is_file():
            yield from _pairs_of_table(place)
        else:
            hint = '; name a score with --score' if (place / SCORES).is_file() else ''
            what = 'is not a comparison, a .parquet file or a .jsonl file' if place.exists() else 'does not exist'
            raise UserError(f'{place}: {what}{hint}')


def _pairs_of_answers(folder: Path) -> Iterator[Pair]:
    """Yield the pairs of a comparison; the difference is (votes for one image - votes for the other) / answers."""
    key = read_key(folder / KEY)
    answers = read_answers(sorted((folder / 'answers').glob('*.json')), key.comparison, len(key.pairs))
    excluded = {rater for rater, failed in failed_checks(answers, key.damaged()).items() if failed > MAX_FAILED_CHECKS}
    votes: dict[int, list[int]] = defaultdict(list)
    for each in answers:
        if each.rater not in excluded:
            votes[each.pair].append(0 if each.choice == 'tie' else 1 if each.choice == key.pairs[each.pair].a else -1)
    if 'files' not in key.a:
        raise UserError(f'{folder / KEY}: does not list the image files; build the page again with this version')
    for index, found in sorted(votes.items()):
        pair = key.pairs[index]
        if pair.a is not None:  # else an attention check
            a, b = (folder / side['files'][pair.prompt] for side in (key.a, key.b))
            share = sum(found) / len(found)
            yield Pair(pair.text, *((a, b) if share > 0 else (b, a)), abs(share), f'answers of {key.comparison}')


def _pairs_of_scores(folders: Sequence[Path], score: str) -> Iterator[Pair]:
    """Yield, for each prompt, the images with the highest and the lowest score among all folders of images."""
    rows: dict[str, list[tuple[float, Path]]] = defaultdict(list)
    for folder in folders:
        try:
            content = json.loads((folder / SCORES).read_bytes())
        except FileNotFoundError as error:
            raise UserError(f'{folder}: has no {SCORES}; give a folder of images from image_metrics') from error
        except ValueError as error:
            raise UserError(f'{folder / SCORES}: is damaged ({error}); measure the images again') from error
        if score not in content['scores']:
            raise UserError(f'--score: {folder} has no {score}; use {" or ".join(content["scores"])}')
        files = {int(path.stem): path for path in folder.glob('batch-*/*.png')}
        if missing := set(range(len(content['prompts']))) - files.keys():
            raise UserError(f'{folder}: image {min(missing):06} is missing; run the evaluation again')
        for index, (prompt, value) in enumerate(zip(content['prompts'], content['scores'][score], strict=True)):
            if value is not None:
                rows[prompt].append((value, files[index]))
    for prompt, found in rows.items():
        (worst, rejected), (best, preferred) = min(found), max(found)
        yield Pair(prompt, preferred, rejected, best - worst, score)


def _pairs_of_table(path: Path) -> Iterator[Pair]:
    """Yield the rows of a table: `prompt` or `caption`, and `image` and `rejected_image`, or Pick-a-Pic's columns."""
    for number, row in enumerate(_rows(path)):
        where = f'{path}: row {number + 1}'
        if not isinstance(row, dict):
            raise UserError(f'{where}: is a {type(row).__name__}; give an object with prompt, image and rejected_image')
        prompt = row.get('prompt', row.get('caption'))
        label = row.get(PICK_A_PIC[2], 1.0)
        names = PICK_A_PIC[:2] if PICK_A_PIC[2] in row else ('image', 'rejected_image')
        images = [_image_of(row.get(name), path.parent) for name in names]
        if not isinstance(prompt, str) or not isinstance(label, int | float) or None in images:
            has = ', '.join(f'{name}: {value!r}' if not value else name for name, value in row.items())
            raise UserError(f'{where}: has {has}; give prompt, image and rejected_image, or {", ".join(PICK_A_PIC)}')
        preferred, rejected = images if label >= 0.5 else images[::-1]
        yield Pair(prompt, preferred, rejected, abs(2 * label - 1), str(row.get('source') or path.name))  # type: ignore[arg-type]


def _rows(path: Path) -> Iterator[Any]:
    try:
        if path.suffix == '.jsonl':
            with path.open(encoding='utf-8') as lines:
                yield from map(json.loads, lines)
        else:
            for batch in pq.ParquetFile(path).iter_batches(BATCH_ROWS):
                yield from batch.to_pylist()
    except (ValueError, pa.ArrowException) as error:
        raise UserError(f'{path}: is not a table ({error}); give a .parquet or .jsonl file') from error


def _image_of(value: Any, folder: Path) -> bytes | Path | None:
    """Return a table's image: bytes, or a path relative to `folder`; Hugging Face datasets wrap either in a mapping."""
    value = value.get('bytes') or value.get('path') if isinstance(value, Mapping) else value
    return folder / value if isinstance(value, str) else value if isinstance(value, bytes) else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f'{path}: does not exist; add this image, or correct its path') from error
