"""Single files in the layout that ComfyUI reads, checked by diffusers' own readers of that layout."""

import functools
import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils as readers
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl import StableDiffusionXLPipeline
from golden import check_golden
from original_layout import original_layout
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from diffusion.compatibility.transformers_versions import with_text_model
from diffusion.errors import UserError
from diffusion.models.families.mmdit.builder import byte_tokenizer
from diffusion.models.families.prx.denoiser import PRX
from diffusion.models.families.sd2 import builder as sd2_builder
from diffusion.models.families.sdxl import builder as sdxl_builder
from diffusion.models.objective import Objective
from diffusion.models.original_layout import mmdit_tensors, open_clip_tensors, read_original, unet_tensors, vae_tensors
from diffusion.models.pretrained import clip_tokenizer
from diffusion.models.sampler import inference_scheduler
from diffusion.models.single_file import sd3_file, sd_file, sdxl_file
from diffusion.models.vae import STABLE_DIFFUSION_VAE, decode_latents, latent_statistics, moments_of, with_latent_scale

Settings = dict[str, Any]
UNET: Settings = {
    'sample_size': 8,
    'down_block_types': ('CrossAttnDownBlock2D', 'CrossAttnDownBlock2D', 'DownBlock2D'),
    'up_block_types': ('UpBlock2D', 'CrossAttnUpBlock2D', 'CrossAttnUpBlock2D'),
    'block_out_channels': (16, 16, 32),
    'attention_head_dim': 8,
    'cross_attention_dim': 32,
    'norm_num_groups': 4,
}
SD1 = UNET
SD2: Settings = UNET | {'use_linear_projection': True}
XL: Settings = SD2 | {
    'down_block_types': ('DownBlock2D', 'CrossAttnDownBlock2D', 'CrossAttnDownBlock2D'),
    'up_block_types': ('CrossAttnUpBlock2D', 'CrossAttnUpBlock2D', 'UpBlock2D'),
    'transformer_layers_per_block': (1, 1, 2),
    'layers_per_block': 1,
    'cross_attention_dim': 96,
    'addition_embed_type': 'text_time',
    'addition_time_embed_dim': 8,
    'projection_class_embeddings_input_dim': 64 + 6 * 8,
}
VAE: Settings = STABLE_DIFFUSION_VAE | {'block_out_channels': (8, 8, 16, 16), 'norm_num_groups': 4}
CLIP: Settings = {
    'vocab_size': 49408,
    'hidden_size': 32,
    'intermediate_size': 32,
    'num_hidden_layers': 2,
    'num_attention_heads': 2,
    'max_position_embeddings': 16,
    'projection_dim': 32,
}
OPEN_CLIP: Settings = CLIP | {'hidden_size': 64, 'projection_dim': 64, 'hidden_act': 'gelu'}
MMDIT: Settings = {
    'sample_size': 8,
    'num_layers': 3,
    'attention_head_dim': 8,
    'num_attention_heads': 2,
    'joint_attention_dim': 96,
    'caption_projection_dim': 16,
    'pooled_projection_dim': 96,
    'pos_embed_max_size': 8,
}
SD35: Settings = MMDIT | {'qk_norm': 'rms_norm', 'dual_attention_layers': (0, 1)}
FLOW = Objective(path='flow', prediction_type='velocity', snr_shift=3.0)


def unet_of(config: Settings, **changes: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(**(config | changes))


def vae_of(**changes: Any) -> AutoencoderKL:
    return AutoencoderKL(**(VAE | changes))


def clip_config(config: Settings, **changes: Any) -> CLIPTextConfig:
    return CLIPTextConfig(**(config | changes))


def equal(ours, theirs) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(('config', 'layers'), [(SD1, 2), (SD2, 2), (XL, 1)], ids=['sd1', 'sd2', 'sdxl'])
def test_unet_is_written_as_the_layout_that_training_reads(config, layers, tmp_path):
    unet = unet_of(config)
    tensors = unet_tensors(unet)
    assert equal(tensors, original_layout(unet.state_dict(), layers_per_block=layers))
    save_file(tensors, tmp_path / 'unet.safetensors')
    assert equal(read_original(unet, tmp_path / 'unet.safetensors', 'training'), unet.state_dict())


def test_unet_that_the_original_code_cannot_build_is_refused():
    class Sevenfold(UNet2DConditionModel):
        pass

    unet = Sevenfold(**SD2)
    unet.extra = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r'no place for extra.weight of this Sevenfold; export a folder instead'):
        unet_tensors(unet)
    different = unet_of(SD2, layers_per_block=(1, 2, 1))
    with pytest.raises(UserError, match=r'no place for layers_per_block by level of this'):
        unet_tensors(different)


@pytest.mark.parametrize('attention', [True, False])
def test_reader_of_diffusers_gets_the_vae_back(attention):
    vae = vae_of(mid_block_add_attention=attention)
    tensors = {f'first_stage_model.{name}': each for name, each in vae_tensors(vae).items()}
    assert equal(readers.convert_ldm_vae_checkpoint(tensors, vae.config), vae.state_dict())


@pytest.mark.parametrize('kind', [CLIPTextModel, CLIPTextModelWithProjection])
def test_reader_of_diffusers_gets_an_open_clip_encoder_back(kind):
    encoder = kind(clip_config(OPEN_CLIP))
    tensors = {f'x.{name}': each for name, each in open_clip_tensors(encoder).items()}
    read = readers.convert_open_clip_checkpoint(encoder, tensors, prefix='x.')
    assert equal(read, with_text_model(encoder).state_dict())


@pytest.mark.parametrize('config', [MMDIT, SD35], ids=['sd3', 'sd35'])
def test_readers_get_the_transformer_of_stable_diffusion_3_back(config, tmp_path):
    transformer = SD3Transformer2DModel(**config)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    tensors = {f'model.diffusion_model.{name}': each for name, each in mmdit_tensors(transformer).items()}
    file = tmp_path / 'model.safetensors'
    save_file(tensors | {'first_stage_model.x': torch.zeros(1)}, file)
    assert equal(readers.convert_sd3_transformer_checkpoint_to_diffusers(dict(tensors)), transformer.state_dict())
    assert equal(read_original(transformer, file, 'training'), transformer.state_dict())
    with pytest.raises(UserError, match=r'it has no averaged weights; use weights: training'):
        read_original(transformer, file, 'ema')
    save_file(tensors | {'model.diffusion_model.context_processor.x': torch.zeros(1)}, file)
    with pytest.raises(UserError, match=r'1 unknown tensors \(model\.diffusion_model\.context_processor\.x\)'):
        read_original(transformer, file, 'training')
    del tensors['model.diffusion_model.joint_blocks.1.x_block.mlp.fc1.bias']
    save_file(tensors, file)
    with pytest.raises(UserError, match=r'lacks model\.diffusion_model\.joint_blocks\.1\.x_block\.mlp\.fc1\.bias'):
        read_original(transformer, file, 'training')
    save_file(unet_tensors(unet_of(SD2)), file)
    with pytest.raises(UserError, match=r'has no tensors .*joint_blocks\.\*; is it Stable Diffusion 3\?'):
        read_original(transformer, file, 'training')


def test_published_sizes_have_the_published_names_and_shapes():
    """Counts and shapes are those of v2-1_768-ema-pruned, sd_xl_base_1.0 and sd3.5_medium."""
    with torch.device('meta'):
        files = {
            'sd2': unet_tensors(UNet2DConditionModel(**sd2_builder.UNET)),
            'sdxl': unet_tensors(UNet2DConditionModel(**sdxl_builder.UNET)),
            'vae': vae_tensors(AutoencoderKL(**STABLE_DIFFUSION_VAE)),
            'clip_h': open_clip_tensors(CLIPTextModel(CLIPTextConfig(**sd2_builder.TEXT_ENCODER)), layers=24),
            'clip_g': open_clip_tensors(CLIPTextModelWithProjection(CLIPTextConfig(**sdxl_builder.CLIP_BIG_G))),
        }
    found = {}
    for file, tensors in files.items():
        alike: dict[str, list[str]] = {}
        for name in sorted(tensors):
            alike.setdefault(re.sub(r'\d+', '', name), []).append(name)
        shapes = [sorted({tuple(tensors[each].shape) for each in names}) for names in alike.values()]
        lines = [f'{len(names)} {names[-1]} {each}' for names, each in zip(alike.values(), shapes, strict=True)]
        found[f'{file}.txt'] = '\n'.join([f'{len(tensors)} tensors', *lines, ''])
    check_golden(Path(__file__).parent / 'golden' / 'single_files', found)


@functools.cache
def tokenizer() -> Any:
    return clip_tokenizer(max_length=16)


def pipeline_of(name: str, objective: Objective) -> Any:
    torch.manual_seed(0)
    vae = vae_of()
    clip, open_clip = clip_config(CLIP), clip_config(OPEN_CLIP)
    scheduler = inference_scheduler('euler' if objective.is_flow else 'ddim', objective)
    if name == 'sdxl':
        vae.register_to_config(scaling_factor=0.13025)
        return StableDiffusionXLPipeline(
            vae=vae,
            text_encoder=CLIPTextModel(clip),
            text_encoder_2=CLIPTextModelWithProjection(open_clip),
            tokenizer=tokenizer(),
            tokenizer_2=tokenizer(),
            unet=unet_of(XL),
            scheduler=scheduler,
            add_watermarker=False,
        )
    if name == 'sd3':
        vae.register_to_config(scaling_factor=1.5305, shift_factor=0.0609)
        first = CLIPTextModelWithProjection(clip)
        nn.init.eye_(first.text_projection.weight)
        t5 = T5Config(vocab_size=512, d_model=96, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        return StableDiffusion3Pipeline(
            transformer=SD3Transformer2DModel(**SD35, in_channels=4),
            scheduler=scheduler,
            vae=vae,
            text_encoder=first,
            tokenizer=tokenizer(),
            text_encoder_2=CLIPTextModelWithProjection(open_clip),
            tokenizer_2=tokenizer(),
            text_encoder_3=T5EncoderModel(t5),
            tokenizer_3=byte_tokenizer(max_length=16),
        )
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=CLIPTextModel(clip if name == 'sd1' else clip_config(OPEN_CLIP, hidden_size=32)),
        tokenizer=tokenizer(),
        unet=unet_of(SD1 if name == 'sd1' else SD2),
        scheduler=scheduler,
        safety_checker=None,  # type: ignore[arg-type]
        feature_extractor=None,  # type: ignore[arg-type]
        requires_safety_checker=False,
    )


def header_of(path: Path) -> tuple[dict[str, str], set[str]]:
    with safe_open(path, framework='pt') as opened:
        return opened.metadata(), {*opened.keys()}


FILES = {'sd1': sd_file, 'sd2': sd_file, 'sdxl': sdxl_file, 'sd3': sd3_file}


@pytest.mark.parametrize(
    ('name', 'architecture', 'prediction'),
    [
        pytest.param('sd1', 'stable-diffusion-v1', 'epsilon', marks=pytest.mark.slow),
        ('sd2', 'stable-diffusion-v2-512', 'epsilon'),
        pytest.param('sdxl', 'stable-diffusion-xl-v1-base', 'epsilon', marks=pytest.mark.slow),
        pytest.param('sd3', 'stable-diffusion-v3.5-medium', None, marks=pytest.mark.slow),
    ],
)
def test_pipeline_loaded_from_the_single_file_has_the_same_weights(name, architecture, prediction, tmp_path):
    objective = FLOW if name == 'sd3' else Objective()
    pipeline = pipeline_of(name, objective)
    pipeline.save_pretrained(tmp_path / 'folder')
    path = tmp_path / 'model.safetensors'
    FILES[name](pipeline, objective).save(
        path, dtype=torch.float32, title='a title', objective=objective, resolution=64
    )
    header, names = header_of(path)
    assert (header['modelspec.architecture'], header.get('modelspec.prediction_type')) == (architecture, prediction)
    assert (header['modelspec.title'], header['modelspec.resolution']) == ('a title', '64x64')
    assert not names & {'v_pred', 'ztsnr'}
    loaded = type(pipeline).from_single_file(
        str(path), config=str(tmp_path / 'folder'), local_files_only=True, low_cpu_mem_usage=False
    )
    parts = {key: part for key, part in pipeline.components.items() if isinstance(part, nn.Module)}
    for key, part in parts.items():
        assert equal(loaded.components[key].state_dict(), part.state_dict()), key


def test_v_prediction_is_marked_in_half_precision_and_other_schedules_are_warned_of(tmp_path, caplog):
    objective = Objective(prediction_type='v_prediction', zero_terminal_snr=True)
    path = tmp_path / 'model.safetensors'
    content = sdxl_file(pipeline_of('sdxl', objective), objective)
    assert 'does not record' not in caplog.text
    content.save(path, dtype=torch.float16, title='t', objective=objective, resolution=64)
    header, names = header_of(path)
    assert header['modelspec.prediction_type'] == 'v' and {'v_pred', 'ztsnr'} <= names
    with safe_open(path, framework='pt') as opened:
        assert opened.get_tensor('model.diffusion_model.out.2.weight').dtype == torch.float16
    objective = Objective(beta_schedule='cosine', prediction_type='sample')
    sd_file(pipeline_of('sd2', objective), objective)
    unrecorded = 'beta_schedule cosine, prediction_type sample'
    assert f'trained with {unrecorded}, which a single file does not record' in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        content = sd3_file(pipeline_of('sd3', FLOW), replace(FLOW, snr_shift=1.5))
        sd3_file(pipeline_of('sd3', FLOW), objective)
    shift, path_of_diffusion = caplog.messages
    assert 'snr_shift 1.5; programs sample single files of Stable Diffusion 3 with shift 3' in shift
    assert 'trained with path diffusion and prediction_type sample, but programs sample every' in path_of_diffusion
    content.save(path, dtype=torch.float32, title='t', objective=FLOW, resolution=64)
    header, names = header_of(path)
    assert 'modelspec.prediction_type' not in header and len(names) == len(content.tensors), (
        "with T5's shared embedding"
    )


def test_text_encoder_of_stable_diffusion_2_gets_its_unused_layer_back(caplog):
    objective = Objective(prediction_type='v_prediction')
    pipeline = pipeline_of('sd2', objective)
    pipeline.text_encoder = CLIPTextModel(clip_config(OPEN_CLIP, hidden_size=32, num_hidden_layers=23))
    content = sd_file(pipeline, objective)
    layers = {int(name.split('.')[4]) for name in content.tensors if '.resblocks.' in name}
    assert (layers, content.architecture) == ({*range(24)}, 'stable-diffusion-v2-768-v')
    (message,) = caplog.messages
    assert 'does not tell every program that the model predicts v; choose v-prediction in the program' in message


def test_other_scale_of_latents_is_folded_into_the_vae():
    """A program that applies its own scale gets the latents that the model was trained on, and the same images."""
    torch.manual_seed(0)
    vae = vae_of(latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[0.5, 0.4, 0.6, 0.3])
    mean, std = (each[:, None, None] for each in latent_statistics(vae))
    adapted = with_latent_scale(vae, 1.5, 0.25)
    pixels = torch.rand(2, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        (ours, variance), (theirs, adapted_variance) = (moments_of(each, pixels).chunk(2, 1) for each in (vae, adapted))
        latents = (ours - mean) / std
        torch.testing.assert_close((theirs - 0.25) * 1.5, latents, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close((0.5 * adapted_variance).exp() * 1.5, (0.5 * variance).exp() / std)
        images = decode_latents(adapted, latents / 1.5 + 0.25)
        torch.testing.assert_close(images, decode_latents(vae, latents * std + mean), rtol=1e-4, atol=1e-5)
    same = vae_of()
    assert with_latent_scale(same, 0.18215) is same
    assert with_latent_scale(vae_of(shift_factor=0.1), 0.18215).config['shift_factor'] == 0
    for convolution in ('use_quant_conv', 'use_post_quant_conv'):
        with pytest.raises(UserError, match=r'by scale 1\.5305 and shift 0\.0609, but this VAE has other statistics'):
            with_latent_scale(vae_of(**{convolution: False}), 1.5305, 0.0609)


def test_projection_of_the_first_encoder_is_folded_into_the_transformer():
    """Programs take this encoder's pooled text before its projection."""
    pipeline = pipeline_of('sd3', FLOW)
    projection = pipeline.text_encoder.text_projection.weight
    nn.init.normal_(projection)
    weight = sd3_file(pipeline, FLOW).tensors['model.diffusion_model.y_embedder.mlp.0.weight']
    pooled, rest = torch.randn(2, 32), torch.randn(2, 64)
    expected = pipeline.transformer.time_text_embed.text_embedder.linear_1.weight
    projected = torch.cat([pooled @ projection.T, rest], dim=1) @ expected.T
    torch.testing.assert_close(torch.cat([pooled, rest], dim=1) @ weight.T, projected, rtol=1e-4, atol=1e-4)
    pipeline.text_encoder = CLIPTextModelWithProjection(clip_config(CLIP, projection_dim=8))
    with pytest.raises(UserError, match=r'projects its 32 channels to 8, which a single file cannot represent'):
        sd3_file(pipeline, FLOW)


def test_families_without_a_layout_and_other_encoders_are_refused():
    with pytest.raises(UserError, match=r'--out: no program reads a PRXTransformer2DModel from a single file; give a'):
        PRX().single_file(SimpleNamespace(denoiser=type('PRXTransformer2DModel', (), {})()))
    pipeline = pipeline_of('sd2', Objective())
    pipeline.text_encoder = T5EncoderModel(T5Config(vocab_size=8, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1))
    with pytest.raises(UserError, match=r'a single file has a CLIP text encoder, but this model has a T5EncoderModel'):
        sd_file(pipeline, Objective())
