"""Several caption columns: read from each kind of source, stored, and chosen by weights in training."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from prepare.drawn import encoded_image, entries, report_of, samples, tar_of, write_files
from prepare.hub_datasets import parquet_of

from diffusion.config.load import load
from diffusion.data.bad_samples import BadSample
from diffusion.data.caption_choice import caption_chances, choose_caption_index
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.prepare.counts_report import PrepareReport
from diffusion.prepare.folder_source import FolderSource
from diffusion.prepare.huggingface_source import HuggingFaceSource
from diffusion.prepare.parquet import ParquetSource
from diffusion.prepare.source import Source
from diffusion.prepare.webdataset import WebDatasetSource
from diffusion.tasks.precompute import precompute
from diffusion.training.components import build_loader

COLUMNS = ('original', 'recaptioned')
ROWS: list[dict[str, Any]] = [
    {'original': 'a cat', 'recaptioned': ['a gray cat on a mat', 'a cat at rest'], 'score': 1},
    {'original': None, 'recaptioned': ['a red ball'], 'score': 2},
    {'original': 'a tree', 'recaptioned': [], 'score': 3},
]
EXPECTED = [
    {'original': ['a cat'], 'recaptioned': ['a gray cat on a mat', 'a cat at rest']},
    {'recaptioned': ['a red ball']},
    {'original': ['a tree']},
]
"""Captions of each row by column."""
IMAGES = [encoded_image(number) for number in range(len(ROWS))]
FILES = {f'{number}.jpg': image for number, image in enumerate(IMAGES)}
SIDECARS = {f'{number}.json': json.dumps(row).encode() for number, row in enumerate(ROWS)}
TABLE = parquet_of({'jpg': IMAGES} | {name: [row[name] for row in ROWS] for name in ROWS[0]})
LINES = [json.dumps({'file_name': f'{number}.jpg'} | row).encode() for number, row in enumerate(ROWS)]
SOURCES: dict[str, tuple[Any, dict[str, bytes]]] = {
    'parquet': (ParquetSource, {'a.parquet': TABLE}),
    'hugging_face': (HuggingFaceSource, {'data/train-00000-of-00001.parquet': TABLE}),
    'captions_file': (FolderSource, FILES | {'metadata.jsonl': b'\n'.join(LINES)}),
    'files_beside_images': (FolderSource, FILES | SIDECARS),
    'tars': (WebDatasetSource, {'a.tar': tar_of(sorted((FILES | SIDECARS).items()))}),
}


def by_column(captions: list[Any], columns: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for caption, column in zip(captions, columns, strict=True):
        if caption is not None:
            found.setdefault(column, []).append(caption)
    return found


def run(source: Source, out: Path, **settings: Any) -> PrepareReport:
    where = {'kind': 'parquet', 'location': 'x', 'caption_column': list(COLUMNS)}
    return report_of({'source': where, 'out': str(out), 'sizes': [16]} | settings, source)


@pytest.mark.parametrize('kind', SOURCES)
def test_each_kind_of_source_names_the_column_of_each_caption(kind: str, tmp_path: Path) -> None:
    make, files = SOURCES[kind]
    source = make(str(write_files(tmp_path / 'in', files)), caption_column=COLUMNS)
    found = entries(source)
    assert [by_column(entry.captions, entry.caption_columns) for entry in found] == EXPECTED
    assert [entry.metadata for entry in found] == [{'score': row['score']} for row in ROWS]
    report = run(source, tmp_path / 'out')
    assert [by_column(row['captions'], row['caption_columns']) for row in samples(tmp_path / 'out/16px')] == EXPECTED
    assert 'captions by column: original 2, recaptioned 3' in report.notes


def test_a_key_that_no_file_has_is_in_the_report(tmp_path: Path) -> None:
    write_files(tmp_path / 'images', FILES | {f'{stem}.txt': f'text {stem}'.encode() for stem in '012'})
    where = {'kind': 'folder', 'location': str(tmp_path / 'images'), 'caption_column': ['txt', 'lmm']}
    report = report_of({'source': where, 'out': str(tmp_path / 'out'), 'sizes': [16]})
    missing = "no image has a caption in 'lmm'; correct --caption-column if this is a mistake"
    assert {'captions by column: txt 3, lmm 0', missing} <= set(report.notes)


def test_one_text_in_two_columns_is_one_caption_of_the_first(tmp_path: Path) -> None:
    write_files(tmp_path, {'a.parquet': parquet_of({'jpg': IMAGES[:1], 'a': ['same  text'], 'b': ['same text']})})
    run(ParquetSource(str(tmp_path), caption_column=('a', 'b')), tmp_path / 'out')
    (row,) = samples(tmp_path / 'out/16px')
    assert (row['captions'], row['caption_columns']) == (['same text'], ['a'])


@given(
    columns=st.lists(st.sampled_from('abc'), min_size=1, max_size=6),
    weights=st.dictionaries(st.sampled_from('abc'), st.floats(0.01, 10), min_size=1),
)
@hypothesis_settings(deadline=None)
def test_columns_get_weights_that_their_captions_share(columns: list[str], weights: dict[str, float]) -> None:
    sample = {'caption_columns': columns}
    present = {name: weights[name] for name in set(columns) & set(weights)}
    if not present:
        with pytest.raises(BadSample, match='add a weight for one of the columns of its captions'):
            caption_chances(sample, weights)
        return
    chances = caption_chances(sample, weights)
    draws = (np.arange(500) + 0.5) / 500
    texts = [str(number) for number in range(len(columns))]
    counts = Counter(choose_caption_index(texts, 'random', float(draw), chances) for draw in draws)
    for number, name in enumerate(columns):
        wanted = present.get(name, 0) / sum(present.values()) / columns.count(name)
        assert abs(counts[number] / len(draws) - wanted) < 1e-2
    assert columns[choose_caption_index(texts, 'random', np.nextafter(1, 0), chances)] in present


def token_counts(recipe: Any, epochs: int) -> dict[int, Counter[tuple[int, ...]]]:
    """Return how often each caption, as its tokens, was served for each sample."""
    loader = build_loader(recipe)
    found: dict[int, Counter[tuple[int, ...]]] = {}
    for _ in range(epochs):
        for batch in loader:
            for index, tokens in zip(batch[batch_keys.SAMPLE_ID].tolist(), batch[batch_keys.INPUT_IDS], strict=True):
                found.setdefault(index, Counter())[tuple(tokens.flatten().tolist())] += 1
    return found


@pytest.mark.slow
def test_training_chooses_by_weights_from_images_and_from_latents(
    write_recipe: Callable[..., Path], tiny_recipe: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    columns = {'original': ['a cat'] * 8, 'recaptioned': ['a gray cat on a mat'] * 8}
    table = parquet_of({'jpg': [encoded_image(i) for i in range(8)]} | columns)
    write_files(tmp_path, {'a.parquet': table})
    run(ParquetSource(str(tmp_path), caption_column=COLUMNS), tmp_path / 'out', filters={'min_side': 1})
    kept = len(samples(tmp_path / 'out/16px'))
    stream = {'local': str(tmp_path / 'out/16px'), 'resolution': 16}
    content = tiny_recipe(tmp_path / 'runs', task='precompute')
    content['precompute'] = {'out': str(tmp_path / 'latents'), 'streams': {'a': stream}, 'batch_size': 4}
    (tmp_path / 'p.yaml').write_text(yaml.safe_dump(content))
    precompute(load(tmp_path / 'p.yaml'))
    latents = {'local': str(tmp_path / 'latents/a'), 'resolution': 16}
    weights = {'caption_weights': {'original': 1, 'recaptioned': 3}}
    found = {}
    for name, each in (('image_text', stream), ('latents', latents)):
        recipe = load(write_recipe(name, dataset={'name': name} | weights, streams={'small': each}, global_batch=kept))
        served = token_counts(recipe, epochs=20)
        assert len(served) == kept
        total = sum(served.values(), Counter())
        rare, common = sorted(total.values())
        assert abs(rare / (rare + common) - 0.25) < 0.1  # three standard deviations of 160 draws
        found[name] = served
    assert found['image_text'] == found['latents'], 'the same draws choose the same captions'


def test_weights_that_cannot_apply_are_refused(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    write_files(tmp_path, {'a.parquet': TABLE})
    run(ParquetSource(str(tmp_path), caption_column=COLUMNS), tmp_path / 'out')

    def loader(dataset: dict[str, Any], **sections: Any) -> Any:
        streams = {'small': {'local': str(tmp_path / 'out/16px'), 'resolution': 16}}
        sections = {'streams': streams, 'global_batch': 1} | sections
        return build_loader(load(write_recipe(dataset={'name': 'image_text'} | dataset, **sections)))

    with pytest.raises(UserError, match='caption_weights: has no effect with caption_choice: longest'):
        loader({'caption_weights': {'original': 1.0}, 'caption_choice': 'longest'})
    for wrong in ({'original': 0}, {'original': -1.0}, {'original': 'x'}, {}):
        with pytest.raises(UserError, match='must give columns positive weights'):
            loader({'caption_weights': wrong})
    with pytest.raises(BadSample, match=r'its captions are from original.*, but dataset\.caption_weights has orignal'):
        loader({'caption_weights': {'orignal': 1.0}}).dataset[0]
