"""LoRA: train low-rank updates of a denoiser's layers instead of its weights (Hu et al. 2021, arXiv:2106.09685).

A layer with weight W computes W x + (alpha / rank) B A x. A has `rank` rows and is initialized randomly. B has `rank`
columns and is initialized to zero, so that the initial prediction equals that of W. The package peft replaces the
layers; only A and B are trained.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from peft import LoraConfig as PeftConfig
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict  # type: ignore[reportPrivateImportUsage]
from safetensors.torch import save_file
from torch import Tensor, nn

from diffusion.config.families import families
from diffusion.config.recipe import LoraConfig
from diffusion.errors import UserError
from diffusion.models.families.adapter import find_adapter

NAME = 'default'
"""peft's name for a denoiser's only LoRA."""
UPDATED = (nn.Linear, nn.Conv2d)


def add_lora(denoiser: ModelMixin, settings: LoraConfig, *, seed: int) -> None:
    """Add a LoRA to a denoiser in place, and freeze all other weights; A's initial values depend only on `seed`."""
    if not isinstance(denoiser, PeftAdapterMixin):
        what = f'diffusers has no LoRA for a {type(denoiser).__name__}; remove the section to train all weights'
        raise UserError(f'lora: {what}')
    # peft ignores a target that matches no layer as long as another target matches some.
    layers = [name for name, layer in denoiser.named_modules() if isinstance(layer, UPDATED)]
    unknown = [each for each in settings.targets if not any(f'.{name}'.endswith(f'.{each}') for name in layers)]
    if unknown:
        ends = sorted({re.sub(r'^.*\.(?=[^.]*[a-z_][^.]*(\.\d+)*$)', '', name) for name in layers})
        raise UserError(f'lora.targets: {", ".join(unknown)} matches no layer; use some of {", ".join(ends)}')
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        denoiser.add_adapter(
            PeftConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=settings.targets),  # type: ignore[arg-type]
            NAME,
        )


@contextmanager
def without_lora(denoiser: nn.Module) -> Iterator[None]:
    """Context in which a denoiser predicts as it would without its LoRA, whose factor alpha / rank is set to 0."""
    # Do not use peft's switch: it also changes the LoRA's requires_grad, which must stay the same for DDP and FSDP.
    layers = [(each, dict(each.scaling)) for each in denoiser.modules() if isinstance(each, LoraLayer)]
    try:
        for layer, scaling in layers:
            layer.scaling.update(dict.fromkeys(scaling, 0.0))
        yield
    finally:
        for layer, scaling in layers:
            layer.scaling.update(scaling)


def lora_weights(denoiser: nn.Module, settings: LoraConfig) -> dict[str, Tensor]:
    """Return a LoRA's weights by name, rescaled to alpha = rank for programs that do not read alpha from the file."""
    weights = get_peft_model_state_dict(denoiser, adapter_name=NAME)
    scale = settings.alpha / settings.rank
    return {name: each * scale if '.lora_B.' in name else each for name, each in weights.items()}


def save_lora(
    denoiser: nn.Module, settings: LoraConfig, file: Path, dtype: torch.dtype, *, single_file: bool = False
) -> None:
    """Write a denoiser's LoRA to a safetensors file that diffusers pipelines can load.

    With `single_file`, a U-Net's LoRA has the tensor names of kohya's scripts, which ComfyUI reads; the LoRA of Stable
    Diffusion 3's transformer keeps its names. Raises UserError if this denoiser's pipeline loads no LoRA.
    """
    adapter = find_adapter(denoiser)
    writer = None if adapter is None else adapter.lora_writer
    if writer is None:
        known = ', '.join(dict.fromkeys(each.denoiser_class for each in families() if each.loads_lora))
        raise UserError(
            f'export: diffusers loads the LoRA of a {known}, but the denoiser is a {type(denoiser).__name__}; use '
            '--merge to export the whole pipeline'
        )
    if single_file and isinstance(denoiser, UNet2DConditionModel):
        save_file(comfyui_weights(denoiser, settings, dtype), file)
        return
    layers = {name: each.detach().to(dtype).contiguous() for name, each in lora_weights(denoiser, settings).items()}
    loader, keyword = writer
    loader.save_lora_weights(file.parent, **{keyword: layers}, weight_name=file.name)


def comfyui_weights(unet: nn.Module, settings: LoraConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights of a U-Net's LoRA with the tensor names of kohya's scripts, which ComfyUI expects.

    For example, layer `mid_block.attentions.0.proj_in` has A in
    `lora_unet_mid_block_attentions_0_proj_in.lora_down.weight`, B in `....lora_up.weight`, and the scalar `....alpha`.
    ComfyUI and diffusers add (alpha / rank) B A.
    """
    found = {}
    for name, each in get_peft_model_state_dict(unet, adapter_name=NAME).items():
        layer, _, matrix = name.removesuffix('.weight').rpartition('.')
        prefix = f'lora_unet_{layer.replace(".", "_")}'
        part = {'lora_A': 'lora_down', 'lora_B': 'lora_up'}[matrix]
        found[f'{prefix}.{part}.weight'] = each.detach().to(dtype).contiguous()
        found[f'{prefix}.alpha'] = torch.tensor(settings.alpha)
    return found


def merge_lora(denoiser: ModelMixin) -> None:
    """Merge a denoiser's LoRA into the weights of its layers in place, W + (alpha / rank) B A, and remove it."""
    denoiser.fuse_lora()
    denoiser.unload_lora()
