"""`diffusion data pairs`: pairs of answers, scores and tables, as the loader reads them."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from evaluation.comparisons import answers_text
from golden import check_transcripts
from PIL import Image
from prepare.drawn import samples

from diffusion import cli
from diffusion.evaluation.comparison_page import read_key
from diffusion.exit_codes import USAGE_ERROR

COLORS = ['red', 'green', 'blue', 'white', 'black', 'gray']


@pytest.fixture
def images(tmp_path, monkeypatch) -> list[Path]:
    """Image files of one color each, in folders `a` and `b` of the working folder, which also has `prompts.txt`."""
    monkeypatch.chdir(tmp_path)
    Path('prompts.txt').write_text('\n'.join(f'prompt {index}' for index in range(6)))
    files = []
    for number, name in enumerate('ab'):
        Path(name).mkdir()
        for index, color in enumerate(COLORS):
            files.append(Path(name, f'{index}.png'))
            image = Image.new('RGB', (32, 24), color)
            image.putpixel((0, 0), (number, 9, 9))
            image.save(files[-1])
    return files


def run(*words: str | Path, status: int = 0) -> list[dict]:
    assert cli.main(['data', 'pairs', *map(str, words), '--out', 'pairs']) == status
    return samples(Path('pairs')) if Path('pairs').exists() else []


def test_majorities_of_the_answers_are_pairs(images, capsys):
    words = ['a', 'b', '--prompts', 'prompts.txt', '--limit', '5', '--checks', '5', '--out', 'page']
    assert cli.main(['compare', *words]) == 0
    key = read_key(Path('page/key.json'))
    Path('page/answers').mkdir()

    check = next(pair for pair in key.pairs if pair.a is None)
    for number in range(3):

        def choose(pair, question, number=number):
            """Prefer A for prompt 0, B mostly for prompt 1, and neither for others; one fails a check of 5."""
            other = 'second' if (pair.a or pair.damaged) == 'first' else 'first'
            if pair.a is None:
                return pair.damaged if number == 2 and pair is check else other
            return {0: pair.a, 1: other if number else pair.a}.get(pair.prompt, 'tie')

        Path(f'page/answers/{number}.json').write_text(answers_text(key, number, choose))
    careless = answers_text(key, 3, lambda pair, question: pair.damaged or 'tie')
    Path('page/answers/3.json').write_text(careless)
    found = {each['captions'][0]: each for each in run('page')}
    assert 'pairs: 2 pairs\nleft out 3 pairs without a difference' in capsys.readouterr().out
    (one, other) = found['prompt 0'], found['prompt 1']
    assert (one['image'], one['rejected_image']) == (images[0].read_bytes(), images[6].read_bytes())
    assert (other['image'], other['rejected_image']) == (images[7].read_bytes(), images[1].read_bytes())
    assert (one['width'], one['height']) == (32, 24)
    source = {'source': f'answers of {key.comparison}'}
    assert [each['metadata'] for each in (one, other)] == [source | {'difference': part} for part in (1.0, 1 / 3)]


def test_best_and_worst_image_of_a_prompt_are_a_pair(images, capsys):
    scores = {'prompts': ['x', 'x', 'x', 'y', 'y', 'z'], 'scores': {'pick_score': [0.2, 0.9, 0.1, 0.5, 0.6, None]}}
    for name in ('batch-00000', 'batch-00001'):
        Path('a', name).mkdir()
    for index in range(6):
        images[index].rename(Path('a', f'batch-0000{index // 3}', f'{index:06}.png'))
    Path('a/scores.json').write_text(json.dumps(scores))
    (pair,) = run('a', '--score', 'pick_score', '--min-difference', '0.8')
    assert 'left out 1 pairs below --min-difference' in capsys.readouterr().out
    assert (pair['captions'], pair['metadata']['source']) == (['x'], 'pick_score')
    assert pair['image'] == Path('a/batch-00000/000001.png').read_bytes()
    assert pair['rejected_image'] == Path('a/batch-00000/000002.png').read_bytes()


def test_tables_of_pairs_are_read(images, capsys, monkeypatch):
    monkeypatch.setattr('diffusion.prepare.convert_part.SHARD_BYTES', 1)
    first, second = (file.read_bytes() for file in images[:2])
    damaged = first[:50]
    rows = [(first, second, 0.75), (first, second, 0.0), (first, second, 0.5), (damaged, second, 1.0)]
    columns = dict(zip(('jpg_0', 'jpg_1', 'label_0'), zip(*rows, strict=True), strict=True))
    pq.write_table(pa.table({'caption': ['x'] * 4} | {name: [*each] for name, each in columns.items()}), 'p.parquet')
    lines = [{'prompt': 'y', 'image': {'path': 'a/2.png'}, 'rejected_image': 'b/2.png', 'source': 'me'}]
    Path('q.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    found = run('p.parquet', 'q.jsonl')
    assert 'left out 1 pairs with an unreadable image\nleft out 1 pairs without' in capsys.readouterr().out
    assert [(each['image'], each['rejected_image']) for each in found[:2]] == [(first, second), (second, first)]
    assert [each['metadata']['difference'] for each in found] == [0.5, 1.0, 1.0]
    assert [each['key'] for each in found] == ['000000000', '000000001', '000000004']
    assert len([*Path('pairs').glob('*.mds')]) == 3, 'a shard of one sample is full'
    assert found[2]['image'] == images[2].read_bytes() and found[2]['metadata']['source'] == 'me'


def test_mistakes_are_named_and_leave_nothing_behind(images, capsys):
    Path('q.jsonl').write_text(json.dumps({'prompt': 'y', 'image': 'a/9.png', 'rejected_image': 'b/2.png'}))
    Path('r.jsonl').write_text(json.dumps({'prompt': 'y', 'image': 'a/1.png'}))
    Path('s.jsonl').write_text('[3]')
    Path('t.jsonl').write_text(json.dumps({'prompt': 'y', 'image': 3, 'rejected_image': 'b/2.png'}))
    Path('u.jsonl').touch()
    Path('b/batch-00000').mkdir()
    images[6].rename('b/batch-00000/000000.png')

    def outcome(line: str) -> list[str]:
        words, _, scores = line.partition(' with ')
        Path('b/scores.json').write_text(scores)
        run(*words.split(), status=USAGE_ERROR)
        return capsys.readouterr().err.splitlines()

    check_transcripts(Path(__file__).parent / 'golden/pairs', outcome)
    files = {f'{name}.jsonl' for name in 'qrstu'} | {'prompts.txt'}
    assert {path.name for path in Path().iterdir()} == {'a', 'b', *files}
