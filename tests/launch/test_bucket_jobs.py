"""Jobs whose runs are in an object store: they need no mounts, and their nodes share no folder."""

from dataclasses import replace

import pytest

from diffusion.config.load import load
from diffusion.exit_codes import CONFIG_ERROR, FAILED
from diffusion.launch.backends.local import LocalJob
from diffusion.launch.node import Node
from diffusion.launch.node_settings import Settings
from diffusion.launch.rank_discovery import NodePosition
from diffusion.runs import attempts, environment
from diffusion.runs.attempts import Attempt, append_attempt
from diffusion.storage import object_store
from diffusion.storage.local_files import WORKING_FOLDER_VARIABLE
from tests.launch.specs import ABSENT, EVERY_BACKEND

URL = 's3://home/runs'


@EVERY_BACKEND
def test_job_whose_runs_are_in_a_bucket_needs_no_mount(prepare, backend):
    image = {} if backend in ('local', 'slurm') else {'image': 'image'}
    changes = {} if backend in ('local', 'mcli', 'slurm') else {'mounts': ABSENT}
    checked, rendered = prepare(backend, overrides={'runs_dir': URL}, **image, **changes)
    assert checked.jobs[0].run_dir == f'{URL}/quickstart'
    assert any(URL in text for text in rendered.files.values())
    assert not any('mounts no storage' in note for note in rendered.notes)


@pytest.fixture
def bucket_recipe(store, write_recipe, tmp_path, monkeypatch):
    monkeypatch.setenv(WORKING_FOLDER_VARIABLE, str(tmp_path / 'local'))
    store.bucket('home')
    return replace(load(write_recipe()), runs_dir=URL)


def run_node(recipe, environ) -> int:
    position = NodePosition('local', 0, 2, 1, '127.0.0.1', 29500)
    return Node(position, Settings.from_environ({}), ['-c', ''], recipe, environ).run()


@pytest.mark.slow
def test_later_attempt_with_an_empty_bucket_does_not_start_from_batch_0(bucket_recipe, store, capsys):
    environ = {environment.ATTEMPT: '3', environment.MACHINE: 'node7'}
    assert run_node(bucket_recipe, environ) == CONFIG_ERROR
    message = capsys.readouterr().err
    assert f'{URL}/run is empty although this is attempt 4. If node7 reaches another store' in message
    assert f'create {URL}/run/attempts.jsonl to start from batch 0' in message
    assert not store.objects('home')
    for name in ('attempts.jsonl', 'run.json', 'ba5/receipt.json'):
        object_store.write(f'{URL}/run/{name}', b'')
        assert attempts.has_begun(f'{URL}/run')
        object_store.delete(f'{URL}/run/{name}')


@pytest.mark.parametrize(
    ('words', 'what', 'status', 'message'),
    [
        ('run.lock', 403, CONFIG_ERROR, 'runs_dir: s3://home/runs/run/run.lock: the store refuses access (403)'),
        ('run.lock', 500, FAILED, 's3://home/runs/run cannot be written ('),
        ('attempts.jsonl', 500, FAILED, 's3://home/runs/run: the record of earlier attempts cannot be read'),
    ],
)
def test_store_that_fails_before_the_run_ends_it_with_one_line(
    bucket_recipe, store, capsys, words, what, status, message
):
    store.fail(words, what)
    assert run_node(bucket_recipe, {}) == status
    assert f'node 0: {message}' in capsys.readouterr().err


def test_restarts_of_a_local_job_are_counted_by_the_record_in_the_bucket(prepare, store, tmp_path, monkeypatch):
    monkeypatch.setenv(WORKING_FOLDER_VARIABLE, str(tmp_path))
    store.bucket('home')
    checked, _ = prepare('local', overrides={'runs_dir': URL})
    for number in range(3):
        append_attempt(f'{URL}/quickstart', 'end', Attempt(number, 100.0 * number, cause='crash'))
    job = LocalJob(checked.jobs[0])
    assert job._restarts_used(FAILED) == 3
    store.fail('attempts.jsonl', 403)
    assert job._restarts_used(FAILED) == 2, 'of this launcher, without the record'
