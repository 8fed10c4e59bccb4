"""GenEval's rules: which detected objects count, and whether they fulfill a prompt.

Ghosh et al. 2023, https://arxiv.org/abs/2310.11513; the values are the defaults of the authors' `evaluate_images.py`
(https://github.com/djghosh13/geneval, commit 16f1681). The authors' limit on the overlap of objects is 1, so that no
object is removed because it overlaps another one.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from diffusion.config.schema import did_you_mean
from diffusion.errors import UserError

CLASSES = (
    *('person', 'bicycle', 'car', 'motorcycle', 'airplane', 'bus', 'train', 'truck', 'boat', 'traffic light'),
    *('fire hydrant', 'stop sign', 'parking meter', 'bench', 'bird', 'cat', 'dog', 'horse', 'sheep', 'cow'),
    *('elephant', 'bear', 'zebra', 'giraffe', 'backpack', 'umbrella', 'handbag', 'tie', 'suitcase', 'frisbee'),
    *('skis', 'snowboard', 'sports ball', 'kite', 'baseball bat', 'baseball glove', 'skateboard', 'surfboard'),
    *('tennis racket', 'bottle', 'wine glass', 'cup', 'fork', 'knife', 'spoon', 'bowl', 'banana', 'apple'),
    *('sandwich', 'orange', 'broccoli', 'carrot', 'hot dog', 'pizza', 'donut', 'cake', 'chair', 'couch'),
    *('potted plant', 'bed', 'dining table', 'toilet', 'tv', 'laptop', 'computer mouse', 'tv remote'),
    *('computer keyboard', 'cell phone', 'microwave', 'oven', 'toaster', 'sink', 'refrigerator', 'book', 'clock'),
    *('vase', 'scissors', 'teddy bear', 'hair drier', 'toothbrush'),
)
"""The 80 classes of COCO in COCO's order, by the names used in GenEval's prompts."""
COLORS = ('red', 'orange', 'yellow', 'green', 'blue', 'purple', 'pink', 'brown', 'black', 'white')
RELATIONS = ('left of', 'right of', 'above', 'below')
COUNTING = 'counting'
MIN_CONFIDENCE = 0.3
MIN_CONFIDENCE_COUNTING = 0.9
MAX_OBJECTS = 16
"""Maximum number of objects per class."""
POSITION_MARGIN = 0.1
"""Two centers on an axis count as equal if they are no farther apart than this fraction of the objects' total size."""

Object = Sequence[float]
"""Detected object: left, top, right and bottom edge of its box in pixels, and the confidence."""


def kept_objects(objects: Mapping[str, Sequence[Object]], kind: str) -> dict[str, list[Object]]:
    """Return the objects that count for a prompt whose `tag` is `kind`, by class, most confident first."""
    least = MIN_CONFIDENCE_COUNTING if kind == COUNTING else MIN_CONFIDENCE
    ordered = {name: sorted(found, key=lambda each: -each[4]) for name, found in objects.items()}
    return {name: [each for each in found if each[4] > least][:MAX_OBJECTS] for name, found in ordered.items()}


def relations(one: Object, other: Object) -> set[str]:
    """Return the `RELATIONS` that hold for one object's box relative to the other's; none if they are too close.

    With d the difference of the centers and s the sum of the sizes, a direction holds if its component of
    sign(d) max(|d| - 0.1 s, 0) / |d|_2 is larger than 0.5, so that two can hold at once.
    """
    offsets, reaches = [], []
    for axis in (0, 1):
        offset = (one[axis] + one[axis + 2] - other[axis] - other[axis + 2]) / 2
        sizes = abs(one[axis + 2] - one[axis]) + abs(other[axis + 2] - other[axis])
        offsets.append(offset)
        reaches.append(math.copysign(max(abs(offset) - POSITION_MARGIN * sizes, 0), offset))
    if all(abs(reach) < 1e-3 for reach in reaches):
        return set()
    right, down = (reach / math.hypot(*offsets) for reach in reaches)
    return {name for name, part in zip(RELATIONS, (-right, right, -down, down), strict=True) if part > 0.5}


def failure(
    prompt: Mapping[str, Any], objects: Mapping[str, Sequence[Object]], colors: Mapping[str, Sequence[str]]
) -> str | None:
    """Return why an image does not fulfill a prompt, or None if it does.

    Only the `count` most confident objects of a class are compared in color and position.

    Args:
        prompt: A line of GenEval's `evaluation_metadata.jsonl`: its kind as `tag`, and `include` and `exclude`.
        objects: All detected objects in the image by class.
        colors: Colors of the objects that count, in order, by class; needed for classes with a color in the prompt.
    """
    kept, reasons = kept_objects(objects, prompt['tag']), []
    groups: list[list[Object] | None] = []
    for wanted in prompt['include']:
        name, count = wanted['class'], wanted['count']
        found, reason = kept.get(name, [])[:count], None
        if len(found) < count:
            reason = f'{len(found)} of {count} {name} found'
        elif 'color' in wanted and (seen := [*colors[name][:count]]).count(wanted['color']) < count:
            reason = f'{name} is {", ".join(seen)} instead of {wanted["color"]}'
        elif 'position' in wanted:
            relation, target = wanted['position']
            if (others := groups[target]) is None:
                reason = f'{name} has nothing to be {relation}'
            elif not all(relation in relations(one, other) for one in found for other in others):
                reason = f'{name} is not {relation} {prompt["include"][target]["class"]}'
        groups.append(None if reason else found)
        reasons += [reason] if reason else []
    for refused in prompt.get('exclude', ()):
        if (number := len(kept.get(refused['class'], []))) >= refused['count']:
            reasons.append(f'{number} {refused["class"]} found, more than {refused["count"] - 1}')
    return '; '.join(reasons) or None


def check_prompt(text: str, prompt: Mapping[str, Any]) -> None:
    """Raise UserError unless `prompt` is a line of GenEval's `evaluation_metadata.jsonl`."""
    if 'include' not in prompt:
        what = 'has no GenEval metadata; use evaluation_metadata.jsonl from its authors as prompts'
        raise UserError(f'geneval_hf: the prompt {text!r} {what}')
    try:
        problem = None if isinstance(prompt['tag'], str) else f'tag {prompt["tag"]!r} is not text'
        for index, each in enumerate([*prompt['include'], *prompt.get('exclude', ())]):
            name, color = each['class'], each.get('color', COLORS[0])
            relation, target = each.get('position', (RELATIONS[0], -1))
            for value, allowed in ((name, CLASSES), (color, COLORS), (relation, RELATIONS)):
                if value not in allowed:
                    problem = f'{value!r} is unknown; {did_you_mean(str(value), allowed)}'
            if not isinstance(each['count'], int) or each['count'] < 1 or target >= index:
                problem = f'{each} needs a count of 1 or more, and a position relative to an earlier object'
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f'include or exclude is incomplete ({type(error).__name__}: {error})'
    if problem is not None:
        raise UserError(f'geneval_hf: the prompt {text!r}: {problem}')
