"""Captions by a vision-language model of transformers in the process."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
import torch
from captioning.vlm_server import write_images, write_settings
from commands import refusal
from evaluation.judge_server import Drawing, write_dpg
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from diffusion.config.language_model import JudgeConfig
from diffusion.evaluation.evaluated_checkpoint import EvaluatedCheckpoint
from diffusion.evaluation.generated_images import GeneratedImages, Sampling
from diffusion.evaluation.judge import Judge
from diffusion.evaluation.prompts import read_prompts

WORDS = 'a red green blue black white square circle line dot of in on with and one two three small large'.split()  # noqa: SIM905
SPECIAL = {'pad_token': '<pad>', 'eos_token': '</s>', 'bos_token': '<s>', 'unk_token': '<unk>'}
TEMPLATE = (
    '{{ bos_token }}{% for message in messages %}{% for part in message.content %}'
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope='module')
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA with random weights and a vocabulary of 25 words."""
    folder = tmp_path_factory.mktemp('vlm')
    vocabulary = {word: index for index, word in enumerate([*SPECIAL.values(), '<image>', *WORDS])}
    words: Any = Tokenizer(models.WordLevel(vocabulary, unk_token='<unk>'))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, additional_special_tokens=['<image>'], **SPECIAL)
    images = CLIPImageProcessor(size={'shortest_edge': 16}, crop_size={'height': 16, 'width': 16})
    options: dict[str, Any] = {'vision_feature_select_strategy': 'default', 'num_additional_image_tokens': 1}
    LlavaProcessor(images, tokenizer, patch_size=8, chat_template=TEMPLATE, **options).save_pretrained(folder)
    sizes: dict[str, Any] = {'hidden_size': 32, 'intermediate_size': 64}
    sizes |= {'num_hidden_layers': 2, 'num_attention_heads': 2}
    text = LlamaConfig(
        vocab_size=len(vocabulary), **sizes, pad_token_id=0, eos_token_id=1, bos_token_id=2, max_position_embeddings=128
    )
    vision = CLIPVisionConfig(image_size=16, patch_size=8, **sizes)
    torch.manual_seed(3)
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=vocabulary['<image>'])
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    return folder


def start(data: Path, settings: Path, **environment: object) -> 'subprocess.Popen[bytes]':
    words = [sys.executable, '-m', 'diffusion', 'caption', str(data), '--with', str(settings)]
    return subprocess.Popen(words, env=os.environ | {name: str(value) for name, value in environment.items()})


@pytest.mark.slow
def test_one_and_two_ranks_write_equal_tables(vlm: Path, tmp_path: Path) -> None:
    tables = []
    for ranks in (1, 2):
        data = write_images(tmp_path / f'data-{ranks}', shards=2, each=6)
        values = {'endpoint': None, 'model': str(vlm), 'max_tokens': 6, 'batch_size': 4, 'dtype': 'float32'}
        settings = write_settings(tmp_path / 'vlm.yaml', '', engine='transformers', **values)
        processes = [start(data, settings, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks) for rank in range(ranks)]
        assert [process.wait(300) for process in processes] == [0] * ranks
        tables.append({path.relative_to(data): pq.read_table(path) for path in data.rglob('captions/*/*.parquet')})
        assert json.loads((data / 'captions.json').read_text())['columns'].keys() == {'brief', 'full'}
    assert len(tables[0]) == 4
    assert tables[0] == tables[1]
    answers = {line['caption'] or line['answer'] for table in tables[0].values() for line in table.to_pylist()}
    assert len(answers) > 1, 'the answers depend on the image'


def test_a_judge_in_the_process_asks_once_and_leaves_random_numbers_as_they_are(vlm: Path, tmp_path: Path) -> None:
    checkpoint = EvaluatedCheckpoint(cast(Any, None), cast(Any, None), tmp_path, 'ba1', 'ema')
    prompts = read_prompts(write_dpg(tmp_path / 'dpg.csv', 2))
    images = GeneratedImages(tmp_path / 'images', [each.text for each in prompts], Sampling(), 'ba1')
    assert [*images.own_batches(Drawing())]
    settings = JudgeConfig(model=str(vlm), engine='transformers', max_tokens=4, dtype='float32', batch_size=4)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    found = Judge(settings, ['dpg']).scores(checkpoint, images, prompts, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert [*found] == [f'dpg/{vlm.name}']
    kept = {path: path.read_bytes() for path in tmp_path.rglob('*.judge.json')}
    answers = [each for content in kept.values() for each in json.loads(content).values()]
    assert len(answers) == found[f'dpg/{vlm.name}'].answers == sum(len(each.questions) for each in prompts)
    assert Judge(replace(settings, batch_size=1), ['dpg']).scores(checkpoint, images, prompts, 1) == found
    assert {path: path.read_bytes() for path in kept} == kept


def test_a_model_that_is_no_vision_language_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_images(tmp_path / 'data', shards=1, each=1)
    settings = write_settings(tmp_path / 'vlm.yaml', '', engine='transformers', endpoint=None, model=str(tmp_path))
    message = refusal(capsys, 'caption', data, '--with', settings)
    assert f'model: {tmp_path} cannot be loaded as a vision-language model' in message
