"""Dataclasses of a recipe's sections: each field is a YAML key with its type and default.

The doc string under a field is its reference documentation; `diffusion check` quotes the first sentence.
"""

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from diffusion.config.checkpointing import CheckpointingConfig
from diffusion.config.image_shapes import Shape, parse_shape, square
from diffusion.config.interpolation import Interpolation, KeyPath
from diffusion.config.language_model import RewriteConfig
from diffusion.config.schema import Problem
from diffusion.storage.local_files import working_folder


@dataclass(frozen=True)
class Component:
    """Component of a recipe, such as a model or a callback: its registered name and its keyword arguments."""

    name: str
    """The registered name of the component."""
    kwargs: dict[str, Any] = field(default_factory=dict, metadata={'flat': True})
    """Arguments of the component; in YAML they are siblings of `name`."""


@dataclass(frozen=True)
class StreamConfig:
    """A stream of data: a folder of MDS shards, or a folder with one subfolder of shards per image shape."""

    resolution: int
    """The side in pixels of the square images that the model sees, a multiple of 8, such as 256. With `shape` or
    `aspects`, the side of a square with about as many pixels."""
    shape: str | None = None
    """Width x height in pixels of the images that the model sees, multiples of 8, such as 320x192. Null means a square
    of side `resolution`."""
    aspects: bool = False
    """True if the folder holds one subfolder of shards per image shape, as `diffusion prepare` writes aspect buckets.
    Each shape becomes a stream of its own."""
    enlarge: bool = False
    """True accepts images that are smaller than the model's input: they are enlarged, which blurs them."""
    remote: str | None = None
    """The object store folder that holds index.json, such as s3://bucket/mds. Null means data in `local`."""
    local: str | None = None
    """The local folder of the data, or of its cache if `remote` is set. Null with a remote means a cache in
    `loader.cache_folder`."""
    proportion: float | None = None
    """The fraction of an epoch that comes from this stream, relative to the other streams' proportions. Set it for all
    streams or none. It cannot be combined with `repeat` or `choose`; if all three are null, each sample is used once
    per epoch."""
    repeat: float | None = None
    """The number of passes over this stream per epoch; may be fractional. It cannot be combined with `proportion` or
    `choose`."""
    choose: int | None = None
    """The number of samples per epoch from this stream, a multiple of `global_batch`. It cannot be combined
    with `proportion` or `repeat`."""
    download_retry: int = 2
    """The number of retries after a download that failed or returned a damaged shard."""
    download_timeout: float = 60.0
    """The timeout of a download in seconds; it restarts after every MiB received."""
    validate_hash: str | None = None
    """The hash algorithm that shards are verified with, such as xxh64; shards without it are refused. Null means the
    fastest algorithm in the shards' index."""

    @property
    def image_shape(self) -> Shape:
        """Shape of the stream's images as the model sees them; undefined for several shapes (`aspects`)."""
        return parse_shape(self.shape) if self.shape is not None else square(self.resolution)


@dataclass(frozen=True)
class LoaderConfig:
    """The `loader` section: how samples are read, cached and ordered."""

    num_workers: int | None = None
    """The number of DataLoader worker processes per device. Null means up to 8, limited by the number of CPU cores; 0
    means that the main process reads."""
    prefetch_factor: int | None = None
    """The number of batches that each worker reads ahead. Null means 2."""
    timeout_seconds: int = 600
    """The time in seconds to wait for a batch from a worker; after that, training stops with an error."""
    predownload: int | None = None
    """The number of samples per worker whose shards are downloaded ahead. Null means that Streaming chooses."""
    cache_folder: str | None = None
    """The folder that caches the shards of streams with a `remote` and no `local`. All jobs of a machine share it, and
    all nodes if it is on a shared file system. Null means `diffusion-<user id>/shards` in the machine's temporary
    folder."""
    cache_limit: str | None = None
    """The maximum total size of `cache_folder` and the `local` folders of remote streams, such as 500gb; the least
    recently used shards are evicted first. Null means no limit."""
    max_bad_samples: float = 1.0e-4
    """The maximum fraction of samples that may be replaced because they cannot be decoded, in [0, 1); 0 stops at the
    first bad sample."""
    shuffle: bool = True
    """True shuffles the training data; false reads it in the order of the shards."""
    shuffle_algo: Literal['py1e', 'py1br', 'py1s', 'py2s', 'naive'] = 'py1e'
    """The shuffling algorithm of StreamingDataset: py1e, py1br, py1s, py2s or naive."""
    shuffle_seed: int | None = None
    """The seed of the sample order, at least 0. Null means the run's `seed`."""
    shuffle_block_size: int | None = None
    """The number of samples in each block, within which samples are shuffled. Null means that Streaming chooses."""
    epoch_size: int | None = None
    """The number of samples per epoch over all streams, a multiple of `global_batch`. Null means the sum over the
    streams, computed from their sizes, `repeat` and `choose`."""
    num_canonical_nodes: int | None = None
    """The number of parts into which the sample order is split, a divisor of `global_batch`; each node reads whole
    parts. It must not change during a run. Null means the greatest common divisor of `global_batch` and 960, such as 64
    for 2048 and 192 for 1536."""
    batching_method: Literal['per_stream', 'random'] = 'per_stream'
    """Composition of batches: per_stream never mixes streams in a batch; random mixes streams, which must have the
    same shape."""


@dataclass(frozen=True)
class ParallelismConfig:
    """The `parallelism` section: how the model is distributed over devices."""

    strategy: Literal['ddp', 'fsdp2'] = 'ddp'
    """The parallelism strategy: ddp keeps a copy of the model on every device; fsdp2 shards the model, and the denoiser
    block by block."""
    reshard_after_forward: bool = True
    """True frees gathered weights after the forward pass under FSDP and gathers them again for the backward pass
    (FULL_SHARD); false keeps them until the optimizer step (SHARD_GRAD_OP)."""
    replicas: int = 1
    """The number of device groups that each hold a whole model, sharded within the group (HYBRID_SHARD). It must divide
    the number of devices; 1 means that all devices shard one model. More than 1 needs fsdp2 and GPUs."""
    mixed_precision: Literal['default', 'pure', 'full'] = 'default'
    """The precision of communication under FSDP: default gathers weights in `trainer.precision` and reduces gradients
    in float32; pure uses `trainer.precision` for both; full uses float32 for both."""
    activation_checkpointing: bool = False
    """True recomputes the activations of the denoiser's blocks in the backward pass instead of storing them, which
    takes less memory but makes steps slower."""
    checkpoints: Literal['whole', 'sharded'] = 'whole'
    """The format of checkpoints: whole is written by rank 0 alone; sharded is written by all devices in parallel and
    needs fsdp2. Both can be resumed on any number of devices and under any strategy."""


@dataclass(frozen=True)
class SpeedConfig:
    """The `speed` section: optimizations of a training step. Switches that are null follow the preset."""

    preset: Literal['full', 'none'] = 'full'
    """The default of all switches: full turns on every switch that the GPU and the parallelism strategy support, but
    only `fused_optimizer` on a CPU; none keeps PyTorch's defaults."""
    channels_last: bool | None = None
    """True runs the convolutions of the denoiser and the VAE in the channels_last memory format, which tensor cores
    need. Under FSDP, the denoiser's weights stay contiguous and only its activations change. Null follows `preset`."""
    compile: bool | None = None
    """True compiles the residual and transformer blocks of the denoiser and of a frozen VAE with torch.compile, once
    per image shape, for training. This fuses GroupNorm, SiLU and additions. Null follows `preset`."""
    compile_cache: bool | None = None
    """True keeps what `compile` has compiled in the run's folder `compiled`, which all nodes must share, so that a
    restarted run reaches its first batch in seconds instead of minutes. Null follows `preset`."""
    cuda_graphs: bool = False
    """True runs the denoiser's blocks as CUDA graphs for training, captured once per image shape: the host launches two
    graphs per block instead of hundreds of kernels. Without graphs, a GPU waits for these launches in microbatches of
    16 images or fewer. Needs a GPU, strategy: ddp, and memory for another copy of the gradients."""
    low_precision_norms: bool | None = None
    """True computes GroupNorm and LayerNorm in the autocast dtype, except in compiled blocks, whose fused norms would
    not gain from it. Null follows `preset`."""
    flash_attention: bool | None = None
    """True uses PyTorch's fused attention kernels, including flash attention, instead of diffusers' plain attention
    processor. Null follows `preset`."""
    fused_optimizer: bool | None = None
    """True uses the optimizer's fused implementation, which updates all parameters in a few kernels, if it has one
    (AdamW does). Null follows `preset`."""
    tf32: bool | None = None
    """True allows TF32 in float32 matrix products and convolutions. Null follows `preset`."""
    conv_benchmark: bool | None = None
    """True lets cuDNN time its convolution algorithms for each new shape and use the fastest. Ignored with
    `trainer.deterministic_mode`. Null follows `preset`."""
    inference_mode: bool | None = None
    """True runs frozen encoders in torch.inference_mode, without autograd's overhead. Null follows `preset`."""
    copy_ahead: bool | None = None
    """True copies the next batch to the GPU while the current one is processed. Null follows `preset`."""
    reduce_once: bool | None = None
    """True reduces gradients and gathers weights once per batch instead of once per microbatch under fsdp2, but needs
    memory for unsharded gradients and weights on each device. Under ddp, Composer always reduces once. Null follows
    `preset`."""
    encode_batch_size: int | None = None
    """The number of samples that the frozen encoders encode at a time if a device's batch has several microbatches:
    larger values mean fewer and larger kernels. The encoders' activations are freed before the first microbatch is
    trained. Null means that each microbatch is encoded separately."""


MAX_GRAPH_SHAPES = 4
"""Maximum number of image shapes with `speed.cuda_graphs`; each needs memory for inputs and outputs of all blocks."""
SPEED_PARTS = tuple(field.name for field in fields(SpeedConfig) if field.name not in ('preset', 'encode_batch_size'))
"""Names of the `speed` settings that can be on or off."""


def effective_parts(settings: SpeedConfig, *, on_gpu: bool, strategy: str = 'ddp') -> SpeedConfig:
    """Return `speed` settings with nulls replaced by the preset's values and unsupported settings turned off."""
    full = settings.preset == 'full'
    # Composer's DDP already reduces once per batch, so reduce_once changes only FSDP2. copy_ahead overlaps host-to-GPU
    # copies, which a CPU does not have.
    impossible = {'reduce_once': strategy != 'fsdp2', 'copy_ahead': not on_gpu}
    # CUDA graphs need weights at fixed addresses, but FSDP gathers them at other addresses each time.
    impossible['cuda_graphs'] = not on_gpu or strategy != 'ddp'
    found = {}
    for part in SPEED_PARTS:
        on = getattr(settings, part)
        if on is None:  # follow the preset, which on a CPU turns on only fused_optimizer
            on = full and (on_gpu or part == 'fused_optimizer')
        found[part] = on and not impossible.get(part, False)
    return replace(settings, **found)


@dataclass(frozen=True)
class PrecomputeConfig:
    """The `precompute` section: the images that `task: precompute` encodes into latents, and the output format."""

    streams: dict[str, StreamConfig] = field(default_factory=dict)
    """The streams of images to encode, by name."""
    out: str = ''
    """The output folder for the latents, local or in an object store; it gets one subfolder per stream."""
    latents: Literal['image', 'image+text'] = 'image'
    """The encoders whose output is stored: image stores only the VAE's, so that the text encoder runs during training;
    image+text stores the text encoder's too. Text embeddings include those of padding unless the model masks it: 158 kB
    per caption for SD2. If the model has representation_alignment, the features of its image encoder are stored too."""
    captions: Literal['all', 'first', 'longest'] = 'all'
    """Captions of an image that `latents: image+text` encodes: all, first or longest. `latents: image` stores all
    captions as text."""
    caption_columns: list[str] = field(default_factory=list)
    """Columns of captions from `diffusion caption` to store as well, for `dataset.caption_weights` in training."""
    posterior: Literal['sample', 'mean'] = 'sample'
    """The part of the VAE's posterior that is stored: sample stores mean and log-variance, so that training samples new
    latents in every epoch; mean stores only the mean, which halves the size."""
    dtype: Literal['float16', 'float32'] = 'float16'
    """The dtype of the stored latents, text embeddings and image features: float16 or float32."""
    crop: Literal['center', 'random'] = 'center'
    """The crop of an image: center; or random, the same crop as in the first epoch of training on the images."""
    min_crop_scale: float = 1.0
    """The minimum size of a random crop, as a fraction of the largest possible crop."""
    batch_size: int = 64
    """The number of images that a device encodes at a time."""
    shard_mb: float = 256.0
    """The approximate size of a shard in MB (10**6 bytes). An interruption loses at most one shard of work per
    device."""


@dataclass
class GenerateConfig:
    """The `generate` section: settings of `task: generate`, and defaults of `diffusion generate`."""

    prompts: list[str] = field(default_factory=list)
    """The prompts to generate images for."""
    negative_prompt: str = ''
    """The negative prompt of guidance, for all prompts; '' means the unconditional caption."""
    out: str | None = None
    """The output folder for the images. Null means `generated` in the run's folder."""
    guidance_scale: float = 7.5
    """The guidance scale; 1 turns guidance off."""
    guidance_rescale: float = 0.0
    """The strength, from 0 to 1, with which the guided prediction is rescaled to the standard deviation of the
    conditional prediction; 0 turns rescaling off."""
    guidance: dict[str, Any] | None = None
    """The name and settings of the guidance, such as {name: apg, eta: 0.5}; see `guidance` in Components. Null means
    classifier-free guidance."""
    snr_shift: float | None = None
    """The shift of a flow's sampling times toward noise, as `objective.snr_shift` shifts those of training. Null means
    the objective's."""
    num_inference_steps: int = 50
    """The number of sampling steps of the noise scheduler."""
    rewrite: RewriteConfig | None = None
    """The language model that rewrites the prompts. Null means that the prompts are used as they are."""
    num_images_per_prompt: int = 1
    """The number of images per prompt."""
    seed: int = 0
    """The seed of the first image; image i, counted from 0, uses `seed` + i."""
    noise_scheduler: str = 'ddim'
    """The noise scheduler for sampling: a short name, such as ddim, dpm++ or euler, or a class name of diffusers."""
    weights: Literal['ema', 'training'] | None = None
    """The weights to generate with: ema (averaged) or training. Null means averaged weights if the checkpoint has
    them."""

    @property
    def sampling(self) -> dict[str, Any]:
        """The arguments of `LatentDiffusion.generate` that this section sets for all images."""
        keys = ('negative_prompt', 'guidance_scale', 'guidance_rescale', 'guidance', 'num_inference_steps')
        return {key: getattr(self, key) for key in (*keys, 'noise_scheduler', 'snr_shift')}


NotifyEvent = Literal['started', 'ended', 'hang', 'loss_guard', 'checkpoint_failed', 'goodput']
NOTIFY_EVENTS: tuple[str, ...] = get_args(NotifyEvent)


@dataclass(frozen=True)
class NotifyConfig:
    """The `notify` section: messages to people about a run. It names environment variables, never a URL or command."""

    webhook: str | None = None
    """The name of the environment variable that holds the URL to which messages are posted as JSON; Slack's incoming
    webhooks accept them. Null means that none are posted."""
    command: str | None = None
    """The name of the environment variable that holds a command line, which is run without a shell and gets the message
    as JSON on its stdin. Null means that none is run."""
    events: list[NotifyEvent] = field(default_factory=lambda: [*get_args(NotifyEvent)])
    """The events that send a message, each at most once per attempt: started, ended (with the cause), hang, loss_guard,
    checkpoint_failed and goodput."""
    goodput_below: float | None = None
    """The goodput, in (0, 1], below which the event goodput is sent: the fraction of the run's time spent in batches
    that were not lost. It is tested from half an hour after the run's start. Null means no such message."""


@dataclass
class InitFrom:
    """The `init_from` section: the weights from which training starts, another run's or published ones."""

    # The field cannot have the name of its key, `from`, which is a Python keyword.
    source: str = field(metadata={'key': 'from'})
    """The source of the weights: a checkpoint, or the folder of another run, whose newest checkpoint is used; a folder
    that diffusers' `save_pretrained` wrote; `hf://org/name` on the Hugging Face Hub, or `org/name@COMMIT`; a
    `.safetensors` file with the tensor names of Stability AI's code (`model.diffusion_model.*`); or for i1, a `.pt`
    file of its own code, on the Hub `hf://org/name/FILE.pt`."""
    weights: Literal['training', 'ema'] = 'training'
    """The weights to start from if the source has both: training, or ema (averaged)."""
    revision: str | None = None
    """The commit of a repository on the Hub, 40 hexadecimal digits; required for repositories and refused for other
    sources. With a revision, `org/name` needs no `hf://`."""
    resize: bool = False
    """True accepts a source with fewer latent channels: the weights of the additional input and output channels are
    zero. False stops with an error."""

    def __post_init__(self) -> None:
        # `org/name@COMMIT` is short for a repository and its revision.
        found = re.fullmatch(r'(.+)@([0-9a-f]{40})', self.source) if isinstance(self.source, str) else None
        if found is not None and self.revision is None:
            self.source, self.revision = found.groups()


@dataclass(frozen=True)
class LoraConfig:
    """The `lora` section: low-rank updates of layers, trained instead of the layers' weights (Hu et al. 2021)."""

    rank: int = 16
    """The rank of the updates B A, at least 1: the number of rows of A and of columns of B."""
    alpha: float = 16.0
    """The scale of the updates: they are multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ['to_q', 'to_k', 'to_v', 'to_out.0'])
    """The linear and convolutional layers to update, by suffixes of their names."""


@dataclass
class Recipe:
    """A complete recipe: all settings of a run."""

    name: str
    """The name of the run, which is also the name of its folder: letters, digits, dots, dashes and underscores."""
    global_batch: int
    """The number of samples per optimizer step, over all devices."""
    model: Component
    """The model: its registered name and its keyword arguments."""
    task: Literal['train', 'precompute', 'evaluate', 'generate'] = 'train'
    """The task that run.py runs: train, precompute, evaluate or generate."""
    seed: int = 17
    """The seed of all random number generators, in [0, 2**32)."""
    imports: list[str] = field(default_factory=list)
    """The Python modules that register custom components; they are imported before the recipe is checked."""
    runs_dir: str = 'runs'
    """The folder that contains one folder per run and is shared by all nodes, or a URL such as s3://bucket/runs."""
    device_train_microbatch_size: int | None = None
    """The number of samples that a device processes in one forward and backward pass; it must divide the batch per
    device. Null means the whole batch per device."""
    init_from: str | InitFrom | None = None
    """The weights that this run starts from: a checkpoint or another run (a folder or a URL), a diffusers folder or a
    `.safetensors` file; or a mapping with the keys `from`, `weights`, `revision` and `resize`, for averaged weights or
    a repository on the Hub. Null means the model's initial weights."""
    lora: LoraConfig | None = None
    """The LoRA to train instead of the denoiser's weights, which stay as in `init_from`; `{}` means the defaults.
    Null means that all weights are trained."""
    checkpoint: str | None = None
    """The checkpoint or run (a folder or a URL) that `task: evaluate` and `task: generate` use. Null means this run's
    latest."""
    dataset: Component = field(default_factory=lambda: Component('image_text'))
    """The training dataset: its registered name (image_text or latents) and its keyword arguments, such as crops and
    caption choice."""
    streams: dict[str, StreamConfig] = field(default_factory=dict)
    """The streams of training data, by name."""
    allow_data_change: bool = False
    """True resumes a run even if its data, or the order of the data, differs from when it was started; false stops with
    an error."""
    eval_dataset: Component | None = None
    """The evaluation dataset: its registered name and its keyword arguments. Null means `dataset` with center crops, no
    flips and first captions."""
    eval_streams: dict[str, StreamConfig] = field(default_factory=dict)
    """The streams of evaluation data, by name."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """Settings of the data loaders: reading, caching and order of samples."""
    optimizer: Component = field(default_factory=lambda: Component('adamw', {'lr': 1.0e-4, 'weight_decay': 0.01}))
    """The optimizer: its registered name and its keyword arguments."""
    scheduler: Component | None = None
    """The learning rate scheduler: its registered name and keyword arguments. Null means a constant learning rate."""
    algorithms: dict[str, Component] = field(default_factory=dict)
    """The Composer algorithms, by name; `name: false` removes an inherited one."""
    callbacks: dict[str, Component] = field(default_factory=dict)
    """The Composer callbacks, by name; `name: false` removes an inherited one."""
    loggers: dict[str, Component] = field(default_factory=dict)
    """The loggers of metrics, by name; `name: false` removes an inherited one."""
    evaluators: dict[str, Component] = field(default_factory=dict)
    """The evaluators that `task: evaluate` runs in addition to the validation losses, by name."""
    evaluators_interval: str | None = None
    """The interval, such as 10000ba, at which training runs the `evaluators` on its own GPUs. Null means that only
    `task: evaluate` and `diffusion watch` run them."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """Distribution of the model over devices."""
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    """Optimizations of a training step on a GPU."""
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    """Settings of the run's checkpoints."""
    precompute: PrecomputeConfig = field(default_factory=PrecomputeConfig)
    """Settings of `task: precompute`."""
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    """Settings of `task: generate`."""
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    """Messages to people about the run."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """The keyword arguments of composer.Trainer that no other section sets, such as max_duration and precision."""
    missing: list[Problem] = field(default_factory=list, repr=False, compare=False)
    """The values that are still ???, if `load` accepted them; not a key of a recipe."""
    not_inherited: list[Problem] = field(default_factory=list, repr=False, compare=False)
    """Notes on settings of extended recipes that were lost when a component was replaced; not a key of a recipe."""
    from_environment: dict[KeyPath, Interpolation] = field(default_factory=dict, repr=False, compare=False)
    """The text of each value that depends on an environment variable, such as `${oc.env:KEY}`, by its path. Write this
    text to files instead of the value, which may be a secret (`load.to_yaml`); not a key of a recipe."""

    @property
    def initial_weights(self) -> InitFrom | None:
        """The value of `init_from` as an `InitFrom`; None if training starts from the model's initial weights."""
        return InitFrom(self.init_from) if isinstance(self.init_from, str) else self.init_from

    @property
    def run_dir(self) -> Path:
        """Folder of the run's checkpoints, metrics and images; for a run in an object store, its working folder."""
        return Path(self.runs_dir) / self.name if self.run_url is None else working_folder(self.run_url)

    @property
    def run_place(self) -> str:
        """URL of the run if it is in an object store, else the path of its folder."""
        return self.run_url or str(self.run_dir)

    @property
    def run_url(self) -> str | None:
        """URL of the run if `runs_dir` is in an object store, else None."""
        return f'{self.runs_dir.rstrip("/")}/{self.name}' if '://' in self.runs_dir else None
