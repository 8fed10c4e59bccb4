"""Endings of a training attempt: how each is caused, and its status, record, message and next step.

`table()` is the table of docs/endings.md; test_endings.py causes every ending in a real job.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hub_server import Hub
from injected import raising
from object_store import Store

from diffusion.launch.job_spec import Restart
from diffusion.runs import run_lock
from diffusion.runs.attempts import CAUSES

FORWARD = 'diffusion.models.latent_diffusion:LatentDiffusion.forward'
DECODE = 'diffusion.data.image_text:to_planar'
PUBLISH = 'diffusion.checkpointing.checkpoint_store:publish'
WRITE = 'diffusion.checkpointing.checkpoint_store:HashingWriter.write'
HASH = 'diffusion.checkpointing.checkpoint_store:hash_file'
LIST = 'diffusion.checkpointing.checkpoint_store:list_checkpoints'
LOAD = 'diffusion.checkpointing.checkpoint_weights:_read_file'
INDEX = 'diffusion.data.verified_stream:VerifiedStream._newest_index'
SLEEP = 'time.sleep(3600)'
STOP, CHECKPOINT, SAME, NEVER = 'stop', 'checkpoint', 'same', 'never'
RESUMES = {
    STOP: 'the batch at which it stopped',
    CHECKPOINT: 'the newest checkpoint',
    SAME: 'the same checkpoint',
    NEVER: '–',
}
"""Places where the next attempt resumes, as the table names them."""
ACTIONS = {'retry': 'starts again', 'elsewhere': 'starts again on other nodes', 'stop': 'stops'}


class Fault(NamedTuple):
    rank: int
    target: str
    statement: str


@dataclass(frozen=True)
class Case:
    """Means of a case of `prepare`: its job's folder and faults, a finished run, an S3 server and a model hub."""

    folder: Path
    finished: Path
    store: Store
    hub: Hub
    faults: list[Fault]

    def run_folder(self) -> Path:
        path = self.folder / 'runs' / 'run'
        shutil.copytree(self.finished, path, symlinks=True)
        return path


Prepare = Callable[[Case, dict[str, Any]], None]
"""Function that changes a recipe's content, or the files of its run, so that the attempt ends as it should."""


@dataclass(frozen=True)
class Ending:
    """One row of the table.

    Args:
        event: Description of the cause, for the table.
        status: Exit status of the node; None if the node entry point itself was killed.
        cause: Cause in attempts.jsonl; empty if no attempt is recorded.
        resumes: Place where the next attempt resumes, a key of RESUMES.
        message: Part of the message, with … for omitted text.
        faults: Faults that are injected into the ranks of the attempt.
        prepare: Changes to the recipe or its run.
    """

    event: str
    status: int | None
    cause: str
    resumes: str
    message: str
    faults: Sequence[Fault] = ()
    prepare: Prepare | None = None

    @property
    def pattern(self) -> str:
        """Regular expression of the message."""
        return '.*'.join(map(re.escape, self.message.split('…')))

    def row(self) -> str:
        restart = Restart()
        action = ACTIONS[restart.actions().get(1 if self.status is None else self.status, restart.otherwise)]
        action = 'is done' if self.status == 0 else action
        message = f'`{self.message}`' if self.message else '–'
        status = 'none' if self.status is None else str(self.status)
        cells = (self.event, status, CAUSES.get(self.cause, 'none'), message, action, RESUMES[self.resumes])
        return f'| {" | ".join(cells)} |'


def on(rank: int, target: str, statement: str) -> tuple[Fault]:
    return (Fault(rank, target, statement),)


def fails(rank: int, target: str, error: str) -> tuple[Fault]:
    """Return a fault by which every call on one rank raises an OSError."""
    return on(rank, f'{target}@1+', raising(error))


def signal_node(name: str) -> str:
    return f"os.kill(int(os.environ['NODE_PID']), signal.{name})"


def table() -> str:
    head = '| event | status | `attempts.jsonl` | message | the job | resumes from |'
    return '\n'.join([head, '|---|---|---|---|---|---|', *(each.row() for each in (*RETRIED, *HANGS, *SINGLE))])


PREEMPTED, LOST, FAULT = (75, 'preempted', STOP), (1, 'crash', CHECKPOINT), (1, 'crash', SAME)
HUNG, REFUSED, MISTAKE = (75, 'hang', CHECKPOINT), (78, '', NEVER), (78, 'mistake', NEVER)
"""Status, cause, and place where the next attempt resumes."""
THIRD = f'{FORWARD}@3'
# Each of these ends one attempt of the same job, in this order.
RETRIED = [
    Ending('SIGTERM of the scheduler', *PREEMPTED, 'is saved', on(1, THIRD, signal_node('SIGTERM'))),
    Ending('SIGUSR1 of the scheduler', *PREEMPTED, 'is saved', on(0, THIRD, signal_node('SIGUSR1'))),
    Ending('Ctrl-C', 75, 'stopped', STOP, 'is saved', on(1, THIRD, signal_node('SIGINT'))),
    Ending('closed terminal (SIGHUP)', *PREEMPTED, 'is saved', on(1, THIRD, signal_node('SIGHUP'))),
    Ending(
        *('killed process, for example out of memory', 1, 'killed', CHECKPOINT, 'rank 1 by SIGKILL'),
        on(1, THIRD, 'os.kill(os.getpid(), signal.SIGKILL)'),
    ),
    Ending('lost node', None, 'lost', CHECKPOINT, '', on(1, THIRD, signal_node('SIGKILL'))),
    Ending('bug on one rank', *LOST, 'ZeroDivisionError', on(0, THIRD, '1 / 0')),
    Ending('disk full in three saves in a row', *FAULT, 'no space left on', fails(0, WRITE, 'ENOSPC')),
    Ending('I/O error in three saves in a row', *FAULT, 'Input/output error', fails(0, PUBLISH, 'EIO')),
    Ending('stale file handle while the checkpoints are listed', *FAULT, 'Stale file handle', fails(0, LIST, 'ESTALE')),
    Ending('I/O error while the checkpoint is verified', *FAULT, 'Input/output error', fails(0, HASH, 'EIO')),
    Ending(
        *('timeout of the file system while the checkpoint is loaded', *FAULT, 'Connection timed out'),
        fails(1, LOAD, 'ETIMEDOUT'),
    ),
    Ending(
        *("data's index cannot be read at the start", *FAULT, 'streams.small: … Input/output error'),
        fails(0, INDEX, 'EIO'),
    ),
]
HANGS = [
    Ending('hang in the forward pass', *HUNG, 'rank 1 on node 0', on(1, THIRD, SLEEP)),
    Ending('hang in the backward pass', *HUNG, 'rank 1 on node 0', on(1, 'torch:Tensor.backward@3', SLEEP)),
    Ending('hang while data is read', *HUNG, 'rank 0 on node 0', on(0, f'{DECODE}@20', SLEEP)),
    Ending('hang in a save', *HUNG, 'rank 0 on node 0', on(0, f'{PUBLISH}@2', SLEEP)),
    Ending(
        *('stopped process (SIGSTOP)', *HUNG, 'rank 1 on node 0'),
        on(1, THIRD, 'os.kill(os.getpid(), signal.SIGSTOP)'),
    ),
]


def changing(section: str, **values: Any) -> Prepare:
    return lambda case, recipe: recipe.setdefault(section, {}).update(values)


def both(one: Prepare, other: Prepare) -> Prepare:
    def prepare(case: Case, recipe: dict[str, Any]) -> None:
        one(case, recipe)
        other(case, recipe)

    return prepare


def remove_the_data(case: Case, recipe: dict[str, Any]) -> None:
    recipe['streams']['small']['local'] = str(case.folder / 'nowhere')


def continue_the_run(case: Case, recipe: dict[str, Any]) -> None:
    case.run_folder()
    recipe['trainer']['max_duration'] = '100ba'


def import_a_sick_gpu(case: Case, recipe: dict[str, Any]) -> None:
    recipe['imports'] = ['tests.sick_gpu']


def damage_every_checkpoint(case: Case, recipe: dict[str, Any]) -> None:
    for path in case.run_folder().glob('ba*/state.pt'):
        os.truncate(path, 1000)


def lock_the_run(case: Case, recipe: dict[str, Any]) -> None:
    folder = case.run_folder()
    owner = run_lock.Owner.current({})
    (folder / run_lock.LOCK).write_text(json.dumps({'owner': vars(owner), 'count': 0, 'at': time.time()}))


def give_another_id(case: Case, recipe: dict[str, Any]) -> None:
    path = case.run_folder() / 'run.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'id': '0' * 32}))


def answer_of_hub(answer: str | int) -> Prepare:
    """Return a function that takes the VAE from a model hub that gives every request this answer."""

    def prepare(case: Case, recipe: dict[str, Any]) -> None:
        case.hub.always = answer
        recipe['model']['vae'] = 'someone/model'
        # huggingface_hub has read its variables when the fork server imported it.
        statement = f"""
from huggingface_hub import constants
from tests.hub_client import set_address
from diffusion.models import hub_files
from diffusion.storage import retry
set_address({case.hub.url!r}, setattr)
constants.HF_HUB_OFFLINE, constants.HF_HUB_CACHE = False, {str(case.folder / 'hub')!r}
hub_files.POLICY, retry.LONGEST_PAUSE_SECONDS = retry.RetryPolicy(tries=2), 0.01
"""
        case.faults.append(Fault(0, 'diffusion.training.train:build_trainer@1', statement))

    return prepare


def refuse_reads(status: int, words: str = 'GET shard') -> Prepare:
    """Return a function that moves the data to an S3 bucket whose requests with these words fail with a status."""

    def prepare(case: Case, recipe: dict[str, Any]) -> None:
        stream = recipe['streams']['small']
        stream['remote'] = case.store.upload(Path(stream['local']), f'bucket-{status}-{len(words)}')
        stream |= {'local': str(case.folder / 'cache'), 'download_retry': 1}
        case.store.fail(words, status)

    return prepare


DIVERGE = changing('optimizer', lr=1e30)
LEAVE = changing('callbacks', node_health={'every': 2, 'seconds': 0.05, 'action': 'leave'})
ANOTHER_OBJECTIVE = both(continue_the_run, changing('model', objective={'prediction_type': 'sample'}))
GUARDED = both(DIVERGE, changing('callbacks', loss_guard={}))
MISTYPED = changing('optimizer', learning_rate=1)
SHORT = changing('trainer', max_duration='12ba')

# Each of these is a job of its own.
SINGLE = [
    Ending('mistake in the recipe', *REFUSED, 'optimizer.learning_rate: unknown', prepare=MISTYPED),
    Ending('missing data', *MISTAKE, 'nowhere has no index.json', prepare=remove_the_data),
    Ending('all checkpoints damaged', *MISTAKE, 'checkpoints are damaged', prepare=damage_every_checkpoint),
    Ending('another job trains into the folder', *REFUSED, 'trains this run', prepare=lock_the_run),
    Ending('objective changed on resume', *MISTAKE, 'prediction_type: ', prepare=ANOTHER_OBJECTIVE),
    Ending('loss is NaN', *MISTAKE, 'loss is nan', prepare=GUARDED),
    Ending('loss is NaN, without `loss_guard`', *MISTAKE, 'loss is nan', prepare=DIVERGE),
    Ending('store refuses access to data (403)', *MISTAKE, '(403)', prepare=refuse_reads(403, 'GET index')),
    Ending(
        'memory errors of a GPU, with `node_health.action: leave`',
        *(76, 'hardware', STOP, 'rank 0: uncorrected memory errors rose'),
        prepare=both(import_a_sick_gpu, LEAVE),
    ),
    Ending(
        *('model hub limits requests (429)', *FAULT, 'someone/model/vae: AutoencoderKL could not be loaded … 429'),
        prepare=answer_of_hub(429),
    ),
    Ending(
        *('no such model on the hub', *MISTAKE, 'someone/model/vae: … there is no such repository'),
        prepare=answer_of_hub('no-repository'),
    ),
    Ending('checkpoint of another run', *MISTAKE, 'belongs to another run', prepare=give_another_id),
    Ending(
        *('run folder moved, or its file system unmounted', 1, '', CHECKPOINT, 'not saved'),
        on(0, THIRD, "os.rename('runs/run', 'runs/moved')"),
        SHORT,
    ),
    Ending(
        *('slow disk, but each save within the limits', 0, 'done', NEVER, ''),
        on(0, f'{PUBLISH}@1+', 'time.sleep(0.3)'),
        SHORT,
    ),
    Ending(
        *('store fails to serve data (500)', *FAULT, 'cannot be read, tried 2 times … when the store responds'),
        prepare=refuse_reads(500),
    ),
]
