"""Rules for recipe changes between a run and its resume: the effect of changing each key, the reason, and the history.

Every key of a recipe matches a rule, so that no change is ignored: it is either refused, or applied and logged. The
history consists of comments at the end of the run's recipe.yaml, one per changed value, such as `# changed at batch
1200 (2026-11-22T10:00:00+00:00): optimizer.weight_decay 0.01 -> 0.5`.

Recipes are compared by the values of their YAML with defaults filled in, not as `Recipe`, so that recipes saved by
other versions of this package can be compared too. No component is imported.
"""

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args, get_type_hints

from diffusion.config import registry
from diffusion.config.checks import NAMED_COMPONENT_SECTIONS, SET_IN_OTHER_SECTIONS, SINGLE_COMPONENT_SECTIONS, SUPPLIED
from diffusion.config.declarations import ARCHITECTURE, OPTIMIZER_STATE, UPDATE, Effect, OnResume
from diffusion.config.recipe import InitFrom, LoraConfig, Recipe, StreamConfig
from diffusion.config.signatures import Signature


@dataclass(frozen=True)
class Rule:
    """Effect that a change of any of `keys` has on a resume, and the reason."""

    keys: tuple[str, ...]
    """Keys as dotted paths. `*` stands for any stream name; algorithms, callbacks, loggers and evaluators are named by
    their registered names. A final `*` stands for all keys that no other rule names."""
    effect: Effect
    reason: str


def _rule(effect: Effect, reason: str, keys: str) -> Rule:
    return Rule(tuple(keys.split()), effect, reason)


SECTION_RULES = (
    # -- model --
    _rule(Effect.FIXED, 'another model', 'model.name'),
    _rule(Effect.FIXED, 'all random numbers follow from the seed', 'seed'),
    _rule(Effect.FIXED, 'a keyword of your own model, whose effect on the weights is not known', 'model.*'),
    _rule(Effect.FIXED, 'the trained parameters: their shapes and their scale follow from it', 'lora'),
    # -- optimizer and schedule --
    _rule(Effect.FIXED, 'the state of an optimizer fits only its own class', 'optimizer.name'),
    # Composer's optimizers, and this package's optimizers of the same names, have these arguments.
    _rule(UPDATE.effect, UPDATE.reason, 'optimizer.lr optimizer.weight_decay optimizer.eps optimizer.betas'),
    _rule(OPTIMIZER_STATE.effect, OPTIMIZER_STATE.reason, 'optimizer.amsgrad'),
    _rule(Effect.FIXED, 'a keyword of your own optimizer, whose effect on its state is not known', 'optimizer.*'),
    _rule(Effect.APPLIED, 'the learning rate follows the new schedule from the next batch on', 'scheduler.*'),
    # -- algorithms --
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
    _rule(Effect.APPLIED, 'permits small images; does not change any image', 'streams.*.enlarge'),
    _rule(
        Effect.APPLIED,
        'the location and loading of the data, not its content; fingerprints of the content are compared',
        'streams.*.remote streams.*.local streams.*.download_retry streams.*.download_timeout streams.*.validate_hash '
        'loader.num_workers loader.prefetch_factor loader.timeout_seconds loader.predownload loader.cache_folder '
        'loader.cache_limit loader.max_bad_samples',
    ),
    _rule(Effect.APPLIED, 'the evaluations after the resume', 'eval_dataset.* eval_streams.*'),
    _rule(
        Effect.FIXED,
        'the weights that the run has started from; read on resume only for the reference of diffusion_dpo',
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
"""Rules for sections and for other packages' components. This package's components declare their own rules."""
UNKNOWN_KEY = Rule(('*',), Effect.FIXED, 'a key that no rule of this version names')
"""Rule for a key that matches no other rule; a test asserts that all keys match another rule."""
DECLARED_BY = {'model': 'model', 'optimizer': 'optimizer', 'algorithms': 'algorithm'}
"""Sections whose components declare the effect of changing each argument on a resume, and their kind of component."""


@functools.cache
def rules() -> tuple[Rule, ...]:
    """Return the rules of all keys of a recipe: those that components declare, and those of `SECTION_RULES`."""
    keys: dict[OnResume, dict[str, None]] = {}
    for section, kind in DECLARED_BY.items():
        for name in registry.names(kind):
            if registry.is_own(kind, name):
                where = f'{section}.{name}' if section in NAMED_COMPONENT_SECTIONS else section
                for key, meaning in _declared(where, kind, registry.signature(kind, name)):
                    keys.setdefault(meaning, {})[key] = None
    return *(Rule(tuple(keys[each]), each.effect, each.reason) for each in keys), *SECTION_RULES


@functools.cache
def rule_of_key() -> dict[str, Rule]:
    return {key: rule for rule in rules() for key in rule.keys}


def _declared(where: str, kind: str, signature: Signature) -> Iterator[tuple[str, OnResume]]:
    """Yield the paths of a component, its arguments and their fields, as in `Rule.keys`, with effects on a resume."""
    of_component = ARCHITECTURE if kind == 'model' else signature.on_resume
    if signature.on_resume is not None:
        yield where, signature.on_resume
    for parameter in signature.parameters:
        meaning = parameter.on_resume or of_component
        if meaning is None or parameter.name in SUPPLIED.get(kind, ()):
            continue
        yield f'{where}.{parameter.name}', meaning
        if (nested := signature.nested_signature(parameter)) is not None:
            for field in nested.parameters:
                yield f'{where}.{parameter.name}.{field.name}', field.on_resume or meaning


@dataclass(frozen=True)
class Change:
    """A changed value in a recipe."""

    key: str
    rule: Rule
    saved: Any
    """Value that the run was trained with; None if the key was absent."""
    now: Any
    """Value in the recipe now; None if the key is absent."""

    def __str__(self) -> str:
        return f'{self.key} {format_value(self.saved)} -> {format_value(self.now)}'


def rule_of(path: str) -> Rule:
    """Return the rule of a key, written as in `Rule.keys`, or else the rule of the nearest key that contains it."""
    known = rule_of_key()
    if path in known:
        return known[path]
    parts = path.split('.')
    for length in range(len(parts) - 1, 0, -1):
        prefix = '.'.join(parts[:length])
        if f'{prefix}.*' in known:
            return known[f'{prefix}.*']
        # The path leads into the value of the key `prefix`, such as into a mapping given for an argument.
        if prefix in known and length > 1:
            return known[prefix]
    return known.get(parts[0], known.get(f'{parts[0]}.*', UNKNOWN_KEY))


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the values that differ between two recipes, each given as `RecipeValues.values`."""
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
    # A model that sets no seed uses the run's seed, whose change is listed already: do not list it twice.
    seeds = (saved.get('seed'), now.get('seed'))
    return [change for change in found if change.key != 'model.seed' or (change.saved, change.now) != seeds]


def refused(found: list[Change], *, averaging: bool) -> list[Change]:
    """Return the changes that prevent a resume; `averaging` is True if the checkpoint has averaged weights."""
    fixed = {Effect.FIXED, Effect.BEFORE_AVERAGING} if averaging else {Effect.FIXED}
    return [change for change in found if change.rule.effect in fixed]


def format_value(value: Any) -> str:
    """Return a recipe's value as text on one line, such as `0.5`, `null` or `[0.9, 0.99]`."""
    if isinstance(value, str) and re.fullmatch(r'[^\s"\']+', value) and value.isprintable():
        return value
    return json.dumps(value, default=str)


def _entries(section: str, before: Mapping[str, Any], after: Mapping[str, Any], *, named: bool) -> Iterator[Change]:
    for key in [*after, *(key for key in before if key not in after)]:
        old, new = before.get(key), after.get(key)
        if named:
            names = {each['name'] for each in (old, new) if each is not None}
            # If the key now names another component, report the old one as removed and the new one as added.
            pairs = [(old, new)] if len(names) == 1 else [(old, None), (None, new)]
            for before_it, after_it in pairs:
                path = f'{section}.{(after_it or before_it or {})["name"]}'
                yield from _component_changes(f'{section}.{key}', path, before_it, after_it)
        else:
            yield from _value_changes(f'{section}.{key}', f'{section}.*', old, new)


def _component_changes(
    key: str, path: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> Iterator[Change]:
    """Yield the changes of a component's values, or one change if it was added, removed or replaced."""
    if before is None and after is None:
        return
    if before is not None and after is not None and before.get('name') == after.get('name'):
        yield from _value_changes(key, path, before, after)
    elif key in ('model', 'optimizer'):  # list only the names: the arguments of two classes differ
        yield Change(f'{key}.name', rule_of(f'{path}.name'), (before or {}).get('name'), (after or {}).get('name'))
    else:
        yield Change(key, rule_of(path), before, after)


def _value_changes(key: str, path: str, before: Any, after: Any) -> Iterator[Change]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in [*after, *(name for name in before if name not in after)]:
            yield from _value_changes(f'{key}.{name}', f'{path}.{name}', before.get(name), after.get(name))
    elif before != after or isinstance(before, bool) != isinstance(after, bool):
        yield Change(key, rule_of(path), before, after)


HISTORY = '# changed at batch '
"""Start of each line of the history, which is a YAML comment."""
_LINE = re.compile(re.escape(HISTORY) + r'(\d{1,15}) \(([^)]*)\): (\S+) (.*)')


class PastChange(NamedTuple):
    """A past change: a recipe's value that changed at a resume."""

    batch: int
    time: str
    """Time of the resume in ISO 8601."""
    key: str
    change: str
    """Old and new value, such as `0.01 -> 0.5`."""


def history_lines(changes: Sequence[Change], batch: int) -> list[str]:
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds')
    return [f'{HISTORY}{batch} ({now}): {change}' for change in changes]


def read_history(text: str) -> tuple[str, ...]:
    return tuple(line for line in text.splitlines() if line.startswith(HISTORY))


def past_changes(text: str) -> list[PastChange]:
    found = [_LINE.fullmatch(line) for line in read_history(text)]
    return [PastChange(int(each[1]), each[2], each[3], each[4]) for each in found if each]


STREAM_SECTIONS = ('streams', 'eval_streams')
OPTIONAL_SECTIONS = {'init_from': InitFrom, 'lora': LoraConfig}
"""Sections that are null by default, with their classes."""


@dataclass(frozen=True)
class RecipeValues:
    """Values of a recipe."""

    values: dict[str, Any]
    """Plain nested mappings, with the defaults of sections and components filled in."""
    unknown: list[str]
    """Paths of keys that this version of the package does not know."""


def recipe_values(raw: Mapping[str, Any]) -> RecipeValues:
    """Return the values of a recipe with defaults filled in, given the plain mapping in its YAML."""
    unknown: list[str] = []
    values: dict[str, Any] = {}
    hints = get_type_hints(Recipe)
    for item in dataclasses.fields(Recipe):
        if item.repr:
            given = raw[item.name] if item.name in raw else _default(item)
            values[item.name] = _section(item.name, hints[item.name], given, raw, unknown)
    unknown += [key for key in raw if key not in values]
    return RecipeValues(values, unknown)


def _section(name: str, hint: Any, given: Any, raw: Mapping[str, Any], unknown: list[str]) -> Any:
    """Return a top-level value with its defaults filled in; add the paths of unknown keys to `unknown`."""
    if name == 'init_from' and isinstance(given, str):
        given = {'from': given}
    if name in OPTIONAL_SECTIONS and isinstance(given, Mapping):
        # Fill in the defaults, so that a recipe that leaves out a key equals one that sets its default.
        fields = {each.metadata.get('key', each.name): each for each in dataclasses.fields(OPTIONAL_SECTIONS[name])}
        return {key: _default(each) for key, each in fields.items()} | _plain(given)
    if name in SINGLE_COMPONENT_SECTIONS:
        offered = {'seed': raw.get('seed', Recipe.seed)} if name == 'model' else {}
        return _component(name, name.removeprefix('eval_'), None, given, offered, unknown)
    if name in NAMED_COMPONENT_SECTIONS:
        kind = NAMED_COMPONENT_SECTIONS[name]
        return {
            key: _component(f'{name}.{key}', kind, key, entry, {}, unknown)
            for key, entry in (given or {}).items()
            if entry is not False
        }
    if name in STREAM_SECTIONS:
        return _streams(name, given, unknown)
    if name == 'trainer':
        belongs_elsewhere = {*SET_IN_OTHER_SECTIONS, 'model'}
        defaults = registry.signature('trainer', 'composer').parameters
        return {each.name: _plain(each.default) for each in defaults if each.name not in belongs_elsewhere} | (
            _plain(given or {})
        )
    if dataclasses.is_dataclass(hint):
        return _dataclass(name, hint, given, unknown)
    return _plain(given)


def _default(item: dataclasses.Field[Any]) -> Any:
    """Return the default of a dataclass field as YAML represents it; None for a field without a default."""
    if item.default_factory is not dataclasses.MISSING:
        value = item.default_factory()
        return {'name': value.name, **value.kwargs} if hasattr(value, 'kwargs') else _plain(value)
    return None if item.default is dataclasses.MISSING else item.default


def _dataclass(where: str, kind: Any, given: Any, unknown: list[str]) -> dict[str, Any]:
    given = given if isinstance(given, Mapping) else {}
    hints = get_type_hints(kind)
    found = {}
    for item in dataclasses.fields(kind):
        value = given[item.name] if item.name in given else _default(item)
        is_streams = StreamConfig in get_args(hints[item.name])
        found[item.name] = _streams(f'{where}.{item.name}', value, unknown) if is_streams else _plain(value)
    unknown += [f'{where}.{key}' for key in given if key not in found]
    return found


def _streams(where: str, given: Any, unknown: list[str]) -> dict[str, Any]:
    return {
        key: _dataclass(f'{where}.{key}', StreamConfig, stream, unknown)
        for key, stream in (given or {}).items()
        if stream is not False
    }


def _component(
    where: str, kind: str, label: str | None, given: Any, offered: Mapping[str, Any], unknown: list[str]
) -> dict[str, Any] | None:
    if given is None and label is None:
        return None
    given = given if isinstance(given, Mapping) else {}
    name = str(given.get('name', label))
    keywords = {str(key): value for key, value in given.items() if key != 'name'}
    if registry.unknown(kind, name) is not None:  # a user's component that is not registered any more
        return {'name': name} | _plain(keywords)
    set_by_program = {*registry.PROGRAM_DEFAULTS.get(kind, ())} - {*keywords, *offered}
    left_out = {*SUPPLIED.get(kind, ()), *set_by_program}
    return {'name': name} | _keywords(where, registry.signature(kind, name), keywords, offered, unknown, left_out)


def _keywords(
    where: str,
    signature: Signature,
    given: Mapping[str, Any],
    offered: Mapping[str, Any],
    unknown: list[str],
    left_out: Collection[str] = (),
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for parameter in signature.parameters:
        if parameter.name in left_out:
            continue
        value = given.get(parameter.name, offered.get(parameter.name, parameter.default))
        nested = signature.nested_signature(parameter)
        if nested is not None and (value is None or isinstance(value, Mapping)):
            found[parameter.name] = _keywords(f'{where}.{parameter.name}', nested, value or {}, {}, unknown)
        else:
            found[parameter.name] = _plain(value)
    rest = {key: _plain(value) for key, value in given.items() if key not in found}
    unknown += [] if signature.open_ended else [f'{where}.{key}' for key in rest]
    return found | rest


def _plain(value: Any) -> Any:
    """Convert a value to what YAML represents: mappings, lists and scalars; anything else becomes text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
