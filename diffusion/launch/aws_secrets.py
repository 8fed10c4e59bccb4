"""Secrets that a scheduler cannot hand to a job, fetched on the node by their names in AWS Secrets Manager."""

from collections.abc import Mapping

from diffusion.errors import UserError
from diffusion.launch import environment


def secret_references(secrets: Mapping[str, str | None]) -> str:
    """The value of `environment.SECRETS`: names and where they are, no secret."""
    return ','.join(f'{name}={source}' for name, source in secrets.items())


def fetch_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The secrets that `environment.SECRETS` names, by the variables they are for.

    Raises:
        UserError: One cannot be had; the message does not hold it.
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
            raise UserError(f'secrets.{name}: {source} cannot be read ({error}); may this role read it?') from error
    return found
