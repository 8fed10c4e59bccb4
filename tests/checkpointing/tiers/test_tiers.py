"""Recent checkpoints in tiers of the nodes: real runs of several processes; a folder is the memory of a node."""

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from callbacks.guarded_run import At, make_data, make_trainer, run_to_end
from checkpointing.saved_runs import SHARDED, assert_same_end, recipe_writer
from composer import Trainer
from composer.core import Event
from faults import Fault, active, environment
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Job, Ranks, free_port, read_losses
from waiting import wait_until

from diffusion.checkpointing import background_save
from diffusion.checkpointing.checkpoint_store import hash_file, read_receipt
from diffusion.checkpointing.checkpointer import Checkpointer
from diffusion.checkpointing.tiers import tier_saves
from diffusion.checkpointing.tiers.node_tier import EXCHANGE_FAILED, NodeTier, open_tiers
from diffusion.checkpointing.tiers.tier_restore import find_resume_point, newest_in_tiers, plan_transfers
from diffusion.checkpointing.tiers.tier_saves import TierSaves
from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.loggers.metrics_file import read_metrics
from diffusion.training.train import build_trainer

KILLED_AT = 5


class Cluster:
    """Nodes of a few processes each; the memory of a node is a folder."""

    def __init__(self, folder: Path, ranks: Ranks, tiny_recipe: Callable[..., dict[str, Any]]) -> None:
        self.folder, self.ranks = folder, ranks
        self.write = recipe_writer(folder, tiny_recipe, algorithms={'ema': {'smoothing': 0.5}})

    def recipe(self, name: str, *, replicate=True, tier='memory', asynchronous=False, **sections: Any) -> Path:
        """Write a recipe of 8 batches that is killed before batch 5, and saves each batch to a tier."""
        sections['callbacks'] = sections.get('callbacks', {}) | {'killed': {'batch': KILLED_AT}}
        tiers = {tier: {'save_interval': '1ba', 'folder': '${oc.env:NODE}', 'replicate': replicate}}
        sections['checkpointing'] = {'asynchronous': asynchronous, 'tiers': tiers}
        return self.write(name, {'save_interval': '3ba'}, imports=['slow_parts'], **sections)

    def node(self, name: str, number: int) -> Path:
        return self.folder / name / f'node{number}'

    def checkpoint(self, name: str, number: int, batch: int) -> Path:
        (found,) = self.node(name, number).glob(f'diffusion-*/*/ba{batch}')
        return found

    def start(
        self, path: Path, nodes: list[int], *overrides: str, per_node: int = 1, environment: Any = None, **deaths: Any
    ) -> list[Job]:
        """Start a run on nodes, by their numbers in the order of their ranks; `rank0` is where rank 0 kills itself."""
        count = len(nodes) * per_node
        common = {'WORLD_SIZE': str(count), 'LOCAL_WORLD_SIZE': str(count), 'MASTER_ADDR': '127.0.0.1'}
        common |= {'MASTER_PORT': str(free_port())} | dict(environment or {})
        jobs = []
        for rank in range(count):
            folder = self.node(path.stem, nodes[rank // per_node])
            folder.mkdir(parents=True, exist_ok=True)
            own = {'RANK': str(rank), 'LOCAL_RANK': str(rank), 'NODE': str(folder)}
            death = {0: deaths[f'rank{rank}']} if f'rank{rank}' in deaths else None
            jobs.append(self.ranks.start(1, path, *overrides, environment=common | own, deaths=death))
        return jobs

    def kill(self, path: Path, nodes: list[int], **keywords: Any) -> None:
        for job in self.start(path, nodes, **keywords):
            job.end(-9)

    def run(self, path: Path, nodes: list[int], *overrides: str, **keywords: Any) -> str:
        keywords['environment'] = {'SPARED': '1'} | dict(keywords.get('environment') or {})
        jobs = self.start(path, nodes, *overrides, **keywords)
        try:
            while all(job.running() for job in jobs):
                time.sleep(0.05)
            # The others do not wait for one that has failed.
            statuses = [job.wait(60) for job in jobs]
        finally:
            for job in jobs:
                job.kill()
        output = '\n'.join(job.output() for job in jobs)
        assert all(status == [0] for status in statuses), output
        return output

    def trainer(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Trainer, Path]:
        folder = self.node(path.stem, 0)
        folder.mkdir(parents=True)
        monkeypatch.setenv('NODE', str(folder))
        monkeypatch.setenv('SPARED', '1')
        return build_trainer(load(path)), folder

    def run_folder(self, path: Path) -> Path:
        return self.folder / 'runs' / path.stem


@pytest.fixture(scope='module')
def cluster(tmp_path_factory, ranks, tiny_recipe) -> Cluster:
    return Cluster(tmp_path_factory.mktemp('tiers'), ranks, tiny_recipe)


@pytest.fixture(scope='module')
def undisturbed(cluster) -> Callable[..., Path]:
    """Function that returns the folder of an undisturbed run without tiers, by number of ranks and sections."""
    done: dict[str, Path] = {}

    def run(ranks: int, **sections: Any) -> Path:
        key = f'undisturbed-{ranks}-{len(sections)}'
        if key not in done:
            path = cluster.recipe(key, **sections)
            cluster.run(path, [0], 'checkpointing.tiers=null', per_node=ranks)
            done[key] = cluster.run_folder(path)
        return done[key]

    return run


@pytest.mark.cpu_seconds(15)
def test_killed_run_resumes_from_the_tier(cluster, undisturbed):
    path = cluster.recipe('killed', replicate=False)
    cluster.kill(path, [0])
    assert [each.name for each in cluster.checkpoint(path.stem, 0, 5).parent.glob('ba*')] == ['ba5']
    assert read_receipt(cluster.checkpoint(path.stem, 0, 5))['base'] == 3
    output = cluster.run(path, [0])
    assert 'memory tier, ba5: complete on 1 nodes and verified; 0 files' in output
    assert re.search(r'resumed from \S+/ba5\b', output)
    assert_same_end(cluster.run_folder(path), undisturbed(1))
    assert not [*cluster.node(path.stem, 0).glob('diffusion-*/*')], 'a complete run leaves nothing in memory'


@pytest.mark.slow
def test_two_lost_nodes_of_four(cluster, undisturbed):
    """Neighbors in the ring that are not a pair of each other."""
    path = cluster.recipe('four', parallelism=SHARDED)
    cluster.kill(path, [0, 1, 2, 3])
    for number in (0, 2):
        shutil.rmtree(cluster.node(path.stem, number))
    output = cluster.run(path, [4, 3, 5, 1])
    assert 'memory tier, ba5: complete on 4 nodes and verified' in output
    assert_same_end(cluster.run_folder(path), undisturbed(4, parallelism=SHARDED))


@pytest.mark.slow
@pytest.mark.parametrize(('before', 'after'), [([0, 1], [1]), ([0], [1, 0])])
def test_changed_number_of_ranks(cluster, before, after):
    path = cluster.recipe(f'ranks-{len(before)}-{len(after)}', parallelism=SHARDED)
    cluster.kill(path, before)
    output = cluster.run(path, after)
    assert re.search(r'resumed from \S+/ba5\b', output)
    assert set(read_losses(cluster.run_folder(path))) == set(range(8))


@pytest.mark.slow
def test_two_ranks_per_node_share_its_memory(cluster, undisturbed):
    path = cluster.recipe('shared', parallelism=SHARDED)
    cluster.kill(path, [0, 1], per_node=2)
    held = {each.name for each in cluster.checkpoint(path.stem, 1, 5).iterdir()}
    assert {f'__{rank}_0.distcp' for rank in range(4)} <= held
    shutil.rmtree(cluster.node(path.stem, 0))
    cluster.run(path, [0, 1], per_node=2)
    assert_same_end(cluster.run_folder(path), undisturbed(4, parallelism=SHARDED))


@pytest.mark.slow
def test_saves_in_the_background(cluster, undisturbed):
    """A slow batch gives the thread time to write, so that a save is published before the processes are killed."""
    slow = {'slow_batch': {'batch': 3, 'file': str(cluster.folder / 'slow'), 'seconds': 3.0}}
    path = cluster.recipe('background', asynchronous=True, callbacks=slow)
    cluster.kill(path, [0, 1])
    shutil.rmtree(cluster.node(path.stem, 0))
    assert re.search(r'resumed from \S+/ba\d\b', cluster.run(path, [1, 0]))
    assert_same_end(cluster.run_folder(path), undisturbed(2))


@pytest.mark.slow
def test_fault_of_a_tier_does_not_disturb_the_run(cluster, undisturbed, tmp_path):
    recipe = cluster.recipe('fault-full')
    faults = environment([Fault('create', r'node1/.*state\.pt', 'ENOSPC', times=1)], tmp_path)
    assert 'no space left on' in cluster.run(recipe, [0, 1], environment=faults)
    assert_same_end(cluster.run_folder(recipe), undisturbed(2))


@pytest.mark.slow
@pytest.mark.parametrize('step', [2, 20])
def test_rank_killed_at_a_file_operation_of_a_tier(cluster, undisturbed, step):
    """The other rank ends too, and the run resumes from what is complete."""
    path = cluster.recipe(f'step-{step}')
    folder = cluster.node(path.stem, 0)
    jobs = cluster.start(path, [0, 1], environment={'SPARED': '1'}, rank0=(step, folder))
    jobs[0].end(-9)
    jobs[1].kill()
    cluster.run(path, [0, 1])
    assert_same_end(cluster.run_folder(path), undisturbed(2))


@pytest.mark.slow
def test_ranks_killed_while_they_resume_from_a_tier(cluster, undisturbed):
    """The rank that receives files and the one that sends them, at file operations from the search to the end."""
    path = cluster.recipe('resume', parallelism=SHARDED)
    cluster.kill(path, [0, 1])
    for dying, step in ((0, 3), (0, 5), (1, 2), (0, 7)):
        shutil.rmtree(cluster.node(path.stem, 0))
        deaths = {f'rank{dying}': (step, cluster.node(path.stem, dying))}
        jobs = cluster.start(path, [0, 1], environment={'SPARED': '1'}, **deaths)
        jobs[dying].end(-9)
        jobs[1 - dying].kill()
        batches = [each.name for each in cluster.node(path.stem, 1).glob('diffusion-*/*/ba*')]
        assert batches and batches == ['ba5'], 'killed before the first save'
    output = cluster.run(path, [0, 1])
    assert 'memory tier, ba5: complete on 2 nodes and verified' in output
    assert_same_end(cluster.run_folder(path), undisturbed(2, parallelism=SHARDED))


@pytest.mark.slow
def test_faults_while_a_run_resumes_from_a_tier(cluster, undisturbed, tmp_path):
    recipe = cluster.recipe('unreadable')
    run, memory = cluster.run_folder(recipe), cluster.folder / recipe.stem
    cluster.kill(recipe, [0, 1])
    for folder in (run, memory):
        folder.rename(tmp_path / f'killed-{folder.parent.name}')
    for fault, expected, batch in (
        (Fault('read', r'node0/.*state\.pt', 'EIO'), 'another node has this file', 5),
        (Fault('list', r'node0/diffusion-\d+/[^/]*$', 'ESTALE'), 'memory tier: not used in this run', 3),
        (Fault('create', r'node0/.*state\.pt', 'ENOSPC'), 'could not be copied to all nodes', 3),
        (Fault('read', r'node1/.*state\.pt', 'EIO'), 'state.pt: does not match its receipt; ', 3),
    ):
        for folder in (run, memory):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(tmp_path / f'killed-{folder.parent.name}', folder, symlinks=True)
        if fault.operation == 'create':
            shutil.rmtree(cluster.node(recipe.stem, 0))
        if 'node1' in fault.path:
            os.truncate(cluster.checkpoint(recipe.stem, 0, 5) / 'state.pt', 1000)
        output = cluster.run(recipe, [0, 1], environment=environment([fault], tmp_path))
        assert expected in output
        assert re.search(rf'resumed from \S+/ba{batch}\b', output)
        assert_same_end(run, undisturbed(2))


def test_save_into_a_tier_makes_way_for_one_into_the_storage(cluster, undisturbed, tmp_path, monkeypatch, caplog):
    """Training does not wait for a slow tier, and no save into the tier starts before the slow thread has ended."""
    monkeypatch.setattr(background_save, 'POLL_SECONDS', 0.0)
    caplog.set_level('INFO')
    path = cluster.recipe('slow-tier', replicate=False, asynchronous=True)
    trainer, _ = cluster.trainer(path, monkeypatch)
    ended = lambda: wait_until(lambda: 'memory tier' not in str(threading.enumerate()))  # noqa: E731
    trainer.state.callbacks += [At(Event.BATCH_START, batch, ended) for batch in (1, 5)]
    with active(tmp_path, Fault('create', r'/\.ba2\.unfinished/state\.pt', sleep=0.3)):
        trainer.fit()
    trainer.close()
    assert 'memory tier, ba2: given up, since a save to the storage of the run is due' in caplog.text
    run = cluster.run_folder(path)
    assert 0 <= read_metrics(run / 'metrics.jsonl')['checkpoint/memory_stall_seconds'][2] < 60
    assert_same_end(run, undisturbed(1))


def test_vanished_folder_of_a_tier_is_not_created_again(cluster, undisturbed, monkeypatch, caplog):
    """If the mount of a local disk vanishes, its folder would be on the disk of the system."""
    path = cluster.recipe('vanished', replicate=False, tier='disk')
    trainer, node = cluster.trainer(path, monkeypatch)
    trainer.state.callbacks.append(At(Event.BATCH_START, 1, lambda: shutil.rmtree(node)))
    run_to_end(trainer)
    assert 'disk tier: no longer used in this run, 3 saves in a row have failed' in caplog.text and not node.exists()
    run = cluster.run_folder(path)
    assert list(read_metrics(run / 'metrics.jsonl')['checkpoint/disk_failed_saves'].values()) == [1, 2, 3]
    assert_same_end(run, undisturbed(1))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_transfers_bring_each_node_what_it_needs(data):
    files = [f'f{number}' for number in range(6)]
    nodes = [[0, 1], [2, 3], [4, 5]]
    needs = [data.draw(st.sets(st.sampled_from(files))) for _ in range(6)]
    held = {node[0]: data.draw(st.sets(st.sampled_from(files))) for node in nodes}
    for name in set(files).difference(*held.values()):
        held[0].add(name)
    transfers = plan_transfers(nodes, needs, held)
    for each in transfers:
        assert each.name in held[each.source] and each.name not in held[each.to]
    for node in nodes:
        got = held[node[0]] | {each.name for each in transfers if each.to == node[0]}
        assert needs[node[0]] | needs[node[1]] <= got
    assert len({(each.name, each.to) for each in transfers}) == len(transfers)


def test_tier_needs_a_folder_of_its_own(cluster, tmp_path, monkeypatch, caplog):
    path = cluster.recipe('others')
    monkeypatch.setenv('NODE', str(tmp_path))
    root = tmp_path / f'diffusion-{os.getuid()}'
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    with pytest.raises(UserError, match='others may write to it'):
        build_trainer(load(path))
    monkeypatch.setenv('NODE', str(tmp_path / 'not mounted'))
    with pytest.raises(UserError, match='not mounted: No such file or directory; create it on each node'):
        build_trainer(load(path))
    tiers: Any = load(path).checkpointing.tiers
    assert open_tiers(tiers, 'run', '', begun=True) == []
    assert 'memory tier: not used in this run' in caplog.text


@pytest.fixture
def tier(tmp_path) -> Iterator[NodeTier]:
    (tmp_path / 'tier').mkdir()
    found = NodeTier('memory', tmp_path / 'tier' / 'user' / 'run', 'run', replicate=True)
    found.open(begun=False)
    yield found
    found.close()


def save(tier: NodeTier, batch: int) -> Path:
    work = tier.work_folder(batch)
    tier.begin(batch, every_rank=False)
    (work / 'state.pt').write_text('state')
    about = {'run': 'run', 'batch': batch, 'kind': 'whole', 'world_size': 1}
    tier.publish(work, batch, {'state.pt': hash_file(work / 'state.pt')}, about)
    tier.finish(work, batch)
    return tier.folder / f'ba{batch}'


@pytest.mark.parametrize(
    ('damage', 'faults', 'message'),
    [
        (
            lambda path: os.truncate(path / 'state.pt', 1),
            [],
            r'1 of its 1 files .* such as state\.pt \(.* does not match',
        ),
        (lambda path: (path / 'state.pt').unlink(), [], r'1 of its 1 files are on no node, such as state\.pt$'),
        (lambda path: (path / 'receipt.json').write_text('{'), [], r'ba5: not used \('),
        (str, [Fault('list', r'user/run$', 'EIO')], r'user/run: cannot be read \('),
        (str, [Fault('open', r'receipt\.json$', 'EIO', skip=1)], r'no receipt can be read \(.*Input/output error'),
        (str, [Fault('read', r'state\.pt', 'EIO')], r'on no node, such as state.pt \(.*state\.pt: Input/output error'),
        (str, [Fault('create', r'\.receipt\.json\.unf', 'EIO')], r'could not be copied to all nodes \(.*ba5: .*Input'),
    ],
)
def test_checkpoint_of_a_tier_that_cannot_be_used_is_reported(tier, tmp_path, caplog, damage, faults, message):
    path = save(tier, 5)
    assert newest_in_tiers([tier], [], at_least=5) == path
    damage(path)
    with active(tmp_path / 'counts', *faults):
        assert newest_in_tiers([tier], [], at_least=5) is None
    assert re.search(message, caplog.text.strip(), re.MULTILINE)


def test_checkpoint_that_followed_a_removed_one_is_not_used(tier, caplog):
    tier.base = 3
    path = save(tier, 5)
    assert newest_in_tiers([tier], [3], at_least=3) == path
    assert newest_in_tiers([tier], [2], at_least=2) is None
    assert "not used, since ba3, the checkpoint before it, was deleted from the run's storage" in caplog.text


def test_checkpoint_of_a_tier_replaces_a_damaged_one_of_the_storage(tier):
    storage: Any = Mock(place='', list_batches=lambda: [6, 4], resume_point=lambda: Path('ba4'))
    for batch, expected in ((4, Path('ba4')), (5, tier.folder / 'ba5'), (6, tier.folder / 'ba6')):
        save(tier, batch)
        assert find_resume_point(storage, [tier]) == expected


def test_save_into_a_tier_that_fails_leaves_nothing_and_one_that_cannot_clean_up_is_kept(tier, tmp_path, caplog):
    with active(tmp_path / 'a', Fault('rename', r'ba5$', 'EIO')), pytest.raises(OSError, match='not complete on all'):
        save(tier, 5)
    assert not [*tier.folder.glob('*ba*')]
    with active(tmp_path / 'b', Fault('list', r'user/run$', 'EIO')):
        assert save(tier, 6).exists()
    assert 'user/run: older checkpoints are not removed' in caplog.text


@pytest.mark.parametrize(
    ('method', 'outcome', 'reason'),
    [
        ('has_room_on_all_nodes', {'return_value': False}, 'its checkpoints do not fit into the memory of a node'),
        ('save', {'side_effect': OSError(EXCHANGE_FAILED, '')}, 'the exchange of files between nodes has failed'),
    ],
)
def test_tier_without_room_or_connection_is_dropped(tier, tmp_path, monkeypatch, caplog, method, outcome, reason):
    monkeypatch.setattr(*((tier, 'begin') if method == 'save' else (tier_saves, method)), Mock(**outcome))
    saver = Checkpointer(tmp_path / 'run', save_interval='3ba', tiers=[(tier, '1ba')])
    left: list[Path] = []
    look = At(Event.BATCH_START, 2, lambda: left.extend(tier.folder.iterdir()))
    run_to_end(make_trainer(make_data(), [saver, look], duration='4ba'))
    assert [path.name for path in left] == ['in_use.lock'] and not tier.folder.exists()
    assert f'memory tier: no longer used in this run, {reason}' in caplog.text
    assert [Path(each).name for each in saver.saved_checkpoints] == ['ba3', 'ba4']


def test_running_save_into_a_tier_is_published_given_up_or_abandoned():
    saves, logger = TierSaves((), sharded=False, recipe_text='', place=''), Mock()

    def start(*, written: bool = False) -> Mock:
        running = Mock(stall_seconds=0.0, is_written=lambda: written)
        saves._running = Mock(timed=None), running
        saves.make_way(logger)
        return running

    assert start(written=True).save.publish.called and saves._running is None
    running = start()
    saves.make_way(logger)
    assert running.save.abandon.call_count == 1
    saves._finish(logger)
    assert running.save.discard.called and not running.save.publish.called
    running = start()
    saves.abandon()
    assert running.abandon.called and start(written=True).save.publish.called, 'the next one is not given up'
    running = start()
    saves.close()
    assert running.save.abandon.call_count == 2 and saves._running is None


def test_tier_removes_the_checkpoints_of_runs_that_ended_long_ago(tmp_path, caplog):
    names = ('old', 'used', 'recent', 'other', 'own')
    old, used, recent, other, own = (NodeTier('memory', tmp_path / 'a' / name, name, replicate=True) for name in names)
    for each in (old, used, recent):
        each.open(begun=False)
    old.close()
    recent.close()
    other.folder.mkdir()
    for each in (old, used, other):
        os.utime(each.folder, (0, time.time() - 7200))
    own.open(begun=False)
    assert {path.name for path in own.folder.parent.iterdir()} == {*names} - {'old'}
    assert 'old: removed the checkpoints of a run that no longer runs here' in caplog.text
    assert 'files are not copied to another node, since the run has one node' in caplog.text
    own.close()
    used.close()
