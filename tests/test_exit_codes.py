"""How our programs end, as real processes: mistakes of the user, injected bugs and injected faults of storage."""

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from forkserver import ROOT, Process, Server
from ranks import Ranks
from shards import draw_picture

from diffusion.launch import run_lock

LOG_LINE = re.compile(r'\d\d:\d\d:\d\d (INFO|WARNING): ')
DIFFUSION = ('-m', 'diffusion')


@dataclass
class Site:
    """A recipe of two batches, its finished run, and processes of our programs."""

    server: Server
    folder: Path
    recipe: Path
    run: Path
    """Folder of the run, with the checkpoints ba1 and ba2."""

    def end(self, command: Sequence[str | Path], **variables: str) -> tuple[int, str]:
        """Run `python COMMAND`; returns its exit status and what it wrote to stderr."""
        environ = os.environ | {'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': str(ROOT)} | variables
        with (self.folder / 'stdout').open('wb') as out, (self.folder / 'stderr').open('wb') as error:
            outputs = (out.fileno(), error.fileno())
            words = [str(word) for word in command]
            process = Process(self.server.path, words, environ=environ, folder=str(self.folder), outputs=outputs)
            status = process.poll(120)
        told = (self.folder / 'stderr').read_text()
        assert status is not None, told
        return status, told

    def run_py(self, *overrides: str) -> list[str | Path]:
        """The command that runs the recipe."""
        return [ROOT / 'run.py', self.recipe, *overrides]

    def file(self, name: str, content: str | bytes) -> Path:
        """Write a file and return its path."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def copy_of_run(self, name: str) -> str:
        """Copy the run under another name; returns the override that goes on with the copy."""
        shutil.copytree(self.run, self.run.with_name(name), symlinks=True)
        return f'name={name}'


@pytest.fixture(scope='module')
def site(
    tmp_path_factory: pytest.TempPathFactory, tiny_recipe: Callable[..., dict[str, Any]], forkserver: Server
) -> Site:
    folder = tmp_path_factory.mktemp('exit-codes')
    content = tiny_recipe(folder / 'runs', algorithms={'ema': {'ema_start': '1ba'}})
    content['trainer'] |= {'max_duration': '2ba', 'save_interval': '1ba'}
    content['generate'] = {'num_inference_steps': 1, 'prompts': ['a']}
    recipe = folder / 'recipe.yaml'
    recipe.write_text(yaml.safe_dump(content), encoding='utf-8')
    site = Site(forkserver, folder, recipe, folder / 'runs' / 'run')
    assert site.end(site.run_py())[0] == 0
    return site


def other_index(site: Site) -> list[str | Path]:
    folder = site.file('other/index.json', '{"shards": 3}').parent
    return site.run_py('name=new', f'streams.small.local={folder}')


def locked_by_another(site: Site) -> list[str | Path]:
    """By this process, which lives."""
    folder = site.run.with_name('locked')
    folder.mkdir()
    owner = run_lock.Owner.current({})
    content = {'owner': vars(owner), 'count': 0, 'at': owner.since}
    (folder / run_lock.LOCK).write_text(json.dumps(content))
    return site.run_py('name=locked')


def all_damaged(site: Site) -> list[str | Path]:
    name = site.copy_of_run('damaged')
    for checkpoint in ('ba1', 'ba2'):
        os.truncate(site.run.with_name('damaged') / checkpoint / 'state.pt', 1000)
    return site.run_py(name)


def without_captions(site: Site) -> list[str | Path]:
    folder = site.file('images/a.png', draw_picture(0, 64)).parent
    return [*DIFFUSION, 'prepare', 'folder', folder, '--out', 'prepared', '--sizes', '32', '--workers', '1']


RUN_PY: dict[str, tuple[Callable[[Site], list[str | Path]], str]] = {
    'mistyped key': (lambda site: site.run_py('loader.num_worker=1'), 'loader.num_worker: unknown key; did you mean'),
    'unknown component': (lambda site: site.run_py('optimizer.name=adamww'), "optimizer: .*'adamww'"),
    'unknown keyword': (lambda site: site.run_py('model.resolutoin=32'), 'model.resolutoin: unknown key'),
    'wrong type': (lambda site: site.run_py('global_batch=eight'), "global_batch: 'eight' is not an integer"),
    'bad duration': (lambda site: site.run_py('trainer.max_duration=long'), "'long' is not a duration"),
    'value still to be given': (lambda site: site.run_py('streams.small.local=???'), 'streams.small.local: is still'),
    'several mistakes': (lambda site: site.run_py('global_batch=0', 'seed=-1', 'name=a/b'), 'has 3 mistakes'),
    'missing recipe': (lambda site: [ROOT / 'run.py', 'none.yaml'], 'none.yaml cannot be read'),
    'recipe is a folder': (lambda site: [ROOT / 'run.py', site.folder], 'cannot be read'),
    'recipe is not YAML': (lambda site: [ROOT / 'run.py', site.file('a.yaml', 'a: [')], r'a\.yaml:\d+:\d+: '),
    'recipe is not text': (lambda site: [ROOT / 'run.py', site.file('b.yaml', b'\xff\xfe')], 'not UTF-8'),
    'extends nothing': (
        lambda site: [ROOT / 'run.py', site.file('c.yaml', 'extends: d.yaml')],
        'd.yaml cannot be read',
    ),
    'module cannot be imported': (lambda site: site.run_py('imports=[no_such_parts]'), 'no_such_parts cannot be'),
    'missing stream': (lambda site: site.run_py('streams.small.local=nowhere'), 'nowhere has no index.json'),
    'index of something else': (other_index, 'is not an index of MDS shards'),
    'bad shape': (lambda site: site.run_py('streams.small.shape=33x32'), 'multiples of 8 pixels'),
    'two streams in one folder': (
        lambda site: site.run_py('name=new', 'streams.again=${streams.small}', 'loader.batching_method=random'),
        'as streams.small is',
    ),
    'latents wanted, images given': (
        lambda site: site.run_py('name=new', 'dataset.name=latents'),
        'latent_moments is needed',
    ),
    'bad size': (lambda site: site.run_py('loader.cache_limit=much'), "'much' is not a size"),
    'output cannot be written': (
        lambda site: site.run_py(f'runs_dir={site.recipe}/runs'),
        'recipe.yaml is not a folder',
    ),
    'precompute into a file': (
        lambda site: site.run_py(
            'task=precompute', 'precompute.streams=${streams}', f'precompute.out={site.recipe}', 'name=new'
        ),
        'precompute.out: .* is not a folder',
    ),
    'no such checkpoint': (lambda site: site.run_py('init_from=nowhere', 'name=new'), 'nowhere does not exist'),
    'folder that is not a checkpoint': (
        lambda site: site.run_py('task=generate', f'checkpoint={site.folder}'),
        'is not a checkpoint or a run',
    ),
    'weights of another model': (
        lambda site: site.run_py(f'init_from={site.run}', 'name=new', 'model.block_out_channels=[32,64]'),
        'of another architecture',
    ),
    'no such pretrained model': (
        lambda site: site.run_py('name=new', 'model.vae=nobody/nothing'),
        'nobody/nothing.*could not be loaded',
    ),
    'all checkpoints damaged': (all_damaged, 'none of its 2 checkpoints is whole'),
    'another seed on resume': (
        lambda site: site.run_py(site.copy_of_run('seed'), 'seed=18', 'trainer.max_duration=3ba'),
        'seed: 18, the run was started with 17',
    ),
    'another optimizer on resume': (
        lambda site: site.run_py('optimizer.name=decoupled_adamw', 'trainer.max_duration=3ba'),
        'of a run with AdamW',
    ),
    'run of somebody else': (lambda site: site.run_py('trainer.autoresume=false'), 'checkpoints of another run'),
    'run in use': (locked_by_another, 'trains into this folder'),
}
COMMAND: dict[str, tuple[Callable[[Site], list[str | Path]], str]] = {
    'unknown command': (lambda site: ['exprot'], "there is no command 'exprot'; did you mean 'export'"),
    'unknown option': (lambda site: ['check', site.recipe, '--strickt'], 'unrecognized arguments: --strickt'),
    'missing value': (lambda site: ['plan', site.recipe, '--gpus'], 'argument --gpus: expected'),
    'mistake in a recipe': (lambda site: ['check', site.recipe, 'seed=x'], "seed: 'x' is not an integer"),
    'unknown GPU': (lambda site: ['plan', ROOT / 'yamls' / 'phase1.yaml', '--gpu', 'h1000'], 'h1000'),
    'export over something': (lambda site: ['export', site.run, '--out', site.folder], '--out: .* is not empty'),
    'export into a file': (lambda site: ['export', site.run, '--out', site.recipe / 'a'], '--out: .*not a folder'),
    'images into a file': (lambda site: ['generate', site.run, 'a', '--out', site.recipe], '--out: .*not a folder'),
    'export of no run': (lambda site: ['export', site.folder, '--out', 'a'], 'is not a checkpoint or a run'),
    'options that contradict': (lambda site: ['export', site.run, '--out', 'a', '--at', '2'], 'with --ema-width'),
    'no snapshots': (lambda site: ['export', site.run, '--out', 'a', '--ema-width', '0.1'], 'no snapshots'),
    'unknown scheduler': (lambda site: ['generate', site.run, 'a', '--scheduler', 'ddmi'], "'ddmi' is unknown"),
    'unknown stream': (lambda site: ['data', 'verify', site.recipe, 'smal'], "did you mean 'small'"),
    'sheet of another kind': (lambda site: ['data', 'look', site.recipe, '--out', 'a.gif'], 'use .png or .html'),
    'prepare nothing': (
        lambda site: ['prepare', 'folder', 'nowhere', '--out', 'prepared', '--sizes', '32'],
        'there is no such folder',
    ),
    'prepare without captions': (lambda site: without_captions(site)[2:], 'no_caption'),
    'prepare into a file': (
        lambda site: ['prepare', 'folder', site.folder, '--out', site.recipe / 'a', '--sizes', '32'],
        'out: .*is not a folder',
    ),
    'missing job': (lambda site: ['launch', 'none.yaml', '--dry-run'], 'none.yaml cannot be read'),
}


def assert_one_message(told: str, message: str) -> None:
    """The log, if there is one, and then an error of one to three lines, or a line for each mistake of a recipe."""
    assert 'Traceback' not in told
    lines = told.splitlines()
    start = next(number for number, line in enumerate(lines) if 'error: ' in line)
    assert re.search(message, told), told
    assert all(LOG_LINE.match(line) or line.startswith(('usage: ', ' ', 'preparing ')) for line in lines[:start]), told
    mistakes = re.search(r'has (\d+) mistakes:$', lines[start])
    assert len(lines[start:]) <= (1 + int(mistakes[1]) if mistakes else 3), told


@pytest.mark.parametrize('mistake', RUN_PY)
def test_a_mistake_ends_a_run_with_78_and_one_message(site, mistake):
    command, message = RUN_PY[mistake]
    status, told = site.end(command(site))
    assert status == 78, told
    assert_one_message(told, message)


def test_a_wrong_number_of_devices_ends_a_run_with_78(site):
    status, told = site.end(site.run_py(), WORLD_SIZE='3')
    assert status == 78, told
    assert_one_message(told, 'global_batch: 8 does not divide over 3 devices')


@pytest.mark.parametrize('mistake', COMMAND)
def test_a_mistake_ends_the_command_with_2_and_one_message(site, mistake):
    words, message = COMMAND[mistake]
    status, told = site.end([*DIFFUSION, *words(site)])
    assert status == 2, told
    assert_one_message(told, message)


def test_the_traceback_of_a_mistake_can_be_asked_for(site):
    for command, expected in ((site.run_py('seed=x'), 78), ([*DIFFUSION, 'check', site.recipe, 'seed=x'], 2)):
        status, told = site.end(command, DIFFUSION_TRACEBACK='1')
        assert status == expected
        assert told.startswith('Traceback')
        assert f'\nerror: {site.recipe} has a mistake:' in told


TRAIN = ['run.py', '{recipe}', 'name=new-{count}']
RESUME = ['run.py', '{recipe}', 'trainer.max_duration=3ba']
PRECOMPUTE = ['run.py', '{recipe}', 'task=precompute', 'precompute.streams=${streams}', 'precompute.out=latents']
BUGS = {
    'KeyError in config': ('diffusion.config.load:check_recipe', "{}['key']", ['diffusion', 'check', '{recipe}']),
    'zip in planning': (
        'diffusion.planning.cli:run_plan',
        'list(zip([1], [], strict=True))',
        ['diffusion', 'plan', '{recipe}'],
    ),
    'unpacking in training': ('diffusion.training.train:parallelism_config', 'one, two = [1]', TRAIN),
    'shapes in models': (
        'diffusion.models.latent_diffusion:LatentDiffusion.loss',
        'torch.zeros(3).reshape(2, 2)',
        TRAIN,
    ),
    'shapes in data': ('diffusion.data.image_text:planes', 'numpy.zeros(3).reshape(2, 2)', TRAIN),
    'TypeError in algorithms': ('diffusion.algorithms.ema:EMA.apply', "len(3) + 'a'", TRAIN),
    'AssertionError in callbacks': (
        'diffusion.callbacks.replaced_samples:ReplacedSamples.batch_end',
        "assert False, 'impossible'",
        TRAIN,
    ),
    'IndexError in loggers': ('diffusion.loggers.metrics_file:is_number', '[][0]', TRAIN),
    'AttributeError in checkpointing': (
        'diffusion.checkpointing.checkpointer:_about',
        'None.batch',
        TRAIN,
    ),
    'int() at resume': ('diffusion.checkpointing.checkpointer:_check_optimizer', "int('x')", RESUME),
    'RecursionError in tasks': (
        'diffusion.tasks.generate:save_pictures',
        'injected()',
        ['run.py', '{recipe}', 'task=generate'],
    ),
    'float() in export': (
        'diffusion.tasks.export:pipeline_of',
        "float('wide')",
        ['diffusion', 'export', '{run}', '--out', 'exported'],
    ),
    'ValueError in prepare': (
        'diffusion.prepare.settings:sizes_problem',
        'numpy.arange(3).reshape(2, 2)',
        ['diffusion', 'prepare', 'folder', '{run}', '--out', 'prepared', '--sizes', '32'],
    ),
}
FAULTS = {
    'recipe': ('pathlib:Path.read_text', 'EIO', ['diffusion', 'check', '{recipe}']),
    'recipe of a run': ('diffusion.training.train:write_whole', 'EIO', TRAIN),
    'save': ('diffusion.checkpointing.checkpoint_store:publish', 'ESTALE', TRAIN),
    'save on a full disk': ('diffusion.checkpointing.checkpoint_store:HashingWriter.write', 'ENOSPC', TRAIN),
    'hash at resume': ('diffusion.checkpointing.checkpoint_store:record_of', 'EIO', RESUME),
    'list at resume': ('diffusion.checkpointing.checkpoint_store:list_checkpoints', 'ESTALE', RESUME),
    'weights at resume': ('diffusion.checkpointing.run_folder:torch.load', 'EIO', RESUME),
    'metrics': ('diffusion.loggers.metrics_file:json.dumps', 'ETIMEDOUT', TRAIN),
    'Hub': ('diffusion.models.pretrained:AutoencoderKL.from_pretrained', 'ECONNRESET', TRAIN),
    'precompute': ('os:fsync', 'EDQUOT', PRECOMPUTE),
    'export': (
        'diffusion.tasks.export:StableDiffusionPipeline.save_pretrained',
        'EIO',
        ['diffusion', 'export', '{run}', '--out', 'exported'],
    ),
    'prepare': ('os:fsync', 'ENOSPC', ['diffusion', 'prepare', 'folder', '{images}', '--out', 'out', '--sizes', '32']),
}
DATA_FAULTS = {
    'index': ('diffusion.data.verified_stream:VerifiedStream._newest_index', 'EIO', TRAIN),
    'shard': ('diffusion.data.verified_stream:damage', 'EIO', TRAIN),
}


def end_with(site: Site, target: str, statement: str, command: Sequence[str]) -> tuple[int, str]:
    images = site.file('images/a.png', draw_picture(0, 64)).parent
    count = len([*site.run.parent.iterdir()])
    words = [str(word).replace('{recipe}', str(site.recipe)).replace('{run}', str(site.run)) for word in command]
    words = [word.replace('{count}', str(count)).replace('{images}', str(images)) for word in words]
    return site.end([ROOT / 'tests' / 'injected.py', target, statement, *words])


def raising(name: str) -> str:
    return f'raise OSError(errno.{name}, os.strerror(errno.{name}))'


@pytest.mark.parametrize('bug', BUGS)
def test_a_bug_ends_with_1_and_its_traceback(site, bug):
    status, told = end_with(site, *BUGS[bug])
    assert status == 1, told
    assert 'Traceback' in told
    assert 'in injected\n' in told, 'the frame that raised'


@pytest.mark.parametrize('fault', FAULTS)
def test_a_fault_of_storage_ends_with_1_and_its_traceback(site, fault):
    target, name, command = FAULTS[fault]
    status, told = end_with(site, target, raising(name), command)
    assert status == 1, told
    assert 'Traceback' in told
    assert 'in injected\n' in told, 'the frame that raised'
    if fault == 'save on a full disk':
        assert re.search(r'ba1: not saved, no space left on \S+, 0\.\d\d GiB needed', told)


@pytest.mark.parametrize('fault', DATA_FAULTS)
def test_a_fault_in_reading_data_ends_with_1_and_names_the_stream(site, fault):
    target, name, command = DATA_FAULTS[fault]
    status, told = end_with(site, target, raising(name), command)
    assert status == 1, told
    assert re.search(r'(?m)^error: streams\.small: .*Input/output error', told), told


def test_a_save_that_fails_on_one_rank_ends_all_with_1(site, ranks: Ranks):
    command = [ROOT / 'tests' / 'injected.py', 'diffusion.checkpointing.checkpoint_store:publish', raising('ESTALE')]
    job = ranks.start_program(2, *command, 'run.py', site.recipe, 'name=two')
    assert job.wait() == [1, 1], job.output()
    first, second = job.outputs()
    assert 'in injected\n' in first
    assert re.search(
        r'RuntimeError: \S+/two/ba1: not saved \(rank 0: OSError: \[Errno 116\] Stale file handle\)', second
    )
