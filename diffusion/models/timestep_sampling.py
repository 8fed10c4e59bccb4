"""Random timesteps of training batches."""

from torch import Tensor

from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.objective import Objective
from diffusion.models.randomness import Draws, Purpose


def training_timesteps(objective: Objective, draws: Draws, quantiles: Tensor | None) -> Tensor:
    """Return a random timestep for each sample of a batch, [B]: int64 for diffusion, float32 for a flow.

    Args:
        quantiles: Quantiles of the timesteps in [0, 1), float64 [B], which the loader gives for stratified timesteps.

    Raises:
        UserError: The timesteps are stratified, and there are no quantiles.
    """
    steps = objective.num_train_timesteps
    if objective.timesteps != 'stratified':
        if objective.is_flow:
            return (objective.time_of(draws.uniform(Purpose.TIMESTEP)) * steps).float()
        return draws.integers(Purpose.TIMESTEP, steps)
    if quantiles is None:
        raise UserError(
            f'batch: has no {batch_keys.TIMESTEP_QUANTILE}, which objective.timesteps: stratified needs; use a '
            'BucketedLoader with stratified=True, or timesteps: uniform'
        )
    if objective.is_flow:
        return (objective.time_of(quantiles.double()) * steps).float()
    # A quantile just below 1, such as 1 - 2**-52, times 1000 is rounded to 1000.
    return (quantiles * steps).long().clamp(max=steps - 1)
