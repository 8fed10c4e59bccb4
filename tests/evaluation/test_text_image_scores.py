"""Scores of images by CLIP, PickScore, HPSv2, ImageReward and the aesthetic predictor against the published steps."""

import json
import math
import pickle
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from small_networks import Harmful, head_tensors, write_clip, write_hpsv3, write_image_reward, write_open_clip
from torch import Tensor
from torch.nn import functional
from torchvision.transforms import v2
from transformers import CLIPModel, CLIPProcessor, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from diffusion.compatibility.transformers_versions import clip_features, fast_tokenizer
from diffusion.errors import UserError
from diffusion.evaluation import image_scores
from diffusion.evaluation.hpsv3 import PROMPT, HPSv3
from diffusion.evaluation.metrics import build_network, build_networks

PROMPTS = ['a red cube', 'seven ducks ' * 60, '']


@pytest.fixture(scope='module')
def clip(tmp_path_factory) -> str:
    return str(write_clip(tmp_path_factory.mktemp('clip')))


def images() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(40, 56), (28, 28), (90, 31)]
    return [torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator) for size in sizes]


def loaded(clip: str) -> tuple[Any, Any]:  # transformers annotates their methods too narrowly
    return CLIPModel.from_pretrained(clip), CLIPProcessor.from_pretrained(clip)


def test_clip_score_is_the_scaled_cosine(clip):
    model, processor = loaded(clip)
    network: Any = build_network('clip_score', {'clip_score': clip})
    scores = network.scores(images(), PROMPTS)
    for image, prompt, score in zip(images(), PROMPTS, scores, strict=True):
        short = prompt[:300]
        inputs = processor(images=image, text=short, return_tensors='pt')
        with torch.no_grad():
            cosine = model(**inputs).logits_per_image[0, 0] / model.logit_scale.exp()
        expected = (100 * cosine).clamp(min=0)
        found = network.scores([image], [short])
        torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
        if short == prompt:
            torch.testing.assert_close(score, expected, rtol=1e-5, atol=1e-5)


def test_pick_score_is_the_scaled_cosine(clip):
    model, processor = loaded(clip)
    network: Any = build_network('pick_score', {'pick_score': clip})
    for image, prompt in zip(images(), PROMPTS, strict=True):
        inputs = processor(
            text=[prompt], images=[image], return_tensors='pt', padding=True, truncation=True, max_length=77
        )
        output = model(**inputs)
        found = network.scores([image], [prompt])
        torch.testing.assert_close(found, output.logits_per_image[0], rtol=1e-4, atol=1e-4)


def test_hpsv2_is_the_cosine_of_the_padded_image(tmp_path, monkeypatch):
    config, weights = write_open_clip(tmp_path)
    monkeypatch.setattr(image_scores, 'HPS_ARCHITECTURE', config.stem)
    network: Any = build_network('hpsv2', {'hpsv2': str(tmp_path)})
    model: Any = open_clip.create_model(config.stem, pretrained=str(weights)).eval()
    tokenize: Any = open_clip.get_tokenizer(config.stem)
    normalize = v2.Normalize(image_scores.CLIP_MEAN, image_scores.CLIP_STD)
    expected = []
    # Of 40 x 56, 28 x 28 and 90 x 31 pixels, resized to fit into 28 x 28.
    for image, prompt, size in zip(images(), PROMPTS, [(20, 28), (28, 28), (28, 10)], strict=True):
        pixels = v2.functional.resize(image / 255, [*size], v2.InterpolationMode.BICUBIC, antialias=True)
        up, left = (28 - size[0]) // 2, (28 - size[1]) // 2
        pixels = functional.pad(pixels, (left, 28 - size[1] - left, up, 28 - size[0] - up))
        with torch.no_grad():
            seen, read, *_ = model(normalize(pixels)[None], tokenize([prompt]))
        expected.append((seen @ read.T)[0, 0])
    torch.testing.assert_close(network.scores(images(), PROMPTS), torch.stack(expected), rtol=1e-4, atol=1e-5)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    split = [each.unflatten(2, (2, 64)).transpose(1, 2) for each in (query, key, value)]
    return functional.scaled_dot_product_attention(*split, attn_mask=mask).transpose(1, 2).flatten(2)


def image_reward(tensors: dict[str, Tensor], pixels: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return ImageReward's first text feature [N, D], by the equations of BLIP."""

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, tensors[f'blip.{name}.weight'], tensors[f'blip.{name}.bias'])

    def norm(x: Tensor, name: str, eps: float) -> Tensor:
        return functional.layer_norm(x, [128], tensors[f'blip.{name}.weight'], tensors[f'blip.{name}.bias'], eps)

    patch = [tensors[f'blip.visual_encoder.patch_embed.proj.{part}'] for part in ('weight', 'bias')]
    patches = functional.conv2d(pixels, *patch, stride=4).flatten(2).transpose(1, 2)
    first = tensors['blip.visual_encoder.cls_token'].expand(len(pixels), -1, -1)
    x = torch.cat([first, patches], dim=1) + tensors['blip.visual_encoder.pos_embed']
    for block in ('visual_encoder.blocks.0', 'visual_encoder.blocks.1'):
        qkv = linear(norm(x, f'{block}.norm1', 1e-6), f'{block}.attn.qkv').chunk(3, dim=2)
        x = x + linear(attention(*qkv), f'{block}.attn.proj')
        hidden = functional.gelu(linear(norm(x, f'{block}.norm2', 1e-6), f'{block}.mlp.fc1'))
        x = x + linear(hidden, f'{block}.mlp.fc2')
    seen = norm(x, 'visual_encoder.norm', 1e-6)
    words, places = (tensors[f'blip.text_encoder.embeddings.{name}_embeddings.weight'] for name in ('word', 'position'))
    x = norm(words[tokens] + places[: tokens.shape[1]], 'text_encoder.embeddings.LayerNorm', 1e-12)
    for block in ('text_encoder.encoder.layer.0', 'text_encoder.encoder.layer.1'):
        for part, other, allowed in (('attention', None, mask[:, None, None].bool()), ('crossattention', seen, None)):
            parts = [f'{block}.{part}.self.{name}' for name in ('query', 'key', 'value')]
            key, value = (linear(x if other is None else other, name) for name in parts[1:])
            mixed = linear(attention(linear(x, parts[0]), key, value, allowed), f'{block}.{part}.output.dense')
            x = norm(mixed + x, f'{block}.{part}.output.LayerNorm', 1e-12)
        hidden = functional.gelu(linear(x, f'{block}.intermediate.dense'))
        x = norm(linear(hidden, f'{block}.output.dense') + x, f'{block}.output.LayerNorm', 1e-12)
    return x[:, 0]


def through(head: dict[str, Tensor], x: Tensor) -> Tensor:
    for number in (0, 2, 4, 6, 7):
        x = x @ head[f'layers.{number}.weight'].T + head[f'layers.{number}.bias']
    return x[:, 0]


def test_image_reward_equals_the_equations_of_blip(tmp_path):
    file = write_image_reward(tmp_path)
    tensors = torch.load(file)
    tokenizer: Any = fast_tokenizer('Bert').from_pretrained(tmp_path)
    prompts = ['a red cube', 'Seven ducks ' * 60, '']
    tokens = tokenizer(prompts, padding='max_length', truncation=True, max_length=35, return_tensors='pt')
    steps = [
        v2.Resize(16, v2.InterpolationMode.BICUBIC, antialias=True),
        v2.CenterCrop(16),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(image_scores.CLIP_MEAN, image_scores.CLIP_STD),
    ]
    pixels = torch.stack([v2.Compose(steps)(each) for each in images()])
    features = image_reward(tensors, pixels, tokens.input_ids, tokens.attention_mask)
    expected = (through(head_tensors(128), features) - 0.16717362830052426) / 1.0333394966054072
    assert expected.std() > 0.1
    network: Any = build_network('image_reward', {'image_reward': str(file)})
    torch.testing.assert_close(network.scores(images(), prompts), expected, rtol=1e-4, atol=1e-3)


def test_aesthetic_score_is_a_linear_head_on_the_normalized_embedding(clip, tmp_path):
    model, processor = loaded(clip)
    file = tmp_path / 'head.pth'
    torch.save(head_tensors(8), file)
    network: Any = build_network('aesthetic', {'aesthetic': str(file), 'clip_score': clip})
    for image in images():
        with torch.no_grad():
            embeds = clip_features(model.get_image_features(**processor(images=image, return_tensors='pt')))
        expected = through(head_tensors(8), embeds / embeds.norm())
        torch.testing.assert_close(network.scores([image], ['']), expected, rtol=1e-4, atol=1e-4)


def published_pixels(image: Tensor) -> tuple[Tensor, list[int]]:
    """Return Qwen2-VL's patches [P, 1176] of an image resized to 256 * 28 * 28 pixels, and their rows and columns."""
    height, width = image.shape[1:]
    beta = (height * width / (256 * 28 * 28)) ** 0.5
    rounded = round(height / 28) * 28 * (round(width / 28) * 28)
    step = math.floor if rounded > 256 * 28 * 28 else math.ceil
    height, width = step(height / beta / 28) * 28, step(width / beta / 28) * 28
    resized = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((width, height), Image.Resampling.BICUBIC)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (image_scores.CLIP_MEAN, image_scores.CLIP_STD))
    pixels = (torch.from_numpy(np.array(resized)).permute(2, 0, 1) / 255 - mean) / std
    parts = pixels.expand(2, -1, -1, -1).reshape(2, 3, height // 28, 2, 14, width // 28, 2, 14)
    return parts.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(-1, 1176), [height // 14, width // 14]


def test_hpsv3_follows_the_published_steps(tmp_path):
    """As in `Qwen2VLRewardModelBT.forward` of the authors' package: embeddings, image, language model, head, token."""
    base, file = write_hpsv3(tmp_path)
    found = build_network('hpsv3', {'hpsv3': str(tmp_path), 'qwen2_vl': str(base)})
    assert isinstance(found, HPSv3)
    text = PROMPT.read_text()
    assert sha256(text.encode()).hexdigest() == 'f6ee57479d4e9eee76b49c00dc962e1e696a5a2b3cc32cebd9b1fa76fe27502c'
    tensors = load_file(file)
    tokenizer: Any = fast_tokenizer('Qwen2').from_pretrained(base)
    tokenizer.add_tokens(['<|Reward|>'], special_tokens=True)
    rows = len(tensors['model.embed_tokens.weight'])
    config = Qwen2VLConfig.from_dict(json.loads((base / 'config.json').read_text()) | {'vocab_size': rows})
    model: Any = Qwen2VLForConditionalGeneration(config)
    model = model.to(torch.bfloat16).eval()
    model.load_state_dict(
        {
            f'model.{name}' if name.startswith('visual.') else re.sub(r'^model\.', 'model.language_model.', name): each
            for name, each in tensors.items()
            if 'rm_head' not in name
        }
    )
    head = {number: [tensors[f'rm_head.{number}.{part}'] for part in ('weight', 'bias')] for number in (0, 3, 5)}
    expected = []
    for image, prompt in zip(images(), PROMPTS, strict=True):
        pixels, (rows, columns) = published_pixels(image)
        pads = '<|image_pad|>' * (rows * columns // 4)
        ids = tokenizer(
            '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>'
            f'{pads}<|vision_end|>{text.replace("{text_prompt}", prompt)}<|im_end|>\n<|im_start|>assistant\n',
            return_tensors='pt',
        ).input_ids
        with torch.no_grad():
            seen = model.model.visual(pixels.bfloat16(), grid_thw=torch.tensor([[1, rows, columns]]))
            seen = getattr(seen, 'pooler_output', seen)
            embeds = model.model.language_model.embed_tokens(ids)
            embeds = embeds.masked_scatter((ids == config.image_token_id)[..., None], seen)
            states = model.model.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state.float()
        for number in head:
            states = functional.linear(states, *head[number])
            states = states.relu() if number != 5 else states
        expected.append(states[ids == tokenizer.convert_tokens_to_ids('<|Reward|>')][0, 0])
    scores = found.scores(images(), PROMPTS)
    torch.testing.assert_close(scores, torch.stack(expected), rtol=1e-3, atol=1e-3)


def test_wrong_weights_and_networks_without_a_source_are_refused(clip, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(image_scores, 'HPS_ARCHITECTURE', write_open_clip(tmp_path)[0].stem)
    other, code = {'layers.0.weight': torch.zeros(3, 9), 'layers.0.bias': torch.zeros(3)}, Path('code')
    torch.save(other, 'other')
    code.write_bytes(pickle.dumps(Harmful(), protocol=2))
    sources = {'clip_score': clip}
    for name, file, message in (
        ('aesthetic', 'none.pth', 'networks.aesthetic: none.pth does not exist; download'),
        ('aesthetic', 'other', 'other has no linear layers .* from the features to one score'),
        ('aesthetic', 'code', 'code (is not loaded, because it wants to run code|cannot be read)'),
        ('image_reward', 'other', 'has no encoders of BLIP'),
        ('image_reward', 'none.pt', 'none.pt is neither a folder nor a repository'),
        ('hpsv2', 'code', 'networks.hpsv2: code (is not loaded|cannot be read)'),
        ('hpsv3', 'other', r'has no network and head of HPSv3 \(rm_head'),
        ('geneval_hf', 'a/b', 'networks.geneval_hf: a/b is neither a folder nor a repository with a commit'),
        ('cmmd', 'openai/clip', 'neither a folder nor a repository with a commit'),
        ('clip_score', 'a/b@' + 'a' * 40, 'networks.clip_score: .*a/b'),
    ):
        with pytest.raises(UserError, match=message):
            build_network(name, sources | {name: file})
    assert not Path('harmed').exists()


def test_metrics_without_their_networks_can_be_left_out(clip):
    metrics, sources = ['fid', 'clip_score', 'recall', 'pick_score'], {'inception': 'gone.pth', 'clip_score': str(clip)}
    with pytest.raises(UserError) as caught:
        build_networks(metrics, sources)
    first, second, way_out = str(caught.value).split('\n  ')
    assert first.startswith('fid, recall cannot be computed: networks.inception: gone.pth: does not exist')
    assert first.endswith('--network inception=PATH')
    assert second.startswith('pick_score cannot be computed: networks.pick_score: has no default; set it to a folder')
    assert way_out == 'To compute the other metrics only: --metrics clip_score'
