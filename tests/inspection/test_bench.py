"""`diffusion data bench`: the tables, and what a GPU needs."""

import re

import pytest

from diffusion.cli import main


def rows(text):
    lines = [line[2:-2].split(' | ') for line in text.splitlines() if line.startswith('| ')]
    return {cells[0]: cells[1:] for cells in lines}


@pytest.fixture
def recipe(write_recipe, pictures):
    return str(
        write_recipe(streams={f'px{side}': {'local': str(at), 'resolution': side} for side, at in pictures.items()})
    )


def test_stages_and_loader_have_their_lines(recipe, capsys):
    assert main(['data', 'bench', recipe, '--workers', '0', '1', '--batches', '3']) == 0
    out = capsys.readouterr().out
    table = rows(out)
    assert [name for name in table if name in ('read', 'decode', 'resize', 'tokenize', 'collate', 'all of it')] == [
        *('read', 'decode', 'resize', 'tokenize', 'collate', 'all of it')
    ]
    parts = [float(table[name][0]) for name in ('read', 'decode', 'resize', 'tokenize', 'collate')]
    assert sum(parts) == pytest.approx(float(table['all of it'][0]), abs=0.01)
    assert float(table['0'][0]) > 0 and float(table['1'][0]) > 0
    assert 'One process, 64 samples, batches of 8' in out
    assert re.search(r'One h100-sxm at 40% of its peak trains on \d+ samples/s', out)


def test_an_h100_needs_what_its_flops_say(tmp_path, pictures, capsys):
    """Stable Diffusion 2 at 256 px, 40 % of 989 TFLOP/s: 728 pictures a second (3 x 181.09 GFLOP each)."""
    import yaml

    path = tmp_path / 'sd2.yaml'
    model = {'name': 'sd2', 'pretrained': None, 'resolution': 256}
    stream = {'local': str(pictures[32]), 'resolution': 256}
    recipe = {'name': 'a', 'global_batch': 8, 'model': model, 'streams': {'a': stream}}
    path.write_text(yaml.safe_dump(recipe | {'trainer': {'max_duration': '1ba'}}))
    assert main(['data', 'bench', str(path), '--workers', '0', '--batches', '1']) == 0
    needed = re.search(r'trains on (\d+) samples/s', capsys.readouterr().out)
    assert needed is not None and int(needed[1]) == pytest.approx(728, abs=2)


@pytest.mark.parametrize(
    ('words', 'said'),
    [
        (['--gpu', 'h100'], "--gpu: no GPU is called 'h100'; "),
        (['--mfu', '2'], 'argument --mfu: 2 is not in (0, 1]'),
        (['--workers', '-1'], 'argument --workers: -1'),
        (['pixels'], 'pixels: no stream of the recipe is called so'),
    ],
)
def test_mistakes_are_named_before_anything_is_timed(recipe, capsys, words, said):
    try:
        status = main(['data', 'bench', recipe, *words])
    except SystemExit as stop:
        status = stop.code
    told = capsys.readouterr()
    assert status == 2
    assert said in told.err
    assert told.out == ''
