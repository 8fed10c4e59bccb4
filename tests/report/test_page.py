"""Report pages clicked through in Chromium: curves, slider, links, keyboard, accessibility, hostile content, size."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import browser_context, needs_browser, serious_issues
from playwright.sync_api import BrowserContext, Page, expect
from synthetic_run import append_metrics, write_attempts, write_evaluation, write_run

from diffusion.report.report_source import RunsSource, TableSource, written_report

pytestmark = needs_browser
PHONE, DESK = {'width': 390, 'height': 844}, {'width': 1280, 'height': 900}
HOSTILE = '</script ><img src=x onerror="window.bad=1"><script>window.bad=1</script><!--&lt;b>'


@pytest.fixture(scope='module')
def context() -> Iterator[BrowserContext]:
    with browser_context(viewport=DESK) as (context, left):
        yield context
        assert left == [], 'no request leaves a page'


@pytest.fixture
def visit(context: BrowserContext) -> Iterator[Callable[[Path], Page]]:
    """Function that opens a file, and fails after the test if the page has reported an error."""
    page = context.new_page()
    problems: list[str] = []
    page.on('console', lambda message: problems.append(message.text) if message.type in ('error', 'warning') else None)
    page.on('pageerror', lambda error: problems.append(str(error)))

    def open_file(path: Path) -> Page:
        page.goto(path.as_uri())
        page.wait_for_selector('body[data-ready]')
        return page

    yield open_file
    page.close()
    assert problems == []


@pytest.fixture(scope='module')
def report(tmp_path_factory) -> Path:
    run = write_run(tmp_path_factory.mktemp('page') / 'sd2')
    append_metrics(run, {'step': 400, 'loss/train/total': math.nan})
    for image in run.glob('evaluations/ba400/*/*/00003?.png'):
        image.unlink()
    path = run / 'report.html'
    path.write_text(RunsSource([str(run)]).write())
    return path


@pytest.fixture(scope='module')
def comparison(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('several')
    for index in range(3):
        write_run(folder / f'run-{index}', seed=index, lr=10.0 ** -(3 + index), batches=400 + 80 * index)
    path = folder / 'report.html'
    path.write_text(RunsSource([str(folder / f'run-{index}') for index in range(3)]).write())
    return path


def card(page: Page, name: str):
    return page.locator(f'#chart-{name}')


def legend(page: Page, chart: str) -> str:
    return card(page, chart).locator('.legend').inner_text()


def pixels(page: Page, chart: str) -> str:
    return page.evaluate(f"document.querySelector('#chart-{chart} canvas').toDataURL()")


def test_summary_and_all_sections_are_there_and_linked(visit, report):
    page = visit(report)
    assert 'of 1,000, 40.1%' in page.locator('#summary').inner_text()
    assert '$' in page.locator('#summary').inner_text() and 'ended, completed' in page.locator('header').inner_text()
    charts = ('loss', 'levels', 'rate', 'gradient', 'throughput', 'mfu', 'stages', 'gpu_temperature', 'events')
    for name in (*charts, 'metric-fid', 'explorer'):
        assert card(page, name).locator('canvas').count() == 1, name
    assert 'GPU clock' in page.locator('#health').inner_text()
    assert 'preempted, exit status 75' in page.locator('#attempts').inner_text()
    assert '128 × NVIDIA H100' in page.locator('#cost').inner_text()
    assert '0.1 -> 0.01' in page.locator('#recipe').inner_text()
    assert 'complete, pinned' in page.locator('#checkpoints').inner_text()
    assert 'memory of the nodes' in page.locator('#checkpoints').inner_text()
    links = page.locator('#contents a')
    assert links.count() == 11
    for link in links.all():
        target = (link.get_attribute('href') or '').removeprefix('#')
        assert page.locator(f'#{target} h2').inner_text() == link.inner_text()
    links.last.click()
    expect(page.locator('#metrics h2')).to_be_in_viewport()


@pytest.mark.slow
def test_curve_follows_smoothing_axes_and_legend(visit, report):
    page = visit(report)
    card(page, 'loss').scroll_into_view_if_needed()
    seen = [pixels(page, 'loss')]

    def changed() -> None:
        page.wait_for_timeout(60)
        seen.append(pixels(page, 'loss'))
        assert seen[-1] != seen[-2]

    page.locator('#smoothing').fill('10')
    assert page.locator('output[for=smoothing]').inner_text() == '10%'
    changed()
    page.locator('label[for=axis-hours]').click()
    changed()
    page.get_by_role('button', name='Log axis').click()
    changed()
    card(page, 'loss').get_by_role('button', name='log scale').click()
    changed()
    page.locator('label[for=axis-batches]').click()
    training = card(page, 'loss').get_by_role('button', name='training')
    training.focus()
    page.keyboard.press('Enter')
    assert training.get_attribute('aria-pressed') == 'false'
    assert page.evaluate('document.activeElement.textContent').startswith('training'), 'the focus stays'
    changed()


@pytest.mark.slow
def test_charts_have_a_cursor_tables_and_notes_and_show_any_metric(visit, report):
    page = visit(report)
    plot = card(page, 'levels').locator('.plot')
    assert 'Chart of Validation loss per noise level: t = 62 from' in (plot.get_attribute('aria-label') or '')
    plot.focus()
    page.keyboard.press('ArrowRight')
    first = legend(page, 'levels')
    assert card(page, 'levels').locator('.position').inner_text() == 'batch 50'
    page.keyboard.press('ArrowRight')
    assert card(page, 'levels').locator('.position').inner_text() == 'batch 100'
    assert legend(page, 'levels') != first
    page.keyboard.press('Escape')
    assert card(page, 'levels').locator('.position').inner_text() == ''
    card(page, 'levels').get_by_text('Table').click()
    rows = card(page, 'levels').locator('tbody tr')
    expect(rows).to_have_count(7)
    assert rows.first.inner_text().split()[0] == '50'
    assert card(page, 'levels').locator('thead th').count() == 9
    before = pixels(page, 'metric-geneval_hf')
    card(page, 'metric-geneval_hf').get_by_role('button', name='published scores').click()
    assert pixels(page, 'metric-geneval_hf') != before
    page.get_by_label('Metric').select_option('checkpoint/memory_save_seconds')
    assert card(page, 'explorer').locator('h3').inner_text() == 'checkpoint/memory_save_seconds'
    assert 'the first one is NaN, at batch 400' in page.locator('.notes').inner_text()
    assert '1 value that is NaN or infinite' in card(page, 'loss').inner_text()


@pytest.mark.slow
def test_slider_shows_the_images_of_a_batch_and_evaluations_are_sorted(visit, report):
    page = visit(report)
    images = page.locator('#samples img')
    assert page.locator('#samples-batch').inner_text() == 'batch 400 (4 of 4)'
    assert images.count() == 6 and images.first.get_attribute('alt') == 'a frog, batch 400'
    last = images.first.get_attribute('src')
    page.locator('#samples-slider').focus()
    page.keyboard.press('ArrowLeft')
    assert page.locator('#samples-batch').inner_text() == 'batch 300 (3 of 4)'
    assert images.first.get_attribute('src') != last
    page.get_by_role('button', name='Previous').click()
    page.get_by_role('button', name='Previous').click()
    assert images.first.get_attribute('alt') == 'a frog, batch 100'
    assert images.evaluate_all('images => images.every(image => image.complete && image.naturalWidth === 96)')
    table = page.locator('#evaluations table').first
    best = table.locator('td.best').filter(has_text='★')
    assert best.count() == 3, 'of FID, GenEval and the loss; the CLIP scores are equal'
    fid = table.locator('tbody tr td:nth-child(4)')
    table.get_by_role('button', name='FID').click()
    values = [float(text.split()[0]) for text in fid.all_inner_texts()]
    assert values == sorted(values) and table.locator('th[aria-sort=ascending]').inner_text().startswith('FID')
    table.get_by_role('button', name='FID').press('Enter')
    assert [float(text.split()[0]) for text in fid.all_inner_texts()] == values[::-1]
    assert 'single_object' in page.locator('#evaluations').inner_text()
    assert 'interval low=0.3 high=0.8' in page.locator('#evaluations').inner_text()
    over_scales, over_steps = page.locator('#evaluations svg').all()
    assert over_scales.locator('circle').count() == 20 and '7.5' in (over_scales.text_content() or '')
    assert over_steps.locator('circle').count() == 4 * 3
    assert over_steps.locator('line:not(.gridline)').count() == 4 * 3, 'intervals'


@pytest.mark.slow
def test_benchmarks_have_examples_cost_and_published_scores(visit, report):
    page = visit(report)

    def part(title: str):
        return page.locator('#evaluations .card').filter(has=page.get_by_role('heading', name=title))

    examples = part('Worst and best prompts by GenEval (HF), batch 400')
    assert examples.locator('img').count() == 5 * 6 and examples.get_by_text('no image').count() == 6
    assert 'counting 0.4050 (0.3450 to 0.4750)' in examples.inner_text()
    assert examples.locator('figcaption').first.inner_text().split('\n') == [
        *('a photo of a red single object number 0', '1 of 2 dog found')
    ]
    assert 'evaluations/ba400/7.5-50/batch-00000/000030.png and 5 more' in page.locator('.notes').inner_text()
    swept = [row.split('\t')[:5] for row in part('Settings of sampling').locator('tbody tr').all_inner_texts()]
    assert swept[8] == ['400', 'cfg', '7.5', 'ddim', '20'], 'the last of the 9 settings of the newest checkpoint'
    cost = [row.split('\t') for row in part('Training cost of GenEval (HF)').locator('tbody tr').all_inner_texts()]
    hours, dollars, gain = float(cost[2][1]), float(cost[2][2][1:]), float(cost[2][4][1:])
    assert gain == pytest.approx((dollars - float(cost[1][2][1:])) / 5, abs=0.02), 'the score rose by 5 points of 0.01'
    assert hours > float(cost[1][1]) and float(cost[2][5][1:]) == pytest.approx(dollars / 48, abs=0.02)
    published = part('Published scores beside GenEval (HF)').locator('tbody tr').all_inner_texts()
    scores = [float(row.split('\t')[0]) for row in published]
    assert scores == sorted(scores, reverse=True) and scores.index(0.505) > 0
    assert all('https://' in row or 'sd2, batch 400' in row for row in published)

    # The prompts of a judge's questions have no kinds.
    file = report.parent / 'evaluations/ba400.json'
    results = json.loads(file.read_text())
    named = results['guidance'][0]['examples']['geneval_hf']
    results['guidance'][0]['examples']['geneval_hf'] = {'none': named['counting']}
    file.write_text(json.dumps(results))
    single = report.with_name('single.html')
    single.write_text(RunsSource([str(report.parent)]).write())
    page = visit(single)
    score = results['metrics']['geneval_hf']
    heading = part('Worst and best prompts by GenEval (HF), batch 400').locator('h4').inner_text()
    assert heading == f'all prompts {score:.4f} ({score - 0.03:.4f} to {score + 0.04:.4f})'

    later = file.with_name('ba9000.json')
    later.write_text(file.read_text())
    single.write_text(RunsSource([str(report.parent)]).write())
    later.unlink()
    page = visit(single)
    rows = part('Training cost of GenEval (HF)').locator('tbody tr')
    assert rows.count() == 4, 'metrics end before batch 9000, whose cost is unknown'


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'scheme', 'size'), [('report', 'light', DESK), ('comparison', 'dark', PHONE)], ids=['desk', 'phone']
)
def test_no_serious_accessibility_issue(visit, request, name, scheme, size):
    page = visit(request.getfixturevalue(name))
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size(size)
    for details in page.locator('details').all():
        details.evaluate('each => { each.open = true; }')
    page.wait_for_timeout(100)
    assert serious_issues(page) == []
    assert page.evaluate('document.documentElement.scrollWidth <= innerWidth'), 'nothing is cut at the side'


@pytest.mark.slow
def test_colors_are_chosen_and_kept(visit, report):
    page = visit(report)
    page.emulate_media(color_scheme='light')
    page.locator('label[for=theme-dark]').click()
    dark = page.evaluate('getComputedStyle(document.body).backgroundColor')
    visit(report)
    page.wait_for_function('color => getComputedStyle(document.body).backgroundColor == color', arg=dark)
    page.locator('label[for=theme-auto]').click()
    assert page.evaluate('getComputedStyle(document.body).backgroundColor') != dark


def test_several_runs_are_laid_over_each_other(visit, comparison):
    page = visit(comparison)
    assert page.locator('#summary table').first.locator('tbody tr').count() == 3
    for name in ('loss', 'validation', 'rate', 'throughput', 'metric-fid'):
        assert [text in legend(page, name) for text in ('run-0', 'run-1', 'run-2')] == [True] * 3, name
    differences = page.locator('#summary table').last
    assert differences.locator('tbody th').all_inner_texts() == ['optimizer.lr']
    prompt = page.locator('#samples .prompt').first
    assert prompt.locator('h4').inner_text() == 'a frog'
    expected = [f'a frog, run-{index}, batch {batch}' for index, batch in enumerate((400, 480, 560))]
    assert [each.get_attribute('alt') for each in prompt.locator('img').all()] == expected
    page.locator('#samples-slider').fill('0')
    assert prompt.locator('figcaption').first.inner_text().split('\n') == ['run-0', 'batch 100']


def test_hostile_texts_are_shown_as_texts(visit, tmp_path):
    name = HOSTILE.replace('/', '_')
    run = write_run(tmp_path / name, prompts=[HOSTILE, 'b'], batches=80, sheets=2)
    text = (run / 'recipe.yaml').read_text()
    (run / 'recipe.yaml').write_text(f'{text}# changed at batch 3 ({HOSTILE}): {HOSTILE} a -> {HOSTILE}\n# {HOSTILE}\n')
    append_metrics(run, {'step': 79, f'x/{HOSTILE}': 1.0})
    write_evaluation(run, 40)
    results = json.loads((run / 'evaluations' / 'ba40.json').read_text())
    results['metrics'] |= {HOSTILE: 1.0}
    (run / 'evaluations' / 'ba40.json').write_text(json.dumps(results | {'weights': HOSTILE}))
    (run / 'evaluations' / 'ba60.json').write_text(HOSTILE)
    attempts = (run / 'attempts.jsonl').read_text().replace('"detail": ""', f'"detail": {json.dumps(HOSTILE)}')
    (run / 'attempts.jsonl').write_text(attempts)
    path = tmp_path / 'page.html'
    for source in (TableSource(str(tmp_path), price=None, link=lambda name: './x'), RunsSource([str(run)])):
        path.write_text(source.write())
        page = visit(path)
        page.wait_for_timeout(100)
        assert page.evaluate('window.bad') is None
        assert page.locator('img[src=x]').count() == 0
        assert name in page.locator('body').inner_text()
    assert page.title() == name
    assert page.locator('#samples figcaption').first.inner_text() == HOSTILE
    page.locator('#recipe summary').click()
    assert HOSTILE in page.locator('#recipe pre').inner_text()
    assert HOSTILE in page.locator('#attempts').inner_text()
    page.get_by_label('Metric').select_option(f'x/{HOSTILE}')
    assert page.locator('#chart-explorer h3').inner_text() == f'x/{HOSTILE}'


@pytest.mark.slow
def test_scripts_other_than_those_of_the_page_do_not_run(context, report, tmp_path):
    path = tmp_path / 'changed.html'
    injected = '<script>window.bad = 1</script><img src="x" onerror="window.bad = 1"><footer>'
    path.write_text(report.read_text().replace('<footer>', injected))
    page = context.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector('body[data-ready]')
    assert page.evaluate('window.bad') is None
    page.close()


@pytest.mark.slow
def test_a_run_without_a_batch_has_a_page(visit, tmp_path):
    run = tmp_path / 'new'
    run.mkdir()
    (run / 'recipe.yaml').write_text('name: new\ntrainer: {max_duration: 100ba}\n')
    write_attempts(run, 0)
    (tmp_path / 'page.html').write_text(RunsSource([str(run)]).write())
    page = visit(tmp_path / 'page.html')
    assert 'No batch yet.' in page.locator('#training').inner_text()
    assert 'No evaluations yet' in page.locator('#evaluations').inner_text()
    assert 'No checkpoint yet.' in page.locator('#checkpoints').inner_text()


@pytest.mark.slow
def test_table_of_runs(visit, tmp_path):
    first = write_run(tmp_path / 'first')
    write_run(tmp_path / f'second-{"-".join(["of-a-long-name"] * 5)}', batches=200, evaluations=False)
    (tmp_path / 'no-run').mkdir()
    (first / 'report.html').write_text(RunsSource([str(first)]).write())
    table = TableSource(str(tmp_path), price=None, link=lambda name: written_report(str(tmp_path), name))
    (tmp_path / 'report.html').write_text(table.write())
    page = visit(tmp_path / 'report.html')
    rows = page.locator('tbody tr')
    assert rows.count() == 2 and serious_issues(page) == []
    widths = page.evaluate("(e => [e.scrollWidth, e.clientWidth])(document.querySelector('.scroll'))")
    assert widths[0] <= widths[1], 'the last column is not cut'
    page.get_by_role('button', name='Run').click()
    assert '400 of 1,000' in rows.first.inner_text() and 'fid' in rows.first.inner_text()
    assert page.locator('tbody a').count() == 1, 'only the first run has a page'
    page.get_by_role('link', name='first').click()
    page.wait_for_selector('#chart-loss canvas')
    assert page.title() == 'first'
