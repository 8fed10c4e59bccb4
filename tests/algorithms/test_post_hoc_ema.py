"""Post-hoc EMA: runs with known averages of other widths, resumed runs, damaged snapshots."""

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from averaged_run import Recorder, make_trainer
from callbacks.guarded_run import At
from composer.core import Callback, Event, State
from composer.loggers import Logger
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffusion.algorithms.average import Averager, trained_parameters
from diffusion.algorithms.ema import EMA
from diffusion.algorithms.post_hoc_ema import PostHocEMA, find_snapshots, reconstruct_average
from diffusion.algorithms.power_function import SNAPSHOT_FOLDER, gamma_of_width

BATCHES, EVERY = 300, 10
Weights = dict[str, Tensor]


class SnapshotRecorder(Callback):
    """Record the batch of the newest snapshot at each checkpoint event."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[int] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event in (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT) and (self.folder / SNAPSHOT_FOLDER).exists():
            self.seen.append(find_snapshots(self.folder)[-1].batch)


def average_by_eq_1(weights: list[Weights], width: float, at: int) -> Weights:
    """Return the integral of eq. 1 in float64, over weights that are constant during a step."""
    gamma = gamma_of_width(width)
    shares = torch.from_numpy(np.diff((np.arange(at + 1) / at) ** (gamma + 1)))
    stacked = {name: torch.stack([each[name] for each in weights[:at]]).double() for name in weights[0]}
    return {name: torch.tensordot(shares, values, dims=1) for name, values in stacked.items()}


def norm(weights: Weights) -> float:
    return float(torch.cat([tensor.double().flatten() for tensor in weights.values()]).norm())


def distance(a: Weights, b: Weights) -> float:
    assert a.keys() == b.keys()
    return norm({name: a[name].double() - b[name].double() for name in a})


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """Run of 300 batches with 30 snapshots per width in float32 and float16, and its weights after each batch."""
    root = tmp_path_factory.mktemp('run')
    recorder = Recorder()
    dtypes = ('float16', 'float32')
    algorithms = [PostHocEMA(every=f'{EVERY}ba', dtype=dtype, folder=str(root / dtype)) for dtype in dtypes]
    make_trainer(*algorithms, duration=f'{BATCHES}ba', samples=240, callbacks=(recorder,)).fit()
    return root, algorithms[0], recorder.weights


def test_averages_equal_the_integral(run):
    _, algorithm, weights = run
    assert isinstance(algorithm, Averager)
    for width in (0.05, 0.10):
        expected = average_by_eq_1(weights, width, BATCHES)
        assert distance(algorithm.averages[f'width{width:g}'].tensors, expected) < 2e-6 * norm(expected)


def test_snapshots_are_state_dicts_of_the_configured_dtype(run):
    root, _, weights = run
    snapshots = [(each.batch, each.width) for each in find_snapshots(root / 'float16')]
    assert snapshots == [*itertools.product(range(EVERY, BATCHES + 1, EVERY), (0.05, 0.10))]
    stored = load_file(root / 'float16' / SNAPSHOT_FOLDER / 'width0.1-ba150.safetensors')
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    expected = average_by_eq_1(weights, 0.10, 150)
    assert distance(stored, expected) < 2**-11 * norm(expected)
    assert not list((root / 'float16' / SNAPSHOT_FOLDER).glob('.*'))


@pytest.mark.parametrize('at', [BATCHES, 195])
@pytest.mark.parametrize('width', [0.04, 0.07, 0.20])
def test_any_width_at_any_batch_is_reconstructed(run, width, at):
    """The error is bounded by the profile error times the spread of the weights, plus the snapshots' rounding."""
    root, _, weights = run
    expected = average_by_eq_1(weights, width, at)
    found = reconstruct_average(root / 'float16', width, at=at)
    assert found.batch == at
    assert {tensor.dtype for tensor in found.tensors.values()} == {torch.float32}
    error = distance(found.tensors, expected)
    # Both profiles sum to 1, so the error is the sum of (p - p') (theta - expected). By Cauchy-Schwarz that is at most
    # |p - p'| times the spread, where |p|^2 = (gamma + 1)^2 / ((2 gamma + 1) t).
    gamma = gamma_of_width(width)
    read = weights[: EVERY * -(-at // EVERY)]
    spread = sum(distance(each, expected) ** 2 for each in read) ** 0.5
    bound = found.profile_error * (gamma + 1) / ((2 * gamma + 1) * at) ** 0.5 * spread
    # Random rounding by half an ulp of float16, 2**-11, times coefficients of up to 4 at width 0.04.
    rounding = 5e-4 * norm(expected)
    kept = average_by_eq_1(weights, 0.05 if width < 0.06 else 0.10, at)
    assert error < bound + rounding
    if at != 195:
        assert error < 0.3 * distance(kept, expected)


def test_large_errors_are_logged_with_alternatives(run, caplog):
    root, _, _ = run
    with caplog.at_level(logging.WARNING):
        reconstruct_average(root / 'float32', 0.10, at=200)
        assert caplog.text == ''
        assert reconstruct_average(root / 'float32', 0.10, at=195).profile_error > 0.1
        assert 'relative profile error 22%; the nearest snapshots are at batch 190 and batch 200' in caplog.text
        caplog.clear()
        assert reconstruct_average(root / 'float32', 0.28).profile_error > 0.1
    assert 'relative profile error 14%; 60 snapshots reconstruct widths from 0.019 to 0.255 within 5%' in caplog.text


@pytest.mark.parametrize('at', [0, 301])
def test_batch_out_of_range_is_rejected(run, at):
    with pytest.raises(ValueError, match=f'batch {at} is not between 1 and {BATCHES}, the batch of the last snapshot'):
        reconstruct_average(run[0] / 'float32', 0.1, at=at)


def snapshots_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / SNAPSHOT_FOLDER).iterdir()}


def test_truncated_snapshot_and_file_of_another_program_are_named(tmp_path):
    make_trainer(PostHocEMA(every='1ba', folder=str(tmp_path))).fit()
    damaged = tmp_path / SNAPSHOT_FOLDER / 'width0.05-ba8.safetensors'
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(ValueError, match=r'width0\.05-ba8\.safetensors: not readable .*; remove this file'):
        reconstruct_average(tmp_path, 0.05)
    damaged.unlink()
    assert reconstruct_average(tmp_path, 0.05).batch == 12
    save_file({'other': torch.zeros(2)}, tmp_path / SNAPSHOT_FOLDER / 'width0.2-ba8.safetensors')
    with pytest.raises(ValueError, match=r'width0\.2-ba8\.safetensors: not a snapshot of version 1'):
        reconstruct_average(tmp_path, 0.05)


@pytest.mark.parametrize(('duration', 'stops', 'last'), [('10ba', False, 10), ('2ep', True, 7)])
def test_end_of_training_has_a_snapshot_before_the_last_checkpoint(tmp_path, duration, stops, last):
    """Otherwise a run killed between the two would count as finished and never write it."""
    algorithm, recorder = PostHocEMA(every='50ba', folder=str(tmp_path)), SnapshotRecorder(tmp_path)
    trainer = make_trainer(algorithm, duration=duration, samples=480, callbacks=(recorder,))
    if stops:
        trainer.state.callbacks.insert(0, At(Event.BATCH_END, last, trainer.state.stop_training))
    trainer.fit()
    assert recorder.seen[-1:] == ([] if stops else [last])
    assert sorted({snapshot.batch for snapshot in find_snapshots(tmp_path)}) == [b for b in (50,) if b < last] + [last]


def test_resumed_run_ends_with_the_same_averages_and_writes_the_same_snapshots(tmp_path):
    uninterrupted = PostHocEMA(every='3ba', folder=str(tmp_path / 'uninterrupted'))
    make_trainer(uninterrupted).fit()
    folder = str(tmp_path / 'resumed')
    # Stopped after batch 8 of 12 and resumed from the checkpoint of batch 5, so that 6, 7 and 8 are repeated.
    saving: dict[str, Any] = {'save_folder': f'{tmp_path}/saved', 'save_interval': '5ba'}
    first = make_trainer(PostHocEMA(every='3ba', folder=folder), duration='8ba', **saving)
    first.fit()
    first.close()
    before = snapshots_of(tmp_path / 'resumed')
    resumed = PostHocEMA(every='3ba', folder=folder)
    make_trainer(resumed, load_path=f'{tmp_path}/saved/ep0-ba5-rank0.pt').fit()
    for label, average in uninterrupted.averages.items():
        torch.testing.assert_close(resumed.averages[label].tensors, average.tensors, rtol=0, atol=0)
    reference, after = snapshots_of(tmp_path / 'uninterrupted'), snapshots_of(tmp_path / 'resumed')
    assert {name: after[name] for name in before} == before
    assert {name: after[name] for name in reference} == reference


def test_checkpoints_hold_the_averages_and_the_training_weights(tmp_path):
    algorithm, ema = PostHocEMA(folder=str(tmp_path)), EMA('2ba', smoothing=0.99)
    trainer = make_trainer(algorithm, ema, save_folder=str(tmp_path), save_interval='6ba')
    trainer.fit()
    state = torch.load(tmp_path / 'latest-rank0.pt', weights_only=False)['state']
    saved, saved_ema = (dict(state['algorithms'])[name]['averages'] for name in ('PostHocEMA', 'EMA'))
    assert set(saved) == {'width0.05', 'width0.1'}
    for name, parameter in trained_parameters(trainer.state.model).items():
        assert torch.equal(state['model'][name], parameter)
        assert torch.equal(saved['width0.05'][name], algorithm.averages['width0.05'].tensors[name])
        assert torch.equal(saved_ema['ema'][name], ema.average.tensors[name])


@pytest.mark.filterwarnings('ignore:PostHocEMA is not in the state_dict')
def test_averages_that_did_not_start_with_the_run_are_rejected(tmp_path):
    make_trainer(duration='1ba', save_folder=str(tmp_path), save_interval='1ba').fit()
    algorithm = PostHocEMA(folder=str(tmp_path))
    trainer = make_trainer(algorithm, load_path=str(tmp_path / 'latest-rank0.pt'))
    assert 'averages' not in algorithm.state_dict()
    with pytest.raises(ValueError, match='checkpoint of batch 1 has no averages, which must start with the first'):
        trainer.fit()


def test_widths_that_the_checkpoint_lacks_are_rejected():
    algorithm = PostHocEMA(widths=[0.05, 0.2])
    with pytest.raises(ValueError, match=r'widths: the checkpoint has width0\.05, width0\.1 but not width0\.2; '):
        algorithm.load_state_dict({'averages': {'width0.05': {}, 'width0.1': {}}})


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'widths': [0.1, 0.1]}, r'widths: \[0.1, 0.1\]; use at least one width, without repeats'),
        ({'every': '0ba'}, "every: '0ba'; use a positive interval such as 10000ba"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        PostHocEMA(**settings)
