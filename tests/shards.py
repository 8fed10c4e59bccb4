"""Create test images and MDS folders."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from streaming import StreamingDataset

CAPTIONS = ['a red square', 'a blue disc', 'green stripes', 'a yellow cross', 'a black dot', 'grey noise']


def draw_image(index: int, side: int) -> bytes:
    """Return a PNG with an ellipse whose color and position depend on the index."""
    from PIL import Image, ImageDraw

    rng = np.random.default_rng(index)
    image = Image.new('RGB', (side, side), 'white')
    draw = ImageDraw.Draw(image)
    color = tuple(int(value) for value in rng.integers(0, 200, 3))
    left, top = (int(value) for value in rng.integers(0, side // 2, 2))
    draw.ellipse((left, top, left + side // 2, top + side // 3), fill=color)
    buffer = io.BytesIO()
    image.save(buffer, format='PNG')
    return buffer.getvalue()


def write_image_shards(folder: Path, *, count: int, side: int, offset: int = 0) -> Path:
    """Write an MDS folder with the columns of `diffusion prepare`, and return it."""
    from streaming import MDSWriter

    columns = {'image': 'bytes', 'captions': 'json', 'width': 'int', 'height': 'int', 'key': 'str'}
    with MDSWriter(out=str(folder), columns=columns, hashes=['sha1'], size_limit=8192) as writer:
        for index in range(offset, offset + count):
            captions = [f'{CAPTIONS[index % len(CAPTIONS)]} {index}', f'number {index}']
            image = draw_image(index, side)
            writer.write({'image': image, 'captions': captions, 'width': side, 'height': side, 'key': f'p{index}'})
    return folder


def streams_of(folders: Mapping[int, Path]) -> dict[str, dict[str, Any]]:
    """Return a section with a stream for each folder of images, such as `px32`, by the side of the images."""
    return {f'px{side}': {'local': str(folder), 'resolution': side} for side, folder in folders.items()}


def open_shards(folder: Path, **settings: Any) -> 'StreamingDataset':
    """Return a dataset of an MDS folder, read by Streaming alone."""
    from streaming import StreamingDataset

    from diffusion.data.shared_state import one_job_at_a_time

    # Tests run in parallel, and two processes that open datasets at the same time may choose the same name.
    with one_job_at_a_time():
        return StreamingDataset(local=str(folder), batch_size=1, **settings)


def write_buckets(folder: Path, resolution: int, buckets: Any) -> None:
    """Write buckets.json, the list of a dataset's image shapes; `buckets` has a mapping with `samples` per shape."""
    from diffusion.config.image_shapes import BUCKETS, buckets_text

    folder.mkdir(exist_ok=True)
    (folder / BUCKETS).write_text(buckets_text(resolution, buckets), encoding='utf-8')
