"""Read a job's settings from the node entry point's environment variables, and fetch the job's secrets."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from diffusion.errors import ExternalError, UserError
from diffusion.exit_codes import CONFIG_ERROR
from diffusion.runs import environment
from diffusion.runs.heartbeats import hang_seconds_of

REFUSALS = ('AccessDeniedException', 'ResourceNotFoundException', 'ValidationException')
"""AWS error codes of requests that would fail again in every retry."""
PREFLIGHT_SECONDS = {'fast': 900.0, 'deep': 3600.0}
"""Maximum duration of the preflight by level. The slowest node may start five minutes late."""


@dataclass(frozen=True)
class Settings:
    """Settings of a job that the node entry point reads from its environment variables."""

    actions: Mapping[str, str]
    """Action by exit status; the key `*` stands for all other statuses."""
    max_restarts: int
    in_place: bool
    """True if the node entry point itself restarts the workers, because the scheduler does not."""
    standby: bool
    """True if standby processes take over after a crash, without the scheduler."""
    notice_seconds: float
    hang_seconds: float
    preflight: str

    @staticmethod
    def from_environ(environ: Mapping[str, str]) -> 'Settings':
        """Return the settings from the variables that a launch backend has set; raise UserError if one is invalid."""
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


def secret_references(secrets: Mapping[str, str | None]) -> str:
    """Return the value of DIFFUSION_SECRETS: names of variables and ids of their AWS secrets, but no secret values."""
    return ','.join(f'{name}={source}' for name, source in secrets.items())


def fetch_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Fetch the secrets listed in DIFFUSION_SECRETS from AWS; return the secret values by environment variable.

    No error message contains a secret.

    Raises:
        UserError: boto3 is missing, a secret does not exist or is binary, or the AWS role may not read it.
        ExternalError: Secrets Manager does not respond.
    """
    references = environ.get(environment.SECRETS, '')
    if not references:
        return {}
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise UserError('secrets: boto3 is not installed; pip install boto3') from error
    client = boto3.Session().client('secretsmanager')
    found = {}
    for entry in references.split(','):
        name, _, source = entry.partition('=')
        try:
            found[name] = client.get_secret_value(SecretId=source)['SecretString']
        except (BotoCoreError, ClientError, KeyError) as error:
            # A binary secret has no SecretString (KeyError). Raise UserError for it and for refusals, which a
            # retry by the scheduler cannot fix, but ExternalError for an unreachable service, which may recover.
            code = error.response['Error']['Code'] if isinstance(error, ClientError) else ''
            kind = UserError if code in REFUSALS or isinstance(error, KeyError) else ExternalError
            message = f'secrets.{name}: {source} cannot be read ({error}); check that the AWS role may read it'
            raise kind(message) from error
    return found
