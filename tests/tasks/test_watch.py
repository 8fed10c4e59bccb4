"""Watchers of runs: real processes that race, are killed, and meet pruned and half-written checkpoints."""

import json
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from checkpointing.run_folders import write
from commands import output_of, refusals
from golden import check_golden
from small_networks import write_clip
from waiting import wait_until

from diffusion.checkpointing.checkpoint_lookup import claimed_batches
from diffusion.checkpointing.checkpoint_store import RECEIPT
from diffusion.config.load import load
from diffusion.errors import ExternalError, UserError
from diffusion.exit_codes import CONFIG_ERROR
from diffusion.runs.evaluation_claims import EvaluationClaims
from diffusion.runs.run_id import create_run_id
from diffusion.tasks import watch_arguments
from diffusion.tasks.argument_checks import EvaluationOptions
from diffusion.tasks.watch import MAX_TRIES, Watcher, WatchSettings, evaluation_command, launch_command
from diffusion.training.train import train

FAKE = """
import json, os, sys, time
from pathlib import Path

checkpoint, folder, seconds, statuses = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4])
name = checkpoint.rpartition('/')[2]
started = sorted(folder.glob(f'{name}-*.started'))
(folder / f'{name}-{os.getpid()}.started').touch()
time.sleep(seconds)
status = statuses.get(name, [])[len(started):][:1] or [0]
if status[0]:
    [print(line, flush=True) for line in range(30)]
    sys.exit(f'no luck with {name}') if status[0] == 1 else sys.exit(status[0])
content = json.dumps({'metrics': {'fid': 100.0 - int(name[2:])}})
if '://' in checkpoint:
    from diffusion.storage import object_store
    object_store.write(checkpoint.rpartition('/')[0] + f'/evaluations/{name}.json', content.encode())
else:
    path = Path(checkpoint).parent / 'evaluations' / f'{name}.json'
    path.with_suffix('.tmp').write_text(content)
    path.with_suffix('.tmp').replace(path)
"""
"""Evaluation without a model: says that it started, sleeps, and writes results or ends with a status."""


JOB = str(Path(__file__).parents[2] / 'yamls' / 'launch' / 'evaluate-kubernetes.yaml')


class Site:
    """A run's folder, and watchers of it as processes."""

    def __init__(self, folder: Path, run: str) -> None:
        self.run, self.starts = run, folder / 'starts'
        self.starts.mkdir()
        self.program = folder / 'fake.py'
        self.program.write_text(FAKE)
        # Python starts in half of the time without site-packages, which only a run in a bucket needs.
        self.command = [sys.executable, *([] if '://' in run else ['-S']), str(self.program)]

    def settings(self, seconds: float = 0.1, statuses: dict | None = None, **changes) -> WatchSettings:
        rest = [str(self.starts), str(seconds), json.dumps(statuses or {})]
        values = {'poll_seconds': 0.1, 'once': True, 'metrics': ['fid'], **changes}
        return WatchSettings(self.run, lambda place: [*self.command, place, *rest], **values)

    def process(self, seconds: float, **changes) -> subprocess.Popen:
        code = f"""
            import logging
            from diffusion.tasks.watch import Watcher, WatchSettings
            logging.basicConfig(level=logging.INFO)
            rest = [{str(self.starts)!r}, {str(seconds)!r}, '{{}}']
            Watcher(WatchSettings({self.run!r}, lambda place: [*{self.command!r}, place, *rest],
                metrics=['fid'], **{ ({'poll_seconds': 0.05, 'once': True} | changes)!r})).run()
        """
        with open(self.program.with_name('watcher.log'), 'ab') as log:
            return subprocess.Popen([sys.executable, '-c', textwrap.dedent(code)], stderr=log)

    def started(self) -> list[str]:
        return sorted(path.name.partition('-')[0] for path in self.starts.iterdir())

    def wait_for_starts(self, count: int) -> None:
        wait_until(lambda: len(self.started()) >= count)


@pytest.fixture
def site(tmp_path) -> Site:
    folder = tmp_path / 'runs' / 'run'
    folder.mkdir(parents=True)
    create_run_id(folder)
    for batch in (10, 20, 30):
        write(folder, batch)
    return Site(tmp_path, str(folder))


def results(site: Site) -> list[str]:
    return sorted(path.stem for path in Path(site.run, 'evaluations').glob('*.json'))


def test_every_checkpoint_is_evaluated_once_oldest_first(site, caplog):
    caplog.set_level('INFO', 'diffusion')
    Watcher(site.settings()).run()
    assert results(site) == site.started() == ['ba10', 'ba20', 'ba30']
    Watcher(site.settings()).run()
    assert len(site.started()) == 3
    expected = ''
    for name, fid in (('ba10', 90), ('ba20', 80), ('ba30', 70)):
        expected += f'{name}: evaluation started, process N, log {site.run}/evaluations/{name}.log\n'
        expected += f'{name}: evaluated: fid {fid}.0000\n'
    assert re.sub(r'process \d+', 'process N', ''.join(f'{message}\n' for message in caplog.messages)) == expected


@pytest.mark.parametrize(('changes', 'expected'), [({'policy': 'latest'}, ['ba30']), ({'only': ['ba20']}, ['ba20'])])
def test_policies(site, changes, expected):
    Watcher(site.settings(**changes)).run()
    assert results(site) == expected


def test_results_without_a_wanted_metric_do_not_count(site):
    folder = Path(site.run, 'evaluations')
    folder.mkdir()
    (folder / 'ba10.json').write_text('{"metrics": {"clip_score": 20}}')
    (folder / 'ba20.json').write_text('{"metrics": {"fid": 3}}')
    (folder / 'ba30.json').write_text('{"metrics": {"fi')
    Watcher(site.settings()).run()
    assert site.started() == ['ba10', 'ba30']
    Watcher(site.settings())._start_one('ba20', claim := Mock())
    assert (claim.release.call_count, site.started()) == (1, ['ba10', 'ba30']), 'another watcher was faster'


@pytest.mark.slow
def test_watchers_that_race_never_evaluate_a_checkpoint_twice(site):
    for batch in range(40, 80, 10):
        write(Path(site.run), batch)
    watchers = [site.process(0.05, jobs=2) for _ in range(2)]
    for watcher in watchers:
        assert watcher.wait(120) == 0, site.program.with_name('watcher.log').read_text()
    assert site.started() == sorted(f'ba{batch}' for batch in range(10, 80, 10))


def test_new_checkpoints_are_found_and_half_written_ones_left_alone(site):
    half = Path(site.run, 'ba40')
    shutil.copytree(Path(site.run, 'ba30'), half)
    (half / RECEIPT).unlink()
    watcher = site.process(0.05, once=False)
    site.wait_for_starts(3)
    write(Path(site.run), 50)
    site.wait_for_starts(4)
    watcher.send_signal(signal.SIGINT)
    watcher.wait(60)
    assert 'ba40' not in site.started() and 'ba50' in site.started()


def test_evaluation_of_a_killed_watcher_is_done_again(site):
    watcher = site.process(30)
    site.wait_for_starts(1)
    assert claimed_batches(Path(site.run)) == {10}, 'the run keeps what is evaluated'
    other = Watcher(site.settings(once=False))
    other._start()
    other._stop()
    assert site.started().count('ba10') == 1, 'its owner lives'
    assert claimed_batches(Path(site.run)) == {10}
    pid = int(next(site.starts.iterdir()).stem.partition('-')[2])
    watcher.kill()
    watcher.wait()
    wait_until(lambda: not Path(f'/proc/{pid}').exists(), 10, lambda: 'the evaluation does not end with its watcher')
    Watcher(site.settings()).run()
    assert results(site) == ['ba10', 'ba20', 'ba30']
    assert site.started().count('ba10') == 2


def test_interrupted_watcher_ends_its_evaluation_and_frees_the_checkpoint(site):
    watcher, log = site.process(60), site.program.with_name('watcher.log')
    site.wait_for_starts(1)
    wait_until(lambda: 'evaluation started' in log.read_text())
    status = Path('/proc', next(site.starts.iterdir()).stem.partition('-')[2], 'stat')
    watcher.send_signal(signal.SIGINT)
    watcher.wait(60)
    wait_until(lambda: not status.exists() or ') Z ' in status.read_text(), 30, lambda: 'the evaluation still runs')
    Watcher(site.settings(only=['ba10'])).run()
    assert results(site) == ['ba10']


def test_claim_is_renewed_after_storage_has_failed(site, caplog):
    done, claim = Mock(), Mock()
    done.wait.side_effect, claim.renew.side_effect = [False, False, True], [OSError('no space'), None]
    Watcher(site.settings(lease_seconds=50.0))._renew(claim, done)
    assert 'the claim cannot be renewed (no space)' in caplog.text
    assert (done.wait.call_args.args, claim.renew.call_count) == ((10.0,), 2)


def test_claim_of_a_machine_that_vanished_expires(site, monkeypatch):
    claims = EvaluationClaims(site.run, lease_seconds=2.0)
    monkeypatch.setattr('diffusion.runs.run_lock._machine_id', lambda: 'elsewhere')
    assert claims.take('ba10', 0) is not None
    monkeypatch.undo()
    began = time.time()
    Watcher(site.settings(only=['ba10'])).run()
    assert time.time() - began > 1.5
    assert results(site) == ['ba10']


def test_failed_evaluation_is_tried_again_and_given_up_in_the_end_unless_the_settings_are_wrong(site, caplog):
    with pytest.raises(UserError, match='the evaluation of ba30 was refused'):
        Watcher(site.settings(statuses={'ba30': [CONFIG_ERROR]}, policy='latest')).run()
    assert site.started() == ['ba30']
    with pytest.raises(UserError, match='ba20 could not be evaluated'):
        Watcher(site.settings(statuses={'ba10': [1], 'ba20': [1] * 9})).run()
    assert results(site) == ['ba10', 'ba30']
    assert site.started().count('ba10') == 2
    assert site.started().count('ba20') == MAX_TRIES
    shown = '\n'.join(f'  {line}' for line in [*range(11, 30), 'no luck with ba20'])
    log = f'{site.run}/evaluations/ba20.log'
    assert f'ba20: evaluation failed with status 1, log {log}:\n{shown}' in caplog.messages
    assert f'the evaluation failed {MAX_TRIES} times; giving up' in caplog.text


def test_checkpoint_pruned_before_or_after_the_claim_is_skipped(site, caplog):
    watcher = Watcher(site.settings(0.5, statuses={'ba20': [CONFIG_ERROR]}))
    names = watcher._checkpoints()
    shutil.rmtree(Path(site.run, 'ba10'))
    watcher._checkpoints = lambda: names if not watcher._running else ['ba20', 'ba30']  # type: ignore[method-assign]
    watcher._start()
    assert 'ba10: was removed by its run before its evaluation began' in caplog.text
    assert claimed_batches(Path(site.run)) == {20}
    assert watcher._claims.has_ended('ba10', 1), 'the claim is released'
    site.wait_for_starts(1)
    shutil.rmtree(Path(site.run, 'ba20'))
    watcher._checkpoints = lambda: ['ba30']  # type: ignore[method-assign]
    watcher.run()
    assert 'ba20: was removed by its run before its evaluation had read it' in caplog.text
    assert results(site) == ['ba30'] and claimed_batches(Path(site.run)) == set()


def test_watcher_waits_between_two_searches(site, monkeypatch):
    monkeypatch.setattr('diffusion.tasks.watch.time', clock := Mock())
    clock.monotonic.side_effect = [0.0, 0.0, 29.9, 30.0, KeyboardInterrupt]
    with pytest.raises(KeyboardInterrupt):
        Watcher(site.settings(only=['ba40'], once=False, poll_seconds=30.0)).run()
    assert clock.sleep.mock_calls == [call(0.2)] * 2


def test_evaluation_that_ignores_sigterm_is_killed(site, monkeypatch):
    monkeypatch.setattr('os.killpg', kill := Mock())
    each = Mock(checkpoint='ba10', process=Mock(pid=7))
    each.process.wait.side_effect = [subprocess.TimeoutExpired('fake', 10), None]
    watcher = Watcher(site.settings())
    watcher._running.append(each)
    watcher._stop()
    assert kill.mock_calls == [call(7, signal.SIGTERM), call(7, signal.SIGKILL)]
    assert each.mock_calls[-3:] == [call.renewal.close(), call.kept.close(), call.claim.release()]
    assert each.process.wait.mock_calls == [call(10), call()]


def test_command_pins_the_best_checkpoints(site, capsys, monkeypatch):
    monkeypatch.setattr(signal, 'signal', handle := Mock())
    monkeypatch.setattr(watch_arguments, 'configure_logging', logs := Mock())
    monkeypatch.setattr(watch_arguments, 'evaluation_command', lambda *_: site.settings().command)
    Path(site.run, 'ba10.pinned').write_text('my favorite')
    (folder := Path(site.run, 'evaluations')).mkdir()
    for batch in (10, 20):
        (folder / f'ba{batch}.json').write_text(json.dumps({'metrics': {'fid': 100 - batch}}))
    for keep, best in (('fid', 'ba30'), ('fid:1', 'ba40')):
        output_of(capsys, 'watch', site.run, '--once', '--metrics', 'fid', '--keep-best', keep)
        assert sorted(path.name for path in Path(site.run).glob('*.pinned')) == ['ba10.pinned', f'{best}.pinned']
        write(Path(site.run), int(best[2:]) + 10)
    assert handle.call_args.args[0] == signal.SIGTERM, 'it stops as on Ctrl-C'
    assert logs.called


def test_best_checkpoints_by_a_judge_are_pinned(site, caplog):
    caplog.set_level('INFO', 'diffusion')
    folder = Path(site.run, 'evaluations')
    folder.mkdir()
    for batch, score in ((10, 81.5), (20, 84.0), (30, 83.0)):
        (folder / f'ba{batch}.json').write_text(json.dumps({'metrics': {'dpg/m/abc': score}}))
    judged = {'metrics': ['dpg'], 'judge': 'm/abc', 'keep_best': ('dpg', 1)}
    Watcher(site.settings(**judged))._pin_best()
    assert [path.name for path in Path(site.run).glob('*.pinned')] == ['ba20.pinned']
    assert caplog.messages == ['best by dpg: ba20 (84.0000)']
    assert Watcher(site.settings(**judged | {'judge': 'other'})).results('ba10') is None, 'of another judge'
    (folder / 'ba10.json').write_text(json.dumps({'metrics': {'dpg/m/abc': 81.5, 'dpg/other': 90.0}}))
    with pytest.raises(UserError, match='--keep-best: dpg is dpg/m/abc and dpg/other in the results; name one of them'):
        Watcher(site.settings(**judged))._pin_best()
    Watcher(site.settings(**judged | {'keep_best': ('dpg/other', 1)}))._pin_best()
    assert (Path(site.run) / 'ba10.pinned').exists()


def test_submitted_job_keeps_its_claim_and_the_checkpoint_until_its_results_appear(site, caplog):
    """The command ends at once, as `diffusion launch` does for a scheduler, and the job writes its results later."""

    def submit(place: str) -> list[str]:
        job = [*site.command, place, str(site.starts), '1.0', '{}']
        return [sys.executable, '-c', f'import subprocess; subprocess.Popen({job!r}, start_new_session=True)']

    settings = WatchSettings(
        site.run, submit, metrics=['fid'], elsewhere=True, lease_seconds=60, poll_seconds=0.05, once=True
    )
    watcher, other = Watcher(settings), Watcher(settings)
    caplog.set_level('INFO', 'diffusion')
    watcher._start()
    wait_until(lambda: watcher._collect() or watcher._submitted, 20)
    assert claimed_batches(Path(site.run)) == {10}
    assert not watcher._running and len(watcher._submitted) == 1 and 'ba10: job submitted' in caplog.messages
    assert other._claims.take('ba10', 1) is None, 'the job goes on'
    watcher._stop()
    assert claimed_batches(Path(site.run)) == set()
    watcher.run()
    assert site.started() == results(site) == ['ba10', 'ba20', 'ba30']
    assert claimed_batches(Path(site.run)) == set()


def test_run_in_a_bucket_with_faults(tmp_path, store, caplog):
    store.bucket('bucket')
    run = 's3://bucket/runs/run'
    for batch in (10, 20):
        write(tmp_path, batch)
        for path in (tmp_path / f'ba{batch}').iterdir():
            store.put(f'{run}/ba{batch}', path.name, path.read_bytes())
    store.put(f'{run}/ba30', 'state.pt', b'unfinished')
    site = Site(tmp_path, run)
    store.fail('PUT claim-1', 500, times=2)
    store.fail('GET list-type', 503, times=6)
    Watcher(site.settings(keep_best=('fid', 1))).run()
    assert site.started() == ['ba10', 'ba20']
    assert 'trying again' in caplog.text
    assert {name for name in store.objects('bucket') if name.endswith('pinned')} == {'runs/run/ba20.pinned'}
    Watcher(site.settings()).run()
    assert len(site.started()) == 2


@pytest.mark.slow
def test_command_evaluates_a_run_with_a_real_model(tmp_path, write_recipe, capsys):
    short = ['trainer.max_duration=2ba', 'trainer.save_interval=1ba', 'eval_streams=${streams}']
    train(load(write_recipe(), short)).close()
    run = tmp_path / 'runs' / 'run'
    before = (run / 'metrics.jsonl').read_bytes()
    clip = write_clip(tmp_path / 'clip')
    options = ['--metrics', 'clip_score', '--images', '2', '--steps', '2', '--network', f'clip_score={clip}']
    output_of(capsys, 'watch', run, '--once', '--policy', 'latest', *options, '--keep-best', 'clip_score')
    found = json.loads((run / 'evaluations' / 'ba2.json').read_text())
    assert found['metrics']['clip_score'] >= 0
    assert len(list((run / found['guidance'][0]['folder']).glob('*/*.png'))) == 2
    assert (run / 'ba2.pinned').exists()
    assert (run / 'metrics.jsonl').read_bytes() == before


def test_job_of_a_checkpoint_is_valid(capsys):
    words = launch_command(JOB, 'sd2-evaluate', '/workspace/runs/phase1', [])('/workspace/runs/phase1/ba100')[3:]
    rendered = output_of(capsys, *words, '--render')
    assert 'sd2-evaluate-ba100' in rendered
    assert 'checkpoint=/workspace/runs/phase1/ba100' in rendered


def test_commands_of_jobs_and_of_several_processes(site, monkeypatch, caplog):
    for free, nodes in ((1, 2), (3, 3), (9, 4)):
        monkeypatch.setattr(watch_arguments, 'free_nodes', lambda spec, free=free: free)
        assert watch_arguments.nodes_of_job(Mock(nodes=2), 4) == nodes, 'all free nodes, from 2 to 4'
    options = watch_arguments.WatchOptions(run=site.run, launch=JOB, overrides=['nodes=4'], max_nodes=4)
    settings = watch_arguments.watch_settings(options, EvaluationOptions())
    assert (settings.elsewhere, settings.lease_seconds, settings.command('a/b/ba1')[-1]) == (True, 43200, 'nodes=4')
    monkeypatch.setattr(watch_arguments, 'free_nodes', Mock(side_effect=ExternalError('kubectl: timed out')))
    assert watch_arguments.nodes_of_job(Mock(nodes=2), 4) == 2
    assert 'kubectl: timed out; the job gets 2 nodes' in caplog.text
    command = launch_command('eval.yaml', 'eval', '/shared/runs/phase1', ['nodes=2'])('/shared/runs/phase1/ba100')
    assert command[3:] == [
        *('launch', 'eval.yaml', 'overrides.task="evaluate"', 'overrides.checkpoint="/shared/runs/phase1/ba100"'),
        *('overrides.runs_dir="/shared/runs"', 'overrides.name="phase1"', 'name=eval-ba100', 'nodes=2'),
    ]
    assert evaluation_command([], 1)('ba10')[1:] == ['-m', 'diffusion', 'evaluate', 'ba10']
    words = evaluation_command(['--metrics=fid'], 2)('s3://b/run/ba10')
    assert words[1:] == [
        *('-m', 'composer.cli.launcher', '-n', '2', '-m', 'diffusion', 'evaluate', 's3://b/run/ba10', '--metrics=fid')
    ]


def test_mistakes_in_options(site, capsys, tmp_path):
    shutil.copy(JOB, tmp_path / 'job.yaml')
    words = ['--guidance 3', '--keep-best fid:0', '--keep-best fid:x', '--keep-best dgp/m:1', '--max-nodes 3']
    words += ['--launch gone.yaml --metrics fid', '--launch gone.yaml --processes 2']
    words += ['--launch TMP/job.yaml --max-nodes 1 nodes=2']
    commands = [f'watch TMP/{each}' for each in ('gone', *(f'runs/run {more}' for more in words))]
    found = {'messages.txt': refusals(capsys, tmp_path, commands)}
    check_golden(Path(__file__).parent / 'golden/watch-mistakes', found)
