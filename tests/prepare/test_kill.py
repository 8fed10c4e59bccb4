"""A preparation killed with SIGKILL and resumed gives byte for byte the same dataset as an uninterrupted one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHILDREN = '''
"""Run preparations in forked children of one process, which imports the modules once."""
import json, os, random, shutil, signal, sys
sys.path[:0] = [sys.argv[1], os.path.dirname(sys.argv[1])]
from pathlib import Path
from drawn import DrawnSource, settings, snapshot
import pandas
from diffusion.prepare import convert_part, output_folders, report_content, worker_pool
from diffusion.prepare.pipeline import prepare
from sudden_death import die_before

FOLDER, ARGUMENTS = Path(sys.argv[2]), json.loads(sys.argv[3])


def start(out, source, *, kill_at=None, with_group=False, after=None, inline=False, **values):
    """Start a preparation in a child process with its own process group; return its process ID."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    if kill_at is not None:
        die_before(kill_at, FOLDER, with_group=with_group, after=after)
    chosen = settings(out, **values)

    def run(jobs):
        """Run jobs in other processes, and write a file per result, since `die_before` counts only our operations."""
        for result in worker_pool.run_on('processes', chosen)(jobs):
            (FOLDER / 'result').write_text('')
            yield result

    inline = (lambda jobs: (job(lambda text: None) for job in jobs)) if inline else None
    prepare(chosen, source=source, run=inline or run)
    os._exit(0)


def status(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def held_out(out):
    return out.with_name(f'{out.name}-held-out')


def same(one, two):
    for folder in (lambda out: out, held_out):
        assert snapshot(folder(one)) == snapshot(folder(two)), f'{folder(two)} differs from {folder(one)}'


def done(out):
    """Return the number of parts and shards that a preparation has finished."""
    names = [name for _, folders, files in os.walk(out.with_name(out.name + '.work')) for name in folders + files]
    return sum(name.isdecimal() or name.endswith('.mds.json') for name in names)


def at_random_points(workers, kills):
    """Kill the process group at random moments, up to three times per preparation, then resume to the end."""
    source = DrawnSource(8, 12, broken=7)
    values = dict(workers=workers, aspects='sdxl', duplicates='near', hold_out=9, shard_mb=0.01)
    assert status(start(FOLDER / 'whole', source, **values)) == 0
    draw = random.Random(workers)
    found = []
    while len(found) < kills:
        out = FOLDER / str(len(found))
        for _ in range(min(3, kills - len(found))):
            ended = status(start(out, source, kill_at=draw.randrange(10, 60), with_group=True, **values))
            if ended == 0:
                break
            assert ended == -signal.SIGKILL
            found.append(done(out))
        assert status(start(out, source, **values)) == 0
        same(FOLDER / 'whole', out)
    return found


def while_replacing(stride):
    """Kill a preparation before every n-th step that replaces two datasets by new ones, check both, then resume it."""
    old, new = fast(DrawnSource(1, 6)), fast(DrawnSource(2, 4))
    values = dict(sizes=[16], inline=True)
    assert status(start(FOLDER / 'old', old, hold_out=2, **values)) == 0
    assert status(start(FOLDER / 'new', new, hold_out=3, **values)) == 0
    known = {version: snapshot_pair(FOLDER / version) for version in ('old', 'new')}
    seen, steps = set(), 0
    while True:
        out = FOLDER / str(steps)
        shutil.copytree(FOLDER / 'old', out)
        shutil.copytree(held_out(FOLDER / 'old'), held_out(out))
        complete = out.with_name(f'{out.name}.work') / 'complete'
        again = dict(values, hold_out=3, overwrite=True)
        ended = status(start(out, new, kill_at=steps, after=complete, **again))
        seen.add(tuple(version_of(path, at, known) for at, path in enumerate((out, held_out(out)))))
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        assert status(start(out, new, **again)) == 0, f'killed at step {steps}'
        assert snapshot_pair(out) == known['new'] and not complete.parent.exists()
        steps += stride
    return [sorted(seen), steps]


def fast(source):
    """Prepare this process for many children that read a source."""
    # fsync takes most of the time, and does not matter when only the process is killed.
    os.fsync = lambda descriptor: None
    for part in source.parts():
        list(source.read(part))  # fill the cache of encoded images
    return source


def snapshot_pair(out):
    return snapshot(out), snapshot(held_out(out))


def version_of(path, at, known):
    """Return 'old', 'new' or 'none'; fail if the dataset at a path is neither complete nor absent."""
    if not path.exists():
        return 'none'
    # Not the content of the reports, since the old dataset is a copy whose reports have the path of the original.
    files = {name: content for name, content in snapshot(path).items() if 'report' not in name}
    assert (path / 'report.json').exists()
    return next(version for version, pair in known.items() if files.items() <= pair[at].items())


if __name__ == '__main__':
    print(json.dumps(globals()[sys.argv[4]](**ARGUMENTS)))
'''


def run(tmp_path: Path, function: str, **arguments: Any) -> Any:
    (tmp_path / 'children.py').write_text(CHILDREN)
    command = [sys.executable, str(tmp_path / 'children.py'), str(Path(__file__).parent), str(tmp_path / 'data')]
    (tmp_path / 'data').mkdir()
    done = subprocess.run([*command, json.dumps(arguments), function], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(('workers', 'kills'), [(2, 3), (4, 20)])
def test_preparation_killed_at_random_points_resumes(tmp_path: Path, workers: int, kills: int) -> None:
    found = run(tmp_path, 'at_random_points', workers=workers, kills=kills)
    assert len(found) == kills
    assert len(set(found)) > kills // 3, f'all kills happened at the same few points: {found}'


@pytest.mark.slow
def test_kill_while_two_datasets_are_replaced_leaves_no_old_training_set_beside_new_held_out_images(
    tmp_path: Path,
) -> None:
    seen, steps = run(tmp_path, 'while_replacing', stride=1)
    # (training set, held-out images) at the kills; each of them complete or absent.
    assert seen == [['new', 'new'], ['none', 'new'], ['none', 'none'], ['none', 'old'], ['old', 'old']]
    assert steps > 5
