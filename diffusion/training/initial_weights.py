"""`init_from`: start a run from the weights of another run's checkpoint, or from published weights."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from composer.models import ComposerModel
from composer.utils import dist
from torch import Tensor

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint, local_checkpoint
from diffusion.checkpointing.checkpoint_store import DamagedCheckpoint
from diffusion.checkpointing.checkpoint_weights import (
    NoAverages,
    check_architecture,
    read_pickle,
    weights_of,
    with_own_training_parts,
)
from diffusion.checkpointing.rank_agreement import raise_on_all_ranks, run_on_rank_zero
from diffusion.config.recipe import InitFrom
from diffusion.config.weight_sources import PIPELINE, hub_file, hub_repository, is_diffusers_folder
from diffusion.errors import UserError
from diffusion.models import hub_files
from diffusion.models.diffusers_weights import (
    denoiser_folder,
    fetched_denoiser_folder,
    fitting_hint,
    read_diffusers,
    resized,
)
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.original_layout import read_original
from diffusion.models.pretrained import load_pretrained
from diffusion.models.vae import downsampling

log = logging.getLogger(__name__)

DENOISER = 'denoiser.'
"""Prefix of the denoiser's tensor names in a LatentDiffusion."""
TEXT_SETTINGS = ('hidden_act', 'num_attention_heads', 'layer_norm_eps')
"""Settings of a text encoder that affect its output but not the shapes of its weights."""


class SourceWeights(NamedTuple):
    """Weights by their names in the model, the path or URL they were read from, and a description for the log."""

    tensors: dict[str, Tensor]
    place: str
    what: str


def start_from(model: ComposerModel, start: InitFrom) -> None:
    """Load the weights given by `init_from` into a model, without optimizer state or step counter; a collective.

    Rank 0 reads and verifies them once, and broadcasts the weights one tensor at a time. Call this before DDP or FSDP
    wraps the model.

    Raises:
        UserError: The source does not exist, is damaged, lacks the requested weights or has another architecture.
            Raised on every rank.
        ExternalError: The Hub did not respond for several minutes. Raised on every rank.
        OSError: The source cannot be read for several minutes. Raised on every rank.
    """
    source = run_on_rank_zero(lambda: read_weights(model, start), 'init_from')
    with raise_on_all_ranks('init_from'):
        if source is not None:
            load_source(model, source, resize=start.resize)
    if dist.get_world_size() > 1:
        for tensor in model.state_dict().values():
            broadcast(tensor)


def read_weights(model: ComposerModel, start: InitFrom) -> SourceWeights:
    """Read the weights given by `init_from`, and return them by their names in the model; errors as in `start_from`."""
    try:
        return reader_of(start)(model, start)
    except DamagedCheckpoint as error:
        raise UserError(f'init_from: {error}; copy the checkpoint again, or name an earlier one') from error
    except NoAverages as error:
        raise UserError(f'init_from.weights: ema, but {error.reason}; use training') from error
    except UserError as error:
        raise UserError(f'init_from: {str(error).removeprefix("checkpoint: ")}') from error


def reader_of(start: InitFrom) -> Callable[[Any, InitFrom], SourceWeights]:
    """Return the function that reads the weights given by `init_from`: one of the three `read_...` functions below."""
    is_on_hub, folder = hub_repository(start) is not None, Path(start.source)
    if not is_on_hub and start.source.endswith('.safetensors'):
        return read_single_file
    if is_on_hub or (is_diffusers_folder(folder) and local_checkpoint(folder) is None):
        return read_diffusers_model
    return read_checkpoint


def read_checkpoint(model: ComposerModel, start: InitFrom) -> SourceWeights:
    """Read a checkpoint, a run's newest checkpoint, or a `.pt` file in the layout of a model's original code."""
    checkpoint = find_checkpoint(start.source)
    if checkpoint.is_file() and isinstance(model, LatentDiffusion) and model.adapter.reads_pickles:
        content = read_pickle(checkpoint)
        if not (isinstance(content, dict) and 'state' in content):  # which a file of Composer has
            return from_original(model, content, start, str(checkpoint))
    weights, _ = weights_of(checkpoint, start.weights)
    return SourceWeights(weights, str(checkpoint), f'the {start.weights} weights')


def read_single_file(model: ComposerModel, start: InitFrom) -> SourceWeights:
    """Read a file whose tensors have the names and shapes of Stability AI's own code, not those of diffusers."""
    model, source = with_denoiser(model, start), start.source
    if model.train_text_encoder:
        raise UserError(
            f'{source}: the model trains its text encoder, which is not read from single files; '
            'convert the file once with StableDiffusionPipeline.from_single_file(FILE).save_pretrained(FOLDER) and '
            'use the folder, or set model.train_text_encoder: false'
        )
    weights = read_original(model.denoiser, Path(source), start.weights)
    return SourceWeights(_prefixed(DENOISER, weights), source, f'the {start.weights} weights of the denoiser')


def read_diffusers_model(model: ComposerModel, start: InitFrom) -> SourceWeights:
    """Read a diffusers pipeline or denoiser, or a `.pt` file for the original code, from a folder or the Hub."""
    model, repository = with_denoiser(model, start), hub_repository(start)
    if repository is not None and (name := original_on_hub(model, start)) is not None:
        file = hub_files.fetch_file(repository, name, revision=str(start.revision))
        return from_original(model, read_pickle(file), start, f'{repository}/{name} at {start.revision}')
    if start.weights == 'ema':
        raise NoAverages(f'{start.source} has only one set of weights')
    if repository is None:
        folder = denoiser_folder(model.denoiser, Path(start.source))
    else:
        assert start.revision is not None, 'the check of the recipe requires a revision'
        folder = fetched_denoiser_folder(model.denoiser, repository, start.revision)
    weights = _prefixed(DENOISER, read_diffusers(model.denoiser, folder))
    encoders = text_encoder_weights(model, repository or start.source, start.revision)
    place = start.source if start.revision is None else f'{start.source} at {start.revision}'
    what = 'the weights of denoiser and text encoder' if encoders else "the denoiser's weights"
    return SourceWeights(weights | encoders, place, what)


def original_on_hub(model: LatentDiffusion, start: InitFrom) -> str | None:
    """Return the `.pt` file for the model's original code to read from a repository; None to read diffusers' files.

    It is the file that `init_from` names, else the only one, else the one for the model's image size, such as
    256_resolution_checkpoint_torch.pt.
    """
    repository, name = hub_repository(start), hub_file(start)
    assert repository is not None
    if not model.adapter.reads_pickles:
        if name is not None:
            raise UserError(f'{start.source}: no .pt file can be read for this model; use hf://{repository}')
        return None
    if name is not None:
        return name
    names = hub_files.top_files(repository, revision=str(start.revision))
    found = [each for each in names if each.endswith('.pt')]
    if not found or 'config.json' in names or PIPELINE in names:
        return None
    side = model.latent_size * downsampling(model.vae)
    fitting = [each for each in found if each.startswith(f'{side}_')] if len(found) > 1 else found
    if len(fitting) != 1:
        raise UserError(f'{start.source}: has {", ".join(found[:4])}; name one of them, hf://{repository}/{found[0]}')
    return fitting[0]


def from_original(model: LatentDiffusion, content: object, start: InitFrom, place: str) -> SourceWeights:
    """Return a denoiser's weights from its original code's layout; UserError if a text encoder is trained too."""
    if model.train_text_encoder:
        raise UserError(f'{place}: has no weights of the text encoder; set model.train_text_encoder: false')
    weights = model.adapter.from_original(model.denoiser, content, start.weights, place)
    return SourceWeights(_prefixed(DENOISER, weights), place, f'the {start.weights} weights of the denoiser')


def with_denoiser(model: object, start: InitFrom) -> LatentDiffusion:
    """Return the model; raise UserError if it has no denoiser."""
    if isinstance(model, LatentDiffusion):
        return model
    raise UserError(f'{start.source}: this model has no denoiser for these weights; use a checkpoint of a run')


def text_encoder_weights(model: LatentDiffusion, source: str, revision: str | None) -> dict[str, Tensor]:
    """Return a pipeline's text encoder weights by their names in the model; empty if the model freezes its encoders."""
    weights: dict[str, Tensor] = {}
    for index, encoder in enumerate(model.text.encoders if model.train_text_encoder else []):
        subfolder = 'text_encoder' if index == 0 else f'text_encoder_{index + 1}'
        if Path(source).is_dir() and not (Path(source) / subfolder).is_dir():
            raise UserError(
                f'{source}: has no {subfolder}/, but the model trains its text encoder; use the folder of a whole '
                'pipeline, or set model.train_text_encoder: false'
            )
        loaded = load_pretrained(type(encoder), source, subfolder=subfolder, revision=revision)
        for name in TEXT_SETTINGS:
            stored, own = getattr(loaded.config, name, None), getattr(encoder.config, name, None)
            if stored != own:
                raise UserError(
                    f'{source}: {name} of {subfolder} is {stored}, but the model has {own}; adapt the model settings'
                )
        weights |= _prefixed(f'text_encoder.encoders.{index}.', loaded.state_dict())
    return weights


def load_source(model: ComposerModel, source: SourceWeights, *, resize: bool) -> None:
    """Copy a source's weights into a model; both must have the same tensors.

    Parts that are only used in training, such as REPA's projector, may be missing on either side.

    Args:
        resize: Accept a source with fewer latent channels, and add zeros for the missing channels.

    Raises:
        UserError: The names or shapes differ.
    """
    own = model.state_dict()
    weights, added = resized(with_own_training_parts(source.tensors, own, source.place), own)
    if added and not resize:
        way_out = 'set init_from.resize: true to add channels of zeros, or use a VAE with the channels of the source'
        raise UserError(
            f'init_from: {source.place}: different numbers of latent channels: {"; ".join(added)}; {way_out}'
        )
    way_out = f'use model settings that fit{fitting_hint(weights, own)}'
    shapes, stored = ({name: each.shape for name, each in tensors.items()} for tensors in (own, weights))
    check_architecture(shapes, stored, f'init_from: {source.place}', way_out=way_out)
    model.load_state_dict(weights)
    log.info('init_from: loaded %s of %s (%d tensors)', source.what, source.place, len(weights))
    if added:
        log.info('init_from: added channels of zeros: %s', '; '.join(added))


def _prefixed(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: each for name, each in weights.items()}


@torch.no_grad()
def broadcast(tensor: Tensor) -> None:
    """Overwrite a tensor's values on all ranks with those of rank 0; a collective."""
    # NCCL only broadcasts from GPU memory, but the model is still on the CPU. Copying one tensor at a time avoids a
    # second copy of the model on each rank.
    device = 'cuda' if torch.distributed.get_backend() == 'nccl' else tensor.device
    values = tensor.detach().to(device).contiguous()
    dist.broadcast(values, src=0)
    tensor.copy_(values)
