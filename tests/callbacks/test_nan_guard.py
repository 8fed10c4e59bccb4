"""NaNGuard: every run stops on all ranks at a NaN loss, keeps its last good checkpoint, and never saves bad weights."""

import math
from collections.abc import Callable

import guarded_run
import pytest
import torch
from checkpointing.saved_runs import SHARDED
from composer.callbacks import CheckpointSaver
from composer.core import Event
from guarded_run import At, assert_stops, bad_batches, make_data, make_trainer, run_to_end

from diffusion.algorithms.finite_weights import NonFiniteWeights, check_before_saves, count_non_finite
from diffusion.callbacks.loss_guard import LossGuard
from diffusion.callbacks.nan_guard import NaNGuard
from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_weights import weights_of as weights_of_run
from diffusion.config.load import load
from diffusion.exit_codes import CONFIG_ERROR
from diffusion.models import batch_keys
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.tasks import run_recipe
from diffusion.training.train import build_trainer, train

BAD = 121
"""ID of a sample of batch 2."""
BAD_BATCH = 2


@pytest.mark.parametrize(('value', 'keep_sample_losses'), [(math.nan, True), (math.inf, False)])
def test_run_stops_after_the_batch_and_names_its_samples(tmp_path, value, keep_sample_losses):
    data = make_data(bad=[BAD], value=value)
    settings = {'save_interval': '1ba', 'keep_sample_losses': keep_sample_losses}
    trainer = make_trainer(data, [NaNGuard(folder=str(tmp_path))], folder=tmp_path, **settings)
    samples = 'sample 121' if keep_sample_losses else r'samples 116, 117, .* 123'
    assert_stops(trainer, rf'batch 2: loss is {value}; {samples}; the newest checkpoint, .*/ba2.pt')
    assert sorted(path.name for path in tmp_path.glob('ba*.pt')) == ['ba1.pt', 'ba2.pt']
    assert [(each['batch'], each['action']) for each in bad_batches(tmp_path)] == [(2, 'stop')]


def test_run_without_checkpoints_or_before_the_first_says_so(tmp_path):
    for folder, message in ((None, 'nothing is saved: there is no'), (tmp_path, 'nothing is saved yet, since this')):
        trainer = make_trainer(make_data(bad=[100, 101]), [NaNGuard(folder=str(tmp_path))], folder=folder)
        assert_stops(trainer, f'batch 0: loss is nan; samples 100, 101; {message}')
    assert [(each['batch'], each['epoch']) for each in bad_batches(tmp_path)] == [(0, 0), (0, 0)]


def test_check_of_the_loss_can_be_turned_off(tmp_path):
    trainer = make_trainer(make_data(bad=[BAD]), [NaNGuard(check_loss=False, folder=str(tmp_path))], duration='4ba')
    assert not any(weight.isfinite().all() for weight in run_to_end(trainer))


@pytest.mark.parametrize('event', [Event.BATCH_END, Event.EPOCH_END])
def test_composers_savers_save_no_bad_weights(tmp_path, event):
    """The loss of batch 2 is finite, its gradients are not; without the guard all later checkpoints are NaN."""
    unit = '1ba' if event == Event.BATCH_END else '1ep'
    trainer = make_trainer(make_data(bad_gradient=[BAD]), [], folder=tmp_path, save_interval=unit)
    (saver,) = (each for each in trainer.state.callbacks if isinstance(each, CheckpointSaver))
    check_before_saves(saver)
    message = r'batch [36]: weights are NaN or infinite, in network.0.weight, .* and'
    assert_stops(trainer, message, NonFiniteWeights)
    assert sorted(path.name for path in tmp_path.glob('ba*.pt')) == (['ba1.pt', 'ba2.pt'] if unit == '1ba' else [])


@pytest.mark.parametrize('scenario', ['nan_guard', pytest.param('nan_guard-fsdp2', marks=pytest.mark.slow)])
def test_two_ranks_stop_together(ranks, tmp_path, scenario):
    outputs = ranks.start_program(2, guarded_run.__file__, scenario, tmp_path).end(CONFIG_ERROR)
    for rank, output in enumerate(outputs):
        assert f'rank {rank}: batch 1: loss is nan; sample 111; the newest checkpoint, from before' in output
    assert [path.name for path in tmp_path.glob('ba*.pt')] == ['ba1.pt']


@pytest.fixture
def broken_loss(monkeypatch) -> list[int]:
    """Make the loss of one sample of batch 2 of a run NaN; the list gets the ID of the fourth sample of each batch."""
    loss, seen = LatentDiffusion.loss, []

    def broken(self, outputs, batch):
        seen.append(int(batch[batch_keys.SAMPLE_ID][3]))
        outputs.weight[3] *= torch.nan if len(seen) == BAD_BATCH + 1 else 1
        return loss(self, outputs, batch)

    monkeypatch.setattr(LatentDiffusion, 'loss', broken)
    return seen


@pytest.mark.parametrize('asynchronous', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_recipe_has_the_guard_and_keeps_its_last_good_checkpoint(
    write_recipe, tmp_path, broken_loss, capsys, asynchronous
):
    path = write_recipe(checkpointing={'asynchronous': asynchronous, 'keep': {'last': 1}})
    assert run_recipe.main([str(path), 'trainer.save_interval=1ba']) == CONFIG_ERROR
    message = capsys.readouterr().err
    assert f'error: batch {BAD_BATCH}: loss is nan; sample {broken_loss[-1]}; the newest checkpoint, from' in message
    run = tmp_path / 'runs' / 'run'
    checkpoint = find_checkpoint(run)
    assert checkpoint.name == f'ba{BAD_BATCH}' and str(checkpoint) in message
    assert all(weight.isfinite().all() for weight in weights_of_run(checkpoint, 'training')[0].values())
    assert (run / 'bad_batches.jsonl').is_file()


def test_loss_guard_takes_its_place(write_recipe):
    def guards(**callbacks) -> list[type]:
        trainer = build_trainer(load(write_recipe(callbacks=callbacks)))
        trainer.close()
        return [type(each) for each in trainer.state.callbacks if isinstance(each, LossGuard | NaNGuard)]

    assert guards(loss_guard=None) == [LossGuard]
    assert guards(nan_guard={'check_loss': False}) == [NaNGuard]


def poison(trainer, batch: int, spoil: Callable[[torch.Tensor], object]) -> None:
    """Let a trained weight become bad at the end of a batch, unseen by any loss."""

    def do() -> None:
        weight = [each for each in trainer.state.model.parameters() if each.requires_grad][-1]
        spoil(weight.data.to_local() if hasattr(weight.data, 'to_local') else weight.data)

    trainer.state.callbacks.insert(0, At(Event.BATCH_END, batch, do))


@pytest.mark.parametrize('parallelism', [{}, pytest.param(SHARDED, marks=pytest.mark.slow)])
def test_bad_weights_are_not_saved_whole_or_sharded(write_recipe, alone, tmp_path, parallelism):
    path = write_recipe(parallelism=parallelism, callbacks={'nan_guard': {'check_loss': False}}, small=True)
    trainer = build_trainer(load(path, ['trainer.save_interval=1ba']))
    poison(trainer, 2, lambda weight: weight.flatten()[:1].fill_(torch.inf))
    assert_stops(trainer, 'batch 2: weights are NaN or infinite, in .*; they are not saved', NonFiniteWeights)
    run = tmp_path / 'runs' / 'run'
    assert sorted(path.name for path in run.glob('ba*')) == ['ba1']
    assert not [path for path in run.iterdir() if path.name.startswith('.ba')], 'no unfinished files'


ONE_BAD_SHARD = """
from types import SimpleNamespace
import torch
from composer.devices import DeviceCPU
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from diffusion.algorithms.finite_weights import NonFiniteWeights, check_weights

torch.distributed.init_process_group('gloo')
model = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 5))
for module in (*model, model):
    fully_shard(module, mesh=init_device_mesh('cpu', (2,)))
state = SimpleNamespace(model=model, algorithms=[], device=DeviceCPU())
check_weights(state, 'batch 3', 'stop')
if torch.distributed.get_rank() == 1:
    model[1].bias.to_local().data[-1] = torch.inf
try:
    check_weights(state, 'batch 4', 'stop')
except NonFiniteWeights as error:
    print(error)
"""


def test_bad_weights_of_one_rank_stop_all_ranks(ranks):
    """The first layer has one row, so that rank 1 has empty shards."""
    outputs = ranks.start_program(2, '-c', ONE_BAD_SHARD).end()
    assert all('batch 4: weights are NaN or infinite, in 1.bias; stop' in output for output in outputs)


def test_run_does_not_resume_from_bad_weights(write_recipe, monkeypatch):
    path = write_recipe(small=True)
    trainer = build_trainer(load(path, ['trainer.max_duration=1ba']))
    poison(trainer, 1, lambda weight: weight.fill_(torch.nan))
    with monkeypatch.context() as patch:
        patch.setattr('diffusion.checkpointing.checkpoint_writer.check_weights', lambda *arguments: None)
        trainer.fit()
    trainer.close()
    with pytest.raises(NonFiniteWeights, match='/ba1: weights are NaN or infinite, in .*; to resume from an earlier'):
        train(load(path))


def test_training_does_not_start_from_bad_weights(write_recipe, monkeypatch):
    recipe = load(write_recipe(small=True))
    trainer = build_trainer(recipe)
    poisoned = next(each for each in trainer.state.model.parameters() if each.requires_grad)
    poisoned.data.flatten()[0] = torch.nan
    monkeypatch.setattr('diffusion.training.train.build_trainer', lambda recipe: trainer)
    with pytest.raises(NonFiniteWeights, match='the initial weights: weights are NaN or infinite, in .*start from'):
        train(recipe)


def test_non_finite_tensors_are_counted_in_every_dtype():
    big = torch.tensor([torch.finfo(torch.float32).max])
    good = [torch.ones(3), torch.zeros(0), big, -big, torch.ones(2, dtype=torch.bfloat16), torch.zeros(())]
    assert count_non_finite(good).item() == 0
    for bad in (torch.nan, torch.inf, -torch.inf):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            assert count_non_finite([*good, torch.tensor([1.0, bad, 2.0], dtype=dtype)]).item() == 1
    assert count_non_finite([]).item() == 0
