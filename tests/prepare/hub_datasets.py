"""Small datasets as people publish them on the Hugging Face Hub, one per layout; each caption names its split."""

import functools
import io
import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from prepare.drawn import draw, encode, tar_of

NUMBERS = {'train': range(6), 'test': range(20, 23), 'validation': range(30, 32)}
"""Numbers of the images by split."""
CARD = b'---\nlicense: cc-by-4.0\ntask_categories: [text-to-image]\n---\n# Pictures\n'


@functools.cache
def image(number: int) -> bytes:
    return encode(draw(number, width=64, height=64), 'PNG')


def rows(split: str, numbers: Sequence[int] | None = None) -> dict[str, list[Any]]:
    chosen = NUMBERS[split] if numbers is None else numbers
    return {
        'image': [{'bytes': image(number), 'path': f'{number}.png'} for number in chosen],
        'text': [f'{split} {number}' for number in chosen],
        'score': [number / 10 for number in chosen],
    }


def parquet_of(columns: dict[str, Any] | pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), file)
    return file.getvalue()


def arrow_of(columns: dict[str, Any]) -> bytes:
    """Return a table in Arrow's stream format, in batches of two rows."""
    table, file = pa.table(columns), io.BytesIO()
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return file.getvalue()


def parquet_dataset() -> dict[str, bytes]:
    """Return the files of a dataset that `push_to_hub` wrote."""
    files = {'README.md': CARD, '.gitattributes': b'* text'}
    train = [NUMBERS['train'][:4], NUMBERS['train'][4:]]
    for shard, numbers in enumerate(train):
        files[f'data/train-0000{shard}-of-00002.parquet'] = parquet_of(rows('train', numbers))
    for split in ('test', 'validation'):
        files[f'data/{split}-00000-of-00001.parquet'] = parquet_of(rows(split))
    return files


def image_dataset() -> dict[str, bytes]:
    """Return the files of an imagefolder with a metadata file per split, of each kind."""
    files = {'README.md': CARD}
    for split, numbers in NUMBERS.items():
        files |= {f'{split}/{number}.png': image(number) for number in numbers}
        table = [{'file_name': f'{number}.png', 'text': f'{split} {number}'} for number in numbers]
        if split == 'test':
            lines = ['file_name,text', *(','.join(row.values()) for row in table)]
            files[f'{split}/metadata.csv'] = '\n'.join(lines).encode()
        elif split == 'validation':
            files[f'{split}/metadata.parquet'] = parquet_of(pa.Table.from_pylist(table))
        else:
            files[f'{split}/metadata.jsonl'] = '\n'.join(map(json.dumps, table)).encode()
    return files


def tar_dataset() -> dict[str, bytes]:
    files = {'README.md': CARD}
    for split, numbers in NUMBERS.items():
        members = [
            (f'{number}.{kind}', image(number) if kind == 'png' else f'{split} {number}'.encode())
            for number in numbers
            for kind in ('png', 'txt')
        ]
        files[f'pictures-{split}-0000.tar'] = tar_of(members)
    return files


def saved_dataset() -> dict[str, bytes]:
    """Return the files of a dictionary of datasets that `save_to_disk` wrote."""
    files = {'README.md': CARD, 'dataset_dict.json': json.dumps({'splits': list(NUMBERS)}).encode()}
    for split in NUMBERS:
        name = 'data-00000-of-00001.arrow'
        state = {'_data_files': [{'filename': name}], '_split': split, '_fingerprint': '0', '_format_type': None}
        files[f'{split}/state.json'] = json.dumps(state).encode()
        files[f'{split}/dataset_info.json'] = b'{}'
        files[f'{split}/{name}'] = arrow_of(rows(split))
        files[f'{split}/cache-0123456789abcdef.arrow'] = arrow_of(rows('validation'))
    return files


LAYOUTS = {'parquet': parquet_dataset, 'images': image_dataset, 'tars': tar_dataset, 'saved': saved_dataset}
"""Functions that return the files of a dataset, by layout."""
