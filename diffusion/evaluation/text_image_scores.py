"""Scores of how well an image matches its prompt, by a CLIP model: CLIP score and PickScore."""

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPImageProcessor, CLIPModel

from diffusion.compatibility.transformers_versions import clip_features, fast_tokenizer
from diffusion.models.pretrained import load_pretrained

CLIP_SCORE_SCALE = 100.0


class TextImageScore(nn.Module):
    """Score of images for their prompts: the cosine similarity of their CLIP embeddings, scaled.

    `clip_score` is max(100 cos, 0) with `openai/clip-vit-large-patch14` (Hessel et al., https://arxiv.org/abs/2104.08718,
    in the scale of torchmetrics). `pick_score` is cos times the model's learned scale with
    `yuvalkirstain/PickScore_v1` (Kirstain et al., https://arxiv.org/abs/2305.01569).

    Args:
        source: Folder, or repository on the Hub, of a CLIP model of transformers with its tokenizer and preprocessor.
        revision: Commit of the repository.

    Raises:
        UserError: The model cannot be loaded.
        ExternalError: The Hub did not answer for minutes.
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
    def scores(self, images: Sequence[Tensor], prompts: Sequence[str]) -> Tensor:
        """Return the score of each image for its prompt on the network's device, float32 [N].

        Args:
            images: uint8 [3, H, W] each; they can differ in size.
            prompts: One per image; longer ones than the network's text length are truncated.
        """
        device = self.network.logit_scale.device
        network, tokenizer = cast(Any, self.network), cast(Any, self._tokenizer)  # their annotations are too narrow
        length = network.config.text_config.max_position_embeddings
        text = tokenizer(list(prompts), padding=True, truncation=True, max_length=length, return_tensors='pt')
        pixels = [self._processor(each, return_tensors='pt')['pixel_values'] for each in images]  # of any sizes
        seen = network.get_image_features(pixel_values=torch.cat(pixels).to(device))
        read = network.get_text_features(**text.to(device))
        similarity = functional.cosine_similarity(clip_features(seen).float(), clip_features(read).float(), dim=1)
        if self.kind == 'clip_score':
            return (CLIP_SCORE_SCALE * similarity).clamp(min=0)
        return self.network.logit_scale.exp().float() * similarity
