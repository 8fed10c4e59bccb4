"""Planned memory per device against the memory that torch allocates."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from golden import check_golden

from diffusion.models.families.sd2 import builder as sd2_builder
from diffusion.models.families.sd2.builder import tiny
from diffusion.planning.gpus import find_gpu
from diffusion.planning.memory import (
    GIB,
    MUON_BATCH_ELEMENTS,
    Setup,
    fits_in_memory,
    largest_microbatch,
    memory_of,
    strategies,
    ways_out,
)
from diffusion.planning.strategy_advice import communication_bytes
from diffusion.training.muon import MAX_BATCH_ELEMENTS
from tests.planning.recipes import A100, DDP, GPUS, PHASES, RESHARDED, SHARDED, YAMLS, phase, write_recipe

EAGER = ['speed.preset=none', 'speed.low_precision_norms=true']
"""Settings under which the reference figures below were measured."""
PHASE1, PHASE2 = (phase(path, EAGER) for path in PHASES)
SD2 = 865_910_724


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_weights_optimizer_gradients_and_averages_are_exact(tmp_path):
    """Compare with the tensors after one AdamW step on a CPU; EMA keeps one more copy of the weights."""
    model = tiny()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    path = write_recipe(tmp_path, algorithms={'ema': {}}, trainer={'max_duration': '8ba', 'precision': 'fp32'})
    memory = memory_of(phase(path), Setup(1, 8, DDP))
    assert memory.weights == bytes_of(parameters)
    assert memory.gradients == bytes_of(parameter.grad for parameter in parameters)
    assert memory.optimizer == bytes_of(states)
    assert memory.averages == bytes_of(parameters)
    assert memory.encoders == 2 * sum(tensor.numel() for tensor in model.vae.parameters())


def test_replicas_reduce_sharding_and_resharding_keeps_only_part_of_the_compute_weights():
    whole, hybrid = (memory_of(PHASE2, Setup(128, 16, replace(SHARDED, replicas=n))) for n in (1, 16))
    assert hybrid.optimizer == pytest.approx(16 * whole.optimizer, abs=16)
    kept, resharded = (memory_of(PHASE1, Setup(128, 16, settings)) for settings in (SHARDED, RESHARDED))
    assert kept.compute_weights == 2 * SD2
    largest, blocks = (PHASE1.model.facts[f'{which}_parameters'] for which in ('largest_block', 'block'))
    assert resharded.compute_weights == 2 * (SD2 - blocks + 2 * largest), 'the current and the prefetched block'
    in_flight = kept.working - memory_of(PHASE1, Setup(128, 16, DDP)).working
    assert in_flight == (2 + 4) * largest, 'a gradient in both precisions'


def test_encoding_together_keeps_the_outputs_of_the_whole_batch():
    together = phase(PHASES[0], [*EAGER, 'speed.encode_batch_size=8'])
    setup = Setup(128, 4, SHARDED)
    assert memory_of(together, setup).encoding == 2 * memory_of(PHASE1, setup).encoding
    for encoding, elements in (('pictures', 2 * 4 * 32 * 32 + 77 * 1024), ('latents', 77 * 1024), ('latents+text', 0)):
        apart, found = (memory_of(replace(work, encoding=encoding), setup) for work in (PHASE1, together))
        assert found.batch - apart.batch == 16 * 4 * elements
    one_microbatch = Setup(128, 16, SHARDED)
    assert memory_of(together, one_microbatch) == memory_of(PHASE1, one_microbatch)


def test_sd2_peak_matches_torch_memory_tracker():
    """Reference: 27.380e9 bytes at the peak, 27.129e9 of them after the forward pass.

    Measured by MemTracker of torch 2.7 in one step of SD2's U-Net: 16 samples of 512 px, autocast to bfloat16 with
    low-precision norms, AdamW. The measurement takes a minute and a half, so the figures are constants here.
    """
    memory = memory_of(PHASE2, Setup(1, 16, DDP))
    denoiser_only = replace(memory, encoders=0, averages=0, batch=0, encoding=0, accumulates=False)
    assert denoiser_only.allocated == pytest.approx(27.380e9, rel=0.02)
    after_forward = denoiser_only.resident + denoiser_only.activations + denoiser_only.compute_weights
    assert after_forward == pytest.approx(27.129e9, rel=0.02)


def test_activation_checkpointing_matches_torch_memory_tracker():
    """Reference: 2.695e9 bytes after the forward pass, measured as above; the largest block's inside comes later."""
    settings = replace(DDP, activation_checkpointing=True)
    work = phase(PHASES[1], [*EAGER, 'parallelism.activation_checkpointing=true'])
    activations = work.model.activations(work.largest_shape, work.precision())
    between = 16 * activations.kept_between + activations.copies_between
    assert between == pytest.approx(2.695e9, rel=0.01)
    memory = memory_of(work, Setup(1, 16, settings))
    assert memory.activations == 16 * (activations.kept_between + activations.kept_inside)
    assert memory.allocated < 0.7 * memory_of(PHASE2, Setup(1, 16, DDP)).allocated


def test_cuda_graphs_hold_gradients_activations_and_what_passes_between_blocks():
    """Reference: inputs and outputs of SD2's blocks at 256 px are 15.1 M elements per sample, with gradients 30.2 M."""
    ddp = ['parallelism.strategy=ddp', 'parallelism.checkpoints=whole']
    works = [phase(overrides=[*ddp, f'speed.cuda_graphs={on}']) for on in ('false', 'true')]
    plain, graphs = (memory_of(work, Setup(1, 16, DDP)) for work in works)
    assert plain.graphs == 0
    assert graphs.graphs - graphs.gradients == pytest.approx(16 * 2 * 30.2e6, rel=0.35)
    assert graphs.graphs - graphs.gradients > 16 * 2 * 30.2e6
    assert graphs.allocated - plain.allocated == graphs.graphs
    assert graphs.resident == plain.resident + graphs.graphs + graphs.activations


def test_step_of_muon_needs_memory_for_one_batch_of_matrices():
    muon = phase(PHASES[1], ['speed.fused_optimizer=true', 'optimizer={name: muon, lr: 1.0e-4}'])
    largest_block, blocks = (muon.model.facts[f'{which}_parameters'] for which in ('largest_block', 'block'))
    assert MUON_BATCH_ELEMENTS == MAX_BATCH_ELEMENTS['cuda'] < largest_block
    assert memory_of(muon, Setup(8, 4, SHARDED)).step == 12 * largest_block
    assert memory_of(muon, Setup(8, 4, DDP)).step == 12 * 8 * largest_block
    assert memory_of(muon, Setup(64, 4, DDP)).step == 12 * blocks


def test_largest_microbatch_fits_and_its_double_does_not():
    gpu = A100
    setup = Setup(8, 16, SHARDED)
    largest = largest_microbatch(PHASE2, setup, gpu)
    assert 256 % largest == 0 and largest < 256
    assert fits_in_memory(memory_of(PHASE2, replace(setup, microbatch=largest)), gpu)
    assert not fits_in_memory(memory_of(PHASE2, replace(setup, microbatch=2 * largest)), gpu)


VARIATIONS = {
    'phase1': [
        'speed.preset=none',
        'speed.encode_batch_size=3',
        'parallelism.mixed_precision=pure',
        'parallelism.mixed_precision=full',
        'parallelism.activation_checkpointing=true',
        'optimizer={name: muon, lr: 1.0e-4}',
        'optimizer.amsgrad=true',
        'trainer.precision=fp32',
        'optimizer.name=decoupled_adamw',
        'model.encoder_dtype=float32',
        'algorithms.post_hoc_ema={}',
        'algorithms={post_hoc_ema: {widths: [0.1, 0.2, 0.25]}, late: {name: ema}}',
    ],
    'speedrun': ['speed.preset=none', 'parallelism.activation_checkpointing=true'],
    'prxpixel_7b': ['speed.preset=none'],
    'lora': ['optimizer={name: muon, lr: 1.0e-4}'],
    'phase1-latents': ['model.posterior=mean', 'precompute.latents=image+text'],
}


def test_memory_and_communication_of_recipes_are_the_reviewed_ones():
    """Figures are in MB, of 16 devices with microbatches of 2 images."""
    texts = {}
    for name in ('phase1', 'speedrun', 'prxpixel_7b', 'lora', 'tiny_vae', 'phase1-latents'):
        rows = []
        for size, *words in ((4,), (2,), *((2, word) for word in VARIATIONS.get(name, ()))):
            work = phase(YAMLS / f'{name}.yaml', ['global_batch=64', *words])
            rows.append(' '.join(['microbatch', str(size), *words]))
            for setup in strategies(Setup(16, size, work.recipe.parallelism), devices_per_node=8):
                memory = memory_of(work, setup)
                values = {**memory.parts(), 'resident': memory.resident, 'allocated': memory.allocated}
                values |= {'reserved': memory.reserved, 'sent': communication_bytes(work, setup)}
                figures = ' '.join(f'{key} {value / 1e6:.7g}' for key, value in values.items() if value)
                rows.append(f'  {setup.label}: {figures}, largest {largest_microbatch(work, setup, A100)}')
        texts[f'{name}.txt'] = '\n'.join(rows) + '\n'
    check_golden(Path(__file__).parent / 'golden' / 'memory', texts)


def test_ways_out_list_settings_that_fit():
    gpu, setup = find_gpu('a10g', GPUS), Setup(8, 64, DDP)
    assert not fits_in_memory(memory_of(PHASE2, setup), gpu)
    suggestions = ways_out(PHASE2, setup, gpu, GPUS)
    assert suggestions[-1] == '--gpu h200'
    sharded = Setup(8, 256, SHARDED)
    suggestions = ways_out(PHASE1, sharded, gpu, GPUS)
    assert 'device_train_microbatch_size=64' in suggestions
    assert any(way.startswith('parallelism.activation_checkpointing=true') for way in suggestions)
    assert fits_in_memory(memory_of(PHASE1, replace(sharded, microbatch=64)), gpu)


def test_ways_out_suggest_sharding_instead_of_ddp_and_may_not_exist():
    suggestions = ways_out(PHASE1, Setup(128, 16, DDP), find_gpu('a10g', GPUS), GPUS)
    assert 'parallelism.strategy=fsdp2 parallelism.reshard_after_forward=false' in suggestions
    tiny_gpu = replace(A100, memory_gib=2.0, name='small')
    assert ways_out(PHASE2, Setup(1, 2048, DDP), tiny_gpu, {'small': tiny_gpu}) == []


def peak_of_steps(denoiser: Any, device: str, *, microbatch: int, size: int) -> int:
    """Run three training steps of a denoiser, and return the peak of allocated bytes in the last one; 0 on a CPU."""
    from diffusion.algorithms.low_precision_norms import (
        LowPrecisionGroupNormLayer,
        LowPrecisionLayerNormLayer,
        replace_norms,
    )

    replace_norms(denoiser, torch.nn.GroupNorm, LowPrecisionGroupNormLayer)
    replace_norms(denoiser, torch.nn.LayerNorm, LowPrecisionLayerNormLayer)
    optimizer = torch.optim.AdamW(denoiser.parameters())
    sample = torch.randn(microbatch, 4, size, size, device=device)
    text = torch.randn(microbatch, 77, denoiser.config.cross_attention_dim, device=device)
    for _ in range(3):
        if device == 'cuda':
            torch.cuda.reset_peak_memory_stats()
        with torch.autocast(device, torch.bfloat16):
            predicted = denoiser(sample, torch.zeros(microbatch, device=device), text, return_dict=False)[0]
            assert predicted.dtype == torch.bfloat16
            loss = (predicted.float() - sample).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() if device == 'cuda' else 0


@pytest.mark.cpu_form
def test_steps_whose_peak_is_measured_run():
    config: dict[str, Any] = {
        'block_out_channels': (32, 64, 64, 64),
        'layers_per_block': 1,
        'cross_attention_dim': 32,
        'attention_head_dim': 1,
    }
    settings: dict[str, Any] = sd2_builder.UNET | config
    assert peak_of_steps(UNet2DConditionModel(**settings).train(), 'cpu', microbatch=1, size=8) == 0


@pytest.mark.gpu
@pytest.mark.parametrize('size', [32, 64])
def test_peak_matches_torch_on_a_gpu(size):
    """Compare SD2's denoiser on one GPU with torch.cuda.max_memory_allocated, within 10%."""
    work, microbatch = (PHASE1 if size == 32 else PHASE2), 16
    before = torch.cuda.memory_allocated()  # of other tests
    denoiser: Any = UNet2DConditionModel(**sd2_builder.UNET).train()
    peak = peak_of_steps(denoiser.to('cuda'), 'cuda', microbatch=microbatch, size=size) - before
    memory = memory_of(work, Setup(1, microbatch, DDP))
    denoiser_only = replace(memory, encoders=0, averages=0, batch=0, encoding=0, accumulates=False)
    assert denoiser_only.allocated == pytest.approx(peak, rel=0.1)
    assert memory.reserved / GIB > denoiser_only.allocated / GIB
