"""Named rules reject answers that are no captions; prompts and settings with mistakes are refused."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from captioning.vlm_server import write_images
from commands import refusal
from golden import check_transcripts

from diffusion.captioning.settings import load_settings
from diffusion.config.language_model import JudgeConfig, VisionLanguageConfig
from diffusion.config.language_model_checks import vision_problems
from diffusion.config.prompt_files import Prompt, load_prompt
from diffusion.errors import GaveUp, UserError
from diffusion.language_models.endpoint import Endpoint, Fault, InFlightLimit, Refused
from diffusion.language_models.engine import Answer, Question
from diffusion.language_models.rejection import rejection

PROMPT = Prompt(
    'x', 1, 'Describe this image in one sentence that names the main subject and where it is.', max_words=40
)
PROMPTS = {'short': PROMPT, 'cut off': PROMPT, 'any length': replace(PROMPT, max_words=None)}
PROMPTS |= {name: load_prompt(name, 'columns.a') for name in ('long', 'tags')}


def test_answers_are_accepted_or_rejected_by_a_rule() -> None:
    def rule(line: str) -> list[str | None]:
        name, _, answer = line.partition(':')
        return [rejection(f'{answer}\n', PROMPTS[name], cut_off=name == 'cut off')]

    check_transcripts(Path(__file__).parent / 'golden/rules', rule)


def test_the_number_of_requests_in_flight_follows_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr('diffusion.language_models.endpoint.time.monotonic', lambda: now[0])
    limit = InFlightLimit(10)
    for _ in range(3):
        limit.grow()
    assert limit.value == 10, '8 at first, one more per answer, and at most the maximum'
    for seconds, expected in ((0.0, 7.0), (0.9, 7.0), (1.0, 4.9)):
        now[0] = 10 + seconds
        limit.shrink()
        assert limit.value == pytest.approx(expected)
    limit.grow()
    assert limit.value == pytest.approx(4.9 + 1 / 4.9), 'slower after an overload'
    for seconds in range(20):
        now[0] = 20.0 + seconds
        limit.shrink()
    assert limit.value == 1


CHOICES = [{'message': {'content': ' A cat on a mat. \n'}, 'finish_reason': 'stop'}]
BODY = {'model': 'm', 'choices': CHOICES, 'usage': {'completion_tokens': 7, 'prompt_tokens': 90}}


def test_what_is_sent_and_what_each_response_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('VLM_TOKEN', 'se-cret')
    values = {'model': 'm', 'endpoint': 'http://a/v1/', 'token_variable': 'VLM_TOKEN', 'temperature': 0.3, 'seed': 5}
    engine, question = Endpoint(VisionLanguageConfig(**values)), Question(3, 4, 'a', PROMPT, b'image', 'image/png')

    def meaning(line: str) -> list[str]:
        status, after, body = f'{line}  '.split(' ', 2)
        if status == 'POST':
            sent = engine._content(replace(question, image=b'' if 'without' in body else b'image'), int(after))
            return [f'{engine.url} {engine.headers}', sent.decode()]
        try:
            if status != '200':
                engine._raise_for(int(status), body.strip().encode('latin-1'), after)
            answer = engine._parsed(json.dumps(BODY | json.loads(body)).encode(), question)
        except (Fault, Refused, UserError) as error:
            return [f'{error!r} {vars(error) or ""}'.strip()]
        return [f'{answer.text!r} {answer.rejected} {answer.tokens} {answer.prompt_tokens}']

    check_transcripts(Path(__file__).parent / 'golden/endpoint', meaning)


def test_pauses_grow_until_the_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    async def post(*_: Any) -> Answer:
        raise Fault('busy', counts=False, pause_seconds=25.0 if len(pauses) == 9 else 0.0)

    pauses, now = list[float](), [100.0]
    monkeypatch.setattr('diffusion.language_models.endpoint.asyncio.sleep', pause)
    monkeypatch.setattr('diffusion.language_models.endpoint.random.uniform', lambda low, high: low * high)
    monkeypatch.setattr('diffusion.language_models.endpoint.time.monotonic', lambda: now[0])
    monkeypatch.setattr(Endpoint, '_post', post)
    engine = Endpoint(VisionLanguageConfig(model='m', endpoint='http://a', patience_seconds=85.875))
    with pytest.raises(GaveUp, match=r'no answer to 13 requests in 101 s \(busy\); check the server, then start'):
        asyncio.run(engine._reply(None, Question(0, 0, 'a', PROMPT), 1))
    assert pauses == [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 25.0, 15.0, 15.0]
    assert sum(pauses[:-1]) == engine.settings.patience_seconds


def test_questions_are_taken_as_there_is_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(self: Any, session: Any, question: Question) -> Answer:
        try:
            await asyncio.sleep(0 if question.row in (0, 9, 17) else 60)
            return Answer(question, 'fine')
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # closing a connection takes some time
            ended.append(question.row)
            raise

    monkeypatch.setattr(Endpoint, '_answer', answer)
    engine, taken, ended = Endpoint(VisionLanguageConfig(model='m', endpoint='http://a')), list[int](), list[int]()
    engine.limit.value = 20.0
    answers: Any = engine.answers(Question(0, taken.append(row) or row, 'a', PROMPT) for row in range(100))
    found = [(next(answers).question.row, len(taken)) for _ in range(3)]
    assert found == [(0, 8), (9, 16), (17, 22)], '8 at a time, then 20 in flight'
    answers.close()
    assert sorted([*ended, 0, 9, 17]) == taken


def test_a_prompt_file_with_mistakes_is_refused_with_all_of_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    def outcome(line: str) -> list[str]:
        Path('a.yaml').write_text(
            yaml.safe_dump({'name': 'a', 'version': 1, 'text': 'Describe it.'} | json.loads(line))
        )
        try:
            return [str(load_prompt('a.yaml', 'columns.b').plan())]
        except UserError as error:
            return str(error).split('\n  ')

    check_transcripts(Path(__file__).parent / 'golden' / 'prompts', outcome)


def test_the_settings_of_a_judge_decide_its_answers_and_its_name() -> None:
    local = JudgeConfig(model='org/a b/', revision='0123456789' * 4, engine='transformers', dtype='float16')
    remote = JudgeConfig(model='m', scales=['mine.yaml'], max_tokens=5, temperature=0.5, seed=3, attempts=4)
    sampling = {'max_tokens': 5, 'temperature': 0.5, 'seed': 3, 'attempts': 4}
    assert remote.made_with == {'model': 'm', 'revision': None, 'engine': 'endpoint', 'sampling': sampling}
    assert local.made_with['sampling'] == {'max_tokens': 400, 'temperature': 0.0, 'seed': 17, 'dtype': 'float16'}
    assert (local.label, remote.label) == ('a-b/0123456', 'm')
    assert local.instructions == {'scales[0]': 'alignment', 'scales[1]': 'aesthetics'}
    assert remote.instructions == {'scales[0]': 'mine.yaml'}
    rating = Prompt('x', 1, 'Rate it.', answer=r'rating: (\w+)', scale=[1, 5])
    answers = {'rating: 1': '1', 'rating: 0': None, 'rating: 5': '5', 'rating: 6': None, 'rating: x': None}
    answers['rating: 2 </think> rating: 3, rating: 4'] = '4'
    assert {answer: rating.parsed(answer) for answer in answers} == answers


SETTINGS = {'model': 'm', 'endpoint': 'http://localhost:1/v1', 'columns': {'a': 'short'}}


def test_settings_have_bounds() -> None:
    bounds = {'max_tokens': (1, 100_000), 'temperature': (0, 2), 'seed': (0, 2**31 - 2), 'attempts': (1, 10)}
    bounds |= {'batch_size': (1, 4096), 'concurrency': (1, 4096)}
    for name, (low, high) in (bounds | {'timeout_seconds': (0.1, 3600), 'patience_seconds': (0, 86_400)}).items():
        for value, found in ((low, []), (high, []), (low - 0.01, [name]), (high + 0.01, [name])):
            settings = replace(VisionLanguageConfig(model='m', endpoint='http://a'), **{name: value})
            assert [each.where for each in vision_problems(settings)] == found


def test_settings_with_mistakes_are_refused_with_all_of_them(tmp_path: Path) -> None:
    def mistakes(line: str) -> list[str]:
        (tmp_path / 'vlm.yaml').write_text(yaml.safe_dump(SETTINGS | json.loads(line)))
        with pytest.raises(UserError) as error:
            load_settings(tmp_path / 'vlm.yaml')
        return str(error.value).split('\n  ')[1:]

    check_transcripts(Path(__file__).parent / 'golden/settings', mistakes)


def test_a_folder_without_shards_and_a_missing_token_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / 'vlm.yaml'
    path.write_text(yaml.safe_dump(SETTINGS | {'token_variable': 'VLM_TOKEN'}))
    assert 'has no index.json' in refusal(capsys, 'caption', tmp_path, '--with', path)
    monkeypatch.delenv('VLM_TOKEN', raising=False)
    data = write_images(tmp_path / 'data', shards=1, each=1)
    assert 'the environment variable VLM_TOKEN is not set' in refusal(capsys, 'caption', data, '--with', path)
