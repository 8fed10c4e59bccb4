"""Reference images for distances, and files that cache their features."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from composer.utils import dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from xxhash import xxh3_128

from diffusion.data.streams import BucketedDataset, index_hash
from diffusion.errors import UserError
from diffusion.evaluation.compared_images import read_image
from diffusion.evaluation.evaluated_checkpoint import EvaluatedCheckpoint, from_rank_zero, gather_rows
from diffusion.evaluation.feature_networks import FeatureNetwork
from diffusion.loggers import status_line
from diffusion.models import batch_keys
from diffusion.storage.atomic import atomic_file

BATCH_SIZE = 64
IMAGE_ENDINGS = ('.png', '.jpg', '.jpeg', '.webp', '.gif', '.bmp', '.tif', '.tiff', '.avif')
PIXELS = 'upright, sRGB, transparency over white'
"""How files become pixels; stored with cached features, which are rejected if this text has changed."""


class ReferenceImages(Protocol):
    """Reference images for a distance."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Tensor:
        """Return an image, uint8 [3, H, W]."""
        ...

    def description(self) -> dict[str, Any]:
        """Return a description of the images as JSON types; cached features are used again if it has not changed."""
        ...


class DatasetImages:
    """Images of a dataset, cropped and resized as for validation: `limit` of them, evenly spaced, or all."""

    def __init__(self, dataset: BucketedDataset, limit: int | None = None) -> None:
        size = int(dataset.size)
        if limit is not None and limit > size:
            raise UserError(f'{limit} reference images are more than the {size} of the dataset; use at most that many')
        self._dataset, self._size, self._count = dataset, size, size if limit is None else limit

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        number = index * self._size // self._count
        image = self._dataset.item(self._dataset.get_item(number), number).get(batch_keys.IMAGE)
        if image is None:
            raise UserError(
                'the evaluation data has latents, but generated images can be compared only to images; set '
                'eval_dataset and eval_streams to images, or name a folder of reference images'
            )
        return image

    def description(self) -> dict[str, Any]:
        streams = {
            bucket.name: {'index_sha256': index_hash(bucket.stream), 'shape': str(bucket.shape)}
            for bucket in self._dataset.buckets
        }
        crop = getattr(self._dataset, 'crop', None)
        return {'count': self._count, 'of': self._size, 'streams': streams, 'crop': crop}


class FolderImages:
    """Images in a folder and its subfolders, sorted by path, at their own size: `limit` of them, evenly spaced, or all.

    Raises:
        UserError: The folder does not exist or has too few images.
    """

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        if not folder.is_dir():
            raise UserError(f'{folder}: is not a folder; name a folder of reference images')
        files = sorted(path for path in folder.rglob('*') if path.suffix.lower() in IMAGE_ENDINGS)
        if not files:
            raise UserError(f'{folder}: has no images ({", ".join(IMAGE_ENDINGS)})')
        if limit is not None and limit > len(files):
            raise UserError(f'{folder}: {limit} reference images are more than its {len(files)}; use at most that many')
        count = len(files) if limit is None else limit
        self._folder = folder
        self._files = [files[index * len(files) // count] for index in range(count)]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(np.array(read_image(self._files[index]))).permute(2, 0, 1)

    def description(self) -> dict[str, Any]:
        digest = xxh3_128()
        for file in self._files:
            digest.update(f'{file.relative_to(self._folder)} {file.stat().st_size}\n'.encode())
        return {'count': len(self), 'names_and_sizes': digest.hexdigest(), 'pixels': PIXELS}


def reference_features(
    folder: Path, images: ReferenceImages, networks: Mapping[str, FeatureNetwork], checkpoint: EvaluatedCheckpoint
) -> dict[str, Tensor]:
    """Return each network's features [M, D] of reference images, from files in a folder or computed on all ranks.

    A collective call. Runs may share the folder. Only rank 0 reads and writes the files, so the other ranks return
    only the features that were computed because their file was missing.

    Raises:
        UserError: A file's features are from other images, another network, or another resizing method.
    """
    descriptions = {
        name: {'images': images.description(), **network.description()} for name, network in networks.items()
    }
    paths = {name: folder / f'{name}.safetensors' for name in networks}
    kept: dict[str, Tensor] = {}

    def read() -> list[str]:
        kept.update({name: _read(path, descriptions[name]) for name, path in paths.items() if path.exists()})
        return [name for name in networks if name not in kept]

    missing = from_rank_zero(read, checkpoint.raise_together)
    computed = _compute(images, {name: networks[name] for name in missing}, checkpoint)
    with checkpoint.raise_together(str(folder)):
        for name, features in computed.items() if dist.get_global_rank() == 0 else ():
            with atomic_file(paths[name]) as unfinished:
                save_file({'features': features}, unfinished, {'description': json.dumps(descriptions[name])})
    return kept | computed


def _read(path: Path, description: Mapping[str, Any]) -> Tensor:
    try:
        with safe_open(path, 'pt') as file:
            found = json.loads((file.metadata() or {})['description'])
            features = file.get_tensor('features')
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(f'{path}: is not a file of reference features ({error}); remove it') from error
    for key, wanted in description.items():
        if found.get(key) != wanted:
            raise UserError(
                f'{path}: has features of reference images with {key} {found.get(key)!r} instead of {wanted!r}; '
                'remove the file to compute them again, or name another folder'
            )
    return features


def _compute(
    images: ReferenceImages, networks: Mapping[str, FeatureNetwork], checkpoint: EvaluatedCheckpoint
) -> dict[str, Tensor]:
    """Compute each network's features of all images, on all ranks; a collective call."""
    if not networks:
        return {}
    rows: dict[str, list[Tensor]] = {name: [] for name in networks}
    indices: list[int] = []
    # Batches have a fixed composition, so that an image's features do not depend on the number of ranks.
    count, stride = len(images), dist.get_world_size() * BATCH_SIZE
    with checkpoint.raise_together('image_metrics: reference images'):
        for start in range(dist.get_global_rank() * BATCH_SIZE, count, stride):
            status_line.show(f'features of {start} of {count} reference images')
            own = range(start, min(start + BATCH_SIZE, count))
            batch = [images[index] for index in own]
            indices += own
            for name, network in networks.items():
                rows[name].append(network.features(batch).cpu())
            checkpoint.on_progress()
    status_line.show('')
    return {name: gather_rows(features, indices) for name, features in rows.items()}
