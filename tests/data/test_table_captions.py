"""Training draws captions from tables beside the shards, by the weights of their columns."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from shards import streams_of

from diffusion.config.load import load
from diffusion.data.bad_samples import BadSample
from diffusion.errors import DataError, UserError
from diffusion.inspection.preview import look
from diffusion.prepare.caption_packing import pack
from diffusion.storage.caption_tables import ROWS, plan_hash, publish, table_key, write_table
from diffusion.storage.places import LocalPlace
from diffusion.storage.shard_writer import differences
from diffusion.tasks.precompute import precompute
from diffusion.training.components import build_loader, run_identity

REJECTED_ROW = 1


def write_captions(folder: Path, column: str, text: str) -> None:
    """Write tables for all shards with captions such as `long of p7`; row 1 of each shard is rejected."""
    plan = {'model': 'tiny-vlm', 'revision': None, 'prompt': {'name': column, 'version': 2}, 'text': text}
    entries = json.loads((folder / 'index.json').read_text())['shards']
    first = 0
    for entry in entries:
        rows: list[dict[str, Any]] = []
        for row in range(entry['samples']):
            is_rejected = row == REJECTED_ROW
            caption = None if is_rejected else f'{text} of p{first + row}'
            rows.append({'key': f'p{first + row}', 'caption': caption, 'rejected': 'loop' if is_rejected else None})
        table = pa.Table.from_pylist(rows, schema=ROWS)
        write_table(LocalPlace(folder), '', column, table_key(plan_hash(plan), entry['raw_data']), table)
        first += entry['samples']
    written = {path: path.read_bytes() for path in folder.glob(f'captions/{column}/*')}
    first = min(written, key=str)
    (first.parent / f'{first.name.rsplit(".", 2)[0]}.{"f" * 16}.parquet').write_bytes(b'of another job')
    assert publish(LocalPlace(folder), '', column, plan, entries)
    kept = {path: path.read_bytes() for path in folder.glob(f'captions/{column}/*')}
    assert kept.items() <= written.items() and len(kept) == len(entries), 'one table per shard, the first by name'


@pytest.fixture
def folder(pictures: dict[int, Path], tmp_path: Path) -> Path:
    return shutil.copytree(pictures[32], tmp_path / 'px32')


@pytest.fixture
def recipe_with(write_recipe: Callable[..., Path], folder: Path) -> Callable[[dict[str, float]], Any]:
    def make(weights: dict[str, float]) -> Any:
        dataset = {'name': 'image_text', 'caption_weights': weights}
        return load(write_recipe(streams=streams_of({32: folder}), dataset=dataset))

    return make


def captions(dataset: Any) -> list[str]:
    found = []
    for index in range(dataset.num_samples):
        try:
            found.append(dataset.choose_caption(dataset.get_item(index), index)[1])
        except BadSample:
            found.append('')
    return found


def test_captions_are_drawn_from_tables_by_weight(recipe_with: Callable[..., Any], folder: Path) -> None:
    write_captions(folder, 'long', 'long')
    write_captions(folder, 'short', 'short')
    found = captions(build_loader(recipe_with({'long': 1.0})).dataset)
    shards = json.loads((folder / 'index.json').read_text())['shards']
    assert sum(text == '' for text in found) == len(shards), 'the rejected ones, without another column'
    assert all(text in ('', f'long of p{index}') for index, text in enumerate(found))
    mixed = captions(build_loader(recipe_with({'original': 0.2, 'long': 0.4, 'short': 0.4})).dataset)
    assert '' not in mixed
    assert {'long', 'short'} < {text.split()[0] for text in mixed}


def test_captions_beside_remote_shards_are_downloaded(write_recipe, folder, tmp_path, store):
    write_captions(folder, 'long', 'long')
    streams = {'px32': {'remote': store.upload(folder), 'local': str(tmp_path / 'local'), 'resolution': 32}}
    dataset = {'name': 'image_text', 'caption_weights': {'long': 1.0}}
    recipe = load(write_recipe(streams=streams, dataset=dataset))
    assert captions(build_loader(recipe).dataset)[:3] == ['long of p0', '', 'long of p2']
    none = 'no stream records the columns of its captions'
    for status, message in ((400, r'^streams\.px32\.remote: '), (403, none), (404, none)):
        (tmp_path / 'local/captions.json').unlink(missing_ok=True)
        fault = store.fail('GET captions.json', status)
        with pytest.raises(UserError, match=message):
            build_loader(recipe)
        store.faults.remove(fault)


def test_captions_in_packed_shards_are_drawn_as_those_in_tables(recipe_with, write_recipe, folder, tmp_path):
    write_captions(folder, 'short', 'short')
    write_captions(folder, 'long', 'long')
    weights = {'original': 0.2, 'long': 0.4, 'short': 0.4}
    expected = captions(build_loader(recipe_with(weights)).dataset)
    assert pack(str(folder), str(tmp_path / 'packed'), ['short', 'original', 'long']) == (40, [])
    dataset = {'name': 'image_text', 'caption_weights': weights}
    recipe = load(write_recipe('packed', streams=streams_of({32: tmp_path / 'packed'}), dataset=dataset))
    assert captions(build_loader(recipe).dataset) == expected


def test_changed_captions_are_named_on_resume(recipe_with: Callable[..., Any], folder: Path) -> None:
    write_captions(folder, 'long', 'long')
    recipe = recipe_with({'original': 1.0, 'long': 1.0})
    before = run_identity(recipe, build_loader(recipe))['data']
    write_captions(folder, 'long', 'other')
    (line,) = differences(before, run_identity(recipe, build_loader(recipe))['data'])
    assert line.startswith('streams.px32.captions.long: tiny-vlm, long version 2, ')


def test_captions_of_another_version_of_a_shard_are_refused(recipe_with: Callable[..., Any], folder: Path) -> None:
    write_captions(folder, 'long', 'long')
    content = (folder / 'captions.json').read_text().replace('shard.00000.mds.', 'shard.00000.mds.0')
    (folder / 'captions.json').write_text(content)
    with pytest.raises(
        UserError, match=r'streams\.px32: the captions long are of an older version of shard\.00000\.mds'
    ):
        build_loader(recipe_with({'long': 1.0}))


def test_a_damaged_table_is_an_error_of_the_data(recipe_with: Callable[..., Any], folder: Path) -> None:
    write_captions(folder, 'long', 'long')
    (path,) = folder.glob('captions/long/shard.00000.mds.*.parquet')
    path.write_bytes(path.read_bytes()[:-1])
    dataset: Any = build_loader(recipe_with({'long': 1.0})).dataset
    with pytest.raises(DataError, match=r'captions/long/shard\.00000\.mds\..*: is missing or damaged'):
        dataset.choose_caption(dataset.get_item(0), 0)


def test_unknown_columns_are_refused(recipe_with: Callable[..., Any], folder: Path) -> None:
    write_captions(folder, 'long', 'long')
    with pytest.raises(UserError, match='no stream records the columns of its captions; prepare the data with'):
        build_loader(recipe_with({'lnog': 1.0}))
    with pytest.raises(UserError, match='no stream has captions lnog; diffusion caption has written long'):
        build_loader(recipe_with({'original': 1.0, 'long': 1.0, 'lnog': 1.0}))


def test_a_preview_shows_captions_from_the_shard_and_the_tables(recipe_with, folder, tmp_path):
    write_captions(folder, 'long', 'long')
    recipe = recipe_with({'original': 1.0, 'long': 1.0})
    look(recipe, {'streams': recipe.streams}, tmp_path / 'look.html', samples=100)
    page = (tmp_path / 'look.html').read_text()
    shown = re.findall('<figcaption>(.*?)</figcaption>', page, re.DOTALL)
    assert all('\noriginal: ' in text for text in shown)
    rejected = [index for index, text in enumerate(shown) if not text.endswith(f'\nlong: long of p{index}')]
    assert len(rejected) == len(json.loads((folder / 'index.json').read_text())['shards'])


def test_latents_store_captions_of_tables(write_recipe: Callable[..., Path], folder: Path, tmp_path: Path) -> None:
    write_captions(folder, 'long', 'long')

    def encode(column: str) -> None:
        settings = {'streams': streams_of({32: folder}), 'out': str(tmp_path / 'latents'), 'batch_size': 8}
        precompute(load(write_recipe(task='precompute', precompute=settings | {'caption_columns': [column]})))

    with pytest.raises(UserError, match=r'precompute\.streams\.px32 has no captions lnog; write them'):
        encode('lnog')
    encode('long')
    streams = streams_of({32: tmp_path / 'latents/px32'})
    recipe = load(write_recipe('train', streams=streams, dataset={'name': 'latents', 'caption_weights': {'long': 1.0}}))
    found = captions(build_loader(recipe).dataset)
    assert all(text in ('', f'long of p{index}') for index, text in enumerate(found))
    assert found.count('') == len(json.loads((folder / 'index.json').read_text())['shards'])
    write_captions(folder, 'long', 'other')
    with pytest.raises(UserError, match=r'holds other latents \(captions differ\)'):
        encode('long')
