"""Exit statuses and messages of the programs, as real processes: user mistakes, injected bugs and storage faults."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from forkserver import ROOT, Process, Server
from injected import raising
from recipe_files import write_yaml
from shards import draw_image

from diffusion import cli
from diffusion.errors import UserError, exit_status
from diffusion.runs import run_lock
from diffusion.tasks import cli as train_command
from diffusion.tasks import run_recipe

PRECOMPUTE = '{recipe} task=precompute precompute.streams=${streams}'
LOG_LINE = re.compile(r'\d\d:\d\d:\d\d (INFO|WARNING): ')
DIFFUSION = ('-m', 'diffusion')
InProcess = Callable[[Callable[[Sequence[str]], int], Sequence[str | Path]], tuple[int | str | None, str]]


@dataclass
class Site:
    """Working folder with a recipe of two batches and its finished run, in which programs are executed."""

    server: Server
    folder: Path
    recipe: Path
    run: Path
    """Folder of the run, with the checkpoints ba1 and ba2."""

    def execute(self, command: Sequence[str | Path], *, stdout: int | None = None, **variables: str) -> tuple[int, str]:
        """Run `python COMMAND` with a file or a given descriptor as stdout; return its exit status and its stderr."""
        environ = os.environ | {'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': str(ROOT)} | variables
        with (self.folder / 'stdout').open('wb') as out, (self.folder / 'stderr').open('wb') as error:
            outputs = (out.fileno() if stdout is None else stdout, error.fileno())
            words = [str(word) for word in command]
            process = Process(self.server.path, words, environ=environ, folder=str(self.folder), outputs=outputs)
            status = process.poll(120)
        stderr = (self.folder / 'stderr').read_text()
        assert status is not None, stderr
        return status, stderr

    def words(self, text: str) -> list[str]:
        """Return the words of a command line in which {recipe}, {run}, {folder} and {count}, a number, are replaced."""
        values = vars(self) | {'count': len([*self.run.parent.iterdir()])}
        return re.sub(r'(?<!\$)\{(\w+)\}', lambda match: str(values[match[1]]), text).split()

    def file(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path


@pytest.fixture(scope='module')
def site(
    tmp_path_factory: pytest.TempPathFactory, tiny_recipe: Callable[..., dict[str, Any]], forkserver: Server
) -> Site:
    folder = tmp_path_factory.mktemp('exit-codes')
    content = tiny_recipe(folder / 'runs', algorithms={'ema': {'ema_start': '1ba'}})
    content['model']['block_out_channels'] = [32]
    content['trainer'] |= {'max_duration': '2ba', 'save_interval': '1ba'}
    content['generate'] = {'num_inference_steps': 1, 'prompts': ['a']}
    recipe = write_yaml(folder / 'recipe.yaml', content)
    site = Site(forkserver, folder, recipe, folder / 'runs' / 'run')
    status, stderr = site.execute([ROOT / 'run.py', recipe])
    assert status == 0, stderr
    shutil.copytree(site.run, site.run.with_name('damaged'), symlinks=True)
    for checkpoint in ('ba1', 'ba2'):
        os.truncate(site.run.with_name('damaged') / checkpoint / 'state.pt', 1000)
    owner = run_lock.Owner.current({})  # this process, which is alive
    autoencoder = {'model': {'name': 'autoencoder'}, 'generate': {}}
    files = {
        f'runs/locked/{run_lock.LOCK}': json.dumps({'owner': vars(owner), 'count': 0, 'at': owner.since}),
        'autoencoder.yaml': yaml.safe_dump(content | autoencoder),
        'images/a.png': draw_image(0, 64),
        # The files of an export that are read before torch is imported.
        'sd/scheduler/scheduler_config.json': '{"num_train_timesteps": 20}',
        'sd/model_index.json': '{"_class_name": "StableDiffusionPipeline"}',
    }
    for name, file in files.items():
        site.file(name, file)
    return site


EARLY_RUN = {
    'several mistakes': ('{recipe} global_batch=0 seed=-1 name=a/b', 'has 3 mistakes'),
    'missing recipe': ('none.yaml', 'none.yaml does not exist; its folder has'),
    'recipe is a folder': ('{folder}', 'cannot be read'),
    'module cannot be imported': ('{recipe} imports=[no_such_parts]', 'no_such_parts cannot be'),
    'output cannot be written': ('{recipe} runs_dir={recipe}/runs', 'yaml is not a folder'),
    'precompute into a file': (f'{PRECOMPUTE} precompute.out={{recipe}}', 'precompute.out: .* is not a folder'),
    'folder that is not a checkpoint': ('{recipe} task=generate checkpoint={folder}', 'is not a checkpoint or a run'),
}
LATE_RUN = {
    'two streams in one folder': (
        '{recipe} name=new streams.again=${streams.small} loader.batching_method=random',
        'has the same folder as streams.small',
    ),
    'images instead of latents': ('{recipe} name=new dataset.name=latents', 'latent_moments is required'),
    'GPU on a machine without one': (
        '{recipe} name=new trainer.device=gpu',
        'trainer.device: gpu, but PyTorch finds no CUDA GPU .*; for a CPU set trainer.device=cpu',
    ),
    'half precision on a machine without GPU': (
        '{recipe} name=new trainer.device=null trainer.precision=amp_fp16',
        'trainer.precision: amp_fp16 needs a GPU, .*; for a CPU set trainer.precision=fp32',
    ),
    'images that the VAE cannot divide': (
        'autoencoder.yaml name=new streams.small.resolution=40 streams.small.enlarge=true '
        'model.block_out_channels=[8,8,8,8,8]',
        'streams: images of 40x40 px, but the VAE downsamples by 16; use multiples of 16 px',
    ),
    'no such pretrained model': ('{recipe} name=new model.vae=nobody/nothing', 'nobody/nothing.*could not be loaded'),
    'all checkpoints damaged': ('{recipe} name=damaged', 'all 2 checkpoints are damaged'),
    'another seed on resume': ('{recipe} seed=18 trainer.max_duration=3ba', 'seed: 17 in the checkpoint, 18 now'),
    'run in use': ('{recipe} name=locked', 'trains this run'),
}
EARLY_COMMAND = {
    'plot into a folder': ('plan {recipe} --png {folder}', '--png: .* is a folder'),
    'prepare nothing': ('prepare folder nowhere --out prepared --sizes 32', 'there is no such folder'),
    'prepare into a file': ('prepare folder {folder} --out {recipe}/a --sizes 32', 'out: .*is not a folder'),
    'missing job': ('launch none.yaml --dry-run', 'none.yaml does not exist'),
    'export over something': ('export {run} --out {folder}', '--out: .* is not empty'),
    'export over a file': ('export {run} --out {recipe}', '--out: .* is a file'),
    'export of nothing': ('export nowhere --out a', 'is not a checkpoint or a run'),
    'average that is too wide': ('export {run} --out a --ema-width 0.5', 'width=0.5 is not between 0 and 0.2887'),
    'generate with another checkpoint': ('generate {run}/ba7 a', 'contains ba2, ba1'),
    'images into a file': ('generate {run} a --out {recipe}', '--out: .*not a folder'),
    'too many steps': ('generate {run} a --steps 1001', '--steps: 1001 is out of range; use 1 to 1000'),
    'seed out of range': ('generate {run} a b --seed 4294967295', 'use 0 to 4294967294 for the first of 2 images'),
    'unknown scheduler': ('generate {run} a --scheduler dimm', "--scheduler: 'dimm' is unknown; did you mean 'ddim'"),
    'too many steps for an export': ('generate sd a --steps 21', '--steps: 21 is out of range; use 1 to 20'),
    'unknown stream to look at': ('data look {recipe} smal --out a.png', "did you mean 'small'"),
    'stream that is nowhere': ('data look {recipe} --out a.png streams.small.local=nowhere', 'has no index.json'),
    'no samples': ('data look {recipe} --out a.png --samples 0', '--samples: 0'),
    'negative seed': ('data look {recipe} --out a.png --seed -1', '--seed: -1'),
}
EARLY = {'run.py': EARLY_RUN, 'diffusion': EARLY_COMMAND}
LATE_COMMAND = {
    'no snapshots': ('export {run} --out a --ema-width 0.1', 'no snapshots'),
    'prepare without captions': ('prepare folder images --out prepared --sizes 32 --workers 1', 'no_caption'),
}
FAST_LATE = {'two streams in one folder', 'another seed on resume', 'run in use', 'all checkpoints damaged'}
FAST_LATE |= {'no snapshots'}


def partly_slow(names: Iterable[str], fast: set[str]) -> list[Any]:
    """Return names as parameters of a test, with the marker `slow` unless they are in a set."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


def assert_one_message(stderr: str, message: str) -> None:
    """Assert that stderr has optional log lines and then one error of up to three lines, or one line per mistake."""
    assert 'Traceback' not in stderr
    lines = stderr.splitlines()
    start = next(number for number, line in enumerate(lines) if 'error: ' in line)
    assert re.search(message, stderr), stderr
    expected = ('usage: ', ' ', 'preparing ', 'counting ')
    assert all(LOG_LINE.match(line) or line.startswith(expected) for line in lines[:start]), stderr
    mistakes = re.search(r'has (\d+) mistakes:$', lines[start])
    assert len(lines[start:]) <= (1 + int(mistakes[1]) if mistakes else 3), stderr


@pytest.fixture
def in_process(site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> InProcess:
    """Function that runs the `main` of a program in this process, and returns its exit status and stderr.

    It is faster than a new process, for mistakes that are found before PyTorch is imported.
    """
    monkeypatch.chdir(site.folder)
    monkeypatch.setattr(sys, 'path', [*sys.path])

    def execute(main: Callable[[Sequence[str]], int], words: Sequence[str | Path]) -> tuple[int | str | None, str]:
        try:
            status: int | str | None = main([str(word) for word in words])
        except SystemExit as exited:  # of argparse
            status = exited.code
        return status, capsys.readouterr().err

    return execute


EARLY_PROGRAM = """
import contextlib, io, json, sys, time
from diffusion import cli
from diffusion.tasks import run_recipe

def outcome(program, words):
    stderr, begin = io.StringIO(), time.process_time()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = {'run.py': run_recipe.main, 'diffusion': cli.main}[program](words)
        except SystemExit as exited:  # of argparse
            status = exited.code
    return status, stderr.getvalue(), time.process_time() - begin, 'torch' in sys.modules

json.dump([outcome(*each) for each in json.load(sys.stdin)], sys.stdout)
"""
Outcomes = dict[tuple[str, str], tuple[int, str, float, bool]]


@pytest.fixture(scope='module')
def early(site: Site) -> Outcomes:
    """Status, stderr, CPU seconds and import of torch for each early mistake, all made in one new process."""
    mistakes = [(program, name) for program, table in EARLY.items() for name in table]
    orders = [(program, site.words(EARLY[program][name][0])) for program, name in mistakes]
    environ = os.environ | {'PYTHONPATH': str(ROOT)}
    command, text = [sys.executable, '-c', EARLY_PROGRAM], json.dumps(orders)
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=site.folder, env=environ)
    assert done.returncode == 0, done.stderr
    return dict(zip(mistakes, map(tuple, json.loads(done.stdout)), strict=True))


@pytest.mark.parametrize(('program', 'mistake'), [(name, each) for name, table in EARLY.items() for each in table])
def test_mistake_in_a_recipe_exits_with_78_and_in_a_command_with_2_and_one_message(early, program, mistake):
    status, stderr, _, _ = early[program, mistake]
    assert status == (78 if program == 'run.py' else 2), stderr
    assert_one_message(stderr, EARLY[program][mistake][1])


def test_early_mistakes_are_found_without_torch_within_a_second(early):
    assert not [mistake for mistake, (*_, imported) in early.items() if imported]
    assert not {mistake: seconds for mistake, (_, _, seconds, _) in early.items() if seconds > 1}


def test_wrong_number_of_devices_exits_with_78(site, in_process, monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '3')
    status, stderr = in_process(run_recipe.main, [site.recipe])
    assert status == 78, stderr
    assert_one_message(stderr, 'global_batch: 8 does not divide over 3 devices')
    waits: list[float] = []
    monkeypatch.setattr(run_recipe.time, 'sleep', waits.append)
    monkeypatch.setenv('RANK', '1')
    assert (in_process(run_recipe.main, [site.recipe]), waits) == ((78, ''), [5.0]), 'rank 0 prints it'
    assert in_process(run_recipe.main, ['-h']) == (2, 'usage: composer run.py RECIPE [key=value ...]\n')


def test_train_starts_a_process_per_gpu_or_device(site, in_process, monkeypatch):
    monkeypatch.setattr(train_command, 'end_process', sys.exit)
    monkeypatch.setattr(run_recipe, 'main', lambda words: f'1 with {words[-1]}')
    monkeypatch.setattr(train_command, 'run_on_this_machine', lambda command, _, count: f'{count} with {command[-1]}')
    two = 'GPU-a,GPU-b'
    for gpus, devices, expected in (
        ('', '', '1 with '),
        ('GPU-a', '', '1 with '),
        (two, '', '2 with '),
        (two, '1', '1 with '),
        (two, '2', '2 wi'),
        ('', '3', '3 with global_batch=6'),
        (two, '3', '2 error: --devices: 3 is more than the 2 GPUs of this machi'),
        ('', '5', f'78 error: {site.recipe} has a mistake:\n  global_batch: 6 does not divide over 5 devices'),
    ):
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', gpus)
        words = ['train', site.recipe, 'global_batch=6', *(['--devices', devices] if devices else [])]
        status, stderr = in_process(cli.main, words)
        assert f'{status} {stderr}'.startswith(expected)


@pytest.mark.parametrize('mistake', partly_slow([*LATE_RUN, *LATE_COMMAND], FAST_LATE))
def test_mistake_found_before_the_work_exits_with_78_in_a_recipe_and_with_2_in_a_command(site, mistake):
    program, expected = ([ROOT / 'run.py'], 78) if mistake in LATE_RUN else (DIFFUSION, 2)
    words, message = (LATE_RUN | LATE_COMMAND)[mistake]
    status, stderr = site.execute([*program, *site.words(words)])
    assert status == expected, stderr
    assert_one_message(stderr, message)


def test_traceback_of_a_mistake_is_printed_on_request(site, in_process, monkeypatch):
    monkeypatch.setenv('DIFFUSION_TRACEBACK', '1')
    for main, words, expected in ((run_recipe.main, [], 78), (cli.main, ['check'], 2)):
        status, stderr = in_process(main, [*words, site.recipe, 'seed=x'])
        assert status == expected and stderr.startswith('Traceback')
        assert f'\nerror: {site.recipe} has a mistake:' in stderr


READ_BY_NOBODY = {
    'check': 'check {recipe}',
    'data verify': 'data verify {recipe} --jobs 1',
    'generate': 'generate {run} a --out drawn',
}


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize('command', partly_slow(READ_BY_NOBODY, {'check'}))
def test_closed_pipe_ends_a_command_quietly_with_141(site, closed_pipe, command):
    status, stderr = site.execute([*DIFFUSION, *site.words(READ_BY_NOBODY[command])], stdout=closed_pipe)
    assert 'Traceback' not in stderr and 'Exception ignored' not in stderr, stderr
    assert status == 141, stderr


MODEL = 'diffusion.models.latent_diffusion:LatentDiffusion'
TRAIN = 'run.py {recipe} name=new-{count}'
RESUME = 'run.py {recipe} trainer.max_duration=3ba'
BUGS = {
    'KeyError in config': ('diffusion.config.load:check_recipe', "{}['key']", 'diffusion check {recipe}'),
    'shapes in models': (f'{MODEL}.loss', 'torch.zeros(3).reshape(2, 2)', TRAIN),
    'shapes in data': ('diffusion.data.image_text:to_planar', 'numpy.zeros(3).reshape(2, 2)', TRAIN),
    'AttributeError in checkpointing': ('diffusion.checkpointing.checkpoint_writer:_about', 'None.batch', TRAIN),
    'int() at resume': ('diffusion.checkpointing.trainer_state:_check_optimizer', "int('x')", RESUME),
    'RecursionError in tasks': ('diffusion.tasks.generate:save_images', 'injected()', 'run.py {recipe} task=generate'),
    'pipe of something else': (
        *('diffusion.planning.cli:run_plan', 'raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))'),
        'diffusion plan {recipe}',
    ),
    'float() in export': (
        *('diffusion.models.families.sd2.denoiser:CrossAttentionUNet.pipeline', "float('wide')"),
        'diffusion export {run} --out exported',
    ),
}
FAST_BUGS = {'shapes in data', 'int() at resume', 'pipe of something else'}
FAULTS = {
    'recipe': ('pathlib:Path.read_text', 'EIO', 'diffusion check {recipe}'),
    'recipe of a run': ('diffusion.callbacks.run_recipe:write_atomically', 'EIO', TRAIN),
    'save on a full disk': ('diffusion.checkpointing.checkpoint_store:HashingWriter.write', 'ENOSPC', TRAIN),
    'recipe at resume': ('diffusion.training.resume:read_yaml', 'EIO', RESUME),
    'list at resume': ('diffusion.checkpointing.checkpoint_store:list_checkpoints', 'ESTALE', RESUME),
    'metrics': ('diffusion.loggers.metrics_file:json.dumps', 'ETIMEDOUT', TRAIN),
    'Hub': ('diffusion.models.pretrained:AutoencoderKL.from_pretrained', 'ECONNRESET', TRAIN),
    'precompute': ('os:fsync', 'EDQUOT', f'run.py {PRECOMPUTE} precompute.out=latents'),
    'prepare': ('os:fsync', 'ENOSPC', 'diffusion prepare folder images --out out --sizes 32'),
}
FAST_FAULTS = {'recipe', 'list at resume', 'metrics', 'Hub'}
DATA_FAULTS = {
    'index': ('diffusion.data.verified_stream:VerifiedStream._newest_index', 'EIO', TRAIN),
    'shard': ('diffusion.data.verified_stream:find_damage', 'EIO', TRAIN),
}


def run_with_fault(site: Site, target: str, statement: str, command: str) -> tuple[int, str]:
    """Run a program with an injected fault, see `injected.py`; return its exit status and stderr."""
    return site.execute([ROOT / 'tests' / 'injected.py', target, statement, *site.words(command)])


@pytest.mark.parametrize('bug', partly_slow(BUGS, FAST_BUGS))
def test_bug_exits_with_1_and_its_traceback(site, bug):
    status, stderr = run_with_fault(site, *BUGS[bug])
    assert status == 1, stderr
    assert 'Traceback' in stderr and 'in injected\n' in stderr, 'the frame that raised'


@pytest.mark.parametrize('fault', partly_slow(FAULTS, FAST_FAULTS))
def test_storage_fault_exits_with_1_and_its_cause(site, fault):
    target, name, command = FAULTS[fault]
    status, stderr = run_with_fault(site, target, raising(name), command)
    assert status == 1, stderr
    if fault == 'prepare':
        assert 'No space left on device; fix the cause and run the same command again' in stderr
        return
    assert 'Traceback' in stderr and 'in injected\n' in stderr, 'the frame that raised'
    if fault == 'save on a full disk':
        assert re.search(r'ba2: not saved, no space left on \S+: 0\.\d\d GiB needed, \d+\.\d\d GiB free', stderr)
        assert 'newest checkpoint: none; free some space and start the same command again' in stderr


@pytest.mark.parametrize(
    ('name', 'expected'), [('EIO', 1), ('ESTALE', 1), ('ENOSPC', 1), ('ENOENT', 78), ('EACCES', 78)]
)
def test_user_error_caused_by_a_fault_that_may_pass_exits_with_1(name, expected):
    mistake = UserError('streams.small: no index')
    assert exit_status(mistake) == 78
    mistake.__cause__ = KeyError('index')
    mistake.__cause__.__cause__ = OSError(getattr(errno, name), name)
    assert exit_status(mistake) == expected


@pytest.mark.parametrize('fault', partly_slow(DATA_FAULTS, {'shard'}))
def test_fault_while_reading_data_exits_with_1_and_names_the_stream(site, fault):
    target, name, command = DATA_FAULTS[fault]
    status, stderr = run_with_fault(site, target, raising(name), command)
    assert status == 1, stderr
    assert re.search(r'(?m)^error: streams\.small: .*Input/output error', stderr), stderr


@pytest.mark.slow
def test_mistake_ends_all_processes_with_one_message(write_recipe):
    command = [sys.executable, '-m', 'composer.cli.launcher', '-n', '2', str(ROOT / 'run.py')]
    environment = os.environ | {'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}
    command += [str(write_recipe('wrong')), 'global_batch=7']
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    output = process.stdout + process.stderr
    assert process.returncode != 0 and 'Traceback' not in output
    assert output.count('global_batch: 7 does not divide over 2 devices; use 6 or 8') == 1
