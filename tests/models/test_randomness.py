"""Keyed randomness: known answers, the numbers that follow from them, and statistics of stratified numbers."""

import math

import pytest
import torch
from torch._inductor import metrics

from diffusion.models.randomness import (
    Draws,
    Purpose,
    draws_for,
    fusible_random_bits,
    philox,
    philox_rows,
    random_bits,
)

ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def draws(size: int, *, batch_index: int = 0) -> Draws:
    ids = torch.arange(size)
    return Draws(17, ids, torch.zeros_like(ids), torch.full_like(ids, batch_index))


@pytest.mark.parametrize(('counter', 'key', 'expected'), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    assert philox(counter, key) == expected
    first, second, third, fourth = (torch.tensor([word]) for word in counter)
    words = philox((first, second, third, fourth), key)
    assert tuple(int(word) for word in words) == expected


def test_philox_rows_gives_the_same_words_as_philox():
    counters = torch.tensor([counter for counter, _, _ in KNOWN_ANSWERS])
    rounds = torch.arange(10)[:, None, None]
    weyl = torch.tensor([0x9E3779B9, 0xBB67AE85])[None, :, None]
    keys = (torch.tensor([key for _, key, _ in KNOWN_ANSWERS]).T[None] + rounds * weyl) & ONES
    rows = philox_rows(counters[:, [0, 2]].T[:, None], counters[:, [1, 3]].T[:, None], keys[:, :, None])
    words = torch.stack(rows).permute(2, 3, 1, 0)
    assert words.reshape(3, 4).tolist() == [list(expected) for _, _, expected in KNOWN_ANSWERS]


LARGE_IDS = Draws(2**32 - 1, torch.tensor([5, 2**40 + 3]), torch.tensor([2, 0]), torch.tensor([9, 2**33]))


def test_words_are_those_of_philox_with_ids_as_counter_and_seed_and_purpose_as_key():
    assert [*map(int, Purpose)] == [*range(1, 15)], 'other values would change the random numbers of runs'
    for purpose in Purpose:
        for count in (1, 7, 10, 23):
            words = LARGE_IDS.words(purpose, count)
            for row in range(2):
                ids = (LARGE_IDS.sample_id, LARGE_IDS.epoch, LARGE_IDS.batch_index)
                sample, epoch, batch = (int(each[row]) & ONES for each in ids)
                key = (2**32 - 1, int(purpose))
                blocks = [philox((block, sample, epoch, batch), key) for block in range(-(-count // 4))]
                assert words[row].tolist() == [word for block in blocks for word in block][:count]


def test_fractions_integers_and_normals_follow_from_the_words():
    for purpose in Purpose:
        words = LARGE_IDS.words(purpose, 24).double()
        assert torch.equal(LARGE_IDS.uniform(purpose), words[:, 0] / 2**32)
        assert torch.equal(LARGE_IDS.integers(purpose, 1000), (words[:, 0] * 1000 / 2**32).long())
        # Box and Muller 1958, with the upper 24 bits of each word.
        first, second = (words // 2**8 / 2**24).unflatten(1, (-1, 2)).unbind(2)
        normals = torch.polar((-2 * (first + 2**-24).log()).sqrt(), 2 * math.pi * second)
        found = LARGE_IDS.normal(purpose, (2, 12)).flatten(1).double()
        torch.testing.assert_close(found, torch.view_as_real(normals).flatten(1), rtol=1e-5, atol=1e-5)


def test_fusible_draws_equal_the_others_to_the_last_bit():
    for shape in ((4, 8, 8), (3, 5, 5), (1, 1, 1)):
        count = math.prod(shape)
        normals = {Purpose.NOISE: count, Purpose.POSTERIOR: count, Purpose.OFFSET_NOISE: 3}
        for draw in (random_bits, fusible_random_bits):
            precomputed = LARGE_IDS.precompute_draws((Purpose.TIMESTEP, Purpose.CAPTION_DROPOUT), normals, draw)
            assert precomputed.ready_normals.keys() == normals.keys()
            for purpose in (Purpose.TIMESTEP, Purpose.CAPTION_DROPOUT, Purpose.FLIP):
                assert torch.equal(precomputed.uniform(purpose), LARGE_IDS.uniform(purpose))
                assert torch.equal(precomputed.integers(purpose, 1000), LARGE_IDS.integers(purpose, 1000))
                assert torch.equal(precomputed.words(purpose, 5), LARGE_IDS.words(purpose, 5))
            for purpose in (Purpose.NOISE, Purpose.POSTERIOR, Purpose.SAMPLING):
                assert torch.equal(precomputed.normal(purpose, shape), LARGE_IDS.normal(purpose, shape))
            assert torch.equal(*(each.normal(Purpose.OFFSET_NOISE, (3, 1, 1)) for each in (precomputed, LARGE_IDS)))


@pytest.mark.slow
def test_compiled_draws_of_a_step_take_two_kernels_and_equal_the_eager_ones():
    torch._dynamo.reset()
    compiled = torch.compile(fusible_random_bits, dynamic=True, backend='inductor')
    words = (Purpose.TIMESTEP, Purpose.CAPTION_DROPOUT)
    generated = [metrics.generated_kernel_count]
    for size, count in ((4, 256), (5, 256), (4, 192)):
        normals = {Purpose.NOISE: count, Purpose.POSTERIOR: count}
        eager = draws(size).precompute_draws(words, normals)
        found = draws(size).precompute_draws(words, normals, compiled)
        for purpose in normals:
            assert torch.equal(eager.ready_normals[purpose], found.ready_normals[purpose])
        for purpose in words:
            assert torch.equal(eager.integers(purpose, 1000), found.integers(purpose, 1000))
            assert torch.equal(eager.uniform(purpose), found.uniform(purpose))
        generated.append(metrics.generated_kernel_count)
    assert generated[1] - generated[0] <= 2  # one with torch 2.7, two with 2.14
    assert generated[-1] == generated[1], 'other shapes are not compiled again'


def test_stratified_numbers_are_one_per_part_in_any_order_of_samples():
    for size in (1, 3, 64, 2048):
        batch = draws(size, batch_index=5)
        numbers = batch.stratified(Purpose.STRATUM, Purpose.TIMESTEP)
        assert numbers.min() >= 0 and numbers.max() < 1
        assert sorted((numbers * size + 1e-12).long().tolist()) == list(range(size))
        order = torch.randperm(size, generator=torch.Generator().manual_seed(size))
        shuffled = Draws(17, batch.sample_id[order], batch.epoch, batch.batch_index)
        assert torch.equal(shuffled.stratified(Purpose.STRATUM, Purpose.TIMESTEP), numbers[order])


def test_each_stratified_number_is_uniform():
    """Checked for one sample over many batches of the same samples."""
    first = torch.stack([draws(8, batch_index=i).stratified(Purpose.STRATUM, Purpose.TIMESTEP) for i in range(600)])
    counts = torch.histc(first[:, 0].float(), bins=12, min=0, max=1)
    assert (counts - 50).abs().max() < 5 * math.sqrt(50)
    assert abs(torch.corrcoef(first[:, :2].T)[0, 1] + 1 / 7) < 0.12, 'two of eight without replacement'


def test_seed_out_of_range_is_rejected():
    with pytest.raises(ValueError, match=r'seed: -1 is not in \[0, 2\*\*32\)'):
        draws_for([0], seed=-1).normal(Purpose.NOISE, (4,))


def test_draws_on_every_device_equal_those_on_the_cpu(device):
    cpu = draws_for(range(16), seed=3)
    found = draws_for(range(16), seed=3, device=device)
    assert torch.equal(cpu.words(Purpose.NOISE, 1000), found.words(Purpose.NOISE, 1000).cpu())
    assert torch.equal(cpu.integers(Purpose.TIMESTEP, 1000), found.integers(Purpose.TIMESTEP, 1000).cpu())
    torch.testing.assert_close(cpu.normal(Purpose.NOISE, (1000,)), found.normal(Purpose.NOISE, (1000,)).cpu())
