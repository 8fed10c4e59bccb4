"""`diffusion compare`: build a web page on which people compare two models, serve it, and analyze the answers."""

import contextlib
import json
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
from PIL import Image

from diffusion.errors import UserError
from diffusion.evaluation.compared_images import read_image
from diffusion.evaluation.comparison_answers import read_answers
from diffusion.evaluation.comparison_page import KEY, PAGE, ComparisonKey, make_pairs, page_chunks, read_key
from diffusion.evaluation.comparison_result import (
    analyze_answers,
    counted_people,
    draw_result,
    result_json,
    result_text,
)
from diffusion.evaluation.comparison_server import AnswerFolder, make_server
from diffusion.storage.atomic import atomic_file, write_atomically
from diffusion.tasks.compare_arguments import AnalyzeSettings, ComparedModel, CompareSettings

log = logging.getLogger(__name__)

IMAGES, ANSWERS = 'images', 'answers'


def build_page(settings: CompareSettings) -> None:
    """Generate missing images; write the page, and a key file that tells which image is from which model.

    Images are kept in the page's folder, so a call after an interruption generates only the missing images.

    Raises:
        UserError: All images of A and B are equal, or their shapes differ.
    """
    files, about = {}, {}
    for model in (settings.a, settings.b):
        files[model.name], about[model.name] = _images_of(model, settings)
    pairs = make_pairs(settings.prompts, settings.checks, secrets.SystemRandom())
    key = ComparisonKey(secrets.token_hex(8), about['A'], about['B'], settings.source, pairs)
    equal: dict[int, bool] = {}

    def images(prompt: int) -> tuple[Image.Image, Image.Image]:
        a, b = read_image(files['A'][prompt]), read_image(files['B'][prompt])
        equal[prompt] = a.size == b.size and bool(np.array_equal(np.asarray(a), np.asarray(b)))
        return a, b

    # Write the page last: a folder with a page counts as complete.
    write_atomically(settings.out / KEY, key.to_json())
    with atomic_file(settings.out / PAGE) as unfinished, unfinished.open('w', encoding='utf-8') as page:
        for chunk in page_chunks(key.comparison, pairs, images):
            page.write(chunk)
        if all(equal.values()):
            raise UserError('A and B: have the same images, pixel by pixel; compare two different models')
    if any(equal.values()):
        log.warning('the images of A and B are the same for %d of %d prompts', sum(equal.values()), len(equal))
    size = (settings.out / PAGE).stat().st_size / 1e6
    print(f'{settings.out / PAGE}: {len(settings.prompts)} pairs and {settings.checks} attention checks, {size:.1f} MB')
    print(f'Send only this file. Keep {settings.out / KEY}, which says which image is from which model.')
    print(f'  collect answers with a server: diffusion compare --serve {settings.out}')
    print(f'  analyze answers:               diffusion compare --analyze FILES --key {settings.out / KEY}')


def _images_of(model: ComparedModel, settings: CompareSettings) -> tuple[Sequence[Path], dict[str, Any]]:
    """Return the image file of each prompt for one side, and a description of this side for the key file."""
    if model.files:
        return model.files, {'source': model.source, 'files': _paths(model.files, settings.out)}
    # Import torch and Composer, which takes 15 s, only if images must be generated.
    from diffusion.tasks.compared_models import generate_images

    folder = settings.out / IMAGES / model.name.lower()
    generated = generate_images(model, settings, folder)
    files = [generated.path(index) for index in range(len(settings.prompts))]
    about = {'source': generated.checkpoint, 'sampling': generated.sampling.settings}
    return files, about | {'files': _paths(files, settings.out)}


def _paths(files: Sequence[Path], out: Path) -> list[str]:
    """Return paths for the key file: relative for files in its folder, so that the folder can be moved."""
    return [str(file.relative_to(out) if file.is_relative_to(out) else file.resolve()) for file in files]


def serve_page(folder: Path, *, host: str, port: int) -> None:
    """Serve a folder's page until Ctrl-C, and store the answers in its subfolder `answers`; port 0: any free port."""
    key = read_key(folder / KEY)
    answers = AnswerFolder(folder / ANSWERS, key)
    with make_server((folder / PAGE).read_bytes(), answers, host=host, port=port) as server:
        shown = f'[{host}]' if ':' in host else host
        address = f'http://{shown}:{server.server_port}/?{urlencode({"token": key.token})}'
        print(f'Send this address to people, who each open it in their own browser:\n  {address}', flush=True)
        if host in ('0.0.0.0', '::'):
            print("  (replace the host by this machine's name or address)", flush=True)
        print('Ctrl-C ends the server; the same command starts it again at the same address.', flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    print(f'\nAnswers of {counted_people(len(answers.files()))} are in {folder / ANSWERS}. Analyze them with:')
    print(f'  diffusion compare --analyze {folder / ANSWERS}')


def analyze(settings: AnalyzeSettings) -> None:
    """Print the result of a comparison, and draw its figure; raise UserError if there are too few answers."""
    key = read_key(settings.key)
    result = analyze_answers(key, read_answers(settings.files, key.comparison, len(key.pairs)))
    if settings.json:
        print(json.dumps(result_json(result, settings.difference), indent=2))
    else:
        print(result_text(result, settings.difference))
    if settings.png is not None:
        draw_result(result, settings.png)
        log.info('figure: %s', settings.png)
