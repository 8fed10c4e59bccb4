"""Blocks as CUDA graphs against the same blocks without them: weights, memory that is used again, and what is refused.

On a CPU a graph is emulated: its replay calls the captured function again and copies the results into the memory of the
first ones. So passes that would read what another pass has overwritten show here too.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from composer.core import Event
from torch import Tensor, nn

from diffusion.config.load import load
from diffusion.config.recipe import SpeedConfig, effective_parts
from diffusion.errors import UserError
from diffusion.models.activation_memory import blocks_of
from diffusion.models.families.i1.builder import tiny_i1
from diffusion.models.families.mmdit.builder import tiny_mmdit
from diffusion.models.families.prx.builder import tiny_prx
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.training import block_graphs
from diffusion.training.block_graphs import BlockGraphs
from diffusion.training.performance import apply_speed
from diffusion.training.train import build_trainer
from tests.callbacks.guarded_run import At
from tests.training.test_performance import NOTHING, batch_of, with_parts

MMDIT: dict[str, Any] = {'depth': 2, 'dual_attention_blocks': 1, 'text_width': 32, 'patch_size': 2}
PRX: dict[str, Any] = {'hidden_size': 32, 'num_heads': 2, 'depth': 2, 'text_width': 32, 'text_layers': 1}
I1: dict[str, Any] = PRX | {'depth': 3}


class EmulatedGraph:
    """A graph whose replay calls the function again and copies its results into the memory of the first ones."""

    def __init__(self, work: Callable[[], list[Tensor]], pool: object, name: str) -> None:
        self.work, self.results = work, work()

    def replay(self) -> None:
        with torch.enable_grad():
            found = self.work()
        for result, value in zip(self.results, found, strict=True):
            result.detach().copy_(value.detach())


@pytest.fixture
def graphs(device, monkeypatch) -> Callable[[nn.Module], BlockGraphs]:
    """Function that lets a denoiser run its blocks as graphs; emulated on a CPU."""
    if device == 'cpu':
        monkeypatch.setattr(block_graphs, 'CudaGraph', EmulatedGraph)
        monkeypatch.setattr(block_graphs, 'capturing', contextlib.nullcontext)
        monkeypatch.setattr(block_graphs, 'can_capture', lambda leaves: True)
    return lambda denoiser: BlockGraphs(denoiser, blocks_of(denoiser))


@pytest.fixture
def make_model(make_model) -> Callable[..., LatentDiffusion]:
    """Function that builds the smallest U-Net of several blocks."""
    return partial(make_model, layers_per_block=0, train_text_encoder=False)


@pytest.fixture
def make(request, make_model, small_vae) -> Callable[[], LatentDiffusion]:
    """Function that builds a tiny model of a kind, with random weights also where they begin as zeros."""

    def build() -> LatentDiffusion:
        torch.manual_seed(0)
        if request.param == 'unet':
            model = make_model()
        elif request.param == 'mmdit':
            model = tiny_mmdit(vae=str(small_vae), caption_dropout=0.0, **MMDIT)
        elif request.param == 'i1':
            model = tiny_i1(vae=str(small_vae), patch_size=2, caption_dropout=0.0, **I1)
        else:
            model = tiny_prx(vae=str(small_vae), patch_size=2, caption_dropout=0.0, **PRX)
        for weight in model.denoiser.parameters():
            nn.init.normal_(weight, std=0.1)
        return model

    return build


def batch_on(device: str, model: Any, **settings: int) -> dict[str, Any]:
    return {name: each.to(device) for name, each in batch_of(model, **settings).items()}


def train(model: Any, device: str, *, batches: int = 4, half: bool = False) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.denoiser.parameters(), lr=1e-2)
    for number in range(batches):
        optimizer.zero_grad(set_to_none=True)
        for part in range(2):
            batch = batch_on(device, model, first=10 * number + 2 * part)
            with torch.autocast(device, torch.bfloat16, enabled=half):
                loss = model.loss(model(batch), batch)
            loss.backward()
        optimizer.step()
    return [each.detach().cpu() for each in model.denoiser.parameters()]


def assert_equal(found: list[Tensor], expected: list[Tensor], device: str, *, half: bool = False) -> None:
    """Compare weights: autograd adds the gradients of several branches in another order."""
    # In bfloat16 they are rounded; on a GPU, cuDNN may choose other kernels.
    rtol, atol = (2e-2, 2e-3) if half else (1e-5, 1e-7) if device == 'cpu' else (1e-3, 1e-5)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ('make', 'half'),
    [pytest.param('unet', True, marks=pytest.mark.slow), ('mmdit', False), ('prx', True), ('i1', False)],
    indirect=['make'],
)
def test_training_is_the_same_with_graphs(make, graphs, device, half):
    expected = train(make().to(device), device, half=half)
    model = make().to(device)
    start = [each.detach().cpu().clone() for each in model.denoiser.parameters()]
    found = graphs(model.denoiser)
    weights = train(model, device, half=half)
    assert found.replays == 2 * 4 - 1
    assert_equal(weights, expected, device, half=half)
    assert max((one - other).abs().max() for one, other in zip(weights, start, strict=True)) > 1e-3


def test_forward_pass_before_the_backward_pass_of_another_runs_without_graphs(make_model, graphs, device, caplog):
    model, plain = make_model().to(device), make_model().to(device)
    found = graphs(model.denoiser)
    batches = [batch_on(device, model, first=first) for first in (0, 2, 4)]
    model.loss(model(batches[0]), batches[0]).backward()
    model.zero_grad()
    for each in (model, plain):
        losses = [each.loss(each(batch), batch) for batch in batches[1:]]
        sum(losses).backward()  # type: ignore[union-attr]
    assert found.replays == 1 and 'runs without graphs' in caplog.text
    for weight, other in zip(model.denoiser.parameters(), plain.denoiser.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad)
    # A result that is dropped without a backward pass does not keep the memory.
    del losses
    model.loss(model(batches[0]), batches[0])
    model.loss(model(batches[1]), batches[1]).backward()
    assert found.replays == 3


def test_weights_that_have_moved_are_captured_again(make_model, graphs, device, caplog):
    expected = train(make_model().to(device), device, batches=2)
    model = make_model().to(device)
    found = graphs(model.denoiser)
    loss = model.loss(model(batch := batch_on(device, model)), batch)
    loss.backward()
    model.loss(model(batch), batch).backward()
    model.zero_grad()
    for weight in model.denoiser.parameters():
        weight.data = weight.data.clone()
    assert_equal(train(model, device, batches=2), expected, device)
    assert found.replays == 5 and caplog.text.count('captured again') == 1


def test_shapes_beyond_the_limit_run_without_graphs_and_gradients_need_memory_once_for_all_shapes(
    make_model, graphs, device, caplog, monkeypatch
):
    monkeypatch.setattr(block_graphs, 'MAX_GRAPH_SHAPES', 2)
    model = make_model().to(device)
    found = graphs(model.denoiser)
    for size in (1, 1, 2, 2, 3, 3):
        batch = batch_on(device, model, size=size)
        model.loss(model(batch), batch).backward()
    assert found.replays == 2 and len(found._passes) == 2
    assert caplog.text.count('other shapes run without graphs') == 1
    with torch.no_grad():
        model(batch_on(device, model))
    assert found.replays == 2, 'passes without gradients run without graphs'
    first, second = found._passes.values()
    for one, other in zip(first._calls, second._calls, strict=True):
        places = [[each.data_ptr() for each in call._weight_gradients if each is not None] for call in (one, other)]
        assert places[0] == places[1] and len(places[0]) > 2


class TwoBlocks(nn.Module):
    """A denoiser of two linear blocks, whose arguments and order can be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.between: Callable[[Tensor], Tensor] = lambda hidden: hidden
        self.order = [0, 1]

    def forward(self, hidden: Tensor) -> Tensor:
        first, second = (self.blocks[place] for place in self.order)
        return second(self.between(first(hidden)).tanh())


@pytest.mark.parametrize(
    ('order', 'between', 'message'),
    [
        ([1, 0], lambda hidden: hidden, r'runs Linear with other arguments, or in another order.*cuda_graphs=false'),
        ([0, 1], lambda hidden: hidden[:1], 'other arguments'),
        ([0, 1], lambda hidden: hidden.mul_(2), 'the output of a Linear was changed in place'),
    ],
    ids=['order', 'arguments', 'in place'],
)
def test_pass_that_differs_from_the_captured_one_is_refused(graphs, device, order, between, message):
    model = TwoBlocks().to(device)
    BlockGraphs(model, list(model.blocks))
    for _ in range(3):
        model(torch.ones(2, 4, device=device)).sum().backward()
    model.order, model.between = order, between
    with pytest.raises(UserError, match=message):
        model(torch.ones(2, 4, device=device)).sum().backward()


def test_frozen_blocks_before_the_first_trained_one_run_without_graphs(graphs, device, caplog):
    models = [TwoBlocks().to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model.blocks[0].requires_grad_(False)
    found = BlockGraphs(models[0], list(models[0].blocks))
    for number in range(4):
        for model in models:
            model(torch.full((2, 4), number / 3, device=device)).square().sum().backward()
    assert found.replays == 3 and not caplog.records
    assert models[0].blocks[0].weight.grad is None
    torch.testing.assert_close(models[0].blocks[1].weight.grad, models[1].blocks[1].weight.grad)


def test_output_without_gradients_is_refused(graphs, device):
    class Counting(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return super().forward(input), input.new_zeros(1)

    model = nn.Sequential(Counting(4, 4)).to(device)
    BlockGraphs(model, [model[0]])
    model(torch.ones(2, 4, device=device))[0].sum().backward()
    with pytest.raises(UserError, match='Counting returns a tensor that requires no gradients'):
        model(torch.ones(2, 4, device=device))


@pytest.mark.slow
def test_trainer_trains_and_evaluates_with_graphs(write_recipe, graphs, device):
    """Through Composer's trainer, with averages, microbatches and a save: the same losses as without graphs."""
    settings = ['trainer.max_duration=4ba', 'trainer.save_interval=2ba']
    settings += [] if device == 'cpu' else ['trainer.device=gpu', 'trainer.precision=amp_bf16']
    sections = {'device_train_microbatch_size': 4, 'algorithms': {'ema': {'ema_start': '2ba', 'smoothing': 0.5}}}
    losses: list[list[float]] = [[], []]
    for on, found in enumerate(losses):
        path = write_recipe(small=True, name=f'graphs-{on}', **sections)
        trainer = build_trainer(load(path, [*settings, 'speed.preset=none', f'speed.cuda_graphs={bool(on)}']))
        state: Any = trainer.state
        denoiser = getattr(state.model, 'module', state.model).denoiser
        emulated = BlockGraphs(denoiser, blocks_of(denoiser)) if on and device == 'cpu' else None
        note = lambda found=found, state=state: found.append(state.loss.item())  # noqa: E731
        state.callbacks.append(At(Event.AFTER_LOSS, 3, note))
        trainer.fit()
        trainer.close()
        assert emulated is None or emulated.replays == 2 * 4 - 1
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if device == 'cpu' else 1e-2) and len(losses[0]) == 2


def test_graphs_need_a_gpu_and_ddp(make_model):
    wanted = SpeedConfig(cuda_graphs=True)
    assert effective_parts(wanted, on_gpu=True).cuda_graphs
    assert not effective_parts(wanted, on_gpu=False).cuda_graphs
    assert not effective_parts(wanted, on_gpu=True, strategy='fsdp2').cuda_graphs
    assert not effective_parts(SpeedConfig(), on_gpu=True).cuda_graphs, 'it needs memory, so it is asked for'
    model = make_model()
    apply_speed(model, with_parts('cuda_graphs'))
    assert all('forward' in vars(block) for block in blocks_of(model.denoiser))
    assert NOTHING.cuda_graphs is False
