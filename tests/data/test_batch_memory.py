"""Pictures that are decoded to where their batch will be."""

import pytest
import torch

from diffusion.config.load import load
from diffusion.data.batch_memory import MOST_KEPT, BatchMemory, side_by_side
from diffusion.models import batch_keys
from diffusion.training.components import build_loader

SHAPE = (3, 4, 5)


def filled(memory, value, shape=SHAPE):
    return {batch_keys.IMAGE: memory.place(shape).fill_(value), batch_keys.SAMPLE_ID: value}


def test_a_batch_is_where_its_pictures_were_written():
    memory = BatchMemory(3)
    items = [filled(memory, value) for value in range(3)]
    batch = memory.collate(items)
    assert batch[batch_keys.IMAGE].shape == (3, *SHAPE) and batch[batch_keys.IMAGE].is_contiguous()
    assert batch[batch_keys.IMAGE][:, 0, 0, 0].tolist() == batch[batch_keys.SAMPLE_ID].tolist() == [0, 1, 2]
    assert batch[batch_keys.IMAGE].data_ptr() == items[0][batch_keys.IMAGE].data_ptr()


def test_pictures_from_elsewhere_are_copied_together():
    memory = BatchMemory(2)
    first, skipped, second = (filled(memory, value) for value in range(3))
    assert memory.collate([first, second])[batch_keys.IMAGE][:, 0, 0, 0].tolist() == [0, 2]
    assert memory.collate([second, first])[batch_keys.IMAGE][:, 0, 0, 0].tolist() == [2, 0]
    assert skipped[batch_keys.IMAGE].unique().tolist() == [1]
    apart = [torch.zeros(SHAPE, dtype=torch.uint8), torch.ones(SHAPE, dtype=torch.uint8)]
    assert torch.equal(side_by_side(apart), torch.stack(apart))


def test_a_batch_that_somebody_has_is_never_written_to():
    memory, kept = BatchMemory(2), []
    for number in range(4 * MOST_KEPT):
        kept.append(memory.collate([filled(memory, number), filled(memory, number)])[batch_keys.IMAGE])
    assert [batch.unique().tolist() for batch in kept] == [[number] for number in range(4 * MOST_KEPT)]


def test_a_view_of_one_picture_keeps_its_batch():
    memory = BatchMemory(2)
    row = memory.collate([filled(memory, 7), filled(memory, 7)])[batch_keys.IMAGE][1, 2, 3]
    for number in range(4 * MOST_KEPT):
        memory.collate([filled(memory, number), filled(memory, number)])
    assert row.tolist() == [7] * 5


def test_memory_that_nobody_has_is_used_again():
    memory, places = BatchMemory(2), set()
    for number in range(10):
        batch = memory.collate([filled(memory, number), filled(memory, number)])
        places.add(batch[batch_keys.IMAGE].data_ptr())
        del batch
    assert len(places) == 1


def test_a_short_batch_and_another_shape_begin_anew():
    memory = BatchMemory(3)
    assert memory.collate([filled(memory, 1)])[batch_keys.IMAGE].shape == (1, *SHAPE)
    other = memory.collate([filled(memory, value, (3, 8, 2)) for value in range(3)])[batch_keys.IMAGE]
    assert other.shape == (3, 3, 8, 2) and other[:, 0, 0, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize('workers', [0, 1])
def test_batches_of_a_loader_stay_what_they_were(write_recipe, pictures, workers):
    """The consumer may keep them: what is served later must not be written over them."""
    streams = {f'px{side}': {'local': str(folder), 'resolution': side} for side, folder in pictures.items()}
    loader = build_loader(load(write_recipe(streams=streams, loader={'num_workers': workers})))
    batches, copies = [], []
    for _ in range(2):
        for batch in loader:
            batches.append(batch[batch_keys.IMAGE])
            copies.append(batch[batch_keys.IMAGE].clone())
    assert len(batches) == 16
    assert all(torch.equal(batch, copy) for batch, copy in zip(batches, copies, strict=True))
    assert len({copy.double().sum().item() for copy in copies}) > 8
