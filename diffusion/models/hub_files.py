"""Fetch pretrained models from the Hugging Face Hub into its cache: one process per node, with one retry policy.

huggingface_hub, transformers and diffusers each ask the Hub about every file and retry on their own. Here one request
lists the files of a repository, the missing ones are downloaded, and everything is then loaded from the cache.
"""

import contextlib
import json
import logging
import re
import textwrap
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
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

from diffusion.errors import ExternalError, GaveUp, UserError, is_wrong_path
from diffusion.models.hub_errors import way_out
from diffusion.storage.atomic import write_atomically
from diffusion.storage.locks import hold_lock
from diffusion.storage.retry import RetryPolicy

log = logging.getLogger(__name__)
HUB_LOGGER = 'huggingface_hub'
"""Logger of huggingface_hub's own retries; its warnings are suppressed, since `RetryPolicy` logs retries too."""

POLICY = RetryPolicy(tries=10, timeout_seconds=30.0)
"""Retry policy: ten tries take about three minutes, with pauses of 2, 8, 30, 30, ... seconds minus jitter."""
WEIGHTS = re.compile(r'(diffusion_pytorch_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?')
"""Names of weight files, without variants such as `model.fp16.safetensors`."""
STEMS = ('model', 'diffusion_pytorch_model')
"""Base names of weight files in transformers and in diffusers."""
VARIANTS = (None, 'fp16', 'bf16')
"""Weight variants that a local folder may have, in order of preference."""
NO_WEIGHTS = 'has no weights in the format safetensors'
TOKENIZER_FILES = ('.json', '.txt', '.model')
COMMIT = re.compile(r'[0-9a-f]{40}')
Answer = TypeVar('Answer')


def fetch(part: type, repository: str, *, subfolder: str, revision: str | None, weights: bool) -> str | None:
    """Ensure that the cache has the files of a model or tokenizer; return the revision to load from the cache.

    No request is made if the revision is a commit and all its files are in the cache. An empty subfolder is the top
    folder, and the revision None is the main branch. If the Hub does not respond, a branch's copy in the cache is used.
    Without `weights`, only a model's configuration is fetched.

    Raises:
        UserError: The repository, revision or file does not exist on the Hub or may not be read. Or offline mode is on,
            and the files are not in the cache.
        ExternalError: The Hub did not respond for several minutes.
    """
    cached = partial(_is_cached, part, repository, subfolder, revision or constants.DEFAULT_REVISION, weights)
    what = _description(part, repository, subfolder, revision)
    if constants.HF_HUB_OFFLINE:
        if _valid(repository) and cached():
            return revision
        raise UserError(
            f'{what} could not be loaded from the Hugging Face Hub (HF_HUB_OFFLINE is set, and the cache '
            f'{constants.HF_HUB_CACHE} lacks it); unset HF_HUB_OFFLINE to download it, set HF_HOME to a cache '
            f'that has it, or {way_out(subfolder)}'
        )
    is_commit = revision is not None and COMMIT.fullmatch(revision) is not None
    with _clear_errors(what, repository, revision, way_out(subfolder)):
        if is_commit and _valid(repository) and cached():
            return revision
        # Only one process per node downloads; the others wait here and then find the files in the cache.
        name = repository.replace('/', '--')
        try:
            with (
                hold_lock(Path(constants.HF_HUB_CACHE, '.locks', f'{name}.diffusion.lock'), lambda: None),
                errors_only(HUB_LOGGER),
            ):
                if is_commit and cached():
                    return revision
                return _download(part, repository, subfolder, revision, weights)
        except GaveUp as error:
            if is_commit or not cached():
                raise
            log.warning('%s: the Hub does not answer (%s); using the copy in the cache', what, error)
            return revision


def check_weights(part: type, repository: str, *, subfolder: str, revision: str | None) -> int:
    """Check that `fetch` could download a model's weights; return the size in bytes of those not in the cache."""
    revision = fetch(part, repository, subfolder=subfolder, revision=revision, weights=False)
    if _is_cached(part, repository, subfolder, revision or constants.DEFAULT_REVISION, weights=True):
        return 0
    if constants.HF_HUB_OFFLINE:
        fetch(part, repository, subfolder=subfolder, revision=revision, weights=True)  # raises UserError: not cached
    what = _description(part, repository, subfolder, revision)
    with _clear_errors(what, repository, revision, way_out(subfolder)), errors_only(HUB_LOGGER):
        commit, names = _files(repository, subfolder, revision)
        files = _weight_files(repository, subfolder, commit, names)
        # Reading each file's metadata also checks the access to a gated repository, which listing files does not.
        return sum(_size(repository, _inside(subfolder, name), commit) for name in files)


def fetch_file(repository: str, name: str, *, revision: str) -> Path:
    """Return the path in the cache of a repository's file, which is downloaded if need be; errors as in `fetch`."""
    found = try_to_load_from_cache(repository, name, revision=revision, cache_dir=constants.HF_HUB_CACHE)
    if isinstance(found, str):
        return Path(found)
    with _reaching(repository, revision, name):
        return _download_file(repository, name, revision)


def missing_size(repository: str, name: str, *, revision: str) -> int:
    """Return the size in bytes of a repository's file, 0 if it is in the cache; errors as in `fetch`."""
    if isinstance(try_to_load_from_cache(repository, name, revision=revision, cache_dir=constants.HF_HUB_CACHE), str):
        return 0
    with _reaching(repository, revision, name):
        return _size(repository, name, revision)


def top_files(repository: str, *, revision: str) -> list[str]:
    """Return the names of a repository's top-level files, in offline mode only cached ones; errors as in `fetch`."""
    if constants.HF_HUB_OFFLINE:
        cache = Path(constants.HF_HUB_CACHE, f'models--{repository.replace("/", "--")}', 'snapshots', revision)
        return sorted(each.name for each in cache.glob('*'))
    with _reaching(repository, revision, ''):
        return _files(repository, '', revision)[1]


@contextlib.contextmanager
def _reaching(repository: str, revision: str, name: str) -> Iterator[None]:
    what, instead = f'{repository}/{name} at revision {revision}', 'use a copy of the file on this machine'
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f'{what} could not be loaded from the Hugging Face Hub (HF_HUB_OFFLINE is set, and the cache '
            f'{constants.HF_HUB_CACHE} lacks it); unset HF_HUB_OFFLINE to download it, or {instead}'
        )
    with _clear_errors(what, repository, revision, instead), errors_only(HUB_LOGGER):
        yield


@contextlib.contextmanager
def retrying(policy: RetryPolicy) -> Iterator[None]:
    global POLICY
    before, POLICY = POLICY, policy
    try:
        yield
    finally:
        POLICY = before


def cached_file(repository: str, name: str, *, revision: str | None) -> Path:
    """Return the path of a repository's file in the cache, where `fetch` must have put it."""
    found = try_to_load_from_cache(repository, name, revision=revision, cache_dir=constants.HF_HUB_CACHE)
    assert isinstance(found, str), f'{repository}/{name} is not in the cache'
    return Path(found)


def _download(part: type, repository: str, subfolder: str, revision: str | None, weights: bool) -> str:
    """Download the missing files of a model or tokenizer to the cache; return their commit."""
    commit, names = _files(repository, subfolder, revision)
    needed = [name for name in names if _is_needed(part, name, weights)]
    # Download last the files that `_is_cached` checks: if they exist, the rest was fetched even if a process was
    # killed.
    for name in sorted(needed, key=lambda name: (_decides(part, name), name)):
        _download_file(repository, _inside(subfolder, name), commit)
    if not _is_cached(part, repository, subfolder, commit, weights):
        raise UserError(f'{_url(repository, revision)}: {_lack(part, subfolder, names)}')
    if revision != commit:
        _save_commit(repository, revision or constants.DEFAULT_REVISION, commit)
    return commit


def _save_commit(repository: str, branch: str, commit: str) -> None:
    """Save a branch's commit where huggingface_hub looks for it, if this process may write to the cache."""
    path = Path(constants.HF_HUB_CACHE, f'models--{repository.replace("/", "--")}', 'refs', branch)
    try:
        if not path.is_file() or path.read_text() != commit:
            write_atomically(path, commit)
    except OSError as error:
        log.warning('%s: %s; without a response of the Hub, this branch will not be found', path, error)


def _lack(part: type, subfolder: str, names: Collection[str]) -> str:
    if not issubclass(part, nn.Module):
        return f'has no {_inside(subfolder, "vocabulary")}'
    if 'config.json' not in names:
        return f'has no {_inside(subfolder, "config.json")}'
    halves = [f'{stem}.{variant}.safetensors' for stem in STEMS for variant in VARIANTS[1:]]
    found = [_inside(subfolder, name) for name in halves if name in names]
    return f'only has half-precision weights ({found[0]}), which only load from a local folder' if found else NO_WEIGHTS


def _files(repository: str, subfolder: str, revision: str | None) -> tuple[str, list[str]]:
    """Return the commit of a revision (None: main), and the names of the files directly in a subfolder there."""
    api = HfApi(endpoint=constants.ENDPOINT)
    listing = partial(api.model_info, repository, revision=revision, timeout=POLICY.timeout_seconds)
    info = _ask(listing, _url(repository, revision))
    assert info.sha is not None
    prefix = _inside(subfolder, '')
    found = [each.rfilename for each in info.siblings or []]
    inside = [name.removeprefix(prefix) for name in found if name.startswith(prefix)]
    return info.sha, [name for name in inside if '/' not in name]


def _download_file(repository: str, path: str, commit: str) -> Path:
    request = partial(hf_hub_download, repository, path, revision=commit, endpoint=constants.ENDPOINT)
    return Path(_ask(partial(request, cache_dir=constants.HF_HUB_CACHE), f'{_url(repository, commit)}/{path}'))


def _weight_files(repository: str, subfolder: str, commit: str, names: Collection[str]) -> list[str]:
    where = f'{_url(repository, commit)}/{subfolder}'.rstrip('/')
    for stem in STEMS:
        if f'{stem}.safetensors' in names:
            return [f'{stem}.safetensors']
        index = f'{stem}.safetensors.index.json'
        if index in names:
            shards = _shards(_download_file(repository, _inside(subfolder, index), commit))
            if missing := sorted(shards - {*names}):
                raise UserError(f'{where}: has no {missing[0]}, which {index} lists')
            return sorted(shards)
    raise UserError(f'{_url(repository, commit)}: {_lack(nn.Module, subfolder, [*names, "config.json"])}')


def _size(repository: str, path: str, commit: str) -> int:
    """Return the size in bytes of a file in a repository, if this process may download it."""
    url = hf_hub_url(repository, path, revision=commit, endpoint=constants.ENDPOINT)
    request = partial(get_hf_file_metadata, url, timeout=POLICY.timeout_seconds, endpoint=constants.ENDPOINT)
    return _ask(request, f'{_url(repository, commit)}/{path}').size or 0


@contextlib.contextmanager
def _clear_errors(what: str, repository: str, revision: str | None, instead: str) -> Iterator[None]:
    """Context that replaces the Hub's errors with those documented for `fetch`; `instead` is added as advice."""
    failed = f'{what} could not be loaded from the Hugging Face Hub'
    try:
        yield
    except UserError as error:
        raise UserError(f'{failed} ({_refusal(error, repository, revision)}); {instead}') from error
    except GaveUp as error:
        reason = textwrap.shorten(str(error), 250, placeholder=' ...')  # huggingface_hub adds long explanations
        raise ExternalError(
            f'{failed} ({reason}). Start again later; or set HF_HOME to a cache that has the files and '
            f'HF_HUB_OFFLINE=1, or {instead}'
        ) from error
    except OSError as error:
        if not is_wrong_path(error):
            raise
        raise UserError(f'{failed}: the cache cannot be written ({error}); set HF_HOME to another folder') from error


def _ask(request: Callable[[], Answer], url: str) -> Answer:
    """Return the Hub's answer to a request; if the Hub does not respond, retry as set in `POLICY`."""

    def attempt() -> Answer:
        try:
            return request()
        except LocalEntryNotFoundError as error:
            # If a request for an uncached file fails, huggingface_hub raises this error, as if there were no such file.
            raise error.__cause__ or ConnectionError(str(error)) from None
        except RuntimeError as error:
            # hf_xet, which transfers large files, raises no specific class for a full disk, which must not be retried.
            if 'os error 28' in str(error):
                raise OSError(28, 'No space left on device', constants.HF_HUB_CACHE) from error
            raise ConnectionError(str(error)) from error

    return POLICY.run(attempt, url)


def weight_files(folder: Path) -> tuple[str | None, list[Path]] | None:
    """Return the variant and the safetensors files in a model's local folder: one file, or all shards of an index.

    Files without a variant (None) are preferred, but a folder may only have half precision, `model.fp16.safetensors`.
    Returns None if weights or one of their shards are missing, or the index is damaged.
    """
    for variant in VARIANTS:
        infix = '' if variant is None else f'.{variant}'
        for stem in STEMS:
            file, index = folder / f'{stem}{infix}.safetensors', folder / f'{stem}.safetensors.index{infix}.json'
            if file.is_file():
                return variant, [file]
            if index.is_file():
                try:
                    files = [folder / Path(name).name for name in sorted(_shards(index))]
                except (ValueError, KeyError, TypeError, AttributeError):  # the index is damaged
                    return None
                return (variant, files) if all(each.is_file() for each in files) else None
    return None


def _is_cached(part: type, repository: str, subfolder: str, revision: str, weights: bool) -> bool:

    def path(name: str) -> Path | None:
        name = _inside(subfolder, name)
        found = try_to_load_from_cache(repository, name, revision=revision, cache_dir=constants.HF_HUB_CACHE)
        return Path(found) if isinstance(found, str) else None

    if issubclass(part, PreTrainedTokenizerBase):
        return path('tokenizer.json') is not None or all(map(path, part.vocab_files_names.values()))
    if path('config.json') is None:
        return False
    if not weights or any(path(f'{stem}.safetensors') for stem in STEMS):
        return True
    for index in (path(f'{stem}.safetensors.index.json') for stem in STEMS):
        if index is not None:
            return all(map(path, _shards(index)))
    return False


def _shards(index: Path) -> set[str]:
    return set(json.loads(index.read_text(encoding='utf-8'))['weight_map'].values())


def _is_needed(part: type, name: str, weights: bool) -> bool:
    if issubclass(part, PreTrainedTokenizerBase):
        return name.endswith(TOKENIZER_FILES)
    return name == 'config.json' or (weights and WEIGHTS.fullmatch(name) is not None)


def _decides(part: type, name: str) -> int:
    """Return a sort key for the download order: the files that `_is_cached` checks come late, an index file last."""
    if issubclass(part, PreTrainedTokenizerBase):
        return int(name in ('tokenizer.json', *part.vocab_files_names.values()))
    return 1 + name.endswith('.index.json') if WEIGHTS.fullmatch(name) else 0


def _inside(subfolder: str, name: str) -> str:
    return f'{subfolder}/{name}' if subfolder else name


def _url(repository: str, revision: str | None) -> str:
    return f'hf://{repository}@{revision or constants.DEFAULT_REVISION}'


def _description(part: type, repository: str, subfolder: str, revision: str | None) -> str:
    what = f'{"/".join(name for name in (repository, subfolder) if name)}: {part.__name__}'
    return what + (f' at revision {revision}' if revision else '')


def _valid(repository: str) -> bool:
    """Return True for a valid repository name, False for anything else, such as the path of a missing folder."""
    return re.fullmatch(r'[\w.-]+(/[\w.-]+)?', repository) is not None


def _refusal(error: UserError, repository: str, revision: str | None) -> str:
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


@contextlib.contextmanager
def errors_only(name: str) -> Iterator[None]:
    """Context in which a logger only logs errors, to suppress redundant warnings."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
