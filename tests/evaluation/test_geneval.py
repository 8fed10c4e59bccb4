"""GenEval's rules against an independent implementation, and its networks against published steps."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import pytest
import torch
from golden import check_golden
from PIL import Image, ImageDraw
from scipy.stats import binomtest
from small_networks import write_clip, write_mask2former
from transformers import CLIPModel, CLIPProcessor, Mask2FormerForUniversalSegmentation

from diffusion.compatibility.transformers_versions import clip_features
from diffusion.errors import UserError
from diffusion.evaluation import geneval
from diffusion.evaluation.geneval import Detection, GenEval, ObjectDetector, crop, geneval_score
from diffusion.evaluation.geneval_rules import CLASSES, COLORS, check_prompt, kept_objects, relations
from diffusion.evaluation.metrics import build_network
from diffusion.evaluation.prompts import Prompt

KINDS = ('single_object', 'two_object', 'counting', 'colors', 'position', 'color_attr')
PAINT = {'red': '#f00', 'green': '#080', 'blue': '#00f'}
CELL = 20


class Thing(NamedTuple):
    """Object drawn in a scene; `box` has left, top, right and bottom."""

    name: str
    box: tuple[int, int, int, int]
    color: str
    confidence: float


class Known:
    """Detector and classifier of colors that know the objects of drawn scenes; the classifier reads crops."""

    def __init__(self) -> None:
        self.scenes: dict[bytes, list[Thing]] = {}

    def detect(self, image: torch.Tensor) -> list[Detection]:
        found = []
        for thing in self.scenes[image.numpy().tobytes()]:
            left, top, right, bottom = thing.box
            mask = torch.zeros(image.shape[1:], dtype=torch.bool)
            mask[top:bottom, left:right] = True
            found.append(Detection(thing.name, thing.box, thing.confidence, mask))
        return found

    def colors(self, image: torch.Tensor, found: Sequence[Detection], name: str) -> list[str]:
        assert all(each.name == name for each in found)
        painted = {Image.new('RGB', (1, 1), code).getpixel((0, 0)): color for color, code in PAINT.items()}
        return [painted[tuple(crop(image, each)[:, 0, 0].tolist())] for each in found]


def scene(generator: random.Random, names: list[str]) -> tuple[torch.Tensor, list[Thing]]:
    """Draw up to 25 rectangles in the cells of a grid, so that none covers another one."""
    image, things = Image.new('RGB', (5 * CELL, 5 * CELL), '#ccc'), []
    cells = [(x * CELL, y * CELL) for x in range(5) for y in range(5)]
    crowded = generator.random() < 0.2
    for x, y in generator.sample(cells, generator.choice([20, 25]) if crowded else generator.randint(0, 6)):
        left, top = x + generator.randint(0, 8), y + generator.randint(0, 8)
        box = left, top, generator.randint(left + 2, x + CELL), generator.randint(top + 2, y + CELL)
        # Confidences differ, because the order of equal ones is not defined.
        confidence = generator.choice([0.1, 0.29, 0.31, 0.6, 0.89, 0.91, 0.95]) + generator.random() / 1000
        things.append(Thing(generator.choice(names), box, generator.choice([*PAINT]), confidence))
        ImageDraw.Draw(image).rectangle((left, top, box[2] - 1, box[3] - 1), PAINT[things[-1].color])
    return torch.from_numpy(np.array(image)).permute(2, 0, 1), things


def prompt_of(kind: str, generator: random.Random, names: list[str]) -> dict[str, Any]:
    one, other = generator.sample(names, 2)
    colors = generator.sample([*PAINT], 2)
    include: list[dict[str, Any]] = [{'class': one, 'count': 1}, {'class': other, 'count': 1}]
    prompt: dict[str, Any] = {'tag': kind, 'include': include}
    if kind in ('single_object', 'counting', 'colors'):
        del include[1]
    if kind == 'counting':
        include[0]['count'] = generator.randint(2, 4)
        prompt['exclude'] = [{'class': one, 'count': include[0]['count'] + 1}]
    if kind in ('colors', 'color_attr'):
        for each, color in zip(include, colors, strict=False):
            each['color'] = color
    if kind == 'position':
        include[1]['position'] = [generator.choice(['left of', 'right of', 'above', 'below']), 0]
    return prompt


def expected(prompt: dict[str, Any], things: list[Thing]) -> bool:
    """Return whether a scene fulfills a prompt, in another way than the package does."""
    least = 0.9 if prompt['tag'] == 'counting' else 0.3
    certain = sorted((each for each in things if each.confidence > least), key=lambda each: each.confidence)[::-1]
    matched: list[list[Thing]] = []
    verdicts = []
    for clause in prompt['include']:
        of_class = [each for each in certain if each.name == clause['class']][:16]
        chosen = of_class[: clause['count']]
        verdict = len(chosen) == clause['count']
        verdict &= all(each.color == clause.get('color', each.color) for each in chosen)
        if 'position' in clause:
            direction, target = clause['position']
            verdict &= bool(matched[target]) and lies(direction, chosen, matched[target])
        matched.append(chosen if verdict else [])
        verdicts.append(verdict)
    for clause in prompt.get('exclude', []):
        verdicts.append(Counter(each.name for each in certain)[clause['class']] < clause['count'])
    return all(verdicts)


def lies(direction: str, some: list[Thing], others: list[Thing]) -> bool:
    wanted = {'left of': [-1, 0], 'right of': [1, 0], 'above': [0, -1], 'below': [0, 1]}[direction]
    for one in some:
        for other in others:
            corners = np.array([one.box, other.box], float).reshape(2, 2, 2)
            difference = np.subtract(*corners.mean(axis=1))
            margin = 0.1 * (corners[:, 1] - corners[:, 0]).sum(axis=0)
            reach = np.sign(difference) * np.clip(np.abs(difference) - margin, 0, None)
            if np.abs(reach).max() < 1e-3 or reach @ wanted / np.linalg.norm(difference) <= 0.5:
                return False
    return True


def test_rules_equal_an_independent_implementation_on_500_scenes_and_answers_are_kept(tmp_path, monkeypatch):
    generator, known = random.Random(0), Known()
    images, prompts, wanted = [], [], []
    for number in range(500):
        names = generator.sample(CLASSES, 2)
        image, things = scene(generator, names)
        known.scenes[image.numpy().tobytes()] = things
        images.append(image)
        prompts.append(prompt_of(KINDS[number % 6], generator, names))
        wanted.append(expected(prompts[-1], things))
    files = [tmp_path / f'{number:06d}.png' for number in range(500)]
    network = GenEval(known, known)
    assert network.scores(images, prompts, files).tolist() == wanted
    for number, kind in enumerate(KINDS):
        assert 5 < sum(wanted[number::6]) < 79, kind

    # The kept answers give the same scores without a detector.
    monkeypatch.setattr(Known, 'detect', lambda *_: pytest.fail('detected again'))
    assert network.scores(images, prompts, files).tolist() == wanted
    answers = [json.loads(file.with_suffix('.geneval.json').read_text()) for file in files]
    assert [each['prompt'] for each in answers] == prompts
    assert [each['failure'] is None for each in answers] == wanted
    failures = [f'{number}: {each["failure"]}\n' for number, each in enumerate(answers[:150]) if each['failure']]
    check_golden(Path(__file__).parent / 'golden' / 'geneval', {'failures.txt': ''.join(failures)})


def test_at_most_16_objects_of_a_class_count():
    kept = kept_objects({'dog': [[0, 0, 9, 9, 0.5 + number / 100] for number in range(20)]}, 'single_object')
    assert [each[4] for each in kept['dog']] == [0.5 + number / 100 for number in reversed(range(4, 20))]
    assert kept_objects({'dog': [[0, 0, 9, 9, 0.3]]}, 'single_object') == {'dog': []}, 'more than 0.3 is needed'
    assert relations(kept['dog'][0], kept['dog'][1]) == set(), 'objects at the same place'


def test_answer_of_another_prompt_or_a_cut_file_is_not_used(tmp_path):
    known, file = Known(), tmp_path / '000000.png'
    image, things = scene(random.Random(1), ['dog'])
    known.scenes[image.numpy().tobytes()] = [*things, Thing('dog', (0, 0, 9, 9), 'red', 0.99)]
    network, prompt = GenEval(known, known), {'tag': 'single_object', 'include': [{'class': 'dog', 'count': 1}]}
    assert network.scores([image], [prompt], [file]).tolist() == [1]
    other = {'tag': 'single_object', 'include': [{'class': 'cat', 'count': 1}]}
    assert network.scores([image], [other], [file]).tolist() == [0]
    assert json.loads(file.with_suffix('.geneval.json').read_text())['failure'] == '0 of 1 cat found'
    file.with_suffix('.geneval.json').write_text('{"pro')
    assert network.scores([image], [prompt], [file]).tolist() == [1]


@pytest.fixture(scope='module')
def mask2former(tmp_path_factory) -> str:
    return str(write_mask2former(tmp_path_factory.mktemp('mask2former')))


def test_detector_follows_the_published_steps(mask2former, monkeypatch):
    """All 100 candidates are computed here, and by MMDetection's steps: resized by OpenCV, padded, mapped back."""
    monkeypatch.setattr(geneval, 'SHORT_SIDE', 72)
    monkeypatch.setattr(geneval, 'LONG_SIDE', 96)
    model = Mask2FormerForUniversalSegmentation.from_pretrained(mask2former)
    detector = ObjectDetector(mask2former)
    for height, width, resized in ((40, 40, (72, 72)), (30, 60, (48, 96)), (150, 110, (96, 70))):
        pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)
        small = cv2.resize(pixels, resized[::-1], interpolation=cv2.INTER_LINEAR).astype(np.float32)
        scaled = (small - [123.675, 116.28, 103.53]) / [58.395, 57.12, 57.375]
        padded = np.zeros((96, 96, 3)) if resized != (48, 96) else np.zeros((64, 96, 3))
        padded[: resized[0], : resized[1]] = scaled
        with torch.no_grad():
            output = model(pixel_values=torch.from_numpy(padded).float().permute(2, 0, 1)[None])
        options: dict[str, Any] = {'mode': 'bilinear', 'align_corners': False}
        masks = torch.nn.functional.interpolate(output.masks_queries_logits, padded.shape[:2], **options)
        masks = masks[:, :, : resized[0], : resized[1]]
        masks = torch.nn.functional.interpolate(masks, (height, width), **options)[0]
        probabilities = output.class_queries_logits[0].softmax(-1)[:, :80]
        wanted = []
        for index in probabilities.flatten().topk(100).indices.tolist():
            query, label = divmod(index, 80)
            inside = masks[query] > 0
            certainty = (masks[query].sigmoid() * inside).sum() / (inside.sum() + 1e-6)
            if (confidence := float(probabilities[query, label] * certainty)) > 0.3:
                rows, columns = np.nonzero(inside.numpy())
                box = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
                wanted.append((CLASSES[label], *map(int, box), confidence))
        image = torch.from_numpy(pixels).permute(2, 0, 1)
        found = sorted((each.name, *each.box, each.confidence) for each in detector.detect(image))
        assert [row[:-1] for row in found] == [row[:-1] for row in sorted(wanted)] != []
        assert [row[-1] for row in found] == pytest.approx([row[-1] for row in sorted(wanted)], rel=1e-4)
    monkeypatch.setattr(geneval, 'MIN_CONFIDENCE', 1)
    assert detector.detect(image) == []


def test_detector_of_other_classes_is_refused(tmp_path):
    with pytest.raises(UserError, match='has 3 classes instead of the 80 of COCO instances'):
        ObjectDetector(str(write_mask2former(tmp_path, labels=3)))


def test_colors_are_the_nearest_mean_of_three_texts(mask2former, tmp_path):
    folder = str(write_clip(tmp_path))
    model, processor = CLIPModel.from_pretrained(folder), CLIPProcessor.from_pretrained(folder)
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (60, 80, 3), np.uint8)
    mask = generator.random((60, 80)) < 0.7
    boxes = [(0, 0, 80, 60), (10, 20, 50, 40), (70, 0, 75, 60), (30, 5, 40, 8)]
    found = [Detection('tv', box, 0.9, torch.from_numpy(mask)) for box in boxes]
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    means = []
    for color in COLORS:
        texts = [f'a photo of a {color} tv', f'a photo of a {color}-colored tv', f'a photo of a {color} object']
        with torch.no_grad():
            output = model.get_text_features(**processor(text=texts, return_tensors='pt', padding=True))
        pooled = clip_features(output)
        mean = (pooled / pooled.norm(dim=1, keepdim=True)).mean(0)
        means.append(mean / mean.norm())
    gray = np.where(mask[:, :, None], pixels, np.uint8(0x99))
    wanted = []
    for (left, top, right, bottom), each in zip(boxes, found, strict=True):
        assert np.array_equal(crop(image, each).permute(1, 2, 0), gray[top:bottom, left:right])
        inputs = processor(images=Image.fromarray(gray[top:bottom, left:right]), return_tensors='pt')
        with torch.no_grad():
            embeds = clip_features(model.get_image_features(**inputs))[0]
        wanted.append(COLORS[int((torch.stack(means) @ embeds).argmax())])
    classifier: Any = build_network('geneval_hf', {'geneval_hf': mask2former, 'clip_score': folder}).classifier
    assert classifier.colors(image, found, 'tv') == wanted
    assert classifier.colors(image, [], 'tv') == []


def test_score_is_the_mean_over_kinds_with_intervals_clustered_by_prompt():
    prompts = [Prompt(f'{kind} {number}', kind) for kind, count in (('a', 50), ('b', 10)) for number in range(count)]
    correct = torch.tensor([1.0] * 40 + [0.0] * 10 + [1.0] * 10)
    found = geneval_score(correct, prompts)
    assert found.score == pytest.approx(0.9)
    assert found.kinds['a'][0] == 0.8 and found.kinds['b'][0] == 1
    exact = binomtest(40, 50).proportion_ci(method='wilson')
    assert found.kinds['a'][1] == pytest.approx((exact.low, exact.high), abs=0.01)
    assert 0.6 < found.kinds['b'][1][0] < 0.75 and found.kinds['b'][1][1] == 1
    # The same images of fewer prompts carry less information.
    clustered = geneval_score(
        correct, [Prompt(f'{each.category} {i // 5}', each.category) for i, each in enumerate(prompts)]
    )
    assert clustered.interval[0] < found.interval[0] < 0.9 < found.interval[1] < clustered.interval[1]


def test_intervals_cover_the_true_score():
    generator, covered = np.random.default_rng(0), 0
    for _ in range(200):
        prompts, rows, truth = [], [], []
        for kind, (a, b) in {'easy': (20, 0.2), 'middle': (1, 1), 'hard': (0.1, 2)}.items():
            chance = np.repeat(generator.beta(a, b, 80), 4)
            truth.append(a / (a + b))
            prompts += [Prompt(f'{kind} {index // 4}', kind) for index in range(320)]
            rows.append(generator.random(320) < chance)
        low, high = geneval_score(torch.from_numpy(np.concatenate(rows)).float(), prompts).interval
        covered += low <= np.mean(truth) <= high
    assert 182 <= covered <= 199


@pytest.mark.parametrize(
    ('prompt', 'message'),
    [
        ({}, "the prompt 'a dog' has no GenEval metadata; use evaluation_metadata.jsonl"),
        ({'include': [{'class': 'dog', 'count': 1}]}, r"include or exclude is incomplete \(KeyError: 'tag'\)"),
        ({'tag': 'x', 'include': [{'class': 'dogg', 'count': 1}]}, "'dogg' is unknown; did you mean 'dog'"),
        ({'tag': 'x', 'include': [{'class': 'dog', 'count': 1, 'color': 'teal'}]}, "'teal' is unknown"),
        ({'tag': 'x', 'include': [{'class': 'dog', 'count': 0}]}, 'needs a count of 1 or more'),
        ({'tag': 'x', 'include': [{'class': 'dog', 'count': 1, 'position': ['above', 0]}]}, 'to an earlier object'),
    ],
)
def test_wrong_prompts_are_named(prompt, message):
    with pytest.raises(UserError, match=message):
        check_prompt('a dog', prompt)
