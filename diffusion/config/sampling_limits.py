"""Allowed values of the settings for generating images, shared by recipes, command lines and the model.

Each function returns an error message with the range to choose from, or None if the value is allowed.
"""

import math

SEEDS = 2**32
"""Number of seeds; Philox draws the initial noise and takes a seed as one word of 32 bits."""


def seeds_problem(first: int, count: int = 1) -> str | None:
    """Return an error message if `count` consecutive seeds are not in [0, 2**32), else None."""
    if 0 <= first <= SEEDS - count:
        return None
    last = '' if count == 1 else f' for the first of {count} images'
    return f'{first} is out of range; use 0 to {SEEDS - count}{last}'


def steps_problem(steps: int, num_train_timesteps: int | None) -> str | None:
    """Return an error message if the number of sampling steps is not between 1 and that of the noise schedule."""
    if steps >= 1 and (num_train_timesteps is None or steps <= num_train_timesteps):
        return None
    if num_train_timesteps is None:
        return f'{steps} is out of range; use 1 or more'
    return f'{steps} is out of range; use 1 to {num_train_timesteps}, the number of timesteps of the noise schedule'


def guidance_problem(scale: float) -> str | None:
    """Return an error message if the guidance scale is negative or not finite, else None."""
    if math.isfinite(scale) and scale >= 0:
        return None
    return f'{scale} is out of range; use 0 or more (1 turns guidance off, 7.5 is common)'


def rescale_problem(rescale: float) -> str | None:
    """Return an error message if the guidance rescale is not in [0, 1], else None."""
    return None if 0 <= rescale <= 1 else f'{rescale} is out of range; use 0 (off) to 1'
