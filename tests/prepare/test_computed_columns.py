"""Columns that a user's file computes for batches of images: stored, filtered by, recorded, or refused."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import DrawnSource, draw, encoded_image, here, run, samples, settings
from PIL import Image
from small_networks import write_clip
from transformers import CLIPModel, CLIPProcessor

from diffusion.config.load import RecipeError
from diffusion.errors import UserError
from diffusion.prepare import convert_part
from diffusion.prepare.append import append
from diffusion.prepare.extra_columns import BATCH_IMAGES, compute_columns

BRIGHTNESS = """
import numpy as np

def columns(images, captions):
    assert len(images) == len(captions) <= 64
    assert {each.mode for each in images} == {'RGB'}
    assert all(each[0].startswith('a caption of image') for each in captions)
    return {
        'brightness': np.array([np.asarray(each).mean() for each in images], np.float32),
        'batch': [len(images)] * len(images),
    }
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def brightness(tmp_path) -> Path:
    path = tmp_path / 'brightness.py'
    path.write_text(BRIGHTNESS)
    return path


def brightness_of(number: int) -> float:
    return float(np.asarray(Image.open(io.BytesIO(encoded_image(number))).convert('RGB')).mean())


def test_columns_of_batches_are_stored_and_filtered_by(tmp_path, brightness, monkeypatch):
    source = DrawnSource(parts_count=2, each=70, broken=35)
    filters = {'columns': {'brightness': {'min': 127.5}}}
    report = run(tmp_path / 'out', source, columns_from=str(brightness), filters=filters)
    whole = [number for number in range(140) if number % 35]
    bright = [number for number in whole if brightness_of(number) >= 127.5]
    assert report.inputs == 140 and not [note for note in report.notes if 'no image has this column' in note]
    assert report.rejected['brightness_below_127.5'].count == len(whole) - len(bright)
    stored = {sample['key']: sample['metadata'] for sample in samples(tmp_path / 'out' / '16px')}
    assert sorted(stored) == sorted(f'image-{number}' for number in bright)
    for number in bright:
        assert stored[f'image-{number}']['brightness'] == pytest.approx(brightness_of(number))
        assert stored[f'image-{number}']['aesthetic_score'] == number % 10
    # 68 images of each part can be decoded.
    assert {each['batch'] for each in stored.values()} <= {BATCH_IMAGES, 4}
    monkeypatch.setattr(convert_part, 'BATCH_PIXELS', 16 * 16)  # every image has more
    run(tmp_path / 'small', DrawnSource(1), columns_from=str(brightness))
    assert {each['metadata']['batch'] for each in samples(tmp_path / 'small' / '16px')} == {1}


def test_file_belongs_to_the_settings_of_the_dataset(tmp_path, brightness):
    source, given = DrawnSource(parts_count=1), {'columns_from': str(brightness)}
    run(tmp_path / 'out', source, **given)
    later = DrawnSource(parts_count=2, stamp='2')
    with pytest.raises(UserError, match=r'has columns that brightness.py computes; add --columns-from with its path'):
        append(settings(tmp_path / 'out'), source=later, run=here)
    moved = tmp_path / 'elsewhere' / brightness.name
    moved.parent.mkdir()
    moved.write_text(BRIGHTNESS)
    append(settings(tmp_path / 'out', columns_from=str(moved)), source=later, run=here)
    assert all('brightness' in each['metadata'] for each in samples(tmp_path / 'out' / '16px'))
    brightness.write_text(BRIGHTNESS.replace('mean', 'max'))
    with pytest.raises(UserError, match='columns_from.sha256'):
        append(settings(tmp_path / 'out', **given), source=DrawnSource(parts_count=3), run=here)
    record = json.loads((tmp_path / 'out' / 'dataset.json').read_text())
    assert record['settings']['columns_from']['file'] == 'brightness.py'


@pytest.mark.parametrize(
    ('body', 'message'),
    [
        ('return [1, 2]', r'columns\(\) returned a list; return a dictionary such as'),
        ("return {'score': [1.0]}", "returned 1 values of 'score' for 2 images; return one each"),
        ("return {'score': 'ab'}", "returned no list of values of 'score' for 2 images"),
        ("return {'score': 3}", "returned no list of values of 'score' for 2 images"),
        ("return {'language': ['en', 'de']}", "returned the column 'language', reserved or not text; rename it"),
        ('return {1: [0, 0]}', 'returned the column 1, reserved or not text; rename it'),
    ],
)
def test_wrong_results_are_refused(tmp_path, body, message):
    path = tmp_path / 'wrong.py'
    path.write_text(f'def columns(images, captions):\n    {body}\n')
    with pytest.raises(UserError, match=f'wrong.py: .*{message}'):
        compute_columns(str(path), [draw(0), draw(1)], [['a'], ['b']])


def test_values_become_json(tmp_path):
    path = tmp_path / 'values.py'
    values = "{'a': torch.tensor([1.5, float('nan')]), 'b': (torch.tensor(3), date(2026, 1, 2)), 'c': [{1}, [1, 2.5]]}"
    path.write_text(f'import torch\nfrom datetime import date\ndef columns(images, captions):\n    return {values}\n')
    found = compute_columns(str(path), [draw(0), draw(1)], [['a'], ['b']])
    assert found == [{'a': 1.5, 'b': 3, 'c': '{1}'}, {'a': None, 'b': '2026-01-02', 'c': [1, 2.5]}]
    assert json.loads(json.dumps(found)) == found


def test_error_of_the_function_names_the_images(tmp_path):
    path = tmp_path / 'buggy.py'
    path.write_text('def columns(images, captions):\n    return undefined\n')
    with pytest.raises(RuntimeError, match=r"images 'image-0' to 'image-7': .*buggy.py: NameError") as found:
        run(tmp_path / 'out', DrawnSource(1), columns_from=str(path))
    assert isinstance(found.value.__cause__, NameError)
    path = tmp_path / 'again.py'
    path.write_text("def columns(images, captions):\n    return {'aesthetic_score': [1.0] * len(images)}\n")
    with pytest.raises(UserError, match="image 'image-0' has a column 'aesthetic_score' already; use another name"):
        run(tmp_path / 'other', DrawnSource(1), columns_from=str(path))


def test_file_is_checked_before_images_are_read(tmp_path):
    (tmp_path / 'scores.json').write_text('{}')
    with pytest.raises(RecipeError, match='columns_from: .*is not a Python file'):
        settings(tmp_path / 'out', columns_from=str(tmp_path / 'scores.json'))
    (tmp_path / 'empty.py').write_text('')
    with pytest.raises(UserError, match=r'has no function `columns`; define columns\(images, captions\)'):
        compute_columns(str(tmp_path / 'empty.py'), [draw(0)], [['a']])


@pytest.mark.slow
def test_example_scores_by_a_model_from_a_local_folder(tmp_path, monkeypatch):
    folder = write_clip(tmp_path / 'clip')
    monkeypatch.setenv('CLIP_FOLDER', str(folder))
    threads = torch.get_num_threads()
    images, captions = [draw(0, width=40, height=40), draw(1, width=60, height=30)], [['a cat', 'x'], ['two dogs']]
    try:
        found = compute_columns(str(ROOT / 'docs' / 'clip_similarity.py'), images, captions)
    finally:
        torch.set_num_threads(threads)
    model: Any = CLIPModel.from_pretrained(folder)
    processor: Any = CLIPProcessor.from_pretrained(folder)
    for image, texts, columns in zip(images, captions, found, strict=True):
        with torch.no_grad():
            logits = model(**processor(images=image, text=texts[:1], return_tensors='pt')).logits_per_image
            similarity = logits / model.logit_scale.exp()
        assert columns['clip_similarity'] == pytest.approx(similarity.item(), abs=1e-5)
