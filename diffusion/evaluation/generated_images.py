"""Images that a checkpoint generates for a prompt set: generated once, by all ranks, and kept in a folder."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from composer.utils import dist
from PIL import Image, PngImagePlugin
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from diffusion.data.image_sheet import to_images
from diffusion.errors import ExternalError, UserError
from diffusion.evaluation.rewriting import GivenPrompts
from diffusion.loggers import status_line
from diffusion.storage.atomic import atomic_folder, write_atomically

log = logging.getLogger(__name__)

MANIFEST = 'images.json'
"""File in an image folder, written before the first image: checkpoint, settings and a hash of the prompts."""

NEWER = ('guidance', 'snr_shift')
"""Settings that older image folders do not record; they are left out of the record while None."""


@dataclass(frozen=True)
class Sampling:
    """Settings for generating images; `ImageMetrics` describes those that are not listed here.

    Args:
        size: Height and width in pixels; None means the model's own.
        seed: Seed of the first image; each following image uses the next seed.
        guidance_rescale: Strength of rescaling the guided prediction, from 0 to 1.
        guidance: Name and settings of the guidance; None means classifier-free guidance.
        snr_shift: Shift of a flow's sampling times toward noise; None means the objective's.
        batch_size: Images generated at once. It counts as a setting because it affects the images' last bits.
    """

    guidance_scale: float = 7.5
    num_inference_steps: int = 50
    noise_scheduler: str = 'ddim'
    negative_prompt: str = ''
    size: tuple[int, int] | None = None
    seed: int = 0
    guidance_rescale: float = 0.0
    guidance: Mapping[str, Any] | None = None
    snr_shift: float | None = None
    batch_size: int = 32

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by name; those in `NEWER`, which older folders and exports lack, only if set."""
        return {key: value for key, value in asdict(self).items() if value or key not in NEWER}


class ImageGenerator(Protocol):
    """Model that generates images from prompts, such as a `LatentDiffusion` or an exported pipeline."""

    @property
    def generate(self) -> Callable[..., Tensor]:
        """Function that generates one image per prompt; see `LatentDiffusion.generate`."""
        ...


class GeneratedImages:
    """Images for a prompt set from one checkpoint at one guidance scale, kept in a folder.

    Batches consist of the same consecutive prompts on any number of ranks, so that images are bitwise equal. Each batch
    is a subfolder, renamed when complete: after a job is killed, the next one generates only the missing batches. Nodes
    need not share the folder: each rank reads only its own batches.

    Args:
        prompts: One prompt per image.
        checkpoint: Name of the checkpoint and its weights, such as `ba1600, ema weights`.

    Raises:
        UserError: `prompts` is empty, or the folder has images from another checkpoint, other prompts or settings.
    """

    def __init__(self, folder: Path, prompts: Sequence[str], sampling: Sampling, checkpoint: str) -> None:
        if not prompts:
            raise UserError('there are no prompts to generate images for; add at least one')
        self.folder, self.prompts, self.sampling, self.checkpoint = folder, list(prompts), sampling, checkpoint
        self.given = GivenPrompts(self.prompts, self.prompts)
        """Set this to record with each image that its prompt was rewritten."""
        digest = xxh3_128_hexdigest(json.dumps(self.prompts).encode())
        wanted = {'checkpoint': checkpoint, 'images': len(prompts), 'prompts': digest, **sampling.settings}
        self._check_manifest(json.loads(json.dumps(wanted)))

    @classmethod
    def below(
        cls, folder: Path, prompts: Sequence[str], sampling: Sampling, checkpoint: str, *, name: str | None = None
    ) -> 'GeneratedImages':
        """Return images in a subfolder named `guidance-SCALE-HASH`, or `NAME-HASH` if `name` is given.

        The hash covers prompts, settings and checkpoint, so other settings can be tried without removing images.
        """
        key = xxh3_128_hexdigest(json.dumps([list(prompts), sampling.settings, checkpoint]).encode())[:8]
        return cls(folder / f'{name or f"guidance-{sampling.guidance_scale:g}"}-{key}', prompts, sampling, checkpoint)

    def batches(self) -> list[range]:
        count, size = len(self.prompts), self.sampling.batch_size
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def path(self, index: int) -> Path:
        return self._batch_folder(index // self.sampling.batch_size) / f'{index:06d}.png'

    def own_batches(
        self, model: ImageGenerator, *, together: bool = False, should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[range, list[Tensor]]]:
        """Yield indices and images, uint8 [3, H, W], of each of this rank's batches; generate missing ones.

        Args:
            together: True for a sharded model: all ranks run the same forward passes, and this is a collective call.
                False: each rank runs only the forward passes of its own batches.
            should_stop: If it returns True, ExternalError is raised before the next batch; with `together`, on all
                ranks.
        """

        def is_needed(generates: bool) -> bool:
            """Return True if this rank or, with `together`, any rank must run the forward passes of a batch."""
            own = generates, should_stop()
            answers = dist.all_gather_object(own) if together else [own]
            if any(stops for _, stops in answers):
                raise ExternalError('stopped by a signal while generating images; complete batches are kept')
            return any(needs for needs, _ in answers)

        batches, world = self.batches(), dist.get_world_size()
        for first in range(0, len(batches), world):
            number = first + dist.get_global_rank()
            if number >= len(batches):
                # A rank that has no batches left still takes part in the other ranks' forward passes.
                if together and is_needed(False):
                    self._generated(model, batches[first])
                continue
            indices = batches[number]
            status_line.show(f'generated {indices.start} of {len(self.prompts)} images')
            images = self._read(number, indices)
            if is_needed(images is None):
                pixels = self._generated(model, indices)
                images = self._write(number, indices, pixels) if images is None else images
            assert images is not None
            yield indices, images
        status_line.show('')

    def _batch_folder(self, number: int) -> Path:
        return self.folder / f'batch-{number:05d}'

    def _check_manifest(self, wanted: dict[str, Any]) -> None:
        """Write the manifest, or compare it if the folder has one; safe to call on all ranks at once."""
        path = self.folder / MANIFEST
        if not path.exists():
            write_atomically(path, json.dumps(wanted, indent=2) + '\n')
            return
        try:
            found = json.loads(path.read_text(encoding='utf-8'))
        except ValueError as error:
            raise UserError(f'{path}: is not JSON ({error}); remove the folder to generate its images again') from error
        for name, value in wanted.items():
            if (was := found.get(name) if isinstance(found, dict) else None) != value:
                raise UserError(
                    f'{self.folder}: has images with {name} {was!r} instead of {value!r}; remove the folder, or write '
                    'to another one'
                )

    def _generated(self, model: ImageGenerator, indices: range) -> Tensor:
        settings = self.sampling.settings
        first, _ = settings.pop('seed'), settings.pop('batch_size')
        prompts = [self.prompts[index] for index in indices]
        return model.generate(prompts, seeds=[first + index for index in indices], **settings)

    def _write(self, number: int, indices: range, pixels: Tensor) -> list[Tensor]:
        """Write a batch's images as PNG files, and return them as `_read` would: uint8 [3, H, W] each."""
        images = to_images(pixels)
        with atomic_folder(self._batch_folder(number)) as unfinished:
            for index, image in zip(indices, images, strict=True):
                image.save(unfinished / f'{index:06d}.png', pnginfo=self._text_of(index))
        return [_as_tensor(image) for image in images]

    def _text_of(self, index: int) -> PngImagePlugin.PngInfo:
        text = PngImagePlugin.PngInfo()
        sampling = {**self.sampling.settings, 'seed': self.sampling.seed + index, 'checkpoint': self.checkpoint}
        for key, value in {'prompt': self.prompts[index], **self.given.record(index), **sampling}.items():
            text.add_itxt(key, value if isinstance(value, str) else json.dumps(value))
        return text

    def _read(self, number: int, indices: range) -> list[Tensor] | None:
        """Read a batch's images; return None if they do not exist or are damaged (damaged ones are removed)."""
        folder = self._batch_folder(number)
        if not folder.is_dir():
            return None
        images = []
        for index in indices:
            try:
                # Read the pixels too, so that Pillow checks their CRC: opening the file reads only the header.
                with Image.open(folder / f'{index:06d}.png') as image:
                    images.append(_as_tensor(image.convert('RGB')))
            except (OSError, SyntaxError, ValueError) as error:
                log.warning('%s is damaged (%s); its batch is generated again', folder / f'{index:06d}.png', error)
                shutil.rmtree(folder)
                return None
        return images


def kept_answer(path: Path, about: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the answer about an image from the JSON file `path`; None if this is missing or does not match `about`.

    Args:
        about: Keys and values that the file must have, such as the prompt and a hash of the network.
    """
    try:
        answer = json.loads(path.read_text(encoding='utf-8'))
    except (FileNotFoundError, ValueError):
        return None
    return answer if isinstance(answer, dict) and answer | json.loads(json.dumps(about)) == answer else None


def _as_tensor(image: Image.Image) -> Tensor:
    """Return an RGB image as uint8 [3, H, W]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
