"""Recipes, GPUs, strategies and phases shared by the planning tests."""

from pathlib import Path

from recipe_files import write_yaml

from diffusion.config.load import load
from diffusion.config.recipe import ParallelismConfig
from diffusion.planning.gpus import find_gpu, load_gpus
from diffusion.planning.workload import phase_of

YAMLS = Path(__file__).parents[2] / 'yamls'
PHASES = (YAMLS / 'phase1.yaml', YAMLS / 'phase2.yaml')
GPUS = load_gpus()
A100 = find_gpu('a100-80gb', GPUS)
DDP = ParallelismConfig(strategy='ddp')
SHARDED = ParallelismConfig(strategy='fsdp2', reshard_after_forward=False)
RESHARDED = ParallelismConfig(strategy='fsdp2', reshard_after_forward=True)


def phase(path=PHASES[0], overrides=(), **keywords):
    return phase_of(load(path, overrides, allow_missing=True), **keywords)


def both(**keywords):
    return [phase(path, **keywords) for path in PHASES]


def write_recipe(folder, **changes):
    """Write a recipe of a tiny model with some sections replaced, and return its path."""
    values = {
        'name': 'run',
        'global_batch': 8,
        'model': {'name': 'tiny', 'resolution': 64},
        'streams': {'a': {'remote': 's3://bucket/mds', 'local': 'cache', 'resolution': 64}},
        'trainer': {'max_duration': '80ba', 'precision': 'amp_bf16'},
    }
    return write_yaml(folder / 'recipe.yaml', values | changes)


def write_sd2_recipe(folder, **changes):
    """Write a recipe of a model whose counts are shipped at 256 and 512 px, so that nothing is counted."""
    streams = {'a': {'local': 'x', 'resolution': 256}}
    return write_recipe(folder, **{'model': {'name': 'sd2', 'resolution': 256}, 'streams': streams} | changes)
