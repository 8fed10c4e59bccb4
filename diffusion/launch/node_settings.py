"""Settings of a job that the node entry point reads from its environment variables."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from diffusion.errors import UserError
from diffusion.exit_codes import CONFIG_ERROR
from diffusion.runs import environment
from diffusion.runs.watchdog import hang_seconds_of

PREFLIGHT_SECONDS = {'fast': 900.0, 'deep': 3600.0}
"""Maximum duration of the preflight by level. The slowest node may start five minutes late."""


@dataclass(frozen=True)
class Settings:
    """Settings of a job that the node entry point reads from its environment variables."""

    actions: Mapping[str, str]
    """Action by exit status; `*` is the action for all others."""
    max_restarts: int
    in_place: bool
    """True if the node entry point restarts the workers itself because the scheduler does not."""
    standby: bool
    """True if standby processes take over after a crash, without the scheduler."""
    notice_seconds: float
    hang_seconds: float
    preflight: str
    """Preflight level: none, fast or deep."""

    @staticmethod
    def from_environ(environ: Mapping[str, str]) -> 'Settings':
        """Return the settings of the job from the environment variables that a launch backend has set.

        Raises:
            UserError: A variable has an invalid value.
        """
        on_exit = environ.get(environment.ON_EXIT, f'{CONFIG_ERROR}=stop,*=retry')
        words = [entry.partition('=') for entry in on_exit.split(',')]
        actions = {status: action for status, _, action in words}
        level = environ.get(environment.PREFLIGHT, 'none')
        if level not in ('none', *PREFLIGHT_SECONDS):
            raise UserError(f'{environment.PREFLIGHT}: {level!r} is unknown; use none, {", ".join(PREFLIGHT_SECONDS)}')
        return Settings(
            actions,
            int(environment.number(environ, environment.MAX_RESTARTS, sys.maxsize)),
            environ.get(environment.RESTART_IN_PLACE) == '1',
            environ.get(environment.STANDBY) == '1',
            environment.number(environ, environment.NOTICE_SECONDS, 120),
            hang_seconds_of(environ),
            level,
        )

    def action_after(self, status: int) -> str:
        """Return the action of the job after an exit status: retry, elsewhere (retry on other nodes) or stop."""
        return self.actions.get(str(status), self.actions.get('*', 'retry'))
