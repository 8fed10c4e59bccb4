"""LossGuard: bad batches are detected on all ranks, reported, and have no effect on the weights."""

import math
import re
from types import SimpleNamespace
from typing import Any

import guarded_run
import pytest
import torch
from composer.algorithms import GradientClipping
from composer.core import Precision
from composer.loggers import InMemoryLogger
from composer.utils import dist
from guarded_run import Recorder, Regression, assert_stops, bad_batches, make_data, make_trainer, run_to_end, weights_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader

from diffusion.algorithms.gradient_clipping import summarize_gradients
from diffusion.callbacks import loss_guard
from diffusion.callbacks.loss_guard import LossGuard
from diffusion.errors import UserError
from diffusion.exit_codes import CONFIG_ERROR

BAD = 121
"""ID of a sample of batch 2."""


def values(logger: InMemoryLogger, name: str) -> list[float]:
    return [float(value) for _, value in logger.data[name]]


def all_equal(ours, theirs) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_run_stops_before_the_update_reports_the_sample_and_resumes_at_this_batch(tmp_path):
    clean = run_to_end(make_trainer(make_data(), []))
    guard = LossGuard(folder=str(tmp_path))
    recorder = Recorder()
    trainer = make_trainer(make_data(bad=[BAD]), [guard, recorder], folder=tmp_path)
    message = rf'batch 2: loss is nan; sample 121; the weights before this batch are in {tmp_path}/ba2.pt. Inspect'
    error = assert_stops(trainer, f'{message} these samples; lower optimizer.lr, or clip .*; or skip such batches')
    assert isinstance(error, UserError)
    assert all_equal(weights_of(trainer.state), recorder.weights[1])
    line = {'batch': 2, 'epoch': 0, 'reason': 'loss is nan', 'loss': None, 'sample_ids': [BAD], 'action': 'stop'}
    assert bad_batches(tmp_path) == [line | {'median': pytest.approx(sum(guard.history) / 2)}]
    resumed: dict[str, Any] = {'folder': tmp_path, 'load_path': str(tmp_path / 'ba2.pt')}
    written = (tmp_path / 'ba2.pt').stat().st_mtime_ns
    again = make_trainer(make_data(bad=[BAD]), [LossGuard(folder=str(tmp_path))], **resumed)
    assert_stops(again, 'batch 2: loss is nan; sample 121; no update was made since this run started')
    assert (tmp_path / 'ba2.pt').stat().st_mtime_ns == written, 'the only good checkpoint is not overwritten'
    repaired = make_trainer(make_data(), [LossGuard(folder=str(tmp_path))], **resumed)
    assert all_equal(run_to_end(repaired), clean)


def test_run_saves_and_resumes_although_its_first_batches_were_skipped(tmp_path, caplog):
    """The optimizer has no state at that point."""
    settings: dict[str, Any] = {'action': 'skip', 'max_skips': 1, 'folder': str(tmp_path)}
    trainer = make_trainer(make_data(bad=[100, 108]), [LossGuard(**settings)], folder=tmp_path)
    assert_stops(trainer, 'batch 1: loss is nan, after 1 skipped updates .*ba1.pt')
    assert 'batch 0: loss is nan; update skipped, sample 100' in caplog.messages
    assert len(run_to_end(make_trainer(make_data(), [], load_path=str(tmp_path / 'ba1.pt')))) == 4


@pytest.mark.parametrize('clip', [False, True])
@pytest.mark.parametrize('cause', ['bad', 'bad_gradient'])
def test_skipped_update_changes_nothing_but_the_timestamp(tmp_path, cause, clip):
    causes: dict[str, Any] = {cause: [BAD]}
    callbacks = [LossGuard(action='skip', folder=str(tmp_path)), recorder := Recorder()]
    algorithms = [GradientClipping('norm', 0.5)] if clip else []
    ours = run_to_end(make_trainer(make_data(**causes), callbacks, duration='6ba', algorithms=algorithms))
    assert all_equal(recorder.weights[2], recorder.weights[1])
    assert all_equal(recorder.moments[2], recorder.moments[1])
    assert not all_equal(recorder.weights[3], recorder.weights[2])
    # Composer steps its schedulers before its timestamp: the learning rate of batch n is that of time n - 1.
    rates = [0.05 * (1 - max(0, batch - 1) / 12) for batch in range(7)]
    assert recorder.rates == pytest.approx(rates[1:])

    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    for number, batch in enumerate(DataLoader(make_data(), batch_size=8)):  # type: ignore[arg-type]
        if number == 2:
            continue
        optimizer.param_groups[0]['lr'] = rates[number]
        optimizer.zero_grad()
        model.loss(model(batch), batch).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for one, other in zip(ours, weights_of(SimpleNamespace(model=model)), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(one, other)


def test_bad_gradients_alone_report_the_samples_of_the_batch(tmp_path):
    trainer = make_trainer(make_data(bad_gradient=[BAD]), [LossGuard(folder=str(tmp_path))], folder=tmp_path)
    assert_stops(trainer, r'batch 2: gradients are not finite \(loss .*\); samples 116, 117, 118, .*, 123; the weights')
    unguarded = make_trainer(make_data(bad_gradient=[BAD]), [LossGuard(check_gradients=False, folder=str(tmp_path))])
    assert_stops(unguarded, 'batch 3: loss is nan')


def test_skips_are_limited_within_the_window(tmp_path):
    data = make_data(bad=[100, 108, 124])
    many: dict[str, Any] = {'action': 'skip', 'max_skips': 2, 'folder': str(tmp_path)}
    stopped = make_trainer(data, [LossGuard(**many)])
    error = assert_stops(stopped, 'batch 3: loss is nan, after 2 skipped updates in the last 100 batches')
    assert 'skip such batches' not in str(error)
    assert [line['action'] for line in bad_batches(tmp_path)] == ['skip', 'skip', 'stop']
    guard = LossGuard(**dict(many, window=3))
    run_to_end(make_trainer(data, [guard]))
    assert guard.skipped == [0, 1, 3, 6, 7, 9]


def test_exploding_loss_stops_or_skips_the_update(tmp_path):
    exploding = make_data(bad=[BAD, 123], value=30.0)
    guard_settings: dict[str, Any] = {'window': 4, 'folder': str(tmp_path)}
    message = r'batch 2: loss is \d+\.?\d*, \d+ times the median [\d.]+ of the last 2; samples 1(21, 123|23, 121); noth'
    assert_stops(make_trainer(exploding, [LossGuard(**guard_settings)]), message)
    assert bad_batches(tmp_path)[0]['loss'] > 20 * bad_batches(tmp_path)[0]['median']
    for settings in ({'window': 6}, {'explosion': None}, {'explosion': 1e6}):
        guard = LossGuard(**dict(guard_settings, **settings))
        run_to_end(make_trainer(exploding, [guard], duration='4ba'))
        assert len(guard.history) == 4
    guard = LossGuard(**dict(guard_settings, action='skip'))
    run_to_end(make_trainer(exploding, [guard], duration='4ba'))
    assert guard.skipped == [2]
    assert len(guard.history) == 3 and max(guard.history) < 10, 'a skipped loss is not part of the median'


def test_resumed_run_skips_the_same_updates_as_the_uninterrupted_run(tmp_path):
    data = make_data(bad=[BAD, 140], value=30.0)
    settings: dict[str, Any] = {'action': 'skip', 'window': 4, 'folder': str(tmp_path)}
    reference = LossGuard(**settings)
    expected = run_to_end(make_trainer(data, [reference], duration='6ba'))
    run_to_end(make_trainer(data, [LossGuard(**settings)], folder=tmp_path, save_interval='1ba', duration='5ba'))
    resumed = LossGuard(**settings)
    weights = run_to_end(make_trainer(data, [resumed], duration='6ba', load_path=str(tmp_path / 'ba5.pt')))
    assert resumed.skipped == reference.skipped == [2, 5]
    assert resumed.history == reference.history
    assert all_equal(weights, expected)


@pytest.mark.parametrize('microbatch', [8, 3])
def test_checked_loss_is_the_loss_that_composer_logs_and_the_logged_norm_is_that_before_clipping(tmp_path, microbatch):
    guard = LossGuard(window=10, folder=str(tmp_path))
    settings: dict[str, Any] = {'device_train_microbatch_size': microbatch, 'loggers': [logged := InMemoryLogger()]}
    run_to_end(make_trainer(make_data(), [guard], algorithms=[GradientClipping('norm', 1e-3)], **settings))
    assert guard.history == pytest.approx(values(logged, 'loss/train/total')[-10:])
    norms = values(logged, 'grad_norm/total')
    assert norms[0] == pytest.approx(reference_norm(), rel=1e-6) and len(norms) == 12


@pytest.mark.parametrize(
    ('keep_sample_losses', 'ids', 'message'),
    [(False, True, 'samples 120, 121, 122, 123;'), (True, False, 'samples unknown, the batch has no sample_id;')],
)
def test_models_without_sample_losses_and_batches_without_ids(tmp_path, keep_sample_losses, ids, message):
    settings = {'keep_sample_losses': keep_sample_losses, 'device_train_microbatch_size': 4}
    trainer = make_trainer(make_data(bad=[BAD], ids=ids), [LossGuard(folder=str(tmp_path))], **settings)
    assert_stops(trainer, f'batch 2: loss is nan; {message}')


def test_losses_of_composers_models_are_summed_and_stand_for_each_sample():
    ids, parts = torch.tensor([5, 6]), {'a': torch.tensor([1.0, 3.0]), 'b': torch.tensor(0.5)}
    for loss, expected in ((parts, 2.5), (tuple(parts.values()), 2.5), (parts | {'total': torch.tensor(4.0)}, 4.0)):
        found = loss_guard.record_microbatch(loss, {'sample_id': ids}, None)
        assert (found.loss, found.sample_losses.tolist(), found.sample_ids) == (expected, [expected] * 2, ids)
    assert loss_guard.record_microbatch(parts, {'sample_id': ids}, torch.ones(3)).sample_losses.tolist() == [2.5] * 2
    without_ids = loss_guard.record_microbatch(parts, (ids,), None)
    assert without_ids.sample_losses.tolist() == [2.5] and without_ids.sample_ids is None
    assert loss_guard.record_microbatch(parts, (ids,), torch.ones(3)).sample_losses.tolist() == [1.0] * 3


def test_error_refers_to_the_file_for_more_samples(tmp_path):
    path = tmp_path / 'bad_batches.jsonl'
    assert loss_guard.describe_samples([*range(40)], path).endswith(f', 14, 15 and 24 more, in {path}')
    assert loss_guard.describe_samples([*range(16)], path).endswith(', 14, 15')


def test_explosion_limit_requires_a_positive_median():
    assert loss_guard.explosion_limit([1.0, 2.0, 9.0], 20.0, 6) == 40.0
    assert loss_guard.explosion_limit([-1.0, 0.0, 1.0], 20.0, 6) == math.inf
    assert loss_guard.explosion_limit([1.0, 2.0, 9.0], 20.0, 8) == math.inf


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_gradient_check_detects_one_bad_value_in_gradients_of_any_kind_and_changes_nothing(dtype):
    dist.initialize_dist('cpu')
    mesh = init_device_mesh('cpu', (1,))
    large, half = torch.linspace(-3, 3e4, 700, dtype=dtype).view(7, 100), torch.ones(5).bfloat16()
    good, before = [large, half, None, torch.zeros(0)], [large.clone(), half.clone()]
    assert summarize_gradients(good).finite and summarize_gradients([None]).finite
    assert all_equal([large, half], before)
    expected = sum(float(each.double().square().sum()) for each in before)
    assert float(summarize_gradients(good).squared_norm) == pytest.approx(expected, rel=1e-5)
    for value in (math.inf, -math.inf, math.nan):
        sharded = distribute_tensor(torch.tensor([1.0, value]), mesh, [Shard(0)])
        assert not summarize_gradients([*good, sharded]).finite
        changed = large.clone()
        changed[6, 99] = value
        assert not summarize_gradients([half, changed]).finite


def reference_norm() -> float:
    """Return the gradient norm of the first batch, computed by torch."""
    torch.manual_seed(0)
    model = Regression()
    batch = next(iter(DataLoader(make_data(), batch_size=8)))  # type: ignore[arg-type]
    model.loss(model(batch), batch).backward()
    return float(torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))  # type: ignore[misc]


def test_hook_gets_a_description_of_a_skipped_batch_and_skips_are_logged(tmp_path):
    guard = LossGuard(action='skip', folder=str(tmp_path / 'new'))
    messages: list[str] = []
    guard.on_bad_batch = messages.append
    run_to_end(make_trainer(make_data(bad=[BAD]), [guard], loggers=[metrics := InMemoryLogger()]))
    assert values(metrics, 'loss_guard/skipped_updates') == [1, 2], 'batches 2 and 8'
    assert messages[:1] == ['batch 2: loss is nan; update skipped; sample 121']


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'action': 'ignore'}, "action: 'ignore'; use stop or skip"),
        ({'explosion': 1.0}, 'explosion: 1.0 times the median; use more than 1, or null'),
        ({'window': 1}, 'window: 1 batches; use 2 or more'),
        ({'max_skips': -1}, 'max_skips: -1; use 0 or more'),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    LossGuard(explosion=1.5, window=2, max_skips=0)
    with pytest.raises(ValueError, match=f'callbacks.loss_guard.{message}'):
        LossGuard(**settings)


def test_action_skip_is_refused_with_amp_fp16():
    state: Any = SimpleNamespace(precision=Precision.AMP_FP16)
    LossGuard().init(state, logger=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='action: skip does not support precision amp_fp16'):
        LossGuard(action='skip').init(state, logger=None)  # type: ignore[arg-type]


@pytest.mark.parametrize('scenario', [pytest.param('stop', marks=pytest.mark.slow), 'skip-fsdp2'])  # DDP and FSDP2
def test_two_ranks_act_together_on_a_bad_sample_of_one(ranks, tmp_path, scenario):
    job = ranks.start_program(2, guarded_run.__file__, scenario, tmp_path)
    statuses, outputs = job.wait(), job.outputs()
    stops = scenario == 'stop'
    # Only rank 1 has the bad sample.
    assert statuses == ([CONFIG_ERROR] * 2 if stops else [0, 0]), outputs
    for rank, output in enumerate(outputs):
        assert f'rank {rank} ended at {1 if stops else 12}' in output
        assert f'rank {rank} has finite weights: True' in output
        stopped = f'rank {rank}: batch 1: loss is nan; sample 111; the weights before this batch are in'
        assert (stopped in output) == stops
    found = [(each['batch'], each['sample_ids']) for each in bad_batches(tmp_path)]
    assert found == [(1, [111]), (7, [111])][: 2 - stops]
    assert (tmp_path / 'ba1.pt').exists() == stops
    norms = [float(found) for output in outputs for found in re.findall(r'gradient norm of batch 0: (\S+)', output)]
    assert norms == [pytest.approx(reference_norm(), rel=1e-5)] * 2, 'shards and replicas are counted once'
    if scenario == 'skip-fsdp2':
        # Recording takes 8 times as long with 686 sharded gradients.
        assert all('autograd is recorded: [False, True]' in output for output in outputs)
