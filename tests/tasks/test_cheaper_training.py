"""Algorithms that make training cheaper, in real runs: the same curve on 1, 2 and 4 ranks, with DDP and FSDP2."""

import pytest
import yaml
from ranks import largest_difference, read_losses

BATCHES = 4
LAYOUTS = {
    'two-fsdp2': (2, {'strategy': 'fsdp2', 'mixed_precision': 'full', 'activation_checkpointing': True}),
    'four-ddp': (4, {}),
}


@pytest.fixture(scope='module')
def run(tmp_path_factory, tiny_recipe, ranks):
    """Function that trains a PRX with TREAD and contrastive flow matching in float64, and returns its losses."""
    root = tmp_path_factory.mktemp('cheaper')

    def train(name: str, count: int, parallelism: dict) -> dict[int, float]:
        content = tiny_recipe(
            root / 'runs',
            name=name,
            algorithms={
                'tread': {'start': 1, 'end': 3},
                'contrastive_flow_matching': {'weight': 0.2},
                'gradient_clipping': {'clipping_type': 'norm', 'clipping_threshold': 1.0},
            },
            parallelism=parallelism,
        )
        sizes = {'hidden_size': 32, 'num_heads': 2, 'depth': 4, 'text_width': 32, 'text_layers': 1}
        content['model'] = {'name': 'tiny_prx', 'resolution': 32, 'vae': content['model']['vae'], **sizes}
        content['trainer'] |= {'max_duration': f'{BATCHES}ba', 'save_interval': '100ba'}
        path = root / f'{name}.yaml'
        path.write_text(yaml.safe_dump(content))
        ranks.run(count, path, double=True)
        return read_losses(root / 'runs' / name)

    return train


@pytest.mark.slow
def test_other_numbers_of_ranks_and_strategies_give_the_same_curve(run):
    one = run('one', 1, {})
    assert list(one) == list(range(BATCHES))
    for name, (count, parallelism) in LAYOUTS.items():
        assert largest_difference(one, run(name, count, parallelism)) < 1e-9, name
