"""Planned throughput, hours and dollars against published figures."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusion.config.image_shapes import Shape, square
from diffusion.planning import published_runs
from diffusion.planning.throughput import (
    ASSUMED_MFU,
    THROUGHPUT,
    Assumptions,
    planned_speed,
    precompute_cost,
    read_measured_speed,
    training_cost,
)
from tests.planning.recipes import A100, GPUS, both, phase, write_sd2_recipe

TABLE = [(8, 81.33, 31_230), (32, 20.06, 30_805), (128, 5.51, 33_874)]
"""Published number of A100s, days and dollars of both phases with precomputed latents and text embeddings."""


def total(phases, gpus, **keywords):
    given = Assumptions(A100, gpus, price=2.0, **keywords)
    costs = [training_cost(each, planned_speed(each, given), given) for each in phases]
    return costs[0] + costs[1]


@pytest.mark.parametrize(('gpus', 'days', 'dollars'), TABLE)
def test_days_and_dollars_match_the_published_table(gpus, days, dollars):
    cost = total(both(encoding='latents+text'), gpus)
    assert cost.days == pytest.approx(days, abs=0.01)
    assert cost.usd == pytest.approx(dollars, abs=2)


def test_total_flops_match_the_published_recipe():
    flops = sum(each.training_flops * each.images for each in both())
    assert flops == pytest.approx(4.81e21, rel=0.001)
    assert flops / (23_835 * 3600 * A100.peak_flops('bf16')) == pytest.approx(0.18, abs=0.0005)
    larger = phase(overrides=['model.resolution=512', 'streams.laion.resolution=512'])
    assert larger.training_flops == both()[1].training_flops


def test_throughput_published_by_bria_gives_its_mfu():
    """BRIA reported 1.8 batches of 2048 per second on 32 A100s at 256 px."""
    speed = planned_speed(phase(encoding='latents+text'), Assumptions(A100, 32, images_per_second=1.8 * 2048))
    assert speed.images_per_second == pytest.approx(3686.4)
    assert speed.mfu == pytest.approx(3686.4 * 3 * 181.09e9 / (32 * 312e12), rel=1e-4)
    assert speed.mfu == pytest.approx(0.2006, abs=0.0002)


def test_precomputing_takes_the_published_hours():
    hours = [precompute_cost(each, 'latents+text', Assumptions(A100, 128, price=2.0)).gpu_hours for each in both()]
    assert sum(hours) == pytest.approx(published_runs.PRECOMPUTE_HOURS, rel=0.01)


@pytest.mark.parametrize(('resolution', 'gpus', 'mfu'), [(0, 8, 0.239), (0, 128, 0.158), (1, 8, 0.28)])
def test_published_throughput_gives_the_published_mfu(resolution, gpus, mfu):
    speed = planned_speed(both(encoding='latents+text')[resolution], Assumptions(A100, gpus))
    assert speed.mfu == pytest.approx(mfu, abs=0.001)


def test_published_figures_are_those_of_the_sources():
    """MosaicML's throughput table (part 2), PRX Part 3 and the README of i1."""
    assert {side: [*known.items()] for side, known in published_runs.IMAGES_PER_SECOND.items()} == {
        256: [(8, 1100), (16, 2180), (32, 4080), (64, 8530), (128, 11600)],
        512: [(8, 290), (16, 585), (32, 1195), (64, 2340), (128, 4590)],
    }
    assert published_runs.throughput_hours() == pytest.approx(16_937, abs=0.5)
    prx, i1 = published_runs.PRX_IN_24_HOURS, published_runs.I1_QUICK_START
    assert (prx.parameters, prx.stages, prx.usd) == (1_177_215_744, {(512, 102_400_000), (1024, 10_240_000)}, 1536)
    assert (i1.parameters, i1.stages, i1.gpu_hours) == (1_034_264_432, {(256, 256_000_000)}, 1036.8)
    assert published_runs.published_samples([square(512)], 850_000 * 2048, 865_910_724) == 300_000_000


def test_mfu_and_images_per_second_are_consistent():
    work = phase()
    speed = planned_speed(work, Assumptions(GPUS['h100-sxm'], 8, mfu=0.4))
    assert speed.mfu == pytest.approx(0.4)
    inverse = planned_speed(work, Assumptions(GPUS['h100-sxm'], 8, images_per_second=speed.images_per_second))
    assert inverse.mfu == pytest.approx(0.4)


@pytest.mark.parametrize(('microbatch', 'gpus', 'bound'), [(16, 8, True), (64, 8, False), (64, 128, True)])
def test_small_microbatches_on_fast_gpus_are_bound_by_launching_kernels(microbatch, gpus, bound):
    work = phase(overrides=[f'device_train_microbatch_size={microbatch}'], encoding='latents+text')
    speed = planned_speed(work, Assumptions(GPUS['h200'], gpus))
    assert ('launching kernels' in speed.source) == bound
    # 2048 images on 128 GPUs are 16 on each; 1 / 0.111 microbatches per second.
    expected = gpus * 16 / 0.111 if bound else gpus * 0.25 * 989e12 / 543.27e9
    assert speed.images_per_second == pytest.approx(expected, rel=1e-4)
    assert 'launching' not in planned_speed(work, Assumptions(GPUS['a10g'], gpus)).source


def test_cuda_graphs_need_less_time_of_the_host():
    overrides = ['device_train_microbatch_size=16', 'parallelism.strategy=ddp', 'parallelism.checkpoints=whole']
    plain, graphs = (
        planned_speed(phase(overrides=[*overrides, *more], encoding='latents+text'), Assumptions(GPUS['h200'], 128))
        for more in ([], ['speed.cuda_graphs=true'])
    )
    assert graphs.images_per_second / plain.images_per_second == pytest.approx(0.111 / 0.058)
    assert '111 ms' in plain.source and '58 ms' in graphs.source


def test_online_encoders_slow_down_as_published_or_by_flops():
    images, latents, precomputed = (phase(encoding=encoding) for encoding in ('pictures', 'latents', 'latents+text'))
    rates = [planned_speed(work, Assumptions(A100, 128)).images_per_second for work in (images, latents, precomputed)]
    assert rates[2] / rates[0] == pytest.approx(1.4)
    assert rates[2] / rates[1] == pytest.approx(1.083, abs=0.001)
    assumed = Assumptions(A100, 128, mfu=0.3)
    by_flops = [planned_speed(work, assumed).images_per_second for work in (images, precomputed)]
    assert by_flops[1] / by_flops[0] == pytest.approx(1.585, abs=0.001)


def test_recomputation_costs_one_forward_pass_and_lowers_mfu():
    plain = planned_speed(phase(encoding='latents+text'), Assumptions(A100, 8, mfu=0.4))
    work = phase(overrides=['parallelism.activation_checkpointing=true'], encoding='latents+text')
    recomputing = planned_speed(work, Assumptions(A100, 8, mfu=0.4))
    assert plain.images_per_second / recomputing.images_per_second == pytest.approx(4 / 3)
    assert recomputing.mfu == pytest.approx(0.3)


@pytest.mark.parametrize(
    ('gpu', 'overrides'),
    [('h100-sxm', ['device_train_microbatch_size=128']), ('a100-80gb', ['trainer.precision=fp32'])],
)
def test_mfu_is_assumed_if_no_figure_was_published(gpu, overrides):
    speed = planned_speed(phase(overrides=overrides, encoding='latents+text'), Assumptions(GPUS[gpu], 8))
    assert 'assumed: 25% of peak' in speed.source
    assert speed.mfu <= ASSUMED_MFU * (1 + 1e-9)


@given(st.integers(1, 4096))
def test_interpolated_throughput_is_between_its_neighbors(gpus):
    known = published_runs.IMAGES_PER_SECOND[256]
    rate = published_runs.interpolate(known, gpus)
    below, above = [n for n in known if n <= gpus], [n for n in known if n >= gpus]
    assert not below or rate >= known[max(below)]
    assert not above or rate <= known[min(above)]
    if not below or not above:
        end = known[min(known)] / min(known) if not below else known[max(known)] / max(known)
        assert rate / gpus == pytest.approx(end)
    for shapes in ([square(256), square(512)], [Shape(256, 512)]):
        assert published_runs.images_per_second(shapes, gpus, published_runs.SD2_PARAMETERS) is None


def write_run(folder, values):
    write_sd2_recipe(folder)
    lines = [
        json.dumps({'step': step, 'throughput/device/samples_per_sec': value}) for step, value in enumerate(values)
    ]
    (folder / 'metrics.jsonl').write_text('\n'.join([*lines, '{"step": 9, "loss": 1.0}', '{"step": 1']) + '\n')
    return folder


def test_measured_throughput_scales_with_number_of_gpus_and_flops_of_another_recipe(tmp_path):
    run = write_run(tmp_path, [0.0, 1.0, 30.0, 31.0])
    measured, same = read_measured_speed(run), phase(run / 'recipe.yaml')
    speed = planned_speed(same, Assumptions(A100, 16, measured=measured))
    assert speed.images_per_second == pytest.approx(16 * 30)
    assert 'measured: 30.0 images/s per device in ' in speed.source
    larger = phase(run / 'recipe.yaml', ['model.resolution=512', 'streams.a.resolution=512'])
    speed = planned_speed(larger, Assumptions(A100, 1, measured=measured))
    assert speed.images_per_second == pytest.approx(30 * same.flops() / larger.flops())


def test_run_without_logged_throughput_is_an_error(tmp_path):
    run = write_run(tmp_path, [])
    with pytest.raises(ValueError, match=r'has no throughput/device/samples_per_sec; it is logged after'):
        read_measured_speed(run)
    (run / 'metrics.jsonl').unlink()
    with pytest.raises(ValueError, match=r'--from-run: .*metrics\.jsonl cannot be read .*loggers\.metrics_file'):
        read_measured_speed(run)
    with pytest.raises(ValueError, match=r'--from-run: .*nowhere has no recipe\.yaml; use the folder of a run'):
        read_measured_speed(tmp_path / 'nowhere')


def test_throughput_metric_has_the_name_of_breakdown_and_speed_monitor():
    """Check the name against Composer's source and against the breakdown callback."""
    from pathlib import Path

    import composer.callbacks.speed_monitor as monitor

    from diffusion.profiling.breakdown import BreakdownReport

    assert f"'{THROUGHPUT}': dev_samples_per_sec" in Path(monitor.__file__).read_text('utf-8')
    assert BreakdownReport(10, 640, 2, 0.1, 0.1, None, None, None, {}).metrics()[THROUGHPUT] == 320
