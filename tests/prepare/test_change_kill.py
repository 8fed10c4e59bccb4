"""An append or a removal that is killed with SIGKILL leaves a valid dataset, and the next start finishes it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHILDREN = '''
"""Change datasets in forked children of one process, which imports the modules once."""
import hashlib, json, os, shutil, signal, sys
sys.path[:0] = [sys.argv[1], os.path.dirname(sys.argv[1])]
from pathlib import Path
import pandas
from drawn import snapshot
from test_append import add, contents, indexed, sliced, start
from diffusion.cli import main
from diffusion.prepare import report_content
from sudden_death import die_before

FOLDER = Path(sys.argv[2])
# fsync takes most of the time, and does not matter when only the process is killed.
os.fsync = lambda descriptor: None


def child(change, out, kill_at=None):
    """Change a dataset in a child process; return its exit status, which is -9 if it was killed."""
    pid = os.fork()
    if not pid:
        try:
            if kill_at is not None:
                die_before(kill_at, FOLDER)
            os._exit(change(out))
        except BaseException as error:
            print(f'{type(error).__name__}: {error}', file=sys.stderr)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def append(out):
    add(out, sliced(15, 25))
    return 0


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


def at_many_steps(change, stride):
    """Kill a change before every n-th file operation, check the dataset, and finish the change with a second start."""
    change = globals()[change]
    start(FOLDER / 'old', sliced(0, 15))
    shutil.copytree(FOLDER / 'old', FOLDER / 'new')
    assert child(change, FOLDER / 'new') == 0
    versions = [contents(FOLDER / 'old'), contents(FOLDER / 'new')]
    assert versions[0] != versions[1]
    files = {path.name for path in (FOLDER / 'new').rglob('*')}
    seen, steps = set(), []
    for step in range(2, 10_000, stride):
        out = FOLDER / str(step)
        shutil.copytree(FOLDER / 'old', out)
        ended = child(change, out, step)
        found = check(out, versions)
        seen.add('old' if found == versions[0] else 'new' if found == versions[1] else 'between')
        if ended == 0:
            break
        assert ended == -signal.SIGKILL, ended
        steps.append(step)
        assert child(change, out) == 0, f'killed at step {step}'
        assert check(out, versions[1:]) == versions[1], f'killed at step {step}'
        differing = {path.name for path in out.rglob('*')} ^ files
        assert not differing, f'killed at step {step}: {differing}'
        assert json.loads((out / 'report.json').read_text())['pictures'] == expected(), f'killed at step {step}'
        assert [path.name for path in FOLDER.iterdir() if path.name.startswith(f'{step}.')] == []
        shutil.rmtree(out)
    return [sorted(seen), len(steps)]


def expected():
    return json.loads((FOLDER / 'new/report.json').read_text())['pictures']


if __name__ == '__main__':
    print(json.dumps(at_many_steps(sys.argv[3], int(sys.argv[4]))))
'''


def run(tmp_path: Path, change: str, stride: int) -> Any:
    (tmp_path / 'children.py').write_text(CHILDREN)
    command = [sys.executable, str(tmp_path / 'children.py'), str(Path(__file__).parent), str(tmp_path / 'data')]
    (tmp_path / 'data').mkdir()
    done = subprocess.run([*command, change, str(stride)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize('change', ['append', 'remove'])
def test_killed_change_leaves_the_old_or_the_new_dataset_and_is_finished_by_the_next_start(
    tmp_path: Path, change: str
) -> None:
    seen, kills = run(tmp_path, change, stride=29)
    assert kills >= 5
    assert {'old', 'new'} <= set(seen), 'kills before and after the change took place'
