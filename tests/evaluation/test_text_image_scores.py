"""CLIP score and PickScore against torchmetrics and the published steps."""

from typing import Any

import pytest
import torch
from small_networks import write_clip
from transformers import CLIPModel, CLIPProcessor

from diffusion.errors import UserError
from diffusion.evaluation.metrics import TextImageScore, build_network, build_networks

PROMPTS = ['a red cube', 'seven ducks ' * 60, '']


@pytest.fixture(scope='module')
def clip(tmp_path_factory) -> str:
    return str(write_clip(tmp_path_factory.mktemp('clip')))


def images() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(40, 56), (28, 28), (90, 31)]
    return [torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator) for size in sizes]


def loaded(clip: str) -> tuple[Any, Any]:  # transformers annotates their methods too narrowly
    return CLIPModel.from_pretrained(clip), CLIPProcessor.from_pretrained(clip)


def test_clip_score_is_the_scaled_cosine(clip):
    model, processor = loaded(clip)
    network = TextImageScore(clip)
    scores = network.scores(images(), PROMPTS)
    for image, prompt, score in zip(images(), PROMPTS, scores, strict=True):
        short = prompt[:300]
        inputs = processor(images=image, text=short, return_tensors='pt')
        with torch.no_grad():
            cosine = model(**inputs).logits_per_image[0, 0] / model.logit_scale.exp()
        expected = (100 * cosine).clamp(min=0)
        found = network.scores([image], [short])
        torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
        if short == prompt:
            torch.testing.assert_close(score, expected, rtol=1e-5, atol=1e-5)


def test_pick_score_is_the_scaled_cosine(clip):
    model, processor = loaded(clip)
    network = TextImageScore(clip, kind='pick_score')
    for image, prompt in zip(images(), PROMPTS, strict=True):
        inputs = processor(
            text=[prompt], images=[image], return_tensors='pt', padding=True, truncation=True, max_length=77
        )
        output = model(**inputs)
        found = network.scores([image], [prompt])
        torch.testing.assert_close(found, output.logits_per_image[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ('name', 'sources', 'message'),
    [
        ('pick_score', {}, 'networks.pick_score: has no default; set it to a folder'),
        ('cmmd', {'cmmd': 'openai/clip'}, 'neither a folder nor a repository with a commit'),
        (
            'inception',
            {'inception': 'gone.pth'},
            'networks.inception: gone.pth: does not exist.*--network inception=PATH',
        ),
        ('clip_score', {'clip_score': 'a/b@' + 'a' * 40}, 'networks.clip_score: .*a/b'),
    ],
)
def test_networks_that_cannot_be_had_are_named(name, sources, message):
    with pytest.raises(UserError, match=message):
        build_network(name, sources)


def test_metrics_without_their_networks_can_be_left_out(clip):
    metrics, sources = ['fid', 'clip_score', 'recall', 'pick_score'], {'inception': 'gone.pth', 'clip_score': str(clip)}
    with pytest.raises(UserError) as caught:
        build_networks(metrics, sources)
    first, second, way_out = str(caught.value).split('\n  ')
    assert first.startswith('fid, recall cannot be computed: networks.inception: gone.pth: does not exist')
    assert second.startswith('pick_score cannot be computed: networks.pick_score: has no default')
    assert way_out == 'To compute the other metrics only: --metrics clip_score'
