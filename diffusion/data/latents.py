"""Dataset of precomputed latents, and the manifest that identifies the encoders that made them.

Shapes: B batch, C latent channels, H W latent size, E text encoders, L text tokens, D text width.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from diffusion.config.image_shapes import Shape
from diffusion.config.model_checks import no_features_problem
from diffusion.data.bad_samples import BadSample
from diffusion.data.caption_choice import CaptionChoice
from diffusion.data.streams import Bucket, BucketedDataset
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.representation_alignment import FeatureEncoder
from diffusion.models.text_conditioner import TextConditioner, longest, tokenize
from diffusion.models.vae import Vae, description, latent_statistics

MANIFEST = 'manifest.json'
VERSION = 2
TEXT_LENGTHS = 'text_lengths'
"""Column with the number of tokens of each caption, present if text embeddings are stored without padding."""


@dataclass(frozen=True)
class LatentManifest:
    """Record of the encoders and settings that made a latents dataset; stored as manifest.json next to the shards."""

    vae: str
    """Fingerprint of the VAE's weights."""
    latent_mean: list[Any]
    """Mean of each latent channel (FLUX.2: per position in 2x2 groups too); not subtracted from stored latents."""
    latent_std: list[Any]
    """Standard deviation of each latent channel, including the scaling factor; stored latents are not divided by it."""
    shape: str
    """Width x height of the encoded images in pixels."""
    posterior: str
    """`sample`: mean and log-variance are stored; `mean`: only the mean."""
    dtype: str
    """Data type of the stored latents."""
    crop: str = 'center'
    """How images were cropped before encoding: `center`, or `random` with its minimum scale and seed."""
    text_encoder: str | None = None
    """Fingerprint of the text encoders that made the stored embeddings; None if they run during training."""
    text_output: str = 'last'
    """Which output of the text encoders is stored; see `TextConditioner.output`."""
    text_padding: str = 'kept'
    """`kept`: all L embeddings per caption are stored; `removed`: only those of tokens that are not padding."""
    image_sizes: bool = False
    """True if the sizes of the images are stored."""
    image_encoder: str | None = None
    """Fingerprint of the image encoder that made the features for representation alignment; None if none are stored."""
    image_encoder_source: str = ''
    """Folder or repository of the image encoder, with its revision; for information only, not compared in training."""
    features_shape: list[int] | None = None
    """Height and width of the feature grid, and number of channels; None if no features are stored."""
    captions: str = 'all'
    """Which captions of a sample are stored: `all`, `first` or `longest`, and any columns from `diffusion caption`."""
    source: str = ''
    """SHA-256 of the index.json of the encoded image dataset."""
    autoencoder: str = field(default='', compare=False)
    """Class of the VAE, and layout of its latents; empty in manifests of older releases, which had only one layout."""
    version: int = VERSION

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + '\n'

    @classmethod
    def read(cls, folder: Path, where: str) -> 'LatentManifest':
        """Read the manifest.json of a folder of precomputed latents; `where` names the stream or URL in messages."""
        path = folder / MANIFEST
        if not path.exists():
            raise UserError(f'{where}: no {MANIFEST} next to its shards; precompute the latents with task=precompute')
        known = {field.name for field in dataclasses.fields(cls)}
        try:
            content = json.loads(path.read_text(encoding='utf-8'))
        except ValueError:
            content = {}
        if not isinstance(content, dict) or content.keys() | {'autoencoder'} != known or content['version'] != VERSION:
            raise UserError(
                f'{where}: {path} is not a manifest of version {VERSION}. To fix: precompute the latents again'
            )
        return cls(**content)


def weights_fingerprint(module: nn.Module) -> str:
    """Return the first 16 hex digits of the SHA-256 of a module's weights: names, shapes and values in float16."""
    # Round values to float16, so that the same weights loaded as float32 and as float16 have the same fingerprint.
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f'{name}{tuple(tensor.shape)}'.encode())
        digest.update(tensor.detach().cpu().to(torch.float16).contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def manifest_of(
    vae: Vae,
    *,
    shape: str,
    posterior: str,
    dtype: str,
    crop: str = 'center',
    text: TextConditioner | None = None,
    text_padding: str = 'kept',
    captions: str = 'all',
    image_sizes: bool = False,
) -> LatentManifest:
    """Return the manifest of latents encoded by `vae`; `text` is None if no text embeddings are stored."""
    mean, std = latent_statistics(vae)
    return LatentManifest(
        *(weights_fingerprint(vae), mean.tolist(), std.tolist(), shape, posterior, dtype, crop),
        autoencoder=description(vae),
        text_encoder=None if text is None else weights_fingerprint(text),
        text_output='last' if text is None else text.output,
        text_padding=text_padding,
        captions=captions,
        image_sizes=image_sizes,
    )


def features_shape(encoder: FeatureEncoder, shape: Shape, *, token_side: int) -> list[int]:
    """Return height, width and channels of the feature grid for images of `shape`, with cells of `token_side` px."""
    return [shape.height // token_side, shape.width // token_side, encoder.width]


def _padded(embeds: torch.Tensor, lengths: Sequence[int], caption: int, size: int) -> dict[str, torch.Tensor]:
    """Return one caption's embeddings, padded to [size, D], and their mask, by batch key.

    `embeds` has the embeddings of all captions of a sample, one after another, without padding: lengths[i] for caption
    i. `caption` is the index of the caption.
    """
    start = sum(lengths[:caption])
    padded = embeds.new_zeros(size, embeds.shape[1])
    padded[: lengths[caption]] = embeds[start : start + lengths[caption]]
    return {batch_keys.TEXT_EMBEDS: padded, batch_keys.TEXT_MASK: torch.arange(size) < lengths[caption]}


class LatentsDataset(BucketedDataset):
    """Streaming dataset of precomputed latents, for training without the VAE.

    Samples hold VAE posterior moments, float32 [C or 2C, H, W], caption tokens [E, L], and text embeddings [L, D] and
    pooled text [P] if stored. With `image_features`, they also hold features of an image encoder, [N, F] for N tokens.

    Args:
        buckets: Streams made by `task: precompute`, each with a manifest next to its shards.
        batch_size: Samples per device per batch.
        tokenizers: One per text encoder (E).
        image_sizes: Add the stored sizes of each image, int64 [6], for a model conditioned on them.
        image_features: Add the stored features of an image encoder, for training with representation alignment.
        caption_choice: Caption to use if there are several: the first, the longest, or a random one in each epoch.
        caption_weights: Probability weight of each caption column, such as {original: 0.3, recaptioned: 0.7}, whether
            stored in the shards or written by `diffusion caption`. None means that all captions in the shards are
            equally likely, and that columns of `diffusion caption` are not used.
        seed: Seed of the caption choice.
        streaming: Keyword arguments for StreamingDataset.
    """

    copies = 'each with its own caption, timestep and noise, but all with the one crop that was encoded'

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        batch_size: int,
        tokenizers: Sequence[PreTrainedTokenizerBase] = (),
        image_sizes: bool = False,
        image_features: bool = False,
        caption_choice: CaptionChoice = 'random',
        caption_weights: dict[str, float] | None = None,
        seed: int = 17,
        **streaming: Any,
    ) -> None:
        columns = [(batch_keys.LATENT_MOMENTS,), ('captions', 'caption')]
        streaming |= {'caption_choice': caption_choice, 'caption_weights': caption_weights}
        super().__init__(buckets, batch_size=batch_size, columns=columns, seed=seed, **streaming)
        self.tokenizers = list(tokenizers)
        self.image_sizes = image_sizes
        self.image_features = image_features
        folders = {each.name: each.fetch_sidecar(MANIFEST).parent for each in self.streams}
        self.manifests = [LatentManifest.read(folder, f'streams.{name}') for name, folder in folders.items()]
        self.with_text = self._all_or_none(
            [manifest.text_encoder is not None for manifest in self.manifests],
            'have no text embeddings, but the other streams do; precompute all streams in the same way',
        )
        self.without_padding = self.with_text and self._all_or_none(
            [manifest.text_padding == 'removed' for manifest in self.manifests],
            'store text embeddings with padding, and the other streams without; precompute all streams with the same '
            'model',
        )
        self.with_pooled = self.with_text and all('pooled' in manifest.text_output for manifest in self.manifests)
        for bucket, manifest in zip(self.buckets, self.manifests, strict=True):
            if str(bucket.shape) != manifest.shape:
                raise UserError(
                    f'streams.{bucket.name}: {bucket.shape} px, but its latents were made from images of '
                    f'{manifest.shape} px; correct its resolution or shape'
                )
            if image_sizes and not manifest.image_sizes:
                raise UserError(
                    f'streams.{bucket.name}: its latents have no image sizes, on which the model is conditioned; '
                    'precompute them again with this model'
                )
            if image_features and manifest.image_encoder is None:
                raise UserError(f'model.representation_alignment: {no_features_problem(bucket.name)}')

    def item(self, sample: dict[str, Any], index: int) -> dict[str, Any]:
        """Return a sample's latent moments and caption tokens, plus text embeddings, sizes and features if used."""
        caption_index, caption = self.choose_caption(sample, index)
        item: dict[str, Any] = {
            batch_keys.LATENT_MOMENTS: self._finite(sample, batch_keys.LATENT_MOMENTS, index).float(),
            batch_keys.INPUT_IDS: tokenize(self.tokenizers, [caption])[0],
        }
        if self.with_text:
            embeds = self._finite(sample, batch_keys.TEXT_EMBEDS, index)
            if self.without_padding:
                lengths = sample[TEXT_LENGTHS].tolist()
                item |= _padded(embeds, lengths, caption_index, longest(self.tokenizers))
            else:
                item[batch_keys.TEXT_EMBEDS] = embeds[caption_index].clone()
        if self.with_pooled:
            pooled = self._finite(sample, batch_keys.TEXT_POOLED, index)
            item[batch_keys.TEXT_POOLED] = pooled[caption_index].clone()
        if self.image_features:
            item[batch_keys.IMAGE_FEATURES] = self._finite(sample, batch_keys.IMAGE_FEATURES, index)
        if self.image_sizes:
            item[batch_keys.IMAGE_SIZES] = torch.from_numpy(sample[batch_keys.IMAGE_SIZES].astype('int64'))
        return item

    def _finite(self, sample: dict[str, Any], name: str, index: int) -> torch.Tensor:
        """Return one of a sample's stored arrays as a tensor; raise BadSample if a value is not finite."""
        values = torch.from_numpy(sample[name].copy())
        if not values.isfinite().all():
            raise BadSample(f'{self.where(index)}: its {name} are not finite; precompute them again')
        return values

    def _all_or_none(self, found: Sequence[bool], problem: str) -> bool:
        """Return True if all entries of `found`, one per stream, are True, False if none is; else raise UserError."""
        if any(found) and not all(found):
            names = ', '.join(bucket.name for bucket, has in zip(self.buckets, found, strict=True) if not has)
            raise UserError(f'streams: {names} {problem}')
        return all(found)

    def check_encoders(self, vae: Vae, text: TextConditioner, *, train_text_encoder: bool, mask_padding: bool) -> None:
        """Raise UserError unless the stored latents and any stored text embeddings were made by the model's encoders.

        A model that trains its text encoders cannot use stored text embeddings. A model that attends to padding
        (`mask_padding` is False) cannot use text embeddings that were stored without padding.
        """
        if self.with_text:
            self._check_text(text, train_text_encoder)
            if self.without_padding and not mask_padding:
                raise UserError(
                    'streams: their text embeddings are stored without padding, but the model attends to it; set '
                    'model.mask_padding: true, or precompute them again with this model'
                )
        of_model = manifest_of(vae, shape='', posterior='', dtype='')
        for bucket, manifest in zip(self.buckets, self.manifests, strict=True):
            for name in ('autoencoder', 'vae', 'latent_mean', 'latent_std'):
                stored, expected = getattr(manifest, name), getattr(of_model, name)
                if stored not in ('', expected):
                    raise UserError(
                        f'streams.{bucket.name}: its latents were made by another VAE '
                        f'({name} is {stored}, but the model has {expected}); '
                        'precompute them again with this model, or use their VAE in the model'
                    )

    def check_features(self, encoder: FeatureEncoder, *, token_side: int) -> None:
        """Raise UserError unless the stored features match the model's image encoder and grid of tokens."""
        expected = weights_fingerprint(encoder)
        for bucket, manifest in zip(self.buckets, self.manifests, strict=True):
            if manifest.image_encoder != expected:
                raise UserError(
                    f'streams.{bucket.name}: its image features were made by {manifest.image_encoder_source} '
                    f'({manifest.image_encoder}, but model.representation_alignment.encoder has {expected}); '
                    'precompute them again with this model, or use their encoder'
                )
            shape = features_shape(encoder, bucket.shape, token_side=token_side)
            if manifest.features_shape != shape:
                stored, needed = (' x '.join(map(str, each)) for each in (manifest.features_shape or [], shape))
                raise UserError(
                    f'streams.{bucket.name}: its image features are {stored} (height, width, features of the grid), '
                    f'but the model needs {needed}; precompute them again with this model'
                )

    def _check_text(self, text: TextConditioner, train_text_encoder: bool) -> None:
        names = ', '.join(f'streams.{bucket.name}' for bucket in self.buckets)
        if train_text_encoder:
            raise UserError(
                f'{names}: text embeddings are stored, but this model trains its text encoder; '
                'precompute with latents: image'
            )
        expected = weights_fingerprint(text)
        for bucket, manifest in zip(self.buckets, self.manifests, strict=True):
            if manifest.text_encoder != expected:
                raise UserError(
                    f'streams.{bucket.name}: its text embeddings were made by another text encoder '
                    f'({manifest.text_encoder}, but the model has {expected}); precompute them again with this model'
                )
            if manifest.text_output != text.output:
                raise UserError(
                    f'streams.{bucket.name}: the stored output of the text encoders is {manifest.text_output}, but the '
                    f'model takes {text.output}; precompute it again with this model'
                )
