"""`diffusion profile`: its output files, and the advice derived from measurements."""

import gzip
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import output_of, refusal
from golden import check_golden

from diffusion.cli import main
from diffusion.config.load import load
from diffusion.config.recipe import ParallelismConfig
from diffusion.profiling import advice
from diffusion.profiling.advice import Kernel, ProfileMeasurements, largest_opportunities
from diffusion.profiling.breakdown import Breakdown, BreakdownReport
from diffusion.profiling.device_syncs import Site
from diffusion.profiling.profile import (
    Phases,
    can_use_graphs,
    for_profiling,
    measured_by,
    microbatches_of,
    profile_table,
    summary,
)
from diffusion.training import components
from diffusion.training.train import CHECKPOINTER_KEYWORDS

GOOD = ProfileMeasurements(
    shares={'forward': 0.3, 'backward': 0.62, 'optimizer': 0.04, 'data_wait': 0.004, 'logging': 0.01, 'other': 0.026},
    step_seconds=0.1,
    kernels=(Kernel('sm90_xmma_fprop_implicit_gemm_bf16', 0.098, 100),),
    on_gpu=True,
    precision='amp_bf16',
)


def with_share(**shares: float) -> ProfileMeasurements:
    return replace(GOOD, shares={**GOOD.shares, **shares})


def with_kernel(name: str, share: float, **more: object) -> ProfileMeasurements:
    kernels = (Kernel('sm90_xmma_fprop_implicit_gemm_bf16', 0.098 - share / 10, 100), Kernel(name, share / 10, 5))
    return replace(GOOD, kernels=kernels, **more)


@pytest.mark.parametrize(
    ('measured', 'share', 'setting'),
    [
        (with_share(optimizer=0.1, ema=0.1), 0.1, 'update_interval'),
        (replace(GOOD, kernels=(Kernel('gemm', 0.05, 9),), off=['compile']), 0.496, 'speed.compile=true'),
        (replace(GOOD, kernels=(Kernel('gemm', 0.05, 9),), off=['cuda_graphs']), 0.496, 'speed.cuda_graphs=true'),
        (with_kernel('RowwiseMomentsCUDAKernel<float>', 0.2, off=['low_precision_norms']), 0.1, 'low_precision_norms'),
        (with_kernel('void cudnn::engines::nchwToNhwcKernel<bf16>', 0.1, off=['channels_last']), 0.1, 'channels_last'),
    ],
)
def test_advice_gives_the_possible_gain_and_the_setting(measured, share, setting):
    first = largest_opportunities(measured, count=1)[0]
    assert first.share == pytest.approx(share, abs=1e-9)
    assert setting in first.text
    assert {*re.findall(r'speed\.(\w+)', first.text)} <= {*measured.off}, 'settings that are not on already'


def test_no_advice_for_a_well_tuned_run():
    assert largest_opportunities(with_share(optimizer=0.0499, logging=0.02, other=0.1, data_wait=0.0099)) == []
    assert largest_opportunities(with_kernel('vectorized_elementwise_kernel<silu, float>', 0.2)) == []


@pytest.mark.parametrize(('precision', 'dtype'), [('amp_bf16', 'BFloat16'), ('amp_fp16', 'Half')])
def test_low_precision_norms_do_not_count_as_float32(precision, dtype):
    measured = with_kernel(f'RowwiseMomentsCUDAKernel<c10::{dtype}, float>', 0.2, precision=precision)
    assert 'float32' not in str(largest_opportunities(measured))


def event(name: str, milliseconds: float, count: int, **more: Any) -> SimpleNamespace:
    """Return a record of PyTorch's profiler, of a GPU kernel that took some time in two batches."""
    record = {'self_device_time_total': 1e3 * milliseconds, 'self_cpu_time_total': 0, 'is_user_annotation': False}
    return SimpleNamespace(key=name, count=count, **{'device_type': SimpleNamespace(name='CUDA'), **record, **more})


def test_files_of_a_profile_are_as_reviewed(write_recipe, monkeypatch):
    """With kernels of half a step on a GPU, little of it in a stage that can be removed, and waits for the device."""
    events = [
        event('sm90_xmma_fprop_implicit_gemm_bf16', 40, 2),
        event('void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16>', 20, 7),
        event('RowwiseMomentsCUDAKernel<float>', 36, 1),
        event('ncclDevKernel_AllGather_RING_LL', 4, 6),
        event('aten::linear', 500, 1, device_type=SimpleNamespace(name='CPU')),
        event('forward', 500, 1, is_user_annotation=True),
        event('Optimizer.step#AdamW.step', 500, 1),
        *(event(f'vectorized_elementwise_kernel<{number:0100}>', 0.002 * number, 3) for number in range(100)),
    ]
    shares = {'forward': 0.3, 'backward': 0.3, 'encode': 0.2, 'data_wait': 0.125, 'optimizer': 0.075, 'other': 0.0}
    phases: Any = SimpleNamespace(
        report=BreakdownReport(2, 1280, 2, 0.1, 0.25, 4e12, 1e13, 3.0, shares),
        profiler=SimpleNamespace(key_averages=lambda: events),
        batches=2,
        waits=Counter({Site('composer/trainer.py', 7, 'fit'): 2, Site('my/callback.py', 3, 'batch_end'): 5}),
    )
    monkeypatch.setattr(components, 'on_gpu', lambda trainer: True)
    recipe = load(write_recipe(speed={'preset': 'none'}, device_train_microbatch_size=4))
    measured = measured_by(phases, recipe)
    first = largest_opportunities(measured)
    content = summary(phases, measured, first)
    assert len(content['kernels']) == 100 and content.pop('torch') == torch.__version__
    files = {
        'profile.md': profile_table('run', phases, measured, first, Path('found/trace.json.gz')),
        'profile.json': json.dumps(content | {'kernels': content['kernels'][:5]}, indent=1),
        'nothing.md': profile_table('run', phases, replace(measured, kernels=()), [], Path('trace.json.gz')),
    }
    others = replace(measured, on_gpu=False, microbatches=1)
    for name, each in {'gpu': measured, 'fp32': replace(measured, precision='fp32', off=()), 'cpu': others}.items():
        files[f'advice-{name}.txt'] = ''.join(
            f'{found.share:.6f} {found.text}\n' for found in advice.opportunities(each)
        )
    check_golden(Path(__file__).parent / 'golden', files)


def test_breakdown_profiler_and_waits_are_measured_one_after_another(monkeypatch):
    phases, events = Phases(Breakdown(window=3, skip=5, sampled=3), batches=3, on_gpu=False), []
    note: Any = lambda what: lambda *_: events.append((what, batch))  # noqa: E731
    waits = type('Waits', (), {'__enter__': note('watch'), '__exit__': note('end')})
    monkeypatch.setattr('diffusion.profiling.profile.find_waits', waits)
    phases.profiler = SimpleNamespace(start=note('start'), stop=note('stop'))  # type: ignore[assignment]
    for batch in range(1, phases.length + 1):
        timestamp = SimpleNamespace(batch=SimpleNamespace(value=batch))
        phases.batch_end(SimpleNamespace(timestamp=timestamp), None)  # type: ignore[arg-type]
    assert events == [('start', 8), ('stop', 11), ('watch', 11), ('end', 13)]
    assert phases.breakdown.window > phases.length, 'no second report'


def test_profiled_batch_has_at_most_four_microbatches(tmp_path, write_recipe):
    recipe = load(write_recipe())
    for batch, microbatch, expected in ((8, None, 1), (8, 8, 1), (8, 4, 2), (2048, 16, 4)):
        requested = replace(recipe, global_batch=batch, device_train_microbatch_size=microbatch)
        profiled = for_profiling(requested, tmp_path, batches=3)
        assert profiled.global_batch == min(batch, 64)
        trainer = recipe.trainer | {'max_duration': '3ba', 'save_folder': None, 'progress_bar': False}
        assert profiled.trainer == {key: value for key, value in trainer.items() if key not in CHECKPOINTER_KEYWORDS}
        assert microbatches_of(profiled.global_batch, profiled.device_train_microbatch_size) == expected


def test_graphs_are_advised_only_where_weights_stay_in_place():
    assert can_use_graphs(ParallelismConfig('ddp'))
    assert not can_use_graphs(ParallelismConfig('fsdp2'))
    assert not can_use_graphs(ParallelismConfig('ddp', activation_checkpointing=True))


@pytest.mark.parametrize(
    ('name', 'kind'),
    [
        ('void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>', 'attention'),
        ('void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>', 'matrix products'),
        ('triton_red_fused_native_group_norm_silu_3', 'compiled kernels'),
        ('void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>', 'optimizer'),
        ('Memcpy HtoD (Pinned -> Device)', 'copies'),
        ('something else', 'others'),
    ],
)
def test_kind_of_kernel_follows_from_its_name(name, kind):
    assert advice.kind_of(name) == kind
    assert advice.seconds_by_kind([Kernel(name, 2.0, 1), Kernel(name, 1.0, 1)]) == {kind: 3.0}


def test_profile_with_synthetic_data_writes_its_files_and_nothing_to_runs(tmp_path, write_recipe, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    streams = {'small': {'remote': '???', 'local': 'nowhere', 'resolution': 32}}
    path = str(write_recipe(callbacks={'loss_guard': None}, global_batch=2, streams=streams))
    text = output_of(capsys, 'profile', path, '--batches', '2', '--warmup', '1', '--synthetic', '--out', 'found')
    assert text.startswith('# run: ')
    for words in ('| backward |', '| convolutions |', 'Largest opportunities:', 'composer/trainer/trainer.py'):
        assert words in text
    assert (tmp_path / 'found' / 'profile.md').read_text() in text
    summary = json.loads((tmp_path / 'found' / 'profile.json').read_text())
    shares = {name: value for name, value in summary['metrics'].items() if name.startswith('time_share/')}
    assert sum(shares.values()) == pytest.approx(1)
    first, step = summary['kernels'][0], summary['metrics']['throughput/step_seconds']
    assert 0 < first['seconds'] < 10 * step
    assert 'the host waits for the device at composer/' not in text
    with gzip.open(tmp_path / 'found' / 'trace.json.gz') as file:
        events = json.load(file)['traceEvents']
    assert any(event.get('name') == 'aten::native_group_norm' for event in events)
    assert not (tmp_path / 'runs').exists()
    assert not list(tmp_path.rglob('state.pt'))
    [index] = (tmp_path / 'found' / 'data' / 'small').rglob('index.json')
    assert sum(shard['samples'] for shard in json.loads(index.read_text())['shards']) == 64


def test_profile_errors_name_the_setting(write_recipe, capsys):
    path = str(write_recipe())
    error = refusal(capsys, 'profile', path, 'dataset.name=latents', '--synthetic')
    assert 'dataset.name: latents has no synthetic data' in error
    error = refusal(capsys, 'profile', path, 'streams.small.local=gone')
    assert 'has no index.json' in error and '--synthetic' in error
    with pytest.raises(SystemExit, match='2'):
        main(['profile', path, '--synthetic', '--batches', '0'])
