"""Server on localhost with the API of OpenAI, which answers from the pixels of the image, with faults at random."""

import base64
import io
import json
import random
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import yaml
from local_server import LocalServer
from PIL import Image

from diffusion.prepare.image_hashes import exact_hash
from diffusion.storage.mds import ShardFormat, index_text, shard_name

MODEL = 'tiny-vlm'
FAULTS = ('429', '500', 'half', 'empty', 'other model', 'hang', 'down')
RETRY_AFTER = ('0', 'Fri, 20 Nov 2026 12:00:00 GMT')
COLUMNS = {'image': 'bytes', 'captions': 'json', 'key': 'str'}


class VlmServer(LocalServer):
    """Server whose answer is the first word of the prompt and the hash of the image's pixels.

    For a request without an image, the answer is the last line of the prompt with `Detailed: ` before it.

    Args:
        faults: Names of faults to draw from, besides good answers.
        rate: Probability of a fault.
        hang_seconds: Time before the answer of a request that hangs.
    """

    def __init__(self, *faults: str, rate: float = 0.3, hang_seconds: float = 3.0) -> None:
        super().__init__()
        self._server.socket.listen(512)  # with the default of 5, a burst of connections waits for a second
        self.faults, self.rate, self.hang_seconds = faults, rate, hang_seconds
        self.good: Counter[tuple[str, str]] = Counter()
        """Number of good answers by image and prompt."""
        self.always: dict[str, str] = {}
        """Fault in place of each good answer of this text."""
        self.requested: Counter[str] = Counter()
        """Number of requests by the text of the good answer."""
        self.good_limit = 10**9
        """Number of good answers after which every connection is closed without an answer."""
        self._draws, self._lock, self._down_until = random.Random(5), threading.Lock(), 0.0

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers['Content-Length'])))
        *images, text = body['messages'][0]['content']
        name = f'Detailed: {text["text"].splitlines()[-1]}'
        for image in images:
            pixels = Image.open(io.BytesIO(base64.b64decode(image['image_url']['url'].partition(',')[2])))
            name = self.text_about(pixels, text['text'])
        with self._lock:
            fault = self._draws.choice(self.faults) if self.faults and self._draws.random() < self.rate else ''
            fault = self.always.get(name, fault)
            self.requested[name] += 1
            is_down = time.monotonic() < self._down_until or self.good.total() >= self.good_limit
            if fault == 'down':
                self._down_until = time.monotonic() + 0.3
        if fault == 'down' or is_down:
            request.close_connection = True
            return
        if fault == 'hang':
            time.sleep(self.hang_seconds)
        self.respond(request, fault, name, body['model'])

    def text_about(self, image: Image.Image, prompt: str) -> str:
        return caption_of(prompt.split()[0], image)

    def respond(self, request: BaseHTTPRequestHandler, fault: str, text: str, model: str) -> None:
        if fault == 'context':
            message = "This model's maximum context length is 8192 tokens."
            self.send(request, 400, json.dumps({'error': {'message': message}}).encode())
            return
        if fault.isdecimal():
            body = json.dumps({'error': {'message': f'fault {fault}'}}).encode()
            self.send(request, int(fault), body, {'Retry-After': RETRY_AFTER[self.requested[text] % 2]})
            return
        answer = {
            'model': 'another' if fault == 'other model' else model,
            'choices': [{'message': {'content': '' if fault == 'empty' else text}, 'finish_reason': 'stop'}],
            'usage': {'prompt_tokens': 100, 'completion_tokens': 5},
        }
        body = json.dumps(answer).encode()
        if fault == 'half':
            body = body[: len(body) // 2]
        if not fault:
            with self._lock:
                self.good[text.split()[-1], text.split()[0]] += 1
        self.send(request, 200, body)


def caption_of(prompt: str, image: Image.Image) -> str:
    return f'{prompt} picture number {exact_hash(image):016x}'


def write_images(folder: Path, *, shards: int, each: int, first: int = 0) -> Path:
    """Write a dataset of small images, each with other pixels, in shards of `each` images; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    form, entries = ShardFormat(COLUMNS), []
    for number in range(shards):
        encoded = [form.encode(sample(first + number * each + at)) for at in range(each)]
        name = shard_name(number)
        (folder / name).unlink(missing_ok=True)
        entries.append(form.write_shard(folder / name, encoded, list(map(len, encoded)), name=name))
    (folder / 'index.json').write_text(index_text(entries))
    return folder


def sample(index: int) -> dict[str, object]:
    file = io.BytesIO()
    picture(index).save(file, 'PNG' if index % 2 else 'BMP')
    return {'image': file.getvalue(), 'captions': [f'caption {index}'], 'key': f'p{index}'}


def picture(index: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(index).integers(0, 256, (8, 8, 3), np.uint8))


def write_settings(path: Path, url: str, columns: tuple[str, ...] = ('brief', 'full'), **settings: object) -> Path:
    """Write the settings of `diffusion caption` and a prompt for each column; return the path."""
    for column in columns:
        prompt = {'name': column, 'version': 1, 'text': f'{column} description of the image, please', 'script': 'any'}
        (path.parent / f'{column}.yaml').write_text(yaml.safe_dump(prompt))
    values = {
        'model': MODEL,
        'endpoint': f'{url}/v1',
        'columns': {column: f'{column}.yaml' for column in columns},
        'timeout_seconds': 60,
    }
    path.write_text(yaml.safe_dump(values | settings))
    return path
