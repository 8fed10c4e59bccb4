"""Diffusion-DPO against the paper's formula in plain PyTorch, and its use in recipes."""

import copy
import shutil

import model_batches
import pytest
import torch
from callbacks.guarded_run import At
from composer.core import Event
from ranks import assert_same_weights, largest_difference, read_losses
from recipe_files import write_yaml
from shards import draw_image

from diffusion.algorithms.diffusion_dpo import DiffusionDPO, both_images
from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_weights import weights_of
from diffusion.config.load import load
from diffusion.config.recipe import LoraConfig
from diffusion.errors import UserError
from diffusion.loggers.metrics_file import read_metrics
from diffusion.models import batch_keys
from diffusion.models.lora import add_lora
from diffusion.models.objective import Objective
from diffusion.models.randomness import Purpose
from diffusion.storage.mds import write_dataset
from diffusion.training.train import train

OBJECTIVES = {
    'epsilon': Objective(),
    'v': Objective(prediction_type='v_prediction'),
    'flow': Objective(path='flow', prediction_type='velocity'),
}
BETA = 300.0


def pairs_of(model) -> dict[str, torch.Tensor]:
    batch = model_batches.batch_of(model, [f'image {index}' for index in range(4)], width=32, height=32)
    return batch | {batch_keys.REJECTED_IMAGE: batch[batch_keys.IMAGE].flip(0, 2)}


def trainable(model) -> dict[str, torch.Tensor]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def moved_from_reference(model, *, lora: bool) -> torch.nn.Module:
    """Make a model that has left its reference, and return a plain copy of the reference."""
    plain = copy.deepcopy(model.denoiser)
    if lora:
        add_lora(model.denoiser, LoraConfig(rank=2, alpha=3.0, targets=['to_q', 'conv1']), seed=5)
        model.denoiser_is_frozen = True
        model.text.requires_grad_(False)
    else:
        model.keep_reference()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in trainable(model).items():
            if not lora or 'lora_B' in name:
                weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return plain


def one_step(model, *, microbatch: int | None = None) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Train one batch of pairs; return what was logged, and the gradients."""
    gradients: dict[str, torch.Tensor] = {}

    def keep() -> None:
        gradients.update({name: each.grad + 0 for name, each in trainable(model).items() if each.grad is not None})

    settings = {'algorithms': [DiffusionDPO(BETA)], 'callbacks': [At(Event.AFTER_TRAIN_BATCH, 0, keep)]}
    logger = model_batches.fit(model, pairs_of(model), device_train_microbatch_size=microbatch, **settings)
    return {name: float(values[0][1]) for name, values in logger.data.items()}, gradients


def papers_loss(model, plain, batch, objective: Objective) -> tuple[torch.Tensor, list[bool]]:
    """The mean of eq. 14 of Wallace et al. (for a flow, of Liu et al. 2025), with the constants of their code."""
    draws = model.draws_of(batch)
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    text = model.embed(batch[batch_keys.INPUT_IDS]).embeds
    noise = draws.normal(Purpose.NOISE, (4, 4, 4))
    if objective.is_flow:
        time = draws.uniform(Purpose.TIMESTEP).float()
        timesteps, signal, sigma = time * 1000, 1 - time, time
    else:
        timesteps = draws.integers(Purpose.TIMESTEP, 1000)
        share = torch.cumprod(1 - betas, 0)[timesteps].float()
        signal, sigma = share.sqrt(), (1 - share).sqrt()
    errors = {}
    for name in (batch_keys.IMAGE, batch_keys.REJECTED_IMAGE):
        latents = model.latents_of({batch_keys.IMAGE: batch[name]}, draws)
        for index in range(4):
            clean, eps = latents[index], noise[index]
            noisy = signal[index] * clean + sigma[index] * eps
            expected = {
                'epsilon': eps,
                'v_prediction': signal[index] * eps - sigma[index] * clean,
                'velocity': eps - clean,
            }[objective.prediction_type]
            for network in (model.denoiser, plain):
                with torch.set_grad_enabled(network is not plain):
                    found = network(noisy[None], timesteps[index], text[index : index + 1]).sample[0]
                errors[name, index, network is plain] = (found - expected).pow(2).mean()
    losses, right = [], []
    for index in range(4):
        preferred, rejected = (
            errors[name, index, False] - errors[name, index, True]
            for name in (batch_keys.IMAGE, batch_keys.REJECTED_IMAGE)
        )
        losses.append(-torch.log(torch.sigmoid(-BETA / 2 * (preferred - rejected))))
        right.append(bool(preferred < rejected))
    return torch.stack(losses).mean(), right


@pytest.mark.parametrize('objective', OBJECTIVES)
@pytest.mark.parametrize('lora', [False, True], ids=['full', 'lora'])
def test_loss_and_gradients_equal_the_papers_formula(make_model, objective, lora):
    model = make_model(objective=OBJECTIVES[objective], caption_dropout=0.0, layers_per_block=0)
    plain = moved_from_reference(model, lora=lora)
    batch = pairs_of(model)
    loss, right = papers_loss(model, plain, batch, OBJECTIVES[objective])
    expected = dict(zip(trainable(model), torch.autograd.grad(loss, [*trainable(model).values()]), strict=True))
    logged, gradients = one_step(model, microbatch=2)
    assert logged['loss/train/total'] == pytest.approx(loss.item(), rel=1e-4)
    assert abs(loss.item() - 0.6931) > 0.01 and logged['dpo/implicit_accuracy'] == sum(right) / 4
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, each in expected.items():
        torch.testing.assert_close(gradients[name], each, rtol=1e-3, atol=1e-4 * largest, msg=name)
    assert gradients.keys() == expected.keys() and largest > 0


def test_training_starts_at_the_reference_and_moves_toward_preferred_images(make_model):
    model = make_model(caption_dropout=0.5)
    model.keep_reference()
    assert not any('reference' in name for name in model.state_dict())
    frozen = (*model.text.parameters(), *model._frozen['reference'].parameters())
    assert not any(each.requires_grad for each in frozen)
    batch = {batch_keys.INPUT_IDS: torch.zeros(4, 1, 16, dtype=torch.int64)}
    batch |= {batch_keys.LATENT_MOMENTS: torch.empty(4, 4, 4, 4), batch_keys.TEXT_EMBEDS: torch.empty(4, 16, 32)}
    pairs_flops = model.flops_per_batch(batch | {batch_keys.REJECTED_IMAGE: torch.empty(4)})
    assert 3 * pairs_flops == 2 * 4 * model.flops_per_batch(batch), 'two images with a pass of the reference each'
    logged, _ = one_step(model)
    assert logged['loss/train/total'] == pytest.approx(0.6931, abs=1e-3)
    assert logged['dpo/preferred_error_change'] == logged['dpo/rejected_error_change'] == 0


@pytest.fixture(scope='module')
def content(tmp_path_factory, tiny_recipe):
    """Recipe of four batches of Diffusion-DPO from a checkpoint of one batch; `lora` is null."""
    root = tmp_path_factory.mktemp('dpo')
    columns = {'image': 'bytes', 'rejected_image': 'bytes', 'captions': 'json', 'width': 'int', 'height': 'int'}
    images = [draw_image(index, 40) for index in range(48)]
    samples = [
        {'image': one, 'rejected_image': other, 'captions': [f'image {index}'], 'width': 40, 'height': 40}
        for index, (one, other) in enumerate(zip(images[:24], images[24:], strict=True))
    ]
    write_dataset(root / 'pairs', samples, columns)
    base = tiny_recipe(root / 'runs', name='base')
    base['model']['train_text_encoder'] = False
    base['trainer'] |= {'max_duration': '1ba', 'save_interval': '1ba'}
    train(load(write_yaml(root / 'base.yaml', base))).close()
    own = base | {
        'runs_dir': str(root / 'runs'),
        'init_from': str(root / 'runs' / 'base' / 'ba1'),
        'lora': None,
        'optimizer': {'name': 'adamw', 'lr': 1.0e-2},
        'algorithms': {'diffusion_dpo': {'beta': 300.0}, 'ema': {'ema_start': '1ba', 'smoothing': 0.5}},
        'dataset': {'name': 'preference_pairs', 'crop': 'random', 'flip': True},
        'streams': {'pairs': {'local': str(root / 'pairs'), 'resolution': 32}},
        'eval_streams': base['streams'],
        'callbacks': {'loss_guard': None, 'speed_monitor': {'window_size': 1}},
    }
    own['trainer'] = base['trainer'] | {'max_duration': '4ba', 'save_interval': '2ba'}
    return own


LORA = {'rank': 4, 'alpha': 4.0}


@pytest.mark.parametrize('lora', [None, LORA], ids=['full', 'lora'])
def test_resumed_run_equals_uninterrupted(content, tmp_path, lora):
    start = tmp_path / 'start'
    shutil.copytree(content['init_from'], start)
    content = content | {'runs_dir': str(tmp_path), 'lora': lora, 'init_from': str(start)}
    whole = write_yaml(tmp_path / 'whole.yaml', content | {'name': 'whole'})
    parts = write_yaml(tmp_path / 'parts.yaml', content | {'name': 'parts'})
    train(load(whole)).close()
    train(load(parts, ['trainer.max_duration=2ba'])).close()
    with pytest.raises(UserError, match=r'diffusion_dpo\.beta: 300.0 in the checkpoint, 200.0 now'):
        train(load(parts, ['algorithms.diffusion_dpo.beta=200.0']))
    if lora is None:
        start.rename(tmp_path / 'kept')
        shutil.copytree(tmp_path / 'parts' / 'ba2', start)
        with pytest.raises(UserError, match='init_from: its weights, the reference of diffusion_dpo, have changed'):
            train(load(parts))
        shutil.rmtree(start)
        (tmp_path / 'kept').rename(start)
    train(load(parts)).close()
    losses = read_losses(tmp_path / 'whole')
    assert losses[0] == pytest.approx(0.6931, abs=1e-3) and losses[3] != pytest.approx(0.6931, abs=1e-3)
    assert losses == read_losses(tmp_path / 'parts')
    assert_same_weights(tmp_path / 'whole', tmp_path / 'parts')
    metrics = read_metrics(tmp_path / 'parts' / 'metrics.jsonl')
    assert {'dpo/implicit_accuracy', 'dpo/preferred_error_change', 'dpo/rejected_error_change'} <= metrics.keys()
    assert not any('reference' in name for name in weights_of(find_checkpoint(tmp_path / 'whole'), 'training')[0])


def test_trainers_without_reference_or_pairs_are_refused(make_model):
    with pytest.raises(UserError, match=r'diffusion_dpo: has no reference; call keep_reference\(\)'):
        one_step(make_model())
    model = make_model()
    model.keep_reference()
    batch = pairs_of(model)
    del batch[batch_keys.REJECTED_IMAGE]
    with pytest.raises(UserError, match='batch: has no rejected_image, but diffusion_dpo trains on pairs'):
        both_images(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize('lora', [None, LORA], ids=['full', 'lora'])
@pytest.mark.parametrize('strategy', ['ddp', 'fsdp2'])
def test_killed_run_on_two_ranks_equals_one_rank(content, ranks, tmp_path, strategy, lora):
    content = content | {'runs_dir': str(tmp_path), 'lora': lora, 'device_train_microbatch_size': 2}
    content['trainer'] = content['trainer'] | {'save_interval': '1ba'}
    one = write_yaml(tmp_path / 'one.yaml', content | {'name': 'one'})
    two = write_yaml(tmp_path / 'two.yaml', content | {'name': 'two', 'parallelism': {'strategy': strategy}})
    train(load(one)).close()
    job = ranks.start(2, two)
    job.wait_for(tmp_path / 'two' / 'ba1' / 'receipt.json', or_ended=True)
    job.kill()
    ranks.run(2, two)
    assert largest_difference(read_losses(tmp_path / 'one'), read_losses(tmp_path / 'two')) < 1e-3
