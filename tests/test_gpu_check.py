"""The GPU check: slices with a limit each, resumption, its page, and the file to send in."""

import json
import re
import zipfile
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import pytest

from diffusion.config.load import load
from diffusion.config.recipe import SpeedConfig, effective_parts

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / 'benchmarks'


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_results_contain_neither_secrets_nor_names_of_the_machine():
    environment = {'WANDB_API_KEY': 'abc123def', 'S3_ENDPOINT_URL': 'https://storage.corp.example:9000'}
    environment |= {'HOME': '/home/someone', 'AUTH_HEADER': 'hunter', 'CUDA_VERSION': '12.8.1.004', 'MODE': 'training'}
    redaction = import_module('redaction').Redaction(environment, host='node-17.corp.example', user='someone')
    token = 'hf_' + 'aBcD' * 9
    text = (
        f'{ROOT}/run.py\nabc123def, hunter at https://storage.corp.example:9000/a\n/home/someone/.cache\n'
        'node-17: someone\n'
        f'10.20.30.40:29500 and 127.0.0.1\ntoken {token}\ntraining with CUDA 12.8.1.004'
    )
    found = redaction.clean({'rows': [{'text': text, 'value': 1.5}]})['rows'][0]
    assert found['value'] == 1.5
    assert found['text'].splitlines() == [
        './run.py',
        '$WANDB_API_KEY, $AUTH_HEADER at $S3_ENDPOINT_URL/a',
        '~/.cache',
        'HOST: USER',
        'ADDRESS:29500 and 127.0.0.1',
        '(line removed: it contains what looks like a Hugging Face token)',
        'training with CUDA 12.8.1.004',
    ]


@pytest.mark.slow
def test_whole_check_runs_on_a_cpu_and_makes_one_file(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv('SOME_TOKEN', 'not-for-others')
    slices = import_module('gpu_check_slices')
    # Each other file runs in this test session anyway.
    monkeypatch.setattr(slices, 'TEST_FILES', ('tests/data/test_copies_on_devices.py',))
    main = import_module('gpu_check').main
    assert main(['--device', 'cpu', '--out', str(tmp_path)]) == 0, capsys.readouterr()
    printed = capsys.readouterr().out
    assert '3 of 3 slices passed; tests: 1 passed, 0 failed, 0 skipped' in printed
    assert 'largest losses of time' in printed

    with zipfile.ZipFile(tmp_path / 'gpu-check.zip') as archive:
        assert archive.namelist() == ['gpu-check.html', 'results.json']
        page, text = (archive.read(name).decode() for name in archive.namelist())
    results = {each['name']: each for each in json.loads(text)['results']}
    assert list(results) == ['tests', 'step', 'training-ddp']
    rows = [row['row'] for row in results['step']['data'][0]['rows']]
    assert rows == ['plain', 'fused_optimizer', 'without fused_optimizer']
    assert 'throughput/samples_per_sec' in results['training-ddp']['data']['metrics']
    for part in ('CPU form', 'preset without fused_optimizer', 'test_copies_on_devices::', 'backward', 'ddp'):
        assert part in page
    for private in (str(tmp_path), str(ROOT), 'not-for-others'):
        assert private not in page + text

    assert main(['--device', 'cpu', '--out', str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(': passed before') == 3
    assert main(['--device', 'cpu', '--out', str(tmp_path), '--list']) == 0
    assert capsys.readouterr().out.count('passed') == 3


def test_slices_on_gpus_cover_every_test_and_row():
    slices, settings = import_module('gpu_check_slices'), import_module('step_settings')
    marked = [path for path in (ROOT / 'tests').rglob('test_*.py') if _needs_gpu(path.read_text(encoding='utf-8'))]
    assert sorted(slices.TEST_FILES) == sorted(str(path.relative_to(ROOT)) for path in marked)
    found = slices.make_slices(Path('out'), memory_gib=[79.1, 79.1])
    names = [each.name for each in found]
    assert len(names) == len(set(names)) and all(re.fullmatch(r'[\w-]+', name) for name in names)
    assert len([name for name in names if name.startswith('step-')]) == 2 * (len(settings.ROWS) + len(settings.PARTS))
    assert all(each.limit_seconds < 540 for each in found)
    training = next(each for each in found if each.name == 'training-fsdp2')
    assert list(training.command[-4:]) == ['--gpus', '2', '--memory-gib', '79.1']


@pytest.mark.parametrize('strategy', ['ddp', 'fsdp2'])
def test_recipes_of_training_runs_on_gpus_are_valid(tmp_path, strategy):
    training = import_module('gpu_check_training')
    recipe = training.make_recipe(tmp_path, tmp_path / 'images', training.FULL, strategy, 8)
    path = tmp_path / 'recipe.yaml'
    path.write_text(json.dumps(recipe))
    loaded = load(path)
    assert (loaded.global_batch, loaded.trainer['precision'], loaded.model.name) == (1024, 'amp_bf16', 'sd2')
    assert [training.fitting_microbatch(memory) for memory in (79.1, 27.0, 22.0)] == [32, 16, 4]


def test_figures_of_the_step_benchmark_have_references():
    references = import_module('step_references')
    peaks: dict[str, float | None] = {'NVIDIA A100-SXM4-80GB': 312e12, 'NVIDIA A100 80GB PCIe': 312e12}
    peaks |= {'NVIDIA H100 80GB HBM3': 989e12, 'NVIDIA H100 PCIe': 756e12, 'NVIDIA A10G': 70e12, 'Some GPU': None}
    assert {name: references.peak_flops_of(name) for name in peaks} == peaks
    plain = asdict(effective_parts(SpeedConfig(preset='none'), on_gpu=True))
    plans = [references.planned_gib(256, plain, microbatch, 256) for microbatch in (16, 32)]
    assert 15 < plans[0] < plans[1] < references.planned_gib(512, plain, 32, 64)
    assert references.planned_gib(768, plain, 16, 64) is None
    assert references.published_utilization(256) == pytest.approx((137.5, 0.239), abs=1e-3)


def _needs_gpu(text: str) -> bool:
    return (
        bool(re.search(r'pytest\.mark\.gpu\b|^def test_\w+\([^)]*\bdevice\b', text, re.MULTILINE))
        and 'importorskip' not in text
    )


def test_time_of_the_gpu_is_the_union_of_its_kernels():
    covered = import_module('gpu_time').covered
    assert covered([]) == 0
    assert covered([(3.0, 4.0), (0.0, 2.0), (1.0, 1.5), (1.0, 2.5), (2.5, 2.75)]) == 3.75
