"""Dataset of images with captions, in the format that `diffusion prepare` writes."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from diffusion.data.bad_samples import BadSample
from diffusion.data.caption_choice import CaptionChoice, choose_caption
from diffusion.data.streams import Bucket, BucketedDataset
from diffusion.data.transforms import Crop, Undecodable, crop_and_resize, to_planar
from diffusion.models import batch_keys
from diffusion.models.randomness import Purpose
from diffusion.models.text_conditioner import tokenize


class ImageTextDataset(BucketedDataset):
    """Streaming dataset of images, uint8 [3, H, W] in the shape of their bucket, and caption tokens [E, L].

    Args:
        buckets: Streams whose samples hold `image` (an encoded image) and `captions` or `caption`.
        batch_size: Samples per device per batch.
        tokenizers: One per text encoder (E); empty for a model without text.
        crop: Crop in the bucket's aspect ratio: `center` of the image, or `random`.
        min_crop_scale: Smallest side of a random crop, as a fraction of the largest crop that fits.
        flip: Mirror half of the images at random. Captions that mention left or right become wrong.
        caption_choice: Caption to use if there are several: the first, the longest, or a random one in each epoch.
        seed: Seed of crops, flips and caption choice.
        streaming: Keyword arguments for StreamingDataset.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        batch_size: int,
        tokenizers: Sequence[PreTrainedTokenizerBase] = (),
        crop: Literal['center', 'random'] = 'center',
        min_crop_scale: float = 1.0,
        flip: bool = False,
        caption_choice: CaptionChoice = 'random',
        seed: int = 17,
        **streaming: Any,
    ) -> None:
        columns = [('image',), *([('captions', 'caption')] if tokenizers else [])]
        super().__init__(buckets, batch_size=batch_size, columns=columns, seed=seed, **streaming)
        self.tokenizers = list(tokenizers)
        self.crop: Literal['center', 'random'] = crop
        self.min_crop_scale = min_crop_scale
        self.flip = flip
        self.caption_choice: CaptionChoice = caption_choice

    def item(self, index: int) -> dict[str, Any]:
        """Return the image and the caption tokens of the sample with this index.

        Raises:
            BadSample: The image cannot be decoded, or there is no caption.
        """
        sample = self.get_item(index)
        item: dict[str, Any] = {batch_keys.IMAGE: self._image(sample, index)}
        if self.tokenizers:
            draw = self.draws(index, Purpose.CAPTION_CHOICE)[0]
            caption = choose_caption(self.captions(sample, index), self.caption_choice, draw)
            item[batch_keys.INPUT_IDS] = tokenize(self.tokenizers, [caption])[0]
        return item

    def _image(self, sample: dict[str, Any], index: int) -> torch.Tensor:
        """Return a sample's image, decoded, cropped and resized to its bucket's shape, as uint8 [3, H, W]."""
        shape = self.bucket_of(index).shape
        draw = self.draws(index, Purpose.CROP)[:3] if self.crop == 'random' else (0.0, 0.0, 0.0)
        flip = self.flip and self.draws(index, Purpose.FLIP)[0] < 0.5
        try:
            pixels = crop_and_resize(sample['image'], shape, Crop(self.crop, self.min_crop_scale, draw, flip))
        except Undecodable as error:
            raise BadSample(
                f'{self.where(index)}: the image cannot be decoded ({error}); prepare the data again'
            ) from error
        return to_planar(pixels, self.image_block.place((3, shape.height, shape.width)))
