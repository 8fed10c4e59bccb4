"""The recipe: its sections, what each value means, and the defaults."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from diffusion.config.image_shapes import Shape, parse_shape, square
from diffusion.config.schema import Problem


@dataclass
class Component:
    """Something with a registered name and keywords."""

    name: str
    """A registered name."""
    kwargs: dict[str, Any] = field(default_factory=dict, metadata={'flat': True})
    """Its keywords, which stand beside the name in a YAML."""


@dataclass
class StreamConfig:
    """A folder of MDS shards, or of one such folder a shape."""

    resolution: int
    """The side in pixels of the squares that the model sees, such as 256, or of a square of as many pixels."""
    shape: str | None = None
    """Width x height in pixels that the model sees, such as 320x192; null is a square of `resolution`."""
    aspects: bool = False
    """The folder holds a folder a shape, as `diffusion prepare` writes aspect buckets: each becomes a stream."""
    remote: str | None = None
    """The object store folder that holds index.json, such as s3://bucket/mds; null for data that is local."""
    local: str | None = None
    """The local folder: of the data itself, or of the cache of `remote`."""
    proportion: float | None = None
    """Share of this stream in an epoch, relative to the other streams' proportions."""
    repeat: float | None = None
    """How often an epoch goes over this stream."""
    choose: int | None = None
    """Samples an epoch takes of this stream, a multiple of global_batch."""
    download_retry: int = 2
    """Further tries after a download that failed, or brought a damaged shard."""
    download_timeout: float = 60.0
    """Seconds in which a download must end, or bring another MiB."""
    validate_hash: str | None = None
    """Hash that shards must have, and are checked by; null takes the fastest that they have."""

    @property
    def picture_shape(self) -> Shape:
        """What the model sees of this stream, unless it is one of several shapes (`aspects`)."""
        return parse_shape(self.shape) if self.shape is not None else square(self.resolution)


@dataclass
class LoaderConfig:
    """How samples are read and ordered."""

    num_workers: int | None = None
    """Processes a device that read; null chooses from the cores."""
    prefetch_factor: int | None = None
    """Batches each worker reads ahead."""
    timeout_seconds: int = 600
    """Longest wait for a worker's batch."""
    predownload: int | None = None
    """Samples whose shards are fetched ahead."""
    cache_folder: str | None = None
    """Where the shards of streams with a remote and no `local` are kept, shared by the jobs of a machine; null is a
    folder in the machine's temporary one."""
    cache_limit: str | None = None
    """Largest size of cache_folder and of the local folders of other remotes, such as 500gb; the least recently used
    shards go first."""
    max_bad_samples: float = 1.0e-4
    """Share of samples that may be replaced since they cannot be decoded; 0 stops at the first."""
    shuffle: bool = True
    """Shuffle the training data."""
    shuffle_algo: Literal['py1e', 'py1br', 'py1s', 'py2s', 'naive'] = 'py1e'
    """Streaming's shuffling algorithm."""
    shuffle_seed: int | None = None
    """Seed of the order; null is the run's seed."""
    shuffle_block_size: int | None = None
    """Samples that are shuffled together; null lets Streaming choose."""
    epoch_size: int | None = None
    """Samples of an epoch, a multiple of global_batch, over all streams; null is what the streams hold or say."""
    num_canonical_nodes: int | None = None
    """Parts the order is cut in, of which nodes read whole ones; null is 64, or what of it divides global_batch."""
    batching_method: Literal['per_stream', 'random'] = 'per_stream'
    """per_stream never mixes streams in a batch; random does, where their resolution is the same."""


@dataclass
class ParallelismConfig:
    """How the model is spread over devices."""

    strategy: Literal['ddp', 'fsdp2', 'fsdp1'] = 'ddp'
    """ddp: a copy on every device; fsdp2: sharded, the denoiser block by block; fsdp1: its predecessor, GPUs only."""
    reshard_after_forward: bool = True
    """Shard weights again after the forward pass (FULL_SHARD); false keeps them until the step (SHARD_GRAD_OP)."""
    replicas: int = 1
    """Groups of devices that hold a whole model each, sharded inside the group (HYBRID_SHARD); 1 shards over all."""
    mixed_precision: Literal['default', 'pure', 'full'] = 'default'
    """Under FSDP: default gathers weights in trainer.precision and reduces gradients in float32, pure reduces them in
    trainer.precision as well, full does both in float32."""
    activation_checkpointing: bool = False
    """Recompute the denoiser's blocks in the backward pass instead of keeping what they computed."""
    checkpoints: Literal['whole', 'sharded'] = 'whole'
    """whole: rank 0 writes all; sharded: every device writes its pieces, under fsdp2. Either resumes anywhere."""


@dataclass
class SpeedConfig:
    """What makes a training step fast on a GPU; a part that is null follows the preset, and is off on a CPU."""

    preset: Literal['full', 'none'] = 'full'
    """full: every part; none: PyTorch's own defaults."""
    channels_last: bool | None = None
    """Convolutions with the channels innermost, as tensor cores want them: of the denoiser and the VAE. Under FSDP the
    denoiser's weights stay as they are, and its activations alone have that order."""
    compile: bool | None = None
    """torch.compile of the denoiser's residual and transformer blocks for training, and of those of a frozen VAE, once
    for each shape. GroupNorm, SiLU and additions become one kernel. Not under fsdp1."""
    low_precision_norms: bool | None = None
    """GroupNorm and LayerNorm in autocast's dtype where they are not compiled; compiled ones move no more bytes."""
    flash_attention: bool | None = None
    """Attention by PyTorch's fused kernels, flash attention among them, in place of diffusers' plain processor."""
    fused_optimizer: bool | None = None
    """All of the optimizer's update in a few kernels, if it has such (AdamW does)."""
    tf32: bool | None = None
    """What is left in float32 may round to TF32 in matrix products and convolutions."""
    conv_benchmark: bool | None = None
    """cuDNN tries its algorithms for each new shape and keeps the fastest."""
    inference_mode: bool | None = None
    """Frozen encoders run without autograd's bookkeeping."""
    copy_ahead: bool | None = None
    """The next batch goes to the GPU while the one before is computed."""
    reduce_once: bool | None = None
    """Under fsdp2, gradients are reduced and weights gathered once a batch instead of once a microbatch, for the memory
    of whole gradients and weights on each device. Under ddp Composer reduces once in any case."""


@dataclass
class PrecomputeConfig:
    """`task: precompute`: which pictures become latents, and where these go."""

    streams: dict[str, StreamConfig] = field(default_factory=dict)
    """The streams of pictures."""
    out: str = ''
    """The folder for the latents, one sub-folder a stream."""
    latents: Literal['image', 'image+text'] = 'image'
    """image: the text encoder runs while training; image+text: its output is stored too, 158 kB a caption for SD2."""
    captions: Literal['all', 'first', 'longest'] = 'all'
    """Which of a picture's captions image+text encodes; those of image are all kept, as text."""
    posterior: Literal['sample', 'mean'] = 'sample'
    """sample stores mean and log-variance, so that every epoch draws anew; mean stores half as much."""
    dtype: Literal['float16', 'float32'] = 'float16'
    """Of what is stored."""
    crop: Literal['center', 'random'] = 'center'
    """The middle of a picture, or the crop that training on the pictures would take in its first epoch."""
    min_crop_scale: float = 1.0
    """Smallest size of a random crop, as a share of the largest."""
    batch_size: int = 64
    """Pictures encoded at once."""
    shard_mb: float = 256.0
    """Size of a shard in 10**6 bytes, about; an interruption can cost so much of the work on each device."""


@dataclass
class GenerateConfig:
    """`task: generate`, and the defaults of `diffusion generate`."""

    prompts: list[str] = field(default_factory=list)
    """Captions to draw."""
    negative_prompt: str = ''
    """What guidance moves away from."""
    out: str | None = None
    """Folder for the pictures; null is `generated` in the run's folder."""
    guidance_scale: float = 7.5
    """1 turns guidance off."""
    guidance_rescale: float = 0.0
    """Share of pulling the guided prediction's deviation back."""
    num_inference_steps: int = 50
    """Steps of the scheduler."""
    num_images_per_prompt: int = 1
    """Pictures a caption."""
    seed: int = 0
    """Of the first picture; the others count up."""
    noise_scheduler: str = 'ddim'
    """ddim, dpm++, euler, ... or a class of diffusers."""
    weights: Literal['ema', 'training'] | None = None
    """null takes averaged weights where there are any."""


@dataclass
class Recipe:
    """Everything about a run."""

    name: str
    """The name of the run, which its folder is called by."""
    global_batch: int
    """The samples an optimizer step sees, over all devices."""
    model: Component
    """The model: name and keywords."""
    task: Literal['train', 'precompute', 'evaluate', 'generate'] = 'train'
    """What run.py does."""
    seed: int = 17
    """Of everything that is random."""
    imports: list[str] = field(default_factory=list)
    """Modules to import first, which register components of yours."""
    runs_dir: str = 'runs'
    """Where the folders of runs are."""
    device_train_microbatch_size: int | Literal['auto'] | None = None
    """Samples a device takes at once; null takes its whole share of the batch."""
    init_from: str | None = None
    """Checkpoint or folder of another run whose weights this one starts from."""
    checkpoint: str | None = None
    """What to evaluate or to generate with; null is the run's latest."""
    dataset: Component = field(default_factory=lambda: Component('image_text'))
    """Kind of the training data, and how samples are made of it."""
    streams: dict[str, StreamConfig] = field(default_factory=dict)
    """Training data by name."""
    allow_data_change: bool = False
    """Go on with other data, or another order of it, than the run was started with."""
    eval_dataset: Component | None = None
    """Kind of the evaluation data; null is the training dataset's without what is random about it."""
    eval_streams: dict[str, StreamConfig] = field(default_factory=dict)
    """Evaluation data by name."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How samples are read and ordered."""
    optimizer: Component = field(default_factory=lambda: Component('adamw', {'lr': 1.0e-4, 'weight_decay': 0.01}))
    """The optimizer."""
    scheduler: Component | None = None
    """The learning rate's schedule; null keeps it constant."""
    algorithms: dict[str, Component] = field(default_factory=dict)
    """Composer algorithms by name."""
    callbacks: dict[str, Component] = field(default_factory=dict)
    """Composer callbacks by name."""
    loggers: dict[str, Component] = field(default_factory=dict)
    """Where metrics go."""
    evaluators: dict[str, Component] = field(default_factory=dict)
    """What `task: evaluate` measures besides the validation losses."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """How the model is spread over devices."""
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    """What makes a step fast."""
    precompute: PrecomputeConfig = field(default_factory=PrecomputeConfig)
    """What `task: precompute` does."""
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    """What `task: generate` draws."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Keywords of composer.Trainer."""
    missing: list[Problem] = field(default_factory=list, repr=False, compare=False)
    """Values that are still ???, where that was allowed."""

    @property
    def run_dir(self) -> Path:
        """Where the run's checkpoints, metrics and pictures are."""
        return Path(self.runs_dir) / self.name
