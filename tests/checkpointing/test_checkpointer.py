"""Checkpoints of real runs: resumed under other strategies and on other numbers of ranks, and refused with a reason."""

import errno
import shutil
from pathlib import Path

import pytest
import torch
from ranks import largest_difference, read_losses

from diffusion.checkpointing import checkpoint_store
from diffusion.checkpointing.checkpoint_store import check_whole
from diffusion.checkpointing.run_folder import find_checkpoint, is_sharded, read_checkpoint, weights_of
from diffusion.config.load import load
from diffusion.training.train import build_trainer, train

EMA = {'ema': {'ema_start': '3ba', 'smoothing': 0.5}}
STRATEGIES = {
    'ddp': {},
    'fsdp2': {'strategy': 'fsdp2'},
    'sharded': {'strategy': 'fsdp2', 'checkpoints': 'sharded', 'reshard_after_forward': False},
}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory, tiny_recipe):
    """A run of 8 batches on one rank, and how to make others like it."""
    import yaml

    root = tmp_path_factory.mktemp('checkpointer')

    def write(name: str, **sections) -> Path:
        content = tiny_recipe(root / 'runs', name=name, algorithms=EMA, **sections)
        content['optimizer'] = {'name': 'adamw', 'lr': 1.0e-4}
        path = root / f'{name}.yaml'
        path.write_text(yaml.safe_dump(content))
        return path

    train(load(write('whole'))).close()
    return root / 'runs' / 'whole', write


@pytest.mark.parametrize(
    'legs',
    [
        [(2, 'sharded'), (1, 'ddp'), (2, 'sharded')],
        pytest.param([(1, 'ddp'), (2, 'sharded'), (1, 'fsdp2')], marks=pytest.mark.slow),
        pytest.param([(2, 'fsdp2'), (1, 'sharded'), (2, 'ddp')], marks=pytest.mark.slow),
    ],
    ids=lambda legs: '-'.join(f'{count}{strategy}' for count, strategy in legs),
)
def test_a_run_goes_on_anywhere(uninterrupted, ranks, legs):
    """Stopped after the averages have started, twice: 4 batches, 2 more, and to the end."""
    whole, write = uninterrupted
    name = '-'.join(f'{count}{strategy}' for count, strategy in legs)
    for (count, strategy), duration in zip(legs, ('4ba', '6ba', '8ba'), strict=True):
        path = write(name, parallelism=STRATEGIES[strategy])
        ranks.run(count, path, f'trainer.max_duration={duration}', 'trainer.save_interval=2ba')
        checkpoint = find_checkpoint(whole.parent / name)
        assert is_sharded(checkpoint) == (strategy == 'sharded')
        check_whole(checkpoint)
    run = whole.parent / name
    assert largest_difference(read_losses(whole), read_losses(run)) < 1e-4
    for which in ('training', 'ema'):
        ours, theirs = weights_of(find_checkpoint(run), which)[0], weights_of(find_checkpoint(whole), which)[0]
        # An update of AdamW moves a weight by up to the learning rate, whatever the size of its gradient; where the
        # true gradient is zero, rounding decides on the direction.
        assert distance(ours, theirs) < 8 * 2e-4
        norm = sum(float(theirs[key].square().sum()) for key in theirs) ** 0.5
        moved = sum(float((ours[key] - theirs[key]).square().sum()) for key in theirs) ** 0.5
        assert moved < 1e-3 * norm
    state = read_checkpoint(find_checkpoint(run))
    assert dict(state['algorithms'])['EMA']['updates'] == 5, 'batches 4 to 8'


@pytest.mark.slow
def test_sharded_and_interrupted_equals_sharded_and_uninterrupted(uninterrupted, ranks, pictures):
    """Bit for bit, weights and averages: the case in which Composer's own EMA corrupts weights."""
    whole, write = uninterrupted
    sections = {
        'parallelism': STRATEGIES['sharded'],
        # Forward passes right before a checkpoint, before the averages have started and after.
        'eval_streams': {'other': {'local': str(pictures[64]), 'resolution': 32}},
        'callbacks': {'image_grid': {'prompts': ['a'], 'every': '2ba', 'num_inference_steps': 1}},
    }
    own = ['trainer.save_interval=1ba', 'trainer.eval_interval=4ba']
    ranks.run(2, write('sharded', **sections), *own)
    for duration in ('5ba', '8ba'):
        ranks.run(2, write('sharded-parts', **sections), *own, f'trainer.max_duration={duration}')
    runs = whole.parent
    assert read_losses(runs / 'sharded') == read_losses(runs / 'sharded-parts')
    for which in ('training', 'ema'):
        one, other = (weights_of(find_checkpoint(runs / name), which)[0] for name in ('sharded', 'sharded-parts'))
        assert distance(one, other) == 0


def test_the_newest_damaged_checkpoint_is_passed_over(uninterrupted, caplog):
    whole, write = uninterrupted
    path = write('damaged')
    train(load(path, ['trainer.max_duration=6ba', 'trainer.save_interval=2ba'])).close()
    run = whole.parent / 'damaged'
    state = run / 'ba6' / 'state.pt'
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 16
    state.write_bytes(content)
    with pytest.raises(ValueError, match=r'ba6/state\.pt: its content is not what was written'):
        weights_of(find_checkpoint(run))
    trainer = build_trainer(load(path, ['trainer.save_interval=2ba']))
    assert trainer.state.timestamp.batch.value == 4
    assert (run / 'latest').readlink() == Path('ba4'), 'before anything is trained'
    assert 'damaged checkpoint, looking for an earlier one' in caplog.text
    trainer.fit()
    trainer.close()
    check_whole(run / 'ba6')
    assert (run / 'ba6.damaged' / 'state.pt').read_bytes() == bytes(content), 'set aside, not deleted'
    assert read_losses(run) == read_losses(whole)
    assert distance(weights_of(find_checkpoint(run))[0], weights_of(find_checkpoint(whole))[0]) == 0


@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('model.block_out_channels=[32, 64]', r'ba8: of another architecture than the recipe: .*denoiser\.'),
        ('optimizer.name=decoupled_adamw', r'ba8: of a run with AdamW, this one has DecoupledAdamW; .* init_from'),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(uninterrupted, override, message):
    whole, write = uninterrupted
    path = write('other')
    if not (whole.parent / 'other').exists():
        shutil.copytree(whole, whole.parent / 'other', symlinks=True)
    with pytest.raises(ValueError, match=message):
        build_trainer(load(path, [override, 'trainer.max_duration=10ba']))


def test_a_run_goes_on_with_its_own_seed_and_data(uninterrupted, pictures):
    """Both would go on without a word, as another run."""
    _, write = uninterrupted
    path = write('own')
    train(load(path, ['trainer.max_duration=4ba'])).close()
    with pytest.raises(ValueError, match=r'seed: 18, the run was started with 17; .* start a new run'):
        build_trainer(load(path, ['seed=18', 'loader.shuffle_seed=17']))
    other = [f'streams.more={{local: {pictures[64]}, resolution: 32}}', 'dataset.flip=true']
    with pytest.raises(ValueError, match='set allow_data_change: true to go on with other data') as refused:
        build_trainer(load(path, other))
    for line in ('dataset.flip: False in the checkpoint, True now', 'streams.more: not in the checkpoint, there now'):
        assert line in str(refused.value)
    trainer = build_trainer(load(path, [*other, 'allow_data_change=true']))
    assert trainer.state.timestamp.batch.value == 4
    trainer.fit()
    trainer.close()


def test_a_full_disk_is_told_with_the_room_needed_and_leaves_nothing(uninterrupted, monkeypatch):
    whole, write = uninterrupted
    plain = checkpoint_store.HashingWriter.write

    def full(writer: checkpoint_store.HashingWriter, data: bytes) -> int:
        if plain(writer, data) and writer.record().bytes > 2**20:  # in the middle of torch.save's C++
            raise OSError(errno.ENOSPC, 'No space left on device')
        return len(data)

    trainer = build_trainer(load(write('full'), ['trainer.save_interval=2ba']))
    monkeypatch.setattr(checkpoint_store.HashingWriter, 'write', full)
    with pytest.raises(OSError, match=r'full/ba2: not saved, no space left on .*/full, 0\.0\d GiB needed') as raised:
        trainer.fit()
    trainer.close()
    assert raised.value.errno == errno.ENOSPC
    assert not list((whole.parent / 'full').glob('*ba2*')), 'nor what was written of it'


def test_another_fault_of_the_disk_is_raised_as_it_is(uninterrupted, monkeypatch):
    whole, write = uninterrupted
    trainer = build_trainer(load(write('faulty'), ['trainer.save_interval=2ba']))
    fault = OSError(errno.ESTALE, 'Stale file handle')

    def stale(*_: object) -> None:
        raise fault

    monkeypatch.setattr(checkpoint_store, 'publish', stale)
    with pytest.raises(OSError, match='Stale') as raised:
        trainer.fit()
    trainer.close()
    assert raised.value is fault, 'with its own traceback'
    assert not list((whole.parent / 'faulty').glob('*ba2*'))


def test_a_checkpoint_that_cannot_be_read_now_stays_the_newest(uninterrupted, monkeypatch):
    """A fault of the file system is no damage: the run ends, and the next try goes on from where it was."""
    whole, write = uninterrupted
    path = write('unread')
    train(load(path, ['trainer.max_duration=4ba', 'trainer.save_interval=2ba'])).close()
    run, plain = whole.parent / 'unread', checkpoint_store.record_of

    def stale(file: Path) -> checkpoint_store.FileRecord:
        raise OSError(errno.ESTALE, 'Stale file handle', str(file))

    monkeypatch.setattr(checkpoint_store, 'RETRY_PAUSES_SECONDS', (0.0, 0.0))
    monkeypatch.setattr(checkpoint_store, 'record_of', stale)
    with pytest.raises(OSError, match='Stale file handle'):
        build_trainer(load(path))
    assert {folder.name for folder in run.glob('ba*')} == {'ba2', 'ba4'}
    monkeypatch.setattr(checkpoint_store, 'record_of', plain)
    trainer = build_trainer(load(path))
    assert trainer.state.timestamp.batch.value == 4
    trainer.close()


def test_a_run_that_may_not_go_on_does_not_write_over_another(uninterrupted):
    _, write = uninterrupted
    path = write('again')
    train(load(path, ['trainer.max_duration=1ba'])).close()
    with pytest.raises(ValueError, match=r'again holds ba1 and 0 more checkpoints of another run; resume it'):
        build_trainer(load(path, ['trainer.autoresume=false']))


def test_only_so_many_are_kept(uninterrupted):
    whole, write = uninterrupted
    path = write('pruned')
    keep = ['trainer.save_interval=1ba', 'trainer.save_num_checkpoints_to_keep=2']
    train(load(path, [*keep, 'trainer.max_duration=4ba'])).close()
    train(load(path, [*keep, 'trainer.max_duration=6ba'])).close()
    assert sorted(folder.name for folder in (whole.parent / 'pruned').glob('ba*')) == ['ba5', 'ba6']


def test_composers_own_saver_resumes_too(uninterrupted, tmp_path):
    """What a `save_folder` asks for: it can upload, which ours cannot."""
    whole, write = uninterrupted
    path = write('uploaded')
    own = [f'trainer.save_folder={tmp_path}', 'trainer.save_overwrite=true', 'trainer.save_interval=2ba']
    train(load(path, [*own, 'trainer.max_duration=6ba'])).close()
    assert not list((whole.parent / 'uploaded').glob('ba*'))
    train(load(path, own)).close()
    assert read_losses(whole.parent / 'uploaded') == read_losses(whole)
    ours = weights_of(find_checkpoint(whole))[0]
    assert distance(ours, weights_of(find_checkpoint(tmp_path / 'latest-rank0.pt'))[0]) == 0


def test_composer_alone_reads_a_whole_checkpoint(uninterrupted):
    """`state.pt` is Composer's own form: no library of ours is needed to go on with it."""
    from composer import Trainer

    from diffusion.training.components import build_loader, build_model, build_optimizer

    whole, write = uninterrupted
    recipe = load(write('composer'))
    model = build_model(recipe)
    trainer = Trainer(
        model=model,
        optimizers=build_optimizer(recipe, model),
        train_dataloader=build_loader(recipe),
        max_duration='9ba',
        load_path=str(whole / 'latest' / 'state.pt'),
        device='cpu',
        progress_bar=False,
    )
    assert trainer.state.timestamp.batch.value == 8
    weights = weights_of(find_checkpoint(whole), 'training')[0]
    assert distance(dict(trainer.state.model.state_dict()), weights) == 0
    trainer.close()


SHARED = """
import os, sys
from pathlib import Path
from composer.utils import dist, get_device
from diffusion.checkpointing.checkpointer import check_shared
from diffusion.errors import UserError
dist.initialize_dist(get_device('cpu'), 60.0)
folder = Path(sys.argv[1])
check_shared(folder / 'same', 'runs_dir')
try:
    check_shared(folder / os.environ['RANK'], 'runs_dir')
except UserError as error:
    print(error)
"""


def test_ranks_that_do_not_see_the_same_folder_are_told_before_training(ranks, tmp_path):
    job = ranks.start_program(2, '-c', SHARED, tmp_path)
    assert job.wait() == [0, 0], job.output()
    for output in job.outputs():
        assert '/1 is not the same folder on rank 0 and rank 1; give one on a file system that all nodes' in output
    assert not [*(tmp_path / 'same').iterdir()], 'nothing is left of the check'
