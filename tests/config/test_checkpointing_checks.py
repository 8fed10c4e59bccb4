"""Checks of a `runs_dir` in an object store and of `checkpointing.tiers`, as `diffusion check` makes them."""

import pytest
from commands import refusal

from diffusion.config.checkpointing_checks import credentials_problem, runs_dir_problem
from diffusion.config.load import RecipeError, load
from diffusion.config.path_checks import check_output


@pytest.mark.parametrize(
    'runs_dir',
    ['runs', '/a/b', 's3://bucket', 's3://bucket/runs/', 'gs://b/r', 'az://c/r', 'azure://a.blob.core.windows.net/c/r'],
)
def test_folders_and_stores_with_conditional_writes_can_hold_runs(runs_dir):
    assert runs_dir_problem(runs_dir) is None


@pytest.mark.parametrize(
    ('runs_dir', 'message'),
    [
        ('hf://org/name', 'hf:// cannot hold runs; use s3://bucket/runs, gs://'),
        ('file:///runs', 'or a folder that all nodes share'),
        ('s3:/bucket/runs', 'so it is a folder; for a store, write s3://bucket/runs'),
        ('s3://', 's3:// has no bucket; use a URL such as s3://bucket/runs'),
        ('azure://account.blob.core.windows.net', 'has no container; use a URL such as azure://ACCOUNT.blob'),
    ],
)
def test_other_stores_and_incomplete_urls_are_refused_with_the_way_out(write_recipe, capsys, runs_dir, message):
    assert message in (runs_dir_problem(runs_dir) or '')
    error = refusal(capsys, 'check', write_recipe(), f'runs_dir={runs_dir}', '--quiet')
    assert 'runs_dir: ' in error and message in error


@pytest.mark.parametrize(
    ('runs_dir', 'environ', 'message'),
    [
        ('gs://b/r', {'GCS_KEY': 'k', 'GCS_SECRET': 's'}, 'unset GCS_KEY and GCS_SECRET'),
        ('gs://b/r', {}, None),
        ('az://c/r', {}, 'set AZURE_ACCOUNT_NAME'),
        ('az://c/r', {'AZURE_ACCOUNT_NAME': 'a'}, None),
        ('s3://b/r', {}, None),
    ],
)
def test_credentials_that_do_not_suffice_are_named_before_the_run(
    write_recipe, monkeypatch, runs_dir, environ, message
):
    for name in ('GCS_KEY', 'GCS_SECRET', 'AZURE_ACCOUNT_NAME', 'AZURE_STORAGE_ACCOUNT_NAME'):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = credentials_problem(runs_dir)
    assert found is None if message is None else message in str(found)
    problems = check_output(load(write_recipe(), [f'runs_dir={runs_dir}']))
    assert [each.where for each in problems] == ([] if message is None else ['runs_dir'])


@pytest.mark.parametrize(
    ('overrides', 'message'),
    [
        (['checkpointing.tiers.disk.save_interval=1m'], 'checkpointing.tiers.disk.folder: is missing; name a folder'),
        (['checkpointing.tiers.memory.save_interval=soon'], 'checkpointing.tiers.memory.save_interval: '),
        (['checkpointing.tiers.memory.save_interval=1ep'], '1ep is not an interval for a tier; use a time'),
        (
            ['checkpointing.tiers.memory.save_interval=1m', 'trainer.save_folder=a'],
            "checkpointing.tiers.memory: does not apply to Composer's own checkpoints",
        ),
    ],
)
def test_mistake_in_tiers_is_named(write_recipe, overrides, message):
    with pytest.raises(RecipeError, match='checkpointing') as found:
        load(write_recipe(), overrides)
    assert message in str(found.value)


def test_tiers_are_off_by_default_and_take_times_and_durations(write_recipe):
    assert load(write_recipe()).checkpointing.tiers is None
    for interval in ('30s', 'auto', '50ba'):
        tiers = load(write_recipe(), [f'checkpointing.tiers.memory.save_interval={interval}']).checkpointing.tiers
        assert tiers is not None and tiers.memory is not None
        assert (tiers.memory.save_interval, tiers.disk) == (interval, None)
