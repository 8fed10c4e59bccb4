"""Classify errors that occur while pretrained models are loaded as user mistakes or disk faults."""

import errno
import json
import pickle
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from diffusion.compatibility.torch_versions import code_to_run
from diffusion.errors import UserError, is_wrong_path

TO_FIX = (
    'use a local folder written by save_pretrained instead, with the subfolders vae/, text_encoder/ and tokenizer/ '
    '(model.pretrained=/path/to/folder)'
)
TOKENIZER_FILE = 'tokenizer.json'


def way_out(subfolder: str) -> str:
    """Return advice on loading a model or tokenizer without the Hub; an empty `subfolder` is the top level."""
    return TO_FIX if subfolder else 'use a local folder written by save_pretrained instead'


def loading_error(
    error: Exception, part: type, source: str, *, subfolder: str, revision: str | None
) -> UserError | OSError | None:
    """Return a clearer error than the one that `part.from_pretrained` raised; None if that error shows a bug in code.

    A UserError means that a file is missing, not accessible or damaged; an OSError that the disk cannot be read.
    """
    # `from_pretrained` raises OSError, ValueError or TypeError both for missing files and for an unreadable disk. The
    # reason is in the chain of causes, except if a tokenizer lacks files: then transformers raises a TypeError that
    # does not mention them. Therefore look for missing files first.
    reason = _find_missing_file(part, source, subfolder) or error
    is_mistake = _is_mistake(reason)
    if not is_mistake and not isinstance(reason, OSError):
        return None
    local = Path(source).is_dir()
    full_name = '/'.join(name for name in (source, subfolder) if name)
    at_revision = f' at revision {revision}' if revision and not local else ''
    place, repair = (
        ('this folder', '') if local else ('the cache of the Hugging Face Hub', 'remove it to fetch it again; or ')
    )
    return (UserError if is_mistake else OSError)(
        f'{full_name}: {part.__name__}{at_revision} could not be loaded from {place} ({_summary(reason)}); '
        f'{repair}{TO_FIX}'
    )


@contextmanager
def reading_weights(where: str, weights: str) -> Iterator[None]:
    """Context that converts errors of reading a weight file to a UserError, which advises to download the file.

    Args:
        where: Name of the file for messages, such as `networks.hpsv2: HPS_v2.1_compressed.pt`.
        weights: Published weights that the file should contain, such as `the weights of torchvision`.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f'{where} does not exist; download {weights}, or correct the path') from error
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        if (code := code_to_run(error)) is not None:
            raise UserError(f'{where} is not loaded, because it {code}; download {weights}') from error
        first = ' '.join(str(error).splitlines()[:2]).partition('. ')[0]
        shortened = textwrap.shorten(first, 250, placeholder=' ...')
        raise UserError(f'{where} cannot be read as weights ({shortened}); download them again') from error


def check_config(path: Path) -> None:
    """Raise UserError if a configuration file exists and is not a JSON object; the libraries' errors are unclear."""
    if not path.is_file():
        return
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f'{path}: is not valid JSON ({_summary(error)}); {TO_FIX}') from error
    if not isinstance(content, dict):
        raise UserError(f'{path}: has {type(content).__name__}, expected a JSON object; {TO_FIX}')


def missing_tokenizer_file(part: type, source: str, subfolder: str) -> FileNotFoundError | None:
    if not issubclass(part, PreTrainedTokenizerBase) or not Path(source).is_dir():
        return None
    folder = Path(source, subfolder)
    names = list(part.vocab_files_names.values())
    # A fast tokenizer (from the package tokenizers) only needs tokenizer.json.
    if TOKENIZER_FILE in names and (folder / TOKENIZER_FILE).is_file():
        return None
    return _missing_file(folder / name for name in names if name != TOKENIZER_FILE)


def _find_missing_file(part: type, source: str, subfolder: str) -> FileNotFoundError | None:
    if issubclass(part, PreTrainedTokenizerBase):
        return missing_tokenizer_file(part, source, subfolder)
    return _missing_file([Path(source, subfolder, 'config.json')]) if Path(source).is_dir() else None


def _missing_file(paths: Iterable[Path]) -> FileNotFoundError | None:
    missing = next((path for path in paths if not path.is_file()), None)
    return None if missing is None else FileNotFoundError(errno.ENOENT, 'No such file', str(missing))


def _is_mistake(error: BaseException) -> bool:
    """Return True if the user must fix a loading error, because a retry would fail in the same way."""
    numbered = [link for link in _chain(error) if isinstance(link, OSError) and link.errno is not None]
    if numbered:
        return all(is_wrong_path(link) for link in numbered)
    # If a folder lacks a file, diffusers and transformers raise an OSError without errno.
    return isinstance(error, OSError | SafetensorError | json.JSONDecodeError)


def _summary(error: BaseException) -> str:
    return textwrap.shorten(str(error) or type(error).__name__, 250, placeholder=' ...')


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
