"""Tables of converted parts in an object store, beside their shards (`part_shards`).

So machines without a common folder convert shares of one input, and a preparation resumes whose disk is gone. A part is
in the store when its tables are, which are written last, as one object.
"""

import json
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from diffusion.storage import mds, object_store
from diffusion.storage.places import StorePlace

TABLES = 'tables.zip'
"""Object with all files of a part's folder, which has no shards."""


def store_tables(folder: Path, url: str) -> None:
    """Write the files of a complete part's folder to the store; its shards must be there.

    Args:
        folder: Folder of the part, under its unfinished name.
    """
    archive = _beside(folder)
    try:
        with zipfile.ZipFile(archive, 'x') as file:
            for path in sorted(folder.iterdir()):
                file.write(path, path.name)
        object_store.write(f'{url}/{TABLES}', archive)
    finally:
        archive.unlink(missing_ok=True)


def list_stored(url: str) -> dict[str, dict[str, int]]:
    """Return the size in bytes of each object of each part that is in the store, by name of its folder and own name.

    `url` is the URL of the object store folder of a preparation.
    """
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for path, size in StorePlace(url).sizes().items():
        folder, _, name = path.rpartition('/')
        found[folder][name] = size
    return {folder: sizes for folder, sizes in found.items() if TABLES in sizes}


def fetch_tables(url: str, folder: Path, sizes: Mapping[str, int]) -> bool:
    """Fill an empty folder with the tables of a part; return False, and leave it empty, if the part is damaged there.

    Args:
        folder: Folder of the part, under its unfinished name.
        sizes: Size in bytes of each object of the part by name.
    """
    archive = _beside(folder)
    try:
        object_store.download(f'{url}/{TABLES}', archive)
        with zipfile.ZipFile(archive) as file:
            file.extractall(folder)
        entries = json.loads((folder / mds.INDEX).read_text(encoding='utf-8'))['shards']
        # A rule of the bucket may have deleted shards.
        shards = (entry['raw_data'] for entry in entries)
        complete = all(sizes.get(shard['basename']) == shard['bytes'] for shard in shards)
    except (zipfile.BadZipFile, FileNotFoundError, KeyError, json.JSONDecodeError):
        complete = False
    finally:
        archive.unlink(missing_ok=True)
    if not complete:
        for path in folder.iterdir():
            path.unlink()
    return complete


def _beside(folder: Path) -> Path:
    """Return the path of a temporary file beside the unfinished folder of a part, removed with it if left behind."""
    return folder.with_name(f'{folder.name}.zip')
