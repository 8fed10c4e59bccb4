"""Benchmark of `diffusion caption`: how busy it keeps a server from one core, and memory by number of images.

    python benchmarks/captions.py rate [seconds]
    python benchmarks/captions.py memory [images ...]

`rate` starts a server that answers 200 requests per second, each after at least a second, and captions JPEGs of 256 px
with one core. The figure is answers per second between a quarter and three quarters of the answers, as the server
counts them. `memory` captions images of 8 px with an engine that answers at once, and prints the highest memory use of
the process for each number of images.
"""

import asyncio
import io
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from machine import heading
from PIL import Image

from diffusion.captioning.caption_run import CaptionRun
from diffusion.captioning.settings import load_settings
from diffusion.language_models.engine import Answer, Question
from diffusion.storage.mds import ShardFormat, index_text, shard_name

RATE, LATENCY_SECONDS = 200, 1.0
PER_SHARD = 5000
TEXT = 'A gray cat sleeps on a red mat beside a window, in warm evening light. ' * 6


def write_dataset(folder: Path, *, side: int, shards: int, each: int, kind: str) -> Path:
    """Write a dataset of random images whose shards are copies of one shard under other names."""
    folder.mkdir()
    form, rng = ShardFormat({'image': 'bytes', 'captions': 'json', 'key': 'str'}), np.random.default_rng(0)
    samples = []
    for number in range(each):
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
        file = io.BytesIO()
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(file, kind)
        samples.append(form.encode({'image': file.getvalue(), 'captions': ['a cat'], 'key': f'p{number}'}))
    first = folder / shard_name(0)
    entry = form.write_shard(first, samples, list(map(len, samples)), name=first.name)
    entries = []
    for number in range(shards):
        name = shard_name(number)
        if number:
            os.link(first, folder / name)
        entries.append(entry | {'raw_data': entry['raw_data'] | {'basename': name}})
    (folder / 'index.json').write_text(index_text(entries))
    return folder


def write_settings(folder: Path, port: int) -> Path:
    path = folder / 'vlm.yaml'
    values = {
        'model': 'vlm',
        'endpoint': f'http://127.0.0.1:{port}/v1',
        'columns': {'long': 'short'},
        'max_tokens': 400,
    }
    path.write_text(json.dumps(values))
    return path


def serve(port: 'multiprocessing.SimpleQueue[int]', times: 'multiprocessing.SimpleQueue[list[float]]') -> None:
    """Answer at most RATE requests per second; put the times of all answers into the queue at the request /end."""
    from aiohttp import web

    answered: list[float] = []
    begin = time.monotonic()

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        now = time.monotonic() - begin
        slot = max(now, answered[-1] + 1 / RATE if answered else 0)
        answered.append(slot)
        await asyncio.sleep(slot - now + LATENCY_SECONDS)
        choice = {'message': {'content': 'A gray cat sleeps on a red mat.'}, 'finish_reason': 'stop'}
        usage = {'completion_tokens': 10, 'prompt_tokens': 300}
        return web.json_response({'model': 'vlm', 'choices': [choice], 'usage': usage})

    async def end(_: web.Request) -> web.Response:
        times.put(answered)
        return web.Response()

    async def run() -> None:
        app = web.Application(client_max_size=2**24)
        app.add_routes([web.post('/v1/chat/completions', answer), web.get('/end', end)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, '127.0.0.1', 0, backlog=1024)
        await site.start()
        assert site._server is not None and isinstance(site._server, asyncio.Server)
        port.put(site._server.sockets[0].getsockname()[1])
        await asyncio.sleep(10**6)

    asyncio.run(run())


def measure_rate(folder: Path, seconds: float) -> None:
    import urllib.request

    port, times = multiprocessing.SimpleQueue(), multiprocessing.SimpleQueue()
    server = multiprocessing.Process(target=serve, args=(port, times), daemon=True)
    server.start()
    number = port.get()
    count = int(seconds * RATE)
    data = write_dataset(folder / 'data', side=256, shards=-(-count // 1000), each=1000, kind='JPEG')
    settings = write_settings(folder, number)
    command = [sys.executable, '-m', 'diffusion', 'caption', str(data), '--with', str(settings), 'concurrency=512']
    core = {max(os.sched_getaffinity(0))}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, core))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    urllib.request.urlopen(f'http://127.0.0.1:{number}/end').read()
    slots = times.get()
    server.kill()
    low, high = len(slots) // 4, 3 * len(slots) // 4
    print(f'{(high - low) / (slots[high] - slots[low]):.1f} answers/s of {RATE}; {len(slots):,} answers')
    print(f'{(used.ru_utime + used.ru_stime) / len(slots) * 1e3:.2f} ms of CPU per answer, start included')


class Instant:
    """Engine that answers at once."""

    def answers(self, questions: Iterable[Question]) -> Iterator[Answer]:
        for question in questions:
            yield Answer(question, TEXT, None, 100, 300)


def measure_memory(folder: Path, count: int) -> None:
    data = write_dataset(folder / 'data', side=8, shards=count // PER_SHARD, each=PER_SHARD, kind='PNG')
    run = CaptionRun(str(data), load_settings(write_settings(folder, 1)))
    begin = time.monotonic()
    run.execute(Instant())
    seconds = time.monotonic() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f'{count:,} images: at most {peak:.0f} MiB of memory, {count / seconds:,.0f} images/s', flush=True)


def main(what: str, *numbers: str) -> None:
    print(heading())
    for number in numbers or {'rate': ['60'], 'memory': ['10000', '100000']}[what]:
        folder = Path(tempfile.mkdtemp())
        try:
            measure = multiprocessing.get_context('spawn').Process(
                target=MEASURES[what], args=(folder, NUMBER[what](number))
            )
            measure.start()
            measure.join()
        finally:
            shutil.rmtree(folder)


MEASURES = {'rate': measure_rate, 'memory': measure_memory}
NUMBER = {'rate': float, 'memory': int}

if __name__ == '__main__':
    main(*sys.argv[1:])
