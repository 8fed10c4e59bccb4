"""A test without the marker `slow` fails if it takes more CPU time than a limit.

CPU time counts what the test and its own fixtures take: in this process, in its children that have ended, and in the
forks of the fork server. Fixtures that tests share and tests that import a library do not count. The few tests of
promises that need more time than that, such as of several ranks, say how much: `@pytest.mark.cpu_seconds(20)`.
"""

import resource
import sys
import time
from collections.abc import Generator
from typing import Any

import pytest

LIMIT_SECONDS = 5.0
TOLERANCE = 2.0
"""Factor by which a test may exceed its limit: a core that others use too takes up to twice the time."""
LOOP_SECONDS = 0.2
"""CPU time of `loop` on an idle core of the machine that the limit is for: slower or busy ones get more time."""
MANY_MODULES = 100
"""Number of new modules from which on a test has imported a library, whose time belongs to no test."""
FORKSERVER = pytest.StashKey[Any]()
"""Client of the fork server, in the stash of pytest's configuration."""


class CpuLimit:
    """Measures the tests of a session."""

    def __init__(self) -> None:
        self._shared = 0.0
        self._depth = 0
        self._began = 0.0
        self._modules = 0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        self._began, self._modules = self._used(item.config), len(sys.modules)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        if fixturedef.scope == 'function':
            return (yield)
        began = self._used(request.config)
        self._depth += 1
        try:
            return (yield)
        finally:
            self._depth -= 1
            if not self._depth:
                self._shared += self._used(request.config) - began

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        result = yield
        seconds = self._used(item.config) - self._began
        imported = len(sys.modules) - self._modules >= MANY_MODULES
        marker = item.get_closest_marker('cpu_seconds')
        limit = TOLERANCE * (marker.args[0] if marker else LIMIT_SECONDS)
        exempt = imported or any(item.get_closest_marker(name) for name in ('slow', 'gpu'))
        if seconds > limit and not exempt and (seconds := seconds / slowness()) > limit:
            pytest.fail(
                f'{item.nodeid} took {seconds:.1f} s of CPU time; the limit without `slow` is {limit:g} s. To fix: '
                'make it smaller, move what tests share to a fixture of the module, or mark it @pytest.mark.slow and '
                'keep a smaller test of the same promise without the mark.',
                pytrace=False,
            )
        return result

    def _used(self, config: pytest.Config) -> float:
        """Return the CPU seconds used so far, without those of shared fixtures that are set up."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = time.process_time() + used.ru_utime + used.ru_stime - self._shared
        if server := config.stash.get(FORKSERVER, None):
            seconds += server.seconds
        return seconds


def slowness() -> float:
    """Return how many times slower than on an idle machine this process computes, at least 1."""
    began = time.process_time()
    loop()
    return max(1.0, (time.process_time() - began) / LOOP_SECONDS)


def loop() -> int:
    return sum(number * number for number in range(3_000_000))
