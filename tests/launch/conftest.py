"""Job specs to break, over recipes that are sound; and SkyPilot, to ask what it thinks of them."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from diffusion.launch.backends.base import Rendered
from diffusion.launch.job_checks import CheckedSpec, check_jobs, load_job_spec
from tests.launch.specs import BACKENDS, changed

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes are named from the folder that holds run.py."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def write_spec(tmp_path: Path) -> Callable[..., Path]:
    """Writes a sound spec of a back end; keywords are put on top."""

    def write(of: str, /, **changes: Any) -> Path:
        content = {
            'name': 'job',
            'backend': {'name': of},
            'recipe': 'yamls/quickstart.yaml',
            'image': 'registry.example.com/diffusion:latest',
            'nodes': 2,
            'gpu': 'a100-80gb',
        }
        content = changed(changed(content, BACKENDS[of]), changes)
        path = tmp_path / 'job.yaml'
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding='utf-8')
        return path

    return write


@pytest.fixture
def prepare(write_spec: Callable[..., Path]) -> Callable[..., tuple[CheckedSpec, Rendered]]:
    """Checks, renders and validates a spec."""

    def make(of: str, /, **changes: Any) -> tuple[CheckedSpec, Rendered]:
        path = write_spec(of, **changes)
        checked = check_jobs(load_job_spec(path), path)
        rendered = checked.backend.render(checked.jobs)
        problems = checked.backend.validate(rendered)
        assert not problems, '\n'.join(str(problem) for problem in problems)
        return checked, rendered

    return make


class SkyPilot:
    """SkyPilot in a process of its own interpreter.

    Args:
        process: Runs ask_skypilot.py.
        log: What it complains of.
    """

    def __init__(self, process: 'subprocess.Popen[str]', log: Path) -> None:
        self._process, self._log = process, log
        self.known: dict[str, list[str]] = self._answer()
        """Keys by the name of what has them, and `strategies`."""

    def problem(self, text: str) -> str | None:
        """What is wrong with a file for `sky jobs launch`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(text) + '\n')
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f'SkyPilot ended with {self._process.wait()}: {self._log.read_text()[-2000:]}'
        return json.loads(line)


@pytest.fixture(scope='session')
def skypilot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyPilot]:
    """SkyPilot as `make .venv-skypilot/installed` installs it, without a cloud, a server or a network."""
    python = ROOT / '.venv-skypilot' / 'bin' / 'python'
    if not python.exists():
        pytest.skip('SkyPilot is not installed; make test-all installs it')
    home = tmp_path_factory.mktemp('home')
    environ = os.environ | {'HOME': str(home), 'SKYPILOT_DISABLE_USAGE_COLLECTION': '1', 'https_proxy': 'localhost:1'}
    command = [str(python), str(Path(__file__).with_name('ask_skypilot.py'))]
    with (
        (home / 'log').open('w') as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environ
        ) as process,
    ):
        yield SkyPilot(process, home / 'log')
