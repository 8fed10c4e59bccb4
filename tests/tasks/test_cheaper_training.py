"""TREAD, SPRINT, contrastive flow matching, REPA and iREPA in real runs: one curve on 1, 2 and 4 ranks."""

import pytest
import torch
import yaml
from ranks import largest_difference, read_losses
from transformers import Dinov2Config, Dinov2Model

BATCHES = 4
SHARDED = {'strategy': 'fsdp2', 'checkpoints': 'sharded', 'mixed_precision': 'full', 'activation_checkpointing': True}


@pytest.fixture(scope='module')
def run(tmp_path_factory, tiny_recipe, ranks):
    """Function that trains a PRX in float64 up to a batch, or resumes it, and returns the losses of all batches."""
    root = tmp_path_factory.mktemp('cheaper')
    torch.manual_seed(0)
    dino = Dinov2Config(hidden_size=32, num_attention_heads=2, num_hidden_layers=2, image_size=28, patch_size=14)
    Dinov2Model(dino).save_pretrained(root / 'dino')

    def train(name: str, count: int, parallelism: dict, *, method: str, until: int = BATCHES) -> dict[int, float]:
        algorithms = {
            **({'tread': {'start': 1, 'end': 3}} if method == 'tread' else {}),
            'contrastive_flow_matching': {'weight': 0.2},
            'gradient_clipping': {'clipping_type': 'norm', 'clipping_threshold': 1.0},
            'ema': {'ema_start': '1ba', 'smoothing': 0.9},
        }
        content = tiny_recipe(root / 'runs', name=name, algorithms=algorithms, parallelism=parallelism)
        content['model'] = {
            **{'name': 'tiny_prx', 'resolution': 32, 'vae': content['model']['vae']},
            **{'hidden_size': 32, 'num_heads': 2, 'depth': 4, 'text_width': 32, 'text_layers': 1},
            'representation_alignment': {'encoder': str(root / 'dino'), 'block': 1, 'hidden_size': 48},
        }
        if method == 'sprint':
            content['model']['sprint'] = {'start': 1, 'end': 3}
            content['model']['representation_alignment'] |= {'block': 0, 'projection': 'conv', 'spatial_norm': 1.0}
        content['trainer'] |= {'max_duration': f'{until}ba', 'save_interval': '2ba'}
        path = root / f'{name}.yaml'
        path.write_text(yaml.safe_dump(content))
        ranks.run(count, path, double=True)
        return read_losses(root / 'runs' / name)

    return train


@pytest.mark.slow
@pytest.mark.parametrize('method', ['tread', 'sprint'])
def test_other_numbers_of_ranks_and_strategies_give_the_same_curve(run, method):
    """A run on one rank, and one that starts on 2 ranks with FSDP2 and resumes on 4 with DDP."""
    one = run(f'{method}-one', 1, {}, method=method)
    assert list(one) == list(range(BATCHES))
    run(f'{method}-other', 2, SHARDED, method=method, until=2)
    assert largest_difference(one, run(f'{method}-other', 4, {}, method=method)) < 1e-7
