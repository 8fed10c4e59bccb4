"""Feature networks of image metrics with random weights, saved as their authors publish them."""

import json
import re
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
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
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    SwinConfig,
)

from diffusion.compatibility.transformers_versions import fast_tokenizer
from diffusion.models.pretrained import clip_tokenizer

QWEN_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ content['text'] }}"
    '{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)
"""Chat template of Qwen2-VL-7B-Instruct, for text and images."""
SMALL: dict[str, Any] = {'hidden_size': 16, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'intermediate_size': 32}


class Harmful:
    """Object whose pickle writes a file `harmed` when it is loaded without care."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path('harmed'),))


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


def write_dino(folder: Path) -> Path:
    torch.manual_seed(3)
    Dinov2Model(Dinov2Config(**SMALL, image_size=56, patch_size=14)).save_pretrained(folder)
    return folder


def write_mask2former(folder: Path, *, labels: int = 80) -> Path:
    """Write a Mask2Former that is certain of the classes of its queries, so that it finds objects in any image."""
    torch.manual_seed(6)
    backbone: dict[str, Any] = {
        **{'embed_dim': 8, 'depths': [1, 1, 1, 1], 'num_heads': [1, 1, 2, 2], 'window_size': 2, 'image_size': 32},
        'out_features': ['stage1', 'stage2', 'stage3', 'stage4'],
    }
    sizes: dict[str, Any] = {
        **{'feature_size': 32, 'mask_feature_size': 32, 'hidden_dim': 32, 'num_attention_heads': 2, 'num_queries': 12},
        **{'encoder_layers': 1, 'decoder_layers': 2, 'dim_feedforward': 32, 'encoder_feedforward_dim': 32},
        'num_labels': labels,
    }
    network = Mask2FormerForUniversalSegmentation(Mask2FormerConfig(backbone_config=SwinConfig(**backbone), **sizes))
    with torch.no_grad():
        network.class_predictor.weight *= 100
        network.class_predictor.bias[-1] = -1000
    network.save_pretrained(folder)
    return folder


def write_open_clip(folder: Path) -> tuple[Path, Path]:
    """Write the configuration of a small CLIP of open_clip, and a file of its weights as HPSv2's authors publish it."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(7)
    vision: Any = {'image_size': 28, 'layers': 2, 'width': 16, 'head_width': 8, 'patch_size': 14}
    text: Any = {'context_length': 77, 'vocab_size': 49408, 'width': 16, 'heads': 2, 'layers': 2}
    config, weights = folder / 'tiny-hps.json', folder / 'HPS_v2.1_compressed.pt'
    config.write_text(json.dumps({'embed_dim': 8, 'vision_cfg': vision, 'text_cfg': text}))
    open_clip.add_model_config(config)
    torch.save({'state_dict': open_clip.CLIP(8, vision, text).state_dict()}, weights)
    return config, weights


def write_image_reward(folder: Path) -> Path:
    """Write a small ImageReward with BERT's tokenizer beside it; tensors are named as in the authors' file."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'a', 'red', 'cube', 'seven', 'duck', '##s']
    (folder / 'vocab.txt').write_text('\n'.join(words) + '\n')
    width, vision, text = 128, 'blip.visual_encoder', 'blip.text_encoder'
    shapes: dict[str, list[int]] = {
        **{f'{vision}.cls_token': [1, 1, width], f'{vision}.pos_embed': [1, 17, width]},
        **_layer(f'{vision}.patch_embed.proj', width, 3, 4, 4),
        **_layer(f'{vision}.norm', width),
        f'{text}.embeddings.word_embeddings.weight': [len(words) + 2, width],
        f'{text}.embeddings.position_embeddings.weight': [40, width],
        **_layer(f'{text}.embeddings.LayerNorm', width),
        'blip.text_proj.weight': [8, width],
    }
    for block in (f'{vision}.blocks.{number}' for number in range(2)):
        for name, sizes in {'attn.qkv': (384, width), 'attn.proj': (width, width)}.items():
            shapes |= _layer(f'{block}.{name}', *sizes)
        shapes |= _layer(f'{block}.mlp.fc1', 96, width) | _layer(f'{block}.mlp.fc2', width, 96)
        shapes |= _layer(f'{block}.norm1', width) | _layer(f'{block}.norm2', width)
    for block in (f'{text}.encoder.layer.{number}' for number in range(2)):
        for attention in (f'{block}.attention', f'{block}.crossattention'):
            for name in ('self.query', 'self.key', 'self.value', 'output.dense'):
                shapes |= _layer(f'{attention}.{name}', width, width)
            shapes |= _layer(f'{attention}.output.LayerNorm', width)
        shapes |= _layer(f'{block}.intermediate.dense', 96, width) | _layer(f'{block}.output.dense', width, 96)
        shapes |= _layer(f'{block}.output.LayerNorm', width)
    generator = torch.Generator().manual_seed(8)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    tensors |= {f'{text}.embeddings.position_ids': torch.arange(40)[None]}
    torch.save(tensors | {f'mlp.{name}': each for name, each in head_tensors(width).items()}, folder / 'ImageReward.pt')
    return folder / 'ImageReward.pt'


def write_hpsv3(folder: Path) -> tuple[Path, Path]:
    """Write the folder of a small Qwen2-VL without weights, and a small HPSv3 with the names of the authors' file."""
    base, file = folder / 'qwen2-vl', folder / 'HPSv3.safetensors'
    special = ['<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|vision_start|>', '<|vision_end|>', '<|image_pad|>']
    vocabulary = {each: number for number, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast: Any = fast_tokenizer('Qwen2')(tokenizer_object=backend, additional_special_tokens=special[1:])
    fast.chat_template = QWEN_TEMPLATE
    fast.save_pretrained(base)
    Qwen2VLImageProcessor().save_pretrained(base)
    first = len(vocabulary)
    config = {
        **{'model_type': 'qwen2_vl', 'hidden_size': 32, 'intermediate_size': 48, 'num_hidden_layers': 2},
        **{'num_attention_heads': 2, 'num_key_value_heads': 1, 'rope_theta': 1e6, 'tie_word_embeddings': False},
        **{'vocab_size': 1000, 'image_token_id': fast.convert_tokens_to_ids('<|image_pad|>'), 'bos_token_id': first},
        **{'eos_token_id': first, 'rope_scaling': {'type': 'mrope', 'mrope_section': [2, 3, 3]}},
        'vision_config': {'depth': 2, 'embed_dim': 32, 'hidden_size': 32, 'num_heads': 2, 'mlp_ratio': 2},
    }
    (base / 'config.json').write_text(json.dumps(config))
    torch.manual_seed(10)
    network = Qwen2VLForConditionalGeneration(Qwen2VLConfig.from_dict({**config, 'vocab_size': len(fast) + 1}))
    tensors = {
        re.sub('^model.(language_model|visual)', lambda found: {'visual': 'visual'}.get(found[1], 'model'), name): each
        for name, each in network.state_dict().items()
    }
    sizes = {0: (1024, 32), 3: (16, 1024), 5: (2, 16)}
    shapes = [_layer(f'rm_head.{number}', after, before) for number, (after, before) in sizes.items()]
    tensors |= {name: torch.empty(size) for each in shapes for name, size in each.items()}
    scaled = {name: (torch.randn(each.shape) * 0.3 + ('norm' in name)) for name, each in tensors.items()}
    save_file({name: each if 'rm_head' in name else each.bfloat16() for name, each in scaled.items()}, file)
    return base, file


def _layer(name: str, *sizes: int) -> dict[str, list[int]]:
    return {f'{name}.weight': [*sizes], f'{name}.bias': [*sizes[:1]]}


def head_tensors(width: int) -> dict[str, torch.Tensor]:
    """Return the linear layers of the heads of ImageReward and the aesthetic predictor; the widths are small."""
    generator = torch.Generator().manual_seed(9)
    sizes = {0: (width, 16), 2: (16, 12), 4: (12, 8), 6: (8, 4), 7: (4, 1)}
    shapes = [_layer(f'layers.{number}', after, before) for number, (before, after) in sizes.items()]
    return {name: torch.randn(size, generator=generator) for each in shapes for name, size in each.items()}
