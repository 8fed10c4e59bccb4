"""EMA: arithmetic against a float64 loop, the late start, and the contents of a checkpoint."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from averaged_run import Recorder, make_trainer, weights_of
from callbacks.guarded_run import At
from composer.core import Event, Timestamp

from diffusion.algorithms.average import trained_parameters
from diffusion.algorithms.ema import EMA, averaged_weights


def assert_equal(some, others):
    torch.testing.assert_close(some, others, rtol=0, atol=0)


@pytest.mark.parametrize(
    ('start', 'interval', 'first', 'step'),
    [('4ba', '2ba', 4, 2), ('0.5dur', '1ba', 6, 1), pytest.param('1ep', '1ba', 6, 1, marks=pytest.mark.slow)],
)
def test_average_equals_a_float64_loop(caplog, start, interval, first, step):
    caplog.set_level('INFO')
    ema, recorder = EMA(start, smoothing=0.7, update_interval=interval), Recorder()
    make_trainer(ema, callbacks=(recorder,)).fit()
    assert f'EMA starts at batch {first} and averages 5 tensors' in caplog.messages
    for name in ema.average.tensors:
        average = recorder.weights[first - 1][name].double()
        for batch in range(first + 1, 13):
            if batch % step == 0:
                average = 0.7 * average + 0.3 * recorder.weights[batch - 1][name].double()
        torch.testing.assert_close(ema.average.tensors[name].double(), average, rtol=1e-5, atol=1e-7)


def test_nothing_is_allocated_or_saved_before_start():
    ema = EMA('100ba')
    make_trainer(ema).fit()
    assert not ema.started and ema.averages == ema.average.tensors == {}
    assert not any(isinstance(value, torch.Tensor | dict) for value in ema.state_dict().values())


def test_half_life_sets_smoothing():
    ema = EMA(half_life='10ba')
    assert ema.smoothing**10 == pytest.approx(0.5)
    assert EMA(half_life='1ba', update_interval='2ba').smoothing == pytest.approx(0.25)


def test_evaluation_uses_the_average_and_training_does_not():
    ema = EMA('2ba', smoothing=0.9)
    trainer = make_trainer(ema)
    trainer.fit()
    assert set(ema.average.tensors) == set(trained_parameters(trainer.state.model))
    assert not any('running_mean' in name or '0.bias' in name for name in ema.average.tensors), 'only what is trained'
    weights = weights_of(trainer.state)
    averages = {n: a.clone() for n, a in ema.average.tensors.items()}
    storage = {n: p.data_ptr() for n, p in trained_parameters(trainer.state.model).items()}
    with averaged_weights(trainer.state) as averaged, ema.averaged():  # a nested call changes nothing
        assert averaged
        for name, parameter in trained_parameters(trainer.state.model).items():
            assert torch.equal(parameter, averages[name])
            assert parameter.data_ptr() == storage[name], 'swapped in place'
    assert_equal(weights_of(trainer.state), weights)
    seen: dict[str, torch.Tensor] = {}
    trainer.state.callbacks.append(At(Event.EVAL_BATCH_START, 12, lambda: seen.update(weights_of(trainer.state))))
    trainer.eval(eval_dataloader=trainer.state.train_dataloader)
    assert_equal(seen, averages)
    assert_equal(weights_of(trainer.state), weights)
    with pytest.raises(RuntimeError, match='out of memory'), ema.averaged():
        raise RuntimeError('out of memory')
    assert_equal(weights_of(trainer.state), weights)


@pytest.mark.parametrize('stop', [pytest.param(3, marks=pytest.mark.slow), 8])
def test_resumed_run_ends_with_the_same_average(tmp_path, stop):
    uninterrupted, interrupted, resumed = (EMA('5ba', smoothing=0.8) for _ in range(3))
    make_trainer(uninterrupted).fit()
    first = make_trainer(interrupted, duration=f'{stop}ba', save_folder=str(tmp_path), save_interval='1ba')
    first.fit()
    first.close()
    make_trainer(resumed, load_path=str(tmp_path / 'latest-rank0.pt')).fit()
    torch.testing.assert_close(resumed.average.tensors, uninterrupted.average.tensors)


def test_averages_of_another_architecture_are_rejected():
    ema = EMA('0ba')
    trainer = make_trainer(ema)
    ema.load_state_dict({'averages': {'ema': {'other.weight': torch.zeros(1)}}, 'updates': 3})
    with pytest.raises(ValueError, match='averages: the checkpoint has 1 tensors, the model trains .* another'):
        trainer.fit()


def test_start_after_the_end_of_the_run_is_logged(caplog):
    make_trainer(EMA('1ba'), duration='1ba').fit()
    assert 'EMA never starts' in caplog.text


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'smoothing': 0.9, 'half_life': '3ba'}, 'smoothing and half_life set the same quantity'),
        ({'smoothing': 1.0}, r'smoothing: 1.0 is not in \[0, 1\)'),
        ({'update_interval': '3sp'}, "update_interval: '3sp'; use batches or epochs"),
        ({'update_interval': '0ba'}, "update_interval: '0ba'; use batches or epochs"),
        ({'half_life': '0ba'}, "half_life: '0ba'; use the unit of"),
        ({'half_life': '3ep'}, "half_life: '3ep'; use the unit of update_interval=1ba"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        EMA(**settings)


AVERAGES = {'averages': {'ema': {'weight': torch.zeros(1)}}}


@pytest.mark.parametrize(
    ('start', 'saved', 'message'),
    [
        ('2ba', {'ema_start': '3ba', **AVERAGES}, 'averaging has started at 3ba'),
        ('5ba', AVERAGES, 'averaging has started before batch 4'),
        ('2ba', {'ema_start': '7ba'}, '2ba has passed; the run resumes at batch 4 without averages: .* such as 5ba'),
        ('2ba', {'ema_start': '2ba', **AVERAGES}, None),
        ('6ba', {'ema_start': '7ba'}, None),
    ],
)
def test_start_that_contradicts_the_averages_of_a_checkpoint_is_refused(start, saved, message):
    ema = EMA(start)
    ema.load_state_dict(saved)
    state = SimpleNamespace(model=None, timestamp=Timestamp(batch=4))
    expected = contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message)
    with expected:
        ema.apply(Event.AFTER_LOAD, state, None)  # type: ignore[arg-type]
