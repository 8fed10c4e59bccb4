"""Training on a dataset that has grown: resuming needs allow_data_change, and the order is the same on any ranks."""

from pathlib import Path

import pytest
from ranks import largest_difference, read_losses
from shards import draw_image

from diffusion.config.load import load
from diffusion.prepare.append import append
from diffusion.prepare.pipeline import prepare
from diffusion.prepare.settings import settings_of
from diffusion.prepare.worker_pool import run_job
from diffusion.training.train import build_trainer, train
from tests.served import read_served


def deliver(folder: Path, numbers: range, out: Path, *, add: bool) -> None:
    """Prepare images of 32 px, or add them to the dataset."""
    folder.mkdir()
    for number in numbers:
        (folder / f'p{number}.png').write_bytes(draw_image(number, 32))
        (folder / f'p{number}.txt').write_text(f'number {number}')
    values = {'source': {'kind': 'folder', 'location': str(folder)}, 'out': str(out), 'sizes': [32], 'shard_mb': 0.003}
    (append if add else prepare)(settings_of(values), run=lambda jobs: map(run_job, jobs))


@pytest.mark.slow
def test_resume_on_a_grown_dataset_needs_allow_data_change_and_is_the_same_on_two_ranks(
    write_recipe, tmp_path, caplog, ranks
):
    deliver(tmp_path / 'first', range(24), tmp_path / 'data', add=False)
    streams = {'photos': {'local': str(tmp_path / 'data' / '32px'), 'resolution': 32}}
    served = {'served': {'folder': str(tmp_path)}}
    path = write_recipe('run', streams=streams, imports=['tests.served'], callbacks=served)
    of_ranks = write_recipe('ranks', streams=streams)
    for each in (path, of_ranks):
        train(load(each, ['trainer.max_duration=2ba'])).close()
    deliver(tmp_path / 'second', range(24, 40), tmp_path / 'data', add=True)
    with pytest.raises(ValueError, match='set allow_data_change: true to resume with other data') as refused:
        build_trainer(load(path))
    for line in ('choose: 24 in the checkpoint, 40 now', 'samples: 24 in the checkpoint, 40 now', 'index_sha256'):
        assert f'streams.photos.{line}' in str(refused.value)
    job = ranks.start(2, of_ranks, 'allow_data_change=true')
    trainer = build_trainer(load(path, ['allow_data_change=true']))
    assert 'streams.photos.samples: 24 in the checkpoint, 40 now' in caplog.text
    assert trainer.state.timestamp.batch.value == 2
    trainer.fit()
    trainer.close()
    served_ids = [index for ids, _ in read_served(tmp_path) for index in ids]
    assert max(served_ids) >= 24, 'images of the second delivery are trained on'
    job.end()
    losses = [read_losses(tmp_path / 'runs' / name) for name in ('run', 'ranks')]
    assert len(losses[0]) == 8
    assert largest_difference(*losses) < 1e-3
