"""Prompts are rewritten once each by a language model, and recorded with their images."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from captioning.vlm_server import MODEL, VlmServer
from commands import output_of
from PIL import Image
from small_networks import write_clip

from diffusion.cli import main
from diffusion.config.language_model import RewriteConfig
from diffusion.config.load import load
from diffusion.errors import GaveUp, UserError
from diffusion.evaluation.metrics import TextImageScore
from diffusion.evaluation.rewriting import GivenPrompts, Rewriter
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.tasks.evaluate import evaluate
from diffusion.training.train import train

PROMPTS = [f'{count} cubes on a table' for count in range(20)]
BY = f'{MODEL}, prompt rewrite version 1'


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VlmServer]:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setattr('diffusion.language_models.endpoint.FIRST_PAUSE_SECONDS', 0.02)
    server = VlmServer()
    yield server
    server.close()


def rewritten(server: VlmServer, prompts: list[str], **settings: Any) -> GivenPrompts:
    return Rewriter(RewriteConfig(model=MODEL, endpoint=f'{server.url}/v1', **settings))(prompts)


def test_each_prompt_is_asked_for_once_despite_faults(server: VlmServer, tmp_path: Path) -> None:
    server.faults, server.rate = ('429', '500', 'half', 'other model', 'down'), 0.1
    found = rewritten(server, [*PROMPTS, PROMPTS[0]])
    assert found == GivenPrompts([*PROMPTS, PROMPTS[0]], [f'Detailed: {text}' for text in found.prompts], BY)
    assert server.good.total() == 20
    server.faults, server.good_limit = (), 0  # from now on, the server answers nothing
    assert rewritten(server, PROMPTS[::-1]).texts == found.texts[-2::-1]
    with pytest.raises(GaveUp, match='no answer to '):
        rewritten(server, [*PROMPTS, 'another one'], patience_seconds=0)
    own = tmp_path / 'own.yaml'
    prompt = {'name': 'own', 'version': 3, 'text': 'Expand: {caption}', 'with_caption': True}
    own.write_text(yaml.safe_dump(prompt))
    with pytest.raises(GaveUp):
        rewritten(server, PROMPTS, prompt=str(own), patience_seconds=0)
    server.good_limit = 10**9
    found = rewritten(server, PROMPTS[:1], prompt=str(own))
    assert (found.texts, found.by) == ([f'Detailed: Expand: {PROMPTS[0]}'], f'{MODEL}, prompt own version 3')


def test_a_rejected_answer_leaves_the_prompt_as_it_is(server: VlmServer, caplog: pytest.LogCaptureFixture) -> None:
    refused = "I'm sorry, but I can't help with that."
    respond = server.respond
    server.respond = lambda request, fault, text, model: respond(  # type: ignore[method-assign]
        request, fault, refused if text.endswith(PROMPTS[1]) else text, model
    )
    with caplog.at_level(logging.INFO):
        found = rewritten(server, PROMPTS[:3])
    assert f'asking {MODEL} to rewrite 3 prompts' in caplog.text
    assert found.texts == [f'Detailed: {PROMPTS[0]}', PROMPTS[1], f'Detailed: {PROMPTS[2]}']
    assert f'the prompt {PROMPTS[1]!r} is used as it is: refusal' in caplog.text
    with pytest.raises(UserError, match=r"no answer of tiny-vlm is usable \(refusal: I'm sorry"):
        rewritten(server, PROMPTS[1:2])


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'prompt': 'long'}, r'rewrite.prompt: long has no \{caption\}'),
        ({'prompt': 'gone.yaml'}, r'rewrite.prompt: gone.yaml does not exist'),
        ({'token_variable': 'NO_SUCH_TOKEN'}, 'NO_SUCH_TOKEN is not set'),
        ({'seed': -1}, 'rewrite.seed: -1 is out of range'),
    ],
)
def test_settings_with_a_mistake_are_refused(server: VlmServer, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        rewritten(server, PROMPTS, **settings)


def test_nothing_is_asked_if_answers_cannot_be_kept(server: VlmServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('XDG_CACHE_HOME', '/dev/null')
    with pytest.raises(UserError, match=r'rewrite: answers are kept below XDG_CACHE_HOME or ~/\.cache'):
        rewritten(server, PROMPTS)
    assert not server.good


def texts_of(path: Path) -> dict[str, str]:
    with Image.open(path) as image:
        return dict(image.text)  # type: ignore[attr-defined]


@pytest.mark.cpu_seconds(20)
def test_images_of_grids_evaluations_and_generate_are_for_rewritten_prompts(
    server: VlmServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    write_recipe: Callable[..., Path],
) -> None:
    generate, drawn = LatentDiffusion.generate, list[str]()

    def recorded(model: LatentDiffusion, texts: list[str], **settings: Any) -> torch.Tensor:
        drawn.extend(texts)
        return generate(model, texts, **settings)

    monkeypatch.setattr(LatentDiffusion, 'generate', recorded)
    prompts, record = ['a red square', 'green'], {'rewritten_by': BY}
    (tmp_path / 'prompts.txt').write_text('\n'.join(prompts))
    rewrite = {'model': MODEL, 'endpoint': f'{server.url}/v1', 'patience_seconds': 0}
    sampling = {'num_inference_steps': 2, 'rewrite': rewrite}
    clip = str(write_clip(tmp_path / 'clip'))
    path = write_recipe(
        callbacks={'image_grid': {'prompts': prompts, 'every': '1ba', **sampling}},
        generate=sampling,
        evaluators={
            'image_metrics': {
                **{'metrics': ['clip_score'], 'networks': {'clip_score': clip}, 'guidance_scales': [2]},
                **{'prompts': str(tmp_path / 'prompts.txt'), **sampling},
            }
        },
    )
    content = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(content | {'eval_streams': content['streams']}))
    train(load(path, ['trainer.max_duration=1ba'])).close()
    run = tmp_path / 'runs/run'
    sheet = texts_of(run / 'images/ba000001.png')
    assert json.loads(sheet['rewritten_prompt']) == [f'Detailed: {text}' for text in prompts]
    assert sheet.items() > record.items()

    server.good_limit = 0  # only answers that are kept are left
    evaluate(load(path, ['task=evaluate']))
    results = json.loads((run / 'evaluations/ba1.json').read_text())
    assert results['prompts'] == f'{tmp_path}/prompts.txt, rewritten by {BY}'
    files = sorted((run / results['guidance'][0]['folder']).glob('*/*.png'))
    for file, prompt in zip(files, prompts, strict=True):
        own = {'prompt': f'Detailed: {prompt}', 'original_prompt': prompt}
        assert texts_of(file).items() > (own | record).items()
    images = [torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) for file in files]
    expected = TextImageScore(clip).scores(images, prompts).mean()
    assert results['metrics']['clip_score'] == pytest.approx(float(expected), rel=1e-4), 'of the original prompts'

    printed = output_of(capsys, 'generate', run, prompts[1], '--out', tmp_path / 'out')
    assert f'rewritten by {BY}' in printed
    file = tmp_path / 'out/00000-green.png'
    assert texts_of(file) == record | {'original_prompt': 'green', 'rewritten_prompt': 'Detailed: green'}
    assert main(['generate', str(run), 'blue', '--out', str(tmp_path / 'out')]) == 1
    assert 'start the same command again' in capsys.readouterr().err
    assert set(server.good.values()) == {1}
    rewritten_texts = [f'Detailed: {text}' for text in prompts]
    assert drawn == [*rewritten_texts, *rewritten_texts, rewritten_texts[1]], 'of the grid, the evaluation and generate'


@pytest.mark.slow
def test_two_ranks_ask_once(server: VlmServer, tmp_path: Path, write_recipe: Callable[..., Path], ranks: Any) -> None:
    rewrite = {'model': MODEL, 'endpoint': f'{server.url}/v1'}
    grid = {'prompts': PROMPTS[:2], 'every': '1ba', 'num_inference_steps': 2, 'rewrite': rewrite}
    recipe = write_recipe(callbacks={'image_grid': grid})
    ranks.start(2, recipe, 'trainer.max_duration=1ba', environment={'XDG_CACHE_HOME': str(tmp_path / 'cache')}).end()
    sheet = texts_of(tmp_path / 'runs/run/images/ba000001.png')
    assert json.loads(sheet['rewritten_prompt']) == [f'Detailed: {text}' for text in PROMPTS[:2]]
    assert server.good.total() == 2
