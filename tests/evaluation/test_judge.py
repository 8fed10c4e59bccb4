"""Benchmarks by a judge: their rules against independent ones, and answers of a server with faults, kept on disk."""

import csv
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import networkx
import numpy as np
import pytest
from captioning.vlm_server import MODEL
from evaluation.judge_server import Drawing, JudgeServer, answer_about, write_dpg, write_tifa
from PIL import Image

from diffusion.config.image_metrics import better_directions
from diffusion.config.language_model import JudgeConfig
from diffusion.errors import GaveUp, UserError
from diffusion.evaluation.evaluated_checkpoint import EvaluatedCheckpoint
from diffusion.evaluation.generated_images import GeneratedImages, Sampling
from diffusion.evaluation.judge import Judge, JudgedScore
from diffusion.evaluation.prompts import Prompt, read_prompts
from diffusion.evaluation.question_rules import BenchmarkQuestion, counting, image_scores, question_score
from diffusion.prepare.image_hashes import exact_hash


def question(number: int, parents: Sequence[int] = (), category: str = 'entity') -> BenchmarkQuestion:
    return BenchmarkQuestion('Is it?', ('yes', 'no'), 'yes', category, number, tuple(parents))


def test_answers_count_if_those_of_all_ancestors_are_right_on_500_graphs() -> None:
    draw, below = random.Random(1), 0
    for _ in range(500):
        numbers = draw.sample(range(1, 40), draw.randint(1, 15))
        parents = {each: draw.sample(numbers[:at], draw.randint(0, min(3, at))) for at, each in enumerate(numbers)}
        right = {each: draw.random() < 0.8 for each in numbers}
        graph = networkx.DiGraph([(parent, each) for each in numbers for parent in parents[each]])
        graph.add_nodes_from(numbers)
        expected = [all(right[one] for one in {each} | networkx.ancestors(graph, each)) for each in numbers]
        questions = [question(each, parents[each] or [0]) for each in numbers]
        assert counting(questions, [right[each] for each in numbers]) == expected
        below += sum(right.values()) - sum(expected)
    assert below > 300, 'the parents matter'


def test_an_answer_is_read_only_if_it_is_one_choice() -> None:
    numbers = BenchmarkQuestion('How many?', ('1', '2'), '1', 'counting', 1).instruction
    assert (numbers.version, numbers.with_caption) == (1, True), 'part of the hash of kept answers'
    answers = ('1', '1.', '**1** dog', '1, or one', '- 1', '1.5', '1-2', '1 or 2', '12', '-1', '**\u22121**')
    assert [numbers.parsed(each) for each in answers] == ['1'] * 5 + [None] * 6
    answers = ('yes', 'Yes, and there is no doubt.', 'Yes. Yes.', 'yes and no', 'Yes/No', 'no, or yes.', 'yesterday')
    parsed = [question(1).instruction.parsed(each) for each in answers]
    assert parsed == ['yes', 'Yes', 'Yes', None, None, None, None]
    colors = BenchmarkQuestion('Color?', ('black', 'black and white', 'white'), 'white', 'color', 1).instruction
    assert [*map(colors.parsed, ('black and white', 'white and black'))] == ['black and white', None]


def test_score_is_the_mean_over_prompts_and_categories_ignore_the_graph() -> None:
    first = [question(1), question(2, [1], 'attribute')]
    questions = [first, first, [question(1, [0, 7])]]
    right = [[False, True], [True, True], [True]]
    images, prompt_of = image_scores(questions, right), np.array([0, 0, 1])
    assert images.tolist() == [0, 1, 1]
    score = question_score(images, questions, right, prompt_of)
    assert score.score == (0.5 + 1) / 2
    assert {kind: mean for kind, (mean, _) in score.kinds.items()} == {'entity': 2 / 3, 'attribute': 1}
    assert score.scaled(100).score == 75 and score.scaled(100).interval[1] <= 100


def test_intervals_of_a_question_benchmark_cover_the_true_score() -> None:
    draw, covered = np.random.default_rng(0), 0
    for _ in range(400):
        quality = draw.beta(4, 2, 60)  # of a prompt; its images have the same questions
        right = [[*(draw.random(10) < each)] for each in quality for _ in range(2)]
        questions = [[question(number) for number in range(1, 11)]] * len(right)
        found = question_score(image_scores(questions, right), questions, right, np.arange(120) // 2)
        covered += found.interval[0] <= 4 / 6 <= found.interval[1]
    assert 365 <= covered <= 395


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setattr('diffusion.language_models.endpoint.FIRST_PAUSE_SECONDS', 0.02)
    server = JudgeServer()
    yield server
    server.close()


@pytest.fixture
def judged(tmp_path: Path, server: JudgeServer) -> Callable[..., dict[str, JudgedScore]]:
    """Function that generates two images per prompt, once, and judges them."""
    checkpoint = EvaluatedCheckpoint(cast(Any, None), cast(Any, None), tmp_path, 'ba1', 'ema')

    def judge(metrics: list[str], prompts: list[Prompt], **settings: Any) -> dict[str, JudgedScore]:
        repeated = [each for each in prompts for _ in range(2)]
        images = GeneratedImages(tmp_path / metrics[0], [each.text for each in repeated], Sampling(batch_size=4), 'ba1')
        assert len([*images.own_batches(Drawing())]) == -(-len(repeated) // 4)
        given = {'model': MODEL, 'endpoint': f'{server.url}/v1', 'attempts': 4, **settings}
        found = Judge(JudgeConfig(**given), metrics)
        found.check(repeated)
        return found.scores(checkpoint, images, repeated, 2)

    return judge


def expected_dpg(file: Path, folder: Path) -> tuple[float, int]:
    """Return the score and the number of answers without yes or no, by the loops of the published script."""
    items: dict[str, list[dict[str, str]]] = {}
    with file.open(newline='') as lines:
        for row in csv.DictReader(lines):
            items.setdefault(row['item_id'], []).append(row)
    scores, unclear = [], 0
    for image, path in enumerate(sorted(folder.rglob('*.png'))):
        scores_of = {}
        rows = [*items.values()][image // 2]
        for row in rows:
            asked = f'{row["question_natural_language"]}\nAnswer with one of these choices only: yes, no'
            answer = answer_about(Image.open(path), asked)
            scores_of[int(row['proposition_id'])] = float(answer in ('yes', 'Yes.') or answer.endswith('\nYes'))
            unclear += answer == 'I am not sure.'
        for row in rows:
            for parent in map(int, row['dependency'].split(',')):
                if parent and scores_of[parent] == 0:
                    scores_of[int(row['proposition_id'])] = 0
        scores.append(sum(scores_of.values()) / len(scores_of))
    return 100 * sum(scores) / len(scores), unclear


def test_dpg_with_faults_equals_the_published_loops_and_needs_no_server_again(
    judged: Callable[..., dict[str, JudgedScore]], server: JudgeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_dpg(tmp_path / 'dpg_bench.csv', 10)
    prompts = read_prompts(file)
    assert len(prompts) == 10 and prompts[0].text == 'scene 0, "with" a\nline'
    questions = 2 * sum(len(each.questions) for each in prompts)
    server.faults, server.rate = ('429', '500', 'half', 'empty', 'other model', 'down'), 0.08
    found = judged(['dpg'], prompts, revision='0123456789abcdef')
    assert [*found] == [f'dpg/{MODEL}/0123456']
    score, unclear = expected_dpg(file, tmp_path / 'dpg')
    result = found[f'dpg/{MODEL}/0123456']
    assert result.score.score == pytest.approx(score)
    assert (result.answers, result.unusable) == (questions, unclear)
    assert set(result.score.kinds) == {'entity', 'attribute', 'relation'}
    assert result.score.interval[0] < score < result.score.interval[1]
    assert f'{unclear} of {questions} answers were not as asked' in caplog.text
    assert server.good.total() <= questions + 3 * unclear, 'only unclear answers are asked for again'

    [answer, *_] = json.loads(next(tmp_path.rglob('000000.judge.json')).read_text()).values()
    assert answer['question'].endswith('Answer with one of these choices only: yes, no')
    assert (answer['made_with']['model'], answer['made_with']['revision']) == (MODEL, '0123456789abcdef')
    assert answer['parsed'] in (None, 'yes', 'Yes', 'No', 'no') and isinstance(answer['answer'], str)

    server.faults, server.good_limit = (), 0  # from now on, the server answers nothing
    assert judged(['dpg'], prompts, revision='0123456789abcdef') == found
    with pytest.raises(GaveUp, match='no answer to '):  # another judge
        judged(['dpg'], prompts, patience_seconds=0)
    next(tmp_path.rglob('000003.judge.json')).write_text('{"cut')
    with pytest.raises(GaveUp, match='start the same command again'):
        judged(['dpg'], prompts, revision='0123456789abcdef', patience_seconds=0)


def test_tifa_is_the_mean_accuracy_of_captions(
    judged: Callable[..., dict[str, JudgedScore]], server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr('diffusion.evaluation.judge.status_line.show', shown.append)
    prompts = read_prompts(write_tifa(tmp_path / 'tifa.json', 6))
    assert [len(each.questions) for each in prompts] == [2, 4, 6, 2, 4, 6]
    found = judged(['tifa'], prompts)[f'tifa/{MODEL}']
    means, count = [], 0
    for image, path in enumerate(sorted((tmp_path / 'tifa').rglob('*.png'))):
        answers = json.loads(path.with_suffix('.judge.json').read_text()).values()
        for each in answers:  # equal questions about an image are asked once, and unusable answers are asked for again
            asked = server.asked[exact_hash(Image.open(path)), each['question']]
            assert asked == (4 if each['parsed'] is None else 1)
        parsed = {each['question'].partition('\n')[0]: each['parsed'] for each in answers}
        count += len(parsed)
        own = prompts[image // 2].questions
        means.append(
            sum(parsed[each.text] is not None and parsed[each.text].lower() == each.answer for each in own) / len(own)
        )
    assert found.score.score == pytest.approx(sum(means) / len(means))
    assert found.images == pytest.approx(means)
    assert set(found.score.kinds) == {'object', 'color'}
    assert 0 < found.unusable < found.answers == 48
    answered = [f'{MODEL} answered {number} of {count} questions' for number in range(1, count + 1)]
    assert shown == [*(f'generated {number} of 12 images' for number in (0, 4, 8)), '', *answered, '']


def test_ratings_are_read_by_the_rule_of_the_prompt_file(
    judged: Callable[..., dict[str, JudgedScore]], server: JudgeServer, tmp_path: Path
) -> None:
    prompts = [Prompt(f'thing {number}', ('good', 'bad')[number % 2]) for number in range(8)]
    found = judged(['judge_score'], prompts)
    assert [*found] == [f'judge_score/alignment-1/{MODEL}', f'judge_score/aesthetics-1/{MODEL}']
    ratings = {}
    for image, path in enumerate(sorted((tmp_path / 'judge_score').rglob('*.png'))):
        for answer in json.loads(path.with_suffix('.judge.json').read_text()).values():
            scale = 'alignment' if f'The prompt: thing {image // 2}' in answer['question'] else 'aesthetics'
            number = int(answer['answer'].rpartition(' ')[2].strip('*'))
            assert answer['parsed'] == (str(number) if 1 <= number <= 10 else None)
            ratings[scale, image] = number if 1 <= number <= 10 else 1
    for scale in ('alignment', 'aesthetics'):
        score = found[f'judge_score/{scale}-1/{MODEL}'].score
        assert score.score == pytest.approx(np.mean([value for (name, _), value in ratings.items() if name == scale]))
        assert 1 <= score.interval[0] < score.score < score.interval[1] <= 10
        assert set(score.kinds) == {'good', 'bad'}
    asked = server.asked.total()

    # With another rule and the same text, the kept answers are read again.
    text = next(Path('diffusion/config/prompts').glob('aesthetics.yaml')).read_text()
    own = tmp_path / 'own.yaml'
    own.write_text(text.replace('name: aesthetics', 'name: other').replace('scale: [1, 10]', 'scale: [0, 11]'))
    other = judged(['judge_score'], prompts, scales=[str(own)])[f'judge_score/other-1/{MODEL}']
    assert other.unusable == 0 and server.asked.total() == asked
    with pytest.raises(UserError, match=r'judge.scales\[1\]: alignment has the name and version of another scale'):
        judged(['judge_score'], prompts, scales=['alignment', 'alignment'])
    with pytest.raises(UserError, match=r'judge.scales\[0\]: long has no scale; give'):
        judged(['judge_score'], prompts, scales=['long'])


def test_mistakes_are_named(judged: Callable[..., Any], server: JudgeServer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dpg: the prompt 'a' has no questions; give dpg_bench.csv"):
        judged(['dpg'], [Prompt('a')])
    without = Judge(JudgeConfig(model=MODEL, endpoint='http://localhost/v1', token_variable='NO_SUCH_TOKEN'), [])
    with pytest.raises(UserError, match='NO_SUCH_TOKEN is not set'):
        without.check([])
    with pytest.raises(UserError, match='judge.revision: is missing; give the commit of org/name'):
        judged(['judge_score'], [Prompt('a')], engine='transformers', endpoint=None, model='org/name')
    file = tmp_path / 'dpg.csv'
    content = write_dpg(file, 2).read_text()
    file.write_text(content.replace('item1', 'item1', 1).replace(',0,', ',zero,', 1))
    with pytest.raises(UserError, match=r'dpg.csv line \d: is not a question of DPG-Bench or TIFA \(ValueError'):
        read_prompts(file)


def test_a_question_whose_parent_is_missing_is_kept_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_dpg(tmp_path / 'dpg.csv', 1)
    file.write_text(file.read_text().replace(',0,', ',99,', 1))
    [prompt] = read_prompts(file)
    assert prompt.questions[0].parents == (99,)
    assert 'item0: its questions depend on {99}, which it does not have' in caplog.text


def test_names_with_a_judge_have_a_direction() -> None:
    names = {'dpg/Qwen3-VL-8B', 'judge_score/alignment-1/m/abc', 'fid', 'metrics/eval/loss', 'tifas/x'}
    assert better_directions(names) == {
        'dpg/Qwen3-VL-8B': 'higher',
        'judge_score/alignment-1/m/abc': 'higher',
        'fid': 'lower',
    }
    settings = JudgeConfig(model='/models/qwen3 vl:8b/', revision='0123456789')
    assert settings.label == 'qwen3-vl-8b/0123456'
