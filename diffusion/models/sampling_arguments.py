"""Checks of the arguments of `LatentDiffusion.generate`."""

from collections.abc import Sequence

from diffusion.config.sampling_checks import guidance_problem, rescale_problem, seeds_problem, steps_problem
from diffusion.errors import UserError


def as_captions(prompts: Sequence[str]) -> list[str]:
    """Return prompts as a list, or raise UserError if they are not a sequence of at least one string."""
    # A string is a sequence of strings too, and would give one image per letter.
    if isinstance(prompts, str):
        raise UserError(f'prompts: pass a list of captions, such as [{prompts!r}], instead of one string')
    captions = list(prompts)
    if not captions:
        raise UserError('prompts: pass at least one caption')
    wrong = [caption for caption in captions if not isinstance(caption, str)]
    if wrong:
        raise UserError(f'prompts: {wrong[0]!r} is not a string; pass a list of captions')
    return captions


def check_sampling(
    seeds: Sequence[int], num_inference_steps: int, num_train_timesteps: int, scale: float, rescale: float
) -> None:
    """Raise UserError if a seed, the number of steps, or a setting of guidance is out of range.

    Args:
        num_train_timesteps: Steps of the noise schedule in training, the maximum of `num_inference_steps`.
    """
    problems = {
        'seeds': next((problem for seed in seeds if (problem := seeds_problem(seed)) is not None), None),
        'num_inference_steps': steps_problem(num_inference_steps, num_train_timesteps),
        'guidance_scale': guidance_problem(scale),
        'guidance_rescale': rescale_problem(rescale),
    }
    for where, problem in problems.items():
        if problem is not None:
            raise UserError(f'{where}: {problem}')
