"""`diffusion data bench`: its tables, and the estimate of a GPU's demand."""

import os
import re
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import output_of, refusal
from recipe_files import write_yaml
from shards import streams_of

from diffusion.inspection import bench
from tests.golden import check_golden


@pytest.fixture
def recipe(write_recipe, pictures):
    return write_recipe(streams=streams_of(pictures))


def test_tables_list_all_stages_and_worker_counts(write_recipe, pictures, capsys, monkeypatch):
    # Each stage of each sample, or batch, takes 0.1 ms, and the two timed loaders take 1 s and 2 s.
    clock = SimpleNamespace(process_time=partial(next, count(0, 1e-4)), perf_counter=partial(next, iter([0, 1, 1, 3])))
    monkeypatch.setattr(bench, 'time', clock)
    threads = []
    monkeypatch.setattr(torch, 'set_num_threads', threads.append)
    recipe = write_recipe(streams=streams_of(pictures), global_batch=48)
    out = output_of(capsys, 'data', 'bench', recipe, '--workers', '0', '2', '--batches', '2')
    # The sizes of encoded pictures depend on the version of Pillow.
    shown = re.sub(r'(?m)^(\| (?:read|decode|total) .*) \d+ \|$', r'\1 N |', out)
    check_golden(Path(__file__).parent / 'golden' / 'bench', {'tables.txt': shown})
    assert f'| resize | 0.100 | 25 | 10000 | {3 * (40 * 32**2 + 24 * 64**2) / 1e6 / 64e-4:.0f} |' in out
    assert f'One core loads {64 / 261e-4:.0f} samples/s, this machine 32 samples/s.' in out
    assert threads == [1, torch.get_num_threads()]
    for name, result in (('_print_stages', (100.0, 'no counts')), ('_print_loader_rates', 50.0)):
        monkeypatch.setattr(bench, name, lambda *_, result=result: result)
    assert output_of(capsys, 'data', 'bench', recipe).endswith('/s.\nThe demand of a GPU is unknown: no counts\n')


def test_worker_counts_are_powers_of_two_up_to_the_number_of_cores(recipe, capsys, monkeypatch):
    given = {}
    monkeypatch.setattr(bench, 'bench', lambda recipe, **options: given.update(options))
    monkeypatch.setattr(os, 'sched_getaffinity', lambda process: {*range(6)})
    output_of(capsys, 'data', 'bench', recipe)
    assert given.pop('gpu').name == 'h100-sxm'
    assert given == {'workers': [0, 1, 2, 4], 'batches': 20, 'mfu': 0.4}


def test_h100_demand_matches_flops(tmp_path, pictures, capsys):
    """Stable Diffusion 2 at 256 px, at 40% of 989 TFLOP/s: 728 images per second, of 3 x 181.09 GFLOP each."""
    model = {'name': 'sd2', 'pretrained': None, 'resolution': 256}
    stream = {'local': str(pictures[32]), 'resolution': 256}
    streams = {'a': stream, 'b': stream | {'resolution': 64}}
    recipe = {'name': 'a', 'global_batch': 8, 'model': model, 'streams': streams}
    path = write_yaml(tmp_path / 'sd2.yaml', recipe | {'trainer': {'max_duration': '1ba'}})
    out = output_of(capsys, 'data', 'bench', path, 'a', '--workers', '0', '--batches', '1')
    needed = re.search(r'trains on (\d+) samples/s', out)
    assert needed is not None and int(needed[1]) == pytest.approx(728, abs=2)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--gpu', 'h100'], "--gpu: no GPU is called 'h100'; "),
        (['--mfu', '2'], 'argument --mfu: 2 is not a fraction in (0, 1], such as 0.4'),
        (['--workers', '-1'], 'argument --workers: -1'),
        (['pixels'], "pixels: no such stream in the recipe's streams; "),
    ],
)
def test_invalid_arguments_are_reported_before_timing(recipe, capsys, arguments, message):
    assert message in refusal(capsys, 'data', 'bench', recipe, *arguments)
