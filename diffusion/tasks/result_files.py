"""Listing of the files that a run has written, for the person who looks at it when training or evaluation ends."""

from collections.abc import Iterator
from pathlib import Path

from diffusion.checkpointing.checkpoint_store import list_checkpoints
from diffusion.config.load import Recipe
from diffusion.prepare.caption_list import CAPTIONS


def describe_results(recipe: Recipe) -> str:
    """Return a line for each kind of file that the run has, and for each list of captions of its data."""
    run = recipe.run_dir
    newest = [f'{recipe.run_place}/{path.name}' for path in list_checkpoints(run)[:1]]
    found = [
        ('loss curve', run / 'loss.png'),
        ('image grids', run / 'images'),
        ('metrics of the evaluation', run / 'evaluation.json'),
        ('generated and real images', run / 'samples.png'),
        *(('captions of the data', path) for path in caption_files(recipe)),
    ]
    lines = [('newest checkpoint', name) for name in newest]
    lines += [(label, str(path)) for label, path in found if path.exists()]
    return '\n'.join([f'{recipe.run_place}:', *(f'  {label:26s} {path}' for label, path in lines)])


def caption_files(recipe: Recipe) -> Iterator[Path]:
    """Yield the existing lists of captions in the local folders of a recipe's streams and in the folders above."""
    # A training stream may have latents, which are in another folder than the images that they were made from.
    streams = [*recipe.streams.values(), *recipe.eval_streams.values(), *recipe.precompute.streams.values()]
    locals_ = [Path(stream.local) for stream in streams if stream.local is not None]
    candidates = dict.fromkeys(folder / CAPTIONS for local in locals_ for folder in (local, local.parent))
    yield from (path for path in candidates if path.is_file())
