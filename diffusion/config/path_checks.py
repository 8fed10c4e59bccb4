"""Checks of the local files that a recipe's task reads and of its output folder, without downloads."""

import json
from collections.abc import Mapping
from pathlib import Path

from diffusion.config.checkpointing_checks import credentials_problem
from diffusion.config.checks import stream_sections
from diffusion.config.image_shapes import BUCKETS, STEP, Shape, read_buckets, resolution_problem
from diffusion.config.model_checks import ALIGNMENT, copies_reference, no_features_problem
from diffusion.config.recipe import Recipe, StreamConfig
from diffusion.config.schema import Gatherer, Problem
from diffusion.config.weight_sources import path_problem
from diffusion.errors import UserError
from diffusion.storage.local_files import why_not_writable

SAMPLES_LOOKED_AT = 16


def check_paths(recipe: Recipe) -> list[Problem]:
    """Return a problem for each local stream or checkpoint that the task reads and that is missing or does not fit."""
    gather = Gatherer()
    for section, streams in stream_sections(recipe):
        gather.problems += check_stream_folders(section, streams, for_training=True)
    _check_features(recipe, gather)
    start = recipe.initial_weights
    if start is not None and reads_initial_weights(recipe) and (what := path_problem(start)) is not None:
        gather.problem('init_from' if isinstance(recipe.init_from, str) else 'init_from.from', what)
    if recipe.task in ('evaluate', 'generate'):
        place = recipe.checkpoint or recipe.run_place
        if '://' not in place and not Path(place).exists():
            gather.problem('checkpoint', f'{place} does not exist; give a checkpoint or the folder of a run')
    return gather.problems


def reads_initial_weights(recipe: Recipe) -> bool:
    """Return True if a recipe's task would read `init_from` if it were set."""
    # A run that has checkpoints resumes from them and no longer reads init_from, which may have been deleted since. A
    # run in an object store is not checked here: only a request would show if it has checkpoints.
    starts = recipe.run_url is None and not (recipe.run_dir / 'latest').exists()
    return recipe.task == 'train' and (starts or copies_reference(recipe))


def check_stream_folders(
    section: str, streams: Mapping[str, StreamConfig], *, for_training: bool = False
) -> list[Problem]:
    """Return a problem for each local folder of streams that is unreadable, empty or has buckets of another resolution.

    `for_training` also reports folders without aspect buckets whose images are smaller than the model's input.
    """
    gather = Gatherer()
    for name, stream in streams.items():
        key, folder = ('local', stream.local) if stream.remote is None else ('remote', stream.remote)
        if folder is None or '://' in folder:
            continue
        where, path, what = f'{section}.{name}', Path(folder), None
        size_key = 'resolution' if stream.shape is None else 'shape'
        try:
            if stream.aspects:
                if _check_buckets(f'{where}.{key}', path, gather):
                    what = resolution_problem(path, stream.resolution)
            elif _check_index(f'{where}.{key}', path, gather) and for_training and not stream.enlarge:
                what = _enlargement_problem(path, stream.image_shape)
        except PermissionError as error:
            access = f'{error.filename} cannot be read ({error.strerror}); ask its owner for access, '
            gather.problem(f'{where}.{key}', access + 'or use another folder')
        if what is not None:
            gather.problem(f'{where}.{"resolution" if stream.aspects else size_key}', what)
    return gather.problems


def check_output(recipe: Recipe) -> list[Problem]:
    """Return a problem if the output folder is not writable, or the run's store lacks credentials, to fail early."""
    where, out = 'runs_dir', recipe.run_place
    if recipe.task == 'precompute':
        where, out = 'precompute.out', recipe.precompute.out
    elif recipe.task == 'generate' and recipe.generate.out:
        where, out = 'generate.out', recipe.generate.out
    if where == 'runs_dir' and recipe.run_url is not None and (problem := credentials_problem(recipe.runs_dir)):
        return [Problem(where, problem)]
    problem = None if '://' in out else why_not_writable(out)
    return [] if problem is None else [Problem(where, problem)]


def _check_features(recipe: Recipe, gather: Gatherer) -> None:
    """Report local latents without the image features that `model.representation_alignment` needs."""
    # Latents in an object store are not checked here, but when training opens the data.
    aligned = recipe.model.kwargs.get(ALIGNMENT)
    if recipe.task != 'train' or recipe.dataset.name != 'latents' or not aligned:
        return
    for name, stream in recipe.streams.items():
        folder = Path((stream.local if stream.remote is None else stream.remote) or '')
        manifests = [*folder.glob('*/manifest.json')] if stream.aspects else [folder / 'manifest.json']
        for path in manifests:
            try:
                content = json.loads(path.read_text(encoding='utf-8'))
            except (OSError, ValueError):  # training reports an unreadable manifest when it opens the data
                continue
            if isinstance(content, dict) and content.get('image_encoder') is None:
                gather.problem(f'model.{ALIGNMENT}', no_features_problem(name))
                break


def _check_buckets(where: str, folder: Path, gather: Gatherer) -> bool:
    """Report wrong aspect-ratio buckets and buckets without shards; return True if buckets.json is valid."""
    try:
        shapes = read_buckets(folder)
    except UserError as error:
        gather.problem(where, str(error))
        return False
    for shape in shapes:
        _check_index(where, folder / str(shape), gather)
    return True


def _check_index(where: str, folder: Path, gather: Gatherer) -> bool:
    """Report a folder without a valid index of MDS shards, or without samples; return True if it has both."""
    index = folder / 'index.json'
    if not index.is_file():
        way_out = 'create it with `diffusion prepare`, or latents with task=precompute'
        if (folder / BUCKETS).is_file():
            way_out = f'it has {BUCKETS}; set aspects: true'
        gather.problem(where, f'{folder} has no index.json; is it an MDS folder? {way_out}')
        return False
    try:
        shards = json.loads(index.read_text(encoding='utf-8'))['shards']
        counts = [shard['samples'] for shard in shards]
        if not all(type(count) is int and 0 <= count < 2**31 for count in counts):
            raise ValueError('a number of samples is not in [0, 2**31)')
        samples = sum(counts)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f'{index} is not an index of MDS shards ({type(error).__name__}: {error}); prepare it again'
        gather.problem(where, what)
        return False
    if samples == 0:
        gather.problem(where, f'{folder} has no samples; prepare it again, or remove the stream')
    return samples > 0


def _enlargement_problem(folder: Path, shape: Shape) -> str | None:
    """Return an error message if the images in a folder of MDS shards are smaller than the model's input, else None.

    The check reads the sizes of the first images, which `diffusion prepare` stores with them. It passes if no sizes are
    stored, or if any of these images is large enough.
    """
    from diffusion.storage import mds  # import here: this needs NumPy, which the other checks do not

    try:
        samples = mds.first_samples(folder, SAMPLES_LOOKED_AT)
    except ValueError:  # training reports a damaged shard when it reads it
        return None
    sizes = [(sample.get('width'), sample.get('height')) for sample in samples]
    known = [(w, h) for w, h in sizes if isinstance(w, int) and isinstance(h, int)]
    if not known or min(max(shape.width / w, shape.height / h) for w, h in known) <= 1:
        return None
    largest = max(min(size) for size in known)
    return (
        f'{shape}, but the images in {folder} have shorter sides of at most {largest} px and would be enlarged; use '
        f'larger images or a resolution of at most {largest // STEP * STEP}, or allow it with enlarge: true'
    )
