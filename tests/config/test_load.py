"""Loading of recipes, and the error messages for mistakes in them."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recipe_files import all_values

from diffusion.config import registry
from diffusion.config.checks import SINGLE_COMPONENT_SECTIONS, SUPPLIED, check_recipe
from diffusion.config.load import (
    Component,
    Recipe,
    RecipeError,
    StreamConfig,
    check_devices,
    check_paths,
    load,
    to_yaml,
)
from diffusion.config.recipe import LoraConfig, ParallelismConfig
from diffusion.config.yaml_files import dump, parse_yaml

ROOT = Path(__file__).parents[2]
YAMLS = sorted((ROOT / 'yamls').glob('*.yaml'))

VALID = {
    'name': 'run',
    'global_batch': 8,
    'model': {'name': 'tiny', 'resolution': 64},
    'streams': {'a': {'local': 'data/a', 'resolution': 64}},
    'trainer': {'max_duration': '8ba'},
}


@pytest.fixture
def write(tmp_path):
    def write_file(content, name='recipe.yaml'):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(VALID | content, sort_keys=False))
        return path

    return write_file


@pytest.mark.parametrize('path', YAMLS, ids=lambda path: path.name)
def test_shipped_recipe_loads_and_reads_back_equal_after_it_was_saved(path, tmp_path):
    recipe = load(path, allow_missing=True)
    assert recipe.name == path.stem and recipe.not_inherited == []
    head = path.read_text().split('\n\n')[0]
    assert all(f'# {word}:' in head for word in ('Cost', 'Result', 'Command'))
    if 'pretrained' in registry.signature('model', recipe.model.name).names():
        assert '# License' in head, 'the licenses of the pretrained weights'
    given_values = [f'{problem.where}=s3://bucket/{index}' for index, problem in enumerate(recipe.missing)]
    complete, saved = load(path, given_values), tmp_path / 'recipe.yaml'
    assert complete.missing == []
    saved.write_text(to_yaml(complete))
    assert all_values(load(saved)) == all_values(complete)
    assert to_yaml(load(saved)) == saved.read_text()


characters = st.characters(blacklist_categories=['Cs'], blacklist_characters='\0')
names = st.text('abcdefghij_', min_size=1, max_size=8)


@example(batch=1, lr=1.0, streams={'if': 64}, prompts=['1e100', '-', '\x85', 'a\u2028b', '1_0', 'on', '2024-01-01'])
@given(
    batch=st.integers(1, 10**6),
    lr=st.floats(1e-9, 1.0),
    streams=st.dictionaries(names, st.sampled_from([64, 256, 512]), min_size=1, max_size=4),
    prompts=st.lists(st.text(characters, max_size=20), max_size=3),
)
@settings(max_examples=5, deadline=None)
def test_random_recipe_round_trips_through_yaml(tmp_path_factory, batch, lr, streams, prompts):
    first, second = (tmp_path_factory.mktemp('recipes') / name for name in ('a.yaml', 'b.yaml'))
    content = VALID | {
        'global_batch': batch,
        'optimizer': {'name': 'adamw', 'lr': lr},
        'streams': {name: {'remote': f's3://b/{name}', 'resolution': side} for name, side in streams.items()},
        'generate': {'prompts': [prompt for prompt in prompts if prompt != '???' and '${' not in prompt]},
    }
    first.write_text(dump(content), encoding='utf-8')
    recipe = load(first)
    assert recipe.generate.prompts == content['generate']['prompts']
    second.write_text(to_yaml(recipe), encoding='utf-8')
    assert all_values(load(second)) == all_values(recipe)


def test_phase_two_changes_only_some_settings_of_phase_one():
    remotes = ['streams.laion.remote=s3://b/a', 'eval_streams.coco.remote=s3://b/c']
    one, two = (load(ROOT / f'yamls/phase{number}.yaml', remotes) for number in (1, 2))
    assert two.init_from == 'runs/phase1'
    assert two.algorithms['ema'] == Component('ema', {'ema_start': '800000ba', 'smoothing': 0.9999})
    assert two.model.kwargs == one.model.kwargs | {'resolution': 512}
    assert (one.trainer['max_duration'], two.trainer['max_duration']) == ('550000ba', '850000ba')
    assert two.optimizer == one.optimizer == Component('adamw', {'lr': 1e-4, 'weight_decay': 0.01})
    assert (one.global_batch, one.device_train_microbatch_size) == (2048, 16)
    assert one.scheduler == Component('constant_with_warmup', {'t_warmup': '10000ba'})
    assert not one.parallelism.reshard_after_forward


REQUIRED = {
    **{f'{name}_with_warmup': {'t_warmup': '1ba'} for name in ('constant', 'linear', 'cosine')},
    'multi_step_with_warmup': {'t_warmup': '1ba', 'milestones': ['2ba']},
    'gradient_clipping': {'clipping_type': 'norm', 'clipping_threshold': 1.0},
    'ema': {'half_life': '1ba'},
    'image_grid': {'prompts': ['a house']},
    'prometheus_file': {'path': 'metrics.prom'},
    **{name: {'revision': '0123456789' * 4} for name in ('prx', 'mmdit', 'i1')},
}
"""Keywords without which a component cannot be loaded."""
OTHERS: dict[str, dict] = {
    'diffusion_dpo': {'dataset': {'name': 'preference_pairs'}, 'init_from': 'runs/base/ba1'},
    'preference_pairs': {'algorithms': {'diffusion_dpo': None}, 'init_from': 'runs/base/ba1'},
}
"""Sections without which a component cannot be used."""


@pytest.mark.parametrize('kind', sorted(registry.TARGETS.keys() - {'trainer', 'guidance'}))
def test_saved_recipe_has_the_defaults_of_each_component_and_loads(kind, write, tmp_path):
    section, saved = kind if kind in SINGLE_COMPONENT_SECTIONS else f'{kind}s', tmp_path / 'saved.yaml'
    shipped = [name for name in registry.names(kind) if isinstance(registry.TARGETS[kind][name], str)]
    for name in shipped:
        component = {'name': name} | REQUIRED.get(name, {})
        model = {'model': {'name': 'tiny_prx'}} if kind == 'algorithm' else {}
        path = write(model | OTHERS.get(name, {}) | {section: component if section == kind else {'any': component}})
        saved.write_text(to_yaml(load(path)))
        found = parse_yaml(saved.read_text())[section]
        found = found if section == kind else found['any']
        defaults = registry.signature(kind, name).defaults()
        left_out = {*SUPPLIED.get(kind, ()), *registry.PROGRAM_DEFAULTS.get(kind, ())}
        assert found.keys() == component.keys() | {
            key for key, value in defaults.items() if value is not None and key not in left_out
        }
        assert [*found][: len(component)] == [*component], 'given values come first'
        assert to_yaml(load(saved)) == saved.read_text()


def test_saved_recipe_has_the_defaults_inside_a_keyword(write, tmp_path):
    path = write({'model': {'name': 'tiny', 'objective': {'prediction_type': 'sample'}}})
    objective = parse_yaml(to_yaml(load(path)))['model']['objective']
    assert [*objective][:2] == ['prediction_type', 'path'] and objective['num_train_timesteps'] == 1000
    assert load(path).optimizer == Component('adamw', {'lr': 1e-4, 'weight_decay': 0.01})
    assert load(path).parallelism == ParallelismConfig('ddp', True, 1, 'default', False, 'whole')
    loader, precompute = load(path).loader, load(path).precompute
    assert (loader.max_bad_samples, precompute.batch_size, precompute.shard_mb) == (1e-4, 64, 256)
    assert 'min_snr_gamma' not in objective, 'null by default'


def test_saved_recipe_has_no_defaults_of_components_that_users_register(write, monkeypatch):
    def mine(folder: str = 'runs', every: int = 3) -> None: ...

    monkeypatch.setitem(registry.TARGETS['callback'], 'mine', mine)
    assert parse_yaml(to_yaml(load(write({'callbacks': {'mine': None}}))))['callbacks'] == {'mine': {}}


def test_mappings_merge_and_false_removes_an_entry(write):
    base = write({'callbacks': {'lr_monitor': None, 'nan_monitor': None}}, 'base.yaml')
    child = write('extends: base.yaml\nname: child\ncallbacks: {lr_monitor: false, speed_monitor: {window_size: 5}}\n')
    recipe = load(child)
    assert set(load(base).callbacks) == {'lr_monitor', 'nan_monitor'}
    assert recipe.callbacks['speed_monitor'].kwargs == {'window_size': 5}
    assert set(recipe.callbacks) == {'nan_monitor', 'speed_monitor'}
    assert set(load(child, ['callbacks.speed_monitor=false']).callbacks) == {'nan_monitor'}
    streams = [f'precompute.streams.{name}={{local: x, resolution: 32}}' for name in 'ab']
    streams.append('precompute.streams.a=false')
    assert set(load(child, streams).precompute.streams) == {'b'}


def test_overrides_replace_sections_and_add_entries(write):
    overrides = ['optimizer={name: adamw, lr: 1e-4}', 'streams.b={remote: s3://x/y, resolution: 32}', 'init_from=null']
    recipe = load(write({}), [*overrides, 'seed=3'])
    assert recipe.optimizer.kwargs == {'lr': 1e-4}
    assert recipe.streams['b'].remote == 's3://x/y'
    assert recipe.seed == 3


def test_missing_values_are_listed_if_allowed(write):
    path = write({'streams': {'a': {'remote': '???', 'resolution': 64}}, 'model': {'name': 'sd2', 'vae': '???'}})
    assert [problem.where for problem in load(path, allow_missing=True).missing] == ['model.vae', 'streams.a.remote']


COMMIT = '0123456789abcdef' * 2 + '01234567'
WRONG_CONTENTS = {
    'parallelism: {replicas: 2}': 'parallelism.replicas: needs fsdp2; under ddp every device is a replica: remove it',
    'parallelism: {checkpoints: sharded}': 'parallelism.checkpoints: sharded needs strategy: fsdp2, not ddp; use whole',
    'speed: {reduce_once: true}': 'speed.reduce_once: needs strategy: fsdp2, not ddp',
    'parallelism: {mixed_precision: pure}': 'parallelism.mixed_precision: needs fsdp2; ddp follows trainer.precision',
    'parallelism: {strategy: fsdp1}': r"parallelism.strategy: 'fsdp1' is not .* fsdp2; .* \(SHARD_GRAD_OP is ",
    'parallelism: {sharding_strategy: SHARD_GRAD_OP}': r'sharding_strategy: unknown key; .* \(SHARD_GRAD_OP is ',
    'trainr: {}': "trainr: unknown key; did you mean 'trainer'?",
    "loader: '???'": r'loader: is a section; write \?\?\? for single values in it instead',
    'recipe: a.yaml, backend: {name: slurm}': 'this is a job file, which diffusion launch takes; its recipe is a.yaml',
    'backend: {name: slurm}': 'backend: unknown key',
    "global_batch: '010'": "global_batch: '010' is not an integer; write it without leading zeros: 10",
    'generate: {prompts: [a, 3]}': r'generate.prompts\[1\]: 3 is not a string',
    'callbacks: {lr_monitor: 3}, optimizer: {lr: 1}': '(?s)name: is missing; use one of: adamw.*: 3 is not a mapping',
    'loader: 3, model: {name: tiny, objective: 3}': r'(?s)loader: 3 is not a mapping \(.*objective: 3 is not a mapp',
    "streams: {a: {remote: '???', resolution: 64}}": r'streams.a.remote: is still \?\?\?; set the object store folder',
    'streams: {a: {local: x}}': 'streams.a.resolution: is missing; set the side in pixels',
    "model: {name: tiny, vae: '???'}": r'model.vae: is still \?\?\?',
    'model: {name: sd22}': "model: no model is called 'sd22'; did you mean 'sd2'?",
    'model: {name: tiny, resolutoin: 64}': "model.resolutoin: unknown key; did you mean 'resolution'?",
    'optimizer: {name: adamw, lr: .nan}': 'optimizer.lr: nan is not a number',
    'model: {name: tiny, objective: {path: flow, beta_end: 0.1}}': 'objective.beta_end: a flow has no such setting',
    'model: {name: tiny, objective: {snr_shift: a, min_snr_gamma: [], zero_terminal_snr: true}}': (
        r"min_snr_gamma: \[\] is not .*\n.*snr_shift: 'a' is not a number\n.*zero_terminal_snr: epsilon does not"
    ),
    'model: {name: tiny, caption_dropout_mode: zero}': "caption_dropout_mode: 'zero' is not .*; did you mean 'zeros'",
    'callbacks: {image_grid: {prompts: [a], rewrite: {model: m}}}': 'image_grid.rewrite.endpoint: is missing; give',
    'callbacks: {image_grid: {prompts: [a], rewrite: {modl: m}}}': "rewrite.modl: unknown key; did you mean 'model'",
    "evaluators: {image_metrics: {rewrite: {model: m, endpoint: 'http://a', max_tokens: 0}}}": (
        'evaluators.image_metrics.rewrite.max_tokens: 0 is out of range'
    ),
    "evaluators: {image_metrics: {metrics: [tifa], judge: {model: m, endpoint: 'http://a', scales: [alinment]}}}": (
        r"image_metrics.judge.scales\[0\]: there is no prompt 'alinment', .* did you mean 'alignment'"
    ),
    'evaluators: {image_metrics: {metrics: [judge_score], judge: {model: org/m, engine: transformers}}}': (
        'image_metrics.judge.revision: is missing; give the commit of org/m'
    ),
    "generate: {rewrite: {model: m, endpoint: 'http://a/v1', prompt: rewrit}}": (
        "generate.rewrite.prompt: there is no prompt 'rewrit', .* did you mean 'rewrite'"
    ),
    'callbacks: {image_grid: null}': 'callbacks.image_grid.prompts: is missing',
    'optimizer: {name: adamw, params: 1}': 'optimizer.params: is set by the program; remove it',
    'trainer: {precision: fp32}': 'trainer.max_duration: is missing; set how long to train',
    'trainer: {max_duration: 8 batches}': "trainer.max_duration: '8 batches' is not a duration; write",
    'streams: {a: {local: x, resolution: 60}}': 'streams.a.resolution: 60 is not a multiple of 8 pixels; use 64',
    'streams: {a: {local: x, resolution: 64, shape: 60x64}}': "streams.a.shape: '60x64': sides must be",
    'model: {name: sd2, resolution: 60}': 'model.resolution: 60 is not a positive multiple of 8; use 56 or 64',
    'scheduler: {name: linear_with_warmup, t_warmup: 100}': 'scheduler.t_warmup: 100 has no unit; write 100ba',
    "scheduler: {name: multi_step_with_warmup, t_warmup: 10ba, milestones: ['20']}": "milestones: '20' is not a dura",
    'algorithms: {ema: {ema_start: 100}}': 'algorithms.ema.ema_start: 100 has no unit; write 100ba',
    'global_batch: 33, device_train_microbatch_size: 16': '16 does not divide .* on any .*; use 11, or .* of 32 or 48',
    'callbacks: {image_grid: {prompts: [a], num_inference_steps: 1001}}': 'steps: 1001 is .*; use 1 to 1000',
    'streams: {a: {resolution: 64}}': 'streams.a: has neither remote nor local; give the folder',
    'streams: {}': 'streams: is empty; training needs at least one stream',
    'streams: {a: {local: x, resolution: 64, repeat: 2.0, choose: 5}}': 'repeat and choose are mutually exclusive',
    'imports: [no_such_module_here]': r'imports\[0\]: no_such_module_here cannot be imported',
    "name: '${nmae}'": 'nmae',
    'model: {name: autoencoder}, task: generate': 'model.name: autoencoder does not generate images from prompts',
    'init_from: {from: hf://org/name}': 'init_from.revision: is missing: the files of hf://org/name may change; set',
    'init_from: {from: hf://org/name, revision: main}': r"init_from.revision: 'main' is not a commit; .* 40 hex",
    f'init_from: {{from: hf://name, revision: {COMMIT}}}': "init_from.from: 'hf://name' is not .* repository; write",
    f'init_from: {{from: /data/sd2, revision: {COMMIT}}}': 'init_from.from: .*remove revision if it is a local path',
    f'init_from: {{from: org/name, revision: {COMMIT}, weights: ema}}': 'init_from.weights: ema, but .*one set',
    f"init_from: {{from: org/name, revision: {COMMIT}, resize: 'yes'}}": "'yes' is not true or false; write true",
    'init_from: sd-v1-4.ckpt': r'init_from: .*v1-4\.ckpt is a \.ckpt file, which is pickled .*convert it to safetens',
    'lora: {rank: 0}, init_from: runs/a': 'lora.rank: 0 is less than 1; 4 to 64 are common',
    'lora: {alpha: 0}, init_from: runs/a': r'lora.alpha: 0(\.0)? is not positive; use the rank, for a factor of 1',
    'lora: {targets: []}, init_from: runs/a': 'lora.targets: is empty, so nothing would be trained',
    "lora: {targets: ['']}, init_from: runs/a": 'lora.targets: has an empty name',
    'lora: {}, init_from: a, model: {name: tiny_prx, mup_base_width: 33, num_heads: 1}': '(?s)33 is.*192.*lora trains',
    'lora: {}': 'lora: trains updates of published weights; set init_from',
    'lora: {}, init_from: runs/a': 'model.train_text_encoder: .*text encoder is frozen; set false',
    'lora: {}, init_from: runs/a, model: {name: autoencoder}': 'lora: the model autoencoder has no denoiser',
    'algorithms: {diffusion_dpo: null}, init_from: runs/a': 'dataset.name: image_text has no pairs of images',
    'model: {name: tiny_prx}, algorithms: {tread: {fraction: 1, start: -1}}': '(?s)fraction: 1 is.*start: -1 is neg',
    'algorithms: {contrastive_flow_matching: {weight: 1}}': r'(?s)weight: 1 is not in \(0, 1\).*: needs a flow',
    'algorithms: {contrastive_flow_matching: null}, model: {name: autoencoder}': 'has no denoiser; remove the algorit',
    'model: {name: tiny_prx, representation_alignment: {block: 6, weight: 0}}': '(?s)block 6; .* 0 to 5.*weight: 0 is',
    'model: {name: tiny_prx, representation_alignment: {hidden_size: 0, spatial_norm: 2}}': '(?s)size: 0 is.*norm: 2 i',
    "trainer: '???', model: {name: tiny_prx, mup_base_width: 64, num_heads: 0}": '(?s)heads: 0 is.*trainer: is still',
    "model: {name: tiny_prx}, algorithms: {tread: {fraction: x}, ema: '???'}": r"fraction: 'x'.*\n.*ema: is still",
    "loader: {num_canonical_nodes: 0, epoch_size: 1}, generate: {seed: '???'}": '(?s)0 does.* 1,.*use 8$',
    'model: {name: tiny, objective: {snr_shift: 0, noise_scale: 0, min_snr_gamma: 0}}': '(?s)a: 0 is.*t: 0 is.*e: 0 is',
    'dataset: {name: preference_pairs}, algorithms: {diffusion_dpo: null}, init_from: a, model: {name: tiny_prx, '
    'representation_alignment: {encoder: x, block: 0}}': 'diffusion_dpo: cannot be combined with model.representation_',
    'model: {name: tiny_prx, perceptual_losses: {lpips_weight: -1, lpips_scale: 2}}': '(?s)-1 is neg.*scale: 2 is not',
    'model: {name: tiny_prx, perceptual_losses: {features_side: 0}}': 'features_side: 0 is not positive; 224 is the',
    'evaluators: {image_metrics: {metrics: [fid, fid], size: [1]}}': '(?s)names a metric twice.*size: .1. is not a pai',
    'evaluators: {image_metrics: {guidance_scales: [1, 1], num_images: 0}}': '(?s)list of different.*images: 0 is less',
}
"""Sections of a file with a mistake, and the pattern of its message."""
WRONG_FILES = {
    'name: run\nmodel: [1, 2\n': 'recipe.yaml:3:1: ',
    'name: run\nmodel:\n\tname: tiny\n': 'recipe.yaml:3:1: .*indent with spaces',
    'extends: nowhere.yaml\n': r'extends: .*nowhere.yaml does not exist; the path is relative to',
}
SPACE = re.compile(r' (?=\w+[.=])')  # between overrides
WRONG_OVERRIDES = {
    'device_train_microbatch_size=auto': "'auto' is not an integer",
    'trainer.save_filename=x.pt': "applies only to Composer's own checkpoints; this run saves to .*: remove it",
    'trainer.optimizers=3': 'trainer.optimizers: belongs in another section; set optimizer',
    'trainer.max_duration=5': r'trainer.max_duration: 5 has no unit; write 5ba \(batches\) or 5ep \(epochs\)',
    'trainer.max_duration=1.5': 'trainer.max_duration: 1.5 has no unit; write it as 1000ba',
    'global_batch=0 device_train_microbatch_size=0': '(?s)batch: 0 is not positive.*microbatch_size: 0 is not positive',
    'seed=4294967296': r'seed: 4294967296 is not in \[0, 2\*\*32\)',
    'streams.a.resolution=0 streams.a.repeat=0': '(?s)0 is not a multiple of 8 pixels; use 8.*repeat: 0 is not positiv',
    'streams.a.proportion=1 streams.b.local=y streams.b.resolution=64': 'streams: b: no proportion, but other streams ',
    'streams.a.aspects=true streams.a.shape=64x64': 'streams.a.shape: an `aspects` stream takes its shapes from',
    'loader.cache_limit=5xb loader.shuffle_seed=-1': "(?s)cache_limit: '5xb' is not a size.*shuffle_seed: -1 is neg",
    'loader.max_bad_samples=1.0': 'loader.max_bad_samples: 1.0 is not a fraction',
    'loader.num_canonical_nodes=3 loader.epoch_size=12': '(?s)use 2 or 4, or null.*the global batch of 8; use 8 or 16$',
    'loader.epoch_size=8 streams.a.choose=4': '(?s)choose or repeat: conflicts with .*choose: 4 is .*; use 8$',
    'loader.epoch_size=0 loader.max_bad_samples=-0.1': '(?s)samples: -0.1 is not a fr.*size: 0 is not positive; rem',
    'parallelism.strategy=fsdp2 optimizer.name=decoupled_adamw callbacks.optimizer_monitor={}': 'cannot combine the r',
    'parallelism.strategy=fsdp2 speed.cuda_graphs=true parallelism.activation_checkpointing=true': '(?s)moves.*cannot',
    'parallelism.replicas=0 speed.encode_batch_size=0': '(?s)replicas: 0 is not positive; 1 shards.*_size: 0 is not p',
    'trainer.device=gpu callbacks.loss_guard.action=skip': 'callbacks.loss_guard.action: skip does not support',
    'trainer.precision=amp_fp16 callbacks.loss_guard.action=skip': 'callbacks.loss_guard.action: skip .* amp_fp16',
    'evaluators_interval=10ba': '(?s)needs evaluators, which are empty.*needs eval_streams, which are empty',
    'evaluators_interval=2b': "evaluators_interval: '2b' is not a duration",
    'checkpointing.tiers.disk.save_interval=10x': '(?s)disk.folder: is missing.*is not a duration.* a time such as',
    'checkpointing.tiers.memory.save_interval=1ep': '1ep is not an interval for a tier; use a time',
    'checkpointing.tiers.memory.save_interval=1m trainer.save_folder=a': "tiers.memory: does not apply to Composer's",
    'checkpointing.keep={last: 0, hourly: -1, daily: -2}': '(?s)0 is less than 1; the newest.*-1 is neg.*-2 is neg',
    'checkpointing.keep={every: 2ep, weekly: 3}': "(?s)weekly: unknown key.*'2ep' is not a number of batches; write",
    'checkpointing.keep.every=0ba': "keep.every: '0ba' is not a number of batches",
    'trainer.save_num_checkpoints_to_keep=0 checkpointing.keep.last=3': '0 would keep no checkpoint; use 1 or more',
    'trainer.save_num_checkpoints_to_keep=1 checkpointing.keep.last=3': 'is 1, and checkpointing.keep is set too, wh',
    'trainer.save_folder=elsewhere checkpointing.keep.last=3': "keep: does not apply to Composer's own checkpoints",
    'model.objective.path=x': "model.objective.path: 'x' is not one of diffusion, flow",
    'task=precompute': '(?s)precompute.streams: is empty.*precompute.out: is missing',
    'task=evaluate': 'eval_streams: is empty; evaluation needs',
    'task=generate': 'generate.prompts: is empty; add',
    'trainer.device=gpus': "trainer.device: 'gpus' is not supported; did you mean 'gpu'",
    'trainer.precision=fp16': "trainer.precision: 'fp16' is not supported; did you mean 'amp_fp16'",
    'trainer.device=cpu trainer.precision=amp_bf16': 'trainer.precision: amp_bf16 needs a GPU in',
    'generate.num_inference_steps=0': 'generate.num_inference_steps: 0 is out of range',
    'generate.steps=5': "generate.steps: unknown key; did you mean 'num_inference_steps'",
    'task=generate generate.prompts=[a] model.objective.num_train_timesteps=40': 'steps: 50 is .*; use 1 to 40, the nu',
    'generate.guidance=5 generate.prompts=5': '(?s)prompts: 5 is not a list, each a string.*guidance: 5 is not a mappi',
    'generate.guidance_scale=-1': 'generate.guidance_scale: -1.0 is out of range; use 0 or',
    'generate.guidance_rescale=1.5': 'generate.guidance_rescale: 1.5 is out of range',
    'generate.num_images_per_prompt=0': 'generate.num_images_per_prompt: 0 is out of range; use 1 or',
    'generate.snr_shift=0 model.name=tiny_prx': 'generate.snr_shift: 0 is not positive; use 1 for no shift',
    'generate.snr_shift=3': 'generate.snr_shift: 3 shifts the times of a flow, and this model is',
    'generate.seed=4294967290 generate.prompts=[a,b] generate.num_images_per_prompt=4': '4294967288 for the first of 8',
    'callbacks.image_grid.noise_scheduler=pndm model.name=tiny_prx': "grid.noise_scheduler: 'pndm' cannot sample a fl",
    'generate.noise_scheduler=dimm': "generate.noise_scheduler: 'dimm' is unknown",
}


def test_mistake_is_reported_with_path_cause_and_way_out(write, subtests):
    cases = [(yaml.safe_load(f'{{{text}}}'), (), message) for text, message in WRONG_CONTENTS.items()]
    cases += [(text, (), message) for text, message in WRONG_FILES.items()]
    cases += [({}, SPACE.split(text), message) for text, message in WRONG_OVERRIDES.items()]
    for content, overrides, message in cases:
        with subtests.test(content or overrides), pytest.raises(RecipeError, match=message):
            load(write(content), overrides)


@pytest.mark.parametrize(
    'overrides',
    [
        'global_batch=2147483648 evaluators.image_metrics={metrics: [fid], size: [1, 2]}',
        'callbacks.image_grid={prompts: [a], num_inference_steps: 1000}',
        'seed=0 loader.shuffle_seed=0 loader.max_bad_samples=0.0 loader.num_canonical_nodes=8 loader.epoch_size=8',
        'seed=4294967295 streams.a.choose=8 generate.seed=4294967295 generate.prompts=[a]',
        'generate.guidance_scale=0 generate.guidance_rescale=1 generate.num_inference_steps=1',
        'lora.rank=1 lora.alpha=0.5 init_from=a model.objective.min_snr_gamma=1 model.train_text_encoder=false',
        'checkpointing.keep={last: 1, hourly: 0, daily: 0, every: 1ba}',
        'trainer.eval_interval=0 callbacks.node_health.every=50 model.objective.num_train_timesteps=40',
        'trainer.device=gpu trainer.precision=amp_bf16 callbacks.loss_guard.action=skip',
        'trainer.precision=amp_fp16 callbacks.loss_guard.action=stop trainer.save_num_checkpoints_to_keep=1',
        'model={name: tiny_prx, representation_alignment: {encoder: x, hidden_size: 1, block: 0}}',
        'model={name: tiny_prx, vae: pixels, perceptual_losses: {features_side: 1, encoder: x, lpips_backbone: x}}',
        'task=evaluate eval_streams=${streams} optimizer.name=muon model={name: tiny_prx, mup_base_width: 64}',
        'model.name=tiny_prx generate.snr_shift=.5 algorithms.tread={start: 0, end: 6, fraction: .99}',
    ],
)
def test_values_at_their_bounds_are_accepted(write, overrides):
    load(write({}), SPACE.split(overrides))


@given(batch=st.integers(1, 200), microbatch=st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_microbatch_is_refused_if_it_fits_no_number_of_devices(batch, microbatch):
    recipe = Recipe('a', batch, Component('tiny'), device_train_microbatch_size=microbatch)
    recipe.streams, recipe.trainer = {'a': StreamConfig(64, local='x')}, {'max_duration': '1ba'}
    fits = any(batch % devices == 0 and batch // devices % microbatch == 0 for devices in range(1, batch + 1))
    problems = check_recipe(recipe)
    assert [problem.where for problem in problems] == ([] if fits else ['device_train_microbatch_size'])
    for problem in problems:
        found = re.search(r'use (\d+), or a global_batch of ([\d or]+)$', problem.what)
        assert found is not None
        assert batch % int(found[1]) == 0
        assert all(int(choice) % microbatch == 0 for choice in found[2].split(' or '))


def test_all_mistakes_are_reported_in_one_error(write):
    path = write({'trainr': 1, 'seed': 'x', 'loader': {'shufle': True}, 'streams': {'a': {'resolution': '???'}}})
    with pytest.raises(RecipeError) as error:
        load(path)
    found = [problem.where for problem in error.value.problems]
    assert found == ['trainr', 'seed', 'loader.shufle', 'streams.a.resolution']
    assert str(error.value).startswith(f'{path} has 4 mistakes:\n  trainr: ')


@pytest.mark.parametrize(
    ('batch', 'microbatch', 'canonical_nodes', 'devices', 'message'),
    [
        (2048, 16, None, (128,), None),
        (2048, None, None, (1,), None),
        (100, None, None, (8,), 'global_batch: 100 does not divide over 8 devices; use 96 or 104'),
        (4, None, None, (8,), 'global_batch: 4 does not divide over 8 devices; use 8'),
        (64, 16, None, (8,), r"device_.*: 16 does not divide a device's 8 samples \(64 over 8 devices\); use 8"),
        (2048, None, None, (128, 8), None),
        (1536, None, None, (96, 8), None),
        (1536, None, 64, (4, 8), None),
        (40, None, None, (16, 8), r'global_batch: 40 does not .*; use 32 or 48; 1 or 5 nodes of 8 devices .*'),
        (1536, None, 64, (96, 8), r'.*num_canonical_nodes: 64 cannot be split evenly over 12 nodes; use 192 .*'),
        (2048, None, None, (96, 8), r'global_batch: 2048 does not .*; use 2016 or 2112; 8 or 16 nodes .*'),
    ],
)
def test_devices_and_nodes_must_suit_the_batch_and_the_order_of_samples(
    write, batch, microbatch, canonical_nodes, devices, message
):
    sizes = {'global_batch': batch, 'device_train_microbatch_size': microbatch}
    recipe = load(write(sizes | {'loader': {'num_canonical_nodes': canonical_nodes}}))
    problems = [str(problem) for problem in check_devices(recipe, *devices)]
    assert len(problems) == (message is not None)
    if message:
        assert re.fullmatch(message, problems[0])


def test_missing_files_are_found_by_check_paths(write, tmp_path):
    (tmp_path / 'index.json').write_text('{"shards": [')
    for overrides, *expected in (
        (
            ['init_from=gone', f'streams.a.local={tmp_path}'],
            'is not an index of MDS shards',
            'init_from: .*gone does not',
        ),
        (['task=generate', 'generate.prompts=[a]', 'checkpoint=gone'], 'checkpoint: gone does not exist; give a'),
    ):
        found = [str(problem) for problem in check_paths(load(write({}), overrides))]
        assert len(found) == len(expected) and all(map(re.search, expected, found))


def test_imports_register_custom_components(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(registry.TARGETS, 'model', {**registry.TARGETS['model']})  # other tests list all models
    (tmp_path / 'my_models.py').write_text(
        'from diffusion.config.registry import register\n'
        'def enormous(resolution: int = 64, *, depth: int): ...\n'
        "register('model', 'enormous', 'my_models:enormous')\n"
    )
    content = {'imports': ['my_models'], 'model': {'name': 'enormous', 'depth': 5}}
    assert load(write(content)).model.kwargs == {'depth': 5}
    with pytest.raises(RecipeError, match="model.dpth: unknown key; did you mean 'depth'"):
        load(write({'imports': ['my_models'], 'model': {'name': 'enormous', 'dpth': 5, 'depth': 1}}))


@pytest.mark.parametrize('start', [{'from': '???', 'revision': '???'}, 'runs/phase1'])
def test_initial_weights_may_be_missing_or_those_of_a_run(write, start):
    load(write({'init_from': start}), allow_missing=True)


def test_local_path_and_repository_of_one_name_are_ambiguous(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'org' / 'name').mkdir(parents=True)

    def problems(start):
        return {each.where: each.what for each in check_paths(load(write({'init_from': start})))}

    ambiguous = problems({'from': 'org/name', 'revision': COMMIT})
    assert 'org/name is a local path, but revision is for a repository' in ambiguous['init_from.from']
    assert 'write hf://org/name' in ambiguous['init_from.from']
    for start in ('hf://org/name', 'org/absent'):
        assert not problems({'from': start, 'revision': COMMIT}).keys() & {'init_from', 'init_from.from'}
    assert 'for the repository org/other on the Hub, set revision' in problems('org/other')['init_from']


@pytest.mark.parametrize('name', ['prx', 'mmdit', 'i1'])
def test_pretrained_repository_needs_a_revision(write, tmp_path, monkeypatch, name):
    def missing(**keywords):
        try:
            load(write({'model': {'name': name, **keywords}}), allow_missing=True)
        except RecipeError as error:
            return {problem.where: problem.what for problem in error.problems}['model.revision']
        return ''

    assert re.match('is missing; give the commit of [Psg]', missing())
    assert 'if it is a local folder, write model.pretrained=./org/name' in missing(pretrained='org/name')
    given = [{'revision': COMMIT}, {'revision': '???'}, {'pretrained': None}, {'pretrained': './org/name'}]
    assert not any(missing(**keywords) for keywords in given)
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'org/name').mkdir(parents=True)
    assert not missing(pretrained='org/name')


def test_settings_of_lora_have_defaults(write, tmp_path):
    recipe = load(write({'init_from': 'runs/phase1', 'model': {'name': 'sd2'}, 'lora': {}}))
    assert recipe.lora == LoraConfig(rank=16, alpha=16.0, targets=['to_q', 'to_k', 'to_v', 'to_out.0'])
    (tmp_path / 'saved.yaml').write_text(to_yaml(recipe))
    assert all_values(load(tmp_path / 'saved.yaml')) == all_values(recipe)
