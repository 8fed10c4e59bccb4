"""What a node does when ranks or other nodes fail, hang, or are stopped, in simulated time."""

import signal
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.launch import node
from diffusion.launch.node import Node
from diffusion.launch.node_settings import Settings
from diffusion.launch.rank_discovery import NodePosition
from diffusion.launch.workers import Outcome, Workers
from diffusion.runs import environment, stop_signals
from diffusion.runs.attempts import Attempt, read_attempts
from diffusion.runs.heartbeats import TRAINING, Beat
from tests.golden import check_golden

NEVER = 1e9
TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, -signal.SIGKILL
SAVED = [(9, 75), (10, 75)]
SCENARIOS = {
    'both ranks end': {'ends': [(3, 0), (9, 0)]},
    'progress': {'ends': [(70, 0), (70, 0)]},
    'crash, and the other waits': {'ends': [(3, 1), (NEVER, 0)]},
    'kill, and the other waits': {'ends': [(3, KILL), (NEVER, 0)]},
    'crash, then a stop': {'ends': [(3, 1), (NEVER, 0)], 'signals': {4: TERM}},
    'crash, then a mistake': {'ends': [(3, 1), (4, 78)]},
    'crash and a kill': {'ends': [(3, 1), (4, KILL)]},
    'bad hardware and a kill': {'ends': [(3, 76), (3, KILL)]},
    'bad hardware, and the other saves': {'ends': [(3, 76), (30, 75)]},
    'bad hardware, and the other never saves': {'ends': [(3, 76), (NEVER, 0)]},
    'preemption, and the other saves': {'ends': [(3, 75), (20, 0)]},
    'preemption and a crash': {'ends': [(3, 75), (4, 1)]},
    'stop, and both save': {'ends': SAVED, 'signals': {3: TERM}},
    'stop at the end of the run': {'ends': [(4, 0), (4, 0)], 'signals': {3: TERM}},
    'stop and a kill': {'ends': [(4, KILL), (4, 0)], 'signals': {3: TERM}},
    'stop, a kill and a crash': {'ends': [(4, 1), (4, KILL)], 'signals': {3: TERM}},
    'stop, and one never saves': {'ends': [(9, 75), (NEVER, 0)], 'signals': {3: TERM}},
    'stop after a crash elsewhere': {'signals': {3: TERM}, 'first': 'crash'},
    'stop after bad hardware elsewhere': {'signals': {3: TERM}, 'first': 'hardware'},
    'Ctrl-C of a launched job': {'ends': SAVED, 'signals': {3: INT}},
    'Ctrl-C at a terminal': {'ends': SAVED, 'signals': {3: INT}, 'interactive': True},
    'SIGTERM at a terminal': {'ends': SAVED, 'signals': {3: TERM}, 'interactive': True},
    'Ctrl-C twice': {'signals': {3: INT, 6: INT}, 'interactive': True},
    'standby: crash': {'ends': [(3, 1), (NEVER, 0)], 'standby': {}},
    'standby: preemption': {'ends': [(3, 75), (4, 75)], 'standby': {}},
    'standby: crash elsewhere': {'standby': {3: 'crash'}},
    'standby: kill elsewhere': {'standby': {3: 'killed'}},
    'standby: stop': {'standby': {4: 'crash'}, 'signals': {3: TERM}},
    'preflight that hangs': {'limit': 12.0, 'standby': {}},
    'hang': {'hang_seconds': 50},
    'hang on another node': {'hang': SimpleNamespace(node=3, problem='no heartbeat')},
}
"""Seconds and exit statuses of two ranks, signals to the node by second, and events elsewhere."""


class Simulation:
    """Clock and log of a node with two ranks, whose time passes only when it sleeps."""

    def __init__(self, signals):
        self.now, self.signals, self.log = 0.0, dict(signals), []
        self.node: Any = None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now = round(self.now + seconds, 6)
        for at in [at for at in self.signals if at <= self.now]:
            self.node._request_stop(self.signals.pop(at), None)

    def say(self, *words):
        at, text = f'{self.now:5.1f}  ', ' '.join(words)
        if self.log and self.log[-1].startswith(at):
            self.log[-1] += f', {text}'
        else:
            self.log.append(at + text)

    def call(self, name, *words, **_):
        for attempt in [word for word in words if isinstance(word, Attempt)]:
            attempt.first = 0
        self.say(name, *[getattr(word, 'cause', word) for word in words if isinstance(word, str | Outcome)])

    def recorder(self, *methods, **values) -> Any:
        """Return an object that logs the calls of these methods with the texts and causes in their arguments."""
        return SimpleNamespace(**{method: partial(self.call, method) for method in methods}, **values)

    def rank(self, number, end, status) -> Any:
        sent = lambda number_of_signal: self.say(f'rank {number} gets {signal.Signals(number_of_signal).name}')  # noqa: E731
        return SimpleNamespace(
            poll=lambda: status if self.now >= end else None, send_signal=sent, pid=2**30, wait=Mock()
        )


def run(recipe, folder, monkeypatch, *, ends=((NEVER, 0),) * 2, signals=None, first=None, standby=None, **more):
    clock = Simulation(signals or {})
    elsewhere = lambda cause: cause and SimpleNamespace(cause=cause, machine='node7')  # noqa: E731
    beat = lambda: Beat(min(clock.now, 20.0), int(min(clock.now, 20)), TRAINING, 0, 0.5)  # noqa: E731
    for module, name, fake in (
        (node, 'time', clock),
        (stop_signals, 'time', clock),
        (node, 'within_limit', lambda call: call()),
        (node, 'failure_elsewhere', lambda environ: elsewhere(first)),
        (node, 'keep_stacks', lambda cause, detail, **_: f'stacks of {cause}'),
        (node, 'liveness', liveness := Mock()),
        (node, 'heartbeats', Mock(last_beats=lambda folder: {0: beat()} if clock.now >= 1 else {})),
    ):
        monkeypatch.setattr(module, name, fake)
    settings = replace(Settings.from_environ({}), notice_seconds=40.0, hang_seconds=more.get('hang_seconds', 900.0))
    position = NodePosition('local', 0, 1, 2, '127.0.0.1', 1)
    one: Any = Node(position, settings, ['run.py'], recipe, {}, interactive=more.get('interactive', False))
    clock.node = one
    loss = {'describe_loss': lambda attempt: 'ten batches are lost'}
    one._records = clock.recorder('take_beats', 'report_progress', 'append', **loss)
    one.notifier = clock.recorder('send', 'check_goodput')
    if standby is not None:
        failed = lambda: next((elsewhere(cause) for at, cause in standby.items() if clock.now >= at), None)  # noqa: E731
        standbys = clock.recorder('close', pids=())
        one._in_place = clock.recorder('report_failure', failure_elsewhere=failed, standbys=standbys, poll=Mock())
    workers = Workers(position, ['run.py'], {}, folder, lambda rank, *_: clock.rank(rank, *ends[rank]))
    listener = SimpleNamespace(found=more.get('hang'))
    outcome = one._watch(workers, Attempt(1, 0.0), more.get('limit'), Mock(), listener)
    polls = [] if standby is None else [f'({one._in_place.poll.call_count} polls)']
    clock.say(f'{outcome.status} {outcome.cause}', *filter(None, [outcome.detail]), *polls)
    return '\n'.join([f'{liveness.update_heartbeat.call_count} heartbeats', *clock.log])


def test_run_at_a_terminal_may_save_as_long_as_it_needs(write_recipe, monkeypatch):
    nodes = []
    monkeypatch.setattr(Node, 'run', lambda self: nodes.append(self) or 7)
    assert node.run_on_this_machine(['run.py'], load(write_recipe()), 2) == 7
    assert replace(nodes[0].position, master_port=1) == NodePosition('local', 0, 1, 2, '127.0.0.1', 1)
    assert nodes[0].interactive and nodes[0].settings.notice_seconds == float('inf')


def test_events_of_an_attempt_are_handled_as_reviewed(write_recipe, tmp_path, monkeypatch):
    recipe = load(write_recipe())
    texts = [f'{name}: {run(recipe, tmp_path, monkeypatch, **case)}' for name, case in SCENARIOS.items()]
    check_golden(Path(__file__).parent / 'golden' / 'node-watch', {'events.txt': '\n'.join([*texts, ''])})


CRASH, DONE, PREEMPTED = Outcome(1, 'crash', 'rank 0 with 1'), Outcome(0, 'done'), Outcome(75, 'preempted', 'late')
HARDWARE, MISTAKE = Outcome(76, 'hardware', 'n1: GPU lost'), Outcome(78, 'mistake')
IN_PLACE = {environment.RESTART_IN_PLACE: '1', environment.MAX_RESTARTS: '1'}
CHECKED = {environment.PREFLIGHT: 'deep'}
ATTEMPTS: dict[str, dict[str, Any]] = {
    'done': {'outcomes': [DONE]},
    'crash': {'outcomes': [CRASH]},
    'mistake': {'outcomes': [MISTAKE]},
    'mistake at a terminal': {'outcomes': [MISTAKE], 'interactive': True},
    'crash at a terminal': {'outcomes': [CRASH], 'interactive': True},
    'preemption': {'outcomes': [PREEMPTED], 'first': 4},
    'preemption before the first batch': {'outcomes': [PREEMPTED]},
    'Ctrl-C': {'outcomes': [PREEMPTED], 'first': 4, 'interrupted': True},
    'Ctrl-C at a terminal': {'outcomes': [PREEMPTED], 'first': 4, 'interrupted': True, 'interactive': True},
    'Ctrl-C before the first batch': {'outcomes': [PREEMPTED], 'interrupted': True},
    'second Ctrl-C at a terminal': {'outcomes': [Outcome(130, 'preempted', 'lost')], 'first': 4, 'interrupted': True}
    | {'interactive': True},
    'hardware': {'outcomes': [HARDWARE]},
    'hardware of the second node': {'outcomes': [HARDWARE], 'rank': 1},
    'crash of the second node': {'outcomes': [CRASH], 'rank': 1},
    'crash of an evaluation': {'outcomes': [CRASH], 'task': 'evaluate'},
    'preflight': {'outcomes': [DONE, DONE], 'environ': CHECKED},
    'preflight that finds hardware': {'outcomes': [Outcome(76, 'hardware')], 'environ': CHECKED},
    'stop in the preflight': {'outcomes': [CRASH], 'environ': CHECKED, 'stop': True},
    'restarts in place': {'outcomes': [CRASH, CRASH, DONE], 'environ': IN_PLACE},
    'restarts in place with progress': {'outcomes': [CRASH, CRASH, DONE], 'environ': IN_PLACE, 'first': 4},
    'restarts of an evaluation': {'outcomes': [PREEMPTED, CRASH, CRASH], 'environ': IN_PLACE, 'task': 'evaluate'},
    'no restart of a mistake': {'outcomes': [MISTAKE], 'environ': IN_PLACE | {environment.ON_EXIT: '78=stop'}},
    'short timeout': {'outcomes': [DONE], 'timeout': 600},
    'check alone': {'outcomes': [Outcome(76, 'hardware', 'GPU 0')], 'environ': CHECKED, 'method': 'check'},
}
"""Outcomes of the programs that a node runs, with the first batch of an attempt and what happens meanwhile."""


def test_end_of_each_attempt_is_printed_and_recorded_as_reviewed(write_recipe, monkeypatch, capsys, restored_handlers):
    recipe, texts = load(write_recipe()), []
    for number, (name, case) in enumerate(ATTEMPTS.items()):
        given, outcomes = replace(recipe, name=f'run{number}', task=case.get('task', 'train')), [*case['outcomes']]
        if 'timeout' in case:
            given = replace(given, trainer=given.trainer | {'dist_timeout': case['timeout']})
        environ = {environment.MACHINE: 'n1', **case.get('environ', {})}
        position = NodePosition('local', case.get('rank', 0), 2, 1, '127.0.0.1', 1)
        settings = Settings.from_environ(environ)
        at_terminal = case.get('interactive', False)
        one: Any = Node(position, settings, ['run.py', 'x.yaml'], given, environ, interactive=at_terminal)

        def work(command, folder, attempt, *, limit_seconds=None, one=one, case=case, outcomes=outcomes, texts=texts):
            attempt.first = None if 'first' not in case else case['first'] * attempt.number
            one.interrupted, one.stop_requested = case.get('interrupted', False), case.get('stop', False)
            texts.append(f'  {" ".join(command)} (limit {limit_seconds})')
            return outcomes.pop(0)

        one._run_workers = work
        texts.append(f'{name}:')
        status = getattr(one, case.get('method', 'run'))()
        texts += [
            f'  {line}'.replace(str(recipe.run_dir.parent), 'runs') for line in capsys.readouterr().err.splitlines()
        ]
        with suppress(UserError):
            texts += [
                f'  {each.status} {each.cause} {each.machine} {each.detail}' for each in read_attempts(given.run_dir)
            ]
        texts.append(f'  exit status {status}; faults {len([*given.run_dir.glob("faults/*")])}; left {len(outcomes)}')
    check_golden(Path(__file__).parent / 'golden' / 'node-attempts', {'attempts.txt': '\n'.join([*texts, ''])})
