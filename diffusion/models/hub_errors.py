"""Classification of errors from loading pretrained models: mistakes of the user, or transient failures to retry."""

import errno
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from diffusion.errors import UserError, is_wrong_path

TRANSIENT_STATUSES = (408, 429)
"""HTTP 4xx statuses (request timeout, too many requests) after which a retry may succeed."""


def loading_error(
    error: Exception, part: type, source: str, *, subfolder: str, revision: str | None
) -> UserError | OSError | None:
    """Return a clearer error to raise in place of the one that `part.from_pretrained` raised.

    Returns:
        A UserError if the repository, revision or file does not exist, access is denied, the files are damaged, or
        the files are not in the cache in offline mode. An OSError if the Hub does not answer now or the disk cannot
        be read. None for a bug, whose original error should be raised.
    """
    # `from_pretrained` raises OSError, ValueError or TypeError alike for a misspelled repository, a Hub that returns
    # 429 and an unreadable disk. The reason is in the chain of causes, or nowhere: for a tokenizer without files,
    # transformers raises a TypeError that does not mention them. So request the first files and look at that error.
    reason = _find_missing_file(part, source, subfolder, revision) or error
    is_mistake = _is_mistake(reason)
    if not is_mistake and not isinstance(reason, OSError):
        return None
    local = Path(source).is_dir()
    full_name = '/'.join(name for name in (source, subfolder) if name)
    at_revision = f' at revision {revision}' if revision and not local else ''
    place = 'this folder' if local else 'the Hugging Face Hub'
    return (UserError if is_mistake else OSError)(
        f'{full_name}: {part.__name__}{at_revision} could not be loaded from {place} ({_summary(reason)}); '
        'use a local folder written by save_pretrained instead, with the subfolders '
        'vae/, text_encoder/ and tokenizer/ (model.pretrained=/path/to/folder)'
    )


def _find_missing_file(part: type, source: str, subfolder: str, revision: str | None) -> Exception | None:
    """Request the first files that a pretrained model or tokenizer needs; return the error if one is missing."""
    is_tokenizer = issubclass(part, PreTrainedTokenizerBase)
    for name in part.vocab_files_names.values() if is_tokenizer else ['config.json']:
        path = Path(source, subfolder, name)
        if not Path(source).is_dir():
            try:
                hf_hub_download(source, name, subfolder=subfolder or None, revision=revision)
            except Exception as error:
                return error
        elif not path.is_file():
            return FileNotFoundError(errno.ENOENT, 'No such file', str(path))
    return None


def _is_mistake(error: BaseException) -> bool:
    """Return True if the user must correct a loading error, because a retry would fail in the same way."""
    # The HTTP status decides if there is one, then offline mode, then the error numbers of the file system.
    chain = list(_chain(error))
    statuses = [link.response.status_code for link in chain if _has_response(link)]  # type: ignore[attr-defined]
    if statuses:
        return any(400 <= status < 500 and status not in TRANSIENT_STATUSES for status in statuses)
    if any(isinstance(link, LocalEntryNotFoundError) for link in chain):
        return bool(constants.HF_HUB_OFFLINE)
    numbered = [link for link in chain if isinstance(link, OSError) and link.errno is not None]
    if numbered:
        return all(is_wrong_path(link) for link in numbered)
    # diffusers and transformers raise an OSError without errno if a folder lacks a file.
    return isinstance(error, OSError | HFValidationError | SafetensorError | json.JSONDecodeError)


def _summary(error: BaseException) -> str:
    """Return the most informative message of an error and its causes, in one line of at most 250 characters."""
    chain = list(_chain(error))
    responses = [link for link in chain if _has_response(link)]
    # The message of LocalEntryNotFoundError is generic; the network error is its first cause, at the end of the chain.
    best = responses[0] if responses else chain[-1] if isinstance(error, LocalEntryNotFoundError) else error
    return textwrap.shorten(str(best) or type(best).__name__, 250, placeholder=' ...')


def _has_response(error: BaseException) -> bool:
    """Return True if an error carries an HTTP response."""
    return getattr(error, 'response', None) is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
