"""The paths of a run's files that are printed at its end."""

from diffusion.config.load import load
from diffusion.storage.local_files import WORKING_FOLDER_VARIABLE
from diffusion.tasks.run_recipe import describe_results


def test_results_list_the_files_that_exist(write_recipe, tmp_path):
    data = tmp_path / 'data'
    streams = {'images': {'local': str(data / '32px'), 'resolution': 32}}
    evaluated = {'held-out': {'local': str(data / 'held-out'), 'resolution': 32}}
    remote = {'far': {'remote': 's3://bucket/far', 'resolution': 32}}
    recipe = load(write_recipe(streams=streams | remote, eval_streams=evaluated))
    run = recipe.run_dir
    for folder in (run / 'images', run / 'ba900', run / 'ba1000', data / '32px', data / 'held-out'):
        folder.mkdir(parents=True)
    assert 'loss.png' not in describe_results(recipe)
    (run / 'loss.png').touch()
    (data / 'captions.txt').touch()
    (data / 'held-out' / 'captions.txt').touch()
    assert describe_results(recipe).splitlines() == [
        f'{run}:',
        f'  newest checkpoint          {run}/ba1000',
        f'  loss curve                 {run}/loss.png',
        f'  image grids                {run}/images',
        f'  captions of the data       {data}/captions.txt',
        f'  captions of the data       {data}/held-out/captions.txt',
    ]


def test_files_of_a_run_in_a_bucket_are_named_there(write_recipe, tmp_path, monkeypatch):
    monkeypatch.setenv(WORKING_FOLDER_VARIABLE, str(tmp_path / 'here'))
    recipe = load(write_recipe(), ['runs_dir=s3://bucket/runs'])
    recipe.run_dir.mkdir(parents=True)
    (recipe.run_dir / 'loss.png').touch()
    assert describe_results(recipe).splitlines()[:2] == [
        's3://bucket/runs/run:',
        '  loss curve                 s3://bucket/runs/run/loss.png',
    ]
