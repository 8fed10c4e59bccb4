"""Dataset of images with captions, in the format that `diffusion prepare` writes."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from diffusion.config.image_shapes import Shape
from diffusion.data.bad_samples import BadSample
from diffusion.data.caption_choice import CaptionChoice
from diffusion.data.image_reading import UnreadableImage
from diffusion.data.streams import Bucket, BucketedDataset
from diffusion.data.transforms import Crop, CropBox, DecodedCrop, Pixels, decode_crop, resize_and_flip, to_planar
from diffusion.models import batch_keys
from diffusion.models.randomness import Purpose
from diffusion.models.text_conditioner import tokenize


def image_sizes(
    box: CropBox,
    shape: Shape,
    *,
    image: tuple[int, int],
    original: tuple[int, int] | None = None,
    flipped: bool = False,
) -> Tensor:
    """Return the sizes in pixels on which SDXL is conditioned, for an image cropped and resized to `shape`, int64 [6].

    The six numbers are original height and width, top and left of the crop, and target height and width. The crop
    position refers to the resized image, since Podell et al. (SDXL) resize images before cropping them.

    Args:
        box: Crop of the encoded image before resizing.
        image: Width and height of the encoded image, upright.
        original: Width and height before data preparation resized it; None (unknown) means those of the encoded image.
        flipped: Whether the crop is mirrored; if so, the sizes describe the same crop of the mirrored image.
    """
    width, height = image if original is None else original
    left = image[0] - box.left - box.width if flipped else box.left
    # Box and shape have the same aspect ratio up to rounding, so the scale is nearly the same for both sides.
    top, left = round(box.top * shape.height / box.height), round(left * shape.width / box.width)
    return torch.tensor([height, width, top, left, shape.height, shape.width], dtype=torch.int64)


def original_size(sample: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the width and height of a sample's image before `diffusion prepare` resized it; None if not recorded."""
    metadata = sample.get('metadata')
    if not isinstance(metadata, Mapping):
        return None
    size = metadata.get('source_width'), metadata.get('source_height')
    return size if all(isinstance(side, int) and side > 0 for side in size) else None  # type: ignore[return-value]


class ImageTextDataset(BucketedDataset):
    """Streaming dataset of images, uint8 [3, H, W] with the shape of their bucket, and caption tokens [E, L].

    Args:
        buckets: Streams whose samples hold `image` (an encoded image) and `captions` or `caption`.
        batch_size: Samples per device per batch.
        tokenizers: One per text encoder (E); empty for a model without text.
        image_sizes: Add the sizes of each image, int64 [6], for a model conditioned on them; see
            `diffusion.data.image_text`.
        crop: Position of the crop, which has the bucket's aspect ratio: `center` or `random`.
        min_crop_scale: Minimum side length of a random crop, as a fraction of the largest crop that fits.
        flip: Mirror half of the images at random. Captions that mention left or right become wrong.
        caption_choice: Caption to use if there are several: the first, the longest, or a random one in each epoch.
        caption_weights: Probability weight of each caption column, such as {original: 0.3, recaptioned: 0.7}, whether
            stored in the shards or written by `diffusion caption`. None means that all captions in the shards are
            equally likely, and that columns of `diffusion caption` are not used.
        seed: Seed of crops, flips and caption choice.
        streaming: Keyword arguments for StreamingDataset.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        batch_size: int,
        tokenizers: Sequence[PreTrainedTokenizerBase] = (),
        image_sizes: bool = False,
        crop: Literal['center', 'random'] = 'center',
        min_crop_scale: float = 1.0,
        flip: bool = False,
        caption_choice: CaptionChoice = 'random',
        caption_weights: dict[str, float] | None = None,
        seed: int = 17,
        **streaming: Any,
    ) -> None:
        columns = [('image',), *([('captions', 'caption')] if tokenizers else [])]
        streaming |= {'caption_choice': caption_choice, 'caption_weights': caption_weights}
        super().__init__(buckets, batch_size=batch_size, columns=columns, seed=seed, **streaming)
        self.tokenizers = list(tokenizers)
        self.image_sizes = image_sizes
        self.crop: Literal['center', 'random'] = crop
        self.min_crop_scale = min_crop_scale
        self.flip = flip

    def item(self, sample: dict[str, Any], index: int) -> dict[str, Any]:
        """Return a sample's image, caption tokens and sizes (the last two if used) by batch key, or raise BadSample."""
        decoded, pixels, crop = self.cropped(sample['image'], index)
        shape = self.bucket_of(index).shape
        place = self.image_block.place((3, shape.height, shape.width))
        item: dict[str, Any] = {batch_keys.IMAGE: to_planar(pixels, place)}
        if self.image_sizes:
            item[batch_keys.IMAGE_SIZES] = image_sizes(
                decoded.box, shape, image=decoded.image, original=original_size(sample), flipped=crop.flip
            )
        if self.tokenizers:
            _, caption = self.choose_caption(sample, index)
            item[batch_keys.INPUT_IDS] = tokenize(self.tokenizers, [caption])[0]
        return item

    def cropped(self, encoded: bytes, index: int) -> tuple[DecodedCrop, Pixels, Crop]:
        """Decode, crop, resize and flip the image of sample `index` with its random draws; BadSample if damaged."""
        shape = self.bucket_of(index).shape
        draw = self.draws(index, Purpose.CROP)[:3] if self.crop == 'random' else (0.0, 0.0, 0.0)
        flip = self.flip and self.draws(index, Purpose.FLIP)[0] < 0.5
        crop = Crop(self.crop, self.min_crop_scale, draw, flip)
        try:
            decoded = decode_crop(encoded, shape, crop)
            return decoded, resize_and_flip(decoded.pixels, shape, crop), crop
        except UnreadableImage as error:
            raise BadSample(
                f'{self.where(index)}: the image cannot be decoded ({error}); prepare the data again'
            ) from error
