"""Verify checkpoints, and read their weights without executing pickled code."""

import logging
import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from diffusion.checkpointing import checkpoint_store, sharded_state
from diffusion.checkpointing.checkpoint_store import (
    STATE,
    DamagedCheckpoint,
    FileRecord,
    read_receipt,
    read_with_retries,
)
from diffusion.checkpointing.sharded_state import data_files
from diffusion.compatibility.torch_versions import code_to_run
from diffusion.errors import UserError

log = logging.getLogger(__name__)

TRAINING_ONLY = ('feature_projector.',)
"""Name prefixes of tensors that only exist in models trained with representation alignment."""
Weights = Literal['ema', 'training']
OTHER_FILE = 'use an earlier checkpoint, or copy it again'
FILES_AT_ONCE = 8
"""Number of checkpoint files that are read concurrently."""


class NoAverages(UserError):
    """Error for a checkpoint without averaged weights.

    Attributes:
        reason: Text that names the checkpoint and says why it has no averages.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f'{reason}; use --weights training')
        self.reason = reason


def verify_checkpoint(checkpoint: Path) -> None:
    """Check every file of a checkpoint against its receipt. Reads all data, several files concurrently.

    Raises:
        DamagedCheckpoint: A file is damaged; the message names its path and the difference.
        OSError: A file cannot be read after several tries, which does not imply damage.
    """
    receipt = read_with_retries(lambda: read_receipt(checkpoint))

    def check(name: str) -> None:
        read_with_retries(lambda: _check_file(checkpoint / name, receipt['files'][name]))

    # xxhash and file reads release the GIL. The first failure ends the check: files that no thread has started to read
    # are skipped.
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        try:
            for _ in pool.map(check, receipt['files']):
                pass
        finally:
            pool.shutdown(cancel_futures=True)
    if checkpoint_store.INDEX in receipt['files']:
        missing = sorted(read_with_retries(lambda: data_files(checkpoint)) - receipt['files'].keys())
        if missing:
            raise DamagedCheckpoint(
                f'{checkpoint / checkpoint_store.RECEIPT}: does not list {missing[0]}, which its index names'
            )


def _check_file(path: Path, expected: FileRecord) -> None:
    """Raise DamagedCheckpoint if a file is missing, or has another size or hash than expected."""
    try:
        # Ask the open file for its size: opening a file makes a network file system ask its server, while stat() may be
        # cached.
        with path.open('rb') as file:
            size = os.fstat(file.fileno()).st_size
        if size != expected.bytes:
            raise DamagedCheckpoint(f'{path}: {size} bytes, expected {expected.bytes}')
        if checkpoint_store.hash_file(path) != expected:
            raise DamagedCheckpoint(f'{path}: the content has changed since it was written (xxh3_128 differs)')
    except FileNotFoundError as error:
        if not path.parent.is_dir():
            raise  # the whole folder has vanished: a file system fault, not damage
        raise DamagedCheckpoint(f'{path}: the file does not exist') from error


def read_content(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's pickle, with tensors on the CPU, without executing pickled code.

    Args:
        path: A checkpoint folder, whose sharded tensors are not in the pickle, or a file of Composer's own saver.

    Raises:
        UserError: The file is damaged, or contains objects of classes that are not on the safe list.
        OSError: The file cannot be read after several tries.
    """
    file = path / STATE if path.is_dir() else path
    content = read_pickle(file)
    if not isinstance(content, dict) or not isinstance(content.get('state'), dict):
        raise UserError(f'{file}: contains no state; is it a Composer checkpoint?')
    return content


def read_pickle(file: Path) -> Any:
    """Return the content of any file written by `torch.save`; see `read_content`."""
    return read_with_retries(lambda: _read_file(file))


def _read_file(file: Path) -> Any:
    _check_archive(file)
    try:
        # With mmap, a caller that needs only a few tensors does not copy a large file into memory.
        with torch.serialization.safe_globals(_safe_globals()):
            return torch.load(file, map_location='cpu', weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        if (code := code_to_run(error)) is None:
            raise UserError(f'{file}: not a checkpoint (its pickle is damaged); use another one') from error
        raise UserError(
            f'{file}: not loaded, because it {code}; use a checkpoint from a source that you trust. If that name is a '
            'class of your own, allow it with torch.serialization.add_safe_globals in a module that the recipe '
            'imports'
        ) from error
    except RuntimeError as error:
        # torch has no error class for a damaged zip archive, but the message contains the name of its reader.
        if 'PytorchStreamReader' not in str(error):
            # If a file cannot be opened or mapped, the message ends with the errno: "... (116)".
            if (number := re.search(r'\((\d+)\)$', str(error).strip().splitlines()[0])) is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error
        reason = str(error).strip().splitlines()[0]
        raise UserError(f'{file}: not readable ({reason}); it may be truncated, {OTHER_FILE}') from error


def _check_archive(file: Path) -> None:
    """Raise UserError unless a file is a complete, uncompressed zip archive, as written by torch.save."""
    # For a truncated archive, torch.load raises many types of errors that cannot be told apart from bugs.
    with file.open('rb') as opened:
        start, size = opened.read(4), opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - 22))  # size of a zip file's end-of-central-directory record
        end = opened.read(4)
    if start != b'PK\x03\x04':
        raise UserError(f'{file}: not a checkpoint (it is not a zip archive of torch.save); use another one')
    if end != b'PK\x05\x06':
        raise UserError(f'{file}: not readable (the end of the archive is missing); it is truncated, {OTHER_FILE}')
    try:
        with zipfile.ZipFile(file) as archive:
            compressed = [each.filename for each in archive.infolist() if each.compress_type != zipfile.ZIP_STORED]
    except zipfile.BadZipFile as error:
        raise UserError(f'{file}: not readable ({error}); it may be truncated, {OTHER_FILE}') from error
    # torch would decompress an entry of any size into memory before looking at it.
    if compressed:
        raise UserError(
            f'{file}: {compressed[0]} is compressed, but torch.save never compresses; use another checkpoint'
        )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Verify a checkpoint folder, or read a file of Composer's own saver; return its `state` with the model's weights.

    Raises:
        UserError: The checkpoint is damaged, has no model, or access is denied.
    """
    try:
        # Files of Composer's own saver have no receipt.
        if path.is_dir():
            verify_checkpoint(path)
        state = read_content(path)['state']
        if is_sharded(path):
            state['model'] = sharded_state.read_all_tensors(path, 'model.')
    except PermissionError as error:
        raise UserError(f'{path}: cannot be read ({error}); ask its owner for read access') from error
    if 'model' not in state:
        raise UserError(f'{path}: contains no model; is it a Composer checkpoint?')
    return state


def is_sharded(path: Path) -> bool:
    """Return True if each rank saved its own shards of a checkpoint's tensors, False if rank 0 saved full tensors."""
    return (path / sharded_state.INDEX).is_file()


def weights_of(path: Path, which: Weights | None = None) -> tuple[dict[str, Tensor], Weights]:
    """Return weights by parameter name, and their kind, `ema` or `training`; None selects `ema` if there are averages.

    Raises:
        UserError: The checkpoint is damaged, or lacks requested averages; the message says when averaging starts.
    """
    state = read_checkpoint(path)
    model = dict(state['model'])
    ema = dict(state.get('algorithms', [])).get('EMA', {})
    has_average = has_averages(state)
    if which == 'training' or (which is None and not has_average):
        return model, 'training'
    if not has_average:
        start = ema.get('ema_start')
        why = f'its EMA would have started at {start}' if start else 'its run had no EMA'
        raise NoAverages(f'{path}: it has no averaged weights ({why})')
    # Averages only include trained parameters; the rest, such as buffers, comes from the training weights.
    averages = (
        ema['averages']['ema'] if ema.get('averages') else sharded_state.read_all_tensors(path, 'averages.EMA.ema.')
    )
    return model | averages, 'ema'


def has_averages(state: Mapping[str, Any]) -> bool:
    """Return True if a checkpoint's state contains weights averaged by `algorithms.ema`."""
    ema = dict(state.get('algorithms', [])).get('EMA', {})
    return bool(ema.get('averages') or ema.get('sharded_averages'))


def check_architecture(
    own: Mapping[str, torch.Size],
    stored: Mapping[str, torch.Size],
    where: str,
    *,
    way_out: str = 'use the model settings that it was saved with',
) -> None:
    """Check that a model's tensors have the same names and shapes as those of a checkpoint.

    Raises:
        UserError: The architectures differ; the message lists the first differences.
    """
    missing, unknown = sorted(set(own) - set(stored)), sorted(set(stored) - set(own))
    reshaped = [name for name in own if name in stored and own[name] != stored[name]]
    if missing or unknown or reshaped:
        lists = [('tensors missing', missing), ('unknown tensors', unknown)]
        details = [f'{len(names)} {label} ({", ".join(names[:2])})' for label, names in lists if names]
        details += [f'{name} is {tuple(stored[name])}, expected {tuple(own[name])}' for name in reshaped[:2]]
        raise UserError(f'{where}: the architecture differs from the recipe: {"; ".join(details)}; {way_out}')


def load_weights(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Copy weights into a model whose tensors must have exactly these names and shapes.

    Only the tensors of `TRAINING_ONLY` may be missing on either side: extra ones are ignored, missing ones keep their
    values.

    Raises:
        UserError: The names or shapes differ.
    """
    own = model.state_dict()
    weights = with_own_training_parts(weights, own, where)
    shapes, stored = ({name: each.shape for name, each in tensors.items()} for tensors in (own, weights))
    check_architecture(shapes, stored, where)
    model.load_state_dict(weights)


def with_own_training_parts(weights: Mapping[str, Tensor], own: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return weights without the `TRAINING_ONLY` tensors that the model (`own`) lacks, plus those that only it has."""
    extra = {name for name in weights.keys() ^ own.keys() if name.startswith(TRAINING_ONLY)}
    if extra:
        log.info('%s: %d tensors of parts that only training uses are not loaded', where, len(extra))
    kept = {name: tensor for name, tensor in weights.items() if name not in extra}
    return kept | {name: own[name] for name in extra & own.keys()}


def _safe_globals() -> list[Any]:
    """Return the classes allowed in checkpoints besides tensors: versions, times and NumPy's random states."""
    # NumPy 1 and 2 define the function that unpickles arrays in different modules, so get it from a pickled array.
    reconstruct = np.zeros(1).__reduce__()[0]
    dtypes = [type(np.dtype(name)) for name in ('bool', 'uint32', 'int64', 'float32', 'float64')]
    return [TorchVersion, timedelta, np.ndarray, np.dtype, reconstruct, *dtypes]
