"""Secrets that a scheduler cannot pass to a job, fetched on the node by their names in AWS Secrets Manager."""

from collections.abc import Mapping

from diffusion.errors import ExternalError, UserError
from diffusion.launch import environment

REFUSALS = ('AccessDeniedException', 'ResourceNotFoundException', 'ValidationException')
"""Error codes that another try will not change."""


def secret_references(secrets: Mapping[str, str | None]) -> str:
    """Return the value of `environment.SECRETS`: the names of variables and of their secrets, without the secrets."""
    return ','.join(f'{name}={source}' for name, source in secrets.items())


def fetch_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Fetch the secrets that `environment.SECRETS` names, by the variables they are for.

    Raises:
        UserError: boto3 is missing, a secret does not exist or is binary, or this role may not read it.
        ExternalError: Secrets Manager does not answer. No message holds a secret.
    """
    named = environ.get(environment.SECRETS, '')
    if not named:
        return {}
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise UserError('secrets: boto3 is not installed; pip install boto3') from error
    client = boto3.Session().client('secretsmanager')
    found = {}
    for entry in named.split(','):
        name, _, source = entry.partition('=')
        try:
            found[name] = client.get_secret_value(SecretId=source)['SecretString']
        except (BotoCoreError, ClientError, KeyError) as error:
            code = error.response['Error']['Code'] if isinstance(error, ClientError) else ''
            kind = UserError if code in REFUSALS or isinstance(error, KeyError) else ExternalError
            raise kind(f'secrets.{name}: {source} cannot be read ({error}); may this role read it?') from error
    return found
