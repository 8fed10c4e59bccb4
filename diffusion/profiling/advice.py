"""What a profile of training says to do next: rules over measured shares, the largest gains first."""

from collections.abc import Callable, Mapping, Sequence
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
"""Kinds of work by what the names of kernels and operators contain; the first that fits counts."""


class Kernel(NamedTuple):
    """A kernel, or an operator where there is no GPU."""

    name: str
    seconds: float
    calls: int


class Opportunity(NamedTuple):
    """What could be gained."""

    share: float
    """Of the step's time, at most."""
    text: str


@dataclass(frozen=True)
class ProfileMeasurements:
    """What a profile has measured.

    Attributes:
        shares: Of the step's time, by stage.
        step_seconds: Without the profiler.
        kernels: Of a step.
        waits: Places where the host waits for the device, and how often in a step; those of Composer left out.
        on_gpu: Whether it was a GPU.
        precision: Of the Trainer.
        microbatches: In a step, on a device.
        off: Parts of `speed` that are off.
    """

    shares: Mapping[str, float]
    step_seconds: float
    kernels: Sequence[Kernel] = ()
    waits: Mapping[str, float] = field(default_factory=dict)
    on_gpu: bool = False
    precision: str = 'fp32'
    microbatches: int = 1
    off: Sequence[str] = ()

    def share_of(self, kind: str) -> float:
        """A kind of kernel's share of the step."""
        return sum(kernel.seconds for kernel in self.kernels if kind_of(kernel.name) == kind) / self.step_seconds

    @property
    def busy(self) -> float:
        """Share of the step in which the device computes."""
        return min(1.0, sum(kernel.seconds for kernel in self.kernels) / self.step_seconds)


def kind_of(name: str) -> str:
    """What kind of work a kernel does, by its name."""
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), 'others')


def by_kind(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Seconds of each kind, the longest first."""
    seconds: dict[str, float] = {}
    for kernel in kernels:
        kind = kind_of(kernel.name)
        seconds[kind] = seconds.get(kind, 0.0) + kernel.seconds
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def largest(measured: ProfileMeasurements, count: int = 3) -> list[Opportunity]:
    """The largest opportunities that the rules find, those under a hundredth of the step left out."""
    found = [opportunity for rule in RULES if (opportunity := rule(measured)) is not None]
    return sorted((each for each in found if each.share >= 0.01), key=lambda each: -each.share)[:count]


def data_is_waited_for(measured: ProfileMeasurements) -> Opportunity | None:
    """The loader is slower than the device."""
    return Opportunity(
        measured.shares.get('data_wait', 0.0),
        'the loader is waited for: more loader.num_workers, shards on a local disk (loader.cache_folder), '
        'smaller pictures in the shards, or latents made once with task=precompute',
    )


def encoders_run(measured: ProfileMeasurements) -> Opportunity | None:
    """Frozen encoders are part of every step."""
    return Opportunity(
        measured.shares.get('encode', 0.0),
        'frozen encoders run in every step: task=precompute stores the latents of pictures, which are most of it, and '
        'leaves captions to be encoded and dropped online',
    )


def optimizer_is_large(measured: ProfileMeasurements) -> Opportunity | None:
    """What comes once a step is spread over few samples."""
    share = measured.shares.get('optimizer', 0.0) + measured.shares.get('ema', 0.0)
    if share < 0.05:
        return None
    if 'fused_optimizer' in measured.off and measured.on_gpu:
        return Opportunity(share / 2, 'the optimizer runs many small kernels: speed.fused_optimizer=true')
    if not measured.on_gpu:
        return Opportunity(share / 2, 'the update and the average take long beside so few samples: a larger batch')
    return Opportunity(
        share / 2,
        'the update and the average, once a step, take long beside so few samples a device: fewer devices for this '
        'global_batch, or a larger one; an average every few batches (algorithms.ema.update_interval)',
    )


def device_idles(measured: ProfileMeasurements) -> Opportunity | None:
    """Kernels are shorter than the host takes to start them."""
    stages = ('encode', 'forward', 'backward')
    computing = sum(measured.shares.get(stage, 0.0) for stage in stages)
    if not measured.on_gpu or not measured.kernels or measured.busy > 0.9 or computing < 0.5:
        return None
    waits = sum(measured.shares.get(stage, 0.0) for stage in ('data_wait', 'checkpoint', 'evaluation'))
    larger = 'a larger device_train_microbatch_size' if measured.microbatches > 1 else 'a larger batch a device'
    compiled = 'speed.compile=true, which starts fewer kernels, or ' if 'compile' in measured.off else ''
    return Opportunity(
        max(0.0, 1 - measured.busy - waits),
        f'the GPU computes in {100 * measured.busy:.0f} % of the time and waits for the host to start kernels: '
        f'{compiled}{larger}',
    )


def norms_are_wide(measured: ProfileMeasurements) -> Opportunity | None:
    """Norms that move float32."""
    if not measured.on_gpu or measured.precision not in ('amp_bf16', 'amp_fp16'):
        return None
    wide = [
        kernel
        for kernel in measured.kernels
        if kind_of(kernel.name) == 'norms'
        and 'float' in kernel.name  # statistics of narrow ones are float, too
        and not any(narrow in kernel.name for narrow in ('BFloat16', 'Half'))
    ]
    share = sum(kernel.seconds for kernel in wide) / measured.step_seconds
    way = ' or '.join(f'speed.{part}=true' for part in ('compile', 'low_precision_norms') if part in measured.off)
    return Opportunity(share / 2, f'norms compute in float32: {way or "compile the blocks they are in"}')


def layouts_change(measured: ProfileMeasurements) -> Opportunity | None:
    """Tensors are turned between channels first and channels last."""
    if not measured.on_gpu:
        return None
    way = ' and '.join(f'speed.{part}=true' for part in ('channels_last', 'compile') if part in measured.off)
    return Opportunity(
        measured.share_of('layout changes'),
        'tensors are turned between channels first and channels last, by convolutions and by GroupNorm, which knows '
        f'the first alone unless it is compiled: {way or "look in the trace for who asks for it"}',
    )


def small_kernels_could_fuse(measured: ProfileMeasurements) -> Opportunity | None:
    """Norms, activations and sums that one kernel could do."""
    if not measured.on_gpu or 'compile' not in measured.off:
        return None
    share = measured.share_of('norms') + measured.share_of('activations and sums') + measured.share_of('copies')
    return Opportunity(share / 2, 'norms, activations, sums and copies each read and write memory: speed.compile=true')


def products_are_wide(measured: ProfileMeasurements) -> Opportunity | None:
    """Tensor cores in their slowest mode, or not at all."""
    if not measured.on_gpu or measured.precision != 'fp32':
        return None
    share = measured.share_of('convolutions') + measured.share_of('matrix products') + measured.share_of('attention')
    return Opportunity(share / 2, 'products and convolutions are in float32: trainer.precision=amp_bf16')


def host_waits(measured: ProfileMeasurements) -> Opportunity | None:
    """Lines that ask for values."""
    if not measured.waits:
        return None
    places = ', '.join(list(measured.waits)[:3])
    idle = 1 - measured.busy if measured.on_gpu and measured.kernels else 0.0
    return Opportunity(max(0.01, idle / 2), f'the host waits for the device at {places}: keep values on the device')


def logging_is_large(measured: ProfileMeasurements) -> Opportunity | None:
    """Callbacks and loggers."""
    share = measured.shares.get('logging', 0.0)
    return (
        Opportunity(share, 'callbacks and loggers take long: leave some out, or log less often')
        if share > 0.02
        else None
    )


def ranks_talk(measured: ProfileMeasurements) -> Opportunity | None:
    """Collectives."""
    way = 'speed.reduce_once=true, or ' if 'reduce_once' in measured.off and measured.microbatches > 1 else ''
    return Opportunity(
        measured.share_of('communication'),
        f'devices exchange weights and gradients: {way}parallelism.reshard_after_forward=false, or ddp where it fits',
    )


def much_is_outside(measured: ProfileMeasurements) -> Opportunity | None:
    """What no stage accounts for."""
    share = measured.shares.get('other', 0.0) + measured.shares.get('h2d', 0.0)
    return Opportunity(share, 'much is outside of all stages: look for it in the trace') if share > 0.1 else None


RULES: tuple[Callable[[ProfileMeasurements], Opportunity | None], ...] = (
    data_is_waited_for,
    encoders_run,
    optimizer_is_large,
    device_idles,
    norms_are_wide,
    layouts_change,
    small_kernels_could_fuse,
    products_are_wide,
    host_waits,
    logging_is_large,
    ranks_talk,
    much_is_outside,
)
