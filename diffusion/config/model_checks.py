"""Checks of a model and its training method: objective, auxiliary losses, base width, LoRA and algorithms.

`diffusion check` and the constructors of models and algorithms use these checks. No check imports torch.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from diffusion.config import registry
from diffusion.config.families import family_of_model
from diffusion.config.recipe import Component, LoraConfig, Recipe
from diffusion.config.schema import Problem, join

PIXELS = 'pixels'
"""Value of `model.vae` for a model trained on pixels, without an autoencoder; `./pixels` names a folder instead."""
PATHS = ('diffusion', 'flow')
PREDICTION_TYPES = {'diffusion': ('epsilon', 'v_prediction', 'sample'), 'flow': ('velocity', 'sample')}
BETA_SCHEDULES = ('scaled_linear', 'linear', 'cosine')
TIMESTEPS = {'diffusion': ('uniform', 'stratified'), 'flow': ('uniform', 'stratified', 'logit_normal')}
DIFFUSION_ONLY = ('beta_schedule', 'beta_start', 'beta_end', 'zero_terminal_snr', 'min_snr_gamma')
LOGIT_NORMAL_ONLY = ('logit_mean', 'logit_std', 'uniform_fraction')


def check_model(recipe: Recipe) -> list[Problem]:
    """Return a problem for each wrong or unsupported setting of a recipe's model, LoRA and algorithms."""
    model = recipe.model
    found = _check_lora(recipe) + _check_objective(model) + _check_algorithms(recipe) + _check_alignment(model)
    found += _check_dpo(recipe)
    return found + _check_perceptual_losses(model) + _check_width_transfer(recipe) + _check_sprint(model)


def _check_objective(model: Component) -> list[Problem]:
    given = objective_settings(model)
    defaults = registry.settings_of('model', Component(model.name), 'objective') if given else {}
    if not defaults:
        return []
    # Use the default instead of a value of the wrong type, which the type check reports.
    settings = {key: given[key] if _has_type_of(default, given[key]) else default for key, default in defaults.items()}
    problems = objective_problems(settings, defaults)
    return [Problem(f'model.objective.{key}', what) for key, what in problems.items()]


def objective_settings(model: Component) -> dict[str, Any]:
    """Return a model's objective with defaults filled in; {} for models without one and models of other packages."""
    settings = registry.settings_of('model', model, 'objective')
    if settings and model.kwargs.get('objective') is None:
        family = family_of_model(model.name)
        if family.models and not family.u_net:
            settings |= {'path': 'flow', 'prediction_type': 'velocity', 'timesteps': 'logit_normal'}
    return settings


def objective_problems(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, str]:
    """Return error messages, by key, for settings of a `diffusion.Objective` that are not allowed."""
    path = settings['path']
    if path not in PATHS:
        return {'path': f'{path!r}; use one of {", ".join(PATHS)}'}
    problems: dict[str, str] = {}
    choices = {'prediction_type': PREDICTION_TYPES[path], 'beta_schedule': BETA_SCHEDULES, 'timesteps': TIMESTEPS[path]}
    for key, allowed in choices.items():
        if settings[key] not in allowed:
            of_path = '' if key == 'beta_schedule' else f' for path: {path}'
            problems[key] = f'{settings[key]!r}; use one of {", ".join(allowed)}{of_path}'
    unused = DIFFUSION_ONLY if path == 'flow' else ()
    problems |= {key: 'a flow has no such setting; remove it' for key in unused if settings[key] != defaults[key]}
    if settings['timesteps'] != 'logit_normal':
        changed = [key for key in LOGIT_NORMAL_ONLY if settings[key] != defaults[key]]
        problems |= dict.fromkeys(changed, 'only timesteps: logit_normal uses it; set that, or remove it')
    if settings['zero_terminal_snr'] and settings['prediction_type'] == 'epsilon':
        problems['zero_terminal_snr'] = 'epsilon does not determine x at zero SNR; use prediction_type: v_prediction'
    gamma = settings['min_snr_gamma']
    if gamma is not None and gamma <= 0:
        problems['min_snr_gamma'] = f'{gamma} is not positive; use 5, or null to turn it off'
    elif gamma is not None and settings['zero_terminal_snr']:
        problems['min_snr_gamma'] = (
            f'{gamma} with zero_terminal_snr: true gives weight 0 to the last step, where sampling starts; remove one '
            'of the two'
        )
    if settings['snr_shift'] <= 0:
        problems['snr_shift'] = f'{settings["snr_shift"]} is not positive; use 1 to leave the schedule unchanged'
    if settings['noise_scale'] <= 0:
        problems['noise_scale'] = f'{settings["noise_scale"]} is not positive; use 1 for standard normal noise'
    elif settings['noise_scale'] != 1 and path != 'flow':
        problems['noise_scale'] = 'only path: flow uses it; set that, or remove it'
    if settings['logit_std'] <= 0:
        problems['logit_std'] = f'{settings["logit_std"]} is not positive; 1 is common'
    if not 0 <= settings['uniform_fraction'] <= 1:
        problems['uniform_fraction'] = f'{settings["uniform_fraction"]} is not a fraction in [0, 1]'
    return problems


def _has_type_of(default: Any, value: Any) -> bool:
    """Return True if a value has the default's type: text, boolean or number. If that is None: None or a number."""
    if default is None and value is None:
        return True
    if isinstance(default, str | bool):
        return isinstance(value, type(default))
    return isinstance(value, int | float) and not isinstance(value, bool)


ALIGNMENT = 'representation_alignment'
PROJECTIONS = ('mlp', 'conv')


def _check_alignment(model: Component) -> list[Problem]:
    values, settings = (registry.settings_of('model', model, key) for key in (None, ALIGNMENT))
    if not isinstance(values.get(ALIGNMENT), Mapping) or not settings:
        return []
    depth, gamma = values.get('depth'), settings['spatial_norm']
    numbers = [*(settings[key] for key in ('block', 'weight', 'hidden_size')), 0 if gamma is None else gamma]
    problems = {}
    if all(isinstance(each, int | float) for each in numbers):
        problems = alignment_problems(settings, depth=depth if isinstance(depth, int) else None)
    return [Problem(f'model.{ALIGNMENT}.{key}', problem) for key, problem in problems.items()]


def no_features_problem(stream: str) -> str:
    return (
        f'needs images or stored features, but the latents of streams.{stream} have none; precompute them again with '
        f'this recipe (task=precompute), use dataset.name: image_text with the images, or set model.{ALIGNMENT}: null'
    )


def alignment_problems(settings: Mapping[str, Any], *, depth: int | None) -> dict[str, str]:
    """Return error messages for representation alignment, by key; `depth` is the number of blocks, None if unknown."""
    problems = {}
    block, weight, hidden_size = (settings[key] for key in ('block', 'weight', 'hidden_size'))
    if block < 0 or (depth is not None and block >= depth):
        known = '' if depth is None else f' to {depth - 1}'
        problems['block'] = f'the denoiser has no block {block}; use the index of a block, from 0{known}'
    if weight <= 0:
        problems['weight'] = f'{weight} is not positive; use 0.5, or no representation_alignment'
    if hidden_size < 1:
        problems['hidden_size'] = f'{hidden_size} is not positive; 2048 is the default'
    if settings['projection'] not in PROJECTIONS:
        problems['projection'] = f'{settings["projection"]!r}; use one of {", ".join(PROJECTIONS)}'
    if settings['spatial_norm'] is not None and not 0 <= settings['spatial_norm'] <= 1:
        problems['spatial_norm'] = f'{settings["spatial_norm"]} is not a fraction in [0, 1]; 1 is the published value'
    return problems


def routed_alignment_problem(alignment: Mapping[str, Any], start: int, end: int) -> str | None:
    """Return an error message if a convolution aligns one of the blocks start, ..., end - 1, which drop tokens."""
    block = alignment['block']
    if alignment['projection'] != 'conv' or not start <= block < end:
        return None
    return (
        f'the route drops tokens in block {block}, which model.{ALIGNMENT} aligns by a convolution over all tokens; '
        f'use projection: mlp, or a block before {start} or from {end} on'
    )


PERCEPTUAL_LOSSES = 'perceptual_losses'
LPIPS_BACKBONES = ('vgg', 'alex', 'squeeze')
"""Backbones for which the linear layers of LPIPS have been published."""


def _check_perceptual_losses(model: Component) -> list[Problem]:
    settings = registry.settings_of('model', model, PERCEPTUAL_LOSSES)
    if not settings or not isinstance(model.kwargs.get(PERCEPTUAL_LOSSES), Mapping):
        return []
    where, vae = f'model.{PERCEPTUAL_LOSSES}', model.kwargs.get('vae')
    numbers = [settings[key] for key in ('lpips_weight', 'lpips_scale', 'features_weight', 'features_side')]
    found = []
    if all(isinstance(each, int | float) for each in numbers):
        found = [Problem(join(where, key), what) for key, what in perceptual_problems(settings).items()]
    if vae != PIXELS:
        found.append(Problem(where, f'needs a model on pixels, but model.vae is {vae}; set model.vae: pixels'))
    if (problem := clean_image_problem(objective_settings(model))) is not None and 'objective' in model.kwargs:
        found.append(Problem(where, problem))
    return found


def perceptual_problems(settings: Mapping[str, object]) -> dict[str, str]:
    """Return error messages for perceptual losses by key, '' for the whole section; types must already be validated."""
    problems = {}
    for key in ('lpips_weight', 'features_weight'):
        if settings[key] < 0:  # type: ignore[operator]
            problems[key] = f'{settings[key]} is negative; 0 turns the loss off'
    if settings['lpips_weight'] == settings['features_weight'] == 0:
        problems[''] = f'both weights are 0; set lpips_weight or features_weight, or remove {PERCEPTUAL_LOSSES}'
    if settings['lpips_weight'] and not settings['lpips_backbone']:
        problems['lpips_backbone'] = "is missing; give the file of the network's weights, such as vgg16-397923af.pth"
    if settings['lpips_network'] not in LPIPS_BACKBONES:
        problems['lpips_network'] = f'{settings["lpips_network"]!r}; use one of {", ".join(LPIPS_BACKBONES)}'
    if not 0 < settings['lpips_scale'] <= 1:  # type: ignore[operator]
        problems['lpips_scale'] = f'{settings["lpips_scale"]} is not a fraction in (0, 1]'
    if settings['features_weight'] and not settings['encoder']:
        problems['encoder'] = 'is missing; give a folder or repository of a DINOv2 or DINOv3 ViT'
    if settings['features_side'] < 1:  # type: ignore[operator]
        problems['features_side'] = f'{settings["features_side"]} is not positive; 224 is the default'
    return problems


def clean_image_problem(objective: Mapping[str, object]) -> str | None:
    """Return an error message if the clean image cannot be computed from an objective's predictions, else None."""
    if objective['path'] == 'flow' or objective['prediction_type'] == 'sample':
        return None
    return (
        f'needs a flow or x-prediction, but the objective has path: {objective["path"]} and prediction_type: '
        f'{objective["prediction_type"]}; set model.objective.path: flow and prediction_type: sample'
    )


BASE_WIDTH = 'mup_base_width'
ADAM_OPTIMIZERS = ('adamw', 'decoupled_adamw')
"""Optimizers with Adam's update, for which the muP rules hold."""


def _check_width_transfer(recipe: Recipe) -> list[Problem]:
    values, optimizer = registry.settings_of('model', recipe.model), recipe.optimizer
    numbers = [values.get(key) for key in (BASE_WIDTH, 'hidden_size', 'num_heads')]
    sizes = [each for each in numbers if isinstance(each, int) and each > 0]
    if len(sizes) < len(numbers):  # skip unset values; other checks report wrong ones
        return []
    found = []
    if (problem := base_width_problem(*sizes)) is not None:
        found.append(Problem(f'model.{BASE_WIDTH}', problem))
    if recipe.lora is not None:
        found.append(Problem(f'model.{BASE_WIDTH}', 'muP does not apply to low-rank updates; remove one of the two'))
    if recipe.task == 'train' and isinstance(optimizer, Component):
        problem = optimizer_problem(optimizer.name)
        if problem is not None and registry.unknown('optimizer', optimizer.name) is None:
            found.append(Problem('optimizer.name', problem))
    return found


def base_width_problem(base: int, width: int, heads: int) -> str | None:
    """Return an error message if muP's base width is not a multiple of a head's size, width / heads; else None."""
    head, rest = divmod(width, heads)
    if rest or base % head == 0:  # another check reports a width that the number of heads does not divide
        return None
    near = max(head, round(base / head) * head)
    return f'{base} is not a multiple of {head}, the size of a head, which must not depend on the width; use {near}'


def optimizer_problem(name: str) -> str | None:
    if name in ADAM_OPTIMIZERS:
        return None
    return (
        f'{name} has no rules for model.{BASE_WIDTH}, which are those of Adam; use adamw, or remove model.{BASE_WIDTH}'
    )


def _check_lora(recipe: Recipe) -> list[Problem]:
    settings, found = recipe.lora, []
    if not isinstance(settings, LoraConfig):
        return []
    if isinstance(settings.rank, int) and settings.rank < 1:
        found.append(Problem('lora.rank', f'{settings.rank} is less than 1; 4 to 64 are common'))
    if isinstance(settings.alpha, int | float) and settings.alpha <= 0:
        found.append(Problem('lora.alpha', f'{settings.alpha} is not positive; use the rank, for a factor of 1'))
    if isinstance(settings.targets, list) and not all(settings.targets):
        found.append(Problem('lora.targets', 'has an empty name, which would match every layer; remove it'))
    if settings.targets == []:
        found.append(Problem('lora.targets', 'is empty, so nothing would be trained; name layers, such as to_q'))
    if recipe.task == 'train' and recipe.init_from is None:
        found.append(Problem('lora', 'trains updates of existing weights; set init_from to the source of these'))
    if has_no_denoiser(recipe.model):
        found.append(Problem('lora', f'the model {recipe.model.name} has no denoiser; remove the section'))
    elif registry.settings_of('model', recipe.model).get('train_text_encoder') is True:
        what = 'lora trains only the denoiser, so the text encoder is frozen; set false'
        found.append(Problem('model.train_text_encoder', what))
    return found


def trains_on_pairs(recipe: Recipe) -> bool:
    """Return True if a recipe trains on preference pairs by Diffusion-DPO."""
    return any(component.name == 'diffusion_dpo' for _, component in _algorithms(recipe))


def copies_reference(recipe: Recipe) -> bool:
    """Return True if training needs a copy of the initial weights as a frozen reference, also after a resume."""
    return trains_on_pairs(recipe) and recipe.lora is None


def dpo_problem(settings: Mapping[str, Any]) -> str | None:
    """Return an error message if a model has a setting with which Diffusion-DPO does not work, else None."""
    for key in (ALIGNMENT, 'perceptual_losses', SPRINT):
        if settings.get(key):
            return f'cannot be combined with model.{key}, which changes the training loss; set it to null'
    return None


def _check_dpo(recipe: Recipe) -> list[Problem]:
    is_pairs = isinstance(recipe.dataset, Component) and recipe.dataset.name == 'preference_pairs'
    if not trains_on_pairs(recipe):
        if recipe.task != 'train' or not is_pairs:
            return []
        what = 'preference_pairs is for algorithms.diffusion_dpo; image_text trains on the preferred images alone'
        return [Problem('dataset.name', what)]
    where = next(where for where, component in _algorithms(recipe) if component.name == 'diffusion_dpo')
    others = sorted({component.name for _, component in _algorithms(recipe)} & {'tread', 'contrastive_flow_matching'})
    problems = [f'cannot be combined with {", ".join(others)}; remove one of them'] if others else []
    if recipe.init_from is None:
        problems.append('keeps the model close to its initial weights; set init_from to those of a trained model')
    problem = dpo_problem(registry.settings_of('model', recipe.model))
    found = [Problem(where, each) for each in (*problems, problem) if each is not None]
    if isinstance(recipe.dataset, Component) and recipe.dataset.name in ('image_text', 'latents'):
        what = f'{recipe.dataset.name} has no pairs of images for algorithms.diffusion_dpo; use preference_pairs'
        found.append(Problem('dataset.name', what))
    return found


UNROUTED_BLOCKS = 3
"""Default number of blocks after TREAD's route, which process all tokens again."""


def _check_algorithms(recipe: Recipe) -> list[Problem]:
    checks = {'tread': _tread_problems, 'contrastive_flow_matching': _contrastive_problems}
    return [
        Problem(join(where, key), problem)
        for where, component in _algorithms(recipe)
        if component.name in checks
        for key, problem in checks[component.name](recipe.model, component.kwargs).items()
    ]


def route_problems(start: int, end: int, fraction: float, *, depth: int | None) -> dict[str, str]:
    """Return error messages for a TREAD route, by key; `depth` is the number of blocks, or None if unknown."""
    problems = {}
    if not 0 < fraction < 1:
        problems['fraction'] = f'{fraction} is not a fraction in (0, 1); 0.5 is common'
    if start < 0:
        problems['start'] = f'{start} is negative; use the index of a block, from 0'
    elif depth is not None and not start < end <= depth:
        problems['end'] = (
            f'no tokens can skip the blocks {start} to {end - 1} of {depth}; use start < end <= {depth}, such as '
            f'start: {min(start, depth - 1)}, end: {max(depth - UNROUTED_BLOCKS, min(start, depth - 1) + 1)}'
        )
    return problems


def mirror_problem(start: int, end: int, depth: int) -> str | None:
    """Return an error message if a route skips only one end of a long skip between blocks i and depth - 1 - i."""
    if start + end == depth:
        return None
    first = max(0, min(start, (depth - 1) // 2))
    return (
        f'the route skips blocks {start} to {end - 1}, but long skips connect block i of {depth} to block {depth - 1} '
        f'- i; use start + end = {depth}, such as start: {first}, end: {depth - first}'
    )


def _problems_of_route(
    model: Component, settings: Mapping[str, Any], dense_blocks: int, problems_of: Callable[..., dict[str, str]]
) -> dict[str, str]:
    """Return error messages, by key, for a token route; by default it ends before the model's last `dense_blocks`."""
    start, end, fraction = (settings[key] for key in ('start', 'end', 'fraction'))
    mirrored, depth = family_of_model(model.name).mirrored_depth, registry.settings_of('model', model).get('depth')
    if not isinstance(depth, int):
        depth = mirrored or None  # None if neither the recipe nor the family states it
    if end is None and depth is not None:
        end = depth - dense_blocks
    if not isinstance(start, int) or not isinstance(end, int) or not isinstance(fraction, int | float):
        return {}  # another check reports values of a wrong type
    problems = {}
    if mirrored and depth is not None and (problem := mirror_problem(start, end, depth)) is not None:
        problems['end'] = problem
    problems |= problems_of(start, end, fraction, depth=depth)
    alignment = registry.settings_of('model', model, ALIGNMENT)
    if isinstance(model.kwargs.get(ALIGNMENT), Mapping) and isinstance(alignment.get('block'), int):
        problem = routed_alignment_problem(alignment, start, end)
        problems |= {} if problem is None else {'': problem}
    return problems


SPRINT = 'sprint'
SPRINT_DENSE_BLOCKS = 2
"""Default number of blocks after SPRINT's route, which process the fused tokens."""


def _check_sprint(model: Component) -> list[Problem]:
    values, settings = (registry.settings_of('model', model, key) for key in (None, SPRINT))
    if not isinstance(values.get(SPRINT), Mapping) or not settings:
        return []
    problems = _problems_of_route(model, settings, SPRINT_DENSE_BLOCKS, sprint_problems)
    return [Problem(join(f'model.{SPRINT}', key), problem) for key, problem in problems.items()]


def routes_tokens(recipe: Recipe) -> bool:
    """Return True if a recipe's model trains some blocks on a part of the image tokens (TREAD or SPRINT)."""
    algorithms = recipe.algorithms.values() if isinstance(recipe.algorithms, dict) else ()
    has_tread = any(isinstance(each, Component) and each.name == 'tread' for each in algorithms)
    return has_tread or (isinstance(recipe.model, Component) and recipe.model.kwargs.get(SPRINT) is not None)


def sprint_problems(start: int, end: int, fraction: float, *, depth: int | None) -> dict[str, str]:
    """Return error messages for settings of SPRINT, by key; `depth` is the number of blocks, or None if unknown."""
    return route_problems(start, end, fraction or 0.75, depth=depth)  # 0 is the second stage, on all tokens


def contrastive_problem(objective: Mapping[str, Any]) -> str | None:
    """Return an error message if contrastive flow matching does not apply to this objective, else None."""
    found = objective['path'], objective['prediction_type']
    if found == ('flow', 'velocity'):
        return None
    return (
        f'needs a flow that predicts its velocity, but the objective has path: {found[0]} and prediction_type: '
        f'{found[1]}; set model.objective.path: flow and model.objective.prediction_type: velocity'
    )


def contrastive_weight_problem(weight: float) -> str | None:
    # With a weight of 1 or more the loss has no minimum: it falls as the prediction grows.
    return None if 0 < weight < 1 else f'{weight} is not in (0, 1); 0.05 is the published value'


def microbatch_problem(microbatch: int, device_batch: int) -> str | None:
    """Return an error message for contrastive flow matching if a device's batch has several microbatches, else None."""
    if microbatch >= device_batch:
        return None
    return (
        f"contrastive flow matching takes negatives from the whole global batch, but a device's {device_batch} samples "
        f'are divided into microbatches of {microbatch}; use {device_batch}, with a smaller global_batch, more devices '
        'or parallelism.activation_checkpointing if they do not fit into memory'
    )


def _tread_problems(model: Component, kwargs: Mapping[str, Any]) -> dict[str, str]:
    if has_no_denoiser(model) or family_of_model(model.name).u_net:
        return {'': f'the model {model.name} has no image tokens; use a transformer, such as prx, or remove it'}
    settings = registry.settings_of('algorithm', Component('tread', dict(kwargs)))
    problems = _problems_of_route(model, settings, UNROUTED_BLOCKS, route_problems)
    if isinstance(model.kwargs.get(SPRINT), Mapping):
        problems[''] = f'model.{SPRINT} routes tokens too; remove one of the two'
    return problems


def _contrastive_problems(model: Component, kwargs: Mapping[str, Any]) -> dict[str, str]:
    problems = {}
    weight = kwargs.get('weight')
    if isinstance(weight, int | float) and (problem := contrastive_weight_problem(weight)) is not None:
        problems['weight'] = problem
    if has_no_denoiser(model):
        return {**problems, '': f'the model {model.name} has no denoiser; remove the algorithm'}
    # Transformers default to a flow-matching objective, so check only an objective that the recipe sets.
    if isinstance(model.kwargs.get('objective'), Mapping) or family_of_model(model.name).u_net:
        problem = contrastive_problem(objective_settings(model))
        problems |= {} if problem is None else {'': problem}
    return problems


def has_no_denoiser(model: Component) -> bool:
    """Return True if a recipe's model is one of this package's models that have no denoiser."""
    settings = registry.settings_of('model', model)
    return bool(settings) and 'objective' not in settings


def _algorithms(recipe: Recipe) -> Iterator[tuple[str, Component]]:
    """Yield the path and component of each algorithm of a recipe; none unless it is for training and names a model."""
    if recipe.task != 'train' or not isinstance(recipe.algorithms, dict) or not isinstance(recipe.model, Component):
        return
    for key, component in recipe.algorithms.items():
        if isinstance(component, Component):
            yield f'algorithms.{key}', component
