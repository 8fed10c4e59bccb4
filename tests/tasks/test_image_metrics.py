"""Image metrics of checkpoints: the same on any number of ranks and after kills, from real runs of tiny models."""

import json
import random
import re
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from captioning.vlm_server import MODEL
from commands import refusals
from evaluation.judge_server import JudgeServer, write_dpg
from golden import check_golden
from PIL import Image
from recipe_files import write_yaml
from small_networks import write_clip, write_clip_vision, write_dino, write_inception, write_mask2former
from waiting import wait_until

from diffusion import cli
from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.evaluation.feature_networks import Inception
from diffusion.evaluation.generated_images import GeneratedImages, Sampling
from diffusion.evaluation.image_metrics import LAYOUTS, examples
from diffusion.evaluation.metrics import frechet_distance, kernel_distance
from diffusion.evaluation.prompts import Prompt
from diffusion.report.report_source import RunsSource
from diffusion.storage.mds import first_samples
from diffusion.tasks.evaluate import evaluate
from diffusion.tasks.watch import Watcher, WatchSettings
from diffusion.training.components import build_loader
from diffusion.training.train import train

METRICS = ['fid', 'kid', 'clip_fid', 'cmmd', 'dino_mmd', 'precision', 'recall', 'clip_score', 'efficientnet_distance']
IMAGES = 12


@pytest.fixture(scope='module')
def networks(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp('networks')
    vision, dino = write_clip_vision(folder / 'vision'), write_dino(folder / 'dino')
    inception, clip = write_inception(folder / 'inception.pth'), write_clip(folder / 'clip')
    sources = {'inception': inception, 'cmmd': vision, 'clip_fid': vision, 'dino': dino, 'clip_score': clip}
    sources['geneval_hf'] = write_mask2former(folder / 'mask2former')
    return {name: str(path) for name, path in sources.items()}


@pytest.fixture(scope='module')
def trained(tmp_path_factory, tiny_recipe) -> Path:
    """Recipe of a run of two batches, whose `runs_dir` tests override."""
    folder = tmp_path_factory.mktemp('trained')
    content = tiny_recipe(folder / 'runs', name='run')
    content['trainer'] |= {'max_duration': '2ba', 'save_interval': '2ba'}
    content['eval_streams'] = content['streams']
    path = write_yaml(folder / 'recipe.yaml', content)
    train(load(path)).close()
    return path


@pytest.fixture
def prepared(trained, tmp_path, networks):
    """Function that copies the trained run, and returns the recipe of an evaluation and the run's folder."""

    def prepare(name: str = 'a', **changes: object) -> tuple[Path, Path]:
        shutil.copytree(trained.parent / 'runs', tmp_path / name / 'runs')
        content = yaml.safe_load(trained.read_text())
        content |= {'runs_dir': str(tmp_path / name / 'runs'), 'task': 'evaluate', 'name': 'run'}
        settings = {'metrics': METRICS, 'networks': networks, 'num_images': IMAGES, 'batch_size': 2}
        settings |= {'num_inference_steps': 2, 'guidance_scales': [1, 3.5]} | changes
        content['evaluators'] = {'image_metrics': settings}
        path = write_yaml(tmp_path / name / 'recipe.yaml', content)
        return path, tmp_path / name / 'runs' / 'run'

    return prepare


def results(run: Path) -> dict:
    return json.loads((run / 'evaluations' / 'ba2.json').read_text())


def sweep(run: Path) -> list[dict[str, float]]:
    return [each['metrics'] for each in results(run)['guidance']]


def pixels(run: Path) -> dict[str, bytes]:
    # A killed process may leave an unfinished folder of a batch, which nothing reads.
    found = run.glob('evaluations/ba2/*/batch-[0-9][0-9][0-9][0-9][0-9]/*.png')
    return {path.name: np.asarray(Image.open(path)).tobytes() for path in found}


def on_one_and_several(prepared, ranks, count: int, **changes: object) -> tuple[Path, Path, Path]:
    """Evaluate a run on one rank and a copy on several; return the recipe of the first, and both runs' folders."""
    recipe, run = prepared('one', **changes)
    other, other_run = prepared('several', **changes)
    jobs = [ranks.start(1, recipe), ranks.start(count, other)]
    for job in jobs:
        assert not any(job.wait()), job.output()
    return recipe, run, other_run


@pytest.mark.slow
def test_metrics_are_equal_on_1_and_4_ranks_and_in_one_process(prepared, ranks, networks):
    """The 12 images are 6 batches, so that the ranks have different numbers of them."""
    recipe, run, other_run = on_one_and_several(prepared, ranks, 4, num_references=IMAGES)
    for mine, one in zip(sweep(other_run), sweep(run), strict=True):
        assert set(mine) == set(METRICS)
        assert mine == pytest.approx(one, rel=1e-5, abs=1e-9)
    assert results(other_run)['losses'] == pytest.approx(results(run)['losses'], rel=1e-5)
    assert pixels(other_run) == pixels(run)

    # Every image is kept with what made it.
    first = results(run)['guidance'][0]
    files = sorted((run / first['folder']).glob('*/*.png'))
    assert len(files) == IMAGES
    with Image.open(files[4]) as image:
        text = dict(image.text)  # type: ignore[attr-defined]
    assert {key: text[key] for key in ('seed', 'guidance_scale', 'checkpoint')} == {
        'seed': '4',
        'guidance_scale': '1',
        'checkpoint': 'ba2, training weights',
    }
    assert text['prompt']

    # The features of one process, whose distances test_distances.py compares with torchmetrics.
    network = Inception(networks['inception'])
    generated = [torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) for file in files]
    everything = [image for batch in build_loader(load(recipe), 'eval') for image in batch['image']]
    dataset = [everything[index * len(everything) // IMAGES] for index in range(IMAGES)]
    fake, real = network.features(generated), network.features(dataset)
    assert first['metrics']['fid'] == pytest.approx(frechet_distance(fake, real), rel=1e-4)
    assert first['metrics']['kid'] == pytest.approx(kernel_distance(fake, real), rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_killed_evaluation_continues_and_generates_nothing_twice(prepared, ranks):
    recipe, run = prepared('whole', metrics=['efficientnet_distance'])
    assert ranks.start(2, recipe).wait() == [0, 0]
    recipe, killed = prepared('killed', metrics=['efficientnet_distance'])
    generator = random.Random(0)
    kept: dict[Path, int] = {}
    for _ in range(4):
        # A rank dies before one of the file operations of its first two batches.
        dying = generator.randrange(2)
        job = ranks.start(2, recipe, deaths={dying: (generator.randint(1, 9), killed / 'evaluations')})
        job.wait_for_death(dying)
        job.kill()
        for path, written in kept.items():
            assert path.stat().st_mtime_ns == written, f'{path} was generated again'
        kept |= {path: path.stat().st_mtime_ns for path in killed.glob('evaluations/ba2/*/batch-*/*.png')}
    print(f'{len(kept)} of {2 * IMAGES} images were kept')
    assert 0 < len(kept) < 2 * IMAGES, 'some points are before the last batch'
    assert ranks.start(2, recipe).wait() == [0, 0]
    for path, written in kept.items():
        assert path.stat().st_mtime_ns == written, f'{path} was generated again'
    assert pixels(killed) == pixels(run)
    assert sweep(killed) == sweep(run)


@pytest.mark.cpu_seconds(15)
def test_second_evaluation_adds_metrics_and_reuses_images_and_references(prepared):
    recipe, run = prepared(metrics=['cmmd'], num_images=4, num_references=4)
    evaluate(load(recipe))
    kept = (path for path in run.glob('evaluations/**/*.*') if path.suffix != '.json' and path.is_file())
    files = {path: path.stat().st_mtime_ns for path in kept}
    changes = ['metrics=[clip_score]', 'layout=t2i_compbench']
    evaluate(load(recipe, [f'evaluators.image_metrics.{change}' for change in changes]))
    assert len([*run.glob('evaluations/ba2/*/t2i_compbench/samples/*.png')]) == 2 * 4
    assert set(results(run)['metrics']) == set(sweep(run)[1]) == {'cmmd', 'clip_score'}
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert set(run.glob('evaluations/*/*/*/*.png')) <= set(files)


def test_few_images_are_a_warning_and_too_few_captions_or_references_of_another_size_are_refused(prepared, caplog):
    recipe, _ = prepared(metrics=['efficientnet_distance'], size=[64, 32])
    with pytest.raises(UserError, match='the reference images have 32 x 32 pixels and the generated ones 64 x 32'):
        evaluate(load(recipe))
    assert 'efficientnet_distance of 12 images is biased upward by the small number' in caplog.text
    many = [f'evaluators.image_metrics.{each}' for each in ('num_images=1000000', 'images_per_prompt=10')]
    with pytest.raises(UserError, match='^100000 prompts are more than the 40 images of the dataset; use at most that'):
        evaluate(load(recipe, many))


@pytest.mark.slow
def test_features_of_other_references_are_refused(prepared, tmp_path):
    shared = str(tmp_path / 'shared')
    recipe, _ = prepared(metrics=['efficientnet_distance'], reference_features=shared)
    evaluate(load(recipe))
    with pytest.raises(UserError, match=r'efficientnet.safetensors: has features of reference images with images .*'):
        evaluate(load(recipe, ['evaluators.image_metrics.num_references=9']))
    Path(shared, 'efficientnet.safetensors').write_bytes(b'cut')
    with pytest.raises(UserError, match='is not a file of reference features'):
        evaluate(load(recipe))


@pytest.mark.slow
def test_prompt_file_with_categories_and_scorer_layouts(prepared, tmp_path):
    lines = [{'prompt': f'{n} ducks / geese', 'include': [{'class': 'duck'}], 'tag': 'count'} for n in range(3)]
    (tmp_path / 'geneval.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    common = {'metrics': ['clip_score'], 'num_images': None, 'images_per_prompt': 2, 'guidance_scales': [2]}
    recipe, run = prepared(prompts=str(tmp_path / 'geneval.jsonl'), layout='geneval', **common)
    evaluate(load(recipe))
    folder = run / results(run)['guidance'][0]['folder'] / 'geneval'
    assert [path.name for path in sorted(folder.iterdir())] == ['00000', '00001', '00002']
    assert (
        cli.main(['data', 'pairs', str(folder.parent), '--score', 'clip_score', '--out', str(tmp_path / 'pairs')]) == 0
    )
    scores = json.loads((folder.parent / 'scores.json').read_text())['scores']['clip_score']
    for number, pair in enumerate(first_samples(tmp_path / 'pairs', 3)):
        preferred = 2 * number + int(scores[2 * number] < scores[2 * number + 1])
        assert pair['image'] == (folder / f'0000{number}' / 'samples' / f'000{preferred % 2}.png').read_bytes()
        assert pair['captions'] == [lines[number]['prompt']]

    (tmp_path / 'p.csv').write_text('Prompts,Category\na cube,shape\na red ball,color\na ball,shape\n')
    changes = {'prompts': str(tmp_path / 'p.csv'), 'layout': None, 'images_per_prompt': 1}
    recipe, run = prepared('categories', **common | changes)
    evaluate(load(recipe))
    details = results(run)['guidance'][0]
    by_category = details['categories']['clip_score']
    assert set(by_category) == {'shape', 'color'}
    mean = (2 * by_category['shape'] + by_category['color']) / 3
    assert details['metrics']['clip_score'] == pytest.approx(mean)
    assert results(run)['prompts'] == str(tmp_path / 'p.csv')


def test_examples_are_the_worst_and_best_images_of_the_worst_and_best_prompts(tmp_path):
    prompts = [Prompt(f'prompt {index // 2}', '' if index < 2 else 'shape') for index in range(14)]
    scores = [0.0, 1.0, *(0.7, 0.9), *(0.0, 0.1), *(0.9, 0.5), *(0.3, 0.2), *(1.0, 0.9), *(0.4, 0.4)]
    images = GeneratedImages(tmp_path, [each.text for each in prompts], Sampling(batch_size=4), 'ba2')
    found = examples(scores, prompts, images)
    numbers = {
        kind: [[int(each['file'][-6:-4]) for each in both[side]] for side in ('worst', 'best')]
        for kind, both in found.items()
    }
    assert numbers == {'none': [[0], []], 'shape': [[4, 9, 12], [10, 3, 6]]}
    assert found['shape']['worst'][1] == {'file': 'batch-00002/000009.png', 'prompt': 'prompt 4', 'score': 0.2}
    shape = examples([float('nan')] * 4 + scores[4:], prompts, images)
    assert [*shape] == ['shape'] and 'prompt 1' not in json.dumps(shape), 'images without a score are left out'


GENEVAL = [
    {'tag': 'colors', 'include': [{'class': 'dog', 'count': 1, 'color': 'red'}], 'prompt': 'a red dog'},
    {'tag': 'single_object', 'include': [{'class': 'cat', 'count': 1}], 'prompt': 'a cat'},
    {'tag': 'colors', 'include': [{'class': 'car', 'count': 1, 'color': 'blue'}], 'prompt': 'a blue car'},
]


def test_layouts_of_external_scorers_replace_earlier_ones(tmp_path):
    long = {**GENEVAL[1], 'prompt': 'a cat / a dog' + ' and' * 90}
    prompts = [Prompt(each['prompt'], metadata=each) for each in (GENEVAL[0], long) for _ in range(2)]
    images = GeneratedImages(tmp_path, [each.text for each in prompts], Sampling(batch_size=4), 'ba2')
    images.path(0).parent.mkdir()
    for name, write in [*LAYOUTS.items()] * 2:
        for index in range(4):
            images.path(index).write_text(f'{name} {index}')
        write(images, prompts, 2, tmp_path / name)
    found = {path: path.read_text() for name in LAYOUTS for path in (tmp_path / name).rglob('*.png')}
    names = [each.text.replace('/', ' ')[:230] for each in prompts]
    assert found == {
        **{tmp_path / 'geneval' / f'0000{n // 2}/samples/000{n % 2}.png': f'geneval {n}' for n in range(4)},
        **{tmp_path / f't2i_compbench/samples/{names[n]}_00000{n}.png': f't2i_compbench {n}' for n in range(4)},
    }
    assert json.loads((tmp_path / 'geneval' / '00001' / 'metadata.jsonl').read_text()) == long
    images.path(3).unlink()
    with pytest.raises(UserError, match=r'000003.png is not on this node; write layouts on one node'):
        LAYOUTS['t2i_compbench'](images, prompts, 2, tmp_path / 'other')
    with pytest.raises(UserError, match="the prompt 'a cat' has no GenEval metadata"):
        LAYOUTS['geneval'](images, [Prompt('a cat')], 2, tmp_path / 'other')


@pytest.mark.slow
def test_geneval_is_equal_on_1_and_2_ranks_and_is_judged_again_from_kept_answers(prepared, ranks, tmp_path, capsys):
    (tmp_path / 'evaluation_metadata.jsonl').write_text('\n'.join(map(json.dumps, GENEVAL)))
    changes = {'metrics': ['geneval_hf'], 'num_images': None, 'images_per_prompt': 2, 'guidance_scales': [2]}
    changes['prompts'] = str(tmp_path / 'evaluation_metadata.jsonl')
    recipe, run, other_run = on_one_and_several(prepared, ranks, 2, **changes)
    found = results(run)['guidance'][0]
    assert results(other_run)['guidance'][0] == found
    kinds = found['categories']['geneval_hf']
    assert set(kinds) == {'colors', 'single_object'}
    assert found['metrics']['geneval_hf'] == pytest.approx(sum(kinds.values()) / 2)
    assert set(found['intervals']['geneval_hf']) == {'', *kinds}
    examples = found['examples']['geneval_hf']
    named = [(kind, side, each['prompt']) for kind, both in examples.items() for side in both for each in both[side]]
    assert sorted(named) == [
        ('colors', 'worst', 'a blue car'),
        ('colors', 'worst', 'a red dog'),
        ('single_object', 'worst', 'a cat'),
    ]
    answers = {path.name: path for path in run.rglob('*.geneval.json')}
    assert len(answers) == 6
    for path in other_run.rglob('*.geneval.json'):
        assert path.read_bytes() == answers[path.name].read_bytes()
    assert any(json.loads(path.read_text())['objects'] for path in answers.values())

    # The second evaluation reads the answers: with other answers, it has another score.
    for path in answers.values():
        answer = json.loads(path.read_text())
        wanted = answer['prompt']['include'][0]
        answer['objects'] = {wanted['class']: [[0, 0, 9, 9, 0.99]]}
        answer['colors'] = {wanted['class']: [wanted['color']]} if 'color' in wanted else {}
        path.write_text(json.dumps(answer))
    evaluate(load(recipe, ['evaluators.image_metrics.metrics=[geneval_hf,clip_score]']))
    assert results(run)['guidance'][0]['categories']['geneval_hf'] == {'colors': 1.0, 'single_object': 1.0}
    assert set(results(run)['guidance'][0]['categories']) == {'geneval_hf', 'clip_score'}
    lines = capsys.readouterr().out.splitlines()
    assert any(
        re.match(r'geneval_hf +1\.0000  higher is better.* \(95% interval 0\..* to 1.0000\)', each) for each in lines
    )
    assert any(re.match(r'  colors +1\.0000  \(95% interval', each) for each in lines)


@pytest.mark.slow
def test_text_metrics_are_equal_on_1_and_2_ranks_and_are_scored_again_from_kept_text(prepared, ranks, tmp_path):
    pytest.importorskip('rapidocr', reason='the extra `ocr` is not installed')
    lines = [
        {'category': 'sign', 'prompt': 'a sign', 'text': ['Open Daily']},
        {'category': 'poster', 'prompt': 'a poster', 'text': ['Fresh', 'brews', 'now']},
    ]
    (tmp_path / 'text_prompts.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    changes = {'metrics': ['word_accuracy_rapidocr'], 'num_images': None, 'images_per_prompt': 2, 'batch_size': 1}
    changes |= {'guidance_scales': [2], 'prompts': str(tmp_path / 'text_prompts.jsonl')}
    recipe, run, other_run = on_one_and_several(prepared, ranks, 2, **changes)
    found = results(run)['guidance'][0]
    assert results(other_run)['guidance'][0] == found
    assert found['metrics'] == {'word_accuracy_rapidocr': 0}
    assert found['ocr'].startswith('rapidocr 3.') and set(found['examples']) == {'word_accuracy_rapidocr'}

    answers = sorted(run.rglob('*.rapidocr.json'))
    assert len(answers) == 4
    for path in answers:
        path.write_text(json.dumps(json.loads(path.read_text()) | {'lines': ['OPEN', 'fresh brews']}))
    evaluate(load(recipe, ['evaluators.image_metrics.metrics=[word_accuracy_rapidocr,ned_rapidocr]']))
    found = results(run)['guidance'][0]
    assert found['categories']['word_accuracy_rapidocr'] == pytest.approx({'sign': 1 / 2, 'poster': 2 / 3})
    assert found['metrics']['word_accuracy_rapidocr'] == pytest.approx(6 / 10)
    assert set(found['intervals']['ned_rapidocr']) == {'', 'sign', 'poster'}
    kept = json.loads((run / found['folder'] / 'scores.json').read_text())['scores']
    assert kept['word_accuracy_rapidocr'] == pytest.approx([1 / 2, 1 / 2, 2 / 3, 2 / 3])


@pytest.fixture
def server():
    server = JudgeServer(seconds=0.02)
    yield server
    server.close()


def answers_in(run: Path) -> dict[str, dict]:
    return {path.name: json.loads(path.read_text()) for path in run.rglob('*.judge.json')}


@pytest.mark.slow
def test_killed_judging_continues_with_what_was_in_flight_and_2_ranks_equal_1(prepared, ranks, server, tmp_path):
    settings = {'metrics': ['dpg', 'judge_score'], 'num_images': None, 'images_per_prompt': 2, 'guidance_scales': [2]}
    settings['prompts'] = str(write_dpg(tmp_path / 'dpg_bench.csv', 6))
    settings['judge'] = {'model': MODEL, 'endpoint': f'{server.url}/v1', 'concurrency': 4, 'attempts': 1}
    recipe, run = prepared('one', **settings)
    ranks.start(1, recipe).end()
    total = server.asked.total()
    assert len(server.asked) == total == sum(map(len, answers_in(run).values()))
    recipe, killed = prepared('two', **settings)
    for _ in range(3):
        before = server.asked.total()
        job = ranks.start(2, recipe)
        while server.asked.total() < before + 12:
            job.spend(0.01)
            assert job.running(), job.output()
        job.kill()
    server.seconds = 0
    ranks.start(2, recipe).end()
    again = server.asked.total() - 2 * total
    assert 0 <= again <= 3 * 2 * 4, 'at most 4 requests of each rank were in flight at each kill'
    assert answers_in(killed) == answers_in(run)
    found, expected = results(killed), results(run)
    assert found['guidance'] == expected['guidance']
    assert set(found['metrics']) == {
        f'{name}/{MODEL}' for name in ('dpg', 'judge_score/alignment-1', 'judge_score/aesthetics-1')
    }
    print(f'{total} questions, {again} asked again after 3 kills')

    # Without the server, the scores are computed from the kept answers.
    server.close()
    ranks.start(1, recipe).end()
    assert results(killed)['guidance'] == expected['guidance']


def test_command_with_a_judge_prints_categories_and_intervals(prepared, server, tmp_path, capsys):
    _, run = prepared()
    (tmp_path / 'judge.yaml').write_text(f'model: {MODEL}\nendpoint: {server.url}/v1\n')
    prompts = write_dpg(tmp_path / 'dpg_bench.csv', 2)
    options = ['--metrics', 'dpg', '--prompts', prompts, '--judge', tmp_path / 'judge.yaml', '--steps', 1]
    assert cli.main(['evaluate', str(run), *map(str, options)]) == 0
    output = capsys.readouterr().out
    assert re.search(rf'dpg/{MODEL} +\d+\.\d+  higher is better  \(95% interval', output)
    assert re.search(r'\n  entity +\d+\.\d+  \(95% interval', output)
    found = results(run)['guidance'][0]
    assert set(found['examples'][f'dpg/{MODEL}']['none']) == {'worst', 'best'}
    assert set(json.loads((run / found['folder'] / 'scores.json').read_text())['scores']) == {f'dpg/{MODEL}'}
    (tmp_path / 'judge.yaml').write_text(f'modle: {MODEL}')
    assert cli.main(['evaluate', str(run), *map(str, options)]) == 2
    assert "evaluators.image_metrics.judge.modle: unknown key; did you mean 'model'" in capsys.readouterr().err


IMAGE_OR_ANSWER = re.compile(r'/batch-\d{5}/\d{6}\.(png|geneval\.json)$')
SUBMIT = """
import sys, time
from pathlib import Path

number = len(list(Path(sys.argv[1]).glob('*.asked')))
status = Path(sys.argv[1], f'{number}.status')
status.with_suffix('.asked').touch()
while not status.exists():
    time.sleep(0.05)
sys.exit(int(status.read_text()))
"""
"""Command of a watcher: asks the test for an evaluation, and ends with its status."""


@pytest.mark.slow
def test_geneval_of_four_nodes_through_the_watcher_is_killed_and_computes_nothing_twice(prepared, ranks, tmp_path):
    (tmp_path / 'evaluation_metadata.jsonl').write_text('\n'.join(map(json.dumps, GENEVAL)))
    changes = {'metrics': ['geneval_hf'], 'num_images': None, 'images_per_prompt': 4, 'guidance_scales': [2]}
    changes |= {'prompts': str(tmp_path / 'evaluation_metadata.jsonl'), 'batch_size': 1}
    recipe, run = prepared('killed', **changes)
    jobs = tmp_path / 'jobs'
    jobs.mkdir()
    command = [sys.executable, '-S', '-c', SUBMIT, str(jobs)]
    settings = WatchSettings(str(run), lambda place: command, metrics=['geneval_hf'], poll_seconds=0.1, once=True)
    watcher = threading.Thread(target=Watcher(settings).run)
    watcher.start()
    kept: dict[Path, int] = {}
    for number, death in enumerate([(1, 11), (2, 17), None]):
        wait_until((jobs / f'{number}.asked').exists, 60)
        rank, step = death or (0, 0)
        job = ranks.start(4, recipe, deaths={rank: (step, run / 'evaluations')} if death else {})
        if death:
            job.wait_for_death(rank)
            job.kill()
        statuses = job.wait()
        for path, written in kept.items():
            assert path.stat().st_mtime_ns == written, f'{path} was computed again'
        # A killed process may leave an unfinished folder or file, which nothing reads.
        found = [path for path in run.glob('evaluations/ba2/*/*/*.*') if IMAGE_OR_ANSWER.search(str(path))]
        assert len(kept) < len(found), 'each attempt makes progress'
        kept = {path: path.stat().st_mtime_ns for path in found}
        unfinished = jobs / 'status'
        unfinished.write_text('1' if any(statuses) else '0')
        unfinished.rename(jobs / f'{number}.status')
    watcher.join(60)
    assert not watcher.is_alive() and len([*jobs.glob('*.asked')]) == 3
    assert sorted(path.suffixes[0] for path in kept) == 12 * ['.geneval'] + 12 * ['.png']
    assert set(results(run)['metrics']) == {'geneval_hf'}


def test_command_evaluates_a_run_that_was_moved(prepared, networks, capsys, tmp_path):
    _, run = prepared()
    moved = tmp_path / 'elsewhere'
    run.rename(moved)
    options = ['--metrics', 'clip_score', '--guidance', '1,2', '--images', '2', '--steps', '2,3', '--prompts', 'own']
    options += [f'--network=clip_score={networks["clip_score"]}']
    options += ['evaluators.image_metrics.guidance=[null, {name: interval, low: 0.4, high: 1}]']
    assert cli.main(['evaluate', str(moved), *options]) == 0
    assert set(results(moved)['metrics']) == {'clip_score'}
    swept = results(moved)['guidance']
    rows = [(each['guidance_scale'], (each['guidance'] or {}).get('name')) for each in swept if each['metrics']]
    assert rows[::2] == rows[1::2] == [(1, None), (2, None), (1, 'interval'), (2, 'interval')]
    assert [each['num_inference_steps'] for each in swept] == 4 * [2, 3]
    assert len({each['metrics']['clip_score'] for each in swept}) == 8 - 2, 'at scale 1, guidance changes nothing'
    output = capsys.readouterr().out
    assert 'clip_score' in output and '\nguidance 2 interval low=0.4 high=1 steps 3 clip_score' in output
    assert not run.exists()
    page = RunsSource([str(moved)]).read()
    (examples,) = page.data['runs'][0]['evaluations'][0]['examples']['clip_score'].values()
    assert {image['image']['key'] for image in examples['worst']} <= {*page.images}
    assert [each['steps'] for each in page.data['runs'][0]['evaluations'][0]['guidance']] == 4 * [2, 3]


def test_mistakes_in_options_are_found_before_torch_is_imported(prepared, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr('diffusion.tasks.evaluate.evaluate', lambda recipe: pytest.fail('the evaluation began'))
    prepared()
    words = ['--metrics fdi', '--guidance 3', '--metrics fid --guidance=-1', '--metrics fid --network vgg=x']
    words += [
        '--metrics dpg --prompts dpg_bench.csv',
        '--metrics dpg --judge TMP/a/none.yaml',
        '--metrics fid globl_batch=3',
    ]
    found = refusals(capsys, tmp_path, [f'evaluate TMP/a/runs/run {each}' for each in words])
    check_golden(Path(__file__).parent / 'golden/evaluate-mistakes', {'messages.txt': found})
