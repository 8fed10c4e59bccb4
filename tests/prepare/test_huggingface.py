"""Datasets of the Hugging Face Hub, served on localhost, and snapshots of them in folders: one split, never mixed."""

import json
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from commands import refusal
from object_store import Store
from prepare import drawn
from prepare.dataset_hub import TOKEN, HubDataset, HubServer, serving
from prepare.drawn import here, samples, write_files
from prepare.hub_datasets import (
    LAYOUTS,
    NUMBERS,
    arrow_of,
    image,
    image_dataset,
    parquet_dataset,
    parquet_of,
    rows,
)

from diffusion import cli as command
from diffusion.errors import DataError, GaveUp, UserError
from diffusion.prepare import dataset_choice
from diffusion.prepare.counts_report import PrepareReport
from diffusion.prepare.hub_repository import Hub
from diffusion.prepare.huggingface_source import HuggingFaceSource
from diffusion.prepare.pipeline import prepare
from diffusion.prepare.settings import settings_of
from diffusion.prepare.source import Entry
from diffusion.prepare.work_dir import Share


@pytest.fixture(scope='module')
def layouts() -> dict[str, dict[str, bytes]]:
    return {name: files() for name, files in LAYOUTS.items()}


@pytest.fixture
def hub(layouts: dict[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Hub with a dataset per layout, such as `org/parquet`."""
    with serving({f'org/{name}': HubDataset(dict(files)) for name, files in layouts.items()}, monkeypatch) as server:
        yield server


def prepared(location: str, out: Path, *, share: Share | None = None, **values: Any) -> PrepareReport | None:
    """Prepare the training split in this process, which knows the server."""
    source = {'kind': 'huggingface', 'location': location}
    content = {'source': source, 'out': str(out), 'sizes': [32], 'max_rejected': 1.0} | values
    return prepare(settings_of(content), run=here, share=share)


def add(hub: HubServer, files: dict[str, bytes], name: str = 'org/other', **options: Any) -> str:
    hub.datasets[name] = HubDataset(files, **options)
    return name


def entries(location: str | Path, **options: Any) -> list[Entry]:
    return drawn.entries(HuggingFaceSource(str(location), **options))


def captions(location: str | Path, **options: Any) -> list[str]:
    """Return the captions of the images that are read; none may be rejected."""
    found = entries(location, **options)
    assert [entry.problem for entry in found if entry.problem] == []
    assert all(entry.image == image(int(entry.captions[0].split()[1])) for entry in found)
    return [entry.captions[0] for entry in found]


def expected(split: str) -> list[str]:
    return [f'{split} {number}' for number in NUMBERS[split]]


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('place', ['hub', 'folder'])
def test_splits_never_mix(hub: HubServer, tmp_path: Path, layout: str, place: str) -> None:
    location = f'org/{layout}' if place == 'hub' else str(write_files(tmp_path / 'snapshot', LAYOUTS[layout]()))
    assert sorted(captions(location)) == sorted(expected('train'))
    for split in NUMBERS:
        assert sorted(captions(location, split=split)) == sorted(expected(split))


@pytest.mark.parametrize('layout', ['parquet', 'images'])
def test_training_split_is_prepared_and_every_file_counted(hub: HubServer, tmp_path: Path, layout: str) -> None:
    out, name = tmp_path / 'out', f'org/{layout}'
    report = prepared(name, out)
    assert report is not None and report.license == 'cc-by-4.0'
    assert sorted(sample['captions'][0] for sample in samples(out / '32px')) == sorted(expected('train'))
    assert report.notes[0].startswith(f'{name} at commit ') and report.notes[0].endswith(', split train')
    # Every file is an input, holds some, or is counted.
    kinds = {kind: count.count for kind, count in report.passed_over.items()}
    read = {'parquet': 2, 'images': 7}[layout]
    assert sum(kinds.values()) + read == len(hub.datasets[name].files)
    assert kinds['split test'] == {'images': 3}.get(layout, 1)


@pytest.mark.parametrize(
    ('pattern', 'split', 'numbers'),
    [
        ('', 'train', range(6)),
        ('@main/data', 'train', range(6)),
        ('@main/data/train-*.parquet', 'train', range(6)),
        ('/data/train-00001-of-00002.parquet', 'train', range(4, 6)),
        ('/**/test-*', 'test', range(20, 23)),
    ],
)
def test_paths_and_patterns_on_the_hub(hub: HubServer, pattern: str, split: str, numbers: range) -> None:
    assert captions(f'hf://datasets/org/parquet{pattern}') == [f'{split} {number}' for number in numbers]


@pytest.mark.parametrize('place', ['folder', 'store'])
def test_patterns_outside_the_hub(store: Store, tmp_path: Path, place: str) -> None:
    files = parquet_dataset()
    base = str(write_files(tmp_path, files)) if place == 'folder' else store.bucket('pictures', **files)
    assert captions(base) == expected('train')
    assert captions(base, split='test') == expected('test')
    assert captions(f'{base}/data/val*.parquet') == expected('validation')
    assert captions(f'{base}/**') == expected('train')


def test_address_of_the_page_is_a_name(hub: HubServer) -> None:
    assert captions(f'{hub.url}/datasets/org/parquet?row=1') == expected('train')
    assert captions(f'{hub.url}/datasets/org/parquet/tree/main/data/') == expected('train')
    assert captions(f'{hub.url}/datasets/org/parquet/blob/main/data/test-00000-of-00001.parquet') == expected('test')


def test_revision_is_read(hub: HubServer) -> None:
    hub.datasets['org/parquet'].revisions['v2'] = {'train.parquet': parquet_of(rows('train', [7]))}
    assert captions('org/parquet@v2') == ['train 7'] == captions('hf://datasets/org/parquet@v2')
    with pytest.raises(UserError, match=r'there is no revision v3; see .*/datasets/org/parquet/commits/main'):
        captions('org/parquet@v3')


def test_stopped_preparation_resumes_at_its_commit(hub: HubServer, tmp_path: Path) -> None:
    name, out = 'org/parquet', tmp_path / 'out'
    dataset = hub.datasets[name]
    prepared(name, out, share=Share(0, 2))
    commit = dataset.commit('main')
    dataset.revisions['earlier'], dataset.files = dataset.files, {'train.parquet': parquet_of(rows('test'))}
    with pytest.raises(UserError, match=rf'settings.source.location: {name} at the start, org/tars now'):
        prepared('org/tars', out)
    plan = tmp_path / 'out.work/plan.json'
    content = plan.read_text()
    plan.write_text(content[:-1])
    with pytest.raises(UserError, match='plan.json is damaged'):
        prepared(name, out)
    plan.write_text(content)
    report = prepared(name, out)
    assert (out / 'captions.txt').read_text().splitlines() == expected('train')
    assert report is not None and report.notes == [f'{name} at commit {commit}, split train']


def test_hub_copies_as_parquet_have_configurations(hub: HubServer) -> None:
    files = {f'{config}/{split}/0000.parquet': parquet_of(rows(split)) for config in 'ab' for split in NUMBERS}
    hub.datasets['org/parquet'].revisions['refs/convert/parquet'] = files
    location = 'hf://datasets/org/parquet@refs/convert/parquet'
    assert captions(location, config='b', split='test') == expected('test')
    assert captions(f'{location}/a') == expected('train')


@pytest.mark.parametrize(('layout', 'faults'), [('parquet', [503, 429, 'wrong']), ('images', ['cut'])])
def test_failing_downloads_are_retried(hub: HubServer, faults: list[int | str], layout: str) -> None:
    source = HuggingFaceSource(f'org/{layout}')
    parts = source.parts()
    hub.faults[:] = faults
    found = [entry for part in parts for entry in source.read(part)]
    assert [entry.captions[0] for entry in found if isinstance(entry, Entry)] == expected('train')
    assert not hub.faults


def test_failure_of_the_hub_is_not_the_users_mistake(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.api_faults[:] = [500] * 4
    with pytest.raises(DataError, match=rf'org/parquet: the Hub at {hub.url} does not answer \(.*500.*start again'):
        HuggingFaceSource('org/parquet').parts()
    hub.api_faults[:] = [403]
    with pytest.raises(UserError, match=r'org/parquet: the Hub refuses access \(403\): check HF_TOKEN'):
        HuggingFaceSource('org/parquet').parts()
    for answer in ({}, [], {'sha': 'main'}):
        with monkeypatch.context() as patch:
            patch.setattr(Hub, '_get_json', lambda hub, url, answer=answer: (answer, None))
            with pytest.raises(DataError, match='has no commit; check that HF_ENDPOINT is a Hub, not a proxy'):
                HuggingFaceSource('org/parquet').parts()
    parts = HuggingFaceSource('org/parquet').parts()
    hub.faults[:] = ['wrong'] * 4
    with pytest.raises(GaveUp, match=r'data/train-00000-of-00002\.parquet: cannot be read.* hash '):
        list(HuggingFaceSource('org/parquet').read(parts[0]))


def test_gated_dataset_needs_a_token(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = add(hub, parquet_dataset(), 'org/gated', gated=True)
    with pytest.raises(UserError, match=rf'accept the terms at {hub.url}/datasets/org/gated, and set HF_TOKEN'):
        captions(gated)
    monkeypatch.setenv('READER_TOKEN', 'hf_of_nobody')
    with pytest.raises(UserError, match='accept the terms'):
        captions(gated, token_variable='READER_TOKEN')
    monkeypatch.setenv('READER_TOKEN', TOKEN)
    assert captions(gated, token_variable='READER_TOKEN') == expected('train')
    with pytest.raises(UserError, match=r'source\.token_variable: the environment variable ABSENT is not set'):
        captions(gated, token_variable='ABSENT')
    monkeypatch.setenv('HF_TOKEN', TOKEN)
    assert captions(gated) == expected('train')


def holds_token(out: Path) -> list[Path]:
    return [path for path in out.rglob('*') if path.is_file() and TOKEN.encode() in path.read_bytes()]


def test_token_is_written_nowhere(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, out = add(hub, parquet_dataset(), private=True), tmp_path / 'out'
    monkeypatch.setenv('READER_TOKEN', TOKEN)
    source = {'kind': 'huggingface', 'location': name, 'token_variable': 'READER_TOKEN'}
    assert prepared(name, out, source=source, share=Share(0, 2)) is None
    assert (tmp_path / 'out.work').exists() and holds_token(tmp_path) == []
    assert prepared(name, out, source=source) is not None
    assert hub.tokens == {TOKEN} and holds_token(tmp_path) == []


@pytest.mark.slow
def test_token_reaches_the_workers(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, out = add(hub, parquet_dataset(), private=True), tmp_path / 'out'
    monkeypatch.setenv('READER_TOKEN', TOKEN)
    monkeypatch.setenv('HF_HUB_OFFLINE', '0')
    # That of earlier tests; workers shall import huggingface_hub with the environment of this one.
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    words = ['prepare', 'huggingface', name, '--out', str(out), '--sizes', '32', '--workers', '1']
    assert command.main([*words, '--token-variable', 'READER_TOKEN']) == 0
    assert holds_token(out) == []


def test_token_itself_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ['prepare', 'huggingface', 'org/a', '--out', str(tmp_path / 'out'), '--sizes', '32', '--token-variable']
    for secret in ('hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789', 'my secret'):
        errors = refusal(capsys, *arguments, secret)
        assert 'source.token_variable' in errors and secret not in errors


@pytest.mark.parametrize(
    ('location', 'message'),
    [
        ('org/nothing', r'there is no such dataset on the Hub, or it is private \(401\): check the name'),
        ('org/images/test', 'is neither a folder nor the name of a dataset'),
        ('https://host/datasets/org/parquet', 'is neither a folder nor the name of a dataset'),
        ('nothing', 'is neither a folder nor the name of a dataset on the Hub; use ORG/NAME'),
        ('./nothing/here', 'is neither a folder nor the name of a dataset'),
        ('hf://org/model', 'is not the URL of a dataset; use hf://datasets/ORG/NAME'),
        ('hf://datasets/org/parquet/data/dev-*', 'no file matches; see the files of org/parquet at commit'),
    ],
)
def test_wrong_name_has_a_way_out(hub: HubServer, location: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        HuggingFaceSource(location).parts()


def test_offline_mode_is_named(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    with pytest.raises(UserError, match=r'HF_HUB_OFFLINE is set; unset it, or give a folder that `hf download'):
        HuggingFaceSource('org/parquet').parts()


def test_wrong_column_is_found_before_a_download(hub: HubServer, tmp_path: Path) -> None:
    tables = {f'train-{n}.parquet': parquet_of({'url': ['https://a/1.jpg'], 'text': ['x']}) for n in range(2)}
    with pytest.raises(UserError, match=r'--url_list hf://datasets/org/other@\w+/train-0\.parquet .*--url_col url'):
        HuggingFaceSource(add(hub, tables)).parts()
    with pytest.raises(UserError, match=rf'--url_list {tmp_path}/train-0\.parquet .*--url_col url'):
        HuggingFaceSource(str(write_files(tmp_path, tables))).parts()
    with pytest.raises(UserError, match=r"has no column 'txt', only .*; correct --caption-column: did you mean 'text'"):
        HuggingFaceSource('org/parquet', caption_column='txt').parts()
    assert not [request for request in hub.requests if request.startswith('HEAD') and request.endswith('.parquet')]


@pytest.mark.parametrize('place', ['hub', 'folder'])
def test_images_by_path_are_read_inside_the_dataset_only(hub: HubServer, tmp_path: Path, place: str) -> None:
    (tmp_path / 'secret.png').write_bytes(image(99))
    paths = ['a.png', '../images/b.png', 'data/c.png', '../../secret.png', str(tmp_path / 'secret.png'), 'gone.png']
    paths += [None, '', 'https://host/a.png']
    columns = {'image': [{'bytes': None, 'path': path} for path in paths], 'text': [f'train {n}' for n in range(9)]}
    files = {name: image(number) for number, name in enumerate(('data/a.png', 'images/b.png', 'data/c.png'))}
    files['data/train.parquet'] = parquet_of(columns)
    found = entries(add(hub, files) if place == 'hub' else write_files(tmp_path / 'snapshot', files))
    problems = 'image_outside_dataset image_outside_dataset missing_file no_image no_image image_is_an_address'
    assert [entry.problem for entry in found] == [None, None, None, *problems.split()]
    assert [entry.image for entry in found[:3]] == [image(0), image(1), image(2)]


def test_text_that_is_no_path_rejects_its_row(hub: HubServer) -> None:
    columns = {'image': ['A' * 70_000, 'a%2f..%2fb\n?#.png', '0.png'], 'text': [f'train {n}' for n in range(3)]}
    location = add(hub, {'train.parquet': parquet_of(columns), '0.png': image(0)})
    assert [entry.problem for entry in entries(location)] == ['missing_file', 'missing_file', None]


@pytest.mark.parametrize(
    ('name', 'content'),
    [
        ('train.parquet', parquet_of({'image': ['https://a/1.jpg'], 'caption': ['x']})),
        ('train.arrow', arrow_of({'image': ['https://a/1.jpg'], 'caption': ['x']})),
    ],
)
def test_addresses_are_refused_with_the_commands_to_run(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_files(tmp_path / 'snapshot', {name: content})
    kind = name.partition('.')[2].replace('arrow', 'parquet')
    message = rf'img2dataset --url_list .*--input_format {kind} .*--caption_col caption'
    with pytest.raises(UserError, match=message) as raised:
        entries(folder)
    assert 'diffusion prepare webdataset images' in str(raised.value)
    assert f'--url_list {folder}/{name} ' in str(raised.value) or '--url_list urls.parquet ' in str(raised.value)


def test_root_metadata_of_all_splits_concerns_the_chosen_one(tmp_path: Path) -> None:
    files = {f'{split}/{number}.png': image(number) for split in NUMBERS for number in NUMBERS[split]}
    table = [{'file_name': name, 'text': f'{name.partition("/")[0]} {Path(name).stem}'} for name in files]
    table.append({'file_name': 'train/gone.png', 'text': 'train 0'})
    files['metadata.jsonl'] = '\n'.join(map(json.dumps, table)).encode()
    found = entries(write_files(tmp_path / 'snapshot', files))
    assert [entry.captions[0] for entry in found if entry.problem is None] == expected('train')
    assert [entry.key for entry in found if entry.problem] == ['train/gone.png (metadata.jsonl line 12)']


def test_captions_beside_images_are_downloaded(hub: HubServer) -> None:
    files = {}
    for split, number in (('train', 1), ('train', 2), ('test', 3)):
        files |= {f'{split}/{number}.png': image(number), f'{split}/{number}.txt': f'{split} {number}'.encode()}
    assert captions(add(hub, files)) == ['train 1', 'train 2']


def test_captions_beside_images_are_found_whatever_the_case_of_suffixes(tmp_path: Path) -> None:
    files = {'train/1.PNG': image(1), 'train/1.TXT': b'text 1', 'train/1.caption': b'other 1'}
    files |= {'train/2.png': image(2), 'train/2.Json': b'{"caption": "text 2"}', 'train/2.Caption': b'other 2'}
    write_files(tmp_path / 'snapshot', files)
    assert captions(tmp_path / 'snapshot') == ['text 1', 'text 2']
    assert captions(tmp_path / 'snapshot', caption_suffix='caption') == ['other 1', 'other 2']


def test_images_need_captions(tmp_path: Path) -> None:
    message = r'has images without captions; they need a metadata\.jsonl .*, or a \.txt or \.json beside each image'
    for files, ending in ({'cats/1.png': b'', 'dogs/2.png': b''}, '$'), ({'meta.csv': b''}, r'; it has meta\.csv$'):
        with pytest.raises(UserError, match=message + ending):
            HuggingFaceSource(str(write_files(tmp_path, files))).parts()


def test_saved_dataset_without_splits_is_read(tmp_path: Path) -> None:
    state = {'_data_files': [{'filename': 'data-1.arrow'}, {'filename': 'data-0.arrow'}], '_split': 'train[:50%]'}
    files = {'state.json': json.dumps(state).encode(), 'dataset_info.json': b'{}'}
    files |= {f'data-{number}.arrow': arrow_of(rows('train', [number])) for number in range(2)}
    assert captions(write_files(tmp_path / 'saved', files)) == ['train 1', 'train 0']


def test_damaged_arrow_file_gives_the_rows_before_the_damage(tmp_path: Path) -> None:
    content = arrow_of(rows('train'))
    for name, size in (('a.arrow', len(content) // 2), ('b.arrow', 3), ('c.arrow', 0)):
        write_files(tmp_path / 'in', {name: content[:size]})
    found = entries(tmp_path / 'in')
    assert [entry.problem for entry in found][-3:] == ['part_damaged', 'part_unreadable', 'part_unreadable']
    assert [entry.captions[0] for entry in found[:-3]] == expected('train')[: len(found) - 3] != []


def test_card_without_license_is_noted(hub: HubServer, tmp_path: Path) -> None:
    name = add(hub, parquet_dataset() | {'README.md': b'# No header\n'})
    report = prepared(name, tmp_path / 'a')
    assert report is not None and report.license is None
    assert any('its dataset card states no license' in note for note in report.notes)
    report = prepared(name, tmp_path / 'b', license='CC0')
    assert report is not None and report.license == 'CC0' and not any('license' in note for note in report.notes)


def test_commit_that_changes_no_data_needs_no_new_preparation(hub: HubServer, tmp_path: Path) -> None:
    name = add(hub, parquet_dataset() | {'README.md': b'# One\n'})
    out, files = tmp_path / 'out', hub.datasets[name].files
    prepared(name, out)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    files['README.md'] = b'# Two\n'
    report = prepared(name, out)
    assert report is not None and report.notes[-1].startswith('already prepared from the same input')
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    files[next(path for path in files if 'train' in path)] = parquet_of(rows('train', [1]))
    with pytest.raises(UserError, match='is not empty'):
        prepared(name, out)


def test_rows_of_mixed_types_are_rejected_one_by_one(tmp_path: Path) -> None:
    cells = [{'score': ['high']}, {'text': [5]}, {'text': [None]}, {'text': [['a', None]]}, {'text': [{'en': 'a'}]}]
    files = {f'train-{n}.parquet': parquet_of(rows('train', [n]) | cell) for n, cell in enumerate(cells)}
    report = prepared(str(write_files(tmp_path / 'snapshot', files)), tmp_path / 'out')
    assert report is not None and report.pictures == 2
    counts = {reason: count.count for reason, count in report.rejected.items()}
    assert counts == {'caption_not_text': 2, 'no_caption': 1}


def test_listing_outside_the_repository_is_refused(hub: HubServer) -> None:
    with pytest.raises(UserError, match=r"lists a file '\.\./\.\./evil\.png' outside the repository"):
        HuggingFaceSource(add(hub, {'../../evil.png': image(1), **image_dataset()})).parts()


def test_headers_of_cards_and_tables_are_read_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_choice, 'MAX_HEADER_BYTES', 10)
    assert dataset_choice.read_card(b'--- \nlicense: x\n--- \ntext', 'card') == {'license': 'x'}
    with pytest.raises(UserError, match='card: its YAML header has 11 characters; shorten it in a local copy'):
        dataset_choice.read_card(b'---\nlicense: xy\n---\n', 'card')
    for text in (b'', b'license: x\n---\n', b'---\nlicense: x\n', b'---\n- x\n---\n'):
        assert dataset_choice.read_card(text, 'card') == {}
    monkeypatch.setattr(dataset_choice, 'MAX_TABLE_BYTES', 10)
    for table, message in (
        (b'url,text\n\n', 'img2dataset --url_list'),
        (b'url,text\n\n\n', 'has no Parquet files, tars'),
    ):
        with pytest.raises(UserError, match=message):
            HuggingFaceSource(str(write_files(tmp_path, {'a.csv': table}))).parts()
