"""Errors of loading a pretrained part, told apart: what the user has to correct, and what may pass by itself.

`from_pretrained` raises an OSError, a ValueError or a TypeError for a misspelled repository, for a Hub that answers 429
and for a disk that cannot be read alike; the reason is in the chain of causes, or nowhere.
"""

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

MAY_PASS = (408, 429)
"""Statuses of 4xx after which the Hub may answer."""


def loading_error(
    error: Exception, part: type, source: str, *, subfolder: str, revision: str | None
) -> UserError | OSError | None:
    """Make the error to raise for one that `part.from_pretrained` has raised.

    Returns:
        A UserError: there is no such repository, revision or file, access is refused, the files are damaged, or they
        are not in the cache in offline mode. An OSError: the Hub does not answer now, or the disk cannot be read. None
        for a bug.
    """
    # For a tokenizer without its files transformers raises a TypeError that says nothing of the reason.
    reason = _why_absent(part, source, subfolder, revision) or error
    is_mistake = _is_mistake(reason)
    if not is_mistake and not isinstance(reason, OSError):
        return None
    local = Path(source).is_dir()
    wanted = '/'.join(name for name in (source, subfolder) if name)
    at = f' at revision {revision}' if revision and not local else ''
    place = 'this folder' if local else 'the Hugging Face Hub'
    return (UserError if is_mistake else OSError)(
        f'{wanted}: {part.__name__}{at} could not be loaded from {place} ({_in_one_line(reason)}); '
        'give the path of a local folder written by save_pretrained instead, with the sub-folders '
        'vae/, text_encoder/ and tokenizer/ (model.pretrained=/path/to/folder)'
    )


def _why_absent(part: type, source: str, subfolder: str, revision: str | None) -> Exception | None:
    """Ask for the files that a part begins with; returns the error if one cannot be had."""
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
    """Tell what fails in the same way next time from what may pass."""
    chain = list(_chain(error))
    statuses = [link.response.status_code for link in chain if _has_response(link)]  # type: ignore[attr-defined]
    if statuses:
        return any(400 <= status < 500 and status not in MAY_PASS for status in statuses)
    if any(isinstance(link, LocalEntryNotFoundError) for link in chain):
        return bool(constants.HF_HUB_OFFLINE)
    numbered = [link for link in chain if isinstance(link, OSError) and link.errno is not None]
    if numbered:
        return all(is_wrong_path(link) for link in numbered)
    # diffusers and transformers raise an OSError without a number where a folder lacks a file.
    return isinstance(error, OSError | HFValidationError | SafetensorError | json.JSONDecodeError)


def _in_one_line(error: BaseException) -> str:
    """Say in one line what an error is about; the Hub's client says it at the end of a chain."""
    chain = list(_chain(error))
    answers = [link for link in chain if _has_response(link)]
    teller = answers[0] if answers else chain[-1] if isinstance(error, LocalEntryNotFoundError) else error
    return textwrap.shorten(str(teller) or type(teller).__name__, 250, placeholder=' ...')


def _has_response(error: BaseException) -> bool:
    return getattr(error, 'response', None) is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
