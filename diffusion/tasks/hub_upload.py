"""Upload an export to a repository on the Hugging Face Hub, with retries.

The token is from HF_TOKEN or `hf auth login`, and is never written to a file.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import ModelInfo

from diffusion.errors import ExternalError, GaveUp, UserError
from diffusion.storage.retry import PreconditionFailed, RetryPolicy
from diffusion.tasks.model_card import CARD

POLICY = RetryPolicy(tries=6, timeout_seconds=60.0)
"""Six tries per request, with pauses of up to 2, 8, 30, 30 and 30 seconds: about a minute and a half in total."""
OF_THE_HUB = {'.gitattributes', CARD}
"""Files that do not count as content: an export may be uploaded to a repository that has only these files."""
REFUSED_FILES = 'LFS batch API returned errors'
"""Start of huggingface_hub's error message if the Hub refuses a file, for example because the storage is full."""
Answer = TypeVar('Answer')


def check_access(repository: str, *, public: bool) -> None:
    """Check, before exporting, that the export can be uploaded to a repository, which need not exist yet.

    Raises:
        UserError: The token is missing or does not permit writing there, or the repository's visibility is wrong.
        ExternalError: The Hub did not answer.
    """
    page = f'{constants.ENDPOINT}/{repository}'
    if constants.HF_HUB_OFFLINE:
        raise UserError('--push: HF_HUB_OFFLINE is set; unset it, or export without --push')
    if get_token() is None:
        raise UserError('--push: not logged in to the Hugging Face Hub; set HF_TOKEN, or log in with `hf auth login`')
    api = _api()
    account = _ask(api.whoami, repository)
    names = [account['name'], *(each['name'] for each in account.get('orgs', []))]
    namespace = repository.partition('/')[0]
    if namespace not in names:
        raise UserError(
            f'--push: {account["name"]} may not write to {namespace}; use one of {", ".join(names)}, or another login'
        )
    info = _info(api, repository)
    if info is not None and bool(info.private) == public:
        change = 'remove --public' if public else 'add --public'
        raise UserError(
            f'--push: {repository} exists and is {"private" if public else "public"}; {change}, or change it at '
            f'{page}/settings'
        )


def upload(out: Path, repository: str, card: str, *, public: bool) -> str:
    """Upload an export and its model card in one commit, and return the URL of the repository, created if needed.

    Raises:
        UserError: The Hub refuses the upload, or the repository contains other files.
        ExternalError: The Hub did not answer.
    """
    api = _api()
    paths = sorted(path for path in out.rglob('*') if path.is_file()) if out.is_dir() else [out]
    root = out if out.is_dir() else out.parent
    files = {path.relative_to(root).as_posix(): path for path in paths}
    try:
        info = _info(api, repository)
        present = {each.rfilename for each in (info.siblings or [])} if info is not None else set()
        if others := sorted(present - OF_THE_HUB - files.keys()):
            raise UserError(
                f'--push: {repository} has other files ({", ".join(others[:3])}), which this export would not replace; '
                'use another name, or remove them there'
            )
        additions = [CommitOperationAdd(name, str(path)) for name, path in files.items() if name != CARD]
        additions.append(CommitOperationAdd(CARD, card.encode()))
        _ask(lambda: api.create_repo(repository, private=not public, exist_ok=True), repository)
        # Retries skip files that have already been uploaded.
        _ask(lambda: api.create_commit(repository, additions, commit_message=f'Upload {out.name}'), repository)
    except (UserError, ExternalError) as error:
        kept = f'The export is complete in {out}; upload it later with `hf upload {repository} {out}`'
        raise type(error)(f'{error}. {kept}') from error
    return f'{constants.ENDPOINT}/{repository}'


def _api() -> HfApi:
    return HfApi(endpoint=constants.ENDPOINT, library_name='diffusion')


def _info(api: HfApi, repository: str) -> ModelInfo | None:
    def attempt() -> ModelInfo | None:
        try:
            return api.model_info(repository, timeout=POLICY.timeout_seconds)
        except RepositoryNotFoundError:
            return None

    return _ask(attempt, repository)


def _ask(request: Callable[[], Answer], repository: str) -> Answer:
    """Return the Hub's response to a request, with retries if the Hub does not respond."""

    def attempt() -> Answer:
        try:
            with warnings.catch_warnings():
                # Ignore the Hub's warnings about the front matter, such as an unknown license.
                warnings.simplefilter('ignore')
                return request()
        except RuntimeError as error:  # a failed upload: raise its cause, which has the reason
            raise error.__cause__ or error from None
        except ValueError as error:
            if not str(error).startswith(REFUSED_FILES):
                raise
            raise UserError(' '.join(str(error).split())) from error

    try:
        return POLICY.run(attempt, f'hf://{repository}', 'written')
    except UserError as error:
        raise UserError(f'--push: {error}') from error
    except (GaveUp, PreconditionFailed) as error:
        raise ExternalError(f'--push: {error}') from error
