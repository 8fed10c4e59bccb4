"""Steps of the system clock while a job trains: it is neither ended nor blinded, and its goodput adds up.

libfaketime steps the clock inside the job's processes; the machine's clock is never set.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forkserver import ROOT, Server

from diffusion.runs import attempts
from tests.launch import test_local
from tests.launch.test_local import LAUNCH, Launched

write_job = test_local.write_job

LIBRARIES = ('/usr/lib/*/faketime/libfaketimeMT.so.1', '/usr/lib64/faketime/libfaketimeMT.so.1')
SLEEP = """\
# libfaketime 0.9.10 moves the deadline of clock_nanosleep, which time.sleep uses, even if the monotonic clock is real.
import select
import time

time.sleep = lambda seconds: select.select([], [], [], max(0, seconds))
"""


class FakeClock:
    """The system clock of processes with these environment variables.

    Args:
        library: Path of libfaketime.
        folder: Folder for its files.
    """

    def __init__(self, library: Path, folder: Path) -> None:
        self._offset = folder / 'offset'
        self.step_to(0)
        (folder / 'sitecustomize.py').write_text(SLEEP)
        self.environment = {
            'LD_PRELOAD': str(library),
            'FAKETIME_TIMESTAMP_FILE': str(self._offset),
            'FAKETIME_CACHE_DURATION': '1',
            'FAKETIME_DONT_FAKE_MONOTONIC': '1',  # a clock that is set changes CLOCK_REALTIME only
            'NO_FAKE_STAT': '1',
            'PYTHONPATH': f'{folder}:{ROOT}:{ROOT / "tests"}',
        }

    def step_to(self, seconds: int) -> None:
        """Set the clock to some seconds after the real time."""
        unfinished = self._offset.with_suffix('.new')
        unfinished.write_text(f'{seconds:+d}\n')
        unfinished.replace(self._offset)


@pytest.fixture
def clock(tmp_path: Path) -> FakeClock:
    found = [path for pattern in LIBRARIES for path in Path('/').glob(pattern[1:])]
    if not found:
        pytest.skip('libfaketime is not installed; apt-get install faketime')
    folder = tmp_path / 'clock'
    folder.mkdir()
    return FakeClock(found[0], folder)


@pytest.fixture
def server(clock: FakeClock) -> Iterator[Server]:
    with contextlib.closing(Server(clock.environment)) as found:
        found.wait_for_server()
        yield found


@pytest.mark.slow
def test_clock_steps_neither_end_nor_blind_a_job(clock, server, write_job):
    spec, recipe, run = write_job('stepped', batches=48, processes=1, hang_seconds=10)
    begin = time.monotonic()
    job = Launched([*LAUNCH, str(spec)], server, recipe, run, **clock.environment)
    job.wait_for_batches(3)
    clock.step_to(1200)
    job.wait_for_batches(6)
    clock.step_to(1200 - 3600)
    job.wait_for_batches(9)
    time.sleep(1.5)  # libfaketime reads the offset once per second
    assert len(attempts.read_attempts(run)) == 1, job.log.read_text()
    job.stop_rank(1)
    stopped = time.monotonic()
    job.wait_for_attempt(2)
    noticed = time.monotonic() - stopped
    assert job.wait() == 0, job.log.read_text()
    elapsed = time.monotonic() - begin
    found = attempts.read_attempts(run)
    assert [(each.cause, each.status) for each in found] == [('hang', 75), ('done', 0)], job.log.read_text()
    assert noticed < 100
    breakdown, _ = attempts.time_breakdown(found)
    parts = [breakdown.productive, breakdown.starting, breakdown.redone, breakdown.down, breakdown.ending]
    assert min(parts) >= 0 and sum(parts) == pytest.approx(breakdown.wall, abs=1e-3)
    assert 0.3 * elapsed < breakdown.wall < elapsed
    # The clock really stepped: by the wall clock of its processes, the job's log ends before it begins.
    times = [time.strptime(line[:8], '%H:%M:%S') for line in job.log.read_text().splitlines() if ' INFO: ' in line]
    first, last = (each.tm_hour * 3600 + each.tm_min * 60 + each.tm_sec for each in (times[0], times[-1]))
    assert (first - last) % 86400 < 3600, job.log.read_text()
