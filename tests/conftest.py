"""Shared fixtures: tiny real models and tiny real data, created once per session."""

import os

os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
os.environ.setdefault('OMP_NUM_THREADS', '1')  # tests run in parallel, and so do the ranks of a run

import atexit
import contextlib
import gc
import json
import logging
import shutil
import signal
import sys
import tempfile
import time
import weakref
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from cpu_limit import FORKSERVER, CpuLimit
from shards import write_image_shards

if TYPE_CHECKING:
    from forkserver import Client
    from object_store import Store
    from ranks import Ranks

pytest.register_assert_rewrite('golden', 'tests.golden')

# nohup and background shells start programs with these signals ignored, which all processes of the tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

NAMES_OF_LONGEST = (
    'resume_matrix same_curve local endings real_slurm checkpointer performance stopping exit_codes docs '
    'image_metrics parallelism gpu_check precompute interrupts recipes half_precision kill tiers benchmarks'
)
LONGEST = tuple(f'test_{name}.py' for name in NAMES_OF_LONGEST.split())
"""Test files that start first: a worker runs whole files, and a long one started last would run alone at the end."""
SHARED_SERVER = pytest.StashKey[Any]()
LONG_COLLECTION_SECONDS = 0.1
SECONDS_OF_A_TRAINER = 0.1
RANK_VARIABLES = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'NODE_RANK', 'MASTER_ADDR', 'MASTER_PORT')


def pytest_addoption(parser: pytest.Parser) -> None:
    text = 'run only the I-th of N parts of the slow tests, or of those of `make test-resolvable`'
    parser.addoption('--part', metavar='I/N', default='0/1', help=text)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line('markers', 'cpu_seconds(limit): a default test that may take more CPU time than others')
    if 'OTHER_PYTHON' not in os.environ:  # the limit is for the versions that `make test` installs
        config.pluginmanager.register(CpuLimit())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Start the fork server, once, and give a worker of xdist its socket."""
    from forkserver import Server

    if SHARED_SERVER not in node.config.stash:
        server = node.config.stash[SHARED_SERVER] = Server()
        node.config.add_cleanup(server.close)
    node.workerinput['forkserver'] = node.config.stash[SHARED_SERVER].path


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # A third of the time of importing the tests is garbage collection, which finds nothing among imported modules.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = (int(number) for number in str(config.getoption('--part')).split('/'))
    left_out = {item for item in items if is_rotated(item) and part_of(item.nodeid, parts) != part}
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    if not any(item.get_closest_marker('gpu') for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker('gpu'):
                item.add_marker(pytest.mark.skip(reason='needs a GPU; torch.cuda.is_available() is False'))


def is_rotated(item: pytest.Item) -> bool:
    """Return True if `--part` may leave out a test: slow ones, and what the resolvable versions run again."""
    again = 'OTHER_PYTHON' in os.environ and item.path.parent.name != 'compatibility'
    return again or item.get_closest_marker('slow') is not None


def part_of(nodeid: str, parts: int) -> int:
    """Return the number of the part that a test is in: the cases of a test are spread over the parts."""
    return zlib.crc32(nodeid.encode()) % parts


@pytest.fixture(
    params=[pytest.param('cpu', marks=pytest.mark.cpu_form), pytest.param('cuda', marks=pytest.mark.gpu)],
)
def device(request: pytest.FixtureRequest) -> str:
    """Type of the device that a test runs on: the CPU, and a GPU if there is one (benchmarks/gpu_check.py)."""
    return request.param


@pytest.fixture(scope='session')
def many_datasets() -> None:
    """Release the shared memory of a dataset when the dataset is garbage-collected."""
    # Streaming opens all of its segments on the machine for each dataset, and closes them only at exit. That would be
    # 20,000 open files in a test session, and `select` supports 1024.
    import streaming.base.shared.memory as memory
    from streaming import StreamingDataset

    class AtExit:
        def register(self, cleanup: Callable[[], None]) -> None:
            owner: Any = cleanup.__self__  # type: ignore[attr-defined]
            weakref.finalize(owner, _release, owner.created_shms, owner.opened_shms, os.getpid())

    memory.atexit = AtExit()  # type: ignore[assignment]
    # The second position of a dataset is written to the segment of the first, which would be released with its object.
    load = StreamingDataset.load_state_dict

    def load_and_keep_segment(self: Any, obj: dict[str, Any]) -> None:
        self.__dict__.setdefault('earlier_segments', []).append(getattr(self, '_resume_shm', None))
        load(self, obj)

    StreamingDataset.load_state_dict = load_and_keep_segment


def _release(created: list[Any], opened: list[Any], process: int) -> None:
    # Forked processes inherit the finalizer, but the segments belong to the process that created them.
    if os.getpid() != process:
        return
    for segment in [*created, *opened]:
        segment.close()
    for segment in created:
        with contextlib.suppress(FileNotFoundError):
            segment.unlink()


@pytest.fixture(scope='session')
def pictures(tmp_path_factory: pytest.TempPathFactory, many_datasets: None) -> dict[int, Path]:
    """Two MDS folders of images by side: 40 images at 32 px and 24 at 64 px."""
    root = tmp_path_factory.mktemp('session-pictures')
    return {
        32: write_image_shards(root / '32px', count=40, side=32),
        64: write_image_shards(root / '64px', count=24, side=64, offset=100),
    }


@pytest.fixture(scope='session')
def small_vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a VAE with random weights, 8x downsampling, 4 channels, and statistics that normalize its latents."""
    import torch
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        down_block_types=('DownEncoderBlock2D',) * 4,  # type: ignore[arg-type]
        up_block_types=('UpDecoderBlock2D',) * 4,  # type: ignore[arg-type]
        block_out_channels=(8, 8, 16, 16),  # type: ignore[arg-type]
        latent_channels=4,
        norm_num_groups=4,
        sample_size=64,
        latents_mean=(0.1, -0.2, 0.3, 0.0),  # type: ignore[arg-type]
        latents_std=(0.5, 0.4, 0.6, 0.3),  # type: ignore[arg-type]
        scaling_factor=1.0,
        mid_block_add_attention=False,
    )
    folder = tmp_path_factory.mktemp('session-models') / 'vae'
    vae.save_pretrained(folder)
    return folder


@pytest.fixture(scope='session')
def small_dc_ae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an AutoencoderDC with random weights: 16x downsampling, 4 channels, and one scaling factor."""
    import torch
    from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC

    torch.manual_seed(0)
    sides: dict[str, Any] = {}
    for side in ('encoder', 'decoder'):
        sides |= {
            f'{side}_block_types': ('ResBlock',) * 4 + ('EfficientViTBlock',),
            f'{side}_block_out_channels': (8, 8, 8, 8, 16),
            f'{side}_layers_per_block': (1,) * 5,
            f'{side}_qkv_multiscales': ((),) * 4 + ((3,),),
        }
    vae = AutoencoderDC(latent_channels=4, attention_head_dim=8, scaling_factor=0.8, **sides)
    folder = tmp_path_factory.mktemp('session-models') / 'dc_ae'
    vae.save_pretrained(folder)
    return folder


@pytest.fixture(scope='session')
def small_flux2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an AutoencoderKLFlux2 with random weights: 8x downsampling, 4 channels, and batch norm statistics."""
    import torch
    from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2

    torch.manual_seed(0)
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 8, 16, 16), layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=32
    )
    vae.bn.running_mean = torch.linspace(-0.4, 0.4, 16)
    vae.bn.running_var = torch.linspace(0.1, 0.9, 16)
    folder = tmp_path_factory.mktemp('session-models') / 'flux2'
    vae.save_pretrained(folder)
    return folder


@pytest.fixture(scope='session')
def small_rae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an AutoencoderRAE with random weights: images of 32 px, 64 channels, downsampling 8, and statistics."""
    import torch
    from diffusers.models.autoencoders.autoencoder_rae import AutoencoderRAE

    torch.manual_seed(0)
    encoder: dict[str, Any] = {'hidden_size': 64, 'patch_size': 4, 'num_hidden_layers': 1, 'input_size': 16}
    decoder = {'hidden_size': 32, 'num_hidden_layers': 1, 'num_attention_heads': 2, 'intermediate_size': 32}
    settings = {f'encoder_{name}': size for name, size in encoder.items()}
    settings |= {f'decoder_{name}': size for name, size in decoder.items()} | {'patch_size': 8}
    mean, std = (torch.linspace(*ends, 64).view(64, 1, 1) for ends in ((-1, 1), (0.5, 1.5)))
    vae = AutoencoderRAE(latents_mean=mean, latents_std=std, **settings)
    folder = tmp_path_factory.mktemp('session-models') / 'rae'
    vae.save_pretrained(folder)
    return folder


@pytest.fixture(scope='session')
def make_model(small_vae: Path) -> Callable[..., object]:
    """Function that builds a LatentDiffusion whose denoiser has 0.3 M parameters; keywords as for `diffusion.tiny`."""
    import torch

    def make(**settings: object) -> object:
        from diffusion.models.families.sd2.builder import tiny

        torch.manual_seed(0)
        defaults = {'vae': str(small_vae), 'block_out_channels': (32, 32), 'text_width': 32, 'text_layers': 1}
        return tiny(**(defaults | settings))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope='session')
def draw_loss_curve() -> Iterator[Callable[[Path, Path], None]]:
    """The function that draws loss.png; runs in this process do not call it, since it takes a tenth of their time."""
    from diffusion.loggers import metrics_file

    with pytest.MonkeyPatch.context() as patch:
        draw = metrics_file.draw_loss_curve
        patch.setattr(metrics_file, 'draw_loss_curve', lambda *_: None)
        yield draw


@pytest.fixture(scope='session')
def tiny_recipe(pictures: dict[int, Path], small_vae: Path, draw_loss_curve: object) -> Callable[..., dict[str, Any]]:
    """Function that returns a recipe for 8 batches of the tiny model on 32 px images; keywords replace sections.

    With `small=True`, the model is a PRX of 23 trained tensors, a quarter of the smallest U-Net's: a save takes a tenth
    of a millisecond for each.
    """

    def content(runs_dir: Path, /, *, small: bool = False, **sections: Any) -> dict[str, Any]:
        # Without layers per block, the model has half of the weights, and a batch or a save takes half of the time.
        network = {'block_out_channels': [32, 32], 'layers_per_block': 0, 'text_width': 32, 'text_layers': 1}
        trainer = {'max_duration': '8ba', 'save_interval': '4ba'}
        recipe: dict[str, Any] = {
            'name': 'run',
            'runs_dir': str(runs_dir),
            'global_batch': 8,
            'model': {'name': 'tiny', 'resolution': 32, 'vae': str(small_vae), **network},
            'dataset': {'name': 'image_text'},
            'streams': {'small': {'local': str(pictures[32]), 'resolution': 32}},
            'loader': {'num_workers': 0},
            'optimizer': {'name': 'adamw', 'lr': 1.0e-3},
            'loggers': {'metrics_file': None},
            'trainer': trainer | {'autoresume': True, 'progress_bar': False, 'device': 'cpu'},
        }
        if small:
            sizes = {'hidden_size': 32, 'num_heads': 2, 'depth': 1, 'patch_size': 2, 'text_width': 32, 'text_layers': 1}
            own = {'name': 'tiny_prx', 'resolution': 32, 'vae': str(small_vae), 'train_text_encoder': False}
            recipe['model'] = own | sizes
        return recipe | sections

    return content


@pytest.fixture(scope='session')
def forkserver(request: pytest.FixtureRequest) -> Iterator['Client']:
    """Server that starts Python processes with PyTorch already imported; all workers of xdist share one."""
    from forkserver import Client, Server

    with contextlib.ExitStack() as stack:
        shared = getattr(request.config, 'workerinput', {}).get('forkserver')
        client = Client(shared) if shared else stack.enter_context(contextlib.closing(Server()))
        client.wait_for_server()
        request.config.stash[FORKSERVER] = client
        yield client
        del request.config.stash[FORKSERVER]


@pytest.fixture(scope='session')
def ranks(forkserver: 'Client', tmp_path_factory: pytest.TempPathFactory) -> 'Ranks':
    """Starter of recipes on several ranks."""
    from ranks import Ranks

    return Ranks(forkserver, tmp_path_factory.mktemp('session-ranks'))


@pytest.fixture(scope='session')
def _store_server() -> Iterator['Store']:
    from object_store import serve

    with serve() as store:
        yield store


@pytest.fixture
def store(_store_server: 'Store', monkeypatch: pytest.MonkeyPatch) -> Iterator['Store']:
    """Empty S3 server, with the environment variables that lead clients to it, and retries without pauses."""
    from diffusion.storage import retry, transfers

    for name, value in _store_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retry, 'LONGEST_PAUSE_SECONDS', 0.01)
    monkeypatch.setattr(transfers, 'idle', {})
    yield _store_server
    _store_server.clear()


@pytest.fixture
def write_recipe(tmp_path: Path, tiny_recipe: Callable[..., dict[str, Any]]) -> Callable[..., Path]:
    """Function that writes a tiny recipe whose runs go to the test's temporary folder, and returns its path."""

    def write(name: str = 'run', **sections: Any) -> Path:
        path = tmp_path / f'{name}.yaml'
        path.write_text(yaml.safe_dump(tiny_recipe(tmp_path / 'runs', name=name, **sections)), encoding='utf-8')
        return path

    return write


@pytest.fixture(scope='module', autouse=True)
def _delete_module_folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Delete the folders that the fixtures of a module created, unless one of its tests failed.

    Checkpoints would otherwise take 40 GB per test session. Folders of session fixtures start with `session-`.
    """
    base = tmp_path_factory.getbasetemp()
    failed, before = request.session.testsfailed, set(base.iterdir())
    yield
    if request.session.testsfailed == failed:
        for folder in set(base.iterdir()) - before:
            if folder.is_dir() and not folder.name.startswith('session-'):
                shutil.rmtree(folder, ignore_errors=True)
    _remove_lock_files()


def _remove_lock_files() -> None:
    """Remove Streaming's lock files of killed processes, each of which slows the start of all later datasets."""
    for path in Path(tempfile.gettempdir()).glob('[0-9]*_filelock'):
        if not Path('/dev/shm', f'{path.name[:6]}_locals').exists():
            path.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def _leave_process_groups() -> Iterator[None]:
    """Leave the process group that a test joined, and restore the variables that Composer set for it."""
    before = {name: os.environ.get(name) for name in RANK_VARIABLES}
    yield
    torch = sys.modules.get('torch')
    if torch is not None and torch.distributed.is_initialized():
        if torch.distributed.get_backend() == 'gloo':
            # Finish pending work first: destroying the group holds the GIL, which a gloo thread needs to release a
            # tensor, and so they would deadlock.
            torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def _restore_log_level() -> Iterator[None]:
    """Restore the level of this package's messages, which run.py sets by the rank."""
    log = logging.getLogger('diffusion')
    level = log.level
    yield
    log.setLevel(level)


@pytest.fixture
def shipped_components(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the components that other tests have registered in this process, since messages would list them."""
    from diffusion.config.registry import TARGETS

    for kind, targets in TARGETS.items():
        shipped = {
            name: target for name, target in targets.items() if str(target).startswith(('diffusion', 'composer'))
        }
        monkeypatch.setitem(TARGETS, kind, shipped)


@pytest.fixture
def restored_handlers() -> Iterator[None]:
    """Restore the handlers of signals that a test replaces, as trainers and nodes do."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment variables of a job of one rank, so that it creates the process group that FSDP needs."""
    from ranks import free_port

    for name, value in {'RANK': '0', 'WORLD_SIZE': '1', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1'}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv('MASTER_ADDR', '127.0.0.1')
    monkeypatch.setenv('MASTER_PORT', str(free_port()))


@pytest.fixture(autouse=True)
def _forget_trainers_and_datasets(request: pytest.FixtureRequest) -> Iterator[None]:
    """Free the Trainers and datasets that a test created."""
    # A Trainer's State with model and optimizer has 70 MB, and two places reference it until the process ends, 6 GB per
    # test session: Composer registers the engine's _close at exit and does not unregister it when the Trainer is
    # closed, and PyTorch before 2.14 caches the names of a model's parameters with the model as key. Besides, Streaming
    # refuses two live datasets on one folder.
    began = time.perf_counter()
    yield
    engine = sys.modules.get('composer.core.engine')
    if engine is not None:
        atexit.unregister(engine.Engine._close)
    state_dict = sys.modules.get('torch.distributed.checkpoint.state_dict')
    if state_dict is not None and hasattr(state_dict._get_fqns, 'cache_clear'):
        state_dict._get_fqns.cache_clear()
    # A collection takes half a second with PyTorch loaded, so run it only where needed: no Trainer is built in less
    # time. After one that took long, the next ones go only over the objects that were created since.
    ended = time.perf_counter()
    if 'many_datasets' in request.fixturenames or (engine is not None and ended - began > SECONDS_OF_A_TRAINER):
        gc.collect()
        if time.perf_counter() - ended > LONG_COLLECTION_SECONDS:
            gc.freeze()


@pytest.fixture(scope='session', autouse=True)
def counting_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Count models for the planner in this process, which has torch anyway, and cache the counts for the session."""
    from diffusion.errors import UserError
    from diffusion.planning import count_cache

    def count(request: Any) -> dict[str, Any]:
        from diffusion.models.cost_counting import answer

        try:
            return json.loads(json.dumps(answer(request)))
        except UserError as error:
            return {'mistake': str(error)}

    folder = tmp_path_factory.mktemp('session-model_counts')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(count_cache, 'run_counter', count)
        patch.setattr(count_cache, 'counts_folder', lambda: folder)
        yield
