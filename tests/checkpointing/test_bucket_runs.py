"""Runs whose home is an object store: they save, resume, fall back, copy small files and end as runs in a folder do."""

import re
import shutil
import time
from pathlib import Path

import pytest
from callbacks.guarded_run import At, run_to_end
from checkpointing.saved_runs import SHARDED, assert_same_end, relative_distance
from composer.core import Event
from faults import Fault, active
from object_store import ALWAYS, Store
from ranks import Job, Ranks, free_port
from waiting import wait_until

from diffusion.checkpointing import bucket_storage, checkpointer
from diffusion.checkpointing.bucket_checkpoints import published_batches, read_checked_receipt
from diffusion.checkpointing.bucket_storage import BucketStorage, _as_storage_fault, files_of_rank
from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_store import FileRecord
from diffusion.checkpointing.checkpoint_weights import verify_checkpoint
from diffusion.checkpointing.run_mirror import MIRROR_RETRY, RunMirror, try_to_push
from diffusion.config.checkpointing import KeepConfig
from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.runs.evaluation_claims import EvaluationClaims
from diffusion.storage import retry
from diffusion.storage.local_files import WORKING_FOLDER_VARIABLE
from diffusion.training.train import build_trainer, train


@pytest.fixture
def bucket(store: Store, tmp_path, monkeypatch) -> str:
    """URL of an empty bucket; the working folders of this process are those of node 0."""
    use_node(0, tmp_path, monkeypatch)
    monkeypatch.setattr(checkpointer, 'LAST_SAVE_PAUSES_SECONDS', (0.0, 0.0))
    return store.bucket('bucket') + '/runs'


def use_node(number: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(WORKING_FOLDER_VARIABLE, str(tmp_path / f'node{number}'))


def run_nodes(ranks: Ranks, recipe: Path, tmp_path: Path, store: Store, *overrides: str) -> list[Job]:
    """Start a run on two nodes of one process each, which share no folder."""
    common = store.environment | {'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port())}
    jobs = []
    for node in range(2):
        # As the nodes of a local job, which share a machine.
        place = {'RANK': str(node), 'LOCAL_RANK': str(node), 'LOCAL_WORLD_SIZE': '2'}
        own = place | {WORKING_FOLDER_VARIABLE: str(tmp_path / f'node{node}')}
        jobs.append(ranks.start(1, recipe, *overrides, environment=common | own))
    return jobs


@pytest.mark.cpu_seconds(15)
def test_run_resumes_on_another_node(write, undisturbed, bucket, store, tmp_path, monkeypatch, caplog):
    """The newest checkpoint is damaged, so the run resumes from the one before."""
    path = write('moved', runs_dir=bucket)
    train(load(path, ['trainer.max_duration=4ba'])).close()
    shutil.rmtree(tmp_path / 'node0')
    content = bytearray(store.objects('bucket')['runs/moved/ba4/state.pt'])
    content[len(content) // 2] ^= 1
    store.put(f'{bucket}/moved/ba4', 'state.pt', bytes(content))
    use_node(1, tmp_path, monkeypatch)
    with pytest.raises(UserError, match=r'moved/ba4/state\.pt: the content has changed since it was written'):
        find_checkpoint(f'{bucket}/moved')
    with caplog.at_level('INFO'):
        recipe = load(path)
        train(recipe).close()
    assert 'damaged checkpoint, trying an earlier one: ' in caplog.text
    assert 'moved/ba4: damaged, its receipt is renamed to receipt.damaged.json' in caplog.text
    assert re.search(r'moved/ba2: 0 files from the local disk, 2 \(\S+ GB\) downloaded', caplog.text)
    assert_same_end(recipe.run_dir, undisturbed, recipe.run_place)
    names = {key.removeprefix('runs/moved/') for key in store.objects('bucket')}
    saved = {f'ba{batch}/{name}' for batch in (2, 4, 6, 8) for name in ('receipt.json', 'recipe.yaml', 'state.pt')}
    assert saved <= names
    assert {'run.json', 'latest', 'recipe.yaml', 'metrics.jsonl', 'ba4/receipt.damaged.json'} <= names
    assert store.objects('bucket')['runs/moved/latest'] == b'ba8'
    verify_checkpoint(find_checkpoint(recipe.run_place))
    assert [path.name for path in recipe.run_dir.glob('*ba*')] == ['ba8'], 'one local copy, for a quick restart'


def test_run_with_damaged_checkpoints_only_does_not_start_over(write, bucket, store):
    path = write('lost', runs_dir=bucket)
    train(load(path, ['trainer.max_duration=2ba'])).close()
    shutil.rmtree(load(path).run_dir)
    store.put(f'{bucket}/lost/ba2', 'state.pt', b'nothing')
    with pytest.raises(UserError, match='all 1 checkpoints are damaged: .*ba2/state.pt: 7 bytes, expected'):
        build_trainer(load(path))
    assert published_batches(f'{bucket}/lost') == [2]
    with pytest.raises(UserError, match='ba2: it belongs to another run .*init_from: s3://'):
        read_checked_receipt(f'{bucket}/lost/ba2', 'other')


@pytest.mark.slow
def test_two_nodes_without_a_shared_folder(write, bucket, store, ranks, tmp_path):
    """Trained, killed in a save, resumed with the nodes exchanged: weights equal an undisturbed run's."""
    whole = write('whole', parallelism=SHARDED)
    ranks.run(2, whole)
    path = write('nodes', runs_dir=bucket, parallelism=SHARDED)
    slow = store.fail('PUT ba6/__1_0.distcp', 60.0)
    jobs = run_nodes(ranks, path, tmp_path, store)
    run = tmp_path / 'node0' / 'runs' / 's3' / 'bucket' / 'runs' / 'nodes'
    jobs[0].wait_for(run / 'ba4')
    wait_until(lambda: slow.times < ALWAYS, 60, running=jobs[0].running, shown=jobs[0].output)
    for job in jobs:
        job.kill()
    store.faults.remove(slow)
    assert published_batches(f'{bucket}/nodes') == [4, 2]
    for old, new in (('node0', 'other'), ('node1', 'node0'), ('other', 'node1')):
        (tmp_path / old).rename(tmp_path / new)
    for job in run_nodes(ranks, path, tmp_path, store):
        job.end()
    assert_same_end(run, load(whole).run_dir, f'{bucket}/nodes')
    own = {path.name for path in (run / 'ba8').glob('*.distcp')}
    assert own == {'__0_0.distcp'}, 'each node has only the shards of its ranks'


@pytest.mark.slow
def test_sharded_run_resumes_on_fewer_ranks(write, undisturbed, bucket, store, ranks, tmp_path, monkeypatch):
    path = write('fewer', runs_dir=bucket, parallelism=SHARDED)
    for job in run_nodes(ranks, path, tmp_path, store, 'trainer.max_duration=4ba'):
        job.end()
    use_node(3, tmp_path, monkeypatch)
    recipe = load(path, ['parallelism={}'])
    train(recipe).close()
    assert relative_distance(recipe.run_place, undisturbed, 'ema') < 1e-3


@pytest.mark.cpu_seconds(15)
def test_save_fails_while_the_store_is_down_and_training_continues(write, undisturbed, bucket, store, caplog):
    path = write('down', runs_dir=bucket)
    recipe = load(path)
    store.fail('PUT ba2/state.pt', 403)
    store.fail('PUT ba4/receipt.json', 500)
    store.fail('PUT ba6/state.pt', 'SlowDown', times=1)
    store.fail('PUT latest', 403, times=1)
    # The receipt is written, but no answer says so: the save counts as failed, and is tried again.
    store.fail('PUT ba8/receipt.json', 'done 500', times=4)
    trainer = build_trainer(recipe)
    run_to_end(trainer)
    assert published_batches(recipe.run_place) == [8, 6]
    assert 'ba2: not saved, ' in caplog.text and 'the store refuses access (403)' in caplog.text
    assert 'ba4: not saved, ' in caplog.text and 'cannot be written, tried 4 times' in caplog.text
    assert 'ba6: is saved, but latest still names an older checkpoint (' in caplog.text
    assert_same_end(recipe.run_dir, undisturbed, recipe.run_place)
    store.faults.clear()
    upload = store.client.create_multipart_upload(Bucket='bucket', Key='runs/down/ba9/state.pt')
    store.client.upload_part(Bucket='bucket', Key=upload['Key'], UploadId=upload['UploadId'], PartNumber=1, Body=b'1')
    copy = recipe.run_dir / 'ba8' / 'state.pt'
    copy.write_bytes(bytes(copy.stat().st_size))
    with caplog.at_level('INFO'):
        trainer = build_trainer(load(path, ['trainer.max_duration=9ba']))
    trainer.close()
    assert re.search(r'down/ba8: 1 files from the local disk, 1 \(\S+ GB\) downloaded', caplog.text), 'if intact'
    assert not [key for key in store.objects('bucket') if '/ba2/' in key or '/ba4/' in key], 'incomplete saves'
    assert 'Uploads' not in store.client.list_multipart_uploads(Bucket='bucket'), 'left by a killed process'


@pytest.mark.slow
def test_run_killed_at_any_request_resumes_to_the_same_weights(write, undisturbed, bucket, store, ranks, tmp_path):
    """Kill in phases of a save (upload, publish, prune) and of a resume (read), each with a new node."""
    path = write('killed', runs_dir=bucket)
    environment = store.environment | {WORKING_FOLDER_VARIABLE: str(tmp_path / 'node')}
    saving = ('PUT state.pt', 'PUT receipt.json', 'PUT latest')
    for words in (*saving, 'GET state.pt', 'DELETE receipt.json', 'DELETE state.pt'):
        fault = store.fail(words, 'hang')
        job = ranks.start(1, path, 'trainer.save_num_checkpoints_to_keep=1', environment=environment)
        wait_until(lambda fault=fault: fault.times < ALWAYS, 60, running=job.running, shown=job.output)
        job.kill()
        store.faults.remove(fault)
        shutil.rmtree(tmp_path / 'node')
    ranks.run(1, path, 'trainer.save_num_checkpoints_to_keep=1', environment=environment)
    run = tmp_path / 'node' / 'runs' / 's3' / 'bucket' / 'runs' / 'killed'
    assert_same_end(run, undisturbed, f'{bucket}/killed')
    assert published_batches(f'{bucket}/killed') == [8]
    assert {key.split('/')[2] for key in store.objects('bucket') if '/ba' in key} == {'ba8'}, 'nothing is left behind'


def test_old_checkpoints_are_deleted_unless_they_are_being_evaluated(write, bucket, store):
    path = write('evaluated', runs_dir=bucket, checkpointing={'keep': {'last': 1}})
    recipe = load(path, ['trainer.max_duration=3ba', 'trainer.save_interval=1ba', 'checkpointing.asynchronous=false'])
    url = recipe.run_url
    assert url is not None
    claims, taken, seen = EvaluationClaims(url, lease_seconds=600), [], []

    def release() -> None:
        seen.append(published_batches(url))
        taken[0].release()

    trainer = build_trainer(recipe)
    trainer.state.callbacks.append(At(Event.BATCH_START, 1, lambda: taken.append(claims.take('ba1', 0))))
    trainer.state.callbacks.append(At(Event.BATCH_START, 2, release))
    run_to_end(trainer)
    assert [*seen, published_batches(url)] == [[2, 1], [3]]
    assert {key.split('/')[2] for key in store.objects('bucket') if '/evaluated/ba' in key} == {'ba3'}
    storage = BucketStorage(url)
    files = {'recipe.yaml': FileRecord(5, ''), 'state.pt': FileRecord(7, '')}
    for what in ('does not exist', 'has 3 of 5 bytes'):
        with pytest.raises(OSError, match=f'ba9/recipe.yaml {what} after it was uploaded'):
            storage.publish(Path(), 9, files, {})
        store.put(f'{url}/ba9', 'recipe.yaml', b'123')
    store.put(url, 'ba3.pinned', b'')
    (info,) = storage._infos(KeepConfig(hourly=1))
    assert info.claimed and 0 <= time.time() - (info.saved or 0.0) < 100
    # A full disk of the node is freed of the copies of checkpoints in the store.
    assert [path.name for path in recipe.run_dir.glob('ba*')] == ['ba3']
    assert storage.make_room(None, 4) and not [*recipe.run_dir.glob('ba*')]
    assert not storage.make_room(None, 4), 'nothing is left to remove'


@pytest.mark.parametrize(
    ('about', 'expected'),
    [
        ({'kind': 'whole'}, ['02sr', '13m', '02sr', '13m']),
        # Each node needs what its ranks have written, and the files of all ranks.
        ({'kind': 'sharded', 'world_size': 4}, ['0msr', '1', '02msr', '3']),
        # Which shards a rank reads is not known yet.
        ({'kind': 'sharded', 'world_size': 2}, ['0msr', '1', '2msr', '3']),
    ],
)
def test_ranks_divide_the_files_of_a_checkpoint(monkeypatch, about, expected):
    names = {'s': 'state.pt', 'r': 'recipe.yaml', 'm': '.metadata'} | {each: f'__{each}_0.distcp' for each in '0123'}
    files = {names[letter]: FileRecord(size, '') for size, letter in enumerate('rms3210')}
    monkeypatch.setattr(bucket_storage.dist, 'get_world_size', lambda: 4)
    for rank, letters in enumerate(expected):
        monkeypatch.setattr(bucket_storage.dist, 'get_global_rank', lambda rank=rank: rank)
        found = files_of_rank({'files': files, **about}, [0, 1] if rank < 2 else [2, 3])
        assert found == {names[letter]: files[names[letter]] for letter in letters}


@pytest.fixture
def mirror(store: Store, tmp_path) -> RunMirror:
    for number in range(5):
        (tmp_path / 'images').mkdir(exist_ok=True)
        (tmp_path / 'images' / f'{number}.png').write_bytes(b'image')
    return RunMirror(tmp_path, store.bucket('bucket') + '/run')


def test_store_that_does_not_answer_is_asked_for_one_file_only(store, mirror, monkeypatch):
    monkeypatch.setattr(retry, 'FIRST_PAUSE_SECONDS', 0.01)
    store.fail('PUT', 500)
    with pytest.raises(retry.GaveUp):
        mirror.push(MIRROR_RETRY)
    assert len([request for request in store.requests if request.startswith('PUT /bucket/run')]) == MIRROR_RETRY.tries


def test_changes_of_two_nodes_meet(store, mirror, tmp_path, caplog):
    for name in ('ba4', '.ba6.unfinished', 'ba2.unfinished-0123'):  # not uploaded
        (mirror.folder / name).mkdir()
        (mirror.folder / name / 'state.pt').write_bytes(b'many bytes')
    mirror.push()
    assert set(store.objects('bucket')) == {f'run/images/{number}.png' for number in range(5)}
    other = RunMirror(tmp_path / 'other', mirror.url)
    other.pull(['images'])
    own, theirs = ([each / 'images' / f'{number}.png' for number in range(5)] for each in (tmp_path, other.folder))
    assert [path.read_bytes() for path in theirs] == [b'image'] * 5 and not caplog.text
    for path in (*theirs[:2], *own[1:3]):
        path.write_text(f'of {path.parent.parent.name}')
    other.push(since=time.time() + 60)
    assert set(store.objects('bucket').values()) == {b'image'}, 'everything is older'
    with active(tmp_path / 'met', Fault('open', r'other/images/0\.png', 'EIO', times=1)):
        try_to_push(other)
    assert f'{mirror.url}: not all files of {other.folder} could be uploaded (' in caplog.text
    assert [*store.objects('bucket').values()] == [b'image', b'of other', *[b'image'] * 3]
    other.push()
    again = RunMirror(tmp_path, mirror.url)  # as after a restart of this node
    again.pull(['images'])
    assert [path.read_bytes() for path in own[:3]] == [b'of other'] * 2 + [own[2].read_bytes()]
    assert own[2].read_text().startswith('of test_') and own[3].read_bytes() == b'image'
    assert f'{own[1]}: replaced by the newer {mirror.url}/images/1.png, which another node has' in caplog.text
    assert caplog.text.count('replaced by') == 1
    requests = len(store.requests)
    again.pull(['images'])
    assert not [each for each in store.requests[requests:] if '.png' in each], 'nothing has changed'


class UnauthorizedSSOTokenError(Exception):
    """Error of botocore, which has no HTTP status."""


def test_credentials_that_expire_are_a_fault_of_storage_and_not_a_mistake():
    def ask() -> None:
        raise UnauthorizedSSOTokenError('the token has expired')

    with pytest.raises(UserError, match='no credentials'):
        MIRROR_RETRY.run(ask, 's3://bucket/run')
    with pytest.raises(OSError, match='no credentials'), _as_storage_fault():
        MIRROR_RETRY.run(ask, 's3://bucket/run')
    with pytest.raises(UserError, match='another run'), _as_storage_fault():
        raise UserError('it belongs to another run')
