"""Content of a preparation's report: thumbnails, histograms, and a list of captions (captions.txt)."""

import base64
import functools
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from diffusion.data.image_sheet import Figure
from diffusion.models.clip_vocabulary import vocabulary
from diffusion.prepare.catalog import DUPLICATE, HELD_OUT, TRAIN, Catalog
from diffusion.prepare.convert_part import THUMBNAILS_FILE, THUMBNAILS_PER_REASON
from diffusion.prepare.process_sample import thumbnail
from diffusion.prepare.work_dir import read_json

THUMBNAILS_PER_BUCKET = 8
MAX_BUCKET_THUMBNAILS = 300
MAX_REASONS = 30
CLIP_TOKENS = 77
"""Maximum number of tokens for CLIP's text encoders, including start and end token."""
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
SIDES = [0, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 8192]
ASPECTS = [0.0, 0.25, 0.33, 0.4, 0.5, 0.57, 0.67, 0.75, 0.8, 0.9, 1.0, 1.1, 1.25, 1.33, 1.5, 1.78, 2.0, 2.5, 3.0, 4.0]
NUMBERS = [1, 2, 3, 4, 5, 6, 10, 20, 50, 100]
TOKENS = [0, 10, 20, 30, 40, 50, 60, 70, CLIP_TOKENS + 1, 100, 150, 200, 256, 512, 1024]
COUNTED_CAPTIONS = 10_000
"""Maximum number of captions whose tokens are counted; this takes about a second."""
LENGTHS = [0, 10, 20, 30, 40, 60, 80, 100, 150, 200, 300, 500, 1000, 2000]
CAPTIONS = 'captions.txt'
MAX_CAPTIONS = 10_000


def of_buckets(catalog: Catalog, buckets: Sequence[str]) -> dict[str, list[Figure]]:
    """Return thumbnails for the report by bucket: the first training images, each with its first caption."""
    each = max(1, min(THUMBNAILS_PER_BUCKET, MAX_BUCKET_THUMBNAILS // len(buckets)))
    first = {name: catalog.samples_in(code, TRAIN)[:each] for code, name in enumerate(buckets)}
    return {name: [_figure(catalog, number) for number in numbers] for name, numbers in first.items() if len(numbers)}


def of_held_out(catalog: Catalog) -> list[Figure]:
    """Return thumbnails for the report: the first held-out images, each with its first caption."""
    images = catalog.images(HELD_OUT)[:THUMBNAILS_PER_BUCKET]
    return [_figure(catalog, catalog.first_sample(image)) for image in images]


def of_reasons(catalog: Catalog, repeats: Sequence[tuple[int, str]]) -> dict[str, list[Figure]]:
    """Return thumbnails by rejection reason, each with the image's key and, for duplicates, the original's key."""
    missing = set(catalog.rejected) - {DUPLICATE}
    shown: dict[str, list[Figure]] = {}
    for folder in catalog.parts:
        for record in read_json(folder / THUMBNAILS_FILE) if missing else ():
            entries = (
                shown.setdefault(record['reason'], []) if len(shown) < MAX_REASONS else shown.get(record['reason'], [])
            )
            if len(entries) < THUMBNAILS_PER_REASON:
                text = f'{record["key"]} ({record["detail"]})' if record['detail'] else record['key']
                entries.append(Figure([base64.b64decode(record['image'])], text))
        missing -= {reason for reason, entries in shown.items() if len(entries) == THUMBNAILS_PER_REASON}
    if repeats:
        first = repeats[:THUMBNAILS_PER_REASON]
        shown[DUPLICATE] = [_figure(catalog, catalog.first_sample(row), original) for row, original in first]
    return shown


def _figure(catalog: Catalog, number: int | np.integer, original: str | None = None) -> Figure:
    """Return a thumbnail of a stored sample with its first caption or, for a duplicate, its and the original's key."""
    sample = catalog.stored_sample(number)
    text = sample['captions'][0] if original is None else f'{sample["key"]} (duplicate of {original})'
    return Figure([thumbnail(Image.open(io.BytesIO(sample['image'])))], text)


def clip_token_counts(captions: Sequence[str]) -> np.ndarray:
    """Return the number of CLIP tokens of each caption, int64, including start and end token."""
    encoded = _tokenizer().encode_batch_fast(list(captions))
    return np.array([len(each.ids) + 2 for each in encoded], np.int64)


@functools.cache
def _tokenizer() -> Tokenizer:
    # Build our own tokenizer, since importing transformers takes seconds. Its tokenizer, which training uses, also
    # fixes broken Unicode (ftfy), which does not matter for counts.
    tokens, merges = vocabulary()
    pairs = [(first, second) for first, _, second in (merge.partition(' ') for merge in merges)]
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, pairs, end_of_word_suffix='</w>', continuing_subword_prefix=''))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    words = pre_tokenizers.Split(Regex(_WORDS), behavior='removed', invert=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    return tokenizer


def statistics_of(catalog: Catalog, images: np.ndarray) -> dict[str, Any]:
    """Return the report's histograms of sizes before resizing and of captions; `images` are rows of the catalog."""
    width, height, length = (catalog.columns[name][images] for name in ('width', 'height', 'caption_length'))
    tokens = clip_token_counts(some_captions(catalog, images))
    numbers = [part.value_lengths().to_numpy() for part in catalog.captions(images)]
    return {
        'shorter side, pixels': histogram(np.minimum(width, height), SIDES),
        'aspect, width over height': histogram(width / height, ASPECTS),
        'captions per image': histogram(np.concatenate([np.zeros(0, np.int32), *numbers]), NUMBERS),
        'longest caption, characters': histogram(length, LENGTHS),
        'captions, CLIP tokens': histogram(tokens, TOKENS),
    }


def long_captions_note(statistics: Mapping[str, Any]) -> str | None:
    """Return a note about captions that exceed the text length of CLIP's text encoders, or None if there are none."""
    found = statistics['captions, CLIP tokens']
    counts = np.array(found['counts'])
    share = counts[np.array(found['edges']) > CLIP_TOKENS].sum() / max(1, counts.sum())
    if not share:
        return None
    return (
        f'{share:.1%} of the captions have more than the {CLIP_TOKENS} tokens that CLIP reads, and a model with CLIP '
        'ignores the rest of each'
    )


def some_captions(catalog: Catalog, images: np.ndarray) -> list[str]:
    """Return at most COUNTED_CAPTIONS captions of evenly spaced images; `images` are row numbers in the catalog."""
    chosen = _at_equal_distances(images)
    found = [caption for part in catalog.captions(chosen) for caption in part.flatten().to_pylist()]
    return list(_at_equal_distances(found))


def _at_equal_distances(values: Any) -> Any:
    return values[:: max(1, -(-len(values) // COUNTED_CAPTIONS))]


def histogram(values: np.ndarray, edges: list[Any]) -> dict[str, Any]:
    """Return the bins' lower edges, counts, and quantiles by percentage; the last bin has no upper edge."""
    counts, _ = np.histogram(values, [*edges, np.inf])
    found = np.quantile(values, QUANTILES) if len(values) else ()  # np.quantile fails without values
    quantiles = {f'{share:.0%}': round(float(value), 3) for share, value in zip(QUANTILES, found, strict=False)}
    return {'edges': edges, 'counts': counts.tolist(), 'quantiles': quantiles}


def caption_list(catalog: Catalog) -> str:
    """Return the first 10,000 distinct captions of the training images, sorted, one per line."""
    # Select captions before sorting: in a large dataset, the first 10,000 sorted captions would all begin with A.
    # Remove duplicates in Arrow, which is fast: if captions are labels, few are distinct, so all rows are read.
    parts = (part.flatten().unique() for part in catalog.captions(catalog.images(TRAIN)))
    distinct: dict[str, None] = {}
    for caption in (caption for part in parts for caption in part.to_pylist()):
        distinct[caption] = None
        if len(distinct) == MAX_CAPTIONS:
            break
    return ''.join(f'{caption}\n' for caption in sorted(distinct))
