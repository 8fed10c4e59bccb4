"""Captions from an endpoint: each image once per prompt, despite faults of the server, kills and shares."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from captioning.vlm_server import FAULTS, MODEL, VlmServer, caption_of, picture, sample, write_images, write_settings
from commands import output_of, refusal
from golden import check_golden, readable_json
from small_networks import write_clip

from diffusion.captioning.caption_run import CaptionRun
from diffusion.captioning.settings import load_settings
from diffusion.captioning.shard_task import ShardTask
from diffusion.cli import main
from diffusion.config.load import load
from diffusion.config.prompt_files import Prompt
from diffusion.evaluation.metrics import TextImageScore
from diffusion.language_models.engine import Answer
from diffusion.prepare.work_dir import Share
from diffusion.storage import caption_tables
from diffusion.storage.caption_tables import ROWS
from diffusion.training.components import build_loader

REJECTED = {'empty', 'no_answer', 'refused_by_server', 'context_too_long'}


def table_of(data: Path, column: str) -> pa.Table:
    return pa.concat_tables(pq.read_table(path) for path in sorted(data.glob(f'captions/{column}/*.parquet')))


def check_tables(data: Path, count: int, columns: tuple[str, ...] = ('brief', 'full')) -> int:
    """Check that the tables have every image once, with its own caption or a named rejection; count the captions."""
    captions = 0
    for column in columns:
        table = table_of(data, column)
        assert table.schema == ROWS
        rows = table.to_pylist()
        assert [row['key'] for row in rows] == [f'p{index}' for index in range(count)]
        for index, row in enumerate(rows):
            if row['rejected'] is None:
                assert row['caption'] == caption_of(column, picture(index))
            else:
                assert row['caption'] is None and row['rejected'] in REJECTED, row
        assert {row['model'] for row in rows} == {MODEL}
        captions += sum(row['rejected'] is None for row in rows)
    return captions


def test_faults_of_the_server_cost_no_image_its_caption(
    server: VlmServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.faults = FAULTS
    data = write_images(tmp_path / 'data', shards=3, each=8)
    settings = write_settings(tmp_path / 'vlm.yaml', server.url, timeout_seconds=2)
    printed = output_of(capsys, 'caption', data, '--with', settings)
    assert 'brief: ' in printed and 'caption_weights' in printed
    found = check_tables(data, 24)
    assert found >= 40
    assert max(server.good.values()) == 1
    listed = json.loads((data / 'captions.json').read_text())['columns']
    assert {name: len(column['tables']) for name, column in listed.items()} == {'brief': 3, 'full': 3}
    asked = server.good.copy()
    assert 'has been captioned already' in output_of(capsys, 'caption', data, '--with', settings)
    assert server.good == asked


def test_an_interrupted_command_asks_only_for_missing_answers(
    server: VlmServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_images(tmp_path / 'data', shards=2, each=10)
    settings = write_settings(tmp_path / 'vlm.yaml', server.url, patience_seconds=0, concurrency=2)
    server.good_limit = 13
    assert main(['caption', str(data), '--with', str(settings)]) == 1
    assert 'start the same command again' in capsys.readouterr().err
    server.good_limit = 10**9
    output_of(capsys, 'caption', data, '--with', settings)
    assert check_tables(data, 20) == 40
    # Answers that were on their way when the command ended are the only ones that may be asked for again.
    assert server.good.total() - 40 <= 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ['brief.yaml', 'data', 'full.yaml', 'vlm.yaml']


def test_a_kill_between_the_tables_of_two_columns_loses_nothing(
    server: VlmServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_images(tmp_path / 'data', shards=1, each=3)
    settings = write_settings(tmp_path / 'vlm.yaml', server.url)
    write_table, written = caption_tables.write_table, list[str]()

    def killed_after_one(*arguments: Any) -> str:
        if written:
            raise KeyboardInterrupt
        written.append(write_table(*arguments))
        return written[0]

    with monkeypatch.context() as patch:
        patch.setattr(caption_tables, 'write_table', killed_after_one)
        assert main(['caption', str(data), '--with', str(settings)]) == 130
    assert f'resume, answers are in {data}.captions-work\n' in capsys.readouterr().err
    output_of(capsys, 'caption', data, '--with', settings)
    assert check_tables(data, 3) == 6
    assert set(server.good.values()) == {1}


def test_the_report_shows_images_lengths_rejected_and_repeated_answers(
    server: VlmServer, tmp_path: Path, capsys: Any, write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {index: f'{("A cat", "Two dogs", "A <b> by the sea")[index % 3]}, {index}' for index in range(20)}
    texts |= {4: 'I cannot see it.', 9: 'nothing', 10: 'nothing', 14: 'I cannot help.', 15: 'Sorry, no.', 17: 'broken'}
    texts |= {6: ' '.join('abcdefghijklmn'), 7: ' '.join('abcdefghijklmno')}  # 16 tokens, and one more
    of_image = {caption_of('brief', picture(index)): text for index, text in texts.items()}
    monkeypatch.setattr(server, 'text_about', lambda image, prompt: of_image[caption_of('brief', image)])
    server.always = {'broken': '400', 'nothing': 'empty'}
    monkeypatch.chdir(tmp_path)
    write_images(Path('data'), shards=2, each=10)
    write_settings(Path('vlm.yaml'), server.url, ('brief',))
    words, found = ['caption', 'data', '--with', 'vlm.yaml'], {'printed.txt': ''}
    report = ['--report', 'page.html', '--recipe', str(write_recipe())]
    for name, others in {'early': report, 'captions': [], 'whole': report, 'part': report, 'again': []}.items():
        for limit, value in {'IMAGES': 3, 'MAX_CAPTIONS': 10, 'ITEMS_SHOWN': 2}.items() if name == 'part' else ():
            monkeypatch.setattr(f'diffusion.captioning.report.{limit}', value)
        assert main([*words, *others]) == (2 if name == 'early' else 0)
        found['printed.txt'] += f'{name}: {"".join(capsys.readouterr())}'.replace(f'{tmp_path}/', '')
        if name in ('whole', 'part'):
            page = re.sub('(?s)<style>.*</style>', '', Path('page.html').read_text())
            found[f'{name}.html'] = re.sub('(?<=base64,)[^"]+', '', page)
    check_golden(Path(__file__).parent / 'golden/report', found)


def test_the_report_has_clip_scores_of_old_and_new_captions(
    server: VlmServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], write_recipe: Callable[..., Path]
) -> None:
    data = write_images(tmp_path / 'data', shards=1, each=4)
    settings = write_settings(tmp_path / 'vlm.yaml', server.url, ('brief',))
    words = ('caption', data, '--with', settings, '--report', tmp_path / 'page.html', '--recipe', write_recipe())
    output_of(capsys, 'caption', data, '--with', settings)
    assert '--network needs --clip-score' in refusal(capsys, *words, '--network', 'clip_score=a')
    gone = refusal(capsys, *words, '--clip-score', '--network', f'clip_score={tmp_path}/gone')
    assert 'gone is neither a folder nor a repository with a commit' in gone
    clip = str(write_clip(tmp_path / 'clip'))
    output_of(capsys, *words, '--clip-score', '--network', f'clip_score={clip}')
    page, scorer = (tmp_path / 'page.html').read_text(), TextImageScore(clip)
    images = [torch.from_numpy(np.array(picture(index))).permute(2, 0, 1) for index in range(4)]
    for column, texts in {
        'original': [f'caption {index}' for index in range(4)],
        'brief': [caption_of('brief', picture(index)) for index in range(4)],
    }.items():
        scores = scorer.scores(images, texts)
        assert f'<h2>CLIP score, {column}</h2><p>{scores.mean():.2f}, the mean of 4. The lowest:</p>' in page
        lowest = int(scores.argmin())
        assert f'<ul><li>{scores[lowest]:.1f} p{lowest}: {texts[lowest]}</li>' in page
        assert f'{texts[2]} (CLIP score {scores[2]:.1f})</p>' in page


def test_shares_caption_every_shard_once_and_the_last_lists_the_columns(
    server: VlmServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_images(tmp_path / 'data', shards=4, each=3)
    settings = write_settings(tmp_path / 'vlm.yaml', server.url)
    printed = output_of(capsys, 'caption', data, '--with', settings, '--share', '0/2', '--work', tmp_path / 'a')
    assert 'other shards have no captions yet' in printed and 'brief: 6 captions of 5 tokens on average, 0 ' in printed
    assert len(table_of(data, 'brief')) == len(table_of(data, 'full')) == 6
    assert not (data / 'captions.json').exists()
    output_of(capsys, 'caption', data, '--with', settings, '--share', '1/2', '--work', tmp_path / 'b')
    assert check_tables(data, 12) == 24
    assert set(server.good.values()) == {1}
    assert (data / 'captions.json').exists() and (tmp_path / 'b/captions-work').exists(), 'another may need the folder'


def test_ranks_divide_the_share_of_their_machine(
    tmp_path: Path, server: VlmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings(write_settings(tmp_path / 'vlm.yaml', server.url))
    data = write_images(tmp_path / 'data', shards=7, each=1)
    asked = []
    for machine in range(2):
        for rank in range(3):
            monkeypatch.setenv('WORLD_SIZE', '3')
            monkeypatch.setenv('RANK', str(rank))
            asked.append([task.name for task in CaptionRun(str(data), settings, share=Share(machine, 2)).remaining()])
    assert sorted(itertools.chain(*asked)) == [f'shard.{number:05d}.mds' for number in range(7)]
    assert sorted(map(len, asked)) == [1, 1, 1, 1, 1, 2]


def test_new_shards_are_captioned_alone(server: VlmServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = write_settings(tmp_path / 'vlm.yaml', server.url, ('brief',))
    write_images(tmp_path / 'data', shards=1, each=4)
    output_of(capsys, 'caption', tmp_path / 'data', '--with', settings)
    data = write_images(tmp_path / 'data', shards=3, each=4)
    output_of(capsys, 'caption', data, '--with', settings)
    assert check_tables(data, 12, ('brief',)) == 12
    assert set(server.good.values()) == {1}
    # Tables of an earlier commit are refused before the work.
    listed = (data / 'captions.json').read_text()
    (data / 'captions.json').write_text('{"version": 1, "columns": {}}')
    assert 'delete it and run diffusion caption again' in refusal(capsys, 'caption', data, '--with', settings)
    (data / 'captions.json').write_text(listed)
    # A shard with other content under the same name has no valid captions.
    write_images(tmp_path / 'data', shards=3, each=4, first=100)
    output_of(capsys, 'caption', data, '--with', settings)
    assert server.good.total() == 24
    assert table_of(data, 'brief')['key'].to_pylist() == [f'p{index}' for index in range(100, 112)]


def test_questions_have_the_first_caption_and_images_that_cannot_be_sent_are_rejected(tmp_path: Path) -> None:
    prompt = Prompt('x', 1, 'Improve: {caption}', with_caption=True)
    entry = {'raw_data': {'basename': 'shard.00000.mds', 'bytes': 9, 'hashes': {}}}
    task = ShardTask(3, '', entry, {}, {'a': prompt}, {'a': {'model': 'm'}}, tmp_path)
    png, bmp = (sample(index)['image'] for index in (1, 0))
    samples = [{'image': png, 'caption': 'a {cat}'}, {'image': bmp}, {'image': b'x'}]
    samples += [{'image': b'', 'problem': ('small', '9 px')}, {'image': png, 'captions': ['one', 'two']}]
    questions = [*task.questions({'key': f'k{row}'} | each for row, each in enumerate(samples))]
    assert questions[0].image == png != questions[1].image and not task.is_complete
    for question in questions:
        task.record(Answer(question, 'fine', None, 5, 90))
        task.record(Answer(question, 'asked twice'))
    rows = [f'{each.shard} {each.row} {each.column} {each.instruction!r} {each.media_type}' for each in questions]
    text = '\n'.join([*rows, readable_json(task.images), ''])
    found = {'questions.txt': text, 'journal.jsonl': task.journal.read_text()}
    check_golden(Path(__file__).parent / 'golden/questions', found)
    assert task.is_complete
    again = replace(task, images=[], found={}, is_read=False)
    assert again.read_journal() == 5 and not [*again.questions({'key': 'k', 'image': png} for _ in range(5))]
    assert again.found == task.found and again.is_complete


def test_another_model_or_prompt_needs_another_column(
    server: VlmServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_images(tmp_path / 'data', shards=1, each=2)
    settings = write_settings(tmp_path / 'vlm.yaml', server.url, ('brief',))
    server.faults, server.rate = ('404',), 1.0  # a misspelled name is not recorded as the model of the column
    assert 'check endpoint and model' in refusal(capsys, 'caption', data, '--with', settings, 'model=tiny-vml')
    server.faults = ()
    output_of(capsys, 'caption', data, '--with', settings)
    assert 'has its captions; nothing to do' in output_of(capsys, 'caption', data, '--with', settings, '--plan')
    message = refusal(capsys, 'caption', data, '--with', settings, 'model=larger')
    assert f'columns.brief: {data.resolve()}/captions/brief was started with other settings' in message
    assert f'model: {MODEL} at the start, larger now' in message


def test_plan_measures_images_and_writes_nothing(
    server: VlmServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_images(tmp_path / 'data', shards=2, each=33)
    before = sorted(data.rglob('*'))
    settings = write_settings(tmp_path / 'vlm.yaml', server.url)
    printed = output_of(capsys, 'caption', data, '--with', settings, '--plan', '--dollars-per-hour', '3600')
    assert re.search(r'^[\d.]+ images/s, measured on 32 images; 0 of 64 answers were rejected$', printed, re.MULTILINE)
    assert re.search(r'^66 images to caption: 0\.0 hours, \$[\d.]+, at most 4\.8 kB of tables$', printed, re.MULTILINE)
    found = re.search(r'^([\d.]+) images/s(?:.|\n)*\$([\d.]+)', printed)
    assert found is not None and float(found[2]) == pytest.approx(66 / float(found[1]), abs=0.006)
    assert sorted(data.rglob('*')) == before


def test_a_server_that_answers_no_image_ends_the_command(
    server: VlmServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('diffusion.language_models.endpoint.FIRST_PAUSE_SECONDS', 0.001)
    data = write_images(tmp_path / 'data', shards=1, each=24)
    settings = write_settings(tmp_path / 'vlm.yaml', server.url)
    for fault, status, message in (
        ('400', 2, 'refuses every request'),
        ('other model', 1, "the answer is of model 'another', not 'tiny-vlm'"),
        ('500', 1, 'no answer to 8 requests'),
    ):
        server.faults, server.rate = (fault,), 1.0
        assert main(['caption', str(data), '--with', str(settings)]) == status
        assert message in capsys.readouterr().err


def test_an_image_without_a_usable_answer_is_asked_about_as_often_as_documented(
    server: VlmServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('diffusion.language_models.endpoint.FIRST_PAUSE_SECONDS', 0.001)
    data = write_images(tmp_path / 'data', shards=1, each=40)
    names = [caption_of('brief', picture(index)) for index in range(40)]
    server.always = {names[1]: '500', names[2]: 'empty', names[3]: '400'}
    settings = write_settings(tmp_path / 'vlm.yaml', server.url, ('brief',), attempts=3)
    assert output_of(capsys, 'caption', data, '--with', settings) == (
        'brief: 37 captions of 5 tokens on average, 3 rejected (1 no_answer, 1 empty, 1 refused_by_server)\n'
        'to draw captions from these columns in training: dataset.caption_weights={original: 0.2, brief: 0.8}\n'
    )
    rows = table_of(data, 'brief').to_pylist()
    assert [row['rejected'] for row in rows] == [None, 'no_answer', 'empty', 'refused_by_server', *[None] * 36]
    assert [server.requested[name] for name in names] == [1, 8, 3, 1, *[1] * 36]
    assert [(row['tokens'], row['prompt_tokens']) for row in rows[:4]] == [(5, 100), (0, 0), (15, 300), (0, 0)]
    assert rows[1]['answer'] == 'status 500: {"error": {"message": "fault 500"}}'


def command(place: str, settings: Path, share: int) -> 'subprocess.Popen[bytes]':
    words = [sys.executable, '-m', 'diffusion', 'caption', place, '--with', settings, '--share', f'{share}/2']
    return subprocess.Popen([*map(str, words), '--work', str(settings.with_name(f'work-{share}'))])


@pytest.mark.parametrize(
    ('shards', 'each', 'kills', 'in_store'),
    [
        pytest.param(4, 25, 1, False, marks=pytest.mark.cpu_seconds(30)),
        pytest.param(4, 25, 2, True, marks=pytest.mark.slow),
        pytest.param(20, 250, 10, False, marks=pytest.mark.slow),
    ],
)
def test_two_shares_that_are_killed_caption_every_image_once(
    tmp_path: Path, request: pytest.FixtureRequest, shards: int, each: int, kills: int, in_store: bool
) -> None:
    server = VlmServer(*FAULTS, '400', 'context', rate=0.1, hang_seconds=4)
    data = write_images(tmp_path / 'data', shards=shards, each=each)
    store = request.getfixturevalue('store') if in_store else None
    place = str(data) if store is None else store.upload(data)
    settings = write_settings(tmp_path / 'vlm.yaml', server.url, timeout_seconds=3, concurrency=32)
    count = shards * each
    running = [command(place, settings, share) for share in range(2)]
    try:
        for kill in range(kills):
            while server.good.total() < 2 * count * (kill + 1) / (kills + 1.5):
                time.sleep(0.01)
            share = next(each for each in (kill % 2, 1 - kill % 2) if running[each].poll() is None)
            os.kill(running[share].pid, signal.SIGKILL)
            running[share].wait()
            running[share] = command(place, settings, share)
        assert [process.wait(500) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
        server.close()
    for key, body in store.objects('data').items() if store is not None else ():
        path = data / key.removeprefix('mds/')
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    captions = check_tables(data, count)
    assert captions > 2 * count * 0.9
    assert server.good.total() - len(server.good) <= kills * 32, 'asked again: only what was in flight at a kill'
    assert json.loads((data / 'captions.json').read_text())['columns'].keys() == {'brief', 'full'}
    if store is not None:
        write_recipe, folder = request.getfixturevalue('write_recipe'), str(tmp_path / 'cache')
        streams = {'photos': {'remote': place, 'local': folder, 'resolution': 32}}
        dataset = {'name': 'image_text', 'caption_weights': {'original': 0.1, 'brief': 0.4, 'full': 0.5}}
        trained: Any = build_loader(load(write_recipe(streams=streams, dataset=dataset))).dataset
        texts = [trained.choose_caption(trained.get_item(index), index)[1] for index in range(count)]
        for index, text in enumerate(texts):
            assert text in (f'caption {index}', *(caption_of(column, picture(index)) for column in ('brief', 'full')))
        assert {text.split()[0] for text in texts} == {'caption', 'brief', 'full'}


@pytest.mark.slow
def test_the_script_of_the_documentation_runs_shares_on_ray(server: VlmServer, tmp_path: Path) -> None:
    pytest.importorskip('ray')
    page = (Path(__file__).parents[2] / 'docs/captions.md').read_text()
    script = page.partition('$ cat caption_on_ray.py\n')[2].partition('$ ray job submit')[0]
    data = write_images(tmp_path / 'data', shards=6, each=3)
    write_settings(tmp_path / 'qwen3vl.yaml', server.url)
    for old, new in (('16', '2'), ('s3://bucket/mds', str(data)), ('qwen3vl.yaml', str(tmp_path / 'qwen3vl.yaml'))):
        assert old in script
        script = script.replace(old, new)
    environment = os.environ | {'RAY_USAGE_STATS_ENABLED': '0', 'RAY_AUTH_MODE': 'disabled'}
    subprocess.run([sys.executable, '-c', script], check=True, env=environment, timeout=120)
    assert check_tables(data, 18) == 36
    assert set(server.good.values()) == {1}
    assert json.loads((data / 'captions.json').read_text())['columns'].keys() == {'brief', 'full'}
