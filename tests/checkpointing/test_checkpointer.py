"""Checkpoints of real runs: resumed with other strategies and numbers of ranks, or refused with a reason."""

import json
import re
import shutil
from unittest.mock import Mock

import pytest
import torch
from callbacks.guarded_run import At, make_data, make_trainer, run_to_end
from checkpointing.saved_runs import SHARDED, recipe_writer, relative_distance
from composer import Trainer
from composer.core import Event, Time, Timestamp, TimeUnit
from ranks import largest_difference, read_losses

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_weights import is_sharded, read_checkpoint, verify_checkpoint, weights_of
from diffusion.checkpointing.checkpointer import Checkpointer
from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.runs.run_id import read_run_id
from diffusion.training.components import build_loader, build_model, build_optimizer
from diffusion.training.train import build_trainer, train

STRATEGIES = {'ddp': {}, 'fsdp2': {'strategy': 'fsdp2'}, 'sharded': SHARDED}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory, tiny_recipe):
    """Return the folder of a run of 8 batches on one rank, and a function that writes recipes like its own."""
    root = tmp_path_factory.mktemp('checkpointer')
    write = recipe_writer(root, tiny_recipe, optimizer={'name': 'adamw', 'lr': 1.0e-4})
    train(load(write('reference', {'save_interval': '4ba'}))).close()
    return root / 'runs' / 'reference', write


@pytest.mark.cpu_seconds(15)
@pytest.mark.parametrize(
    'legs',
    [[(2, 'sharded'), (1, 'ddp')], pytest.param([(2, 'ddp'), (1, 'sharded'), (2, 'fsdp2')], marks=pytest.mark.slow)],
    ids=lambda legs: '-'.join(f'{count}{strategy}' for count, strategy in legs),
)
def test_run_resumes_on_any_number_of_ranks_with_any_strategy(uninterrupted, ranks, legs):
    """The run is stopped after averaging has started: at the end of an epoch of 5 batches, and maybe in the next."""
    reference, write = uninterrupted
    name = '-'.join(f'{count}{strategy}' for count, strategy in legs)
    durations = ('1ep', '7ba', '8ba') if len(legs) == 3 else ('1ep', '8ba')
    for (count, strategy), duration in zip(legs, durations, strict=True):
        path = write(name, parallelism=STRATEGIES[strategy])
        ranks.run(count, path, f'trainer.max_duration={duration}', 'trainer.save_interval=1ep')
        checkpoint = find_checkpoint(reference.parent / name)
        assert is_sharded(checkpoint) == (strategy == 'sharded')
        verify_checkpoint(checkpoint)
    run = reference.parent / name
    assert largest_difference(read_losses(reference), read_losses(run)) < 1e-4
    for which in ('training', 'ema'):
        ours, theirs = weights_of(find_checkpoint(run), which)[0], weights_of(find_checkpoint(reference), which)[0]
        # An update of AdamW moves a weight by up to the learning rate regardless of the size of its gradient; where the
        # true gradient is zero, rounding determines the direction.
        assert distance(ours, theirs) < 8 * 2e-4
        assert relative_distance(run, reference, which) < 1e-3
    state = read_checkpoint(find_checkpoint(run))
    assert dict(state['algorithms'])['EMA']['updates'] == 5, 'batches 4 to 8'


def test_checkpoint_of_another_model_or_optimizer_is_refused(uninterrupted):
    """Also without the recipe in the checkpoint and in the run's folder."""
    reference, write = uninterrupted
    path, other = write('other'), reference.parent / 'other'
    shutil.copytree(reference, other, symlinks=True)
    receipt = json.loads((other / 'ba8' / 'receipt.json').read_text())
    del receipt['files']['recipe.yaml']
    (other / 'ba8' / 'receipt.json').write_text(json.dumps(receipt))
    (other / 'ba8' / 'recipe.yaml').unlink()
    (other / 'recipe.yaml').unlink()
    for override, message in (
        ('model.depth=2', r'ba8: the architecture differs from the recipe: .*denoiser\.'),
        ('optimizer.name=decoupled_adamw', r'ba8: saved with optimizer AdamW, but the recipe has DecoupledAdamW; .'),
    ):
        with pytest.raises(ValueError, match=message):
            build_trainer(load(path, [override, 'trainer.max_duration=10ba']))


def test_run_without_autoresume_does_not_overwrite_checkpoints(uninterrupted):
    _, write = uninterrupted
    with pytest.raises(ValueError, match=r'reference holds ba8 and 1 more checkpoints of another run; resume it'):
        build_trainer(load(write('reference'), ['trainer.autoresume=false']))


@pytest.mark.slow
def test_run_with_composers_own_saver_resumes(uninterrupted, tmp_path):
    """A `save_folder` selects Composer's saver, which can upload checkpoints."""
    reference, write = uninterrupted
    path = write('uploaded')
    overrides = [f'trainer.save_folder={tmp_path}', 'trainer.save_overwrite=true', 'trainer.save_interval=2ba']
    train(load(path, [*overrides, 'trainer.max_duration=6ba'])).close()
    assert not list((reference.parent / 'uploaded').glob('ba*'))
    train(load(path, overrides)).close()
    assert read_losses(reference.parent / 'uploaded') == read_losses(reference)
    ours = weights_of(find_checkpoint(reference))[0]
    assert distance(ours, weights_of(find_checkpoint(tmp_path / 'latest-rank0.pt'))[0]) == 0
    with pytest.raises(UserError, match='optimizer.amsgrad: false in the checkpoint, true now'):
        train(load(path, [*overrides, 'optimizer.amsgrad=true', 'trainer.max_duration=10ba']))
    for elsewhere in ([], [f'trainer.save_folder={tmp_path}/other']):
        with pytest.raises(UserError, match='saves its checkpoints to .*; set it back to resume, or use another name'):
            train(load(path, elsewhere))


def test_composer_alone_loads_an_unsharded_checkpoint(uninterrupted):
    """`state.pt` has Composer's format, so that training can continue without this library."""
    reference, write = uninterrupted
    recipe = load(write('composer'))
    model = build_model(recipe)
    trainer = Trainer(
        model=model,
        optimizers=build_optimizer(recipe, model),
        train_dataloader=build_loader(recipe),
        max_duration='9ba',
        load_path=str(reference / 'latest' / 'state.pt'),
        device='cpu',
        progress_bar=False,
    )
    assert trainer.state.timestamp.batch.value == 8
    weights = weights_of(find_checkpoint(reference), 'training')[0]
    assert distance(dict(trainer.state.model.state_dict()), weights) == 0
    trainer.close()


@pytest.mark.filterwarnings('ignore:No batches were trained')
def test_resumed_run_draws_the_random_numbers_of_an_uninterrupted_one(tmp_path):
    """It is stopped within an epoch of 6 batches, and at its end."""

    def draws(name: str, *durations: str) -> list[float]:
        found: list[float] = []
        draw = [At(Event.AFTER_LOSS, batch, lambda: found.append(float(torch.rand(())))) for batch in range(7)]
        for duration in durations:
            saver = Checkpointer(tmp_path / name, save_interval='auto', resume='auto')
            run_to_end(make_trainer(make_data(), [saver, *draw], duration=duration))
            assert saver._timed._duration > 0  # type: ignore[union-attr]
        return found

    whole = draws('whole', '7ba')
    assert draws('stopped', '3ba', '6ba', '7ba') == whole and len({*whole}) == 7


@pytest.mark.parametrize(('choice', 'expected'), [('finish', ['ba2']), ('both', ['ba2', 'ba3']), ('replace', ['ba3'])])
def test_stopping_run_completes_the_saves_that_the_notice_allows(tmp_path, monkeypatch, choice, expected):
    saver, state = Checkpointer(tmp_path / 'run'), Mock(timestamp=Timestamp(batch=3))
    running = saver._running = Mock(batch=Time(2, TimeUnit.BATCH), stall_seconds=0.0, choose=Mock(return_value=choice))
    running.save.name, own = 'ba2', Mock()
    own.name = 'ba3'
    monkeypatch.setattr(saver, '_write', lambda state, in_background: own)
    saver.save_in_time(state, Mock(), 6.0)
    running.choose.assert_called_once_with(6.0, None)
    assert saver.saved_checkpoints == expected and running.abandon.called == (choice == 'replace')
    saver._running = Mock(batch=Time(3, TimeUnit.BATCH), stall_seconds=0.0)
    saver.last_checkpoint_batch = None
    saver.save_in_time(state, Mock(), 6.0)
    assert len(saver.saved_checkpoints) == len(expected) + 1, 'a running save of this batch is the one'


CHECK_SHARED = """
import datetime, os, sys, time
from pathlib import Path
import torch
from composer.utils import dist, get_device
from diffusion.checkpointing.rank_agreement import run_on_rank_zero
from diffusion.checkpointing.run_storage import check_shared, open_run_folder
from diffusion.errors import ExternalError, UserError
from diffusion.runs.run_id import create_run_id
from diffusion.storage import local_files
local_files.VISIBLE_SECONDS = 0.1
dist.initialize_dist(get_device('cpu'), 60.0)
folder, rank = Path(sys.argv[1]), os.environ['RANK']
check_shared(folder / 'same', 'runs_dir')
try:
    check_shared(folder / rank, 'runs_dir')
except UserError as error:
    print(error)
ids = {open_run_folder(folder / 'run') for _ in range(2)}
assert len(ids) == 1
print('id', *ids)
if rank == '0':
    create_run_id(folder / rank)
try:
    open_run_folder(folder / rank)
except ExternalError as error:
    print(error)
torch.distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2))
print('result', run_on_rank_zero(lambda: time.sleep(4) or 'found', 'where'))
try:
    run_on_rank_zero(lambda: 1 / 0, 'where')
except (ZeroDivisionError, RuntimeError) as error:
    print(error)
"""


def test_ranks_share_a_folder_or_say_so_and_wait_for_rank_0_beyond_the_timeout(ranks, tmp_path):
    first, second = ranks.start_program(2, '-c', CHECK_SHARED, tmp_path).end()
    for output in (first, second):
        assert re.search(r'/1 is not the same folder on rank 0 \(.*\) and rank 1 \(.*\): .*; use a folder on', output)
        assert re.search(r'rank 1 \(.*\): .* The run has begun; check that its file system is mounted on both', output)
        assert f'id {read_run_id(tmp_path / "run")}\n' in output
    assert 'result found\n' in first and '\ndivision by zero\n' in first
    assert 'result None\nwhere (rank 0: ZeroDivisionError: division by zero)\n' in second
    assert not [*(tmp_path / 'same').iterdir()], 'the check leaves no files'
