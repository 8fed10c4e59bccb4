"""i1 against a plain implementation of its description: counts, loss, gradients, sampling, positions, and mistakes."""

import itertools
import math
import re
from typing import Any

import pytest
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from model_batches import CAPTIONS, assert_same_loss_and_gradients, batch_of, size_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaConfig
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaForConditionalGeneration

from diffusion.config.recipe import LoraConfig
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.families.i1.builder import SIZES, i1, tiny_i1
from diffusion.models.families.i1.transformer_i1 import I1Transformer2DModel
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.lora import add_lora
from diffusion.models.randomness import Draws, Purpose
from diffusion.models.token_routing import Route, Sprint
from diffusion.tasks.export import write_folder
from diffusion.training import performance
from tests.models.test_prx import GEMMA, gemma_tokenizer
from tests.training.test_performance import with_parts

TINY: dict[str, Any] = {'hidden_size': 48, 'num_heads': 2, 'depth': 5, 'patch_size': 2}
TINY |= {'text_width': 32, 'text_layers': 1}
HEADS, PATCH, WIDTH, BLOCKS = 2, 2, 48, 5
ROUTE = range(1, 4)


@pytest.fixture
def build(small_vae):
    """Function that builds a tiny model, with random weights also where they begin as zeros or ones."""

    def built(**settings: Any) -> LatentDiffusion:
        torch.manual_seed(0)
        model = tiny_i1(vae=str(small_vae), **TINY, **settings)
        for name, each in model.denoiser.named_parameters():
            if each.ndim == 1:
                torch.nn.init.normal_(each, mean=0.0 if name.endswith('bias') else 1.0, std=0.1)
        return model

    return built


# -- the description, one caption at a time, without masks --


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight


def turn(x: Tensor, positions: list[tuple[float, float, float]]) -> Tensor:
    """Return x, [S, h], with its neighboring channels as complex numbers, each multiplied by exp(i angle)."""
    channels = x.shape[1]
    parts = [channels // 2, channels // 4, channels // 4]
    angles = [
        [position[axis] / 10000 ** (2 * k / part) for axis, part in enumerate(parts) for k in range(part // 2)]
        for position in positions
    ]
    rotation = torch.tensor(angles, dtype=torch.float64)
    turned = torch.view_as_complex(x.double().reshape(len(x), -1, 2)) * torch.polar(torch.ones_like(rotation), rotation)
    return torch.view_as_real(turned).flatten(1).float()


class Plain:
    """The transformer of i1 as a function of its weights, for one image and one caption."""

    def __init__(self, denoiser: torch.nn.Module) -> None:
        self.weights = dict(denoiser.named_parameters())

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f'{name}.weight'].T + self.weights[f'{name}.bias']

    def norm(self, name: str, x: Tensor) -> Tensor:
        return norm(x, self.weights[f'{name}.weight'])

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate, value = self.linear(f'{name}.up', x).split(int(2 / 3 * 4 * WIDTH), dim=1)
        return self.linear(f'{name}.down', gate * gate.sigmoid() * value)

    def attention(self, name: str, qkv: Tensor, positions: Any, keys: list[int]) -> Tensor:
        """Return the outputs of all heads, [S, D]; only `keys` are attended to."""
        size, outputs = WIDTH // HEADS, []
        for head in range(HEADS):
            query, key, value = (qkv[:, (i * HEADS + head) * size :][:, :size] for i in range(3))
            query, key = self.norm(f'{name}.q_norm', query), self.norm(f'{name}.k_norm', key)
            if positions is not None:
                query, key = turn(query, positions), turn(key, positions)
            scores = query @ key[keys].T / math.sqrt(size)
            outputs.append(scores.softmax(dim=1) @ value[keys])
        return torch.cat(outputs, dim=1)

    def adapter(self, text: Tensor) -> Tensor:
        text = self.linear('text_embed', text)
        for name in ('text_blocks.0', 'text_blocks.1'):
            qkv = self.linear(f'{name}.qkv', self.norm(f'{name}.attention_norm', text))
            text = text + self.linear(f'{name}.out', self.attention(name, qkv, None, list(range(len(text)))))
            text = text + self.mlp(f'{name}.mlp', self.norm(f'{name}.mlp_norm', text))
        return text

    def block(self, name: str, image: Tensor, text: Tensor, positions: Any, tokens: int) -> tuple[Tensor, Tensor]:
        streams = {'image': image, 'text': text}
        keys = list(range(len(image) + tokens))
        normed = {kind: self.norm(f'{name}.attention_norm', each) for kind, each in streams.items()}
        qkv = torch.cat([self.linear(f'{name}.{kind}_qkv', each) for kind, each in normed.items()])
        attended = self.attention(name, qkv, positions, keys).split([len(image), len(text)])
        for kind, each in zip(streams, attended, strict=True):
            x = streams[kind] + self.norm(f'{name}.attention_output_norm', self.linear(f'{name}.{kind}_out', each))
            mlp = self.mlp(f'{name}.{kind}_mlp', self.norm(f'{name}.mlp_norm', x))
            streams[kind] = x + self.norm(f'{name}.mlp_output_norm', mlp)
        is_token = (torch.arange(len(text)) < tokens)[:, None]
        return streams['image'], streams['text'] * is_token

    def __call__(self, noisy: Tensor, text: Tensor | None, tokens: int, kept: list[int] | None = None) -> Tensor:
        """Return the prediction for noisy latents [C, H, W] and a caption [L, T] of which `tokens` are not padding.

        Only the image tokens `kept` are in the blocks of ROUTE.
        """
        text = self.weights['null_caption'][0] if text is None else text
        height, width = (side // PATCH for side in noisy.shape[1:])
        places = [(row, column) for row in range(height) for column in range(width)]
        patches = torch.stack([noisy[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] for row, column in places])
        image = patches.flatten(1) @ self.weights['patch_embed.weight'].flatten(1).T + self.weights['patch_embed.bias']
        # A square image has positions from 0 to 16; another one, positions of the same density around the same center.
        space = 16 / math.sqrt(height * width)
        scaled = [(8 + (row - height / 2) * space, 8 + (column - width / 2) * space) for row, column in places]
        frequencies = [10000 ** (-2 * k / (WIDTH // 2)) for k in range(WIDTH // 4)]
        table = [[f(at * w) for at in place for f in (math.sin, math.cos) for w in frequencies] for place in scaled]
        image, text = image + torch.tensor(table), self.adapter(text)
        of_text = [(float(i) if i < tokens else 0.0, 0.0, 0.0) for i in range(len(text))]
        outputs: list[tuple[Tensor, Tensor]] = []
        full = image
        for number in range(BLOCKS):
            name, routed = f'blocks.{number}', range(len(places))
            if kept is not None and number in ROUTE:
                routed = kept
                if number == ROUTE[0]:
                    full, image = image, image[kept]
            positions = [(float(tokens), *scaled[place]) for place in routed] + of_text
            if number > BLOCKS // 2:
                skips = outputs[BLOCKS - 1 - number]
                image = self.linear(f'{name}.image_skip', torch.cat([image, skips[0]], dim=1))
                text = self.linear(f'{name}.text_skip', torch.cat([text, skips[1]], dim=1))
            image, text = self.block(name, image, text, positions, tokens)
            outputs.append((image, text))
            if kept is not None and number == ROUTE[-1]:
                image = torch.stack([image[kept.index(i)] if i in kept else full[i] for i in range(len(places))])
        out = self.linear('output', self.norm('output_norm', image))
        prediction = torch.empty_like(noisy)
        for (row, column), each in zip(places, out, strict=True):
            patch = each.reshape(PATCH, PATCH, -1).permute(2, 0, 1)
            prediction[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = patch
        return prediction


def texts_of(model: Any, captions: Tensor) -> tuple[Tensor, list[int]]:
    """Return the embeddings of token ids [B, 1, L], those of padding too, and the number of each caption's tokens."""
    ids = captions[:, 0]
    lengths = [row.index(49407) + 1 for row in ids.tolist()]
    mask = torch.tensor([[i < length for i in range(ids.shape[1])] for length in lengths])
    return model.text.encoders[0](ids, attention_mask=mask).last_hidden_state, lengths


# -- counts --


@pytest.mark.parametrize(
    ('size', 'published', 'gflops'),
    [
        ('xl', 1_035_888_752, (564.4, 1515, 6895)),
        pytest.param('3b', 3_165_756_752, (1680, 4350, 17788), marks=pytest.mark.slow),
    ],
)
def test_published_parameters_and_flops(size, published, gflops):
    """Theirs have an embedding of the timestep that nothing reads, and compute the text after the last block."""
    assert [*SIZES.values()] == [(72 * heads, heads) for heads in (16, 18, 20, 22, 24, 26, 28)]
    width, heads = SIZES[size]
    with torch.device('meta'):
        denoiser = I1Transformer2DModel(hidden_size=width, num_heads=heads)
    assert size_of(denoiser) == published - (256 * width + width + width * width + width)
    last: Any = denoiser.blocks[-1]
    unused = 2 * 256 * sum(each.weight.numel() for each in (last.text_out, last.text_mlp.up, last.text_mlp.down))
    for side, expected in zip((32, 64, 128), gflops, strict=True):
        with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.device('meta'):
            denoiser(torch.empty(1, 32, side, side), torch.empty(1, 256, 2304))
        assert (counter.get_total_flops() + unused) / 1e9 == pytest.approx(expected, rel=1e-3)


def test_initial_weights_are_as_published():
    """Xavier uniform for the skips and the first layer of the text; else LeCun normal, cut at two deviations."""
    torch.manual_seed(0)
    denoiser = I1Transformer2DModel(4, text_width=64, text_length=16, hidden_size=64, num_heads=2, depth=3)
    for name, layer in denoiser.named_modules():
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d):
            is_uniform, inputs = name == 'text_embed' or name.endswith('_skip'), layer.weight[0].numel()
            std = (2 / (inputs + len(layer.weight))) ** 0.5 if is_uniform else inputs**-0.5
            largest = std * (3**0.5 if is_uniform else 2 / 0.8796)
            found = [each.item() for each in (layer.weight.std(), layer.weight.abs().max(), layer.bias.abs().max())]  # type: ignore[union-attr]
            assert found == [pytest.approx(std, rel=0.06), pytest.approx(largest, rel=0.06), 0], name
    assert denoiser.null_caption.std().item() == pytest.approx(64**-0.5, rel=0.06)


# -- training and sampling --


@pytest.mark.parametrize(
    ('dropout', 'width', 'routed'), [(0.0, 32, False), (0.5, 64, False), pytest.param(0.0, 64, True, id='tread')]
)
def test_loss_and_gradients_equal_the_plain_implementation(build, dropout, width, routed):
    model = build(caption_dropout=dropout)
    batch = batch_of(model, height=32, width=width)
    draws = Draws(17, batch[batch_keys.SAMPLE_ID], batch[batch_keys.EPOCH], batch[batch_keys.BATCH_INDEX])
    # Their time runs from noise, 0, to the image, 1, and the target is the image minus the noise.
    time = torch.sigmoid(-torch.special.ndtri(draws.uniform(Purpose.TIMESTEP))).float()
    keep = (draws.uniform(Purpose.CAPTION_DROPOUT) >= dropout).tolist()
    assert all(keep) if not dropout else 0 < sum(keep) < len(keep)
    latents = model.latents_of(batch, draws)
    noise = draws.normal(Purpose.NOISE, latents.shape[1:])
    embeds, lengths = texts_of(model, batch[batch_keys.INPUT_IDS])
    plain, losses = Plain(model.denoiser), []
    route = Route(ROUTE.start, ROUTE.stop, 0.5)
    if routed:
        model.route_tokens(route).begin(draws)
    for index, x in enumerate(latents):
        noisy = (1 - time[index]) * noise[index] + time[index] * x
        kept = route.kept(draws, 8)[index].tolist() if routed else None
        predicted = -plain(noisy, embeds[index] if keep[index] else None, lengths[index], kept)
        losses.append((predicted - (x - noise[index])).square().mean())
    # Weights that have no effect have no gradient there, and zeros here.
    everything = sum(each.sum() for each in model.parameters())
    assert_same_loss_and_gradients(model, batch, torch.stack(losses).mean() + 0 * everything, rtol=1e-5, atol=1e-5)


def test_sampled_image_equals_the_plain_implementation(build):
    """Euler's method in their direction of time, with guidance by the null caption with the prompt's mask."""
    model = build()
    steps, scale = 4, 12.0
    prompts = ['two cats', 'a red square on a table']
    start = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(1))
    images = model.generate(
        prompts,
        latents=start,
        num_inference_steps=steps,
        guidance_scale=scale,
        guidance_rescale=1.0,
        snr_shift=1 / 0.3,
        noise_scheduler='euler',
    )

    def shifted(t: float) -> float:
        return 0.3 * t / (1 + (0.3 - 1) * t)

    times = [shifted(step / steps) for step in range(steps + 1)]
    model.eval()
    with torch.no_grad():
        embeds, lengths = texts_of(model, model._tokens(prompts))
        plain, results = Plain(model.denoiser), []
        for x, text, tokens in zip(start, embeds, lengths, strict=True):
            for t, after in itertools.pairwise(times):
                conditional, unconditional = -plain(x, text, tokens), -plain(x, None, tokens)
                v = conditional + (scale - 1) * (conditional - unconditional)
                x = x + (after - t) * v * conditional.std() / v.std()
            results.append(x)
        torch.testing.assert_close(images, model.decode(torch.stack(results)), rtol=1e-5, atol=1e-5)


# -- the library's other features --


def gradients_of(model: LatentDiffusion, batch: Any) -> dict[str, Tensor | None]:
    model.zero_grad()
    model.loss(model(batch), batch).backward()
    return {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.slow
def test_compiled_blocks_have_the_gradients_of_eager_ones(build, monkeypatch):
    monkeypatch.setattr(performance, 'BACKEND', 'aot_eager')  # Inductor takes minutes on a CPU
    model, compiled = build(), build()
    batch = batch_of(model, height=32, width=32)
    performance.apply_speed(compiled, with_parts('compile', 'flash_attention'))
    counts = torch._dynamo.utils.counters
    counts.clear()
    torch.testing.assert_close(gradients_of(compiled, batch), gradients_of(model, batch), rtol=1e-4, atol=1e-5)
    assert counts['stats']['unique_graphs'] and not counts['graph_break']
    torch._dynamo.reset()


def test_a_route_that_a_long_skip_leaves_is_refused(build):
    problem = 'the route skips blocks 3 to 4, but long skips connect block i of 5 to block 4 - i; use start + end = 5, '
    with pytest.raises(UserError, match=re.escape(f'tread: {problem}such as start: 2, end: 3')):
        build().route_tokens(Route(3, 5, 0.5))
    with pytest.raises(UserError, match=re.escape(f'sprint: {problem}')):
        build(sprint=Sprint(start=3, end=5))


def test_lora_trains_its_own_weights_alone(build):
    model = build()
    batch = batch_of(model, height=32, width=32)
    expected = model.loss(model(batch), batch)
    model.denoiser.requires_grad_(False)
    add_lora(model.denoiser, LoraConfig(rank=2, alpha=2, targets=['image_qkv', 'text_mlp.up']), seed=0)
    loss = model.loss(model(batch), batch)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    trained = {name for name, each in model.denoiser.named_parameters() if each.grad is not None}
    assert trained == {name for name, _ in model.denoiser.named_parameters() if 'lora_' in name}


def test_stored_text_keeps_the_padding_that_the_adapter_reads(build):
    model = build(train_text_encoder=False)
    batch = batch_of(model, height=32, width=32)
    stored = {batch_keys.TEXT_EMBEDS: model.embed(batch[batch_keys.INPUT_IDS]).embeds}
    torch.testing.assert_close(model.loss(model(batch | stored), batch), model.loss(model(batch), batch))
    stored[batch_keys.TEXT_MASK] = model.text.padding_mask(batch[batch_keys.INPUT_IDS])
    with pytest.raises(UserError, match='stored without padding, but this model attends to padding'):
        model(batch | stored)


def test_encoder_of_t5gemma_is_read_from_the_whole_model(tmp_path, small_vae, monkeypatch):
    gemma_tokenizer().save_pretrained(tmp_path)
    torch.manual_seed(0)
    whole = T5GemmaForConditionalGeneration(T5GemmaConfig(encoder=GEMMA, decoder=GEMMA, vocab_size=128)).eval()
    whole.save_pretrained(tmp_path)
    monkeypatch.setitem(SIZES, 'xl', (16, 2))
    model = i1(32, pretrained=str(tmp_path), vae=str(small_vae), max_length=12, encoder_dtype='float32')
    ids = model._tokens(CAPTIONS)
    mask = model.text.padding_mask(ids)
    assert mask[:, 0].all() and mask[2].sum() == 1, 'padded on the right'
    expected: Any = whole.model.encoder(ids[:, 0], attention_mask=mask)
    torch.testing.assert_close(model.embed(ids).embeds, expected.last_hidden_state)
    with pytest.raises(UserError, match=r'model\.vae_revision: is missing; give the commit of black-forest-labs/FLUX'):
        i1(32, pretrained=str(tmp_path))
    write_folder(model, None, tmp_path / 'exported', torch.float32, lora=False)  # type: ignore[arg-type]
    settings = {'trust_remote_code': True, 'local_files_only': True, 'low_cpu_mem_usage': False}
    pipeline: Any = DiffusionPipeline.from_pretrained(tmp_path / 'exported', **settings)
    embeds, their_mask = pipeline._encode(CAPTIONS)
    assert torch.equal(their_mask, mask)
    torch.testing.assert_close(embeds, expected.last_hidden_state)


@pytest.mark.parametrize(
    ('settings', 'problem'),
    [
        ({'depth': 4}, 'depth: 4 is even, but the middle block has no long skip; use 5'),
        ({'hidden_size': 40}, 'hidden_size: 40 does not divide into 2 heads of a multiple of 8 channels'),
    ],
)
def test_impossible_sizes_are_refused(settings, problem):
    with pytest.raises(UserError, match=problem):
        tiny_i1(**{**TINY, **settings})
