"""Interrupted and resumed runs equal uninterrupted ones, bit for bit: an orthogonal matrix over all that may matter.

Each run combines one level of every factor, and together the runs hold every pair of levels. A run has 7 batches in
epochs of 3, so that an error after the end of an epoch shows. It must have the losses of the uninterrupted run, its
weights, averages and optimizer state, and torch's random state at the start of every batch.
"""

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpointing.saved_runs import assert_same_tensors
from forkserver import ROOT
from object_store import Store
from ranks import Ranks, read_losses
from recipe_files import write_yaml

from diffusion.config.load import load
from diffusion.exit_codes import PREEMPTED
from diffusion.storage.local_files import WORKING_FOLDER_VARIABLE
from diffusion.tasks.precompute import precompute

EPOCH, BATCHES = 3, 7
SIDE = 32

FACTORS: dict[str, dict[str, Any]] = {
    'family': {
        'unet': {},
        'mmdit': {'name': 'tiny_mmdit', 'depth': 2, 'dual_attention_blocks': 1, 'patch_size': 2, 'text_width': 32},
        'prx': {'name': 'tiny_prx', 'hidden_size': 32, 'num_heads': 2, 'depth': 2, 'patch_size': 2, 'text_width': 32},
        'latents': {'train_text_encoder': False},
        'i1': {'name': 'tiny_i1', 'hidden_size': 32, 'num_heads': 2, 'depth': 3, 'patch_size': 2, 'text_width': 32},
    },
    'ranks': {
        '1': {},
        '2 ddp': {},
        '2 fsdp2': {'strategy': 'fsdp2'},
        '2 sharded': {'strategy': 'fsdp2', 'checkpoints': 'sharded', 'reshard_after_forward': False},
    },
    'save': {
        'within an epoch': 'AFTER_LOSS 1',
        'last batch of an epoch': 'AFTER_LOSS 2',
        'end of an epoch': 'EPOCH_END 3',
        'evaluation': 'EVAL_BATCH_END 3',
    },
    'storage': {'folder': {}, 'asynchronous': {}, 'bucket': {}, 'tier': {}},
    'interruption': {'kill -9': signal.SIGKILL, 'SIGTERM': signal.SIGTERM, 'extension': None},
    'averaging': {'ema': {'ema': {'ema_start': '2ba', 'smoothing': 0.5}}, 'post hoc': {'post_hoc_ema': None}},
    'optimizer': {'adamw': {'name': 'adamw', 'lr': 1.0e-3}, 'muon': {'name': 'muon', 'lr': 1.0e-3}},
    'precision': {'fp32': 'fp32', 'bf16': 'amp_bf16'},
    'data': {'one stream': None, 'proportions, repeats, and other workers': None},
}
KILLED_AFTER = {
    'within an epoch': ('2ba', 'BATCH_START 2'),
    'last batch of an epoch': ('3ba', 'EVAL_BATCH_END 3'),
    'end of an epoch': ('1ep', 'BATCH_START 3'),
    'evaluation': ('3ba', 'EVAL_END 3'),
}
"""Save interval, and event and batch of a kill -9 after that save."""
ENDS_AT = {'within an epoch': '2ba', 'last batch of an epoch': '3ba', 'end of an epoch': '1ep', 'evaluation': '1ep'}
"""Duration of a run that is extended afterwards."""

ROWS = (
    *('000001101', '011211110', '022300000', '033121000', '101110000', '110320000', '123200111', '132011011'),
    *('202220110', '213020001', '220111111', '231301111', '303310011', '312101010', '321020100', '330200000'),
    *('401200010', '410311101', '423020111', '432101000'),
)
"""Number of the level of each factor, for every run."""


def levels_of(row: str) -> dict[str, str]:
    return {name: [*levels][int(digit)] for (name, levels), digit in zip(FACTORS.items(), row, strict=True)}


def test_rows_hold_every_pair_of_levels():
    found = {pair for row in ROWS for pair in itertools.combinations(levels_of(row).items(), 2)}
    levels = [[(factor, level) for level in found] for factor, found in FACTORS.items()]
    pairs = {pair for one, other in itertools.combinations(levels, 2) for pair in itertools.product(one, other)}
    assert found == pairs


class Runs:
    """Runs of the rows, on images and latents that are written once."""

    def __init__(self, root: Path, tiny_recipe: Any, pictures: dict[int, Path], ranks: Ranks) -> None:
        self.root, self.tiny_recipe, self.ranks = root, tiny_recipe, ranks
        self.images = {'a': pictures[64], 'b': pictures[32]}
        self._latents: dict[str, Path] = {}

    def latents(self) -> dict[str, Path]:
        if not self._latents:
            streams = {name: {'local': str(folder), 'resolution': SIDE} for name, folder in self.images.items()}
            model = self.tiny_recipe(self.root)['model'] | FACTORS['family']['latents']
            out = self.root / 'latents'
            settings = {'out': str(out), 'streams': streams, 'latents': 'image', 'batch_size': 8}
            path = self.root / 'precompute.yaml'
            content = self.tiny_recipe(self.root, name='precompute', task='precompute', precompute=settings)
            path.write_text(yaml.safe_dump(content | {'model': model}))
            precompute(load(path))
            self._latents = {name: out / name for name in streams}
        return self._latents

    def recipe(self, name: str, levels: dict[str, str], runs_dir: str) -> Path:
        of = {factor: FACTORS[factor][level] for factor, level in levels.items()}
        is_latents = levels['family'] == 'latents'
        folders = self.latents() if is_latents else self.images
        streams = {'a': {'local': str(folders['a']), 'resolution': SIDE}}
        if levels['data'] != 'one stream':
            streams['a']['proportion'] = 2.0  # 16 of 24 samples, or all of them and some twice
            streams['b'] = {'local': str(folders['b']), 'resolution': SIDE, 'proportion': 1.0}
        content = self.tiny_recipe(self.root, name=name, parallelism=of['ranks'], algorithms=of['averaging'])
        content |= {'runs_dir': runs_dir, 'streams': streams, 'optimizer': of['optimizer']}
        content['loader'] = {'num_workers': 0} | ({'epoch_size': 8 * EPOCH} if len(streams) > 1 else {})
        images = {'name': 'image_text', 'crop': 'random', 'flip': True}
        content['dataset'] = {'name': 'latents'} if is_latents else images
        content['model'] = (content['model'] if levels['family'] in ('unet', 'latents') else {}) | of['family']
        if levels['family'] == 'prx' and levels['optimizer'] == 'adamw':
            content['model']['mup_base_width'] = 16  # two parameter groups
        content['model'] |= {'resolution': SIDE, 'vae': self.tiny_recipe(self.root)['model']['vae']}
        content['eval_streams'] = {'eval': {'local': str(folders['a']), 'resolution': SIDE}}
        content['trainer'] |= {'max_duration': f'{BATCHES}ba', 'eval_interval': '1ep', 'precision': of['precision']}
        if of['precision'] != 'fp32':
            del content['trainer']['device']  # with it, a recipe of the CPU in half precision is refused
        content['checkpointing'] = {'asynchronous': levels['storage'] == 'asynchronous'}
        if levels['storage'] == 'tier':
            (self.root / f'memory-{name}').mkdir()
            tier = {'save_interval': '1ba', 'folder': str(self.root / f'memory-{name}'), 'replicate': False}
            content['checkpointing']['tiers'] = {'memory': tier}
        return write_yaml(self.root / f'{name}.yaml', content)

    def start(self, count: int, path: Path, *overrides: str, environment: Any, interruption: str = '') -> Any:
        """Start the program on a number of ranks."""
        own = environment | {'RANDOM_STATES': str(path.with_suffix('.random'))}
        own |= {'INTERRUPTION': interruption} if interruption else {}
        return self.ranks.start_program(
            count, ROOT / 'tests/training/interrupted_run.py', path, *overrides, environment=own
        )


@pytest.fixture(scope='module')
def runs(tmp_path_factory, tiny_recipe, pictures, ranks) -> Runs:
    return Runs(tmp_path_factory.mktemp('matrix'), tiny_recipe, pictures, ranks)


def random_states(path: Path, rank: int) -> dict[str, str]:
    return dict(line.split() for line in Path(f'{path.with_suffix(".random")}-{rank}').read_text().splitlines())


def interrupt(runs: Runs, count: int, path: Path, levels: dict[str, str], *overrides: str, environment: Any) -> None:
    save = levels['save']
    if levels['interruption'] == 'extension':
        ending = [f'trainer.max_duration={ENDS_AT[save]}', 'trainer.save_interval=1ep']
        runs.start(count, path, *overrides, *ending, environment=environment).end()
        return
    if levels['interruption'] == 'SIGTERM':
        interruption = f'{FACTORS["save"][save]} {int(signal.SIGTERM)}'
        never = 'trainer.save_interval=100ba'
        runs.start(count, path, *overrides, never, interruption=interruption, environment=environment).end(PREEMPTED)
        return
    interval, event = KILLED_AFTER[save]
    interruption = f'{event} {int(signal.SIGKILL)}'
    saving = f'trainer.save_interval={interval}'
    job = runs.start(count, path, *overrides, saving, interruption=interruption, environment=environment)
    job.wait_for_death(count - 1)
    job.kill()


@pytest.mark.cpu_seconds(15)
def test_two_killed_ranks_resume_exactly(runs):
    """A small model and four batches, for a test that is not slow."""
    levels = levels_of('210001100')
    shorter = 'trainer.max_duration=4ba', 'model.depth=1'
    check_resumption(runs, 'small', levels, str(runs.root / 'runs'), *shorter, environment={})


@pytest.mark.slow
@pytest.mark.parametrize('row', ROWS)
def test_interrupted_and_resumed_run_equals_uninterrupted(runs, store: Store, monkeypatch, row):
    levels = levels_of(row)
    environment, runs_dir = {}, str(runs.root / 'runs')
    if levels['storage'] == 'bucket':
        monkeypatch.setenv(WORKING_FOLDER_VARIABLE, str(runs.root / 'working'))
        environment = store.environment | {WORKING_FOLDER_VARIABLE: str(runs.root / 'working')}
        runs_dir = store.bucket('matrix') + '/runs'
    check_resumption(runs, row, levels, runs_dir, environment=environment)


def check_resumption(runs: Runs, row: str, levels: dict[str, str], runs_dir: str, *overrides: str, environment: Any):
    count = int(levels['ranks'][0])
    whole, parts = (runs.recipe(f'{name}-{row}', levels, runs_dir) for name in ('whole', 'parts'))
    undisturbed = runs.start(count, whole, *overrides, 'trainer.save_interval=100ba', environment=environment)
    interrupt(runs, count, parts, levels, *overrides, environment=environment)
    undisturbed.end()
    workers = 0 if levels['data'] == 'one stream' else 1
    resuming = ['trainer.save_interval=100ba', f'loader.num_workers={workers}']
    job = runs.start(count, parts, *overrides, *resuming, environment=environment)
    job.end()
    # A kill may come before a save in the background is published.
    assert 'resumed from' in job.output() or (levels['storage'], levels['interruption']) == ('asynchronous', 'kill -9')
    one, other = load(whole), load(parts)
    assert read_losses(other.run_dir) == read_losses(one.run_dir)
    for rank in range(count):
        assert random_states(parts, rank) == random_states(whole, rank)
    assert_same_tensors(other.run_place, one.run_place)


@pytest.mark.slow
@pytest.mark.parametrize('count', [1, 2])
def test_run_interrupted_at_any_event_of_two_epochs_resumes_exactly(runs, count):
    """kill -9 and SIGTERM in turn, at every EVENT_STRIDE-th event, counted from the number of ranks."""
    levels = {factor: next(iter(found)) for factor, found in FACTORS.items()}
    levels['ranks'] = '1' if count == 1 else '2 ddp'
    duration = ['trainer.max_duration=2ep', 'trainer.save_interval=1ep']
    whole, recorded = runs.recipe(f'events-{count}', levels, str(runs.root / 'runs')), runs.root / f'{count}.events'
    runs.start(count, whole, *duration, environment={'EVENTS': str(recorded)}).end()
    points = list(dict.fromkeys(recorded.read_text().splitlines()))
    assert {point.split()[0] for point in points} >= {'fit_start', 'batch_checkpoint', 'epoch_checkpoint'}
    stride = int(os.environ.get('EVENT_STRIDE', '48'))
    for number, point in list(enumerate(points))[count::stride]:
        kind = (signal.SIGKILL, signal.SIGTERM)[number // stride % 2]
        path = runs.recipe(f'event-{count}-{number}', levels, str(runs.root / 'runs'))
        job = runs.start(count, path, *duration, interruption=f'{point} {int(kind)}', environment={})
        assert job.processes[-1].poll(60) is not None, f'{point}\n{job.output()}'
        if kind == signal.SIGTERM and job.processes[-1].status == PREEMPTED:
            assert job.wait(60) == [PREEMPTED] * count, f'{point}\n{job.output()}'
        job.kill()
        job = runs.start(count, path, *duration, environment={})
        assert job.wait(60) == [0] * count, f'{point}\n{job.output()}'
        assert read_losses(load(path).run_dir) == read_losses(load(whole).run_dir), f'{kind.name} at {point}'
