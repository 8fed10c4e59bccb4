"""Column `clip_similarity` for `diffusion prepare --columns-from`: how well an image fits its first caption.

It is the cosine similarity of their embeddings by the CLIP model in the folder that CLIP_FOLDER names, which
`hf download openai/clip-vit-base-patch32 --local-dir clip` writes.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from transformers import CLIPModel, CLIPProcessor

torch.set_num_threads(1)  # each core has a process of its own
folder = os.environ['CLIP_FOLDER']
model = CLIPModel.from_pretrained(folder, local_files_only=True).eval()
processor: Any = CLIPProcessor.from_pretrained(folder, local_files_only=True)


@torch.inference_mode()
def columns(images: Sequence[Image.Image], captions: Sequence[Sequence[str]]) -> dict[str, torch.Tensor]:
    """Return the similarity of each image and its first caption, from -1 to 1."""
    texts = [each[0] for each in captions]
    inputs = processor(images=images, text=texts, padding=True, truncation=True, return_tensors='pt')
    embedded = model(**inputs)
    return {'clip_similarity': (embedded.image_embeds * embedded.text_embeds).sum(dim=1)}
