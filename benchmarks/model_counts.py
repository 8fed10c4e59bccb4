"""Count the models of the shipped recipes, and write the counts to diffusion/planning/model_counts/ for the planner.

    python benchmarks/model_counts.py

Takes about ten minutes on one core. Run it when tests/planning/test_count_cache.py reports a wrong shipped count.
"""

import json
from collections.abc import Iterable

from diffusion.config.image_shapes import Shape, sdxl_shapes, square
from diffusion.config.recipe import Component
from diffusion.planning.count_cache import SHIPPED, run_counter
from diffusion.planning.model_costs import PRECISIONS, ModelCosts
from diffusion.storage.atomic import write_atomically

STEPS = {'prx': 16}
"""Divisors of the sides of aspect buckets, if not 8; on pixels, the patch."""
SIDES = {'sd2': (256, 512, 768, 1024), 'prx': (256, 512, 1024), 'sdxl': (256, 512, 1024)}
"""Sides whose squares and aspect buckets are counted, by model; of the others, squares of 64 px."""
PIXELS = {'vae': 'pixels', 'patch_size': 32, 'bottleneck_size': 256}
MODELS = {
    'phase1.yaml and phase2.yaml': Component('sd2'),
    'sdxl.yaml, sdxl_512.yaml and sdxl_1024.yaml': Component('sdxl'),
    'quickstart.yaml': Component('tiny', {'block_out_channels': [64, 128]}),
    'tiny with default settings': Component('tiny'),
    'prx_256.yaml': Component('prx'),
    'speedrun.yaml and speedrun_1024.yaml': Component('prx', PIXELS),
    'tiny_vae.yaml': Component('autoencoder'),
}


def main() -> None:
    """Count every model and write a file for each."""
    for purpose, model in MODELS.items():
        key = ModelCosts(model).key
        shapes = [square(side) for side in SIDES.get(model.name, (64,))]
        aspects = [sdxl_shapes(side, step_of(model)) for side in SIDES.get(model.name, ())]
        # Memory is decided by the largest shape, so activations are counted for that one alone.
        largest = [max(each, key=lambda shape: (shape.pixels, shape.aspect)) for each in aspects]
        request = {
            'name': key.name,
            'kwargs': dict(key.kwargs),
            'imports': [],
            'flops': unique([*shapes, *(shape for each in aspects for shape in each)]),
            'activations': [(shape, precision) for shape in unique([*shapes, *largest]) for precision in PRECISIONS],
        }
        content = {'model': key.name, 'kwargs': dict(key.kwargs)} | run_counter(request)
        write_atomically(SHIPPED / key.file_name, json.dumps(content, indent=1) + '\n')
        print(f'{SHIPPED / key.file_name}: {purpose}, {len(request["flops"])} shapes')


def step_of(model: Component) -> int:
    """Return the divisor of the sides of a model's aspect buckets, in pixels."""
    return model.kwargs['patch_size'] if 'patch_size' in model.kwargs else STEPS.get(model.name, 8)


def unique(shapes: Iterable[Shape]) -> list[str]:
    """Return the names of shapes without duplicates."""
    return list(dict.fromkeys(map(str, shapes)))


if __name__ == '__main__':
    main()
