"""The run.py of a job whose attempts fail as planned.

`faults.json` in the working folder lists the faults of each attempt: a list per attempt of [rank, TARGET, STATEMENT]
as for `injected.py`. Only ranks of the first node, which records the attempts, can fail. A job links its run.py to this
file; the ranks are forks of the fork server (`forkserver.py`). In a statement, `os.environ['NODE_PID']` is the process
id of the rank's node entry point.
"""

import json
import os
import sys
from pathlib import Path

FAULTS = 'faults.json'


def planned_faults() -> list[tuple[str, str]]:
    """Return the faults of this rank in this attempt."""
    path = Path(FAULTS)
    plan = json.loads(path.read_text()) if path.exists() else []
    # Ranks of other nodes may start before the first node has recorded the attempt.
    if os.environ['RANK'] not in {str(rank) for faults in plan for rank, _, _ in faults}:
        return []
    # Counted by the records of the run, since a new launcher counts its restarts from 0 again.
    newest = max(Path().glob('runs/*/attempts.jsonl'), key=lambda each: each.stat().st_mtime)
    attempt = newest.read_text().count('"event": "begin"') - 1
    faults = plan[attempt] if attempt < len(plan) else []
    return [(target, statement) for rank, target, statement in faults if str(rank) == os.environ['RANK']]


def run_with_faults() -> int:
    from injected import inject, shorten_waits

    from diffusion.tasks import run_recipe

    shorten_waits()
    for target, statement in planned_faults():
        inject(target, statement)
    return run_recipe.main(sys.argv[1:])


if __name__ == '__main__':
    here = Path(__file__).resolve()
    # A standby process has imported everything, and stays the rank itself.
    if 'NODE_PID' in os.environ or 'torch' in sys.modules:
        os.environ.setdefault('NODE_PID', str(os.getppid()))
        from diffusion.launch.workers import end_process

        # End as run.py does: with sys.exit, a thread of PyTorch could abort the process, whose status would be lost.
        end_process(run_with_faults())
    os.environ['NODE_PID'] = str(os.getppid())
    sys.path.insert(0, str(here.parent))
    import forkserver

    sys.argv = [sys.argv[0], '--run', str(here), *sys.argv[1:]]
    sys.exit(forkserver.main())
