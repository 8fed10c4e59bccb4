"""Count the models of the shipped recipes, and write the counts to diffusion/planning/model_counts/ for the planner.

    python benchmarks/model_counts.py [RECIPE ...]

Takes about twenty minutes on one core; words such as `speedrun.yaml` select the counts of these recipes. Run it when
tests/planning/test_count_cache.py reports a wrong shipped count.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from diffusion.config.families import family_of_model
from diffusion.config.image_shapes import Shape, sdxl_shapes, square
from diffusion.config.load import load
from diffusion.config.recipe import Component
from diffusion.planning.count_cache import SHIPPED, ModelKey, run_counter
from diffusion.planning.model_costs import PRECISIONS, ModelCosts, alignment_of, perceptual_of, route_of
from diffusion.storage.atomic import write_atomically

YAMLS = Path(__file__).parents[1] / 'yamls'
PIXELS = {'vae': 'pixels', 'patch_size': 32, 'bottleneck_size': 256}
MODELS = {
    'phase1.yaml and phase2.yaml': Component('sd2'),
    'sdxl.yaml, sdxl_512.yaml and sdxl_1024.yaml': Component('sdxl'),
    'quickstart.yaml': load(YAMLS / 'quickstart.yaml').model,
    'small.yaml': load(YAMLS / 'small.yaml', allow_missing=True).model,
    'tiny with default settings': Component('tiny'),
    'prx_256.yaml': Component('prx'),
    'i1_256.yaml': load(YAMLS / 'i1_256.yaml', allow_missing=True).model,
    'i1_3b_256.yaml, i1_3b_512.yaml and i1_3b_1024.yaml': load(YAMLS / 'i1_3b_256.yaml', allow_missing=True).model,
    'speedrun.yaml and speedrun_1024.yaml': Component('prx', PIXELS),
    'prxpixel_7b.yaml': load(YAMLS / 'prxpixel_7b.yaml', allow_missing=True).model,
    'mmdit.yaml': Component('mmdit', {'t5_length': 77}),
    'tiny_vae.yaml': Component('autoencoder'),
}
ROUTED = {'speedrun.yaml and speedrun_1024.yaml': 'speedrun.yaml', 'prxpixel_7b.yaml': 'prxpixel_7b.yaml'}
"""Recipes whose token route and networks of losses are counted too, by the name of their model in `MODELS`."""
SQUARES_ONLY = ('prxpixel_7b.yaml', 'i1_3b_256.yaml, i1_3b_512.yaml and i1_3b_1024.yaml')
"""Models that are too large to count in every aspect bucket."""


def main(*words: str) -> None:
    """Count the models whose recipes contain one of the words, or every model, and write a file for each."""
    for purpose, key, flops, activations in counts():
        if words and not any(word in purpose for word in words):
            continue
        content = {name: value for name, value in key.request.items() if name != 'imports'}
        content |= run_counter(key.request | {'flops': flops, 'activations': activations})
        write_atomically(SHIPPED / key.file_name, json.dumps(content, indent=1) + '\n')
        print(f'{SHIPPED / key.file_name}: {purpose}, {len(flops)} shapes', flush=True)


def counts() -> Iterator[tuple[str, ModelKey, list[str], list[tuple[str, str]]]]:
    """Yield recipes, model key, shapes (or shape and token route) for FLOPs, and (shape, precision) for activations."""
    networks = set()
    for purpose, model in MODELS.items():
        costs = ModelCosts(model)
        sides = (256, 512, 1024) if purpose in SQUARES_ONLY else sides_of(model)
        squares = [square(side) for side in sides or (64,)]
        aspects = [] if purpose in SQUARES_ONLY else [sdxl_shapes(side, step_of(model)) for side in sides]
        shapes = unique([*squares, *(shape for each in aspects for shape in each)])
        # Memory is decided by the largest shape, so activations are counted for that one alone.
        largest = unique([*squares, *(max(each, key=lambda shape: (shape.pixels, shape.aspect)) for each in aspects)])
        pairs = [(shape, precision) for shape in largest for precision in PRECISIONS]
        if purpose in ROUTED:
            recipe = load(YAMLS / ROUTED[purpose], allow_missing=True)
            route = route_of(recipe.model, recipe.algorithms, costs.facts['token_blocks'])
            yield purpose, costs.key, [*shapes, *(f'{shape} {route}' for shape in shapes)], pairs
            half = [(shape, precision) for shape in largest for precision in ('float32', 'half')]
            for network in (alignment_of(recipe.model, costs, []), perceptual_of(recipe.model, [])):
                assert network is not None
                if network.key.file_name not in networks:
                    networks.add(network.key.file_name)
                    yield f'{network.key.name} of {purpose}', network.key, shapes, half
        else:
            yield purpose, costs.key, shapes, pairs
    tuned = load(YAMLS / 'lora.yaml', allow_missing=True)
    pairs = [('512x512', precision) for precision in PRECISIONS]
    yield 'lora.yaml', ModelCosts(tuned.model, (), tuned.lora).key, ['512x512'], pairs


def sides_of(model: Component) -> tuple[int, ...]:
    """Return the sides whose squares and aspect buckets are counted, by the family; empty for miniatures."""
    family = family_of_model(model.name)
    return () if family.miniature is None or model.name == family.miniature.model else family.sides


def step_of(model: Component) -> int:
    """Return the divisor in pixels of the sides of a model's aspect buckets; for a model on pixels, the patch size."""
    step: Any = model.kwargs.get('patch_size', family_of_model(model.name).side_step)
    return step


def unique(shapes: Iterable[Shape]) -> list[str]:
    """Return the names of shapes without duplicates."""
    return list(dict.fromkeys(map(str, shapes)))


if __name__ == '__main__':
    main(*sys.argv[1:])
