"""Messages to people about a run, through a webhook that receives JSON (such as Slack's) or a command.

A recipe names the environment variables that hold the URL and the command line. Neither is written to a file, so a
recipe contains no secrets, and a recipe from someone else cannot run commands.
"""

import json
import logging
import os
import shlex
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

from diffusion.config.recipe import NOTIFY_EVENTS, NotifyConfig
from diffusion.errors import UserError
from diffusion.runs import attempts
from diffusion.storage.places import QUICK

log = logging.getLogger(__name__)

NUMBER_VARIABLE = 'DIFFUSION_ATTEMPT_NUMBER'
"""Environment variable in which the node entry point passes the number of the attempt to its workers."""
TRAINING_EVENTS = ('loss_guard', 'checkpoint_failed')
"""Events that only the training process can detect. The node entry point, if there is one, sends all others."""
TIMEOUT_SECONDS = 5.0
COMMAND_SECONDS = 30.0
"""Time after which the command is killed."""
PAUSES_SECONDS = (1.0, 3.0)
"""Pauses before the second and third try to deliver a message."""
CLOSE_SECONDS = 12.0
"""Maximum wait for undelivered messages at the end of a process, enough for a request that times out and a retry."""
GOODPUT_AFTER_SECONDS = 1800.0
"""Age of a run at which its goodput is first compared with `goodput_below`; before that, startup makes goodput low."""


class NotDelivered(Exception):
    """Raised when a message cannot be delivered. The text never contains the URL or the command."""


class Notifier:
    """Sender of messages about one attempt of a run. Each event is sent at most once.

    Args:
        run: The run's folder or URL; its last part is the name of the run in every message.
        environ: Environment variables, including those whose names are in `config`.
        events: Events that this process sends.
        hide: Function that removes secrets from a text.
    """

    # Each message has its own thread, so that a slow server does not delay training or other messages.

    def __init__(
        self,
        config: NotifyConfig,
        run: Path | str,
        environ: Mapping[str, str] = os.environ,
        *,
        events: tuple[str, ...] = NOTIFY_EVENTS,
        attempt: int | None = None,
        hide: Callable[[str], str] = str,
    ) -> None:
        self.config, self.run, self.attempt, self.hide = config, run, attempt, hide
        self._name = PurePath(run).name
        self._events = {event for event in events if event in config.events}
        self._targets: dict[str, Callable[[dict[str, Any]], None]] = {}
        for key, name, deliver in (('webhook', config.webhook, _post), ('command', config.command, _execute)):
            if name is None:
                continue
            secret = environ.get(name, '').strip()
            if secret:
                self._targets[key] = lambda message, deliver=deliver, secret=secret: deliver(secret, message)
            else:
                log.warning('notify.%s: the environment variable %s is not set; no message is sent', key, name)
        self._threads: list[threading.Thread] = []

    def send(self, event: str, text: str, **values: Any) -> None:
        """Send a message in the background, unless the recipe excludes the event or the event was already sent.

        `values` are additional fields of the JSON message.
        """
        if event not in self._events:
            return
        self._events.discard(event)
        message = {
            'text': f'{self._name}: {self.hide(text)}',
            'event': event,
            'run': self._name,
            'attempt': self.attempt,
            'host': socket.gethostname(),
            'time': time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime()),
        }
        for key, deliver in self._targets.items():
            thread = threading.Thread(target=_deliver, args=(key, deliver, message | values), name=event, daemon=True)
            self._threads.append(thread)
            thread.start()

    def send_end(self, attempt: attempts.Attempt) -> None:
        """Send the event `ended` of an attempt."""
        cause, detail = attempt.cause, attempt.detail
        text = f'ended: {attempts.describe_attempt(cause, detail)}'
        self.send('ended', text, cause=cause, detail=detail, status=attempt.status, batch=attempt.last)

    def check_goodput(self) -> None:
        """Send the event `goodput` if the run's goodput so far is below the recipe's threshold."""
        bound = self.config.goodput_below
        if bound is None or 'goodput' not in self._events:
            return
        try:
            found, _ = attempts.time_breakdown(attempts.read_attempts(self.run, QUICK))
        except (UserError, OSError):
            return
        if found.wall >= GOODPUT_AFTER_SECONDS and found.goodput < bound:
            text = f'goodput is {found.goodput:.3f} after {found.wall / 3600:.1f} h, below {bound}'
            self.send('goodput', text, goodput=round(found.goodput, 4), wall_seconds=round(found.wall))

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                log.warning('notify: the message for event %r was not yet delivered when the run ended', thread.name)


def _deliver(key: str, deliver: Callable[[dict[str, Any]], None], message: dict[str, Any]) -> None:
    reason = ''
    for pause in (0.0, *PAUSES_SECONDS):
        time.sleep(pause)
        try:
            return deliver(message)
        except NotDelivered as error:
            reason = str(error)
    log.warning('notify.%s: the message for event %r was not delivered (%s)', key, message['event'], reason)


def _post(url: str, message: dict[str, Any]) -> None:
    # Refuse file: and ftp: URLs, which urllib would open too.
    if not url.startswith(('https://', 'http://')):
        raise NotDelivered('the URL does not start with https:// or http://')
    try:
        request = urllib.request.Request(
            url, json.dumps(message).encode(), {'Content-Type': 'application/json', 'User-Agent': 'diffusion'}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
            pass
    except urllib.error.HTTPError as error:
        error.close()
        raise NotDelivered(f'HTTP status {error.code}') from None
    except (OSError, ValueError, urllib.error.URLError) as error:
        # Report only the operating system's message or the exception's type: other text may contain the URL, a secret.
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        raise NotDelivered(getattr(cause, 'strerror', None) or type(cause).__name__) from None
    except Exception as error:  # http.client has its own exceptions for replies that are not HTTP
        raise NotDelivered(type(error).__name__) from None


def _execute(command: str, message: dict[str, Any]) -> None:
    """Run a command line, without a shell, with the message as JSON on its stdin."""
    try:
        result = subprocess.run(
            shlex.split(command),
            input=json.dumps(message).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotDelivered(f'the command did not end in {COMMAND_SECONDS:.0f} s') from None
    except (OSError, ValueError) as error:
        raise NotDelivered(f'the command cannot be run: {getattr(error, "strerror", None) or "bad quotes"}') from None
    if result.returncode:
        raise NotDelivered(f'the command exited with status {result.returncode}')
