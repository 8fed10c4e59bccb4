"""HPSv3: Qwen2-VL reads an image, its prompt and criteria, and a head maps one token to the score."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from diffusion.compatibility.transformers_versions import fast_tokenizer
from diffusion.errors import UserError
from diffusion.evaluation.image_scores import ImageScore, read_tensors, weights_file, with_prefix
from diffusion.models.hub_errors import reading_weights
from diffusion.models.pretrained import load_pretrained, read_config

PROMPT = Path(__file__).with_name('hpsv3_prompt.txt')
"""The authors' prompt text, from their package hpsv3 1.0.0, under the MIT license; Copyright (c) 2024 HPSv3 Team."""
REWARD = '<|Reward|>'
"""Token in the prompt text whose last hidden state is the head's input."""
PIXELS = 256 * 28 * 28
"""Images are resized to about this number of pixels, in steps of 28."""


class HPSv3(ImageScore):
    """HPSv3 (Ma et al., https://arxiv.org/abs/2508.03789): mean of the predicted distribution of human preference.

    As in the authors' package, the network including its rotary frequencies is in bfloat16 and the head in float32. All
    tokens have positions 0, 1, 2, ...; image tokens do not have separate positions for height and width.

    Args:
        source: The authors' file `HPSv3.safetensors`, or a repository that has this file, as `ORG/NAME@COMMIT`.
        base: Folder or repository of Qwen2-VL-7B-Instruct; only its configuration, tokenizer and image processor are
            read.
        revision: Commit of the repository `base`.
    """

    def __init__(self, source: str, base: str, revision: str | None = None) -> None:
        super().__init__()
        path = weights_file(source, 'HPSv3.safetensors')
        tensors = read_tensors(path, 'HPSv3.safetensors of MizzenAI/HPSv3')
        head = with_prefix(tensors, 'rm_head.')
        embeddings = [each for name, each in tensors.items() if name.endswith('embed_tokens.weight')]
        if not embeddings or '0.weight' not in head:
            raise UserError(f'{path}: has no network and head of HPSv3 (rm_head.0.weight, ...); download it again')
        rows, width = embeddings[0].shape
        content = read_config(Qwen2VLForConditionalGeneration, base, subfolder='', revision=revision)
        config = Qwen2VLConfig.from_dict({**content, 'vocab_size': rows})
        self.head = nn.Sequential(
            *(nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2))
        )
        with reading_weights(f'{path} with the configuration of {base}', 'HPSv3.safetensors of MizzenAI/HPSv3'):
            self.head.load_state_dict(head)
            rest: Any = {name: each for name, each in tensors.items() if not name.startswith('rm_head.')}
            loader: Any = Qwen2VLForConditionalGeneration
            network, found = loader.from_pretrained(
                None, config=config, state_dict=rest, dtype=torch.bfloat16, output_loading_info=True
            )
            if wrong := [*found['missing_keys'], *found['mismatched_keys']]:
                raise ValueError(f'{len(wrong)} tensors are missing or of other sizes, such as {wrong[0]}')
        self.network = network.to(torch.bfloat16).model
        self.eval().requires_grad_(False)
        self._tokenizer: Any = load_pretrained(fast_tokenizer('Qwen2'), base, subfolder='', revision=revision)
        self._tokenizer.add_tokens([REWARD], special_tokens=True)
        self._processor: Any = load_pretrained(Qwen2VLImageProcessor, base, subfolder='', revision=revision)

    @torch.inference_mode()
    def scores(self, images: Sequence[Tensor], prompts: Sequence[str]) -> Tensor:
        return torch.stack([self._score(image, prompt) for image, prompt in zip(images, prompts, strict=True)])

    def _score(self, image: Tensor, prompt: str) -> Tensor:
        height, width = smart_resize(*image.shape[1:], min_pixels=PIXELS, max_pixels=PIXELS)
        resized = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((width, height), Image.Resampling.BICUBIC)
        pixels = self._processor(images=[resized], return_tensors='pt').to(self.network.device)
        request = PROMPT.read_text(encoding='utf-8').format(text_prompt=prompt)
        text = self._tokenizer.apply_chat_template(
            [{'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': request}]}],
            tokenize=False,
            add_generation_prompt=True,
        )
        text = text.replace('<|image_pad|>', '<|image_pad|>' * (height // 28 * width // 28), 1)
        ids = self._tokenizer(text, return_tensors='pt').input_ids.to(self.network.device)
        positions = torch.arange(ids.shape[1], device=ids.device).expand(3, 1, -1)
        states = self.network(input_ids=ids, position_ids=positions, **pixels, use_cache=False).last_hidden_state
        token = (ids[0] == self._tokenizer.convert_tokens_to_ids(REWARD)).nonzero()[-1, 0]
        return self.head(states[0, token].float())[0]
