"""Training on a dataset that has grown: resuming needs allow_data_change, and the order is the same on any ranks."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from composer.core import Callback, State
from composer.loggers import Logger
from ranks import Ranks, largest_difference, read_losses
from shards import draw_image

from diffusion.config.load import load
from diffusion.data.streams import BucketedDataset
from diffusion.models import batch_keys
from diffusion.prepare.append import append
from diffusion.prepare.dataset_record import RecordedDataset
from diffusion.prepare.pipeline import prepare
from diffusion.prepare.remove import remove
from diffusion.prepare.settings import settings_of
from diffusion.prepare.worker_pool import run_job
from diffusion.training.train import build_trainer, train


def deliver(folder: Path, numbers: range, out: Path, *, add: bool) -> None:
    """Prepare images of 32 px, or add them to the dataset."""
    folder.mkdir()
    for number in numbers:
        (folder / f'p{number}.png').write_bytes(draw_image(number, 32))
        (folder / f'p{number}.txt').write_text(f'number {number}')
    values = {'source': {'kind': 'folder', 'location': str(folder)}, 'out': str(out), 'sizes': [32], 'shard_mb': 0.003}
    (append if add else prepare)(settings_of(values), run=lambda jobs: map(run_job, jobs))


class Seen(Callback):
    """IDs of the samples of all batches."""

    def __init__(self) -> None:
        self.ids: set[int] = set()

    def before_forward(self, state: State, logger: Logger) -> None:
        self.ids |= set(state.batch[batch_keys.SAMPLE_ID].tolist())


@pytest.fixture
def grow(tmp_path: Path, write_recipe: Callable[..., Path]) -> Callable[[str], Path]:
    """Function that trains 2 batches on 24 images, then adds 16 images, and returns the recipe's file."""
    out = tmp_path / 'out'
    deliver(tmp_path / 'first', range(24), out, add=False)
    old = tmp_path / 'old'
    shutil.copytree(out, old)
    deliver(tmp_path / 'second', range(24, 40), out, add=True)
    grown = tmp_path / 'grown'
    shutil.copytree(out, grown)

    def prepared(name: str) -> Path:
        path = write_recipe(name, streams={'photos': {'local': str(tmp_path / name / '32px'), 'resolution': 32}})
        shutil.copytree(old, tmp_path / name)
        train(load(path, ['trainer.max_duration=2ba'])).close()
        shutil.rmtree(tmp_path / name)
        shutil.copytree(grown, tmp_path / name)
        return path

    return prepared


@pytest.mark.slow
def test_resume_on_a_grown_dataset_needs_allow_data_change_and_is_the_same_on_two_ranks(
    grow: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, ranks: Ranks
) -> None:
    path, of_ranks = grow('run'), grow('ranks')
    job = ranks.start(2, of_ranks, 'allow_data_change=true')
    with pytest.raises(ValueError, match='set allow_data_change: true to resume with other data') as refused:
        build_trainer(load(path))
    for line in ('choose: 24 in the checkpoint, 40 now', 'samples: 24 in the checkpoint, 40 now', 'index_sha256'):
        assert f'streams.photos.{line}' in str(refused.value)
    trainer = build_trainer(load(path, ['allow_data_change=true']))
    assert 'streams.photos.samples: 24 in the checkpoint, 40 now' in caplog.text
    assert trainer.state.timestamp.batch.value == 2
    seen = Seen()
    dataset: Any = trainer.state.train_dataloader.dataset  # type: ignore[union-attr]
    assert isinstance(dataset, BucketedDataset) and len(dataset.samples_per_shard) > 2
    trainer.state.callbacks.append(seen)
    trainer.fit()
    trainer.close()
    assert max(seen.ids) >= 24, 'images of the second delivery are trained on'
    assert job.wait() == [0, 0], job.output()
    losses = [read_losses(tmp_path / 'runs' / name) for name in ('run', 'ranks')]
    assert len(losses[0]) == 8
    assert largest_difference(*losses) < 1e-3
    remove(RecordedDataset(str(tmp_path / 'run'), tmp_path / 'scratch'), ['p3.png'])
    with pytest.raises(ValueError, match='streams.photos.samples: 40 in the checkpoint, 39 now'):
        build_trainer(load(path, ['trainer.max_duration=10ba']))
