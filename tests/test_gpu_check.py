"""The GPU check: slices with a limit each, resumption, its page, and the file to send in."""

import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from diffusion.config.load import load
from diffusion.config.recipe import SpeedConfig, effective_parts

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / 'benchmarks'
CONDITIONS = {'version': '1'}


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def runner():
    return import_module('slice_runner')


@pytest.fixture
def redaction():
    return import_module('redaction').Redaction({}, host='node-17', user='someone')


def make_slice(runner, name: str, code: str, *, limit_seconds: float = 60.0, kind: str = 'step') -> Any:
    """Return a slice that runs Python code; DATA is the path of the file for its figures."""
    prefix = 'import pathlib, sys, time; DATA = pathlib.Path(sys.argv[1]); '
    return runner.Slice(name, f'slice {name}', [sys.executable, '-c', prefix + code, runner.DATA], kind, limit_seconds)


def counting(path: Path) -> str:
    """Return code that appends a line to a file and writes figures."""
    return f'open({str(path)!r}, "a").write("ran\\n"); DATA.write_text("[1]")'


@pytest.mark.slow
def test_finished_slices_are_not_run_again(runner, redaction, tmp_path):
    count = tmp_path / 'count'
    slices = [make_slice(runner, 'one', counting(count)), make_slice(runner, 'two', counting(count))]
    for _ in range(2):
        results = runner.run_slices(slices, tmp_path, CONDITIONS, redaction)
        assert [(each.status, each.data) for each in results] == [('passed', [1])] * 2
        assert count.read_text().count('ran') == 2
    runner.run_slices(slices, tmp_path, {'version': '2'}, redaction)
    assert count.read_text().count('ran') == 4, 'results of another version are not kept'


@pytest.mark.slow
def test_slices_that_fail_or_take_too_long_are_recorded_and_the_next_one_runs(runner, redaction, tmp_path):
    count = tmp_path / 'count'
    duration = f'{os.getpid()}.5'  # by which the process is found
    sleeper = (
        f'import subprocess; subprocess.Popen(["sleep", "{duration}"]); print("before", flush=True); time.sleep(60)'
    )
    slices = [
        make_slice(runner, 'fails', 'print("on node-17"); sys.exit(3)'),
        make_slice(runner, 'dies', 'import os; os.kill(os.getpid(), 9)'),
        make_slice(runner, 'hangs', sleeper, limit_seconds=1.0),
        make_slice(runner, 'silent', 'pass'),
        make_slice(runner, 'broken', 'DATA.write_text("{")'),
        make_slice(runner, 'works', counting(count)),
    ]
    results = {each.name: each for each in runner.run_slices(slices, tmp_path, CONDITIONS, redaction)}
    found = {name: (each.status, each.reason) for name, each in results.items()}
    assert found['fails'] == ('failed', 'it ended with status 3')
    assert results['fails'].output == 'on HOST\n'
    assert found['dies'] == ('failed', 'it was ended by SIGKILL')
    assert found['hangs'] == ('timed out', 'it took more than 1 s') and results['hangs'].output == 'before\n'
    assert found['silent'] == ('failed', 'it wrote no figures')
    assert found['broken'][0] == 'failed' and 'cannot be read' in found['broken'][1]
    assert found['works'] == ('passed', '')
    assert duration not in subprocess.run(['ps', '-eo', 'args'], capture_output=True, text=True).stdout

    # The second run repeats nothing, unless asked to.
    runner.run_slices(slices, tmp_path, CONDITIONS, redaction)
    slices[0] = make_slice(runner, 'fails', counting(count))
    assert runner.run_slices(slices[:1], tmp_path, CONDITIONS, redaction)[0].status == 'failed'
    slices[-1] = make_slice(runner, 'works', counting(count))
    again = runner.run_slices([slices[0], slices[-1]], tmp_path, CONDITIONS, redaction, retry=True)
    assert [each.status for each in again] == ['passed', 'passed']
    assert count.read_text().count('ran') == 2


def test_results_contain_neither_secrets_nor_names_of_the_machine(tmp_path):
    environment = {
        'WANDB_API_KEY': 'abc123def',
        'S3_ENDPOINT_URL': 'https://storage.corp.example:9000',
        'HOME': '/home/someone',
        'AUTH_HEADER': 'hunter',
        'CUDA_VERSION': '12.8.1.004',
        'MODE': 'training',
    }
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
    assert [row['row'] for row in results['step']['data'][0]['rows']] == [
        'plain',
        'fused_optimizer',
        'without fused_optimizer',
    ]
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
    peaks = {
        'NVIDIA A100-SXM4-80GB': 312e12,
        'NVIDIA A100 80GB PCIe': 312e12,
        'NVIDIA H100 80GB HBM3': 989e12,
        'NVIDIA H100 PCIe': 756e12,
        'NVIDIA A10G': 70e12,
        'Some GPU': None,
    }
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


# -- results as of a GPU, with invented figures --


def test_time_of_the_gpu_is_the_union_of_its_kernels():
    covered = import_module('gpu_time').covered
    assert covered([]) == 0
    assert covered([(3.0, 4.0), (0.0, 2.0), (1.0, 1.5), (1.0, 2.5), (2.5, 2.75)]) == 3.75


def gpu_row(row: str, name: str, step_seconds: float, **changes: Any) -> dict[str, Any]:
    stages = {'forward': 0.3 * step_seconds, 'backward': 0.6 * step_seconds, 'optimizer': 0.1 * step_seconds}
    found = {'row': row, 'name': name, 'microbatch': 16, 'failed': '', 'step_seconds': step_seconds}
    found |= {'mfu': 0.12 / step_seconds}
    found |= {'images_per_second': 256 / step_seconds, 'stages': stages, 'gpu_seconds': 0.05}
    return found | {'peak_gib': 20.0, 'planned_gib': 19.3, 'settings': {}} | changes


def gpu_results(runner) -> list[Any]:
    """Return results as of a GPU."""
    rows = [
        gpu_row('plain', 'plain', 0.8),
        gpu_row('compile', '+ compile', 0.4),
        gpu_row('microbatch', '+ microbatch 64', 0.3, microbatch=64, gpu_seconds=0.26),
        gpu_row('without compile', 'preset without compile', 0.5, microbatch=64),
        gpu_row('without tf32', 'preset without tf32', 0.29, microbatch=64),
    ]
    table = {'batch': 256, 'latent_side': 32, 'flops_per_image': 5e11, 'peak_flops': 1e15, 'on_gpu': True}
    big = [
        {
            'row': 'plain',
            'name': 'plain',
            'microbatch': 16,
            'failed': 'does not fit',
            'settings': {},
            'planned_gib': 33.4,
        }
    ]
    metrics = {'throughput/step_seconds': 0.5, 'throughput/samples_per_sec': 512.0, 'throughput/device/mfu': 0.35}
    metrics |= {'throughput/device/samples_per_sec': 256.0, 'memory/peak_gib': 40.0, 'checkpoint/stall_seconds': 0.7}
    shares = {'data_wait': 0.2, 'forward': 0.2, 'backward': 0.4, 'encode': 0.05, 'optimizer': 0.1, 'other': 0.05}
    metrics |= {f'time_share/{stage}': share for stage, share in shares.items()}
    training = {'metrics': metrics, 'losses': [1.0], 'strategy': 'ddp', 'devices': 2}
    tests = [
        {'name': 'test_a::test_one[cuda]', 'outcome': 'passed', 'reason': '', 'seconds': 1.0},
        {'name': 'test_a::test_two[cuda]', 'outcome': 'failed', 'reason': 'assert <1> == 2', 'seconds': 2.0},
        {'name': 'test_a::test_hsdp[cuda]', 'outcome': 'skipped', 'reason': 'hsdp needs 2 GPUs', 'seconds': 0.0},
    ]
    entries = [
        ('tests-a', 'tests a', 'tests', 'failed', 'it ended with status 1', tests),
        *(
            (f'step-256-{row["row"]}', 'step', 'step', 'passed', '', [{**table, 'pixels': 256, 'rows': [row]}])
            for row in rows
        ),
        ('step-512-plain', 'step', 'step', 'passed', '', [{**table, 'pixels': 512, 'batch': 64, 'rows': big}]),
        ('training-ddp', 'training', 'training', 'passed', '', training),
        ('training-fsdp2', 'training', 'training', 'timed out', 'it took more than 530 s', None),
    ]
    return [
        runner.Result(name, title, kind, status, reason, 10.0, 'output & <more>', data, {})
        for name, title, kind, status, reason, data in entries
    ]


def gpu_conditions() -> dict[str, Any]:
    gpus = [{'name': 'NVIDIA H100 80GB HBM3', 'memory_gib': 79.1, 'capability': 'sm_90'}] * 2
    machine = {'python': '3.12.3', 'packages': {'torch': '2.11.0', 'torchvision': None}, 'processor': 'AMD EPYC'}
    machine |= {'driver': '580.1', 'cuda': '13.0', 'cudnn': 91200, 'nccl': '2.28.9', 'kernels': ['sm_90'], 'gpus': gpus}
    return {'machine': machine, 'version': '0.1.0', 'commit': 'abcdef123456'}


def test_page_has_the_figures_beside_the_published_ones(runner):
    page = import_module('gpu_check_page').gpu_check_page(
        gpu_results(runner), gpu_conditions(), date='today', missing=2
    )
    rows = {
        re.sub('<.*?>', '', cells[0]): [re.sub('<.*?>', '', cell) for cell in cells[1:]]
        for line in page.splitlines()
        if (cells := re.findall(r'<t[hd][^>]*>(.*?)</t[hd]>', line))
    }
    text = re.sub('<.*?>', '', page)
    assert '7 of 9 slices passed; tests: 1 passed, 1 failed, 1 skipped. 2 slices have not run yet' in text
    assert 'The three largest losses of time' in text and '30.0% of a step (150.0 ms)' in text
    assert page.count('published, on 8 A100') == 2
    assert all(figure in page for figure in ('137.5', '23.9', '36.2', '28.0'))
    compiled = ['16', '640.0', '30.0', '2.00', '400.0', '120.0', '240.0', '40.0', '50.0', '20.0', '19.3', '+3.6']
    assert rows['+ compile'] == compiled
    assert 'does not fit' in page
    assert 'it waits for the host' in text
    assert (
        'The absence of compile costs most. A step without: compile +200.0 ms (+66.7%), tf32 -10.0 ms (-3.3%).' in text
    )
    assert rows['ddp'][:7] == ['2', '256.0', '35.0', '500.0', '40.0', '0.70', '–']
    assert rows['test_a::test_two[cuda]'][::2] == ['failed', 'assert &lt;1&gt; == 2']
    assert 'hsdp needs 2 GPUs' in page and 'it took more than 530 s' in page and 'output &amp; &lt;more&gt;' in page
    assert '2 × NVIDIA H100 80GB HBM3' in page and 'not installed' in page
