"""Scores of single images by published networks: CLIP score, PickScore, HPSv2, ImageReward and the aesthetic predictor.

Each class follows the published steps, cited in its docstring. Shapes: N images, L text tokens, D features, S side of
the network's input.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import open_clip
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel, CLIPImageProcessor, CLIPModel

from diffusion.compatibility.transformers_versions import clip_features, fast_tokenizer
from diffusion.config.weight_sources import COMMIT
from diffusion.errors import UserError
from diffusion.evaluation.feature_networks import CLIP_MEAN, CLIP_STD
from diffusion.models.hub_errors import reading_weights
from diffusion.models.hub_files import fetch_file
from diffusion.models.pretrained import load_pretrained

CLIP_SCORE_SCALE = 100.0
HPS_ARCHITECTURE = 'ViT-H-14'
"""Name of HPSv2's network in open_clip."""
HPS_FILE = 'HPS_v2.1_compressed.pt'
REWARD_FILE = 'ImageReward.pt'
REWARD_MEAN, REWARD_STD = 0.16717362830052426, 1.0333394966054072
"""ImageReward's published mean and standard deviation of the rewards, with which a score is standardized."""
REWARD_TOKENS = 35
BERT = 'google-bert/bert-base-uncased', '86b5e0934494bd15c9632b12f734a8a67f723594'
"""Repository and commit of ImageReward's tokenizer."""
HEAD_WIDTH = 64
"""Width of each attention head in BLIP's image and text encoders, which their weights do not show."""


class ImageScore(nn.Module, ABC):
    """Frozen network that scores single images, most of them for a prompt."""

    @abstractmethod
    def scores(self, images: Sequence[Tensor], prompts: Sequence[str]) -> Tensor:
        """Return the score of each image for its prompt on the network's device, float32 [N].

        Args:
            images: Images, uint8 [3, H, W] each; sizes may differ.
            prompts: One prompt per image; prompts above the network's text length are truncated.
        """


class TextImageScore(ImageScore):
    """Scores how well images match their prompts: the scaled cosine similarity of their CLIP embeddings.

    `clip_score` is max(100 cos, 0) with `openai/clip-vit-large-patch14` (Hessel et al.,
    https://arxiv.org/abs/2104.08718, scaled as in torchmetrics). `pick_score` is cos times the learned scale of
    `yuvalkirstain/PickScore_v1` (Kirstain et al., https://arxiv.org/abs/2305.01569).

    Args:
        source: Folder or Hub repository of a CLIP model in transformers format, with its tokenizer and preprocessor.

    Raises:
        UserError: The model cannot be loaded.
        ExternalError: The Hub did not respond for several minutes.
    """

    def __init__(
        self, source: str, revision: str | None = None, *, kind: Literal['clip_score', 'pick_score'] = 'clip_score'
    ) -> None:
        super().__init__()
        self.kind = kind
        options: dict[str, Any] = {'subfolder': '', 'revision': revision}
        self.network = load_pretrained(CLIPModel, source, **options).eval().requires_grad_(False)
        self._tokenizer = load_pretrained(fast_tokenizer('CLIP'), source, **options)
        self._processor = load_pretrained(CLIPImageProcessor, source, **options)

    @torch.inference_mode()
    def image_embeds(self, images: Sequence[Tensor]) -> Tensor:
        """Return the projected embeddings of images uint8 [3, H, W], float32 [N, D], not normalized."""
        pixels = [self._processor(each, return_tensors='pt')['pixel_values'] for each in images]  # sizes may differ
        seen = cast(Any, self.network).get_image_features(pixel_values=torch.cat(pixels).to(self.network.device))
        return clip_features(seen).float()

    @torch.inference_mode()
    def text_embeds(self, texts: Sequence[str]) -> Tensor:
        """Return the projected embeddings of texts, float32 [N, D], not normalized."""
        network, tokenizer = cast(Any, self.network), cast(Any, self._tokenizer)  # their type hints are too narrow
        length = network.config.text_config.max_position_embeddings
        tokens = tokenizer(list(texts), padding=True, truncation=True, max_length=length, return_tensors='pt')
        return clip_features(network.get_text_features(**tokens.to(network.device))).float()

    @torch.inference_mode()
    def scores(self, images: Sequence[Tensor], prompts: Sequence[str]) -> Tensor:
        similarity = functional.cosine_similarity(self.image_embeds(images), self.text_embeds(prompts), dim=1)
        if self.kind == 'clip_score':
            return (CLIP_SCORE_SCALE * similarity).clamp(min=0)
        return self.network.logit_scale.exp().float() * similarity


class HumanPreferenceScore(ImageScore):
    """HPSv2: the cosine similarity in an OpenCLIP ViT-H/14 that was trained on people's choices between images.

    Wu et al., https://arxiv.org/abs/2306.09341. As in the authors' package, an image is resized so that its longer side
    has S pixels, and padded with black to a square.

    Args:
        source: The authors' file `HPS_v2.1_compressed.pt` or `HPS_v2_compressed.pt`, or a Hub repository
            `ORG/NAME@COMMIT` that has `HPS_v2.1_compressed.pt`.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        path = weights_file(source, HPS_FILE)
        with reading_weights(str(path), f'{HPS_FILE} of xswu/HPSv2'):
            network: Any = open_clip.create_model(HPS_ARCHITECTURE, pretrained=str(path), weights_only=True)
        self.network = network.eval().requires_grad_(False)
        self._tokenizer = open_clip.get_tokenizer(HPS_ARCHITECTURE)

    @torch.inference_mode()
    def scores(self, images: Sequence[Tensor], prompts: Sequence[str]) -> Tensor:
        device = self.network.logit_scale.device
        side = self.network.visual.image_size[0]
        pixels = torch.stack([_padded_square(each, side) for each in images])
        pixels = (pixels - torch.tensor(CLIP_MEAN).view(3, 1, 1)) / torch.tensor(CLIP_STD).view(3, 1, 1)
        seen = self.network.encode_image(pixels.to(device), normalize=True)
        read = self.network.encode_text(cast(Any, self._tokenizer)(list(prompts)).to(device), normalize=True)
        return (seen * read).sum(dim=1).float()


class ImageReward(ImageScore):
    """ImageReward: BLIP reads the prompt while it attends to the image, and a head maps the first token to a score.

    Xu et al., https://arxiv.org/abs/2304.05977. The score is standardized over the authors' data. The sizes of BLIP's
    encoders (a ViT-L/16 for 224 pixels and BERT base) are read from the weights.

    Args:
        source: The authors' file `ImageReward.pt`, or a repository that has this file, as `ORG/NAME@COMMIT`. BERT's
            tokenizer is read from a `vocab.txt` beside the file, or else from the Hub.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        path = weights_file(source, REWARD_FILE)
        tensors = read_tensors(path, f'{REWARD_FILE} of zai-org/ImageReward')
        where = f'{path}, which should be {REWARD_FILE},'
        vision, text = with_prefix(tensors, 'blip.visual_encoder.'), with_prefix(tensors, 'blip.text_encoder.')
        if 'pos_embed' not in vision or 'embeddings.word_embeddings.weight' not in text:
            raise UserError(f'{where} has no encoders of BLIP (blip.visual_encoder...); download it again')
        width, patch = vision['patch_embed.proj.weight'].shape[0], vision['patch_embed.proj.weight'].shape[-1]
        self.side = patch * math.isqrt(vision['pos_embed'].shape[1] - 1)
        self.vision = BlipVisionModel(
            BlipVisionConfig(
                hidden_size=width,
                intermediate_size=vision['blocks.0.mlp.fc1.weight'].shape[0],
                num_hidden_layers=_layers(vision, 'blocks'),
                num_attention_heads=width // HEAD_WIDTH,
                image_size=self.side,
                patch_size=patch,
                layer_norm_eps=1e-6,
            )
        )
        vocabulary, text_width = text['embeddings.word_embeddings.weight'].shape
        self.text = BlipTextModel(
            BlipTextConfig(
                vocab_size=vocabulary,
                hidden_size=text_width,
                encoder_hidden_size=width,
                intermediate_size=text['encoder.layer.0.intermediate.dense.weight'].shape[0],
                num_hidden_layers=_layers(text, 'encoder.layer'),
                num_attention_heads=text_width // HEAD_WIDTH,
                max_position_embeddings=text['embeddings.position_embeddings.weight'].shape[0],
            ),
            add_pooling_layer=False,
        )
        text.pop('embeddings.position_ids', None)
        with reading_weights(where, REWARD_FILE):
            self.vision.load_state_dict({_vision_name(name): tensor for name, tensor in vision.items()})
            self.text.load_state_dict(text)
        self.head = _linear_layers(with_prefix(tensors, 'mlp.'), text_width, where)
        beside = path.parent / 'vocab.txt'
        tokenizer, revision = (str(path.parent), None) if beside.is_file() else BERT
        self._tokenizer = load_pretrained(fast_tokenizer('Bert'), tokenizer, subfolder='', revision=revision)
        size = {'height': self.side, 'width': self.side}
        self._processor = CLIPImageProcessor(size={'shortest_edge': self.side}, crop_size=size)
        self.eval().requires_grad_(False)

    @torch.inference_mode()
    def scores(self, images: Sequence[Tensor], prompts: Sequence[str]) -> Tensor:
        device = self.vision.device
        pixels = [cast(Any, self._processor)(each, return_tensors='pt')['pixel_values'] for each in images]
        seen = self.vision(pixel_values=torch.cat(pixels).to(device)).last_hidden_state
        tokens = cast(Any, self._tokenizer)(
            list(prompts), padding='max_length', truncation=True, max_length=REWARD_TOKENS, return_tensors='pt'
        ).to(device)
        read = self.text(tokens.input_ids, attention_mask=tokens.attention_mask, encoder_hidden_states=seen)
        return (self.head(read.last_hidden_state[:, 0].float())[:, 0] - REWARD_MEAN) / REWARD_STD


class AestheticScore(ImageScore):
    """LAION's aesthetic predictor: a linear head on the normalized CLIP ViT-L/14 embedding; it does not read prompts.

    Source: https://github.com/christophschuhmann/improved-aesthetic-predictor. Scores are between about 1 and 10.

    Args:
        source: The authors' file `sac+logos+ava1-l14-linearMSE.pth`.
        clip: CLIP ViT-L/14.
    """

    def __init__(self, source: str, clip: TextImageScore) -> None:
        super().__init__()
        tensors = read_tensors(Path(source), 'sac+logos+ava1-l14-linearMSE.pth of its authors')
        width = cast(int, clip.network.config.projection_dim)
        self.head = _linear_layers(tensors, width, source).requires_grad_(False)
        self.clip = clip

    @torch.inference_mode()
    def scores(self, images: Sequence[Tensor], prompts: Sequence[str]) -> Tensor:
        return self.head(functional.normalize(self.clip.image_embeds(images), dim=1))[:, 0]


def split_source(source: str) -> tuple[str, str | None]:
    """Return the folder, or the repository and the commit, of a source; UserError if it is neither."""
    if Path(source).is_dir():
        return source, None
    repository, _, revision = source.partition('@')
    if not COMMIT.fullmatch(revision):
        raise UserError(
            f'{source} is neither a folder nor a repository with a commit, ORG/NAME@COMMIT of 40 hex digits; '
            'pinning it keeps the metric comparable'
        )
    return repository, revision


def weights_file(source: str, name: str) -> Path:
    """Return the path of a local file, or of the file `name` in a folder or a repository `ORG/NAME@COMMIT`."""
    if Path(source).is_file():
        return Path(source)
    repository, revision = split_source(source)
    return Path(source, name) if revision is None else fetch_file(repository, name, revision=revision)


def read_tensors(path: Path, weights: str) -> dict[str, Tensor]:
    """Return the tensors in a file; if it has no tensors, raise UserError with the advice to download `weights`."""
    with reading_weights(str(path), weights):
        found = load_file(path) if path.suffix == '.safetensors' else torch.load(path, 'cpu', weights_only=True)
        if not isinstance(found, dict):
            raise ValueError(f'it has a {type(found).__name__}')
        return found


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}


def _layers(tensors: Mapping[str, Tensor], prefix: str) -> int:
    """Return the number of layers whose tensors are named PREFIX.0..., PREFIX.1..., and so on."""
    return 1 + max(int(found[1]) for name in tensors if (found := re.match(rf'{re.escape(prefix)}\.(\d+)\.', name)))


def _vision_name(name: str) -> str:
    """Convert a tensor's name in the BLIP authors' image encoder to its name in transformers."""
    for ours, theirs in {
        'embeddings.class_embedding': r'^cls_token$',
        'embeddings.position_embedding': r'^pos_embed$',
        'embeddings.patch_embedding.': r'^patch_embed\.proj\.',
        'post_layernorm.': r'^norm\.',
        'encoder.layers.': r'^blocks\.',
        '.layer_norm': r'\.norm(?=\d\.)',
        '.self_attn.projection.': r'\.attn\.proj\.',
        '.self_attn.': r'\.attn\.',
    }.items():
        name = re.sub(theirs, ours, name)
    return name


def _linear_layers(tensors: Mapping[str, Tensor], width: int, where: str) -> nn.Sequential:
    """Return a score head's linear layers, `layers.0`, `layers.2` and so on; the layers between them are dropouts.

    Raises:
        UserError: The tensors are not such layers from `width` features to one score.
    """
    numbers = sorted(int(found[1]) for name in tensors if (found := re.fullmatch(r'layers\.(\d+)\.weight', name)))
    layers = nn.Sequential()
    for number in numbers:
        weight, bias = (tensors.get(f'layers.{number}.{part}') for part in ('weight', 'bias'))
        if weight is None or bias is None or weight.ndim != 2 or weight.shape[1] != width:
            break
        layer = nn.Linear(width, width := weight.shape[0])
        layer.load_state_dict({'weight': weight, 'bias': bias})
        layers.append(layer)
    if not numbers or len(layers) < len(numbers) or width != 1:
        raise UserError(f'{where} has no linear layers (layers.0.weight, ...) from the features to one score')
    return layers


def _padded_square(image: Tensor, side: int) -> Tensor:
    """Resize an image uint8 [3, H, W] to fit into a square and pad it with black; pixels from 0 to 1 [3, S, S]."""
    scale = side / max(image.shape[1:])
    height, width = (max(1, round(length * scale)) for length in image.shape[1:])
    pixels = image[None].float() / 255
    if scale != 1:
        pixels = functional.interpolate(pixels, (height, width), mode='bicubic', antialias=True)
    left, top = (side - width) // 2, (side - height) // 2
    return functional.pad(pixels[0], (left, side - width - left, top, side - height - top))
