"""A pipeline as a single safetensors file, with the tensor names of Stability AI's original code, for ComfyUI etc.

The file has weights but no configuration: programs that read it recognize the model by its tensor shapes, and assume
the published latent scale, noise schedule and tokenizers. The VAE is adapted to that scale; for another schedule, a
warning is logged.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from diffusion.compatibility.transformers_versions import with_text_model
from diffusion.errors import UserError
from diffusion.models.objective import Objective
from diffusion.models.original_layout import (
    UNET_PREFIX,
    Tensors,
    mmdit_tensors,
    open_clip_tensors,
    unet_tensors,
    vae_tensors,
)
from diffusion.models.vae import with_latent_scale

log = logging.getLogger(__name__)

SD_SCALE, SDXL_SCALE, SD3_SCALE, SD3_SHIFT = 0.18215, 0.13025, 1.5305, 0.0609
"""Latent scales and shift of the published autoencoders; programs apply these to every model of the family."""
OPEN_CLIP_H_LAYERS = 24
"""Number of layers of OpenCLIP ViT-H. diffusers' version of Stable Diffusion 2 omits the last one, which the model
does not use."""


@dataclass(frozen=True)
class SingleFile:
    """Content of a single file: tensors by name, and the architecture's name in Stability AI's ModelSpec."""

    tensors: Tensors
    architecture: str

    def save(self, path: Path, *, dtype: torch.dtype, title: str, objective: Objective, resolution: int) -> None:
        """Write a new file at `path`; title, prediction type and resolution in pixels are stored in its header."""
        tensors: Tensors = {}
        written: set[int] = set()
        for name, each in self.tensors.items():
            tensor = each.detach().to(dtype).contiguous()
            # T5's embedding has two names, and safetensors rejects tensors that share memory.
            tensors[name] = tensor.clone() if tensor.data_ptr() in written else tensor
            written.add(tensor.data_ptr())
        header = {
            'modelspec.sai_model_spec': '1.0.0',
            'modelspec.architecture': self.architecture,
            'modelspec.implementation': 'https://github.com/Stability-AI/generative-models',
            'modelspec.title': title,
            'modelspec.resolution': f'{resolution}x{resolution}',
        }
        if (prediction := {'epsilon': 'epsilon', 'v_prediction': 'v'}.get(objective.prediction_type)) is not None:
            header['modelspec.prediction_type'] = prediction
        # These tensors mark a U-Net as predicting v; programs need no such marker for Stable Diffusion 3's flow.
        if prediction == 'v':
            tensors['v_pred'] = torch.zeros(0)
            if objective.zero_terminal_snr:
                tensors['ztsnr'] = torch.zeros(0)
        save_file(tensors, path, metadata=header)


def sd_file(pipeline: Any, objective: Objective) -> SingleFile:
    """Return a StableDiffusionPipeline in the layout of Stable Diffusion 2, or of 1 if it has OpenAI's CLIP."""
    encoder = _clip(pipeline.text_encoder)
    tensors = unet_tensors(pipeline.unet) | _vae(pipeline.vae, SD_SCALE)
    # OpenAI's CLIP, the text encoder of version 1, has this activation in all sizes; OpenCLIP (version 2) never has it.
    if encoder.config.hidden_act == 'quick_gelu':
        tensors |= _prefixed('cond_stage_model.transformer.', _text_model(encoder))
        architecture = 'stable-diffusion-v1'
    else:
        unused = encoder.config.num_hidden_layers == OPEN_CLIP_H_LAYERS - 1
        layers = OPEN_CLIP_H_LAYERS if unused else None
        tensors |= _prefixed('cond_stage_model.model.', open_clip_tensors(encoder, layers=layers))
        v = objective.prediction_type == 'v_prediction'
        architecture = 'stable-diffusion-v2-768-v' if v else 'stable-diffusion-v2-512'
    if objective.prediction_type == 'v_prediction':
        log.warning(
            'export: a single file of Stable Diffusion 1 or 2 does not tell every program that the model predicts v; '
            'choose v-prediction in the program that loads it, in ComfyUI with the node ModelSamplingDiscrete'
        )
    _warn_of_schedule(objective)
    return SingleFile(tensors, architecture)


def sdxl_file(pipeline: Any, objective: Objective) -> SingleFile:
    """Return a StableDiffusionXLPipeline as a single file with the tensor names of Stable Diffusion XL base."""
    first, second = _clip(pipeline.text_encoder), _clip(pipeline.text_encoder_2)
    tensors = unet_tensors(pipeline.unet) | _vae(pipeline.vae, SDXL_SCALE)
    tensors |= _prefixed('conditioner.embedders.0.transformer.', _text_model(first))
    tensors |= _prefixed('conditioner.embedders.1.model.', open_clip_tensors(second))
    _warn_of_schedule(objective)
    return SingleFile(tensors, 'stable-diffusion-xl-v1-base')


def sd3_file(pipeline: Any, objective: Objective) -> SingleFile:
    """Return a StableDiffusion3Pipeline as a single file with the tensor names of Stable Diffusion 3."""
    first, second = _clip(pipeline.text_encoder), _clip(pipeline.text_encoder_2)
    transformer = mmdit_tensors(pipeline.transformer)
    _fold_projection(transformer, first)
    tensors = _prefixed(UNET_PREFIX, transformer) | _vae(pipeline.vae, SD3_SCALE, SD3_SHIFT)
    tensors |= _prefixed('text_encoders.clip_l.transformer.', _text_model(first))
    tensors |= _prefixed('text_encoders.clip_g.transformer.', second.state_dict())
    if pipeline.text_encoder_3 is not None:
        tensors |= _prefixed('text_encoders.t5xxl.transformer.', pipeline.text_encoder_3.state_dict())
    if objective.prediction_type != 'velocity':
        log.warning(
            'export: trained with path %s and prediction_type %s, but programs sample every single file of '
            'Stable Diffusion 3 as a flow that predicts the velocity',
            *(objective.path, objective.prediction_type),
        )
    elif objective.snr_shift != 3:
        log.info(
            'export: trained with snr_shift %.3g; programs sample single files of Stable Diffusion 3 with shift 3; in '
            'ComfyUI, the node ModelSamplingSD3 sets another shift',
            objective.snr_shift,
        )
    has_second_attention = any('.attn2.' in name for name in transformer)
    return SingleFile(tensors, f'stable-diffusion-v3{".5" if has_second_attention else ""}-medium')


def _vae(vae: Any, scale: float, shift: float = 0.0) -> Tensors:
    """Return the tensors of a pipeline's VAE, adapted to the latent scale and shift that programs assume."""
    return _prefixed('first_stage_model.', vae_tensors(with_latent_scale(vae, scale, shift)))


def _clip(encoder: Any) -> CLIPTextModel | CLIPTextModelWithProjection:
    """Return a pipeline's text encoder; raise UserError unless it is a CLIP model, which single files must have."""
    if not isinstance(encoder, CLIPTextModel | CLIPTextModelWithProjection):
        raise UserError(
            f'export: a single file has a CLIP text encoder, but this model has a {type(encoder).__name__}; export a '
            'folder instead (--out FOLDER)'
        )
    return encoder


def _text_model(encoder: torch.nn.Module) -> Tensors:
    """Return CLIP's tensors except its projection, by their names in transformers, as in single files for ViT-L."""
    state = with_text_model(encoder).state_dict()
    return {name: each for name, each in state.items() if name.startswith('text_model.')}


def _fold_projection(transformer: Tensors, encoder: Any) -> None:
    """Multiply the first CLIP's projection into Stable Diffusion 3's input layer for pooled text, in place.

    ComfyUI and the original code skip this projection, which is the identity in the published model. It must be
    square, since folding would otherwise change the width of the layer's input.
    """
    projection: Tensor = encoder.text_projection.weight.detach()
    width, pooled_width = encoder.config.hidden_size, encoder.config.projection_dim
    if width == pooled_width and torch.equal(projection, torch.eye(width).to(projection)):
        return
    if width != pooled_width:
        raise UserError(
            f'export: the first text encoder projects its {width} channels to {pooled_width}, which a single file '
            'cannot represent; export a folder instead (--out FOLDER)'
        )
    weight = transformer['y_embedder.mlp.0.weight']
    folded = weight[:, :width].float() @ projection.to(weight.device).float()
    transformer['y_embedder.mlp.0.weight'] = torch.cat([folded.to(weight.dtype), weight[:, width:]], dim=1)


def _warn_of_schedule(objective: Objective) -> None:
    usual = Objective()
    names = ('path', 'beta_schedule', 'beta_start', 'beta_end', 'num_train_timesteps', 'snr_shift')
    different = [
        f'{name} {getattr(objective, name)}' for name in names if getattr(objective, name) != getattr(usual, name)
    ]
    if objective.prediction_type == 'sample':
        different.append('prediction_type sample')
    if different:
        log.warning(
            'export: trained with %s, which a single file does not record; programs assume the published noise '
            'schedule, so set it in the program that loads the file, or export a folder (--out FOLDER)',
            ', '.join(different),
        )


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}
