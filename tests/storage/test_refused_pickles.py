"""Files with a pickle that wants to run code: each reader says so, and runs nothing."""

import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from diffusion.checkpointing.checkpoint_weights import read_content
from diffusion.checkpointing.sharded_state import read_all_tensors, shapes
from diffusion.errors import UserError
from diffusion.evaluation.feature_networks import Inception
from diffusion.models.perceptual_losses import PerceptualLosses, lpips_network


@dataclass
class Calls:
    """Object whose pickle runs a command."""

    command: str

    def __reduce__(self):
        return os.system, (self.command,)


def write_checkpoint(folder: Path, harmful: Calls) -> None:
    torch.save({'state': {'model': {}, 'x': harmful}}, folder / 'ba1.pt')


def write_sharded(folder: Path) -> None:
    state_dict_saver.save({'model.weight': torch.zeros(2)}, storage_writer=FileSystemWriter(folder), no_dist=True)


def write_index(folder: Path, harmful: Calls) -> None:
    write_sharded(folder)
    (folder / '.metadata').write_bytes(pickle.dumps(harmful))


def write_shard(folder: Path, harmful: Calls) -> None:
    write_sharded(folder)
    (shard,) = folder.glob('*.distcp')
    torch.save({'x': harmful}, folder / 'longer')
    content = (folder / 'longer').read_bytes()
    shard.write_bytes(content)
    # The index names the bytes of the tensor in the shard.
    index = pickle.loads((folder / '.metadata').read_bytes())
    for info in index.storage_data.values():
        info.offset, info.length = 0, len(content)
    (folder / '.metadata').write_bytes(pickle.dumps(index))


def write_weights(folder: Path, harmful: Calls) -> None:
    torch.save({'features.0.weight': harmful}, folder / 'weights.pth')


def read_lpips(folder: Path) -> None:
    settings = PerceptualLosses(lpips_network='alex', lpips_backbone=str(folder / 'weights.pth'), features_weight=0.0)
    lpips_network(settings)


READERS = {
    'checkpoint': (write_checkpoint, lambda folder: read_content(folder / 'ba1.pt')),
    'index': (write_index, shapes),
    'shard': (write_shard, lambda folder: read_all_tensors(folder, 'model.')),
    'lpips': (write_weights, read_lpips),
    'inception': (write_weights, lambda folder: Inception(str(folder / 'weights.pth'))),
}


@pytest.mark.filterwarnings('ignore')  # torch warns about the protocol of the pickle
@pytest.mark.parametrize('reader', READERS)
def test_pickle_that_wants_to_run_code_is_called_that(tmp_path, reader):
    write, read = READERS[reader]
    ran = tmp_path / 'ran'
    write(tmp_path, Calls(f'touch {ran}'))
    with pytest.raises(UserError, match=r'wants to run code when it is read \(its pickle calls posix\.system\).*; \w+'):
        read(tmp_path)
    assert not ran.exists()


def test_damaged_file_is_not_called_code(tmp_path):
    (tmp_path / 'weights.pth').write_bytes(b'<html>')
    with pytest.raises(UserError, match='cannot be read as weights'):
        read_lpips(tmp_path)


@pytest.mark.filterwarnings('ignore:torch.distributed is disabled')
@pytest.mark.parametrize('module', ['pathlib', 'pathlib._local'], ids=['other versions', 'Python 3.13'])
def test_index_of_any_version_of_python_is_read(tmp_path, module):
    write_sharded(tmp_path)
    expected = shapes(tmp_path)
    index = pickle.loads((tmp_path / '.metadata').read_bytes())
    # Protocol 2 has the names as lines of text.
    path = re.compile(rb'cpathlib(\._local)?\nPosixPath\n')
    content, count = path.subn(f'c{module}\nPosixPath\n'.encode(), pickle.dumps(index, protocol=2))
    assert count == 1
    (tmp_path / '.metadata').write_bytes(content)
    assert shapes(tmp_path) == expected
