"""Messages about a run, with a real web server on localhost: what is sent, and that no fault of it disturbs a run."""

import calendar
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any
from unittest.mock import Mock

import pytest
from forkserver import ROOT, SOCKET
from local_server import LocalServer
from ranks import free_port

from diffusion.callbacks.loss_guard import LossGuard
from diffusion.callbacks.preemption import Preemption
from diffusion.checkpointing.checkpointer import Checkpointer
from diffusion.config.load import load
from diffusion.config.recipe import NotifyConfig
from diffusion.launch.job_checks import check_jobs, load_job_spec
from diffusion.runs import attempts, notify
from diffusion.runs.attempts import Attempt, append_attempt
from diffusion.runs.notify import Notifier
from diffusion.runs.run_lock import LOCK_HELD_VARIABLE
from diffusion.runs.run_status import inspect_run
from diffusion.training import train
from diffusion.training.training_run import TrainingRun
from tests.launch.test_local import write_files

SECRET = '/services/T000/B000/not-for-any-log'


class Hook(LocalServer):
    """Web server that records the JSON it receives, and replies after a delay with the next of some HTTP statuses."""

    def __init__(self) -> None:
        super().__init__()
        self.url += SECRET
        self.messages: list[dict[str, Any]] = []
        self.replies: list[int] = []
        self.delay = 0.0

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        assert request.path == SECRET
        self.messages.append(json.loads(request.rfile.read(int(request.headers['Content-Length']))))
        time.sleep(self.delay)
        self.send(request, self.replies.pop(0) if self.replies else 200, b'')

    def events(self) -> list[str]:
        return [message['event'] for message in self.messages]


@pytest.fixture
def hook() -> Iterator[Hook]:
    with contextlib.closing(Hook()) as hook:
        yield hook


@pytest.fixture
def notifier(hook, tmp_path, monkeypatch) -> Callable[..., Notifier]:
    """Function that returns a Notifier with short pauses; keywords are keys of the `notify` section."""
    monkeypatch.setattr(notify, 'PAUSES_SECONDS', (0.01, 0.01))
    monkeypatch.setattr(notify, 'TIMEOUT_SECONDS', 0.5)
    (tmp_path / 'phase1').mkdir()

    def make(url: str = hook.url, command: str = '', **section: Any) -> Notifier:
        config = NotifyConfig('HOOK', 'COMMAND' if command else None, **section)
        return Notifier(config, tmp_path / 'phase1', {'HOOK': url, 'COMMAND': command}, attempt=3)

    return make


def send(sender: Notifier, *events: str, text: str = 'text', **fields: Any) -> None:
    """Send messages, and wait until they are delivered or given up."""
    for event in events:
        sender.send(event, text, **fields)
    sender.close()


def test_message_has_text_for_slack_and_fields_for_programs(hook, notifier):
    sender = notifier()
    sender.send_end(Attempt(3, 0.0, last=7, status=75, cause='preempted', detail='SIGTERM'))
    sender.close()
    (message,) = hook.messages
    assert abs(calendar.timegm(time.strptime(message.pop('time'), '%Y-%m-%dT%H:%M:%SZ')) - time.time()) < 60
    expected = {'event': 'ended', 'run': 'phase1', 'attempt': 3, 'host': socket.gethostname(), 'batch': 7}
    expected |= {'text': 'phase1: ended: preempted (SIGTERM)', 'cause': 'preempted', 'detail': 'SIGTERM', 'status': 75}
    assert message == expected


def test_each_event_is_sent_once_and_only_if_the_recipe_lists_it(hook, notifier):
    send(notifier(events=['hang', 'ended']), 'started', 'hang', 'hang', 'ended')
    assert sorted(hook.events()) == ['ended', 'hang']


def test_server_error_is_retried(hook, notifier, caplog):
    hook.replies = [500, 503]
    send(notifier(), 'hang')
    assert hook.events() == ['hang'] * 3
    assert not caplog.records


@pytest.mark.parametrize('fault', ['errors', 'refused', 'slow', 'no such host', 'not a URL', 'a file'])
def test_fault_of_the_server_is_one_warning_without_the_url(fault, hook, notifier, caplog, tmp_path):
    urls = {
        'refused': f'http://127.0.0.1:{free_port()}{SECRET}',
        'no such host': f'http://host.invalid{SECRET}',
        'not a URL': SECRET,
        'a file': f'file://{tmp_path}{SECRET}',
    }
    hook.replies, hook.delay = [500] * 3, 2.0 if fault == 'slow' else 0.0
    sender = notifier(urls.get(fault, hook.url))
    begin = time.monotonic()
    sender.send('hang', 'text')
    assert time.monotonic() - begin < 0.2, 'training does not wait'
    sender.close()
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    no_url = 'the URL does not start with https:// or http://'
    reasons = {'errors': 'HTTP status 500', 'refused': 'Connection refused', 'not a URL': no_url, 'a file': no_url}
    reason = reasons.get(fault, '')
    assert f"notify.webhook: the message for event 'hang' was not delivered ({reason}" in warning.getMessage()
    assert 'not-for-any-log' not in caplog.text and 'T000' not in caplog.text


def test_end_of_a_process_waits_a_bounded_time_and_names_what_is_not_delivered(hook, notifier, monkeypatch, caplog):
    monkeypatch.setattr(notify, 'TIMEOUT_SECONDS', 60.0)
    hook.delay = 3.0
    sender = notifier()
    sender.send('ended', 'text')
    begin = time.monotonic()
    sender.close(0.2)
    assert time.monotonic() - begin < 1
    assert "notify: the message for event 'ended' was not yet delivered when the run ended" in caplog.text


def test_command_gets_the_message_on_its_stdin_without_a_shell(hook, notifier, tmp_path, caplog):
    out = tmp_path / 'a message.json'
    program = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
    send(notifier(command=f'{sys.executable} -c "{program}" "{out}"'), 'hang', text='$(touch stolen) `id`; text')
    assert json.loads(out.read_text())['text'] == 'phase1: $(touch stolen) `id`; text'
    assert hook.events() == ['hang']
    for command, reason in {
        'false --token=not-for-any-log': 'the command exited with status 1',
        '/nonexistent/not-for-any-log': 'the command cannot be run: No such file or directory',
        'echo "not-for-any-log': 'bad quotes',
    }.items():
        caplog.clear()
        send(notifier(command=command), 'hang')
        assert reason in caplog.text and 'not-for-any-log' not in caplog.text


def test_variable_that_is_not_set_is_named(tmp_path, caplog):
    send(Notifier(NotifyConfig(webhook='HOOK'), tmp_path, {}), 'hang')
    assert 'notify.webhook: the environment variable HOOK is not set; no message is sent' in caplog.text


def test_low_goodput_is_sent_half_an_hour_after_the_start(hook, notifier, tmp_path):
    sender, equal = notifier(goodput_below=0.8), notifier(goodput_below=0.5)
    run, now = tmp_path / 'phase1', int(time.time())
    append_attempt(run, 'begin', Attempt(0, now - 1000))
    append_attempt(run, 'end', Attempt(0, now - 1000, now, 0, now - 100, 50, now, cause='crash'))
    sender.check_goodput()
    append_attempt(run, 'end', Attempt(1, now, now + 800, 50, now, 150, now + 800, cause='crash'))
    sender.check_goodput()
    sender.check_goodput()
    equal.check_goodput()
    sender.close()
    equal.close()
    (message,) = hook.messages
    assert message['text'] == 'phase1: goodput is 0.500 after 0.5 h, below 0.8'
    assert (message['goodput'], message['wall_seconds']) == (0.5, 1800)


def test_secret_of_a_job_is_accepted_as_the_variable_of_its_webhook(write_spec):
    path = write_spec('local', overrides={'notify.webhook': 'HOOK'}, secrets={'HOOK': None})
    assert check_jobs(load_job_spec(path), path, environ={'HOOK': 'x'}).missing_secrets == ()


@pytest.mark.slow
def test_launched_job_sends_start_and_end_and_keeps_the_url_out_of_all_files(hook, tiny_recipe, forkserver, tmp_path):
    recipe = tiny_recipe(tmp_path / 'runs', name='sent', notify={'webhook': 'HOOK'}, small=True)
    job, _ = write_files(tmp_path, 'sent', recipe, nodes=2, gpus_per_node=1, secrets={'HOOK': None})
    environ = os.environ | {SOCKET: forkserver.path, 'PYTHONPATH': f'{ROOT}:{ROOT / "tests"}', 'HOOK': hook.url}
    command = [sys.executable, '-m', 'diffusion', 'launch', str(job)]
    with (tmp_path / 'log').open('wb') as log:
        subprocess.run(command, env=environ, cwd=tmp_path, stdout=log, stderr=log, timeout=200, check=True)
    assert hook.events() == ['started', 'ended'], 'from one node'
    started, ended = hook.messages
    assert started['text'] == 'sent: started attempt 1 on 2 nodes'
    assert (ended['text'], ended['cause'], ended['batch']) == ('sent: ended: completed', 'done', 8)
    files = [path for path in tmp_path.rglob('*') if path.is_file()]
    assert {'recipe.yaml', 'attempts.jsonl', 'node-0.json', 'node-1.json'} <= {path.name for path in files}
    assert not [path for path in files if b'not-for-any-log' in path.read_bytes()]
    found = inspect_run(tmp_path / 'runs' / 'sent')
    assert (found.state, found.cause, found.batch) == ('ended', 'done', 8)


def test_run_without_launcher_sends_and_records_its_attempts(hook, write_recipe, monkeypatch):
    monkeypatch.setenv('HOOK', hook.url)
    path = write_recipe(notify={'webhook': 'HOOK'}, small=True)
    recipe = load(path, ['trainer.max_duration=2ba'])
    train.train(recipe).close()
    monkeypatch.setattr(train, 'build_trainer', Mock(side_effect=RuntimeError('out of memory')))
    with pytest.raises(RuntimeError, match='out of memory'):
        train.train(load(path, ['trainer.max_duration=3ba']))
    # Messages have a thread each, so those of an attempt that fails at once may arrive in any order.
    assert sorted(message['text'] for message in hook.messages) == [
        'run: ended: completed',
        'run: ended: process failed (RuntimeError: out of memory)',
        'run: started attempt 1',
        'run: started attempt 2',
    ]
    first, second = attempts.read_attempts(recipe.run_dir)
    assert (first.first, first.last, first.status, first.cause, first.launched) == (0, 2, 0, 'done', False)
    assert (second.first, second.status, second.cause) == (None, 1, 'crash')
    report = inspect_run(recipe.run_dir)
    assert (report.state, report.cause, report.batch, report.duration) == ('ended', 'crash', 2, '2ba')
    # Callbacks can send too.
    guard, saver = LossGuard(folder=str(recipe.run_dir)), Checkpointer(recipe.run_dir)
    sender = Notifier(recipe.notify, recipe.run_dir)
    run = TrainingRun(recipe.run_place, recipe.notify)
    run.notifier = sender
    run.attempt = attempts.Attempt(3, begin=0.0, first=2)
    run.connect([guard, saver, interrupted := Preemption()])
    guard.on_bad_batch('loss is nan')  # type: ignore[attr-defined]
    saver.failed_saves.on_failure('no space left')  # type: ignore[attr-defined]
    interrupted.on_interrupt('2 batches are lost')
    sender.close()
    assert sorted(hook.events()[4:]) == ['checkpoint_failed', 'ended', 'loss_guard']
    assert attempts.read_attempts(recipe.run_dir)[2].detail == 'ended by a second Ctrl-C: 2 batches are lost'


def test_training_process_of_a_launched_job_sends_the_number_of_the_attempt(hook, write_recipe, monkeypatch):
    for name, value in {'HOOK': hook.url, LOCK_HELD_VARIABLE: '1', notify.NUMBER_VARIABLE: '4'}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train, '_train', lambda recipe, run: run.notifier.send('loss_guard', 'nan'))
    train.train(load(write_recipe(notify={'webhook': 'HOOK'})))
    assert [(each['event'], each['attempt']) for each in hook.messages] == [('loss_guard', 4)]
