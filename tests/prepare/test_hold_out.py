"""Held-out images: chosen by their keys, never trained on, and placed together with the training set."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from drawn import DrawnSource, contents, held_out, keys, run, snapshot
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from object_store import Store
from xxhash import xxh3_64_intdigest

from diffusion.errors import UserError
from diffusion.prepare.output_folders import FolderOutput
from diffusion.prepare.source import Entry
from diffusion.prepare.work_dir import WorkFolder


@given(
    count=st.integers(1, 15),
    first=st.integers(0, 1000),
    sizes=st.sampled_from([[16], [16, 32], [24, 48]]),
    aspects=st.sampled_from(['none', 'sdxl']),
    duplicates=st.sampled_from(['none', 'exact', 'near']),
)
@hypothesis_settings(max_examples=2, deadline=None)
def test_training_set_and_held_out_images_are_disjoint_and_together_all_accepted_images(
    count: int, first: int, sizes: list[int], aspects: str, duplicates: str
) -> None:
    class Shifted(DrawnSource):
        def entry(self, key: str, number: int) -> Entry:
            # Every fifth image is broken, and every fourth one is a repetition of an earlier one.
            return super().entry(f'image-{number}', first + number - number % 4 % 3)

    choices: dict[str, Any] = {'sizes': sizes, 'aspects': aspects, 'duplicates': duplicates}
    source = Shifted(3, 10, broken=5)
    with TemporaryDirectory() as folder:
        whole, out = Path(folder, 'whole'), Path(folder, 'out')
        everything = run(whole, source, **choices)
        accepted = {key for found in keys(whole).values() for key in found}
        if len(accepted) <= count:
            with pytest.raises(UserError, match='cannot be held out'):
                run(out, source, hold_out=count, **choices)
            return
        report = run(out, source, hold_out=count, **choices)
        train, held, all_samples = contents(out), contents(held_out(out)), contents(whole)
        chosen = {key for found in held.values() for key in found}
        assert chosen == set(sorted(accepted, key=lambda key: xxh3_64_intdigest(key.encode()))[:count])
        for name in all_samples:
            assert not train.get(name, {}).keys() & held.get(name, {}).keys()
            assert train.get(name, {}) | held.get(name, {}) == all_samples[name]
            assert chosen.isdisjoint(train.get(name, {}))
        assert report.held_out is not None
        assert (report.pictures, report.held_out.pictures) == (everything.pictures - count, count)
        assert report.buckets == {name: len(found) for name, found in train.items()}
        assert report.held_out.buckets == {name: len(found) for name, found in held.items()}
        assert report.rejected == everything.rejected and report.inputs == everything.inputs == 30
        assert report.unusable_share == everything.unusable_share


def test_copies_of_held_out_images_in_training_are_noted_without_duplicates(tmp_path: Path) -> None:
    note = 'hold_out: duplicates were not searched, so copies of held-out images may be in training'
    assert note in run(tmp_path / 'none', hold_out=2).notes
    assert note not in run(tmp_path / 'near', hold_out=2, duplicates='near').notes
    assert note not in run(tmp_path / 'all').notes


def test_too_few_images_to_hold_out_is_an_error_with_their_number(tmp_path: Path) -> None:
    message = r'hold_out: drawn has 18 accepted images, so 18 cannot be held out; give at most 17\nunusable'
    with pytest.raises(UserError, match=message):
        run(tmp_path / 'out', DrawnSource(2, 10, broken=10), hold_out=18)
    assert not list(tmp_path.iterdir())
    run(tmp_path / 'out', DrawnSource(2, 10, broken=10), hold_out=17)


def test_same_command_again_does_nothing_unless_a_dataset_is_missing(tmp_path: Path) -> None:
    run(tmp_path / 'out', hold_out=3)
    assert run(tmp_path / 'out', hold_out=3).notes[-1].startswith('already prepared')
    held_out(tmp_path / 'out').rename(tmp_path / 'elsewhere')
    with pytest.raises(UserError, match='out: exists and is not empty'):
        run(tmp_path / 'out', hold_out=3)
    (tmp_path / 'elsewhere').rename(held_out(tmp_path / 'out'))
    (tmp_path / 'out').rename(tmp_path / 'elsewhere')
    with pytest.raises(UserError, match='out-held-out: exists and is not empty'):
        run(tmp_path / 'out', hold_out=3)


def test_overwrite_replaces_both_datasets_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / 'out'
    run(out, hold_out=3)
    with monkeypatch.context() as patch:
        patch.delattr(FolderOutput, 'put_in_place')  # as if the process were killed then
        with pytest.raises(AttributeError):
            run(out, DrawnSource(2, 6), hold_out=4, overwrite=True)
    assert held_out(out).exists() and not out.exists(), 'it may have images that are held out now'
    run(out, DrawnSource(2, 6), hold_out=4, overwrite=True)
    run(tmp_path / 'new', DrawnSource(2, 6), hold_out=4)
    assert snapshot(out) == snapshot(tmp_path / 'new')
    assert snapshot(held_out(out)) == snapshot(held_out(tmp_path / 'new'))
    (tmp_path / 'home-held-out').mkdir()
    (tmp_path / 'home-held-out/diary.txt').touch()
    with pytest.raises(UserError, match='home-held-out: has no report.json, so it is not a prepared dataset'):
        run(tmp_path / 'home', hold_out=4, overwrite=True)
    expected = ['home-held-out', 'new', 'new-held-out', 'out', 'out-held-out']
    assert sorted(path.name for path in tmp_path.iterdir()) == expected


def test_images_held_out_earlier_do_not_get_into_training_unnoticed(tmp_path: Path) -> None:
    run(tmp_path / 'out', hold_out=3)
    with pytest.raises(UserError, match='out-held-out: was held out from an earlier dataset, and its images would now'):
        run(tmp_path / 'out', overwrite=True)
    assert run(tmp_path / 'out', hold_out=4, overwrite=True).pictures == 16
    # A dataset that only has such a name is not one of held-out images.
    run(tmp_path / 'mine-held-out')
    run(tmp_path / 'mine')


@pytest.mark.parametrize(('moved', 'now'), [((), 3), (('held-out',), 3), (('held-out',), 0)])
def test_next_start_finishes_placing_both_datasets(tmp_path: Path, moved: tuple[str, ...], now: int) -> None:
    out = tmp_path / 'out'
    run(out, hold_out=3)
    expected = snapshot(out), snapshot(held_out(out))
    work = WorkFolder(tmp_path / 'out.work')
    work.held_out.path.mkdir(parents=True)
    work.complete.write_bytes((out / 'report.json').read_bytes())
    if 'held-out' not in moved:
        held_out(out).rename(work.held_out.dataset)
    if 'out' not in moved:
        out.rename(work.train.dataset)
    assert run(out, hold_out=now).pictures == 17
    assert (snapshot(out), snapshot(held_out(out))) == expected
    assert not work.path.exists()


@pytest.mark.slow
def test_object_store_gets_both_datasets_the_held_out_images_first(tmp_path: Path, store: Store) -> None:
    store.bucket('mds')
    store.requests.clear()
    choices: dict[str, Any] = {'hold_out': 3, 'sizes': [32], 'source': DrawnSource(2, 6)}
    report = run('s3://mds/a/out', work=str(tmp_path / 'work'), **choices)
    assert report.held_out is not None and report.held_out.out == 's3://mds/a/out-held-out'
    run(tmp_path / 'out', **choices)
    expected = {
        f'a/{out.name}/{name}': content
        for out in (tmp_path / 'out', held_out(tmp_path / 'out'))
        for name, content in snapshot(out).items()
    }
    found = store.objects('mds')
    assert found.keys() == expected.keys()
    assert all(found[name] == expected[name] for name in found if 'report' not in name)
    of_held_out = ['/out-held-out/' in name for name in store.paths('PUT') if not name.endswith('.mds')]
    assert of_held_out == sorted(of_held_out, reverse=True) and any(of_held_out) and not all(of_held_out)
    assert run('s3://mds/a/out', work=str(tmp_path / 'work'), **choices).notes[-1].startswith('already prepared')
