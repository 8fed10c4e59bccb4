"""Mistakes in `checkpointing.tiers`, as `diffusion check` reports them."""

import pytest

from diffusion.config.load import RecipeError, load


@pytest.mark.parametrize(
    ('overrides', 'message'),
    [
        (['checkpointing.tiers.disk.save_interval=1m'], 'checkpointing.tiers.disk.folder: is missing; name a folder'),
        (['checkpointing.tiers.memory.save_interval=soon'], 'checkpointing.tiers.memory.save_interval: '),
        (['checkpointing.tiers.memory.copies=2'], 'copies'),
        (['checkpointing.tiers.memory.save_interval=1ep'], '1ep is no interval for a tier; use a time'),
        (
            ['checkpointing.tiers.memory.save_interval=1m', 'trainer.save_folder=a'],
            "checkpointing.tiers.memory: does not apply to Composer's own checkpoints",
        ),
    ],
)
def test_mistakes_are_named(write_recipe, overrides, message):
    with pytest.raises(RecipeError, match='checkpointing') as found:
        load(write_recipe(), overrides)
    assert message in str(found.value)


def test_tiers_are_off_by_default_and_take_times_and_durations(write_recipe):
    assert load(write_recipe()).checkpointing.tiers is None
    for interval in ('30s', 'auto', '50ba'):
        tiers = load(write_recipe(), [f'checkpointing.tiers.memory.save_interval={interval}']).checkpointing.tiers
        assert tiers is not None and tiers.memory is not None
        assert (tiers.memory.save_interval, tiers.disk) == (interval, None)
