"""Resumable writing of shards to a local folder or an object store, and plans of unfinished datasets."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffusion.storage.mds import ShardFormat, index_text
from diffusion.storage.places import LocalPlace, Place, StorePlace
from diffusion.storage.shard_writer import ShardWriter, other_plan, pin_plan

FORMAT = ShardFormat({'key': 'str'})
Open = Callable[[str], Place]


@pytest.fixture(params=['local', 'store'])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == 'local':
        return lambda name: LocalPlace(tmp_path / 'data' / name)
    url = request.getfixturevalue('store').bucket('data')
    return lambda name: StorePlace(f'{url}/{name}', tmp_path / 'scratch' / name)


def write(writer: ShardWriter, number: int) -> None:
    samples = [FORMAT.encode({'key': f'{number}-{index}'}) for index in range(3)]
    writer.write(number, samples, [len(sample) for sample in samples])


def test_index_does_not_depend_on_the_order_of_writing(folder: Open, tmp_path: Path) -> None:
    indexes = []
    for name, order in (('one', (0, 1, 2)), ('two', (2, 0, 1))):
        writer = ShardWriter(folder(name), folder(f'{name}-entries'), FORMAT)
        assert writer.done() == set()
        for count, number in enumerate(order, 1):
            write(writer, number)
            assert writer.done() == set(order[:count])
        indexes.append(index_text(writer.read_entries(range(3))))
    assert indexes[0] == indexes[1]
    shards = json.loads(indexes[0])['shards']
    assert {shard['raw_data']['basename']: shard['raw_data']['bytes'] for shard in shards} == folder('one').sizes()
    assert not [path for path in (tmp_path / 'scratch').rglob('*') if path.is_file()], 'of shards that were uploaded'


def test_interrupted_shard_does_not_exist(folder: Open, tmp_path: Path) -> None:
    writer = ShardWriter(folder('data'), folder('entries'), FORMAT)

    def interrupted() -> Any:
        yield b''
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.write(0, interrupted(), [0, 1])
    assert writer.done() == set() and folder('data').sizes() == {}
    assert not [path for path in tmp_path.rglob('*.mds*') if path.is_file()]
    write(writer, 0)
    assert writer.done() == {0}


def test_shard_without_its_file_or_its_entry_is_not_done(tmp_path: Path) -> None:
    writer = ShardWriter(LocalPlace(tmp_path / 'data'), LocalPlace(tmp_path / 'entries'), FORMAT)
    for number in range(3):
        write(writer, number)
    (tmp_path / 'data/shard.00000.mds').unlink()
    (tmp_path / 'entries/shard.00001.mds.json').unlink()
    assert writer.done() == {2}


def test_work_resumes_with_the_same_plan_only(folder: Open) -> None:
    plan = {'settings': {'side': 64, 'names': ['a', 'b']}, 'parts': [1, 2]}
    pin_plan(folder('work'), plan, where='out')
    pin_plan(folder('work'), json.loads(json.dumps(plan)), where='out')
    other = plan | {'settings': {'side': 32, 'names': ['a', 'b']}}
    message = r'^out: .*work was started with other settings .*:\n  settings.side: 64 at the start, 32 now\nrestore'
    with pytest.raises(ValueError, match=message):
        pin_plan(folder('work'), other, where='out')
    assert 'the order of the input' in str(other_plan(folder('work'), plan, plan, where='out'))


def test_at_most_five_differences_are_listed_and_damage_is_named(tmp_path: Path) -> None:
    saved = {'a': {'b': 1, 'c': 2}, 'd': {'e': 1}, 'f': 3, 'same': {'g': [1]}}
    now = {'h': 4, 'a': {'b': 1, 'c': 5}, 'f': {'i': 1}, 'same': {'g': [1]}, 'j': {}}
    lines = ['h: missing at the start, 4 now', 'a.c: 2 at the start, 5 now', "f: 3 at the start, {'i': 1} now"]
    lines += ['j: missing at the start, present now', 'd: present at the start, missing now']
    for more, last in (({}, []), ({'k': 1, 'l': 2}, ['and 2 more'])):
        assert str(other_plan(tmp_path, saved, more | now, where='out')).splitlines() == [
            f'out: {tmp_path} was started with other settings or another input:',
            *(f'  {line}' for line in [*(f'{key}: missing at the start, {more[key]} now' for key in more), *lines][:5]),
            *(f'  {line}' for line in last),
            f'restore the settings and the input to resume, or remove {tmp_path} to start over',
        ]
    (tmp_path / 'plan.json').write_text('{')
    with pytest.raises(ValueError, match=r'^out: .*/plan.json is damaged \(.*\); remove'):
        pin_plan(LocalPlace(tmp_path), {}, where='out')
