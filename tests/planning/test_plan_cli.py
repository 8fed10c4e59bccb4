"""`diffusion plan`: arguments, printed tables, JSON, plot and error messages."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from commands import modules_of, output_of, refusal
from golden import check_golden, figure_text, readable_json

from diffusion.cli import main
from diffusion.planning import amounts, cost_plot, plan_table
from diffusion.planning.cost_plot import costs_at, counts_around
from diffusion.planning.throughput import Assumptions, Cost
from tests.planning.recipes import PHASES, YAMLS

BOTH = [str(path) for path in PHASES]


def planned(capsys, *words):
    return output_of(capsys, 'plan', *words)


def as_json(capsys, *words):
    return json.loads(planned(capsys, *words, '--json'))


SHORT = 'trainer.max_duration=40ba global_batch=8 trainer.save_interval=20ba --samples 36'
OPTIONS = {
    'published': 'phase1 phase2 --gpu a100-80gb --gpus 128 --price 2',
    'failures': 'phase1-latents --gpus 16 --price 2.5 --mtbf 0.8 --stall 60 --restart 240 --samples 3000000 '
    '--stored latents trainer.save_interval=30m',
    'seconds on 36 images': f'quickstart {SHORT} --gpu a100-80gb --gpus 1 --price 2',
    'minutes on 36 images': 'finetune --samples 36 --gpu h200 --gpus 8 --stall 10 --price 3.84',
    'too large': 'phase2 --gpu a10g --gpus 8 device_train_microbatch_size=64 --price 1',
    'unknown price': 'phase1 phase2 --gpu b200 --gpus 8 --torch 2.9',
    'two stages': 'speedrun speedrun_1024 --gpu h200 --gpus 32 --price 2 --samples 8700000',
    'impossible speed': 'phase1 --gpu a100-80gb --images-per-second 4000 --gpus 8 --price 1',
}


def test_plans_with_options_are_the_reviewed_ones(capsys):
    paths = {path.stem: str(path) for path in YAMLS.glob('*.yaml')}
    words = {name: [paths.get(word, word) for word in text.split()] for name, text in OPTIONS.items()}
    texts = {f'{name}.txt': planned(capsys, *each) for name, each in words.items()}
    printed = planned(capsys, *words['failures'], '--json')
    content = json.loads(printed, parse_float=lambda text: float(f'{float(text):.6g}'))
    check_golden(Path(__file__).parent / 'golden' / 'options', texts | {'failures.json': readable_json(content)})


@pytest.mark.parametrize(
    ('name', 'words', 'line'),
    [
        (
            'phase1-latents',
            ['--gpus', '16'],
            'As written: 5.65 days, $6,403. With device_train_microbatch_size=128 parallelism.strategy=ddp '
            'parallelism.checkpoints=whole: 1.94 days, $2,197, 43.6 of 79.1 GiB per GPU.',
        ),
        ('phase1-latents', ['--gpus', '16', 'parallelism.mixed_precision=full'], 'microbatch_size=128: 1.94 days'),
        ('phase1-latents', ['--gpus', '128'], 'parallelism.checkpoints=whole speed.cuda_graphs=true: 0.37 days'),
        ('mmdit', ['--gpus', '1'], 'As written: does not fit in memory. With device_train_microbatch_size=16: 700.75'),
    ],
)
def test_first_line_gives_faster_settings_and_what_the_plan_says_of_them(capsys, name, words, line):
    words = [str(YAMLS / f'{name}.yaml'), *words]
    out = planned(capsys, *words)
    assert line in out.splitlines()[0] and 'goodput 0.99' in out.partition('Memory')[0] and 'recommended' not in out
    faster = as_json(capsys, *words)['phases'][0]['faster']
    pasted = as_json(capsys, *words, *faster['settings'])['phases'][0]
    assert (pasted['training'], pasted['expected']) == (faster['training'], faster['expected'])
    assert pasted['memory'][0]['reserved_bytes'] == faster['reserved_bytes'] and pasted['memory'][0]['fits']
    assert pasted['faster'] is None


@pytest.mark.parametrize('words', [['--gpu', 'a100-80gb'], ['--mfu', '0.3'], ['--images-per-second', '900']])
def test_no_faster_settings_where_the_effect_of_the_microbatch_is_unknown(capsys, words):
    assert as_json(capsys, BOTH[0], *words)['phases'][0]['faster'] is None


def test_the_goodput_of_saves_at_unknown_intervals_is_left_out(capsys):
    words = [BOTH[0], '--gpus', '128', '--mtbf', '3', '--stall', '60', '--restart', '240']
    unknown = as_json(capsys, *words, 'trainer.save_interval=1ep')['phases'][0]
    assert unknown['kept_checkpoints'] is None
    assert [each['name'] for each in unknown['save_strategies']] == ['synchronous', 'asynchronous', 'tiers']


@pytest.mark.parametrize('suffix', ['', '-latents'])
def test_cost_in_recipes_and_documentation_is_that_of_the_plan(capsys, suffix):
    paths = [YAMLS / f'phase{number}{suffix}.yaml' for number in (1, 2)]
    plan = as_json(capsys, *map(str, paths), '--gpu', 'a100-80gb', '--gpus', '128', '--price', '2')
    pages = [(YAMLS.parent / name).read_text() for name in ('README.md', 'docs/recipes.md')]
    for path, phase in zip(paths, plan['phases'], strict=True):
        header = path.read_text().partition('\nname:')[0]
        for cost in (phase['training'], phase['precompute']):
            if cost['hours']:
                figures = f'{cost["gpu_hours"]:,.0f} GPU-hours', f'${cost["usd"]:,.0f}'
                assert all(figure in header for figure in figures)
                assert figures[1] in pages[1]
        assert f'{phase["training"]["days"]:.2f} days on 128 A100' in header
    total = plan['total']
    assert all(f'${total["usd"]:,.0f}' in text for text in [*pages, paths[1].read_text()])
    assert f'{total["gpu_hours"]:,.0f} GPU-hours' in paths[1].read_text()
    if suffix:
        assert plan['precompute']['hours'] > 0
        assert total['usd'] == pytest.approx(plan['training']['usd'] + plan['precompute']['usd'])


@pytest.mark.parametrize('name', ['finetune.yaml', 'lora.yaml'])
def test_cost_of_fine_tuning_is_that_of_the_plan(capsys, name):
    path = YAMLS / name
    plan = as_json(capsys, str(path), '--gpu', 'a100-80gb', '--gpus', '1', '--price', '2')
    cost, memory = plan['phases'][0]['training'], plan['phases'][0]['memory'][0]
    gib = memory['reserved_bytes'] / 2**30
    figures = [f'{cost["hours"]:.1f} hours on one A100', f'${cost["usd"]:,.0f}', f'{gib:.0f} GiB']
    header = path.read_text().partition('\nname:')[0]
    assert all(figure in header for figure in figures), figures
    lines = (YAMLS.parent / 'docs/recipes.md').read_text().splitlines()
    row = next(line for line in lines if f'`yamls/{name}`' in line)
    assert figures[0] in row and figures[1] in row


def test_cost_of_transformers_in_recipes_and_documentation_is_that_of_the_plan(capsys):
    pages = [(YAMLS.parent / name).read_text() for name in ('README.md', 'docs/recipes.md', 'docs/planning.md')]
    for names, gpu, words in (
        (('speedrun', 'speedrun_1024'), 'h200', ('--gpus', '32', '--price', '2', '--samples', '8.7e6')),
        (('prx_256',), 'h200', ('--gpus', '8', '--samples', '1e6')),
        (('mmdit',), 'h200', ('--gpus', '128')),
        (('i1_256',), 'h100-sxm', ('--gpus', '8', '--price', '2')),
        (('i1_3b_256', 'i1_3b_512', 'i1_3b_1024'), 'h100-sxm', ('--gpus', '64', '--price', '2')),
        (('prxpixel_7b',), 'h200', ('--gpus', '64', '--samples', '1e8')),
    ):
        plan = as_json(capsys, *(str(YAMLS / f'{name}.yaml') for name in names), '--gpu', gpu, *words)
        total, gpus = plan['total'], f'{words[1]} {gpu.partition("-")[0].upper()}'
        for name, phase in zip(names, plan['phases'], strict=True):
            header = (YAMLS / f'{name}.yaml').read_text().partition('\nname:')[0]
            cost = phase['training']
            figures = f'{cost["days"]:.2f} days on {gpus}', f'${cost["usd"]:,.0f}'
            assert all(figure in header for figure in (*figures, f'{cost["gpu_hours"]:,.0f} GPU-hours'))
            row = next(line for line in pages[1].splitlines() if f'`yamls/{name}.yaml`' in line)
            assert all(figure in row for figure in figures)
        assert f'{total["days"]:.2f} days on {gpus}, ${total["usd"]:,.0f}' in pages[0]
        if names == ('i1_256',):
            assert plan['published']['gpu_hours'] == pytest.approx(1037, abs=1)
    first = as_json(capsys, str(YAMLS / 'speedrun.yaml'), '--gpu', 'h200', '--gpus', '32')['phases'][0]
    for technique in first['techniques']:
        row = next(line for line in pages[2].splitlines() if line.startswith(f'| without {technique["name"]} '))
        assert f' {-technique["flop_per_image"] / 1e9:+,.0f} ' in row
        batches = [technique['batches_without'], *(each['batches_without'] for each in technique['published'])]
        assert f'| {batches[0]:,.0f} |' in row
        if technique['name'] == 'REPA':
            assert all(f'{each:,.0f}' in row for each in batches)


def test_plan_takes_under_three_seconds_without_torch():
    words = ['plan', *BOTH, '--gpu', 'a100-80gb', '--gpus', '128']
    before = os.times()
    loaded = modules_of(f'from diffusion.cli import main\nassert main({words}) == 0')
    after = os.times()
    assert not loaded & {'torch', 'diffusers', 'transformers', 'composer', 'streaming', 'numpy', 'matplotlib'}
    # CPU time, because wall time depends on other load.
    assert after.children_user + after.children_system - before.children_user - before.children_system < 3


def test_overrides_apply_to_every_recipe_in_any_position(capsys):
    batch, gpus = 'global_batch=1024', ('--gpus', '64')
    for words in ([*BOTH, *gpus, batch], [BOTH[0], batch, *gpus, BOTH[1]]):
        assert [phase['global_batch'] for phase in as_json(capsys, *words)['phases']] == [1024, 1024]


def test_old_price_warns_unless_price_is_given(capsys, monkeypatch):
    monkeypatch.setattr('diffusion.planning.gpus.STALE_DAYS', -1)
    words = [BOTH[0], '--gpu', 'a100-80gb']
    assert 'the price of $2.00 per hour is ' in planned(capsys, *words)
    assert 'days old' not in planned(capsys, *words, '--price', '1.2')


def test_recipe_that_does_not_fit_gets_settings_that_do(capsys):
    words = [BOTH[1], '--gpu', 'a10g', '--gpus', '8', 'device_train_microbatch_size=64']
    ways_out = as_json(capsys, *words)['phases'][0]['ways_out']
    smaller = next(way for way in ways_out if way.startswith('device_train_microbatch_size='))
    assert as_json(capsys, *words[:-1], smaller)['phases'][0]['memory'][0]['fits']


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['--gpus', '100'], 'global_batch: 2048 does not divide over 100 devices; use 2000 or 2100'),
        (['--gpus', '512'], "device_train_microbatch_size: 16 does not divide a device's batch of 4"),
        (['trainer.max_durations=3ba'], "trainer.max_durations: unknown key; did you mean 'max_duration'?"),
        (['--mtbf', '0.01'], '--mtbf: with a failure every 36 s, a restart of 600 s'),
        ([BOTH[1], '--images-per-second', '3000'], '--images-per-second: applies to one recipe'),
        (['--samples', '1,2,3'], '--samples: 3 numbers for 1 recipes; pass one, or one per recipe'),
        (['--mfu', '0.4', '--images-per-second', '9'], 'not allowed with argument --mfu'),
        (['--mfu', '40'], '--mfu: 40 is not a fraction in (0, 1], such as 0.4'),
        (['--samples', '1e6,x'], "'x' is not an integer"),
        (['--stored', 'text'], "invalid choice: 'text'"),
        (['--png', '/dev/null/plan.png'], '--png: /dev/null is not a folder'),
        (['--png', '/dev'], '--png: /dev is a folder; give a file name'),
        (['--gpu', 'b200', '--torch', '2.7'], '--gpu: torch 2.7 has no kernels for b200 (compute capability 10.0;'),
        (['--gpu', 'b200', '--torch', '2.7'], 'and pass the version of torch on the cluster, such as --torch 2.9'),
        (['--gpu', 'h200', '--torch', 'newest'], "--torch: 'newest' is not a version of torch"),
    ],
)
def test_error_names_the_argument_and_the_way_out(capsys, words, message):
    assert message in refusal(capsys, 'plan', BOTH[0], *words)


def test_plot_is_a_png_with_the_colors_of_both_phases(capsys, tmp_path, monkeypatch):
    from matplotlib.figure import Figure
    from PIL import Image

    drawn: list[Any] = []
    save: Any = Figure.savefig

    def savefig(figure: Any, *args: Any, **keywords: Any) -> None:
        save(figure, *args, **keywords)
        drawn.append(figure)

    monkeypatch.setattr(Figure, 'savefig', savefig)
    out = tmp_path / 'new' / 'plan.png'
    planned(capsys, *BOTH, '--gpu', 'a100-80gb', '--gpus', '128', '--price', '2', '--png', str(out))
    with Image.open(out) as image:
        assert (image.format, image.size) == ('PNG', (1500, 630))
    assert [path.name for path in out.parent.iterdir()] == ['plan.png']
    planned(capsys, BOTH[0], '--gpu', 'b200', '--torch', '2.9', '--gpus', '128', '--png', str(out))
    texts = {name: figure_text(figure) for name, figure in zip(('dollars.txt', 'hours.txt'), drawn, strict=True)}
    check_golden(Path(__file__).parent / 'golden' / 'plot', texts)


def test_plot_shows_numbers_of_gpus_that_divide_the_batch():
    from tests.planning.recipes import A100, both, phase

    assert counts_around(both(), 128) == [8, 16, 32, 64, 128]
    assert counts_around([phase(overrides=['global_batch=1920'])], 24) == [6, 8, 12, 24]
    small = phase(overrides=['global_batch=96', 'device_train_microbatch_size=2'])
    assert counts_around([small], 3) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    huge = phase(overrides=['global_batch=65536', 'device_train_microbatch_size=1'])
    assert 32_768 in counts_around([huge], 32_768)
    given = Assumptions(A100, 8, images_per_second=1000)
    four, sixteen = (costs_at(both(), given, gpus) for gpus in (4, 16))
    assert sixteen[0].hours == four[0].hours / 4 == pytest.approx(550_000 * 2048 / 2000 / 3600)


def test_amounts_have_the_unit_that_fits_their_size():
    for form, expected in (
        (amounts.run_time, {24_000: '1,000.00 days', 2.4: '0.10 days', 2.3: '2.3 hours', 1: '1.0 hours'}),
        (amounts.run_time, {0.5: '30.0 minutes', 1 / 60: '1.0 minutes', 0.01: '36 seconds'}),
        (amounts.duration, {172_800: '2.0 d', 7200: '2.0 h', 120: '2.0 min', 119: '119.0 s', 0.1: '0.1 s'}),
        (amounts.duration, {0.029: '29 ms', 0: '0.0 s'}),
        (amounts.usd, {0: '$0', 0.005: 'under $0.01', 0.01: '$0.01', 9.99: '$9.99', 10: '$10', 1000: '$1,000'}),
        (lambda hours: amounts.gpu_hours(Cost(0, hours, None)), {0: '0', 0.005: 'under 0.01', 0.01: '0.01', 10: '10'}),
        (amounts.size, {1e15: '1.00 PB', 1e12: '1.00 TB', 1e9: '1.00 GB'}),
        (amounts.size, {1e6: '1.00 MB', 1e3: '1.00 kB', 999: '999 B'}),
        (amounts.count, {999_999: '999,999', 1e6: '1.0 M'}),
        (cost_plot._days, {100: '100', 1: '1.0', 0.999: '1'}),
        (cost_plot._money, {1000: '$1.0k', 999: '$999'}),
        (plan_table._gb, {1e9: '1.00', 1e8: '0.1'}),
    ):
        assert {each: form(each) for each in expected} == expected


@pytest.mark.parametrize('path', sorted(YAMLS.glob('*.yaml')), ids=lambda path: path.stem)
def test_plan_of_each_recipe_prints_the_reviewed_figures(capsys, monkeypatch, tmp_path, path):
    """Planned from shipped counts: nothing is counted."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    microbatch = f'device_train_microbatch_size={1 if path.stem == "lora" else 2}'
    two_nodes, outputs = ['--gpu', 'a100-80gb', '--gpus', '16', microbatch], {}
    for name, words in {'one node': ['--gpus', '8'], 'two nodes': two_nodes}.items():
        assert main(['plan', str(path), '--price', '2', *words, 'trainer.precision=amp_bf16']) == 0
        printed = capsys.readouterr()
        assert printed.err == ''
        outputs[f'{name}.txt'] = printed.out
    check_golden(Path(__file__).parent / 'golden' / path.stem, outputs)
