"""Loading and use of the VAE, text encoders and tokenizers, which come from diffusers and transformers.

Shapes: B batch, E text encoders, L text tokens, D text width (summed over encoders), C latent channels.
"""

import gzip
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_utils import ModelMixin
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from diffusion.errors import UserError
from diffusion.models import hub_files
from diffusion.models.clip_tokens import token_ids
from diffusion.models.hub_errors import WAY_OUT, check_config, loading_error

Loadable = TypeVar('Loadable')

_without_weights = False


@contextmanager
def without_weights() -> Iterator[None]:
    """Context in which `load_pretrained` builds modules from configurations only, on torch's default device."""
    global _without_weights
    before, _without_weights = _without_weights, True
    try:
        yield
    finally:
        _without_weights = before


def load_pretrained(part: type[Loadable], source: str, *, subfolder: str, revision: str | None = None) -> Loadable:
    """Load a model or tokenizer of a diffusers pipeline with `from_pretrained`, from a folder or the Hugging Face Hub.

    Args:
        part: Class to load.
        source: Local folder in diffusers' layout, or repository on the Hub.
        subfolder: `vae`, `text_encoder` or `tokenizer`; empty if the folder is the part itself.
        revision: Commit of the repository; ignored for a local folder.

    Raises:
        UserError: The files do not exist, are not accessible, or are damaged.
        ExternalError: The Hub did not answer for minutes.
        OSError: The disk cannot be read.
    """
    options: dict[str, Any] = {}
    weights = issubclass(part, nn.Module) and not _without_weights
    if Path(source).is_dir():
        if issubclass(part, nn.Module):
            check_config(Path(source, subfolder, 'config.json'))
    else:
        revision = hub_files.fetch(part, source, subfolder=subfolder, revision=revision, weights=weights)
        options = {'revision': revision, 'local_files_only': True, 'cache_dir': hub_files.cache_folder()}
    if weights:
        options['use_safetensors'] = True  # unpickling a downloaded file could run any code
        options['output_loading_info'] = True
    if weights and issubclass(part, ModelMixin):
        options['low_cpu_mem_usage'] = False  # otherwise diffusers logs a long request to install accelerate
    loader: Any = part
    try:
        if _without_weights and issubclass(part, ModelMixin):
            return loader.from_config(loader.load_config(source, subfolder=subfolder, **options))
        if _without_weights and issubclass(part, PreTrainedModel):
            config: Any = part.config_class
            return loader(config.from_pretrained(source, subfolder=subfolder, **options))
        loaded = loader.from_pretrained(source, subfolder=subfolder, **options)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        replacement = loading_error(error, part, source, subfolder=subfolder, revision=revision)
        if replacement is None:
            raise
        raise replacement from error
    if not weights:
        return loaded
    model, info = loaded
    # from_pretrained only warns, and continues with random numbers in place of the missing tensors.
    if info['missing_keys']:
        name = min(info['missing_keys'])
        raise UserError(
            f'{"/".join(each for each in (source, subfolder) if each)}: its weight files lack '
            f'{len(info["missing_keys"])} tensors of {part.__name__}, such as {name}; {WAY_OUT}'
        )
    return model


def clip_tokenizer(*, max_length: int = 77, pad_token: str = '!') -> CLIPTokenizer:
    """Build CLIP's tokenizer from the vocabulary in the open_clip package, without a download.

    Token ids equal those of `openai/clip-vit-large-patch14`. Stable Diffusion 2 pads with `!`, id 0.
    """
    package = find_spec('open_clip')
    assert package is not None and package.origin is not None, 'open-clip-torch is a core dependency'
    source = Path(package.origin).parent / 'bpe_simple_vocab_16e6.txt.gz'
    # A header line, then 49152 - 256 - 2 merges: the same slice as in transformers' tokenizer.
    merges = gzip.decompress(source.read_bytes()).decode('utf-8').split('\n')[1 : 49152 - 256 - 2 + 1]
    letters = [_byte_letter(byte) for byte in _byte_order()]
    tokens = letters + [letter + '</w>' for letter in letters] + [merge.replace(' ', '') for merge in merges]
    # open_clip names these <start_of_text> and <end_of_text>; under those names transformers would add new ids.
    tokens += ['<|startoftext|>', '<|endoftext|>']
    # CLIPTokenizer reads its vocabulary from files only.
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, rules = Path(folder, 'vocab.json'), Path(folder, 'merges.txt')
        vocabulary.write_text(json.dumps({token: index for index, token in enumerate(tokens)}), encoding='utf-8')
        rules.write_text('#version: 0.2\n' + '\n'.join(merges) + '\n', encoding='utf-8')
        return CLIPTokenizer(str(vocabulary), str(rules), model_max_length=max_length, pad_token=pad_token)


def tokenize(tokenizers: Sequence[PreTrainedTokenizerBase], captions: Sequence[str]) -> Tensor:
    """Return the token ids of captions, padded and truncated to the tokenizers' common length, int64 [B, E, L]."""
    rows = [[token_ids(tokenizer, caption) for caption in captions] for tokenizer in tokenizers]
    # By way of NumPy: torch.tensor takes ten times as long to read nested lists.
    return torch.from_numpy(np.array(rows, dtype=np.int64).swapaxes(0, 1).copy())


class TextConditioner(nn.Module):
    """Text encoders whose concatenated last hidden states condition the denoiser.

    Args:
        encoders: CLIP text models. Stable Diffusion 2's text encoder is published without its last layer, so that its
            last hidden state is that of OpenCLIP's penultimate layer after the final norm.
        tokenizers: One tokenizer per encoder, all of the same length.
    """

    def __init__(self, encoders: Sequence[CLIPTextModel], tokenizers: Sequence[PreTrainedTokenizerBase]) -> None:
        super().__init__()
        lengths = {tokenizer.model_max_length for tokenizer in tokenizers}
        if len(encoders) != len(tokenizers) or not encoders or len(lengths) != 1:
            raise UserError(
                f'text encoders: {len(encoders)} encoders with {len(tokenizers)} tokenizers of lengths '
                f'{sorted(lengths)}; use one tokenizer per encoder, all of the same length'
            )
        for encoder, tokenizer in zip(encoders, tokenizers, strict=True):
            if len(tokenizer) > encoder.config.vocab_size:
                raise UserError(
                    f'tokenizer: has {len(tokenizer)} tokens, but its text encoder embeds {encoder.config.vocab_size}; '
                    'load both from the same source'
                )
        self.encoders = nn.ModuleList(encoders)
        self.tokenizers = list(tokenizers)

    @property
    def width(self) -> int:
        """Width D of the text embeddings, summed over the encoders."""
        return sum(encoder.config.hidden_size for encoder in self.encoders)  # type: ignore[union-attr]

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the text embeddings [B, L, D] of token ids [B, E, L], the encoders' last hidden states."""
        if input_ids.ndim != 3 or input_ids.shape[1] != len(self.encoders):
            raise UserError(
                f'input_ids: shape {tuple(input_ids.shape)}; '
                f'expected [batch, {len(self.encoders)} text encoders, tokens]'
            )
        states = [encoder(input_ids[:, i]).last_hidden_state for i, encoder in enumerate(self.encoders)]
        return torch.cat(states, dim=-1)

    def padding_mask(self, input_ids: Tensor) -> Tensor:
        """Return a mask that is False for padding, bool [B, L]: True up to the first encoder's end-of-text token."""
        end_of_text: Any = self.tokenizers[0].eos_token_id
        ended = input_ids[:, 0].eq(end_of_text).cumsum(dim=-1)
        return torch.cat([torch.ones_like(ended[:, :1]), ended[:, :-1] == 0], dim=-1).bool()


def latent_statistics(vae: AutoencoderKL) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the VAE's latents, float32 [C] each; models use (latents - mean) / std."""
    # diffusers' configurations have two forms: a scaling_factor with an optional shift_factor, or means and standard
    # deviations per channel with an additional scaling_factor.
    config, channels = vae.config, vae.config['latent_channels']
    mean = config.get('latents_mean') or [config.get('shift_factor') or 0.0] * channels
    std = config.get('latents_std') or [1.0] * channels
    if len(mean) != channels or len(std) != channels:
        raise UserError(
            f'vae: latents_mean and latents_std have {len(mean)} and {len(std)} values for {channels} channels; give '
            'one value per channel'
        )
    return torch.tensor(mean, device='cpu'), torch.tensor(std, device='cpu') / config['scaling_factor']


def posterior_of(vae: AutoencoderKL, pixels: Tensor) -> DiagonalGaussianDistribution:
    """Return the VAE's posterior over latents for images [B, 3, 8H, 8W] in [-1, 1].

    Raises:
        UserError: The images' sides are not multiples of the VAE's downsampling.
    """
    # The VAE would silently drop an incomplete cell at the right and lower edges. Recipes are checked for multiples of
    # 8 px, but a VAE may downsample by more.
    cell, (height, width) = downsampling(vae), pixels.shape[2:]
    if height % cell or width % cell:
        raise UserError(
            f'streams: images of {width}x{height} px, but the VAE downsamples by {cell}; use multiples of {cell} px'
        )
    return vae.encode(pixels, return_dict=False)[0]  # type: ignore[return-value]


def decode_latents(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Return images [B, 3, 8H, 8W], roughly in [-1, 1], for unnormalized latents [B, C, H, W]."""
    return vae.decode(latents, return_dict=False)[0]  # type: ignore[arg-type]


def downsampling(vae: AutoencoderKL) -> int:
    """Return the VAE's downsampling factor, pixels per latent cell along one side: 8 for Stable Diffusion."""
    return 2 ** (len(vae.config['block_out_channels']) - 1)


def _byte_order() -> list[int]:
    """Return all 256 bytes in the order of their token ids in CLIP's vocabulary: printable characters first."""
    printable = [*range(ord('!'), ord('~') + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    return printable + [byte for byte in range(256) if byte not in printable]


def _byte_letter(byte: int) -> str:
    """Return the printable character for a byte in GPT-2's and CLIP's byte-level vocabularies."""
    order = _byte_order()
    printable = order[:188]
    return chr(byte) if byte in printable else chr(256 + order.index(byte) - 188)
