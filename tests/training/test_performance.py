"""Parts of `speed` compared with the plain model: losses, gradients, parameter names, and each part's failure modes."""

import logging
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor
from diffusers.models.resnet import ResnetBlock2D
from ranks import read_losses
from torch import nn

from diffusion.callbacks.loss_guard import record_microbatch
from diffusion.config.load import load
from diffusion.config.recipe import SPEED_PARTS, SpeedConfig, effective_parts
from diffusion.data.cuda_prefetch import prefetch_one
from diffusion.models import batch_keys
from diffusion.models.activation_memory import blocks_of
from diffusion.models.host_copy import HostCopy
from diffusion.models.latent_diffusion import FIRST_BATCH, LatentDiffusion
from diffusion.models.vae import encoder_blocks
from diffusion.profiling.device_syncs import find_waits
from diffusion.training import performance
from diffusion.training.components import build_optimizer
from diffusion.training.performance import apply_speed, keep_layout, set_backends
from diffusion.training.train import build_trainer, train

OF_PRESET = tuple(name for name in SPEED_PARTS if name != 'cuda_graphs')
"""Settings that the preset turns on; CUDA graphs need memory, so a recipe asks for them."""
NOTHING = effective_parts(SpeedConfig(preset='none'), on_gpu=False)
HALF = 2.0**-8
"""Relative rounding error of bfloat16."""


def backends() -> list[bool | str]:
    """Return the settings: TF32 in matrix products, TF32 in convolutions, and cuDNN's benchmark mode."""
    cudnn = torch.backends.cudnn
    return [torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark]


@pytest.fixture(autouse=True)
def _fast_compiler_and_restored_settings(request, monkeypatch):
    """Compile without Inductor, which takes minutes for a model on a CPU: tracing and autograd are tested."""
    if 'cuda' not in request.node.name:
        monkeypatch.setattr(performance, 'BACKEND', 'aot_eager')
    monkeypatch.setattr(logging.getLogger('torch.__trace'), 'disabled', True)  # pytest would capture megabytes of it
    names = ('recompile_limit', 'accumulated_recompile_limit', 'optimize_ddp', 'specialize_float')
    config: Any = torch._dynamo.config
    before, (products, convolutions, benchmark) = {name: getattr(config, name) for name in names}, backends()
    yield
    torch._dynamo.reset()
    for name, value in before.items():
        setattr(config, name, value)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products, convolutions
    torch.backends.cudnn.benchmark = benchmark


def with_parts(*parts: str) -> SpeedConfig:
    return replace(NOTHING, **dict.fromkeys(parts, True))


def batch_of(model: LatentDiffusion, *, side: int = 32, size: int = 2, first: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(first)
    return {
        batch_keys.IMAGE: torch.randint(0, 256, (size, 3, side, side), dtype=torch.uint8, generator=generator),
        batch_keys.INPUT_IDS: model._tokens([f'image {i}' for i in range(size)]),
        batch_keys.SAMPLE_ID: torch.arange(first, first + size),
        batch_keys.EPOCH: torch.zeros(size, dtype=torch.int64),
        batch_keys.BATCH_INDEX: torch.zeros(size, dtype=torch.int64),
    }


def gradients(model: Any, batch: dict[str, Any], *, half: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with torch.autocast('cpu', torch.bfloat16, enabled=half):
        loss = model.loss(model(batch), batch)
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def largest_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest error of a gradient, relative to its norm plus a hundredth of the mean norm.

    The second term is for gradients that are nearly zero by symmetry.
    """
    assert found.keys() == expected.keys()
    floor = 1e-2 * torch.stack([each.norm() for each in expected.values()]).mean()
    return max(float(((found[name] - each).norm() / (each.norm() + floor)).detach()) for name, each in expected.items())


def overall_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the error of all gradients as one vector, relative to its norm."""
    assert found.keys() == expected.keys()
    differences = torch.stack([(found[name] - each).norm() for name, each in expected.items()])
    return float(differences.norm() / torch.stack([each.norm() for each in expected.values()]).norm())


@pytest.fixture
def float64():
    """Create numbers in float64 during a test."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


SLOW = [pytest.param(part, marks=pytest.mark.slow) for part in ('compile', 'flash_attention', 'inference_mode')]


@pytest.mark.usefixtures('float64')
@pytest.mark.parametrize('part', ['channels_last', *SLOW])
def test_single_part_changes_neither_loss_nor_gradients(make_model, part):
    # Compute in float64: the gradients of biases before a GroupNorm are zero but for rounding, which in float32 depends
    # on the processor and on torch's version.
    # Only a frozen text encoder runs in inference mode.
    model, plain = (make_model(train_text_encoder=part != 'inference_mode').double() for _ in range(2))
    plain.denoiser.set_attn_processor(AttnProcessor())
    model.denoiser.set_attn_processor(AttnProcessor())
    apply_speed(model, with_parts(part))
    batch = batch_of(model)
    loss, found = gradients(model, batch)
    expected_loss, expected = gradients(plain, batch)
    assert loss.dtype == torch.float64
    assert loss == pytest.approx(float(expected_loss), rel=1e-12)
    assert largest_error(found, expected) < 1e-10


@pytest.mark.slow
def test_compiled_block_in_channels_last_and_bfloat16_has_correct_gradients(monkeypatch):
    """Use 4 channels per group, where weight gradients of GroupNorm used to be wrong (pytorch#140913)."""
    torch.manual_seed(0)
    width = 128
    block = ResnetBlock2D(in_channels=width, temb_channels=32)
    embedding = torch.randn(2, 32)
    image, weights = torch.randn(2, width, 8, 8), torch.randn(2, width, 8, 8)

    def run(*, half: bool) -> dict[str, torch.Tensor]:
        block.zero_grad()
        inputs = image.contiguous(memory_format=torch.channels_last).requires_grad_()
        with torch.autocast('cpu', torch.bfloat16, enabled=half):
            result = block(inputs, embedding)
        (result.float() * weights).sum().backward()
        named = {name: weight.grad.clone() for name, weight in block.named_parameters() if weight.grad is not None}
        assert inputs.grad is not None
        return named | {'input': inputs.grad, 'output': result.detach().float()}

    exact, eager = run(half=False), run(half=True)
    block.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    monkeypatch.setattr(performance, 'BACKEND', 'inductor')
    performance._compile_forward(block, with_gradients=True)
    assert largest_error(run(half=True), exact) < max(1.5 * largest_error(eager, exact), 4 * HALF)


@pytest.mark.slow
def test_compiled_blocks_keep_names_and_compile_once_per_shape(make_model):
    model = make_model()
    names = list(model.state_dict())
    apply_speed(model, with_parts('compile', 'inference_mode'), shapes=2)
    counts = torch._dynamo.utils.counters
    counts.clear()
    gradients(model, batch_of(model))
    first = counts['stats']['unique_graphs']
    gradients(model, batch_of(model, first=5))
    assert counts['stats']['unique_graphs'] == first > 0
    gradients(model, batch_of(model, side=64))
    second = counts['stats']['unique_graphs']
    assert second > first
    model.generate(['a cat'], num_inference_steps=2, size=(32, 32))
    model.eval_forward(batch_of(model, side=64))
    gradients(model, batch_of(model))
    assert counts['stats']['unique_graphs'] == second, 'sampling, evaluation and known shapes compile nothing'
    assert not counts['graph_break']
    assert list(model.state_dict()) == names
    assert torch._dynamo.config.recompile_limit >= 2 * len(blocks_of(model.denoiser))


def test_blocks_are_compiled_for_each_shape_and_only_with_gradients(make_model, monkeypatch):
    found: list[Mock] = []
    monkeypatch.setattr(torch, 'compile', lambda do, **on: found.append(Mock(side_effect=do, **on)) or found[-1])
    model = make_model()
    apply_speed(model, with_parts('compile'), shapes=40)
    trained, others, config = len(blocks_of(model.denoiser)), len(encoder_blocks(model.vae)), torch._dynamo.config
    assert [each.dynamic for each in found] == [False] * (trained + others) + [True], 'one graph of random numbers'
    assert config.recompile_limit == config.accumulated_recompile_limit == 4 * 40 * (trained + others)
    assert config.specialize_float and not config.optimize_ddp
    gradients(model, batch_of(model))
    with torch.no_grad():
        model(batch_of(model))
    assert [each.call_count for each in found[:-1]] == [1] * trained + [2] * others


def test_channels_last_keeps_weights_contiguous_under_fsdp(make_model):
    sharded, replicated = make_model(), make_model()
    apply_speed(sharded, with_parts('channels_last'), strategy='fsdp2')
    apply_speed(replicated, with_parts('channels_last'), strategy='ddp')
    assert all(weight.is_contiguous() for weight in sharded.denoiser.parameters())
    assert not replicated.denoiser.conv_in.weight.is_contiguous()
    for model in (sharded, replicated):
        seen = []
        model.denoiser.conv_in.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        gradients(model, batch_of(model))
        assert seen[0].is_contiguous(memory_format=torch.channels_last)


def test_loaded_moments_get_the_strides_of_channels_last_weights():
    torch.manual_seed(0)
    saved = torch.optim.AdamW([nn.Parameter(torch.randn(4, 3, 3, 3))])
    saved.param_groups[0]['params'][0].grad = torch.randn(4, 3, 3, 3)
    saved.step()
    moments = saved.state_dict()['state'][0]
    weight = nn.Parameter(torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW([weight], fused=True)
    keep_layout(optimizer)
    optimizer.load_state_dict(saved.state_dict())
    state = optimizer.state[weight]
    for name in ('exp_avg', 'exp_avg_sq'):
        assert state[name].stride() == weight.stride()
        torch.testing.assert_close(state[name], moments[name])
    assert optimizer.param_groups[0]['fused'] is True
    assert state['step'] == 1


def test_preset_turns_all_parts_on_on_a_gpu_and_the_fused_optimizer_on_a_cpu():
    cpu, gpu = (effective_parts(SpeedConfig(), on_gpu=on_gpu, strategy='fsdp2') for on_gpu in (False, True))
    assert [part for part in OF_PRESET if getattr(cpu, part)] == ['fused_optimizer']
    assert not any(getattr(NOTHING, part) for part in OF_PRESET)
    assert all(getattr(gpu, part) for part in OF_PRESET)
    assert not effective_parts(SpeedConfig(), on_gpu=True, strategy='ddp').reduce_once


@pytest.mark.parametrize('part', OF_PRESET)
def test_each_part_can_be_turned_off_and_on_separately(part):
    off = effective_parts(replace(SpeedConfig(), **{part: False}), on_gpu=True, strategy='fsdp2')
    assert [name for name in OF_PRESET if not getattr(off, name)] == [part]
    on = effective_parts(replace(SpeedConfig(preset='none'), **{part: True}), on_gpu=True, strategy='fsdp2')
    assert [name for name in OF_PRESET if getattr(on, name)] == [part]


@pytest.mark.parametrize(
    ('optimizer', 'fused'),
    [
        ({'name': 'adamw'}, True),
        ({'name': 'adamw', 'fused': False}, False),
        pytest.param({'name': 'adamw', 'foreach': True}, None, marks=pytest.mark.slow),
        ({'name': 'adamw', 'capturable': False, 'differentiable': False}, True),
        ({'name': 'decoupled_adamw'}, None),
    ],
)
def test_optimizer_is_fused_if_possible_unless_the_recipe_decides(write_recipe, make_model, optimizer, fused):
    recipe = load(write_recipe(optimizer={'lr': 1e-3, **optimizer}, speed={'fused_optimizer': True}))
    assert build_optimizer(recipe, make_model()).defaults.get('fused') == fused


def test_backends_are_set_on_a_gpu_only():
    on = with_parts('tf32', 'conv_benchmark')
    set_backends(NOTHING, on_gpu=True)
    assert backends() == [False, False, False]
    set_backends(on, on_gpu=False)
    assert backends() == [False, False, False]
    set_backends(on, on_gpu=True, deterministic=True)
    assert backends() == [True, True, False]
    set_backends(on, on_gpu=True)
    assert backends() == [True, True, True]


def test_parts_without_effect_are_named(write_recipe, caplog):
    path = write_recipe(speed={'cuda_graphs': True, 'copy_ahead': True, 'channels_last': True}, small=True)
    build_trainer(load(path)).close()
    found = [line for line in caplog.messages if 'has no effect' in line]
    assert found == [f'speed.{part}: has no effect without a GPU' for part in ('cuda_graphs', 'copy_ahead')]


def test_copies_run_one_batch_ahead_and_errors_follow_earlier_batches():
    events: list[str] = []

    def note(what: str, item: int) -> int:
        events.append(f'{what} {item}')
        return item

    def source() -> Any:
        yield from (note('read', index) for index in range(3))
        raise RuntimeError('a shard is missing')

    received, steps = [], (partial(note, 'copy'), partial(note, 'use'))
    with pytest.raises(RuntimeError, match='a shard is missing'):
        received.extend(prefetch_one(source(), *steps))
    assert received == [0, 1, 2], 'batches before the error are not lost'
    assert events == ['read 0', 'copy 0', 'read 1', 'copy 1', 'use 0', 'read 2', 'copy 2', 'use 1', 'use 2']
    assert list(prefetch_one(iter([]), *steps)) == []


WAITS = {
    'composer/trainer/trainer.py (_iter_dataloader)': 'flag that a rank has no more data',
    'composer/trainer/trainer.py (_train_microbatches)': 'batch size over all ranks',
    'composer/trainer/trainer.py (<lambda>)': "loss, as the result of the optimizer's closure",
    'composer/trainer/trainer.py (<dictcomp>)': 'loss for the loggers',
    'composer/trainer/trainer.py (_train_loop)': 'loss for the loggers, from Python 3.12 on',
    'composer/trainer/trainer.py (_accumulate_time_across_ranks)': 'samples, tokens and seconds over all ranks',
}
"""Places where the host waits for the device in every batch, with the values it waits for. All are Composer's, between
the end of the backward pass and the next forward pass; none is executed per microbatch."""
AT_SAVES = {'diffusion/algorithms/finite_weights.py (check_weights)'}
"""Places where the host waits before a checkpoint is saved."""


def test_step_waits_for_the_device_only_where_composer_does(write_recipe):
    names = ('breakdown', 'lr_monitor', 'memory_monitor', 'runtime_estimator', 'loss_guard')
    recipe = write_recipe(
        callbacks=dict.fromkeys(names),
        algorithms={'ema': None, 'gradient_clipping': {'clipping_type': 'norm', 'clipping_threshold': 1.0}},
        scheduler={'name': 'constant_with_warmup', 't_warmup': '3ba'},
        loggers={'metrics_file': None, 'console_lines': None},
        device_train_microbatch_size=2,
        model=load(write_recipe()).model.kwargs | {'name': 'tiny', 'train_text_encoder': False},
    )
    trainer = build_trainer(load(recipe))
    trainer.fit(duration='2ba')
    with find_waits() as found:
        trainer.fit(duration='2ba')
    trainer.close()
    per_batch = {f'{site.file} ({site.function})': count / 2 for site, count in found.items()}
    assert set(per_batch) <= {*WAITS, *AT_SAVES}, {str(site): count for site, count in found.items()}
    assert per_batch['composer/trainer/trainer.py (<lambda>)'] == 1


def test_find_waits_reports_a_copy_that_is_read_before_anything_else_has_waited():
    with find_waits() as found:
        first = HostCopy(torch.arange(3.0))
        assert first.has_arrived and first.read() == [0, 1, 2]
        assert found.total() == 1
        late = HostCopy(torch.arange(3.0))
        float(torch.arange(3.0).sum())
        late.read()
    assert found.total() == 2


def test_step_reads_no_values_from_the_device(make_model):
    """It runs on the meta device, which has no values (and no autocast, so encoders are skipped)."""
    model = make_model(train_text_encoder=False, caption_dropout_mode='zeros').to('meta')
    model._scale_checked = True
    model._captions_checked.add(FIRST_BATCH)
    apply_speed(model, with_parts('channels_last', 'flash_attention'))
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad])
    batch = batch_of(make_model())
    batch |= {batch_keys.LATENT_MOMENTS: torch.randn(2, 8, 4, 4), batch_keys.TEXT_EMBEDS: torch.randn(2, 16, 32)}
    batch = {name: tensor.to('meta') for name, tensor in batch.items() if name != batch_keys.IMAGE}
    loss = model.loss(model(batch), batch)
    loss.backward()
    optimizer.step()
    record_microbatch(loss, batch, model.sample_losses)


@pytest.mark.slow
def test_compiled_run_under_fsdp2_equals_eager_run(write_recipe, tmp_path, alone, pictures):
    sections: dict[str, Any] = {
        'algorithms': {'ema': {'ema_start': '1ba', 'smoothing': 0.5}},
        'callbacks': {'image_grid': {'prompts': ['a disc'], 'every': '2ba', 'num_inference_steps': 2}},
        'eval_streams': {'small': {'local': str(pictures[32]), 'resolution': 32}},
        'parallelism': {'strategy': 'fsdp2', 'checkpoints': 'sharded', 'activation_checkpointing': True},
        'device_train_microbatch_size': 4,
    }
    parts = ('channels_last', 'inference_mode', 'flash_attention', 'compile', 'reduce_once')
    overrides = ['trainer.max_duration=3ba', 'trainer.save_interval=2ba', 'trainer.eval_interval=2ba']
    train(load(write_recipe('eager', **sections), overrides)).close()
    trainer = train(load(write_recipe('fast', **sections, speed=dict.fromkeys(parts, True)), overrides))
    assert not torch._dynamo.utils.counters['graph_break']
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] > 5
    assert not [name for name in trainer.state.model.state_dict() if '_orig_mod' in name]
    trainer.close()
    for name in ('eager', 'fast'):
        train(load(tmp_path / f'{name}.yaml', ['trainer.max_duration=5ba'])).close()
    assert len(read_losses(tmp_path / 'runs' / 'fast')) == 5
    assert read_losses(tmp_path / 'runs' / 'fast') == pytest.approx(read_losses(tmp_path / 'runs' / 'eager'), rel=1e-4)


@pytest.mark.slow
def test_gradients_reduced_once_equal_those_reduced_per_microbatch(write_recipe, ranks, tmp_path):
    """Run two ranks with four microbatches each; clipping reveals gradients that are reduced twice or never."""
    sections: dict[str, Any] = {
        'algorithms': {'gradient_clipping': {'clipping_type': 'norm', 'clipping_threshold': 0.05}},
        'parallelism': {'strategy': 'fsdp2', 'reshard_after_forward': False},
        'device_train_microbatch_size': 1,
        # A large eps makes updates depend on the scale of gradients.
        'optimizer': {'name': 'adamw', 'lr': 1.0e-3, 'eps': 1.0e-2},
    }
    shorter = 'trainer.max_duration=4ba'
    whole = sections | {'parallelism': {}, 'device_train_microbatch_size': None}
    ranks.run(1, write_recipe('whole', **whole), shorter, double=True)
    ranks.run(2, write_recipe('each', **sections), shorter, double=True)
    ranks.run(2, write_recipe('once', **sections, speed={'reduce_once': True}), shorter, double=True)
    whole, each, once = (read_losses(tmp_path / 'runs' / name) for name in ('whole', 'each', 'once'))
    assert once == pytest.approx(each, rel=1e-6) and each == pytest.approx(whole, rel=1e-5)
