"""Feature networks of image metrics with random weights, saved as their authors publish them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPTextConfig,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    Dinov2Config,
    Dinov2Model,
)

from diffusion.models.pretrained import clip_tokenizer

SMALL: dict[str, Any] = {'hidden_size': 16, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'intermediate_size': 32}


def write_inception(path: Path) -> Path:
    torch.manual_seed(0)
    # The class needs a file even to be built.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('torch_fidelity.feature_extractor_inceptionv3.load_state_dict_from_url', lambda *_, **__: {})
        patch.setattr(FeatureExtractorInceptionV3, 'load_state_dict', lambda *_, **__: None)
        network = FeatureExtractorInceptionV3('inception', ['2048'])
    torch.save(network.state_dict(), path)
    return path


def write_clip_vision(folder: Path) -> Path:
    torch.manual_seed(1)
    config = CLIPVisionConfig(**SMALL, image_size=28, patch_size=14, projection_dim=8)
    CLIPVisionModelWithProjection(config).save_pretrained(folder)
    return folder


def write_clip(folder: Path) -> Path:
    torch.manual_seed(2)
    tokenizer = clip_tokenizer()
    size = len(tokenizer)
    text = CLIPTextConfig(**SMALL, vocab_size=size, eos_token_id=size - 1, projection_dim=8)
    vision = CLIPVisionConfig(**SMALL, image_size=28, patch_size=14, projection_dim=8)
    config = CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8)
    CLIPModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessor(size={'shortest_edge': 28}, crop_size={'height': 28, 'width': 28}).save_pretrained(folder)
    return folder


def write_dino(folder: Path, *, seed: int = 3) -> Path:
    torch.manual_seed(seed)
    Dinov2Model(Dinov2Config(**SMALL, image_size=56, patch_size=14)).save_pretrained(folder)
    return folder
