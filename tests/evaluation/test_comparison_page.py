"""Comparison page: it does not reveal the models, and people answer by keyboard, mouse or touch, and go on later."""

import base64
import io
import json
import random
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from browser import browser_context, needs_browser, serious_issues
from evaluation.comparisons import COMPARISON, PROMPTS, draw_images, make_key
from PIL import Image, PngImagePlugin

from diffusion.errors import UserError
from diffusion.evaluation.compared_images import read_image
from diffusion.evaluation.comparison_answers import parse_answers
from diffusion.evaluation.comparison_page import (
    ComparisonKey,
    Pair,
    damaged_copy,
    data_uri,
    make_pairs,
    page_chunks,
    pair_images,
    read_key,
)
from diffusion.evaluation.comparison_server import AnswerFolder, make_server

KEY = make_key()


def data_of(html: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def image_of(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(',')[2])))


@pytest.fixture(scope='module')
def html() -> str:
    return ''.join(page_chunks(COMPARISON, KEY.pairs, draw_images))


@pytest.fixture(scope='module')
def address(html, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp('page') / 'index.html'
    path.write_text(html, encoding='utf-8')
    return path.as_uri()


# -- content --


def test_page_has_the_images_of_the_key(html):
    data = data_of(html)
    assert data['comparison'] == COMPARISON and len(data['pairs']) == len(PROMPTS) + 2
    for pair, stored in zip(KEY.pairs, data['pairs'], strict=True):
        assert stored['prompt'] == pair.text
        a, b = draw_images(pair.prompt)
        for side in ('first', 'second'):
            wanted = (a if side == pair.a else b) if pair.a is not None else (a if pair.source == 'a' else b)
            error = np.abs(np.asarray(image_of(stored[side]), dtype=float) - np.asarray(wanted)).mean()
            assert error > 30 if side == pair.damaged else error < 2


def test_page_does_not_tell_models_apart(html):
    assert not [word for word in ('runs/', 'ba10', 'ba20', 'ema', 'the-token', 'damaged') if word in str(data_of(html))]
    headers = set()
    for stored in data_of(html)['pairs']:
        assert stored.keys() == {'prompt', 'width', 'height', 'first', 'second'}
        for side in ('first', 'second'):
            image = image_of(stored[side])
            assert not image.getexif() and not {'comment', 'icc_profile', 'exif', 'xmp'} & image.info.keys()
            content = base64.b64decode(stored[side].partition(',')[2])
            headers.add((stored[side].partition(',')[0], image.size, content[: content.index(b'\xff\xda')][:160]))
    assert len(headers) == 1, 'format, size and quantization are those of all images'


def test_metadata_of_an_image_does_not_reach_the_page(tmp_path):
    text = PngImagePlugin.PngInfo()
    text.add_itxt('checkpoint', 'secret-run-ba100')
    image = Image.new('RGB', (8, 8))
    image.save(tmp_path / 'a.png', pnginfo=text)
    image.getexif()[0x0131] = 'secret-software'
    image.save(tmp_path / 'b.jpg', exif=image.getexif(), comment=b'secret comment')
    for name in ('a.png', 'b.jpg'):
        assert b'secret' in (tmp_path / name).read_bytes()
        assert b'secret' not in base64.b64decode(data_uri(read_image(tmp_path / name)).partition(',')[2])


def test_sides_and_positions_of_pairs_are_random():
    pairs = make_pairs([str(index) for index in range(2000)], 400, random.Random(1))
    ordinary = [pair for pair in pairs if pair.a is not None]
    checks = [index for index, pair in enumerate(pairs) if pair.a is None]
    assert 0.46 < sum(pair.a == 'first' for pair in ordinary) / 2000 < 0.54
    assert 0.42 < sum(pairs[index].damaged == 'first' for index in checks) / 400 < 0.58
    assert sum(pairs[index].source == 'a' for index in checks) == 200
    assert 1000 < np.mean(checks) < 1400, 'attention checks are not at one end'
    assert [pair.prompt for pair in ordinary] != sorted(pair.prompt for pair in ordinary)


def test_a_damaged_image_is_a_mosaic_of_14_noisy_tiles():
    damaged = np.asarray(damaged_copy(Image.new('RGB', (56, 28), (100, 150, 200))))
    tiles = damaged[::4, ::4]
    noise = np.random.default_rng(0).normal(0, 40, (7, 14, 3))
    assert np.array_equal(tiles, (np.array([60, 90, 120]) + 40 + noise).clip(0, 255).astype(np.uint8))
    assert np.array_equal(damaged, tiles.repeat(4, axis=0).repeat(4, axis=1))


def test_images_of_different_sizes_are_shown_at_one_size():
    small, large = Image.new('RGB', (64, 48)), Image.new('RGB', (256, 192))
    first, second = pair_images(Pair(0, 'a', 'second'), small, large)
    assert first.size == second.size == (256, 192)
    with pytest.raises(UserError, match=r"prompt 5 \('a'\): A has 64 x 48 pixels and B 256 x 256; .* crop the images"):
        pair_images(Pair(4, 'a', 'first'), small, Image.new('RGB', (256, 256)))


def test_key_is_read_as_it_was_written(tmp_path):
    (tmp_path / 'key.json').write_text(KEY.to_json(), encoding='utf-8')
    assert read_key(tmp_path / 'key.json') == KEY
    for content in ('', '[]', '{}', '{"pairs": [1]}', KEY.to_json().replace('"token"', '"tokin"')):
        (tmp_path / 'key.json').write_text(content, encoding='utf-8')
        with pytest.raises(UserError, match='key.json: is not the key.json that diffusion compare wrote'):
            read_key(tmp_path / 'key.json')
    with pytest.raises(UserError, match='none.json: does not exist; give the key.json'):
        read_key(tmp_path / 'none.json')


# -- in a browser --


def exported(page) -> str:
    """Click the visible download button of a page, and return the file's content."""
    with page.expect_download() as download:
        page.locator('[data-download]:visible').click()
    assert re.fullmatch(r'answers-c0ffee01-[0-9a-f]{16}\.json', download.value.suggested_filename)
    return Path(download.value.path()).read_text(encoding='utf-8')


def shown_pair(page, html: str) -> tuple[int, str]:
    """Return the index of the pair that a page shows, and its image, `first` or `second`, on the left."""
    left = page.get_attribute('#left', 'src')
    right = page.get_attribute('#right', 'src')
    for index, stored in enumerate(data_of(html)['pairs']):
        if {stored['first'], stored['second']} == {left, right}:
            return index, 'first' if stored['first'] == left else 'second'
    raise AssertionError('the page shows no pair')


def wait_for_next(page) -> None:
    """Wait until a page has shown the chosen answer and goes on to the next pair."""
    while page.evaluate('leaving'):  # the page's policy forbids wait_for_function
        page.wait_for_timeout(20)


def vote(page, html: str, quality: str, alignment: str) -> list[tuple[int, str, str]]:
    """Answer both questions of a pair by keys, and wait for the next pair; return (pair, question, choice)."""
    index, left = shown_pair(page, html)
    count = page.inner_text('#count')
    page.keyboard.press(quality)
    page.keyboard.press(alignment)
    wait_for_next(page)
    assert page.inner_text('#count') != count
    right = 'second' if left == 'first' else 'first'
    choice = {'ArrowLeft': left, 'ArrowRight': right, 'ArrowDown': 'tie'}
    return [(index, 'quality', choice[quality]), (index, 'alignment', choice[alignment])]


@pytest.fixture(scope='module')
def desktop():
    """Page factory of one browser of 1280 pixels, whose pages share storage unless a new context is made."""
    with browser_context(viewport={'width': 1280, 'height': 800}, has_touch=True) as (context, left):
        yield context, left
        assert left == [], 'no request leaves the page'


@pytest.fixture
def page(desktop, address):
    context, _ = desktop
    page = context.new_page()
    errors: list[str] = []
    page.on('pageerror', lambda error: errors.append(str(error)))
    page.on('console', lambda message: errors.append(message.text) if message.type == 'error' else None)
    page.goto(address)
    page.evaluate('localStorage.clear()')
    page.goto(address)
    yield page
    assert errors == []
    page.evaluate('unsaved = false')
    page.close()


@needs_browser
def test_votes_by_keyboard_survive_a_reload_and_are_exported(page, html, address):
    assert f'{len(KEY.pairs)} pairs' in page.inner_text('#start')
    page.keyboard.press('Tab')
    page.keyboard.press('Enter')
    given = vote(page, html, 'ArrowLeft', 'ArrowRight') + vote(page, html, 'ArrowDown', 'ArrowLeft')
    index, left = shown_pair(page, html)
    page.keyboard.press('ArrowRight')  # only the first question of the third pair

    page.reload()
    assert page.inner_text('#count') == f'2 of {len(KEY.pairs)}'
    assert shown_pair(page, html) == (index, left), 'the same pair with the same sides'
    given.append((index, 'quality', 'second' if left == 'first' else 'first'))
    page.keyboard.press('ArrowDown')
    given.append((index, 'alignment', 'tie'))
    wait_for_next(page)
    while page.is_visible('#pair'):
        given += vote(page, html, 'ArrowRight', 'ArrowRight')
    assert 'download your answers' in page.inner_text('#end')

    answers = parse_answers(exported(page), 'exported', COMPARISON, len(KEY.pairs))
    assert [(each.pair, each.question, each.choice) for each in answers] == given
    assert sorted({each.pair for each in answers}) == list(range(len(KEY.pairs)))


@pytest.mark.slow
@needs_browser
def test_order_and_sides_differ_between_people_and_favor_no_side(page):
    found = page.evaluate("""() => {
        const raters = [...Array(2000)].map(() => newState().rater);
        const sides = raters.map(rater => data.pairs.map((_, index) => +isSwapped(rater, index)));
        return {sides, orders: raters.map(orderFor)};
    }""")
    sides, orders = np.array(found['sides']), np.array(found['orders'])
    assert (abs(sides.mean(axis=0) - 0.5) < 0.06).all(), 'each pair is swapped for half of the people'
    together = np.corrcoef(sides.T)[np.triu_indices(sides.shape[1], 1)]
    assert (abs(together) < 0.1).all(), 'the sides of different pairs are independent'
    assert (orders.mean(axis=0) > 1.8).all() and (orders.mean(axis=0) < 3.2).all(), 'each position has any pair'
    assert len(np.unique(orders, axis=0)) > 500


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(('scheme', 'width'), [('light', 1280), ('dark', 390)])
def test_page_has_no_serious_accessibility_issue(page, scheme, width):
    page.set_viewport_size({'width': width, 'height': 800})
    page.emulate_media(color_scheme=scheme, reduced_motion='reduce')
    press = page.tap if width == 390 else page.click
    issues = serious_issues(page)
    press('#begin')
    issues += serious_issues(page)
    press('fieldset[data-question=quality] [data-side=left]')
    issues += serious_issues(page)
    press('fieldset[data-question=alignment] [data-side=right]')
    wait_for_next(page)
    assert page.inner_text('#count').startswith('1 ')
    assert page.evaluate('document.documentElement.scrollWidth') <= width
    boxes = [box for each in page.locator('.choices button').all() if (box := each.bounding_box())]
    assert len(boxes) == 6 and all(box['height'] >= 48 and box['width'] >= 48 for box in boxes), (
        'large enough for fingers'
    )
    press('[data-zoom=left]')
    issues += serious_issues(page)
    press('#close')
    page.evaluate('go(order.length)')
    assert f'{len(KEY.pairs) - 1} pairs are still open' in page.inner_text('#end')
    issues += serious_issues(page)
    assert issues == []


@pytest.mark.slow
@needs_browser
def test_answers_are_sent_to_the_server_of_the_page(desktop, html, tmp_path):
    folder = AnswerFolder(tmp_path / 'answers', KEY)
    with make_server(html.encode(), folder, host='127.0.0.1', port=0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        page = desktop[0].new_page()
        page.goto(f'http://127.0.0.1:{server.server_port}/?token=the-token')
        page.click('#begin')
        given = vote(page, html, 'ArrowLeft', 'ArrowRight')
        page.evaluate('sending')
        assert len(saved(folder)) == 2, 'sent as people go'
        while page.is_visible('#pair'):
            given += vote(page, html, 'ArrowRight', 'ArrowDown')
        page.locator('#outcome', has_text='Your answers were saved').wait_for()
        assert saved(folder) == given
        server.shutdown()
    page.click('#review')
    page.click('#next')
    page.locator('#outcome', has_text='could not be sent (no connection)').wait_for()
    assert [each.choice for each in parse_answers(exported(page), 'exported', COMPARISON, 9)] == [
        row[2] for row in given
    ]
    page.close()


def saved(folder: AnswerFolder) -> list[tuple[int, str, str]]:
    (file,) = folder.files()
    answers = parse_answers(file.read_bytes(), str(file), COMPARISON, len(KEY.pairs))
    return [(each.pair, each.question, each.choice) for each in answers]


def test_token_of_a_key_is_random():
    keys = [ComparisonKey(COMPARISON, {}, {}, '', []) for _ in range(2)]
    assert keys[0].token != keys[1].token and len(keys[0].token) >= 16
