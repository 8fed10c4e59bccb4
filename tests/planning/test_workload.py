"""Amount of work in a recipe: batches, shapes, form of the stored samples."""

import pytest
from shards import write_buckets

from diffusion.config.image_shapes import Shape, square
from tests.planning.recipes import PHASES, YAMLS, both, phase, write_recipe, write_sd2_recipe

STORED_TEXT = {'dataset': {'name': 'latents'}, 'precompute': {'latents': 'image+text'}}


def write_index(folder, samples, size=1000):
    folder.mkdir(parents=True)
    shard = f'{{"samples": {samples}, "raw_data": {{"bytes": {size * samples}}}}}'
    (folder / 'index.json').write_text(f'{{"shards": [{shard}]}}', encoding='utf-8')


def test_published_phases_assume_the_published_number_of_images():
    assert [work.distinct_images for work in both()] == [790_000_000, 300_000_000]
    assert phase(samples=5).distinct_images == 5
    changed = phase(overrides=['trainer.max_duration=550001ba'])
    assert (changed.samples, changed.distinct_images) == (None, changed.images)


@pytest.mark.parametrize(
    ('duration', 'batches'), [('80ba', 80), ('3ep', 3 * 12), ('0.5ep', 6), ('8sp', 1), ('804sp', 100)]
)
def test_duration_is_converted_to_batches(tmp_path, duration, batches):
    path = write_recipe(tmp_path, trainer={'max_duration': duration})
    assert phase(path, samples=100).batches == batches  # an epoch of 100 samples has 12 batches of 8


def test_epoch_size_of_the_recipe_sets_the_length_of_an_epoch(tmp_path):
    assert phase(write_recipe(tmp_path, trainer={'max_duration': '2ep'}, loader={'epoch_size': 64})).batches == 16


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'trainer': {'max_duration': '2ep'}}, 'the number of images per epoch is unknown; pass --samples'),
        ({'trainer': {'max_duration': '???'}}, 'trainer.max_duration is missing; set the length of training, such as'),
        ({'trainer': {'max_duration': '0.9dur'}}, "trainer.max_duration: '0.9dur' has no known number of batches"),
        ({'trainer': {'max_duration': '7sp'}}, '7sp is less than one batch of 8'),
        ({'global_batch': '???'}, 'global_batch is not set .[?]{3}.; set it'),
        ({'streams': {'a': {'local': 'x', 'resolution': '???'}}}, 'streams.a.resolution is not set .[?]{3}.; set the'),
        ({'task': 'generate', 'generate': {'prompts': ['a']}}, 'task: the plan is for training, not generate'),
    ],
)
def test_error_names_the_missing_or_wrong_value(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        phase(write_recipe(tmp_path, **change))


@pytest.mark.parametrize(
    ('change', 'encoding'),
    [
        ({}, 'pictures'),
        ({'dataset': {'name': 'latents'}}, 'latents'),
        (STORED_TEXT, 'latents'),  # tiny trains its text encoder by default
        (STORED_TEXT | {'model': {'name': 'sd2'}, 'streams': {'a': {'local': 'x', 'resolution': 256}}}, 'latents+text'),
    ],
)
def test_stored_form_is_taken_from_the_recipe(tmp_path, change, encoding):
    assert phase(write_recipe(tmp_path, **change)).encoding == encoding


def test_outputs_of_trained_modules_cannot_be_stored(tmp_path):
    with pytest.raises(ValueError, match=r'--stored latents\+text: this recipe trains its text encoder'):
        phase(write_recipe(tmp_path), encoding='latents+text')
    model = {'name': 'autoencoder'}
    with pytest.raises(ValueError, match='--stored latents: autoencoder trains on images'):
        phase(write_recipe(tmp_path, model=model), encoding='latents')
    with pytest.raises(ValueError, match='--stored latents: the model is on pixels; use --stored pictures'):
        phase(YAMLS / 'speedrun.yaml', encoding='latents')


def test_shapes_follow_the_proportions_of_streams(tmp_path):
    streams = {
        'small': {'local': 'x', 'resolution': 256, 'proportion': 3},
        'large': {'local': 'y', 'resolution': 512, 'proportion': 1},
    }
    work = phase(write_sd2_recipe(tmp_path, streams=streams))
    assert work.shapes == {square(256): 0.75, square(512): 0.25}
    alone = [phase(write_sd2_recipe(tmp_path, streams={'a': streams[name] | {'proportion': None}})) for name in streams]
    assert work.forward_flops == pytest.approx(0.75 * alone[0].forward_flops + 0.25 * alone[1].forward_flops)


def test_streams_of_unknown_size_count_equally_with_a_note(tmp_path):
    streams = {'a': {'local': 'x', 'resolution': 256}, 'b': {'local': 'y', 'resolution': 512}}
    work = phase(write_sd2_recipe(tmp_path, streams=streams))
    assert work.shapes == {square(256): 0.5, square(512): 0.5}
    assert work.notes == ('streams: sizes unknown (shards not local); assumed equal proportions',)


def test_local_streams_count_by_number_of_samples(tmp_path):
    write_index(tmp_path / 'x', 30)
    write_index(tmp_path / 'y', 10)
    streams = {name: {'local': str(tmp_path / name), 'resolution': side} for name, side in (('x', 256), ('y', 512))}
    work = phase(write_sd2_recipe(tmp_path, streams=streams))
    assert work.shapes == {square(256): 0.75, square(512): 0.25}
    assert (work.samples, work.stored_bytes) == (40, 1000)


def test_aspect_buckets_contribute_their_shapes(tmp_path):
    shapes = {Shape(256, 256): 20, Shape(512, 128): 20}
    for shape, samples in shapes.items():
        write_index(tmp_path / 'data' / str(shape), samples)
    write_buckets(tmp_path / 'data', 256, {shape: {'samples': samples} for shape, samples in shapes.items()})
    stream = {'local': str(tmp_path / 'data'), 'resolution': 256, 'aspects': True}
    work = phase(write_sd2_recipe(tmp_path, streams={'a': stream}))
    assert work.shapes == {Shape(256, 256): 0.5, Shape(512, 128): 0.5}
    assert work.largest_shape == Shape(512, 128)
    elsewhere = phase(write_sd2_recipe(tmp_path, streams={'a': stream | {'local': 'nowhere'}}))
    assert elsewhere.shapes == {square(256): 1.0}
    assert elsewhere.notes == ('streams.a: shapes unknown (shards not local); assumed 256 px squares',)


def test_stream_shape_takes_precedence_over_resolution(tmp_path):
    stream = {'local': 'x', 'resolution': 256, 'shape': '512x128'}
    assert list(phase(write_sd2_recipe(tmp_path, streams={'a': stream})).shapes) == [Shape(512, 128)]


def test_precision_is_that_of_the_trainer():
    assert phase(PHASES[0]).autocast == 'bf16'
    assert phase(PHASES[0], ['trainer.precision=amp_fp16']).autocast == 'fp16'
    assert phase(PHASES[0], ['trainer.precision=fp32']).precision() == 'float32+compile'


@pytest.mark.parametrize(
    ('part', 'precision'),
    [('compile', 'half+compile'), ('low_precision_norms', 'half+low_precision_norms'), ('channels_last', 'half')],
)
def test_speed_settings_and_algorithms_select_the_precision(tmp_path, part, precision):
    path = write_recipe(tmp_path, speed={'preset': 'none', part: True})
    assert phase(path).precision() == precision
    algorithms = {'low_precision_groupnorm': {}, 'low_precision_layernorm': {}}
    path = write_recipe(tmp_path, speed={'preset': 'none'}, algorithms=algorithms)
    assert phase(path).precision() == 'half+low_precision_norms'


@pytest.mark.parametrize('strategy', ['ddp', 'fsdp2'])
@pytest.mark.parametrize(
    'speed', [{}, {'preset': 'none'}, {'compile': False}, {'preset': 'none', 'fused_optimizer': True}]
)
def test_effective_speed_settings_equal_those_of_a_run(tmp_path, strategy, speed, monkeypatch):
    import torch

    from diffusion.training.components import effective_speed

    work = phase(write_recipe(tmp_path, speed=speed, parallelism={'strategy': strategy}))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    assert work.speed() == work.speed(strategy) == effective_speed(work.recipe)
