"""Checks of a `runs_dir` in an object store, without requests to it."""

import os
from collections.abc import Mapping

CONDITIONAL_SCHEMES = ('s3', 'gs', 'az', 'azure', 'azure-dl')
"""URL schemes of stores with conditional writes, which taking the lock of a run needs."""


def runs_dir_problem(runs_dir: str) -> str | None:
    """Return an error message if runs cannot be in the object store at a URL; None if they can, and for a folder."""
    scheme, separator, rest = runs_dir.partition('://')
    if not separator:
        scheme, separator, rest = runs_dir.partition(':/')
        if separator and scheme in CONDITIONAL_SCHEMES:
            return f'{runs_dir} has one slash after the colon, so it is a folder; for a store, write {scheme}://{rest}'
        return None
    if scheme not in CONDITIONAL_SCHEMES:
        return (
            f'{scheme}:// cannot hold runs; use s3://bucket/runs, gs://, az:// or azure://, which have the conditional '
            'writes that the lock of a run needs, or a folder that all nodes share'
        )
    bucket, _, key = rest.partition('/')
    if scheme == 'azure' and (not bucket or not key.strip('/')):
        return (
            f'{runs_dir} has no container; use a URL such as azure://ACCOUNT.blob.core.windows.net/CONTAINER/runs, or '
            'az://CONTAINER/runs with AZURE_ACCOUNT_NAME'
        )
    if not bucket:
        return f'{runs_dir} has no bucket; use a URL such as {scheme}://bucket/runs'
    return None


def credentials_problem(runs_dir: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return an error message if the environment lacks credentials that runs in an object store need, else None.

    Args:
        runs_dir: The value of `runs_dir`, for which `runs_dir_problem` is None.
        environ: The environment of the run.
    """
    if runs_dir.startswith('gs://') and {'GCS_KEY', 'GCS_SECRET'} <= environ.keys():
        return (
            'conditional writes to gs:// need Application Default Credentials; unset GCS_KEY and GCS_SECRET, and run '
            '`gcloud auth application-default login` or attach a service account to the machine'
        )
    has_account = {'AZURE_ACCOUNT_NAME', 'AZURE_STORAGE_ACCOUNT_NAME'} & environ.keys()
    if runs_dir.startswith(('az://', 'azure-dl://')) and not has_account:
        return (
            f'the account of {runs_dir} is missing; set AZURE_ACCOUNT_NAME, or use a URL such as '
            'azure://ACCOUNT.blob.core.windows.net/CONTAINER/runs'
        )
    return None
