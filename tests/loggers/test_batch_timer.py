"""Speed and remaining time are those of training batches, by a fake clock."""

import pytest

from diffusion.loggers.progress_lines import BatchTimer


class Clock:
    """A training whose batches and work in between take given times."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timer = BatchTimer()

    def train(self, batches: int, seconds: float, *, between: float = 0.0) -> None:
        """Train batches, each followed by other work."""
        for _ in range(batches):
            self.timer.begin(self.now)
            self.now += seconds
            self.timer.end(self.now)
            self.now += between


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_evaluations_and_saves_do_not_count(clock):
    for _ in range(4):
        clock.train(50, 0.2)
        clock.now += 600  # an evaluation, an image grid, a save
    clock.train(1, 0.2)
    assert clock.timer.seconds_per_batch == pytest.approx(0.2, rel=0.03)


def test_callbacks_of_every_batch_count(clock):
    clock.train(100, 0.2, between=0.05)
    assert clock.timer.seconds_per_batch == pytest.approx(0.25)


def test_slow_first_batch_does_not_count_and_the_average_is_unbiased(clock):
    assert clock.timer.seconds_per_batch is None
    clock.train(1, 90.0)
    assert clock.timer.seconds_per_batch is None
    clock.train(1, 3.0)
    assert clock.timer.seconds_per_batch == pytest.approx(3.0)
    clock.train(1, 5.0)
    assert clock.timer.seconds_per_batch == pytest.approx(4.0, rel=0.05)


def test_data_that_come_in_bursts_count_with_their_average(clock):
    for _ in range(100):
        clock.train(7, 0.1)
        clock.train(1, 2.5)
    assert clock.timer.seconds_per_batch == pytest.approx(0.4, rel=0.1)


@pytest.mark.parametrize(('before', 'after'), [(0.01, 0.1), (20.0, 60.0)])
def test_average_follows_a_change_of_speed(clock, before, after):
    clock.train(500, before)
    clock.train(round(max(300 / after, 50)), after)
    assert clock.timer.seconds_per_batch == pytest.approx(after, rel=0.05)
