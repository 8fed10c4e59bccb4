"""A preparation, append or removal killed with SIGKILL leaves valid datasets, and the next start finishes it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
CHILDREN = '''
"""Change datasets in forked children of one process, which imports the modules once."""
import hashlib, json, os, random, shutil, signal, sys, traceback
sys.path[:0] = [sys.argv[1], os.path.dirname(sys.argv[1])]
from pathlib import Path
import pandas
from drawn import DrawnSource, contents, held_out, here, settings, snapshot
from test_append import add, indexed, sliced
from test_append import start as create
from diffusion.cli import main
from diffusion.prepare import convert_part, output_folders, report_content, worker_pool
from diffusion.prepare.pipeline import prepare
from sudden_death import die_before

FOLDER, ARGUMENTS = Path(sys.argv[2]), json.loads(sys.argv[3])
# fsync takes most of the time, and does not matter when only the process is killed.
os.fsync = lambda descriptor: None


def child(action, kill_at=None, **death):
    """Call a function in a child process with its own process group; return True, or False if it was killed."""
    pid = os.fork()
    if not pid:
        os.setsid()
        try:
            if kill_at is not None:
                die_before(kill_at, FOLDER, **death)
            os._exit(action() or 0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status == 0


def start(out, source, run=None, **values):
    """Return a function that prepares a dataset in other processes, or by `run`."""
    chosen = settings(out, **values)

    def marked(jobs):
        """Run jobs in other processes, and write a file per result, since `die_before` counts only our operations."""
        for result in worker_pool.run_jobs(jobs, workers=chosen.worker_count):
            (FOLDER / 'result').write_text('')
            yield result

    return lambda: prepare(chosen, source=source, run=run or marked) is None


def snapshots(out):
    return snapshot(out), snapshot(held_out(out))


def done(out):
    """Return the number of parts and shards that a preparation has finished."""
    names = [name for _, folders, files in os.walk(out.with_name(out.name + '.work')) for name in folders + files]
    return sum(name.isdecimal() or name.endswith('.mds.json') for name in names)


def at_random_points(workers, kills):
    """Kill the process group at random moments, up to three times per preparation, then resume to the end."""
    source = DrawnSource(8, 12, broken=7)
    values = dict(workers=workers, aspects='sdxl', duplicates='near', hold_out=9, shard_mb=0.01)
    assert child(start(FOLDER / 'whole', source, **values))
    draw = random.Random(workers)
    found = []
    while len(found) < kills:
        out = FOLDER / str(len(found))
        for _ in range(min(3, kills - len(found))):
            if child(start(out, source, **values), draw.randrange(10, 60), with_group=True):
                break
            found.append(done(out))
        assert child(start(out, source, **values))
        assert snapshots(FOLDER / 'whole') == snapshots(out)
    return found


def while_replacing():
    """Kill a preparation before every step that replaces two datasets by new ones, check both, then resume it."""
    old, new = DrawnSource(1, 6), DrawnSource(2, 4)
    for source in (old, new):
        [list(source.read(part)) for part in source.parts()]  # fill the cache of encoded images
    values = dict(sizes=[16], run=here)
    assert child(start(FOLDER / 'old', old, hold_out=2, **values))
    assert child(start(FOLDER / 'new', new, hold_out=3, **values))
    known = {version: snapshots(FOLDER / version) for version in ('old', 'new')}
    seen, steps, ended = set(), 0, False
    while not ended:
        out = FOLDER / str(steps)
        shutil.copytree(FOLDER / 'old', out)
        shutil.copytree(held_out(FOLDER / 'old'), held_out(out))
        complete = out.with_name(f'{out.name}.work') / 'complete'
        change = start(out, new, hold_out=3, overwrite=True, **values)
        ended = child(change, steps, after=complete)
        seen.add(tuple(version_of(path, at, known) for at, path in enumerate((out, held_out(out)))))
        if not ended:
            assert child(change), f'killed at step {steps}'
            assert snapshots(out) == known['new'] and not complete.parent.exists()
            steps += 1
    return [sorted(seen), steps]


def version_of(path, at, known):
    """Return 'old', 'new' or 'none'; fail if the dataset at a path is neither complete nor absent."""
    if not path.exists():
        return 'none'
    # Leave out the content of the reports, since the old dataset is a copy whose reports have the path of the original.
    files = {name: content for name, content in snapshot(path).items() if 'report' not in name}
    assert (path / 'report.json').exists()
    return next(version for version, pair in known.items() if files.items() <= pair[at].items())


def append(out):
    add(out, sliced(15, 25))


def remove(out):
    return main(['data', 'remove', str(out), '--key', 'image-3', 'image-8', '--missing-ok'])


def check(out, allowed):
    """Check that every shard in every index is whole, and that the samples of each bucket are an allowed version."""
    for folder, shard in indexed(out):
        body = (out / folder / shard['raw_data']['basename']).read_bytes()
        assert hashlib.sha1(body).hexdigest() == shard['raw_data']['hashes']['sha1'], folder
    found = contents(out)
    for bucket, samples in found.items():
        assert any(samples == version.get(bucket) for version in allowed), f'{bucket} is neither old nor new'
    return found


def pictures(out):
    return json.loads((out / 'report.json').read_text())['pictures']


def while_changing(change, stride):
    """Kill a change before every n-th file operation, check the dataset, and finish the change with a second start."""
    change = globals()[change]
    create(FOLDER / 'old', sliced(0, 15))
    shutil.copytree(FOLDER / 'old', FOLDER / 'new')
    assert child(lambda: change(FOLDER / 'new'))
    versions = [contents(FOLDER / 'old'), contents(FOLDER / 'new')]
    assert versions[0] != versions[1]
    files = {path.name for path in (FOLDER / 'new').rglob('*')}
    seen, step, ended = [], 2, False
    while not ended:
        out = FOLDER / str(step)
        shutil.copytree(FOLDER / 'old', out)
        ended = child(lambda: change(out), step)
        found = check(out, versions)
        seen.append('old' if found == versions[0] else 'new' if found == versions[1] else 'between')
        if not ended:
            assert child(lambda: change(out)), f'killed at step {step}'
            assert check(out, versions[1:]) == versions[1], f'killed at step {step}'
            differing = {path.name for path in out.rglob('*')} ^ files
            assert not differing, f'killed at step {step}: {differing}'
            assert pictures(out) == pictures(FOLDER / 'new'), f'killed at step {step}'
            assert [path.name for path in FOLDER.iterdir() if path.name.startswith(f'{step}.')] == []
            step += stride
    return seen


if __name__ == '__main__':
    print(json.dumps(globals()[sys.argv[4]](**ARGUMENTS)))
'''


def run(tmp_path: Path, function: str, **arguments: Any) -> Any:
    (tmp_path / 'children.py').write_text(CHILDREN)
    command = [sys.executable, str(tmp_path / 'children.py'), str(Path(__file__).parent), str(tmp_path / 'data')]
    (tmp_path / 'data').mkdir()
    done = subprocess.run([*command, json.dumps(arguments), function], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_preparation_killed_at_random_points_resumes(tmp_path: Path) -> None:
    found = run(tmp_path, 'at_random_points', workers=2, kills=4)
    assert len(found) == 4
    assert len(set(found)) > 1, f'all kills happened at the same few points: {found}'


def test_kill_while_replacing_leaves_no_old_training_set_beside_new_held_out_images(tmp_path: Path) -> None:
    seen, steps = run(tmp_path, 'while_replacing')
    # (training set, held-out images) at the kills; each of them complete or absent.
    assert seen == [['new', 'new'], ['none', 'new'], ['none', 'none'], ['none', 'old'], ['old', 'old']]
    assert steps > 5


@pytest.mark.parametrize('change', ['append', 'remove'])
def test_killed_change_leaves_the_old_or_new_dataset_and_is_finished_later(tmp_path: Path, change: str) -> None:
    seen = run(tmp_path, 'while_changing', change=change, stride=37)
    assert len(seen) >= 5
    assert {'old', 'new'} <= set(seen), 'kills before and after the change took place'
