"""Tuning advice from a profile: possible speedups, each with an upper bound on the saved fraction of step time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

KINDS: dict[str, tuple[str, ...]] = {
    'communication': ('nccl', 'allreduce', 'all_reduce', 'allgather', 'reduce_scatter', 'gloo'),
    'attention': ('flash', 'fmha', 'scaled_dot_product', 'sdpa', 'cudnn_generated_fort_native_sdpa', 'softmax'),
    'layout changes': ('nchwtonhwc', 'nhwctonchw', 'nchw2nhwc', 'nhwc2nchw', 'transpose_readwrite'),
    'optimizer': ('multi_tensor_apply', 'adam', '_foreach', 'fusedoptimizer', 'lerp', 'addcdiv', 'addcmul'),
    'compiled kernels': ('triton_', 'cpp_fused', 'compiledfunction', 'torch-compiled'),
    'convolutions': ('conv', 'wgrad', 'dgrad', 'fprop', 'implicit_gemm'),
    'matrix products': ('gemm', 'gemv', 'cutlass', 'nvjet', 'cublas', 'aten::mm', 'aten::bmm', 'aten::addmm', 'linear'),
    'norms': ('norm', 'moments'),
    'copies': ('memcpy', 'memset', 'copy', 'clone', 'contiguous', 'aten::cat', 'catarray', 'fill', 'zero_'),
    'activations and sums': ('silu', 'gelu', 'elementwise', 'aten::add', 'aten::mul', 'aten::sum', 'reduce_kernel'),
}
"""Kinds of work, each with substrings of the names of its kernels and operators; the first match decides the kind."""


class Kernel(NamedTuple):
    """Seconds and calls per step of a GPU kernel, or of an operator if training runs on the CPU."""

    name: str
    seconds: float
    calls: int


class Opportunity(NamedTuple):
    """Possible speedup of training: the settings to try and the maximum gain."""

    share: float
    """Upper bound on the fraction of step time that can be saved."""
    text: str


@dataclass(frozen=True)
class ProfileMeasurements:
    """Measurements of a profiled training run, the basis of tuning advice.

    Attributes:
        shares: Fraction of step time in each stage.
        step_seconds: Seconds per step without the profiler.
        kernels: GPU kernels in a step, or operators if training runs on the CPU.
        waits: Number of device synchronizations per step by source line, excluding those in Composer.
        microbatches: Microbatches per step on one device.
        off: Names of the `speed` settings that are disabled.
    """

    shares: Mapping[str, float]
    step_seconds: float
    kernels: Sequence[Kernel] = ()
    waits: Mapping[str, float] = field(default_factory=dict)
    on_gpu: bool = False
    precision: str = 'fp32'
    microbatches: int = 1
    off: Sequence[str] = ()

    def in_stages(self, *stages: str) -> float:
        return sum(self.shares.get(stage, 0.0) for stage in stages)

    def in_kernels(self, *kinds: str) -> float:
        return sum(each.seconds for each in self.kernels if kind_of(each.name) in kinds) / self.step_seconds

    @property
    def in_float32_norms(self) -> float:
        wide = [
            each
            for each in self.kernels
            if kind_of(each.name) == 'norms'
            and 'float' in each.name  # names of 16-bit norms also contain `float`, so the next line excludes them
            and not any(dtype in each.name for dtype in ('BFloat16', 'Half'))
        ]
        return sum(each.seconds for each in wide) / self.step_seconds

    @property
    def busy(self) -> float:
        return min(1.0, sum(each.seconds for each in self.kernels) / self.step_seconds)

    def turn_on(self, *parts: str) -> list[str]:
        """Return overrides that enable the given `speed` settings if they are disabled, such as speed.compile=true."""
        return [f'speed.{part}=true' for part in parts if part in self.off]


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), 'others')


def seconds_by_kind(kernels: Sequence[Kernel]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for kernel in kernels:
        kind = kind_of(kernel.name)
        seconds[kind] = seconds.get(kind, 0.0) + kernel.seconds
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def largest_opportunities(measured: ProfileMeasurements, count: int = 3) -> list[Opportunity]:
    """Return the `count` largest speedups, in descending order, without those that save less than 1% of a step."""
    found = [each for each in opportunities(measured) if each.share >= 0.01]
    return sorted(found, key=lambda each: -each.share)[:count]


def opportunities(measured: ProfileMeasurements) -> list[Opportunity]:
    """Return all speedups that this module knows; `share` is 0 for those that do not apply to this run."""
    # The thresholds are estimates that have not been verified on a GPU yet. A setting that removes work saves all of
    # its time; assume that a setting that only makes work faster saves half of its time.
    m, on_gpu, off, microbatches = measured, measured.on_gpu, measured.off, measured.microbatches
    update, logging, outside = m.in_stages('optimizer', 'ema'), m.in_stages('logging'), m.in_stages('other', 'h2d')
    slow_update = update / 2 if update >= 0.05 else 0.0
    unfused = on_gpu and 'fused_optimizer' in off
    idle = 1 - m.busy if on_gpu and m.kernels else 0.0
    starved = idle >= 0.1 and m.in_stages('encode', 'forward', 'backward') >= 0.5
    graphs = 'set speed.cuda_graphs=true to launch each block at once, or ' if 'cuda_graphs' in off else ''
    fewer_kernels = graphs + ('set speed.compile=true to launch fewer kernels, or ' if 'compile' in off else '')
    larger = 'increase device_train_microbatch_size' if microbatches > 1 else 'use a larger batch per device'
    reduce_once = 'speed.reduce_once=true, ' if 'reduce_once' in off and microbatches > 1 else ''
    norms = ' or '.join(m.turn_on('compile', 'low_precision_norms')) or 'compiling the blocks that contain them'
    layouts = ' and '.join(m.turn_on('channels_last', 'compile')) or 'finding the operations that need it in the trace'
    return [
        Opportunity(
            m.in_stages('data_wait'),
            'training waits for the loader: try more loader.num_workers, shards on a local disk (loader.cache_folder), '
            'smaller images in the shards, or precomputed latents (task=precompute)',
        ),
        Opportunity(
            m.in_stages('encode'),
            'frozen encoders run in every step: task=precompute stores image latents, which take most of this time; '
            'captions can still be encoded and dropped online',
        ),
        Opportunity(
            slow_update if unfused else 0.0, 'the optimizer runs many small kernels: try speed.fused_optimizer=true'
        ),
        Opportunity(
            slow_update if on_gpu and not unfused else 0.0,
            'optimizer and EMA updates take long because each device has few samples per step: try fewer devices or a '
            'larger global_batch, or update the EMA less often (algorithms.ema.update_interval)',
        ),
        Opportunity(
            slow_update if not on_gpu else 0.0,
            'optimizer and EMA updates take long because a step has few samples: try a larger batch',
        ),
        Opportunity(
            idle - m.in_stages('data_wait', 'checkpoint', 'evaluation') if starved else 0.0,
            f'the GPU is busy for {100 * m.busy:.0f}% of the time and waits for the host to launch kernels: '
            f'{fewer_kernels}{larger}',
        ),
        Opportunity(
            m.in_float32_norms / 2 if on_gpu and m.precision in ('amp_bf16', 'amp_fp16') else 0.0,
            f'norms compute in float32: try {norms}',
        ),
        Opportunity(
            m.in_kernels('layout changes') if on_gpu else 0.0,
            'tensors are converted between channels-first and channels-last layouts for convolutions and GroupNorm, '
            f'which supports only channels-first unless it is compiled: try {layouts}',
        ),
        Opportunity(
            m.in_kernels('norms', 'activations and sums', 'copies') / 2 if on_gpu and 'compile' in off else 0.0,
            'norms, activations, sums and copies are limited by memory bandwidth: fuse them with speed.compile=true',
        ),
        Opportunity(
            m.in_kernels('convolutions', 'matrix products', 'attention') / 2
            if on_gpu and m.precision == 'fp32'
            else 0.0,
            'matrix products and convolutions run in float32: try trainer.precision=amp_bf16',
        ),
        Opportunity(
            max(0.01, idle / 2) if m.waits else 0.0,
            f'the host waits for the device at {", ".join(list(m.waits)[:3])}: keep these values on the device',
        ),
        Opportunity(
            logging if logging > 0.02 else 0.0, 'callbacks and loggers take long: remove some, or log less often'
        ),
        Opportunity(
            m.in_kernels('communication'),
            f'devices exchange weights and gradients: try {reduce_once}parallelism.reshard_after_forward=false, or '
            'parallelism.strategy=ddp if it fits in memory',
        ),
        Opportunity(
            outside if outside > 0.1 else 0.0, 'much of the time is outside of all stages: look for it in the trace'
        ),
    ]
