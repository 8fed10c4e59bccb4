"""Rules for changes of a recipe when its run resumes: which keys are fixed, which are applied, and why.

Every key of a recipe matches a rule, so that no change is ignored: it is refused, or it takes effect and is logged.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from diffusion.config.checks import NAMED_COMPONENT_SECTIONS, SINGLE_COMPONENT_SECTIONS
from diffusion.config.recipe_values import STREAM_SECTIONS


class Effect(Enum):
    """Effect of a changed value on a run that resumes."""

    FIXED = 'fixed'
    """The run is refused."""
    APPLIED = 'applied'
    """The new value takes effect."""
    DATA = 'needs allow_data_change'
    """The new value takes effect if the samples and their order stay the same, or with `allow_data_change: true`."""
    BEFORE_AVERAGING = 'applied before averaging starts, then fixed'
    """The new value takes effect, unless the checkpoint has averaged weights."""


@dataclass(frozen=True)
class Rule:
    """Effect of a change of some keys."""

    keys: tuple[str, ...]
    """Keys as dotted paths. Names of streams are `*`; algorithms, callbacks, loggers and evaluators have their
    registered name. A final `*` stands for every key that no other rule names."""
    effect: Effect
    reason: str


def _rule(effect: Effect, reason: str, keys: str) -> Rule:
    return Rule(tuple(keys.split()), effect, reason)


RULES = (
    # -- model --
    _rule(Effect.FIXED, 'another model', 'model.name'),
    _rule(
        Effect.FIXED,
        'the architecture: the names and shapes of the weights follow from it',
        'model.block_out_channels model.layers_per_block model.text_width model.text_layers model.max_length '
        'model.latent_channels model.norm_num_groups model.train_text_encoder model.hidden_size model.num_heads '
        'model.depth model.patch_size model.bottleneck_size model.resolution_embeds model.qk_norm '
        'model.dual_attention_blocks model.pos_embed_max_size',
    ),
    _rule(
        Effect.FIXED,
        'the frozen parts: the weights were trained on their latents and embeddings',
        'model.pretrained model.revision model.vae model.vae_revision model.resolution model.posterior model.t5 '
        'model.t5_length',
    ),
    _rule(
        Effect.FIXED,
        'the training objective: the weights predict its target under its noise schedule',
        'model.objective.path model.objective.prediction_type model.objective.beta_schedule '
        'model.objective.beta_start model.objective.beta_end model.objective.num_train_timesteps '
        'model.objective.zero_terminal_snr model.objective.min_snr_gamma model.objective.offset_noise '
        'model.objective.snr_shift model.objective.timesteps model.objective.logit_mean model.objective.logit_std '
        'model.objective.uniform_fraction model.objective.noise_scale model.l1_weight model.kl_weight',
    ),
    _rule(
        Effect.FIXED,
        'the conditioning of the denoiser on captions',
        'model.caption_dropout_mode model.mask_padding',
    ),
    _rule(
        Effect.FIXED,
        'the projection to the features of this encoder is trained, and is part of the weights',
        'model.representation_alignment model.representation_alignment.encoder '
        'model.representation_alignment.revision model.representation_alignment.block '
        'model.representation_alignment.hidden_size',
    ),
    _rule(
        Effect.FIXED,
        'the networks of the perceptual losses: the training objective',
        'model.perceptual_losses model.perceptual_losses.lpips_network model.perceptual_losses.lpips_backbone '
        'model.perceptual_losses.lpips_scale model.perceptual_losses.encoder model.perceptual_losses.revision '
        'model.perceptual_losses.features_side',
    ),
    _rule(
        Effect.APPLIED,
        'the loss after the resume',
        'model.representation_alignment.weight model.perceptual_losses.lpips_weight '
        'model.perceptual_losses.features_weight',
    ),
    _rule(Effect.FIXED, 'the initial weights, and the learning rates of layers by their width', 'model.mup_base_width'),
    _rule(Effect.APPLIED, 'the fraction of captions dropped after the resume', 'model.caption_dropout'),
    _rule(Effect.APPLIED, 'the precision of the frozen parts', 'model.encoder_dtype'),
    _rule(Effect.FIXED, 'all random numbers follow from the seed', 'seed model.seed'),
    _rule(Effect.FIXED, 'a keyword of your own model, whose effect on the weights is not known', 'model.*'),
    _rule(
        Effect.FIXED,
        'the trained parameters: their shapes and their scale follow from it',
        'lora',
    ),
    # -- optimizer and schedule --
    _rule(Effect.FIXED, 'the state of an optimizer fits only its own class', 'optimizer.name'),
    _rule(
        Effect.APPLIED,
        'replaces the value that the checkpoint holds; the moments are kept',
        'optimizer.lr optimizer.weight_decay optimizer.eps optimizer.betas optimizer.adamw_lr optimizer.momentum '
        'optimizer.nesterov optimizer.newton_schulz_steps optimizer.split_projections',
    ),
    _rule(
        Effect.APPLIED,
        'another implementation of the same update',
        'optimizer.fused optimizer.foreach optimizer.newton_schulz_dtype',
    ),
    _rule(
        Effect.FIXED,
        "the optimizer's state depends on it",
        'optimizer.amsgrad optimizer.maximize optimizer.capturable optimizer.differentiable optimizer.convolutions',
    ),
    _rule(Effect.FIXED, 'a keyword of your own optimizer, whose effect on its state is not known', 'optimizer.*'),
    _rule(Effect.APPLIED, 'the learning rate follows the new schedule from the next batch on', 'scheduler.*'),
    # -- algorithms --
    _rule(
        Effect.BEFORE_AVERAGING,
        'averaging cannot start in the past, and removing the algorithm would drop the averages',
        'algorithms.ema algorithms.ema.ema_start',
    ),
    _rule(
        Effect.APPLIED,
        'the average continues with the new decay',
        'algorithms.ema.smoothing algorithms.ema.half_life algorithms.ema.update_interval',
    ),
    _rule(
        Effect.FIXED,
        'its averages start with the first batch',
        'algorithms.post_hoc_ema algorithms.post_hoc_ema.widths',
    ),
    _rule(
        Effect.APPLIED,
        'the snapshots after the resume',
        'algorithms.post_hoc_ema.every algorithms.post_hoc_ema.dtype algorithms.post_hoc_ema.folder',
    ),
    _rule(
        Effect.APPLIED,
        'has no state',
        'algorithms.gradient_clipping algorithms.gradient_clipping.clipping_type '
        'algorithms.gradient_clipping.clipping_threshold algorithms.low_precision_groupnorm '
        'algorithms.low_precision_layernorm',
    ),
    _rule(
        Effect.APPLIED,
        'the tokens that skip blocks after the resume; the weights have the same names and shapes',
        'algorithms.tread algorithms.tread.start algorithms.tread.end algorithms.tread.fraction',
    ),
    _rule(
        Effect.APPLIED,
        'the loss after the resume',
        'algorithms.contrastive_flow_matching algorithms.contrastive_flow_matching.weight',
    ),
    _rule(Effect.FIXED, 'your own algorithm, whose effect on training is not known', 'algorithms.*'),
    # -- data --
    _rule(
        Effect.DATA,
        'the samples, their order or their content; compared by the fingerprint of the data',
        'global_batch dataset.* streams.* streams.*.resolution streams.*.shape streams.*.aspects streams.*.proportion '
        'streams.*.repeat streams.*.choose loader.shuffle loader.shuffle_algo loader.shuffle_seed '
        'loader.shuffle_block_size loader.epoch_size loader.num_canonical_nodes loader.batching_method',
    ),
    _rule(Effect.APPLIED, 'permits changes of the data', 'allow_data_change'),
    _rule(Effect.APPLIED, 'permits small images; has no effect on any', 'streams.*.enlarge'),
    _rule(
        Effect.APPLIED,
        'the place and the transport of the data, not its content, which the fingerprint compares',
        'streams.*.remote streams.*.local streams.*.download_retry streams.*.download_timeout streams.*.validate_hash '
        'loader.num_workers loader.prefetch_factor loader.timeout_seconds loader.predownload loader.cache_folder '
        'loader.cache_limit loader.max_bad_samples',
    ),
    _rule(Effect.APPLIED, 'the evaluations after the resume', 'eval_dataset.* eval_streams.*'),
    _rule(
        Effect.FIXED,
        'the weights that the run has started from; not read on resume',
        'init_from',
    ),
    # -- trainer --
    _rule(
        Effect.APPLIED,
        'the length of the run; the learning rate follows',
        'trainer.max_duration trainer.scale_schedule_ratio trainer.step_schedulers_every_batch',
    ),
    _rule(
        Effect.APPLIED,
        'numerics: weights and moments are float32 in every precision',
        'trainer.precision trainer.precision_config trainer.deterministic_mode trainer.compile_config trainer.device',
    ),
    _rule(
        Effect.APPLIED,
        'the times of evaluations and saves, the output, and communication',
        'trainer.eval_interval trainer.eval_subset_num_batches trainer.save_interval '
        'trainer.save_num_checkpoints_to_keep trainer.save_metrics trainer.save_overwrite trainer.save_weights_only '
        'trainer.save_ignore_keys trainer.autoresume trainer.progress_bar trainer.log_to_console '
        'trainer.console_stream trainer.console_log_interval trainer.log_traces trainer.auto_log_hparams '
        'trainer.train_dataloader_label trainer.dist_timeout trainer.ddp_sync_strategy trainer.profiler '
        'trainer.python_log_level trainer.load_progress_bar',
    ),
    _rule(
        Effect.FIXED,
        'the folder in which the run looks for its checkpoints',
        'trainer.save_folder trainer.save_filename trainer.save_latest_filename',
    ),
    _rule(
        Effect.FIXED,
        'the batches of an epoch and the weights of samples follow from it',
        'trainer.train_subset_num_batches trainer.spin_dataloaders trainer.accumulate_train_batch_on_tokens '
        'trainer.algorithm_passes',
    ),
    _rule(
        Effect.FIXED,
        'a resumed run loads everything',
        'trainer.load_object_store trainer.load_weights_only trainer.load_strict_model_weights '
        'trainer.load_ignore_keys trainer.load_exclude_algorithms',
    ),
    _rule(Effect.FIXED, 'a keyword of another version of Composer, whose effect is not known', 'trainer.*'),
    # -- everything else --
    _rule(
        Effect.APPLIED,
        'the distribution and speed of the computation, not its result',
        'device_train_microbatch_size parallelism.* speed.*',
    ),
    _rule(Effect.APPLIED, 'the metrics, images and logs after the resume', 'callbacks.* loggers.*'),
    _rule(Effect.APPLIED, 'the messages after the resume', 'notify.*'),
    _rule(Effect.APPLIED, 'how checkpoints are saved and which are kept, from the next save on', 'checkpointing.*'),
    _rule(Effect.APPLIED, 'the evaluations after the resume', 'evaluators.* evaluators_interval'),
    _rule(Effect.APPLIED, 'not used in training', 'precompute.* generate.* checkpoint task'),
    _rule(Effect.APPLIED, "the run's folder, which may be moved", 'name runs_dir'),
    _rule(Effect.APPLIED, 'the modules that register components', 'imports'),
)
"""The rule of every key of a recipe."""
UNKNOWN_KEY = Rule(('*',), Effect.FIXED, 'a key that no rule of this version names')
"""Rule of a key that no entry of `RULES` matches; a test asserts that there is none."""

RULE_OF_KEY = {key: rule for rule in RULES for key in rule.keys}
"""Rules by key, as in `Rule.keys`."""


@dataclass(frozen=True)
class Change:
    """Changed value of a recipe."""

    key: str
    """Path in the recipe, such as `algorithms.my_ema.smoothing`."""
    rule: Rule
    saved: Any
    """Value that the run was trained with; None if there was none."""
    now: Any
    """Value in the recipe now; None if there is none."""

    def __str__(self) -> str:
        return f'{self.key} {format_value(self.saved)} -> {format_value(self.now)}'


def rule_of(path: str) -> Rule:
    """Return the rule of a key, given as in `Rule.keys`, such as `algorithms.ema.smoothing`."""
    if path in RULE_OF_KEY:
        return RULE_OF_KEY[path]
    parts = path.split('.')
    for length in range(len(parts) - 1, 0, -1):
        prefix = '.'.join(parts[:length])
        if f'{prefix}.*' in RULE_OF_KEY:
            return RULE_OF_KEY[f'{prefix}.*']
        # A key inside of a value, such as a mapping that a keyword takes.
        if prefix in RULE_OF_KEY and length > 1:
            return RULE_OF_KEY[prefix]
    return RULE_OF_KEY.get(parts[0], RULE_OF_KEY.get(f'{parts[0]}.*', UNKNOWN_KEY))


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the changed values between two recipes, whose values `recipe_values` returned."""
    found: list[Change] = []
    for section in [*now, *(key for key in saved if key not in now)]:
        before, after = saved.get(section), now.get(section)
        if section in SINGLE_COMPONENT_SECTIONS:
            found += _component_changes(section, section, before, after)
        elif section in NAMED_COMPONENT_SECTIONS:
            found += _entries(section, before or {}, after or {}, named=True)
        elif section in STREAM_SECTIONS:
            found += _entries(section, before or {}, after or {}, named=False)
        else:
            found += _value_changes(section, section, before, after)
    # The seed of a model without one of its own is the run's, which is listed already.
    seeds = (saved.get('seed'), now.get('seed'))
    return [change for change in found if change.key != 'model.seed' or (change.saved, change.now) != seeds]


def refused(found: list[Change], *, averaging: bool) -> list[Change]:
    """Return the changes that a run cannot resume with.

    Args:
        found: Changes between the recipe that the checkpoint was trained with and the recipe now.
        averaging: True if the checkpoint has averaged weights.
    """
    fixed = {Effect.FIXED, Effect.BEFORE_AVERAGING} if averaging else {Effect.FIXED}
    return [change for change in found if change.rule.effect in fixed]


def format_value(value: Any) -> str:
    """Return a recipe's value as text on one line, such as `0.5`, `null` or `[0.9, 0.99]`."""
    if isinstance(value, str) and re.fullmatch(r'[^\s"\']+', value) and value.isprintable():
        return value
    return json.dumps(value, default=str)


def _entries(section: str, before: Mapping[str, Any], after: Mapping[str, Any], *, named: bool) -> Iterator[Change]:
    """Yield the changes of a section that maps names to components or to streams."""
    for key in [*after, *(key for key in before if key not in after)]:
        old, new = before.get(key), after.get(key)
        if named:
            names = {each['name'] for each in (old, new) if each is not None}
            # A component under the key of another one: the old one is removed, and the new one is added.
            pairs = [(old, new)] if len(names) == 1 else [(old, None), (None, new)]
            for before_it, after_it in pairs:
                path = f'{section}.{(after_it or before_it or {})["name"]}'
                yield from _component_changes(f'{section}.{key}', path, before_it, after_it)
        else:
            yield from _value_changes(f'{section}.{key}', f'{section}.*', old, new)


def _component_changes(
    key: str, path: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> Iterator[Change]:
    """Yield the changes of a component: as a whole if it was added, removed or replaced by one of another name."""
    if before is None and after is None:
        return
    if before is not None and after is not None and before.get('name') == after.get('name'):
        yield from _value_changes(key, path, before, after)
    elif key in ('model', 'optimizer'):  # the keywords of another class mean nothing here
        yield Change(f'{key}.name', rule_of(f'{path}.name'), (before or {}).get('name'), (after or {}).get('name'))
    else:
        yield Change(key, rule_of(path), before, after)


def _value_changes(key: str, path: str, before: Any, after: Any) -> Iterator[Change]:
    """Yield the changes of a value, one per entry if it is a mapping in both recipes."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in [*after, *(name for name in before if name not in after)]:
            yield from _value_changes(f'{key}.{name}', f'{path}.{name}', before.get(name), after.get(name))
    elif before != after or isinstance(before, bool) != isinstance(after, bool):
        yield Change(key, rule_of(path), before, after)
