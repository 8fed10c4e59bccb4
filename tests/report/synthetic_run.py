"""Runs for tests of reports, written as training, evaluation and the node entry point write them, without training."""

import json
import math
import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from diffusion.data.image_sheet import Figure, Section, draw_sheet, save_image
from diffusion.runs.attempts import Attempt

STAGES = ('data_wait', 'h2d', 'encode', 'forward', 'backward', 'optimizer', 'ema', 'logging', 'checkpoint', 'other')
PROMPTS = ['a frog', 'a house at night', 'a racing car', 'a purple circle', 'a jellyfish', 'two teddy bears play chess']
KINDS = {'single_object': -0.3, 'two_object': -0.1, 'counting': 0.1, 'colors': -0.2, 'position': 0.3, 'color_attr': 0.2}
BEGIN = 1_795_000_000.0
SECONDS_PER_BATCH = 0.5
RECIPE = """name: {name}
seed: 17
global_batch: 2048
model:
  name: sd2
  resolution: 256
optimizer:
  name: adamw
  lr: {lr}
  weight_decay: 0.01
trainer:
  max_duration: 1000ba
"""


def write_run(
    folder: Path,
    *,
    batches: int = 400,
    seed: int = 0,
    lr: float = 1e-4,
    prompts: list[str] | None = None,
    evaluations: bool = True,
    sheets: int = 4,
) -> Path:
    """Write a run of two attempts: the first was preempted, and the second repeated 20 batches."""
    folder.mkdir(parents=True)
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in metric_lines(batches, seed, lr)))
    history = f'# changed at batch {batches // 2} (2026-11-18T10:00:00+00:00): optimizer.weight_decay 0.1 -> 0.01\n'
    (folder / 'recipe.yaml').write_text(RECIPE.format(name=folder.name, lr=lr) + history)
    write_attempts(folder, batches)
    for batch in range(batches // 4, batches + 1, batches // 4):
        write_checkpoint(folder, batch)
        if evaluations:
            write_evaluation(folder, batch, seed)
    (folder / f'ba{batches // 2}.pinned').touch()
    for number in range(1, sheets + 1):
        write_sheet(folder, batches * number // sheets, prompts or PROMPTS)
    return folder


def metric_lines(batches: int, seed: int, lr: float) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    lines: list[dict[str, Any]] = []
    half = batches // 2
    for step in [*range(half + 20), *range(half, batches)]:
        loss = 0.15 + 0.9 * math.exp(-step / (0.15 * batches)) + 0.02 * draw.random()
        lines.append({'step': step, 'time/batch': float(step), 'time/sample': 2048.0 * step})
        lines.append({'step': step, 'loss/train/total': loss})
        lines.append({'step': step, 'lr-AdamW/group0': lr * min(1.0, (step + 1) / 50)})
        lines.append({'step': step, 'grad_norm/total': 0.2 + 2 * loss * draw.random()})
        if step % 20 == 19:
            shares = {stage: draw.uniform(0.01, 0.03) for stage in STAGES} | {'backward': 0.45, 'forward': 0.25}
            whole = sum(shares.values())
            lines.append(
                {'step': step, 'throughput/samples_per_sec': 4000 + 100 * draw.random()}
                | {'throughput/device/mfu': 0.41 + 0.01 * draw.random(), 'memory/peak_gib': 61.5}
                | {f'time_share/{stage}': share / whole for stage, share in shares.items()}
            )
            health = {'gpu_temperature': 66 + 5 * draw.random(), 'gpu_utilization': 0.97, 'gpu_clock': 0.93}
            health |= {'gpu_memory_used': 0.8, 'gpu_throttled': 0.0, 'gpu_ecc_errors': 0.0}
            lines.append({'step': step} | {f'health/{name}': value for name, value in health.items()})
        if step and step % (batches // 8) == 0:
            levels = {f'metrics/eval/loss_t{t:03d}': loss * (1.4 - t / 1000) for t in range(62, 1000, 125)}
            lines.append({'step': step, 'metrics/eval/loss': loss - 0.01} | levels)
            lines.append({'step': step, 'checkpoint/stall_seconds': 0.4, 'checkpoint/save_seconds': 21.0})
            lines.append({'step': step, 'checkpoint/memory_stall_seconds': 0.1, 'checkpoint/memory_save_seconds': 1.5})
    return lines


def write_attempts(
    folder: Path, batches: int, *, devices: int | None = 128, gpu: str = 'NVIDIA H100 80GB HBM3'
) -> None:
    half, last = batches // 2 + 20, batches
    first_end = BEGIN + 60 + half * SECONDS_PER_BATCH
    second = first_end + 300
    ends = [first_end + 5, second + 50 + (last - half + 20) * SECONDS_PER_BATCH]
    attempts = [
        Attempt(0, BEGIN, ends[0], 0, BEGIN + 60, half, first_end, 75, 'preempted', devices=devices, gpu=gpu),
        Attempt(1, second, ends[1], half - 20, second + 40, last, ends[1] - 5, 0, 'done', devices=devices, gpu=gpu),
    ]
    text = ''
    for attempt in attempts:
        begin = asdict(attempt) | {'first': None, 'last': None, 'first_at': 0.0, 'last_at': 0.0}
        text += json.dumps({'event': 'begin', 'at': attempt.begin} | begin) + '\n'
        text += json.dumps({'event': 'end', 'at': attempt.end} | asdict(attempt)) + '\n'
    (folder / 'attempts.jsonl').write_text(text)


def write_checkpoint(folder: Path, batch: int) -> None:
    (folder / f'ba{batch}').mkdir()
    receipt = {'format': 1, 'batch': batch, 'kind': 'sharded', 'world_size': 128, 'saved': '2026-11-18T09:00:00+00:00'}
    receipt |= {'files': {'state.pt': {'bytes': 3 * 2**30, 'xxh3_128': '0'}}}
    (folder / f'ba{batch}' / 'receipt.json').write_text(json.dumps(receipt))


def write_evaluation(folder: Path, batch: int, seed: int = 0) -> None:
    draw = random.Random(batch + seed)
    (folder / 'evaluations').mkdir(exist_ok=True)
    sweep = []
    for scale, steps in ((7.5, 50), (1, 50), (2, 50), (3, 50), (5, 50), (7.5, 10), (7.5, 20)):
        fid = 12 + 2000 / batch + (scale - 3) ** 2 / 2 + draw.random() + 100 / steps
        kinds = {kind: max(0, 0.6 - 30 / batch - level - 1 / steps) for kind, level in KINDS.items()}
        score = sum(kinds.values()) / len(kinds)
        metrics = {'fid': fid, 'clip_score': 0.2 + 0.08 * (1 - math.exp(-scale / 3)), 'geneval_hf': score}
        categories = {'clip_score': dict.fromkeys(kinds, 0.31), 'geneval_hf': kinds}
        intervals = {name: [max(0, mean - 0.06), mean + 0.07] for name, mean in kinds.items()}
        result = {'guidance_scale': scale, 'num_inference_steps': steps, 'noise_scheduler': 'ddim', 'metrics': metrics}
        result |= {'categories': categories, 'folder': f'evaluations/ba{batch}/{scale}-{steps}'}
        result['intervals'] = {'geneval_hf': {'': [score - 0.03, score + 0.04], **intervals}}
        sweep.append(result)
        if scale == 3:  # a sweep of intervals too
            sweep += [
                result
                | {'guidance': {'name': 'interval', 'low': low, 'high': 0.8}, 'folder': f'evaluations/ba{batch}/{low}'}
                for low in (0.1, 0.3)
            ]
    sweep[0]['examples'] = {'geneval_hf': write_examples(folder / sweep[0]['folder'])}
    results = {'checkpoint': f'ba{batch}', 'batch': batch, 'weights': 'ema', 'images': 30000, 'prompts': 'captions'}
    results |= {'losses': {'loss': 0.15 + 10 / batch}, 'metrics': sweep[0]['metrics'], 'guidance': sweep}
    text = json.dumps(results | {'seconds': 600.0, 'finished': BEGIN + batch})
    (folder / 'evaluations' / f'ba{batch}.json').write_text(text)


def write_examples(folder: Path) -> dict[str, Any]:
    """Write images of three failing and three passing prompts of each kind, and return their names."""
    examples: dict[str, Any] = {}
    for number, kind in enumerate(KINDS):
        examples[kind] = {'worst': [], 'best': []}
        for index in range(6):
            file, side = f'batch-00000/{6 * number + index:06d}.png', 'best' if index > 2 else 'worst'
            prompt = f'a photo of a red {kind.replace("_", " ")} number {index}'
            examples[kind][side].append({'file': file, 'prompt': prompt, 'score': float(side == 'best')})
            image = Image.new('RGB', (64, 64), (30 + 35 * index, 90 + 20 * number, 140))
            ImageDraw.Draw(image).ellipse((12, 12, 52, 52), fill='white' if side == 'best' else 'black')
            save_image(image, folder / file)
            why = '1 of 2 dog found' if side == 'worst' else None
            (folder / file).with_suffix('.geneval.json').write_text(json.dumps({'failure': why}))
    return examples


def write_sheet(folder: Path, batch: int, prompts: list[str], *, side: int = 96, noise: bool = False) -> None:
    """Write an image grid; its images are circles whose size shows the batch, or noise."""
    figures = []
    for index, prompt in enumerate(prompts):
        image = Image.new('RGB', (side, side), (30 + 30 * index % 200, 90, 140))
        if noise:
            image = Image.effect_noise((side, side), 80).convert('RGB')
        radius = 8 + batch * 7 % 30
        ImageDraw.Draw(image).ellipse((48 - radius, 48 - radius, 48 + radius, 48 + radius), fill='white')
        figures.append(Figure([image], prompt))
    sheet = draw_sheet([Section('', figures)], columns=4, side=256)
    save_image(sheet, folder / 'images' / f'ba{batch:06d}.png')


def write_status(folder: Path, batch: int, total: int) -> None:
    status = {'node': 0, 'nodes': 1, 'host': 'node-0', 'pid': 1, 'boot': 'none', 'owner': '', 'doing': 'training'}
    status |= {'batch': batch, 'total_batches': total, 'seconds_since_batch': 0.1}
    status['seconds_per_batch'] = SECONDS_PER_BATCH
    (folder / 'status').mkdir(exist_ok=True)
    text = json.dumps(status | {'written_at': time.monotonic(), 'written': time.time()})
    (folder / 'status' / 'node-0.json').write_text(text)


def append_metrics(folder: Path, *lines: dict[str, Any]) -> None:
    with (folder / 'metrics.jsonl').open('a') as file:
        file.writelines(json.dumps(line) + '\n' for line in lines)
