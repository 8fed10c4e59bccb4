"""Costs of TREAD, REPA, perceptual losses, Muon and LoRA in a plan, against what training counts."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from commands import output_of
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import alexnet
from transformers import Dinov2Config, Dinov2Model

from diffusion.config.load import load
from diffusion.config.recipe import Component
from diffusion.models import batch_keys
from diffusion.models.block_matrices import newton_schulz_flops
from diffusion.models.families.sd2.builder import tiny
from diffusion.models.token_routing import Route, TokenFusion
from diffusion.planning import published_runs
from diffusion.planning.memory import Setup, memory_of
from diffusion.planning.model_costs import PUBLISHED_ENCODERS, TokenRoute, encoder_sizes, route_of
from diffusion.planning.plan import make_plan
from diffusion.planning.throughput import TRANSFORMER_MFU, Assumptions, planned_speed, techniques_of
from diffusion.training import components
from diffusion.training.muon import muon_groups, orthogonalize
from tests.planning.recipes import A100, GPUS, YAMLS, phase, write_recipe

H200 = GPUS['h200']
STAGES = [YAMLS / 'speedrun.yaml', YAMLS / 'speedrun_1024.yaml']
ROUTE = {'start': 1, 'end': 3, 'fraction': 0.5}
SMALL = {'hidden_size': 32, 'num_heads': 2, 'depth': 3, 'text_width': 32, 'text_layers': 1}


@pytest.fixture(scope='module')
def networks(tmp_path_factory):
    """AlexNet's convolutions with random weights in a file, and a folder of a miniature DINOv2."""
    folder = tmp_path_factory.mktemp('networks')
    torch.save({f'features.{name}': each for name, each in alexnet().features.state_dict().items()}, folder / 'alex')
    config = Dinov2Config(hidden_size=32, num_attention_heads=2, num_hidden_layers=2, image_size=28, patch_size=14)
    Dinov2Model(config).save_pretrained(folder / 'dino')
    return folder


@pytest.fixture(scope='module')
def pixel_recipe(networks, tmp_path_factory):
    dino = str(networks / 'dino')
    perceptual = {'lpips_network': 'alex', 'lpips_backbone': str(networks / 'alex'), 'encoder': dino}
    model = {
        **{'name': 'tiny_prx', 'vae': 'pixels', 'patch_size': 8, 'train_text_encoder': False, **SMALL},
        'objective': {'path': 'flow', 'prediction_type': 'sample'},
        'representation_alignment': {'encoder': dino, 'block': 2, 'hidden_size': 48},
        'perceptual_losses': perceptual | {'features_side': 28},
    }
    sections = {'optimizer': {'name': 'muon', 'lr': 0.001}, 'speed': {'preset': 'none'}}
    algorithms = {'tread': ROUTE, 'ema': {}}
    return write_recipe(tmp_path_factory.mktemp('recipe'), model=model, algorithms=algorithms, **sections)


@pytest.mark.cpu_seconds(10)
def test_plan_counts_the_flops_that_training_reports(pixel_recipe):
    """Remove one technique after another, down to plain training; the model is the recipe's own."""
    work: Any = phase(pixel_recipe)
    model: Any = components.build_model(load(pixel_recipe))
    batch = {
        batch_keys.IMAGE: torch.zeros(2, 3, 64, 64, dtype=torch.uint8),
        batch_keys.INPUT_IDS: torch.zeros(2, 1, 16, dtype=torch.int64),
    }
    assert replace(work, route=None).flops() == model.flops_per_batch(batch) / 2
    model.route_tokens(Route(**ROUTE))
    assert work.flops() == model.flops_per_batch(batch) / 2
    assert work.trained_parameters == sum(each.numel() for each in model.parameters() if each.requires_grad)
    del model._frozen['perceptual_loss']
    model._flops._counted.clear()
    assert replace(work, perceptual=None).flops() == model.flops_per_batch(batch) / 2
    frozen = sum(each.numel() for part in model._frozen.values() for each in part.parameters())
    memory = memory_of(work, Setup(1, 8, work.recipe.parallelism))
    networks = work.perceptual.facts['frozen_parameters']
    assert (memory.encoders, memory.weights) == (2 * frozen + 4 * networks, 4 * work.trained_parameters)
    without = memory_of(replace(work, perceptual=None), Setup(1, 8, work.recipe.parallelism))
    assert memory.activations - without.activations == 8 * work.perceptual.activations(work.largest_shape, 'half').kept
    assert memory.activations > without.activations


def test_sprint_adds_its_fusion_layer_to_the_route(pixel_recipe):
    model = Component('tiny_prx', {'sprint': {'start': 1}})
    assert route_of(model, {}, 6) == TokenRoute(1, 4, 0.75, fuses=True)
    tread = TokenRoute(1, 3, 0.5)
    assert route_of(Component('tiny_prx'), {'route': Component('tread', {'start': 1})}, 6) == tread
    assert [tread.fraction_after(block) for block in range(4)] == [1, 0.5, 0.5, 1]
    work = phase(pixel_recipe)
    assert work.route is not None
    fused = replace(work, route=replace(work.route, fuses=True))
    layer = TokenFusion(work.model.facts['token_width'])
    assert fused.trained_parameters - work.trained_parameters == sum(each.numel() for each in layer.parameters())
    assert fused.training_flops - work.training_flops == 3 * 2 * layer.linear.weight.numel() * 8 * 8
    assert {each.name for each in techniques_of(fused)} & {'TREAD', 'SPRINT'} == {'SPRINT'}


def test_perceptual_losses_take_three_passes_of_each_network(pixel_recipe):
    """Forward on prediction and image, backward to the prediction alone; of LPIPS's linear layers two."""
    model: Any = components.build_model(load(pixel_recipe))
    loss = model._frozen['perceptual_loss']
    images = torch.zeros(1, 3, 64, 64)
    with FlopCounterMode(display=False) as one, torch.no_grad():
        loss.lpips.net(torch.zeros(1, 3, 32, 32))
        loss.features.of_pixels(images, (2, 2))
    with FlopCounterMode(display=False) as step:
        loss(images.clone().requires_grad_(), images).sum().backward()
    # torch does not count fused attention on a CPU, 1% of this tiny encoder.
    planned = phase(pixel_recipe).perceptual_flops
    assert planned == pytest.approx(step.get_total_flops(), rel=0.02)
    assert planned == pytest.approx(3 * one.get_total_flops(), rel=0.02)


def test_muon_flops_are_those_of_its_matrix_products(pixel_recipe):
    muon, _ = muon_groups(components.build_model(load(pixel_recipe)))
    with FlopCounterMode(display=False) as counter:
        for each, parts in zip(muon['params'], muon['parts'], strict=True):
            for part in each.detach().flatten(1).chunk(parts):
                orthogonalize(part[None], steps=5)
    work = phase(pixel_recipe)
    assert work.optimizer_flops == counter.get_total_flops()
    assert newton_schulz_flops(3, 5) == newton_schulz_flops(5, 3)
    assert max(muon['parts']) == 3, 'queries, keys and values'
    assert 0 < phase(pixel_recipe, ['optimizer.split_projections=false']).optimizer_flops < work.optimizer_flops
    assert phase(pixel_recipe, ['optimizer.name=adamw']).optimizer_flops == 0
    seconds = 8 / planned_speed(work, Assumptions(A100, 1, mfu=0.5)).images_per_second
    assert seconds == pytest.approx((8 * work.flops() + work.optimizer_flops) / (0.5 * 312e12))


@pytest.mark.slow
def test_lora_has_states_of_its_own_parameters_and_two_thirds_of_the_flops(tmp_path):
    settings = {'block_out_channels': [32, 64], 'text_layers': 1, 'train_text_encoder': False}
    lora = {'lora': {'rank': 2}, 'init_from': 'runs/other'}
    work = phase(write_recipe(tmp_path, model={'name': 'tiny', **settings}, algorithms={'ema': {}}, **lora))
    model = tiny(**settings)
    components.add_lora(work.recipe, model)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert work.trained_parameters == trained
    batch = {
        batch_keys.IMAGE: torch.zeros(1, 3, 64, 64, dtype=torch.uint8),
        batch_keys.INPUT_IDS: torch.zeros(1, 1, 16, dtype=torch.int64),
    }
    assert work.flops() == model.flops_per_batch(batch)
    assert work.training_flops == 2 * work.forward_flops
    weights = 4 * sum(each.numel() for each in model.denoiser.parameters())
    memory = memory_of(work, Setup(1, 8, work.recipe.parallelism))
    assert memory.optimizer == 8 * trained and memory.averages == memory.gradients == 4 * trained
    assert memory.weights == weights
    assert any('a LoRA' in note for note in work.notes)
    sizes = make_plan([work], Assumptions(A100, 1), gpus=GPUS).phases[0].sizes
    found = (sizes.weights, sizes.with_optimizer, sizes.with_averages)
    assert found == (weights, weights + 8 * trained, weights + 12 * trained)


def test_lora_of_sd2_is_planned_from_the_published_throughput():
    """The denoiser's seconds per image fall to two thirds, and those of the encoders stay."""
    options = ['device_train_microbatch_size=8', 'global_batch=64']
    work, full = phase(YAMLS / 'lora.yaml', options), phase(YAMLS / 'finetune.yaml', options)
    assert work.trained_parameters == 3_319_808
    speed, slower = (planned_speed(each, Assumptions(A100, 8)) for each in (work, full))
    assert slower.images_per_second == pytest.approx(290 / 1.4)
    assert speed.images_per_second == pytest.approx(290 / (2 / 3 + 0.4))
    assert speed.source.endswith('/ 1.07 for online encoders and frozen weights')
    assert full.training_flops == 1.5 * work.training_flops
    memory, whole = (memory_of(each, Setup(8, 8, each.recipe.parallelism)) for each in (work, full))
    assert memory.activations < whole.activations


@pytest.mark.parametrize(('recipe', 'passes'), [('finetune.yaml', 4), ('lora.yaml', 3)])
def test_pairs_are_two_images_with_a_pass_of_the_reference_each(recipe, passes):
    options = ['device_train_microbatch_size=8', 'global_batch=64']
    dpo = ['dataset.name=preference_pairs', 'algorithms.dpo.name=diffusion_dpo']
    plain, pairs = phase(YAMLS / recipe, options), phase(YAMLS / recipe, [*options, *dpo])
    assert pairs.training_flops == 2 * passes * plain.forward_flops
    assert pairs.flops() - pairs.training_flops == 2 * (plain.flops() - plain.training_flops)
    assert planned_speed(pairs, Assumptions(A100, 8)).source.startswith('assumed')
    assert any('both of its images are trained' in note for note in pairs.notes)
    memory, single = (memory_of(each, Setup(8, 8, each.recipe.parallelism)) for each in (pairs, plain))
    assert (memory.activations, memory.batch) == (2 * single.activations, 2 * single.batch)
    phases = make_plan([plain, pairs], Assumptions(A100, 8), gpus=GPUS).phases
    assert [len(each.alternatives) for each in phases] == [3, 1], 'training on pairs reads no stored latents'
    with pytest.raises(ValueError, match='--stored latents: diffusion_dpo trains on pairs of images'):
        phase(YAMLS / recipe, [*options, *dpo], encoding='latents')
    copied = 0 if recipe == 'lora.yaml' else 4 * plain.trained_parameters
    assert memory.encoders == single.encoders + copied


def test_speedrun_takes_the_published_24_hours_at_the_assumed_utilization():
    """The utilization that is assumed for transformers is derived from this run."""
    phases = [phase(path, samples=8_700_000) for path in STAGES]
    plan = make_plan(phases, Assumptions(H200, 32, price=2.0), gpus=GPUS)
    run = published_runs.PRX_IN_24_HOURS
    assert plan.published is run
    assert plan.training.hours == pytest.approx(24, abs=0.1)
    assert plan.training.usd == pytest.approx(run.usd, rel=0.005)
    flops = sum(each.executed_flops() * each.images for each in phases)
    assert flops / (24 * 3600 * 32 * H200.peak_flops('bf16')) == pytest.approx(TRANSFORMER_MFU, abs=0.0005)
    assert make_plan(phases[:1], Assumptions(H200, 8), gpus=GPUS).published is run
    assert make_plan([phase(STAGES[0], ['global_batch=512'])], Assumptions(H200, 8), gpus=GPUS).published is None


def test_plan_of_the_speedrun_as_json_has_the_published_run_and_the_techniques(capsys):
    words = [*map(str, STAGES), '--gpu', 'h200', '--gpus', '32', '--price', '2']
    assert 'speedrun, speedrun_1024: the number of distinct images is unknown' in output_of(capsys, 'plan', *words)
    plan = json.loads(output_of(capsys, 'plan', *words, '--json'))
    assert plan['published']['usd'] == 1536
    first, second = plan['phases']
    names = [technique['name'] for technique in first['techniques']]
    assert names == ['TREAD', 'REPA', 'perceptual losses', 'Muon', 'all of them']
    assert [technique['name'] for technique in second['techniques']] == [names[0], *names[2:]]
    assert [data['encoding'] for data in first['data']] == ['pictures']
    parts = ('training', 'text_encoder', 'representation_alignment', 'perceptual_losses')
    assert first['flop_per_image']['total'] == sum(first['flop_per_image'][part] for part in parts)


def test_techniques_are_compared_at_equal_cost(pixel_recipe):
    work = phase(pixel_recipe)
    found = {technique.name: technique for technique in techniques_of(work)}
    tread, repa = found['TREAD'], found['REPA']
    dense = replace(work, route=None)
    rates = [planned_speed(each, Assumptions(A100, 8, mfu=0.3)).images_per_second for each in (work, dense)]
    assert tread.speedup == pytest.approx(rates[0] / rates[1]) and tread.speedup > 1
    assert tread.images_without == pytest.approx(work.images * rates[1] / rates[0])
    # The alignment's MLP sees the tokens of block 2, which is within the route.
    assert tread.flops_per_image < work.forward_flops * 3 - dense.forward_flops * 3
    assert repa.flops_per_image == work.alignment_flops()
    assert repa.published[0].speedup == pytest.approx(3.46 / 3.95)
    assert repa.published[0].images_without == pytest.approx(work.images * 3.95 / 3.46)
    two = replace(work, perceptual=None, optimizer_flops=0)
    assert [each.name for each in techniques_of(two)] == ['TREAD', 'REPA', 'all of them']
    assert techniques_of(phase()) == ()


def test_contrastive_flow_matching_has_its_published_throughput_and_no_flops(capsys):
    work = phase(YAMLS / 'prx_256.yaml')
    recipe = replace(work.recipe, algorithms={'contrastive': Component('contrastive_flow_matching')})
    (technique,) = techniques_of(replace(work, recipe=recipe))
    assert (technique.flops_per_image, technique.speedup) == (0, 1)
    assert technique.published[0].speedup == pytest.approx(3.75 / 3.95)
    words = [str(YAMLS / 'prx_256.yaml'), 'algorithms.contrastive_flow_matching={}']
    row = ' '.join(output_of(capsys, 'plan', *words).partition('without contrastive flow matching')[2].split())
    assert row.startswith('+0.0 x 1.00 ') and row.partition('100,000 ')[2].startswith('x 1.05, 105,333 batches')


def test_sizes_of_published_encoders_are_those_of_transformers(tmp_path):
    """The numbers of parameters are the published ones; an unknown repository is taken for DINOv2 base, with a note."""
    from diffusion.models.cost_counting import AlignmentCounter

    assert all(each['hidden_size'] == 64 * each['num_attention_heads'] for each in PUBLISHED_ENCODERS.values())
    millions = {'dinov2-base': 86.6, 'dinov2-giant': 1136.5, 'dinov3-vitl16-pretrain-lvd1689m': 303.1}
    millions |= {'dinov2-small': 22.06, 'dinov2-with-registers-large': 304.4}
    for name, expected in millions.items():
        sizes = PUBLISHED_ENCODERS[f'facebook/{name}']
        counter = AlignmentCounter(encoder=sizes, hidden_size=8, token_width=8, pixels_per_token=16)
        assert counter.facts()['frozen_parameters'] / 1e6 == pytest.approx(expected, rel=0.002)
    Dinov2Config(image_size=518).save_pretrained(tmp_path)
    notes = []
    base = PUBLISHED_ENCODERS['facebook/dinov2-base']
    assert encoder_sizes(str(tmp_path), notes, where='encoder') == base and not notes
    (tmp_path / 'config.json').write_text('{"model_type": "vit"}')
    with pytest.raises(ValueError, match='encoder: .* is not a dinov2, dinov2_with_registers, dinov3_vit'):
        encoder_sizes(str(tmp_path), notes, where='encoder')
    assert encoder_sizes('somebody/vit', notes, where='encoder') == base
    assert notes == [
        'encoder: the sizes of somebody/vit are not known without the network; assumed those of facebook/dinov2-base'
    ]
