"""A captioned dataset grows and loses images, trains by weights, and is compared on resume."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from captioning.vlm_server import VlmServer, write_settings
from commands import output_of
from training.test_grown_dataset import deliver

from diffusion.config.load import load
from diffusion.training.train import build_trainer, train


@pytest.mark.slow
def test_captions_follow_the_images_and_changed_ones_are_named_on_resume(
    server: VlmServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], write_recipe: Callable[..., Path]
) -> None:
    data = tmp_path / 'data'
    settings = write_settings(tmp_path / 'vlm.yaml', server.url)
    for name, numbers in (('first', range(16)), ('second', range(16, 24))):
        deliver(tmp_path / name, numbers, data, add=name == 'second')
        output_of(capsys, 'caption', data, '--with', settings)
    output_of(capsys, 'data', 'remove', data, '--key', 'p3.png')
    assert 'captioned already' in output_of(capsys, 'caption', data, '--with', settings)
    assert server.good.total() == len(server.good) == 48
    streams = {'photos': {'local': str(data / '32px'), 'resolution': 32}}
    dataset = {'name': 'image_text', 'caption_weights': {'original': 0.2, 'brief': 0.4, 'full': 0.4}}
    recipe = write_recipe(streams=streams, dataset=dataset)
    train(load(recipe, ['trainer.max_duration=1ba'])).close()
    for folder in ('captions/brief', '32px/captions/brief'):
        shutil.rmtree(data / folder)
    again = write_settings(tmp_path / 'again.yaml', server.url, ('brief',), seed=5)
    output_of(capsys, 'caption', data, '--with', again)
    assert server.good.total() == 48 + 23
    with pytest.raises(ValueError, match=r'streams\.photos\.captions\.brief: tiny-vlm, brief version 1, '):
        build_trainer(load(recipe))
    train(load(recipe, ['allow_data_change=true'])).close()
