"""Dataset of images with captions, as `diffusion prepare` writes them."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from diffusion.data.bad_samples import BadSample
from diffusion.data.caption_choice import CaptionChoice, choose_caption
from diffusion.data.streams import Bucket, BucketedDataset
from diffusion.data.transforms import Crop, Undecodable, planes, seen
from diffusion.models import batch_keys
from diffusion.models.pretrained import tokenize
from diffusion.models.randomness import Purpose


class ImageTextDataset(BucketedDataset):
    """Images as uint8 pixels [3, H, W] in the shape of their bucket, and tokens [E, L].

    Args:
        buckets: Streams whose samples hold `image` (an encoded image) and `captions` or `caption`.
        batch_size: Samples per device and batch.
        tokenizers: One per text encoder; empty for a model that reads no text.
        crop: Crop of the bucket's aspect: the center of the image, or a random part of it.
        min_crop_scale: Smallest size of a random crop, as a fraction of the largest one that fits.
        flip: Mirror half of the images at random. Captions that mention left and right become wrong.
        caption_choice: Caption to use if there are several: the first, the longest, or a random one in each epoch.
        seed: Seed of crops, flips and caption choice.
        streaming: Keywords of StreamingDataset.
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

    def item(self, at: int) -> dict[str, Any]:
        """Return the image and the tokens of a sample."""
        sample = self.get_item(at)
        item: dict[str, Any] = {batch_keys.IMAGE: self._image(sample, at)}
        if self.tokenizers:
            draw = self.draws(at, Purpose.CAPTION_CHOICE)[0]
            caption = choose_caption(self.captions(sample, at), self.caption_choice, draw)
            item[batch_keys.INPUT_IDS] = tokenize(self.tokenizers, [caption])[0]
        return item

    def _image(self, sample: dict[str, Any], at: int) -> torch.Tensor:
        shape = self.bucket_of(at).shape
        draw = self.draws(at, Purpose.CROP)[:3] if self.crop == 'random' else (0.0, 0.0, 0.0)
        flip = self.flip and self.draws(at, Purpose.FLIP)[0] < 0.5
        try:
            pixels = seen(sample['image'], shape, Crop(self.crop, self.min_crop_scale, draw, flip))
        except Undecodable as error:
            raise BadSample(
                f'{self.where(at)}: the image cannot be decoded ({error}); prepare the data again'
            ) from error
        return planes(pixels, self.image_block.place((3, shape.height, shape.width)))
