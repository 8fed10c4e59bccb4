"""Named rules reject answers that are no captions; prompts and settings with mistakes are refused."""

from pathlib import Path

import pytest
import yaml
from commands import refusal

from diffusion.captioning.settings import load_settings
from diffusion.config.prompt_files import Prompt, load_prompt
from diffusion.errors import UserError
from diffusion.language_models.rejection import rejection

PROMPT = Prompt(
    'x', 1, 'Describe this image in one sentence that names the main subject and where it is.', max_words=40
)
GOOD = [
    'A gray cat sleeps on a red mat beside a window.',
    'A very, very, very tall tree',
    'A sign that reads "營業中" above the door of a shop, in warm light.',
    'An unfortunate fall of a skier',
    '42 red balloons',
]
BAD = {
    'empty': '  \n',
    'refusal': "I'm sorry, but I can't help with identifying people.",
    'loop': 'A wall of ' + 'a red brick and ' * 8,
    'echo': 'Describe this image in one sentence that names the main subject and where it is: a cat.',
    'other_language': 'На фотографии изображена кошка on a mat',
    'too_long': ' '.join(f'word{number}' for number in range(41)),
}


@pytest.mark.parametrize('answer', GOOD)
def test_a_caption_is_accepted(answer: str) -> None:
    assert rejection(answer, PROMPT, cut_off=False) is None


@pytest.mark.parametrize(('rule', 'answer'), BAD.items(), ids=list(BAD))
def test_a_bad_answer_is_rejected_by_its_rule(rule: str, answer: str) -> None:
    assert rejection(answer, PROMPT, cut_off=False) == rule


def test_rules_of_the_prompt_and_of_the_length() -> None:
    assert rejection('A cat on a', PROMPT, cut_off=True) == 'cut_off'
    assert rejection('one sentence only', load_prompt('long', 'columns.a'), cut_off=False) == 'too_short'
    assert rejection('cat mat window', load_prompt('tags', 'columns.a'), cut_off=False) == 'not_a_list'
    assert rejection('cat, mat, window', load_prompt('tags', 'columns.a'), cut_off=False) is None


def test_the_stored_caption_fills_the_placeholder() -> None:
    prompt = Prompt('x', 1, 'Improve: {caption}', with_caption=True)
    assert prompt.filled('a {cat}') == 'Improve: a {cat}'


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'with_caption': True}, 'has no {caption}; add it'),
        ({'text': 'Improve: {caption}'}, 'add with_caption: true'),
        ({'text': 'Improve: {text}'}, '{text} is not a placeholder'),
        ({'reject': {'a': '('}}, 'is not a regular expression'),
        ({'texts': 'a'}, 'unknown key'),
    ],
)
def test_a_prompt_file_with_a_mistake_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / 'mine.yaml'
    path.write_text(yaml.safe_dump({'name': 'mine', 'version': 1, 'text': 'Describe it.'} | change))
    with pytest.raises(UserError) as error:
        load_prompt(str(path), 'columns.a')
    assert message in str(error.value) and str(path) in str(error.value)


SETTINGS = {'model': 'm', 'endpoint': 'http://localhost:1/v1', 'columns': {'a': 'short'}}


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'endpoint': None}, 'endpoint: is missing'),
        ({'endpoint': 'localhost:8000'}, "'localhost:8000' is not a URL"),
        (
            {'columns': {'a': 'shrot'}},
            "there is no prompt 'shrot', and it is not the path of a .yaml file; did you mean 'short'?",
        ),
        ({'columns': {'original': 'short'}}, 'means the captions in the shards'),
        ({'api_key': 'sk-' + 'a' * 40}, 'looks like a secret'),
        ({'engine': 'transformers', 'endpoint': None, 'model': 'org/name'}, 'revision: is missing'),
        (
            {'engine': 'transformers', 'endpoint': None, 'model': 'org/name', 'revision': 'main'},
            "revision: 'main' is not a commit",
        ),
        ({'max_tokens': 0}, 'max_tokens: 0 is out of range'),
        ({'batch_size': 0}, 'batch_size: 0 is out of range'),
    ],
)
def test_settings_with_a_mistake_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / 'vlm.yaml'
    path.write_text(yaml.safe_dump(SETTINGS | change))
    with pytest.raises(UserError) as error:
        load_settings(path)
    assert message in str(error.value)


def test_a_folder_without_shards_and_a_missing_token_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / 'vlm.yaml'
    path.write_text(yaml.safe_dump(SETTINGS | {'token_variable': 'VLM_TOKEN'}))
    assert 'has no index.json' in refusal(capsys, 'caption', tmp_path, '--with', path)
    monkeypatch.delenv('VLM_TOKEN', raising=False)
    from captioning.vlm_server import write_images

    data = write_images(tmp_path / 'data', shards=1, each=1)
    assert 'the environment variable VLM_TOKEN is not set' in refusal(capsys, 'caption', data, '--with', path)
