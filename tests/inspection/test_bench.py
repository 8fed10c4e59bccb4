"""`diffusion data bench`: its tables, and the estimate of a GPU's demand."""

import re

import pytest
from commands import output_of, refusal
from recipe_files import write_yaml
from shards import streams_of


def rows(text):
    lines = [line[2:-2].split(' | ') for line in text.splitlines() if line.startswith('| ')]
    return {cells[0]: cells[1:] for cells in lines}


@pytest.fixture
def recipe(write_recipe, pictures):
    return write_recipe(streams=streams_of(pictures))


def test_tables_list_all_stages_and_worker_counts(recipe, capsys):
    out = output_of(capsys, 'data', 'bench', recipe, 'px32', '--workers', '0', '1', '--batches', '1')
    table = rows(out)
    stages = ['read', 'decode', 'resize', 'tokenize', 'collate']
    assert [name for name in table if name in (*stages, 'total')] == [*stages, 'total']
    parts = [float(table[name][0]) for name in stages]
    assert sum(parts) == pytest.approx(float(table['total'][0]), abs=0.01)
    assert float(table['0'][0]) > 0 and float(table['1'][0]) > 0
    assert 'One process, 40 samples, batches of 8' in out
    assert re.search(r'One h100-sxm at 40% of its peak trains on \d+ samples/s', out)


def test_h100_demand_matches_flops(tmp_path, pictures, capsys):
    """Stable Diffusion 2 at 256 px, at 40% of 989 TFLOP/s: 728 images per second, of 3 x 181.09 GFLOP each."""
    model = {'name': 'sd2', 'pretrained': None, 'resolution': 256}
    stream = {'local': str(pictures[32]), 'resolution': 256}
    recipe = {'name': 'a', 'global_batch': 8, 'model': model, 'streams': {'a': stream}}
    path = write_yaml(tmp_path / 'sd2.yaml', recipe | {'trainer': {'max_duration': '1ba'}})
    out = output_of(capsys, 'data', 'bench', path, '--workers', '0', '--batches', '1')
    needed = re.search(r'trains on (\d+) samples/s', out)
    assert needed is not None and int(needed[1]) == pytest.approx(728, abs=2)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--gpu', 'h100'], "--gpu: no GPU is called 'h100'; "),
        (['--mfu', '2'], 'argument --mfu: 2 is not a fraction in (0, 1], such as 0.4'),
        (['--workers', '-1'], 'argument --workers: -1'),
        (['pixels'], 'pixels: no such stream in the recipe'),
    ],
)
def test_invalid_arguments_are_reported_before_timing(recipe, capsys, arguments, message):
    assert message in refusal(capsys, 'data', 'bench', recipe, *arguments)
