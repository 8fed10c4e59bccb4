"""Training for a number of CPU seconds on samples in memory, and measures that compare models of different objectives.

Shapes: B batch, C latent channels, H W latent size, L text tokens, N samples.
"""

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from composer import Trainer
from composer.core import Algorithm, Callback, DataSpec, State
from composer.loggers import Logger
from torch import Tensor

from diffusion.evaluation.retrieval import nearest_images
from diffusion.models import batch_keys
from diffusion.models.families.adapter import Condition
from diffusion.models.latent_diffusion import LatentDiffusion, squared_error
from diffusion.models.objective import Objective
from diffusion.models.randomness import Draws, Purpose

WARMUP = 0.05
"""Fraction of the training time in which the learning rate increases."""
VALIDATION_SEED = 17
ALPHA_BARS = Objective().alpha_bars()
"""Signal variance of each timestep of the noise schedule of Stable Diffusion, which is the quickstart's."""


@dataclass(frozen=True)
class Samples:
    """Images with captions, and what training needs of them, in memory."""

    captions: list[str]
    images: Tensor
    """uint8 [N, 3, height, width]."""
    tokens: Tensor
    """Token ids, int64 [N, 1, L]."""
    moments: Tensor | None = None
    """Output of the VAE's encoder, [N, 2C, H, W]; None for models on pixels."""

    def __len__(self) -> int:
        return len(self.captions)

    def take(self, indices: Sequence[int]) -> 'Samples':
        """Return the samples with these indices."""
        chosen = torch.tensor(list(indices))
        moments = None if self.moments is None else self.moments[chosen]
        return Samples([self.captions[i] for i in indices], self.images[chosen], self.tokens[chosen], moments)

    def batch(self, indices: Tensor, *, epoch: int = 0, index: int = 0) -> dict[str, Tensor]:
        """Return a batch of the model: the samples of these indices, int64 [B], with the keys of its random numbers."""
        latents = {} if self.moments is None else {batch_keys.LATENT_MOMENTS: self.moments[indices]}
        return {
            batch_keys.IMAGE: self.images[indices],
            batch_keys.INPUT_IDS: self.tokens[indices],
            batch_keys.SAMPLE_ID: indices,
            batch_keys.EPOCH: torch.full_like(indices, epoch),
            batch_keys.BATCH_INDEX: torch.full_like(indices, index),
            **latents,
        }


@dataclass
class EndlessBatches:
    """Shuffled batches of samples, epoch after epoch, without an end."""

    samples: Samples
    batch_size: int
    seed: int

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator, epoch = torch.Generator().manual_seed(self.seed), 0
        while True:
            order = torch.randperm(len(self.samples), generator=generator)
            for index, start in enumerate(range(0, len(order) - self.batch_size + 1, self.batch_size)):
                yield self.samples.batch(order[start : start + self.batch_size], epoch=epoch, index=index)
            epoch += 1


class CpuBudget(Callback):
    """Callback that ends training after a number of CPU seconds of this process, counted from batch start to batch end.

    Other programs on the machine make wall time longer, but not these seconds.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.spent = 0.0
        self.batches = 0
        self._started = 0.0

    @property
    def fraction(self) -> float:
        """Fraction of the budget that is spent."""
        return min(1.0, self.spent / self.seconds)

    def batch_start(self, state: State, logger: Logger) -> None:
        self._started = time.process_time()

    def batch_end(self, state: State, logger: Logger) -> None:
        self.spent += time.process_time() - self._started
        self.batches += 1
        if self.spent >= self.seconds:
            state.stop_training()

    def learning_rate(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor of the learning rate: linear warmup, then linear to 0 (Composer requires `ssr`)."""
        return min(1.0, (self.fraction + 1e-3) / WARMUP) * (1 - self.fraction)


def train_for(
    seconds: float,
    model: LatentDiffusion,
    samples: Samples,
    optimizer: torch.optim.Optimizer,
    *,
    batch: int,
    seed: int,
    algorithms: Sequence[Algorithm] = (),
) -> CpuBudget:
    """Train a model for a number of CPU seconds with Composer's Trainer, and return the callback that counted them."""
    assert len(samples) >= batch, 'a batch must not be larger than the data'
    budget = CpuBudget(seconds)
    batches = EndlessBatches(samples, batch, seed)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        trainer = Trainer(
            model=model,
            train_dataloader=DataSpec(batches, get_num_samples_in_batch=lambda each: len(each[batch_keys.INPUT_IDS])),
            optimizers=optimizer,
            schedulers=budget.learning_rate,
            max_duration='1000000000ba',
            algorithms=list(algorithms),
            callbacks=[budget],
            device='cpu',
            seed=seed,
            progress_bar=False,
        )
        trainer.fit()
        trainer.close()
    return budget


def velocity_error(
    model: LatentDiffusion, latents: Tensor, noise: Tensor, condition: Condition, *, alpha_bar: float
) -> Tensor:
    """Return the squared error of each sample's predicted v = sqrt(a) eps - sqrt(1 - a) x at a signal variance a, [B].

    A flow is evaluated at the time t of equal signal-to-noise ratio, with standard deviation s of its noise:

        s t / (1 - t) = sqrt((1 - a) / a)

    An error d of its velocity is one of t d in x, and an error d in x is one of d / sqrt(1 - a) in v.
    """
    objective = model.objective
    if not objective.is_flow:
        assert objective.prediction_type == 'v_prediction', 'other diffusion models are not compared'
        timestep = int((model.alpha_bars - alpha_bar).abs().argmin())
        timesteps = torch.full((len(latents),), timestep)
        return squared_error(model.denoise(latents, noise, timesteps, condition))
    ratio = ((1 - alpha_bar) / alpha_bar) ** 0.5
    time = ratio / (objective.noise_scale + ratio)
    timesteps = torch.full((len(latents),), time * objective.num_train_timesteps)
    error = squared_error(model.denoise(latents, noise, timesteps, condition))
    return error * (1.0 if objective.prediction_type == 'sample' else time**2) / (1 - alpha_bar)


def condition_of(model: LatentDiffusion, tokens: Tensor) -> Condition:
    """Return the condition of captions, token ids [B, 1, L]."""
    text = model.embed(tokens)
    return Condition(text.embeds, model.text.padding_mask(tokens) if model.mask_padding else None, text.pooled)


@torch.no_grad()
def validation_loss(model: LatentDiffusion, samples: Samples, *, batch: int = 64) -> float:
    """Return the mean of `velocity_error` over samples and the 8 noise levels of the quickstart's validation loss.

    The noise is the same for every model, keyed by the sample.
    """
    levels = [float(ALPHA_BARS[timestep]) for timestep in model.validation_timesteps()]
    errors = []
    model.eval()
    for start in range(0, len(samples), batch):
        indices = torch.arange(start, min(start + batch, len(samples)))
        given = samples.batch(indices)
        latents, condition = model.latents_of(given), condition_of(model, given[batch_keys.INPUT_IDS])
        for index, alpha_bar in enumerate(levels):
            draws = Draws(VALIDATION_SEED, indices, torch.zeros_like(indices), torch.full_like(indices, index))
            noise = draws.normal(Purpose.VALIDATION_NOISE, latents.shape[1:])
            errors.append(velocity_error(model, latents, noise, condition, alpha_bar=alpha_bar))
    model.train()
    return float(torch.cat(errors).mean())


@dataclass(frozen=True)
class Drawn:
    """Measures of images generated from captions."""

    retrieval: float
    """Fraction whose nearest real image, by mean squared difference of pixels, is that of the same caption."""
    color_error: float
    """Mean absolute difference of the mean color of an image and of the real one of its caption, in [0, 1]."""


def draw(model: LatentDiffusion, samples: Samples, *, steps: int = 25, guidance_scale: float = 3.0) -> Drawn:
    """Generate an image of each sample's caption, and compare it with the real images of all the samples."""
    images: list[Tensor] = []
    settings: dict[str, Any] = {'num_inference_steps': steps, 'guidance_scale': guidance_scale}
    for start in range(0, len(samples), 50):
        captions = samples.captions[start : start + 50]
        size = (samples.images.shape[2], samples.images.shape[3])
        images.append(model.generate(captions, seeds=range(start, start + len(captions)), size=size, **settings))
    generated, real = torch.cat(images), samples.images.float() / 255
    nearest = nearest_images(generated, real)
    colors = [each.mean(dim=(2, 3)) for each in (generated, real)]
    return Drawn(
        retrieval=float((nearest == torch.arange(len(samples))).float().mean()),
        color_error=float((colors[0] - colors[1]).abs().mean()),
    )
