"""Evaluators within the training: same results as `diffusion evaluate`, and the training is not changed by them."""

import json
import re
import signal
from pathlib import Path

import pytest
import yaml
from ranks import read_losses
from recipe_files import write_yaml
from shards import draw_image
from small_networks import write_clip_vision
from waiting import wait_until

from diffusion.config.load import load
from diffusion.exit_codes import PREEMPTED
from diffusion.loggers.metrics_file import read_metrics
from diffusion.tasks import run_recipe
from diffusion.training.train import train


@pytest.fixture(scope='module')
def site(tmp_path_factory, tiny_recipe):
    """Function that writes a recipe of four batches with EMA and an evaluator; return it and the run's folder."""
    folder = tmp_path_factory.mktemp('in_run')
    clip = write_clip_vision(folder / 'clip')

    def write(name: str, **changes) -> tuple[Path, Path]:
        content = tiny_recipe(folder / 'runs', name=name)
        content['trainer'] |= {'max_duration': '4ba', 'save_interval': '2ba'}
        content['eval_streams'] = content['streams']
        content['algorithms'] = {'ema': {'name': 'ema', 'smoothing': 0.5}}
        metrics = {'metrics': ['cmmd'], 'networks': {'cmmd': str(clip)}, 'num_images': 7, 'batch_size': 3}
        content['evaluators'] = {'image_metrics': metrics | {'num_inference_steps': 2}}
        content |= changes
        path = write_yaml(folder / f'{name}.yaml', content)
        return path, folder / 'runs' / name

    return write


def results(run: Path, batch: int) -> dict:
    return json.loads((run / 'evaluations' / f'ba{batch}.json').read_text())


@pytest.fixture(scope='module')
def evaluated(site) -> tuple[Path, Path]:
    """Recipe and folder of a run of one rank that evaluates after batches 2 and 4."""
    path, run = site('evaluated', evaluators_interval='2ba')
    train(load(path)).close()
    return path, run


def test_results_are_those_of_a_checkpoint_and_losses_are_unchanged(site, evaluated):
    path, run = evaluated
    before = {batch: results(run, batch) for batch in (2, 4)}
    assert before[2]['weights'] == before[4]['weights'] == 'ema'
    assert before[2]['metrics'] != before[4]['metrics']
    logged = read_metrics(run / 'metrics.jsonl')
    assert set(logged['evaluation/cmmd'].values()) == {each['metrics']['cmmd'] for each in before.values()}
    assert [0 < seconds < 300 for seconds in logged['evaluation/seconds'].values()] == [True] * 2

    for images in run.glob('evaluations/ba4/*/batch-*'):
        images.rename(images.with_name(f'old-{images.name}'))
    assert run_recipe.main([str(path), 'task=evaluate']) == 0
    assert results(run, 4)['metrics'] == pytest.approx(before[4]['metrics'], rel=1e-6)
    for image in run.glob('evaluations/ba4/*/batch-*/*.png'):
        old = image.parent.with_name(f'old-{image.parent.name}') / image.name
        assert image.read_bytes() == old.read_bytes()

    path, plain = site('plain')
    train(load(path)).close()
    assert read_losses(plain) == read_losses(run)
    assert not (plain / 'evaluations').exists()


@pytest.mark.slow
def test_two_ranks_have_the_results_of_one(site, ranks, evaluated):
    """Three batches of images on two ranks: under FSDP2, one rank has to take part without a batch of its own."""
    path, run = site('two', evaluators_interval='2ba', parallelism={'strategy': 'fsdp2'})
    ranks.run(2, path)
    for batch in (2, 4):
        assert results(run, batch)['metrics'] == pytest.approx(results(evaluated[1], batch)['metrics'], rel=1e-2)


@pytest.mark.parametrize(
    ('what', 'count'), [('network', 1), pytest.param('reference image', 2, marks=pytest.mark.slow)]
)
def test_failed_evaluation_does_not_end_the_training(site, ranks, caplog, what, count):
    path, run = site(f'failed-{what[:3]}-{count}', evaluators_interval='2ba')
    content = yaml.safe_load(path.read_text())
    content['trainer']['max_duration'] = '3ba'
    if what == 'network':
        content['evaluators']['image_metrics']['networks'] = {'cmmd': str(path.parent / 'gone')}
    else:
        # One of the first 64, which rank 0 reads alone.
        folder = path.parent / 'references'
        folder.mkdir()
        (folder / 'a.png').write_bytes(draw_image(0, 32))
        (folder / 'b.png').write_bytes(b'damaged')
        content['evaluators']['image_metrics']['reference'] = str(folder)
    path.write_text(yaml.safe_dump(content))
    if count == 1:
        caplog.set_level('INFO', logger='diffusion')
        train(load(path)).close()
    output = caplog.text if count == 1 else ranks.run(count, path)
    assert 'training continues without its results for ba2' in output
    share = re.search(r'ba2: evaluated in \d+ s, .* no GPU trained; evaluations took (\S+)% of the time so far', output)
    assert share and 0 < float(share[1]) <= 100
    assert len(read_losses(run)) == 3


@pytest.mark.slow
def test_stop_signal_to_one_rank_ends_an_evaluation_and_saves(site, ranks):
    """Evaluate 400 images, which would take minutes."""
    path, run = site('stopped', evaluators_interval='2ba', parallelism={'strategy': 'fsdp2'})
    content = yaml.safe_load(path.read_text())
    content['evaluators']['image_metrics'] |= {'num_images': 400, 'images_per_prompt': 10, 'num_inference_steps': 100}
    path.write_text(yaml.safe_dump(content))
    job = ranks.start(2, path)
    wait_until(lambda: [*run.glob('evaluations/ba2/*/batch-*')], 120, running=job.running, shown=job.output)
    job.send(signal.SIGTERM, 1)
    assert job.wait(60) == [PREEMPTED, PREEMPTED], job.output()
    assert 'stopped by a signal while generating images' in job.output()
    assert (run / 'ba2').is_dir()
    assert len(list(run.glob('evaluations/ba2/*/batch-*'))) < 400 // 3
