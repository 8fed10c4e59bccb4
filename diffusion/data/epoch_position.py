"""Derive the training data's position from Composer's timestamp, both in checkpoints and at the start of an epoch.

Composer 0.32.1 asks a StreamingDataset for its own position when it saves. At the end of an epoch the two disagree: the
timestamp is at the start of the next epoch, but the dataset is still in the finished one, because it counts an epoch
only when iteration begins. The checkpoint then holds sample 0 of the finished epoch, and the resumed run serves that
epoch twice (Streaming issue 869, Composer issue 3725). The dataset also counts iterations that are not training, such
as an evaluation on the training data, and a new dataset for a second `fit` counts from 0.

`keep_data_position` wraps the Composer methods that transfer the position between the two. It can be removed once
Composer saves the timestamp's epoch and sets the dataset's epoch when an epoch begins.
"""

import functools
from collections.abc import Iterator
from typing import Any

from composer import Trainer
from composer.core import State, Timestamp
from composer.core.types import TrainerMode
from composer.utils import dist
from streaming import StreamingDataset
from streaming.base.world import World

from diffusion.compatibility.private_names import private_attribute, set_private_attribute
from diffusion.errors import DataError


def streaming_dataset(state: State) -> StreamingDataset | None:
    dataset = private_attribute(state, '_dataset_of')(state.train_dataloader)
    return dataset if isinstance(dataset, StreamingDataset) else None


def position_to_save(dataset: StreamingDataset, timestamp: Timestamp) -> dict[str, Any]:
    """Return the dataset's state dict at the timestamp's position; DataError if the dataset is in another epoch."""
    epoch, sample = timestamp.epoch.value, timestamp.sample_in_epoch.value
    found = dataset.state_dict(sample, from_beginning=True)
    # Do not compare at batch 0: the dataset stays in the finished epoch until `place_dataset` sets the next one.
    if timestamp.batch_in_epoch.value and found['epoch'] != epoch:
        raise DataError(
            f'checkpoint not saved: the run is in epoch {epoch}, but its training data is in epoch {found["epoch"]}. '
            'Something else iterates over the training dataset; give that code a separate dataset'
        )
    return found | {'epoch': epoch}


def place_dataset(dataset: StreamingDataset, timestamp: Timestamp) -> None:
    """Make the dataset's next iteration start at the position of the timestamp; a collective call."""
    wanted = timestamp.epoch.value, timestamp.sample_in_epoch.value
    found = private_attribute(dataset, '_resume')(World.detect(), dataset.next_epoch)
    # The ranks of a node share the position in memory: all of them must have read it before any of them writes it.
    dist.barrier()
    if found == wanted:
        return
    # Set this too: Streaming ignores a position whose epoch is before `next_epoch`.
    dataset.next_epoch = wanted[0]
    dataset.load_state_dict(dataset.state_dict(wanted[1], from_beginning=True) | {'epoch': wanted[0]})
    dist.barrier()


def is_last_batch(state: State) -> bool:
    end = state.max_duration
    assert end is not None
    if state.timestamp >= end:
        return True
    # At BATCH_CHECKPOINT, Composer's timestamp does not yet count the epoch that ends with this batch.
    last_of_epoch = state.timestamp.batch_in_epoch.value == state.dataloader_len
    return last_of_epoch and state.timestamp.to_next_epoch() >= end


def keep_data_position() -> None:
    """Make Composer's timestamp the only source of the data position, for every Trainer in this process."""
    collect = private_attribute(State, '_dataset_state_dict')
    iterate = private_attribute(Trainer, '_iter_dataloader')
    spin = private_attribute(Trainer, '_spin_dataloaders_to_cur_epoch')
    if hasattr(collect, '__wrapped__'):  # already wrapped by an earlier call
        return

    @functools.wraps(collect)
    def collect_at_timestamp(state: State) -> dict[str, Any]:
        dataset = streaming_dataset(state)
        if dataset is None:
            return collect(state)
        return {'train': position_to_save(dataset, state.timestamp), 'eval': {}}

    @functools.wraps(iterate)
    def iterate_from_timestamp(trainer: Trainer, trainer_mode: TrainerMode) -> Iterator[Any]:
        dataset = streaming_dataset(trainer.state) if trainer_mode == TrainerMode.TRAIN else None
        if dataset is not None:
            place_dataset(dataset, trainer.state.timestamp)
        yield from iterate(trainer, trainer_mode)

    @functools.wraps(spin)
    def spin_other_loaders(trainer: Trainer) -> None:
        if streaming_dataset(trainer.state) is not None:
            trainer.state.dataset_resumption['train'] = True
        spin(trainer)

    set_private_attribute(State, '_dataset_state_dict', collect_at_timestamp)
    set_private_attribute(Trainer, '_iter_dataloader', iterate_from_timestamp)
    set_private_attribute(Trainer, '_spin_dataloaders_to_cur_epoch', spin_other_loaders)
