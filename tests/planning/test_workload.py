"""How much work a recipe is: batches, shapes, what is stored."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion.config.image_shapes import Shape, square, write_buckets
from diffusion.config.recipe import StreamConfig
from diffusion.planning.workload import phase_of
from tests.planning.recipes import PHASES, both, phase, write_recipe

PHASE1 = phase()


def write_index(folder, samples, size=1000):
    folder.mkdir(parents=True)
    shard = f'{{"samples": {samples}, "raw_data": {{"bytes": {size * samples}}}}}'
    (folder / 'index.json').write_text(f'{{"shards": [{shard}]}}', encoding='utf-8')


def test_each_phase_counts_its_own_batches():
    first, second = both()
    assert (first.batches, second.batches) == (550_000, 850_000)
    assert (first.images, second.images) == (1_126_400_000, 1_740_800_000)


def test_the_published_phases_have_the_published_data():
    assert [work.different_images for work in both()] == [790_000_000, 300_000_000]
    assert phase(samples=5).different_images == 5
    changed = phase(overrides=['trainer.max_duration=550001ba'])
    assert (changed.samples, changed.different_images) == (None, changed.images)


@pytest.mark.parametrize(
    ('duration', 'batches'), [('80ba', 80), ('3ep', 3 * 12), ('0.5ep', 6), ('800sp', 100), ('804sp', 100)]
)
def test_durations(tmp_path, duration, batches):
    path = write_recipe(tmp_path, trainer={'max_duration': duration})
    assert phase(path, samples=100).batches == batches  # 12 batches of 8 in an epoch of 100


def test_an_epoch_is_as_long_as_the_recipe_says(tmp_path):
    path = write_recipe(tmp_path, trainer={'max_duration': '2ep'}, loader={'epoch_size': 64})
    assert phase(path).batches == 16


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'trainer': {'max_duration': '2ep'}}, 'how many pictures one has is not known here; give --samples'),
        ({'trainer': {'max_duration': '0.9dur'}}, "trainer.max_duration: '0.9dur' says no number of batches"),
        ({'trainer': {'max_duration': '30sec'}}, "'30sec' says no number of batches"),
        ({'trainer': {'max_duration': '7sp'}}, '7sp is not a whole batch of 8'),
        ({'trainer': {'max_duration': '???'}}, 'trainer.max_duration: is missing; say how long to train'),
        ({'global_batch': '???'}, 'global_batch: is still'),
        ({'streams': {'a': {'local': 'x', 'resolution': '???'}}}, 'streams.a.resolution: is still'),
        ({'task': 'generate', 'generate': {'prompts': ['a']}}, 'task: the plan is for training, not generate'),
    ],
)
def test_what_is_missing_is_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        phase(write_recipe(tmp_path, **change))


def test_a_recipe_without_a_duration_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r'trainer\.max_duration: is missing; say how long to train'):
        phase(write_recipe(tmp_path, trainer={'precision': 'fp32'}))


@pytest.mark.parametrize(
    ('change', 'encoding'),
    [
        ({}, 'pictures'),
        ({'dataset': {'name': 'latents'}}, 'latents'),
        ({'dataset': {'name': 'latents'}, 'precompute': {'latents': 'image+text'}}, 'latents'),  # tiny trains its own
        (
            {
                'dataset': {'name': 'latents'},
                'precompute': {'latents': 'image+text'},
                'model': {'name': 'tiny', 'train_text_encoder': False},
            },
            'latents+text',
        ),
    ],
)
def test_what_is_stored_is_what_the_recipe_says(tmp_path, change, encoding):
    assert phase(write_recipe(tmp_path, **change)).encoding == encoding


def test_storing_what_is_trained_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r'--stored latents\+text: this recipe trains its text encoder'):
        phase(write_recipe(tmp_path), encoding='latents+text')
    model = {'name': 'autoencoder'}
    with pytest.raises(ValueError, match='--stored latents: autoencoder trains on pictures'):
        phase(write_recipe(tmp_path, model=model), encoding='latents')


def test_shares_of_streams_follow_their_proportions(tmp_path):
    streams = {
        'small': {'local': 'x', 'resolution': 64, 'proportion': 3},
        'large': {'local': 'y', 'resolution': 128, 'proportion': 1},
    }
    work = phase(write_recipe(tmp_path, streams=streams))
    assert work.shapes == {square(64): 0.75, square(128): 0.25}
    alone = [phase(write_recipe(tmp_path, streams={'a': streams[name] | {'proportion': None}})) for name in streams]
    assert work.forward_flops == pytest.approx(0.75 * alone[0].forward_flops + 0.25 * alone[1].forward_flops)


def test_unknown_sizes_count_as_equal_parts_and_that_is_said(tmp_path):
    streams = {'a': {'local': 'x', 'resolution': 64}, 'b': {'local': 'y', 'resolution': 128}}
    work = phase(write_recipe(tmp_path, streams=streams))
    assert work.shapes == {square(64): 0.5, square(128): 0.5}
    assert work.notes == ('streams: their sizes are not known here; counted as equal parts',)


def test_local_sizes_share_by_samples(tmp_path):
    write_index(tmp_path / 'x', 30)
    write_index(tmp_path / 'y', 10)
    streams = {name: {'local': str(tmp_path / name), 'resolution': side} for name, side in (('x', 64), ('y', 128))}
    work = phase(write_recipe(tmp_path, streams=streams))
    assert work.shapes == {square(64): 0.75, square(128): 0.25}
    assert (work.samples, work.stored_bytes) == (40, 1000)


def test_aspect_buckets_are_the_shapes_they_hold(tmp_path):
    shapes = {Shape(64, 64): 20, Shape(96, 48): 20}
    for shape, samples in shapes.items():
        write_index(tmp_path / 'data' / str(shape), samples)
    write_buckets(tmp_path / 'data', 64, {shape: {'samples': samples} for shape, samples in shapes.items()})
    stream = {'local': str(tmp_path / 'data'), 'resolution': 64, 'aspects': True}
    work = phase(write_recipe(tmp_path, streams={'a': stream}))
    assert work.shapes == {Shape(64, 64): 0.5, Shape(96, 48): 0.5}
    assert work.largest_shape == Shape(96, 48)
    elsewhere = phase(write_recipe(tmp_path, streams={'a': stream | {'local': 'nowhere'}}))
    assert elsewhere.shapes == {square(64): 1.0}
    assert elsewhere.notes == ('streams.a: its shapes are not known here; counted as squares of 64 px',)


def test_a_shape_beside_its_resolution(tmp_path):
    stream = {'local': 'x', 'resolution': 64, 'shape': '96x48'}
    assert list(phase(write_recipe(tmp_path, streams={'a': stream})).shapes) == [Shape(96, 48)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_shares_add_up_to_one(proportions):
    streams = {
        f's{index}': StreamConfig(resolution=256 * (index + 1), local='x', proportion=proportion)
        for index, proportion in enumerate(proportions)
    }
    assert sum(phase_of(replace(PHASE1.recipe, streams=streams)).shapes.values()) == pytest.approx(1)


def test_precision_is_that_of_autocast():
    assert phase(PHASES[0]).autocast == 'bf16'
    assert phase(PHASES[0], ['trainer.precision=amp_fp16']).autocast == 'fp16'
    assert phase(PHASES[0], ['trainer.precision=fp32']).precision() == 'float32+compile'


@pytest.mark.parametrize(
    ('part', 'precision'),
    [('compile', 'half+compile'), ('low_precision_norms', 'half+low_precision_norms'), ('channels_last', 'half')],
)
def test_norms_are_narrow_where_they_are_compiled_or_asked_to_be(tmp_path, part, precision):
    path = write_recipe(tmp_path, speed={'preset': 'none', part: True})
    assert phase(path).precision() == precision
    algorithms = {'low_precision_groupnorm': {}, 'low_precision_layernorm': {}}
    path = write_recipe(tmp_path, speed={'preset': 'none'}, algorithms=algorithms)
    assert phase(path).precision() == 'half+low_precision_norms'


@pytest.mark.parametrize('strategy', ['ddp', 'fsdp1', 'fsdp2'])
@pytest.mark.parametrize(
    'speed', [{}, {'preset': 'none'}, {'compile': False}, {'preset': 'none', 'fused_optimizer': True}]
)
def test_parts_of_speed_are_decided_as_the_run_does(tmp_path, strategy, speed, monkeypatch):
    import torch

    from diffusion.training.components import effective_speed

    work = phase(write_recipe(tmp_path, speed=speed, parallelism={'strategy': strategy}))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    assert work.speed() == work.speed(strategy) == effective_speed(work.recipe)
