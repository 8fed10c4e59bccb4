"""Every shipped recipe: its real model on the meta device, and two batches of the recipe with a miniature of the model.

A recipe that is added to yamls/ is tested without a change here.
"""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from composer.core import Event
from composer.loggers import Logger
from ranks import read_losses
from recipe_files import all_values, write_yaml
from shards import write_buckets, write_image_shards
from torchvision.models import vgg16
from transformers import Dinov2Config, Dinov2Model

from diffusion.algorithms.tread import TREAD
from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_weights import weights_of
from diffusion.config import registry
from diffusion.config.families import family_of_model
from diffusion.config.image_shapes import Shape
from diffusion.config.load import Recipe, load, to_yaml
from diffusion.loggers.metrics_file import read_metrics
from diffusion.models import batch_keys
from diffusion.models.activation_memory import blocks_of
from diffusion.models.cost_counting import build_empty
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.tasks.precompute import precompute
from diffusion.training import components
from diffusion.training.train import train

YAMLS = Path(__file__).parents[2] / 'yamls'
RECIPES = sorted(YAMLS.glob('*.yaml'))
CASES = [pytest.param(path, id=path.stem, marks=() if path.stem == 'prx_256' else pytest.mark.slow) for path in RECIPES]
"""All recipes; tests without `slow` take one of them, since the others take 5 to 10 seconds."""
BATCHES = 2
SMALL_TEXT = {'text_width': 32, 'text_layers': 1, 'train_text_encoder': False}
ON_CPU = ('channels_last', 'low_precision_norms', 'flash_attention', 'fused_optimizer', 'inference_mode')
"""Parts of `speed` that work on a CPU, and reduce_once under FSDP2. compile would take minutes."""
GPU_ONLY_CALLBACKS = ('memory_monitor',)


@dataclass(frozen=True)
class Small:
    """Miniature with which the recipes of a model are tested."""

    model: str
    keywords: dict[str, Any]
    """Keywords that set its size."""
    blocks: tuple[int, int] = (1, 1)
    """Numbers of blocks of the model and of the miniature: recipes' numbers of blocks are scaled."""

    def block(self, number: int) -> int:
        return number * self.blocks[1] // self.blocks[0]


OWN = {
    'tiny_mmdit': Small('tiny_mmdit', {'depth': 1, 'text_width': 32}),
    'tiny_prx': Small('tiny_prx', {'depth': 1, 'text_width': 32}),
    'autoencoder': Small('autoencoder', {'block_out_channels': [8, 8, 16, 16]}),
}
"""Models of recipes that have no larger one."""


def miniature_of(model: str, depth: int | None = None) -> Small:
    """Return the miniature of a recipe's model, as its family declares it; `depth` is not that of the default model."""
    if model in OWN:
        return OWN[model]
    miniature = family_of_model(model).miniature
    assert miniature is not None, f'recipes of the model {model} are not tested; declare a miniature in its family'
    depths = [depth or registry.signature('model', model).defaults().get('depth'), miniature.smallest.get('depth')]
    blocks: Any = (1, 1) if None in depths else tuple(depths)
    return Small(miniature.model, {**miniature.smallest, **SMALL_TEXT}, blocks)


def parameters_of(model: str) -> Mapping[str, int]:
    """Return the published number of the denoiser's parameters, by `latents` and `pixels`; empty for small models."""
    return {} if model in OWN else family_of_model(model).parameters


@dataclass(frozen=True)
class Sources:
    """Local stand-ins for the data and the public weights that recipes name."""

    images: dict[int, Path]
    """Folders of images by side in pixels."""
    buckets: Path
    """Folder of images of about 64 px in aspect-ratio buckets."""
    vae: Path
    image_encoder: Path
    """Folder of a miniature DINOv2."""
    image_encoder_config: Path
    """Folder with the configuration of the published DINOv2 base, without weights."""
    lpips_backbone: Path


@pytest.fixture(scope='module')
def sources(tmp_path_factory, pictures, small_vae) -> Sources:
    root = tmp_path_factory.mktemp('sources')
    shapes = {Shape(64, 64): 12, Shape(96, 64): 8}
    for index, (shape, count) in enumerate(shapes.items()):
        write_image_shards(root / 'buckets' / str(shape), count=count, side=96, offset=100 * index)
    write_buckets(root / 'buckets', 64, {shape: {'samples': count} for shape, count in shapes.items()})
    torch.manual_seed(0)
    dino = Dinov2Config(hidden_size=32, num_attention_heads=2, num_hidden_layers=2, image_size=28, patch_size=14)
    Dinov2Model(dino).save_pretrained(root / 'dino')
    Dinov2Config(image_size=518, patch_size=14).save_pretrained(root / 'dinov2-base')
    # Each weight is one number, expanded to the shape, so that the file of VGG-16 has 20 KB instead of 59 MB.
    with torch.device('meta'):
        shapes_of_vgg = {f'features.{name}': each.shape for name, each in vgg16().features.state_dict().items()}
    torch.save(
        {name: torch.tensor(1 / math.prod(shape[1:])).expand(shape) for name, shape in shapes_of_vgg.items()},
        root / 'vgg16.pth',
    )
    return Sources(pictures, root / 'buckets', small_vae, root / 'dino', root / 'dinov2-base', root / 'vgg16.pth')


# -- the real models, on the meta device --


@pytest.mark.filterwarnings('ignore:for .* copying from a non-meta parameter')  # torchmetrics loads LPIPS's layers
@pytest.mark.parametrize('path', CASES)
def test_real_model_fits_the_recipe(path, sources):
    recipe = load(path, allow_missing=True)
    published = parameters_of(recipe.model.name)
    model: Any = build_real(recipe, sources)
    assert {each.device.type for each in model.parameters()} == {'meta'}
    defaults = registry.signature('model', recipe.model.name).defaults()
    sizes = ('hidden_size', 'size')  # test_prx.py and test_i1.py have the numbers of other sizes
    if published and all(recipe.model.kwargs.get(key, defaults.get(key)) == defaults.get(key) for key in sizes):
        denoiser = sum(each.numel() for each in model.denoiser.parameters())
        assert denoiser == published['pixels' if recipe.model.kwargs.get('vae') == 'pixels' else 'latents']
    if recipe.lora is not None:
        components.add_lora(recipe, model)
    # The units of FSDP, compilation and activation checkpointing.
    assert blocks_of(getattr(model, 'denoiser', model)) or recipe.parallelism.strategy == 'ddp'
    check_optimizer(recipe, model)
    for algorithm in components.build_all('algorithm', recipe.algorithms, recipe.run_dir):
        if isinstance(algorithm, TREAD):
            algorithm.apply(Event.INIT, SimpleNamespace(model=model), Logger)  # type: ignore[arg-type]
            assert model.router is not None
    if isinstance(model, LatentDiffusion):
        # Counting runs the forward passes at the recipe's size.
        assert model.flops_per_batch(batch_on_meta(model, recipe)) > 0


def build_real(recipe: Recipe, sources: Sources) -> torch.nn.Module:
    """Return the model of a recipe on the meta device; its frozen parts have the sizes of the published ones."""
    kwargs = dict(recipe.model.kwargs)
    for name in ('revision', 'vae_revision'):
        kwargs.pop(name, None)
    if parameters_of(recipe.model.name):
        kwargs['pretrained'] = None
        if kwargs.get('vae') != 'pixels':
            kwargs.pop('vae', None)
    for name in ('representation_alignment', 'perceptual_losses'):
        if kwargs.get(name):
            kwargs[name] = {**kwargs[name], 'encoder': str(sources.image_encoder_config)}
    if kwargs.get('perceptual_losses'):
        kwargs['perceptual_losses']['lpips_backbone'] = str(sources.lpips_backbone)
    if recipe.lora is not None or 'tread' in recipe.algorithms:
        return build_empty(recipe.model.name, kwargs)  # these change the model
    kwargs.pop('resolution', None)  # the size of generated images
    return _shared(recipe.model.name, json.dumps(kwargs))


@functools.cache
def _shared(name: str, kwargs: str) -> torch.nn.Module:
    """Return a model on the meta device, one for all recipes with the same keywords."""
    return build_empty(name, json.loads(kwargs))


def check_optimizer(recipe: Recipe, model: torch.nn.Module) -> None:
    """Assert that each trained parameter is in exactly one group of the recipe's optimizer, and Muon's are matrices."""
    recipe.speed = replace(recipe.speed, fused_optimizer=False)  # fused kernels refuse the meta device
    groups = components.build_optimizer(recipe, model).param_groups  # type: ignore[arg-type]
    optimized = [id(each) for group in groups for each in group['params']]
    assert sorted(optimized) == sorted(id(each) for each in model.parameters() if each.requires_grad)
    if recipe.optimizer.name == 'muon':
        sizes = {group['algorithm']: sum(each.numel() for each in group['params']) for group in groups}
        assert all(each.ndim > 1 for each in groups[0]['params'])
        assert sizes['muon'] > 0.9 * sum(sizes.values())


def batch_on_meta(model: LatentDiffusion, recipe: Recipe) -> dict[str, torch.Tensor]:
    """Return a batch of one image of the recipe's size, without data."""
    side = next(iter(recipe.streams.values())).resolution
    tokens = torch.empty(1, len(model.text.encoders), model.text.token_length, dtype=torch.int64, device='meta')
    image = torch.empty(1, 3, side, side, dtype=torch.uint8, device='meta')
    return {batch_keys.IMAGE: image, batch_keys.INPUT_IDS: tokens}


# -- two batches of each recipe --


class Runs:
    """Runs of the recipes with miniatures of their models, each done once."""

    def __init__(self, folder: Path, sources: Sources) -> None:
        self.folder, self.sources = folder, sources

    def of(self, name: str) -> Path:
        """Return the folder of the run of a recipe, which is done first if it was not, as are those it starts from."""
        run = self.folder / 'runs' / name
        if not run.exists():
            path = next(path for path in RECIPES if path.stem == name)
            content = yaml.safe_load(to_yaml(load(path, allow_missing=True)))
            small = write_yaml(self.folder / f'{name}.yaml', self.tiny_form(content))
            if content['dataset']['name'] == 'latents':
                precompute(load(small, ['task=precompute']))
            train(load(small)).close()
        return run

    def tiny_form(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return a resolved recipe with a small model, small images, few batches and no GPU, and otherwise as it is."""
        miniature = miniature_of(content['model']['name'], content['model'].get('depth'))
        for algorithm in content.get('algorithms', {}).values():
            if algorithm and 'end' in algorithm:  # TREAD
                start = miniature.block(algorithm['start'])
                algorithm |= {'start': start, 'end': max(start + 1, miniature.block(algorithm['end']))}
        content['model'] = self._model(content['model'], miniature)
        content |= {'runs_dir': str(self.folder / 'runs'), 'global_batch': 4}
        if content.get('device_train_microbatch_size'):
            content['device_train_microbatch_size'] = 2  # two microbatches, as with the real one
        self._replace_data(content)
        if content.get('init_from'):
            content['init_from'] = self._initial_weights(content['init_from'])
        self._shorten(content)
        # What needs a GPU.
        content['trainer'] |= {'device': 'cpu', 'precision': 'fp32', 'progress_bar': False}
        content['callbacks'] = {
            name: each for name, each in content.get('callbacks', {}).items() if name not in GPU_ONLY_CALLBACKS
        }
        if content.get('speed', {}).get('preset', 'full') == 'full':
            sharded = content.get('parallelism', {}).get('strategy') == 'fsdp2'
            content['speed'] = {'preset': 'full', **dict.fromkeys(ON_CPU, True), 'reduce_once': sharded or None}
        return content

    def _model(self, model: dict[str, Any], miniature: Small) -> dict[str, Any]:
        known = registry.signature('model', miniature.model).names()
        small = {key: each for key, each in model.items() if key in known}
        small |= {'name': miniature.model, **miniature.keywords}
        if 'resolution' in model:
            small['resolution'] = small_side(model['resolution'])
        if model.get('vae') != 'pixels' and model['name'] != 'autoencoder':
            small['vae'] = str(self.sources.vae)
        for name in ('representation_alignment', 'perceptual_losses'):
            if small.get(name):
                small[name] = {**small[name], 'encoder': str(self.sources.image_encoder), 'revision': None}
        if small.get('representation_alignment'):
            alignment = small['representation_alignment']
            alignment['block'] = miniature.block(alignment['block'])
        if small.get('perceptual_losses'):
            small['perceptual_losses']['lpips_backbone'] = str(self.sources.lpips_backbone)
        return small

    def _replace_data(self, content: dict[str, Any]) -> None:
        """Point all streams to images, or to latents that are precomputed from images."""
        precomputed = content.get('precompute', {})
        # All streams would have the same images, and no two streams may have the same folder: keep one.
        content['streams'] = dict([*content['streams'].items()][:1])
        sections = {section: content.get(section, {}) for section in ('streams', 'eval_streams')}
        for section, streams in {**sections, 'precompute': precomputed.get('streams', {})}.items():
            for name, stream in streams.items():
                side = small_side(stream['resolution'])
                local = self.sources.buckets if stream.get('aspects') else self.sources.images[side]
                if section == 'streams' and content['dataset']['name'] == 'latents':
                    local = self.folder / content['name'] / name
                stream |= {'remote': None, 'local': str(local), 'resolution': side}
        if precomputed.get('streams'):
            precomputed['out'] = str(self.folder / content['name'])
        content['loader'] = {**content.get('loader', {}), 'num_workers': 0}

    def _initial_weights(self, start: str | dict[str, Any]) -> dict[str, Any]:
        """Return `init_from` with the run of another recipe, or a folder of diffusers in place of the Hub."""
        start = {'from': start} if isinstance(start, str) else start
        if not start['from'].startswith('hf://'):
            return start | {'from': str(self.of(Path(start['from']).name))}
        folder = self.folder / 'published'
        if not folder.exists():
            run = self.of('phase1')
            model: Any = components.build_model(load(run / 'recipe.yaml'))
            model.load_state_dict(weights_of(find_checkpoint(run), 'training')[0])
            model.denoiser.save_pretrained(folder / 'unet')
        return {'from': str(folder)}

    def _shorten(self, content: dict[str, Any]) -> None:
        """Train for two batches, in which warmup ends and averages begin, and then evaluate, draw and save once."""
        end = f'{BATCHES}ba'
        content['trainer'] |= {'max_duration': end, 'eval_interval': end, 'save_interval': end}
        content['trainer']['eval_subset_num_batches'] = 1
        if content.get('scheduler') and content['scheduler'].get('name') != 'constant':
            content['scheduler']['t_warmup'] = '1ba'
        for algorithm in content.get('algorithms', {}).values():
            if algorithm and 'ema_start' in algorithm:
                algorithm['ema_start'] = '1ba'
        callbacks = content.get('callbacks', {})
        if 'image_grid' in callbacks:
            callbacks['image_grid'] |= {'every': end, 'num_inference_steps': 2}
        if 'breakdown' in callbacks:
            callbacks['breakdown']['window'] = 1


def small_side(resolution: int) -> int:
    """Return the side of the images in place of those of a recipe; those of later stages are larger."""
    return 32 if resolution <= 256 else 64


@pytest.fixture(scope='module')
def runs(tmp_path_factory, sources) -> Runs:
    return Runs(tmp_path_factory.mktemp('recipes'), sources)


@pytest.mark.cpu_seconds(12)
@pytest.mark.parametrize('path', CASES)
def test_two_batches_of_the_recipe_with_a_small_model(path, runs, alone):
    run = runs.of(path.stem)
    losses = read_losses(run)
    assert len(losses) == BATCHES and all(map(math.isfinite, losses.values()))
    recipe, original = load(run / 'recipe.yaml'), load(path, allow_missing=True)
    assert all_values(recipe)['optimizer'] == all_values(original)['optimizer']
    for section in ('algorithms', 'callbacks', 'loggers'):
        left_out = GPU_ONLY_CALLBACKS if section == 'callbacks' else ()
        assert {*getattr(recipe, section)} == {*getattr(original, section)} - {*left_out}
    assert recipe.parallelism == original.parallelism
    assert find_checkpoint(run).name == f'ba{BATCHES}'
    if recipe.eval_streams:
        assert any(name.startswith('metrics/eval/') for name in read_metrics(run / 'metrics.jsonl'))
    if 'image_grid' in recipe.callbacks:
        assert [*(run / 'images').iterdir()]


LATENTS = ['streams.laion.remote=s3://bucket/latents/laion', 'eval_streams.coco.remote=s3://bucket/coco']


@pytest.mark.parametrize('number', [1, 2])
def test_precomputed_and_online_training_differ_only_in_the_data(number):
    latents = load(YAMLS / f'phase{number}-latents.yaml', LATENTS)
    overrides = ['streams.laion.remote=s3://bucket/images', LATENTS[1]]
    online = load(YAMLS / f'phase{number}.yaml', overrides)
    assert online.dataset.kwargs['crop'] == latents.precompute.crop == 'center'
    for section in ('model', 'optimizer', 'scheduler', 'algorithms', 'callbacks', 'parallelism', 'speed', 'trainer'):
        assert getattr(latents, section) == getattr(online, section)
    assert (latents.seed, latents.global_batch, latents.loader) == (online.seed, online.global_batch, online.loader)
