"""GenEval with networks from transformers: detects the objects in images and their colors, and computes the scores.

The authors use Mask2Former from MMDetection and CLIP from open_clip; docs/geneval.md lists the differences. The
rules are in `geneval_rules`. Shapes: H W image size, Q queries of the detector, K classes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import cv2
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from transformers import Mask2FormerForUniversalSegmentation

from diffusion.errors import UserError
from diffusion.evaluation.comparison_result import BenchmarkScore, clustered_proportion
from diffusion.evaluation.generated_images import kept_answer
from diffusion.evaluation.geneval_rules import CLASSES, COLORS, MAX_OBJECTS, MIN_CONFIDENCE, failure, kept_objects
from diffusion.evaluation.image_scores import TextImageScore
from diffusion.evaluation.prompts import Prompt, categories
from diffusion.models.frozen_parts import weights_hash
from diffusion.models.pretrained import load_pretrained
from diffusion.models.representation_alignment import IMAGENET_MEAN, IMAGENET_STD
from diffusion.storage.atomic import write_atomically

ANSWER_SUFFIX = '.geneval.json'
"""Suffix of the JSON file beside each image that has the objects found in the image."""
SHORT_SIDE, LONG_SIDE = 800, 1333
"""Maximum short and long side in pixels of an image for the detector; it is scaled until one is reached."""
SIZE_STEP = 32
"""Height and width are padded to multiples of this number of pixels."""
MAX_DETECTIONS = 100
BACKGROUND = '#999'
"""Color of the pixels around an object when its color is classified."""
COLOR_TEMPLATES = ('a photo of a {color} {name}', 'a photo of a {color}-colored {name}', 'a photo of a {color} object')


@dataclass(frozen=True)
class Detection:
    """Object in an image: its class, left, top, right and bottom edge in pixels, confidence, and mask bool [H, W]."""

    name: str
    box: tuple[float, float, float, float]
    confidence: float
    mask: Tensor


class Detector(Protocol):
    def detect(self, image: Tensor) -> list[Detection]:
        """Return the objects in an image, uint8 [3, H, W]."""
        ...


class Classifier(Protocol):
    def colors(self, image: Tensor, found: Sequence[Detection], name: str) -> list[str]:
        """Return one of `COLORS` for each object found in an image, uint8 [3, H, W]; `name` is their class."""
        ...


class ObjectDetector(nn.Module):
    """Mask2Former for COCO instances (Cheng et al., https://arxiv.org/abs/2112.01527), with MMDetection's processing.

    OpenCV resizes an image bilinearly, as described at `SHORT_SIDE`; transformers' own image processor would make it
    384 x 384 pixels. An object's confidence is the probability of its class times the mean probability inside its mask.

    Args:
        source: Folder or Hub repository in transformers format; the benchmark's detector has the backbone Swin-S:
            `facebook/mask2former-swin-small-coco-instance`.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, source: str, revision: str | None = None) -> None:
        super().__init__()
        network = load_pretrained(Mask2FormerForUniversalSegmentation, source, subfolder='', revision=revision)
        if (labels := network.config.num_labels) != len(CLASSES):
            raise UserError(f'{source}: has {labels} classes instead of the {len(CLASSES)} of COCO instances')
        self.network = network.eval().requires_grad_(False)
        self.register_buffer('mean', torch.tensor(IMAGENET_MEAN).view(3, 1, 1) * 255, persistent=False)
        self.register_buffer('std', torch.tensor(IMAGENET_STD).view(3, 1, 1) * 255, persistent=False)

    @torch.inference_mode()
    def detect(self, image: Tensor) -> list[Detection]:
        """Return the objects in an image uint8 [3, H, W] whose confidence exceeds `MIN_CONFIDENCE`."""
        height, width = image.shape[1:]
        scale = min(SHORT_SIDE / min(height, width), LONG_SIDE / max(height, width))
        size = int(height * scale + 0.5), int(width * scale + 0.5)
        resized = cv2.resize(image.permute(1, 2, 0).numpy(), size[::-1], interpolation=cv2.INTER_LINEAR)
        pixels = torch.from_numpy(resized).permute(2, 0, 1)[None].to(self.mean.device)
        pixels = functional.pad((pixels - self.mean) / self.std, (0, -size[1] % SIZE_STEP, 0, -size[0] % SIZE_STEP))
        output = cast(Any, self.network)(pixel_values=pixels)
        probabilities = output.class_queries_logits[0].float().softmax(dim=-1)[:, :-1]  # [Q, K], without "no object"
        values, order = probabilities.flatten().topk(min(MAX_DETECTIONS, probabilities.numel()))
        # Drop unlikely classes before computing masks: an object's confidence is at most its class's probability.
        values, order = values[values > MIN_CONFIDENCE], order[values > MIN_CONFIDENCE]
        if not len(order):
            return []
        masks = output.masks_queries_logits[0, order // len(CLASSES)].float()[None]
        masks = functional.interpolate(masks, tuple(pixels.shape[2:]), mode='bilinear')[..., : size[0], : size[1]]
        masks = functional.interpolate(masks, (height, width), mode='bilinear')[0]
        inside = masks > 0
        certainty = (masks.sigmoid() * inside).sum(dim=(1, 2)) / (inside.sum(dim=(1, 2)) + 1e-6)
        return [
            Detection(CLASSES[label], _box(mask), confidence, mask)
            for label, confidence, mask in zip(
                (order % len(CLASSES)).tolist(), (values * certainty).tolist(), inside.cpu(), strict=True
            )
            if confidence > MIN_CONFIDENCE
        ]


class ColorClassifier(nn.Module):
    """Zero-shot classifier of colors: compares CLIP embeddings of the objects' crops with those of texts."""

    def __init__(self, clip: TextImageScore) -> None:
        super().__init__()
        self.clip = clip
        self._texts: dict[str, Tensor] = {}

    @torch.inference_mode()
    def colors(self, image: Tensor, found: Sequence[Detection], name: str) -> list[str]:
        if not found:
            return []
        crops = self.clip.image_embeds([crop(image, each) for each in found])
        similarities = functional.normalize(crops, dim=1) @ self._embeds(name).T
        return [COLORS[index] for index in similarities.argmax(dim=1).tolist()]

    def _embeds(self, name: str) -> Tensor:
        """Return the normalized mean embedding of the texts about each color of a class, [len(COLORS), D]."""
        if name not in self._texts:
            texts = [template.format(color=color, name=name) for color in COLORS for template in COLOR_TEMPLATES]
            embeds = functional.normalize(self.clip.text_embeds(texts), dim=1)
            means = embeds.view(len(COLORS), len(COLOR_TEMPLATES), -1).mean(dim=1)
            self._texts[name] = functional.normalize(means, dim=1)
        return self._texts[name]


def crop(image: Tensor, found: Detection) -> Tensor:
    """Return the box of an object in an image uint8 [3, H, W], with gray pixels outside of its mask."""
    pixels = Image.fromarray(image.permute(1, 2, 0).numpy())
    masked = Image.composite(pixels, Image.new('RGB', pixels.size, BACKGROUND), Image.fromarray(found.mask.numpy()))
    left, top, right, bottom = (int(edge) for edge in found.box)
    return torch.from_numpy(np.array(masked.crop((left, top, right, bottom)))).permute(2, 0, 1)


class GenEval(nn.Module):
    """Decides whether each image fulfills its prompt; saves the objects found in an image to a file beside it."""

    def __init__(self, detector: Detector, classifier: Classifier) -> None:
        super().__init__()
        self.detector, self.classifier = detector, classifier
        self._hash = weights_hash(self)

    def scores(self, images: Sequence[Tensor], prompts: Sequence[Mapping[str, Any]], files: Sequence[Path]) -> Tensor:
        """Return 1 for each image that fulfills its prompt and 0 for the others, float32 [N].

        If a file beside an image has objects for the same prompt and networks, the networks are not run again.

        Args:
            images: Images, uint8 [3, H, W] each; sizes may differ.
            prompts: Lines of GenEval's `evaluation_metadata.jsonl`, one per image.
            files: Files of the images; the answer for `000000.png` is kept as `000000.geneval.json`.
        """
        results = []
        for image, prompt, file in zip(images, prompts, files, strict=True):
            path = file.with_suffix(ANSWER_SUFFIX)
            about = {'prompt': dict(prompt), 'networks': self._hash}
            kept = kept_answer(path, about)
            answer = self._found(image, prompt) if kept is None else kept
            reason = failure(prompt, answer['objects'], answer['colors'])
            if kept is None:
                write_atomically(path, json.dumps(about | {'failure': reason} | answer) + '\n')
            results.append(reason is None)
        return torch.tensor(results, dtype=torch.float32)

    def _found(self, image: Tensor, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """Return the objects in an image by class, and their colors for classes to which the prompt gives a color."""
        detections: dict[str, list[Detection]] = {}
        for each in sorted(self.detector.detect(image), key=lambda each: -each.confidence):
            detections.setdefault(each.name, []).append(each)
        objects = {
            name: [[*each.box, each.confidence] for each in found[:MAX_OBJECTS]] for name, found in detections.items()
        }
        kept, colors = kept_objects(objects, prompt['tag']), {}
        for wanted in prompt['include']:
            if 'color' in wanted:
                name = wanted['class']
                counting = detections.get(name, [])[: min(len(kept.get(name, [])), wanted['count'])]
                colors[name] = self.classifier.colors(image, counting, name)
        return {'objects': objects, 'colors': colors}


def geneval_score(correct: Tensor, prompts: Sequence[Prompt]) -> BenchmarkScore:
    """Return the mean over prompt categories of the fraction of images that are `correct`, 1 or 0 per image [N].

    The images of a prompt are correlated, so the intervals are clustered by prompt. A category's interval is Wilson's
    for as many independent images as give this variance. The mean's interval combines those of the categories by the
    method of variance estimates recovery (Zou and Donner 2008, https://doi.org/10.1002/sim.3095).
    """
    kinds = {}
    for kind, indices in categories(prompts).items():
        texts = [prompts[index].text for index in indices]
        kinds[kind] = clustered_proportion(correct[indices].double().numpy(), np.ones(len(indices)), texts)
    count, score = len(kinds), math.fsum(mean for mean, _ in kinds.values()) / len(kinds)
    below, above = (math.hypot(*(mean - limits[end] for mean, limits in kinds.values())) / count for end in (0, 1))
    return BenchmarkScore(score, (score - below, score + above), kinds)


def _box(mask: Tensor) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom edge of a mask bool [H, W] that is not empty."""
    rows, columns = (mask.any(dim=dim).nonzero()[:, 0].tolist() for dim in (1, 0))
    return columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
