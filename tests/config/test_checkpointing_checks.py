"""Checks of a `runs_dir` in an object store, as `diffusion check` and the start of a run make them."""

import pytest

from diffusion.cli import main
from diffusion.config.checkpointing_checks import credentials_problem, runs_dir_problem
from diffusion.config.load import load
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
        ('gs:///runs', 'gs:///runs has no bucket'),
        ('azure://account.blob.core.windows.net', 'has no container; use a URL such as azure://ACCOUNT.blob'),
    ],
)
def test_other_stores_and_incomplete_urls_are_refused_with_the_way_out(write_recipe, capsys, runs_dir, message):
    assert message in (runs_dir_problem(runs_dir) or '')
    assert main(['check', str(write_recipe()), f'runs_dir={runs_dir}', '--quiet']) == 2
    error = capsys.readouterr().err
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
