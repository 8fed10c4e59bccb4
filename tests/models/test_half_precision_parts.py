"""Parts of LatentDiffusion under bfloat16 autocast: which compute in half precision, and which must not."""

import pytest
import torch
from model_batches import batch_of

from diffusion.models import batch_keys
from diffusion.models.frozen_parts import weights_hash
from diffusion.models.objective import Objective

BFLOAT16 = {'device_type': 'cpu', 'dtype': torch.bfloat16}
OBJECTIVES = {
    'v_prediction': Objective(prediction_type='v_prediction'),
    'flow': Objective(path='flow', prediction_type='velocity', timesteps='logit_normal'),
}


@pytest.fixture(scope='module')
def model(make_model):
    return make_model(train_text_encoder=False)


@pytest.mark.parametrize('name', [pytest.param('v_prediction', marks=pytest.mark.slow), 'flow'])
def test_prediction_is_bfloat16_and_loss_is_float32(make_model, name):
    model = make_model(objective=OBJECTIVES[name])
    batch = batch_of(model)
    expected = model.loss(model(batch), batch)
    with torch.autocast(**BFLOAT16):
        outputs = model(batch)
        loss = model.loss(outputs, batch)
        errors = model.eval_forward(batch)
    assert outputs.prediction.dtype == torch.bfloat16
    parts = outputs.target, outputs.weight, loss, model.sample_losses, errors
    assert {part.dtype for part in parts} == {torch.float32}
    # Exact for these predictions: the squares are not rounded to 8 bits.
    exact = (
        outputs.weight * (outputs.prediction.double() - outputs.target.double()).square().flatten(1).mean(1)
    ).mean()
    torch.testing.assert_close(loss.double(), exact.double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(loss, expected, rtol=3e-3, atol=0)
    torch.testing.assert_close(errors, model.eval_forward(batch), rtol=3e-2, atol=0)


def test_frozen_encoders_are_not_affected_by_autocast(model):
    batch = batch_of(model)
    images, ids = batch[batch_keys.IMAGE], batch[batch_keys.INPUT_IDS]
    moments, embeds = model.encode(images), model.embed(ids).embeds
    with torch.autocast(**BFLOAT16):
        assert torch.equal(model.encode(images), moments)
        assert torch.equal(model.embed(ids).embeds, embeds)


def test_hash_of_weights_depends_on_their_names_types_shapes_and_values():
    ones = torch.ones(2, 3)
    networks = [{'a': ones}, {'b': ones}, {'a': ones.T.contiguous()}, {'a': 0 * ones}, {'a': ones.half()}]
    assert len({weights_hash(torch.nn.ParameterDict(each)) for each in [*networks, {'a': ones.clone()}]}) == 5


def test_latents_stored_in_float16_are_normalized_in_float32(model):
    batch = batch_of(model)
    batch[batch_keys.LATENT_MOMENTS] = model.encode(batch.pop(batch_keys.IMAGE)).half()
    with torch.autocast(**BFLOAT16):
        latents = model.latents_of(batch)
        outputs = model(batch)
        sampled = model.latents_of(batch, model.draws_of(batch))
    mean = batch[batch_keys.LATENT_MOMENTS][:, :4].float()
    assert torch.equal(latents, (mean - model.latent_mean) / model.latent_std)
    wide = batch | {batch_keys.LATENT_MOMENTS: batch[batch_keys.LATENT_MOMENTS].float()}
    assert torch.equal(sampled, model.latents_of(wide, model.draws_of(wide))), 'the variance is computed in float32'
    assert outputs.prediction.dtype == torch.bfloat16
    assert outputs.target.dtype == torch.float32


def test_images_sampled_in_bfloat16_are_float32_and_near_those_of_float32(model):
    dtypes = set()
    single = model.generate(['a cat'], num_inference_steps=4)
    hook = model.denoiser.conv_out.register_forward_hook(lambda _, __, output: dtypes.add(output.dtype))
    with torch.autocast(**BFLOAT16):
        half = model.generate(['a cat'], num_inference_steps=4)
    hook.remove()
    assert dtypes == {torch.bfloat16}
    assert half.dtype == torch.float32
    assert 0 < (half - single).abs().mean() < 0.01
