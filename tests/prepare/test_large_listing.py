"""Listings that do not fit in memory give the parts and the plan that short ones give."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diffusion.errors import UserError
from diffusion.prepare import file_listing, source
from diffusion.prepare.file_listing import File, SortedFiles
from diffusion.prepare.folder_source import FolderSource
from diffusion.prepare.input_plan import InputPlan, SavedPlan
from diffusion.prepare.settings import PrepareSettings, SourceSettings
from diffusion.prepare.source import Part, PartList
from diffusion.prepare.work_dir import WorkFolder

# Few letters, so that stems, folders and hidden files often begin in the same way.
pieces = st.text('ab.-', min_size=1, max_size=4).filter(lambda text: text not in ('.', '..'))
names = st.builds(
    lambda folders, stem, suffix: '/'.join([*folders, f'{stem}.{suffix}']),
    st.lists(pieces, max_size=2),
    pieces,
    st.sampled_from(['jpg', 'png', 'webp', 'JPG', 'txt', 'json', 'TXT', 'md', 'jpg.txt']),
)


def file(name: str) -> File:
    return File(f'/in/{name}', len(name), f'stamp of {name}', name)


def listing(monkeypatch: pytest.MonkeyPatch, files: list[File]) -> None:
    """Let every local folder have these files."""
    monkeypatch.setattr(file_listing, '_walk', lambda location, broken: iter(files))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(found=st.lists(names, min_size=1, max_size=30, unique=True))
def test_parts_of_a_sorted_listing_are_those_of_a_look_at_all_files(found, monkeypatch):
    files = [file(name) for name in found]
    listing(monkeypatch, files)
    monkeypatch.setattr(file_listing, 'IN_MEMORY', 4)
    source = FolderSource('/in/**')
    visible, others = file_listing.list_files('/in', None)
    try:
        expected = source.parts_of(visible, others)
    except UserError:
        with pytest.raises(UserError, match='contains no images'):
            source.parts()
        return
    parts = source.parts()
    assert [part.where for part in parts] == [part.where for part in expected]
    assert [part.stamp for part in parts] == [part.stamp for part in expected]
    counts, expected_counts = parts[0].passed_over, expected[0].passed_over
    assert {kind: (each.count, sorted(each.names)) for kind, each in counts.items()} == {
        kind: (each.count, sorted(each.names)) for kind, each in expected_counts.items()
    }


def test_files_are_sorted_in_runs_and_may_be_read_again_and_side_by_side(monkeypatch):
    monkeypatch.setattr(file_listing, 'IN_MEMORY', 64)
    monkeypatch.setattr(file_listing, 'BLOCK', 10)
    found = [file(f'{number * 7919 % 1000:04}.jpg') for number in range(1000)]
    ordered = SortedFiles(found)
    assert list(ordered) == list(ordered) == sorted(found, key=lambda each: each.name)
    assert all(first == second for first, second in zip(ordered, ordered, strict=True))
    strange = [file(name) for name in ('line\nbreak.jpg', 'half \udc80 of a pair.jpg', '')]
    monkeypatch.setattr(file_listing, 'IN_MEMORY', 1)
    assert sorted(SortedFiles(strange)) == sorted(strange)


def test_list_of_parts_is_like_a_list_also_on_disk(monkeypatch):
    monkeypatch.setattr(source, 'MEMORY_BYTES', 100)
    values = ['é\n', {'b': 1, 'a': None}]
    parts = [Part(f'part-{number}', {'n': number, 'values': values}, number, f's{number}') for number in range(9)]
    found = PartList(parts)
    assert [*found] == parts and found[2:8:3] == parts[2:8:3] and found[-1] == parts[-1] and len(found) == 9
    found.report_in_first(passed_over={}, notes=('note',))
    assert found[0].notes == ('note',) and found[1].notes == ()
    with pytest.raises(IndexError):
        found[9]


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrepareSettings:
    listing(monkeypatch, [file(f'{number:03}.{suffix}') for number in range(1500) for suffix in ('jpg', 'txt')])
    source = SourceSettings('folder', location='/in')
    return PrepareSettings(source, str(tmp_path / 'out'), sizes=[32])


def test_plan_on_disk_is_the_json_that_is_hashed(prepared, tmp_path):
    source = FolderSource('/in')
    plan = InputPlan.make(prepared, source)
    work = WorkFolder(tmp_path)
    plan.write_or_check(work)
    content = json.loads(work.plan.read_text())
    assert content.pop('fingerprint') == plan.fingerprint
    assert hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest() == plan.fingerprint
    sizes = {part['name']: len(part['where']['pictures']) for part in content['parts']}
    assert sizes == {'pictures-000000': 1000, 'pictures-000001': 500}
    assert content['parts'][1]['where'] == source.parts()[1].where
    assert [*SavedPlan.read(work.plan).parts()] == content['parts']
    plan.write_or_check(work)


@pytest.mark.parametrize('damage', [lambda text: text[:-2], lambda text: text[:40], lambda text: ''])
def test_damaged_plan_is_named(prepared, tmp_path, damage):
    plan, work = InputPlan.make(prepared, FolderSource('/in')), WorkFolder(tmp_path)
    plan.write_or_check(work)
    work.plan.write_text(damage(work.plan.read_text()))
    with pytest.raises(UserError, match=rf'^work: {tmp_path}/plan.json is damaged .*; remove .* to start over'):
        plan.write_or_check(work)


def test_parts_of_the_same_name_are_refused(prepared):
    twice: Any = SimpleNamespace(parts=lambda: [Part(name, {}, 1, '') for name in ('a', 'b', 'a')])
    with pytest.raises(UserError, match='^/in: several parts are named a; rename a file$'):
        InputPlan.make(prepared, twice)
