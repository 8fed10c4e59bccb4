"""ImageGrid: when it samples, in which batches and from which noise, and where the images go."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from callbacks.guarded_run import make_data, make_trainer, run_to_end

from diffusion.callbacks.image_grid import ImageGrid
from diffusion.errors import UserError


def test_prompts_are_sampled_in_batches_from_the_noise_of_their_seeds(tmp_path, caplog):
    caplog.set_level('INFO')
    grid = ImageGrid(['a', 'b', 'c'], every='2ba', seed=5, batch_size=2, size=[8, 16], folder=str(tmp_path))
    trainer = make_trainer(make_data(), [grid], duration='5ba')
    generate = Mock(side_effect=lambda prompts, **_: torch.rand(len(prompts), 3, 8, 16))
    trainer.state.model.generate = generate
    images = trainer.logger.log_images = Mock()
    run_to_end(trainer)
    sampled = [(each.args[0], [*each.kwargs['seeds']]) for each in generate.mock_calls]
    assert sampled == [(['a', 'b'], [5, 6]), (['c'], [7])] * 3
    guidance = {'guidance_scale': 7.5, 'guidance_rescale': 0.0, 'guidance': None, 'negative_prompt': ''}
    steps = {'num_inference_steps': 50, 'noise_scheduler': 'ddim', 'snr_shift': None, 'size': (8, 16)}
    assert all(each.kwargs == {'seeds': each.kwargs['seeds'], **guidance, **steps} for each in generate.mock_calls)
    assert [path.name for path in sorted((tmp_path / 'images').iterdir())] == [f'ba00000{n}.png' for n in (2, 4, 5)]
    expected = [{'name': 'images/samples', 'channels_last': True, 'step': batch} for batch in (2, 4, 5)]
    assert [each.kwargs for each in images.mock_calls] == expected and images.mock_calls[0].args[0].shape[2] == 3
    assert f'{tmp_path}/images/ba000005.png: 3 images with training weights' in caplog.text
    refused: list[tuple[dict[str, Any], str]] = [
        ({'prompts': 'a cat'}, "prompts: 'a cat' is not a list of at least one prompt; add one"),
        ({'prompts': []}, r'prompts: \[\] is not a list of at least one prompt; add one'),
        ({'prompts': ['a'], 'size': [8, 8, 8]}, r'size: \[8, 8, 8\] is not a pair; use height and width in pixels'),
    ]
    for settings, message in refused:
        with pytest.raises(UserError, match=f'callbacks.image_grid.{message}'):
            ImageGrid(**settings)
