"""Server on localhost that answers a benchmark's questions about images, by the hash of image and question."""

import csv
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import xxhash
from captioning.vlm_server import VlmServer
from PIL import Image

from diffusion.prepare.image_hashes import exact_hash

COLUMNS = ('item_id', 'text', 'keywords', 'proposition_id', 'dependency', 'category_broad', 'category_detailed')
ANSWERS = ('yes', 'Yes.', '**No**', 'no, there is none', '<think>yes or no?</think>\nYes', 'I am not sure.')


def answer_about(image: Image.Image, question: str) -> str:
    """Return the answer to a question: a rating of 0 to 11, one of the choices, or a text without any of them."""
    number = xxhash.xxh64_intdigest(f'{exact_hash(image)} {question}')
    if 'Rating: NUMBER' in question:
        return f'On a scale from 1 to 10, the light is weak.\n\n**Rating: {number % 12}**'
    choices = question.rpartition(': ')[2].split(', ')
    return (
        ANSWERS[number % len(ANSWERS)] if choices == ['yes', 'no'] else [*choices, 'none'][number % (len(choices) + 1)]
    )


class JudgeServer(VlmServer):
    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds
        self.asked: Counter[tuple[int, str]] = Counter()
        """Number of requests by hash of the image and question."""

    def text_about(self, image: Image.Image, prompt: str) -> str:
        time.sleep(self.seconds)
        with self._lock:
            self.asked[exact_hash(image), prompt] += 1
        return answer_about(image, prompt)


class Drawing:
    """Stands for a model: each image has random pixels."""

    def generate(self, prompts: list[str], *, seeds: list[int], **settings: Any) -> torch.Tensor:
        return torch.stack([torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def write_dpg(path: Path, prompts: int) -> Path:
    """Write questions about prompts, with random graphs, in the format of `dpg_bench.csv`."""
    draw = random.Random(0)
    with path.open('w', newline='') as file:
        lines = csv.writer(file)
        lines.writerow([*COLUMNS, 'tuple', 'question_natural_language'])
        for item in range(prompts):
            for number in range(1, draw.randint(3, 8)):
                parents = draw.sample(range(1, number), min(number - 1, draw.randrange(3))) or [0]
                kind = draw.choice(['entity', 'attribute', 'relation'])
                row = [f'item{item}', f'scene {item}, "with" a\nline', '', number, ', '.join(map(str, parents)), kind]
                lines.writerow([*row, 'x', f'{kind} - whole (thing {number})', f'Is thing {number} in scene {item}?'])
    return path


def write_tifa(path: Path, prompts: int) -> Path:
    """Write questions about prompts in the format of TIFA's questions and answers."""
    rows = []
    for item in range(prompts):
        for color in ('red', 'blue', 'dark blue')[: item % 3 + 1]:
            about = {'id': f'coco_{item}', 'caption': f'a {color} thing {item}', 'element': color}
            rows.append({**about, 'question': f'is thing {item} {color}?', 'choices': ['yes', 'no'], 'answer': 'yes'})
            rows.append({**about, 'question': f'what color is {item}?', 'choices': ['red', 'blue', 'dark blue']})
            rows[-1]['answer'], rows[-1]['element_type'], rows[-2]['element_type'] = color, 'color', 'object'
    path.write_text(json.dumps(rows))
    return path
