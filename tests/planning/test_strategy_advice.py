"""Communication of the parallelism strategies, and which one a plan recommends."""

from dataclasses import replace

import pytest

from diffusion.planning.gpus import find_gpu
from diffusion.planning.memory import Setup, strategies
from diffusion.planning.plan import make_plan
from diffusion.planning.strategy_advice import advice, communication_bytes, recommended
from diffusion.planning.throughput import Assumptions
from tests.planning.recipes import A100, DDP, GPUS, PHASES, RESHARDED, SHARDED, phase

SD2 = 865_910_724
ONCE, EACH = (phase(PHASES[1], [f'speed.reduce_once={value}']) for value in ('true', 'false'))


def ring_bytes(devices, size, *, passes):
    """Return the bytes that a device sends, by walking around a ring: a chunk per step, devices - 1 steps per pass."""
    return sum(size / devices for _ in range(passes) for _ in range(devices - 1))


def fits_of(gpu, gpus=128, overrides=()):
    return make_plan([phase(PHASES[0], overrides)], Assumptions(gpu=gpu, gpus=gpus), gpus=GPUS).phases[0].fit


@pytest.mark.parametrize(('microbatch', 'batches'), [(16, 1), (8, 2), (4, 4)])
def test_communication_equals_a_walk_around_the_ring(microbatch, batches):
    def sent(work, settings):
        return communication_bytes(work, Setup(128, microbatch, settings))

    gather, reduce = (ring_bytes(128, width * SD2, passes=1) for width in (2, 4))
    for work in (ONCE, EACH):  # DDP reduces once per batch in any case
        assert sent(work, DDP) == pytest.approx(ring_bytes(128, 4 * SD2, passes=2))
    assert sent(ONCE, SHARDED) == pytest.approx(gather + reduce)
    assert sent(EACH, SHARDED) == pytest.approx(batches * (gather + reduce))
    assert sent(ONCE, RESHARDED) == pytest.approx((1 + batches) * gather + reduce)
    assert sent(EACH, RESHARDED) == pytest.approx(batches * (2 * gather + reduce))


def test_replicas_gather_within_a_group_and_reduce_shards_across_groups():
    within = ring_bytes(8, (2 + 4) * SD2, passes=1)
    for work, microbatch, reductions in ((ONCE, 16, 1), (EACH, 4, 4)):
        sent = communication_bytes(work, Setup(128, microbatch, replace(SHARDED, replicas=16)))
        assert sent == pytest.approx(reductions * (within + ring_bytes(16, 4 * SD2 / 8, passes=2)))


def test_sharding_is_recommended_where_ddp_does_not_fit():
    gpu = find_gpu('v100-16gb', GPUS)
    fits = fits_of(gpu, overrides=['trainer.precision=amp_fp16'])
    assert [fit.fits for fit in fits if fit.setup.parallelism.strategy == 'ddp'] == [False]
    best, found = recommended(fits), advice(fits, gpu)
    assert best is fits[0] and found is not None
    assert 'ddp does not fit' in found and found.endswith("(the recipe's)")


def test_no_strategy_is_recommended_on_one_device_or_if_none_fits():
    assert advice(fits_of(A100, gpus=1, overrides=['device_train_microbatch_size=16']), A100) is None
    fits = tuple(replace(fit, fits=False) for fit in fits_of(A100))
    assert recommended(fits) is None and advice(fits, A100) is None


@pytest.mark.parametrize(('devices', 'hybrid'), [(8, False), (16, True), (12, False), (128, True)])
def test_sharding_within_nodes_is_listed_for_several_whole_nodes(devices, hybrid):
    found = strategies(Setup(devices, 16, SHARDED), devices_per_node=8)
    assert any(setup.parallelism.replicas == devices // 8 > 1 for setup in found) is hybrid
