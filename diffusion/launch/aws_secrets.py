"""Secrets from AWS Secrets Manager, fetched on the node because the scheduler cannot pass them to a job."""

from collections.abc import Mapping

from diffusion.errors import ExternalError, UserError
from diffusion.runs import environment

REFUSALS = ('AccessDeniedException', 'ResourceNotFoundException', 'ValidationException')
"""Error codes for which a retry cannot succeed."""


def secret_references(secrets: Mapping[str, str | None]) -> str:
    """Return the value of DIFFUSION_SECRETS: pairs of variable name and AWS secret id, without the secret values."""
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
            # A binary secret has no SecretString (KeyError). Neither that nor a refusal changes with time, so the
            # scheduler must not retry; an unreachable service may recover.
            code = error.response['Error']['Code'] if isinstance(error, ClientError) else ''
            kind = UserError if code in REFUSALS or isinstance(error, KeyError) else ExternalError
            message = f'secrets.{name}: {source} cannot be read ({error}); check that the AWS role may read it'
            raise kind(message) from error
    return found
