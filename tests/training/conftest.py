"""Fixtures of all tests of training."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope='session', autouse=True)
def _no_loss_curves() -> Iterator[None]:
    """Draw no loss curves: drawing takes a third of the time of a run of this folder's tests."""
    from diffusion.loggers import metrics_file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_file, 'draw_loss_curve', lambda *_: None)
        yield
