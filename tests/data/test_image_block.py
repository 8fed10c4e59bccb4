"""Images decoded directly into the memory of their batch."""

import tracemalloc

import pytest
import torch

from diffusion.config.load import load
from diffusion.data.transforms import MAX_FREE, ImageBlock, as_batch
from diffusion.models import batch_keys
from diffusion.training.components import build_loader

SHAPE = (3, 4, 5)


def filled(block, value, shape=SHAPE):
    return {batch_keys.IMAGE: block.place(shape).fill_(value), batch_keys.SAMPLE_ID: value}


def test_batch_is_a_view_of_the_decoded_images():
    block = ImageBlock(3)
    items = [filled(block, value) for value in range(3)]
    batch = block.collate(items)
    assert batch[batch_keys.IMAGE].shape == (3, *SHAPE) and batch[batch_keys.IMAGE].is_contiguous()
    assert batch[batch_keys.IMAGE][:, 0, 0, 0].tolist() == batch[batch_keys.SAMPLE_ID].tolist() == [0, 1, 2]
    assert batch[batch_keys.IMAGE].data_ptr() == items[0][batch_keys.IMAGE].data_ptr()


def test_nonadjacent_images_are_copied():
    block = ImageBlock(2)
    first, skipped, second = (filled(block, value) for value in range(3))
    assert block.collate([first, second])[batch_keys.IMAGE][:, 0, 0, 0].tolist() == [0, 2]
    assert block.collate([second, first])[batch_keys.IMAGE][:, 0, 0, 0].tolist() == [2, 0]
    assert skipped[batch_keys.IMAGE].unique().tolist() == [1]
    separate = [torch.zeros(SHAPE, dtype=torch.uint8), torch.ones(SHAPE, dtype=torch.uint8)]
    assert torch.equal(as_batch(separate), torch.stack(separate))


def batches(block, shape=SHAPE):
    """Yield twelve batches of two images, filled with the number of the batch."""
    for number in range(12):
        yield block.collate([filled(block, number, shape), filled(block, number, shape)])[batch_keys.IMAGE]


@pytest.mark.parametrize('part', [lambda batch: batch, lambda batch: batch[1, 2, 3], lambda batch: batch.numpy()[0]])
def test_memory_in_use_is_never_overwritten(part):
    block = ImageBlock(2)
    kept = [part(batch) for batch in batches(block)]
    for number, values in enumerate(kept):
        assert (values == number).all()


def test_free_memory_is_reused_and_bounded():
    shape = (3, 256, 256)
    tracemalloc.start()
    try:
        block = ImageBlock(2)
        held = list(batches(block, shape))
        assert tracemalloc.get_traced_memory()[0] > len(held) * held[0].numel()
        size = held[0].numel()
        held.clear()
        free = tracemalloc.get_traced_memory()[0]
        assert size < free < (MAX_FREE + 1) * size
        batch = next(batches(block, shape))
        assert tracemalloc.get_traced_memory()[0] < free + size / 10
        del batch
    finally:
        tracemalloc.stop()


def test_partial_batch_and_new_shape_start_new_block():
    block = ImageBlock(3)
    assert block.collate([filled(block, 1)])[batch_keys.IMAGE].shape == (1, *SHAPE)
    other = block.collate([filled(block, value, (3, 8, 2)) for value in range(3)])[batch_keys.IMAGE]
    assert other.shape == (3, 3, 8, 2) and other[:, 0, 0, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize('workers', [0, 1])
def test_batches_of_loader_are_never_overwritten(write_recipe, pictures, workers):
    """A consumer may keep batches, so later batches must not overwrite them."""
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
