"""Fetch pretrained models from the Hugging Face Hub into its cache, by one process per node, under one retry policy.

huggingface_hub, transformers and diffusers each ask the Hub about every file and retry on their own. Here one request
lists the files of a repository, the missing ones are downloaded, and everything is then loaded from the cache.
"""

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from torch import nn
from transformers import PreTrainedTokenizerBase

from diffusion.errors import ExternalError, UserError, is_wrong_path
from diffusion.models.hub_errors import WAY_OUT
from diffusion.storage.locks import hold_lock
from diffusion.storage.retry import GaveUp, RetryPolicy

log = logging.getLogger(__name__)

POLICY = RetryPolicy(tries=10, timeout_seconds=30.0)
"""Ten tries of a request: with pauses of 2, 8, 30, 30, ... seconds less jitter, about three minutes."""
WEIGHTS = re.compile(r'(diffusion_pytorch_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?')
"""Names of weight files, without variants such as `model.fp16.safetensors`."""
TOKENIZER_FILES = ('.json', '.txt', '.model')
COMMIT = re.compile(r'[0-9a-f]{40}')
Answer = TypeVar('Answer')


def cache_folder() -> str:
    """Return the cache of the Hub, to be passed to every `from_pretrained`: transformers may prefer another one."""
    return constants.HF_HUB_CACHE


def fetch(part: type, repository: str, *, subfolder: str, revision: str | None, weights: bool) -> str | None:
    """Make sure that the cache has the files of a model or tokenizer; return the revision to load from the cache.

    If all files of a commit are in the cache, nothing is requested.

    Args:
        part: Class to be loaded.
        repository: Name of the repository.
        subfolder: Subfolder of the repository; empty for its top folder.
        revision: Commit, branch or tag; None is the main branch.
        weights: True to fetch the weights of a model too; False for its configuration only.

    Raises:
        UserError: The Hub refuses: no such repository, revision or file, or no access. Or offline mode is on, and the
            files are not in the cache.
        ExternalError: The Hub did not answer for minutes.
    """
    cached = partial(_is_cached, part, repository, subfolder, revision or constants.DEFAULT_REVISION, weights)
    what = f'{"/".join(name for name in (repository, subfolder) if name)}: {part.__name__}'
    what += f' at revision {revision}' if revision else ''
    failed = f'{what} could not be loaded from the Hugging Face Hub'
    if constants.HF_HUB_OFFLINE:
        if _valid(repository) and cached():
            return revision
        raise UserError(
            f'{failed} (HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} lacks it); unset it to download '
            f'once, set HF_HOME to a cache that has it, or {WAY_OUT}'
        )
    is_commit = revision is not None and COMMIT.fullmatch(revision) is not None
    try:
        if is_commit and _valid(repository) and cached():
            return revision
        # One process per node: the others wait here, and then find the files in the cache.
        name = repository.replace('/', '--')
        with hold_lock(Path(constants.HF_HUB_CACHE, '.locks', f'{name}.diffusion.lock'), lambda: None), _quiet():
            if is_commit and cached():
                return revision
            return _download(part, repository, subfolder, revision, weights)
    except UserError as error:
        raise UserError(f'{failed} ({_refusal(error, repository, revision)}); {WAY_OUT}') from error
    except GaveUp as error:
        if not is_commit and cached():
            log.warning('%s: the Hub does not answer (%s); using the copy in the cache', what, error)
            return revision
        raise ExternalError(
            f'{failed} ({_shortened(error)}). Start again later; or set HF_HOME to a cache that has the files and '
            f'HF_HUB_OFFLINE=1, or {WAY_OUT}'
        ) from error
    except OSError as error:
        if not is_wrong_path(error):
            raise
        raise UserError(f'{failed}: the cache cannot be written ({error}); set HF_HOME to another folder') from error


def cached_file(repository: str, name: str, *, revision: str | None) -> Path:
    """Return the path of a file of a repository in the cache, which `fetch` has made sure to be there."""
    found = try_to_load_from_cache(repository, name, revision=revision, cache_dir=constants.HF_HUB_CACHE)
    assert isinstance(found, str), f'{repository}/{name} is not in the cache'
    return Path(found)


def _download(part: type, repository: str, subfolder: str, revision: str | None, weights: bool) -> str:
    """Download the missing files of a model or tokenizer to the cache; return their commit."""
    api = HfApi(endpoint=constants.ENDPOINT)
    url = f'hf://{repository}@{revision or constants.DEFAULT_REVISION}'
    listing = partial(api.model_info, repository, revision=revision, timeout=POLICY.timeout_seconds)
    info = _ask(listing, url)
    prefix = f'{subfolder}/' if subfolder else ''
    found = [each.rfilename for each in info.siblings or []]
    inside = [name.removeprefix(prefix) for name in found if name.startswith(prefix)]
    needed = [name for name in inside if '/' not in name and _is_needed(part, name, weights)]
    # The files by which `_is_cached` decides come last: if they are there, a killed process has fetched the rest too.
    for name in sorted(needed, key=lambda name: (_decides(part, name), name)):
        request = partial(hf_hub_download, repository, prefix + name, revision=info.sha, endpoint=constants.ENDPOINT)
        _ask(partial(request, cache_dir=constants.HF_HUB_CACHE), f'{url}/{prefix}{name}')
    assert info.sha is not None
    if not _is_cached(part, repository, subfolder, info.sha, weights):
        raise UserError(f'{url}: has no {prefix}{"config.json" if issubclass(part, nn.Module) else "vocabulary"}')
    return info.sha


def _ask(request: Callable[[], Answer], url: str) -> Answer:
    """Return the Hub's answer to a request, which is retried while the Hub does not answer."""

    def attempt() -> Answer:
        try:
            return request()
        except LocalEntryNotFoundError as error:
            # Raised for every failed request of a file that is not cached; it looks like a missing file.
            raise error.__cause__ or ConnectionError(str(error)) from None
        except RuntimeError as error:
            # hf_xet, which transfers large files, raises no other class. A full disk must not be retried.
            if 'os error 28' in str(error):
                raise OSError(28, 'No space left on device', constants.HF_HUB_CACHE) from error
            raise ConnectionError(str(error)) from error

    return POLICY.run(attempt, url)


def _is_cached(part: type, repository: str, subfolder: str, revision: str, weights: bool) -> bool:
    """Return True if the cache has all files that loading a model or tokenizer needs."""

    def path(name: str) -> Path | None:
        name = f'{subfolder}/{name}' if subfolder else name
        found = try_to_load_from_cache(repository, name, revision=revision, cache_dir=constants.HF_HUB_CACHE)
        return Path(found) if isinstance(found, str) else None

    if issubclass(part, PreTrainedTokenizerBase):
        return path('tokenizer.json') is not None or all(map(path, part.vocab_files_names.values()))
    if path('config.json') is None:
        return False
    stems = ('model', 'diffusion_pytorch_model')
    if not weights or any(path(f'{stem}.safetensors') for stem in stems):
        return True
    for index in (path(f'{stem}.safetensors.index.json') for stem in stems):
        if index is not None:
            shards = set(json.loads(index.read_text(encoding='utf-8'))['weight_map'].values())
            return all(map(path, shards))
    return False


def _is_needed(part: type, name: str, weights: bool) -> bool:
    """Return True if a file of a subfolder is needed to load a model or tokenizer."""
    if issubclass(part, PreTrainedTokenizerBase):
        return name.endswith(TOKENIZER_FILES)
    return name == 'config.json' or (weights and WEIGHTS.fullmatch(name) is not None)


def _decides(part: type, name: str) -> int:
    """Return 1 for files by which `_is_cached` decides, else 0; an index of shards comes after the shards."""
    if issubclass(part, PreTrainedTokenizerBase):
        return int(name in ('tokenizer.json', *part.vocab_files_names.values()))
    return 1 + name.endswith('.index.json') if WEIGHTS.fullmatch(name) else 0


def _valid(repository: str) -> bool:
    """Return True for the name of a repository; False for anything else, such as the path of a missing folder."""
    return re.fullmatch(r'[\w.-]+(/[\w.-]+)?', repository) is not None


def _refusal(error: UserError, repository: str, revision: str | None) -> str:
    """Return the reason why the Hub refused a request, in terms of the recipe."""
    cause = error.__cause__
    page = f'{constants.ENDPOINT}/{repository}'
    if isinstance(cause, HFValidationError):
        return 'neither a local folder nor the name of a repository'
    if isinstance(cause, GatedRepoError):
        return f'access is restricted: accept the terms at {page}, and set HF_TOKEN or log in with `hf auth login`'
    if isinstance(cause, RevisionNotFoundError):
        return f'404: there is no revision {revision}; see {page}/commits/main'
    if isinstance(cause, RepositoryNotFoundError):
        status = getattr(cause.response, 'status_code', 404)
        return f'{status}: there is no such repository, or it is private: check the name, and HF_TOKEN'
    if isinstance(cause, EntryNotFoundError):
        return f'404: there is no such file in the repository, see {page}/tree/main'
    return str(error).removeprefix(f'hf://{repository}')


def _shortened(error: GaveUp) -> str:
    """Return the message of an exhausted retry without the long explanations of huggingface_hub."""
    text = ' '.join(str(error).split())
    return text if len(text) <= 250 else f'{text[:246]} ...'


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context in which huggingface_hub does not log its own retries; `RetryPolicy` logs ours."""
    logger = logging.getLogger('huggingface_hub')
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
