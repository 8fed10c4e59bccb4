"""Fixtures for valid job specs over valid recipes, and for validation by an installed SkyPilot."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from object_store import ENVIRONMENT

from diffusion.config.yaml_files import Dumper
from diffusion.launch.backends.base import Rendered
from diffusion.launch.job_checks import CheckedSpec, check_jobs, load_job_spec
from tests.launch.specs import BACKENDS, changed

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_root_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to the repository root, which recipe paths are relative to."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def write_spec(tmp_path: Path) -> Callable[..., Path]:
    """Write a valid spec for a backend, with the keyword arguments merged in; return its path."""

    def write(backend: str, /, **changes: Any) -> Path:
        content = {
            'name': 'job',
            'backend': {'name': backend},
            'recipe': 'yamls/quickstart.yaml',
            'image': 'registry.example.com/diffusion:latest',
            'nodes': 2,
            'gpu': 'a100-80gb',
        }
        content = changed(changed(content, BACKENDS[backend]), changes)
        path = tmp_path / 'job.yaml'
        # safe_dump would leave 0E0 unquoted, which is a number in YAML 1.2.
        path.write_text(yaml.dump(content, Dumper=Dumper, sort_keys=False), encoding='utf-8')
        return path

    return write


@pytest.fixture
def prepare(write_spec: Callable[..., Path]) -> Callable[..., tuple[CheckedSpec, Rendered]]:
    def make(backend: str, /, **changes: Any) -> tuple[CheckedSpec, Rendered]:
        path = write_spec(backend, **changes)
        checked = check_jobs(load_job_spec(path), path)
        rendered = checked.backend.render(checked.jobs)
        problems = checked.backend.validate(rendered)
        assert not problems, '\n'.join(str(problem) for problem in problems)
        return checked, rendered

    return make


@pytest.fixture
def add_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Function that puts a program with this text first on PATH, and returns its path."""
    folder = tmp_path / 'bin'
    folder.mkdir()
    monkeypatch.setenv('PATH', str(folder), prepend=':')

    def add(name: str, text: str) -> Path:
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
        return folder / name

    return add


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def aws(credentials: None) -> Iterator[None]:
    """AWS mocked by moto in this process; no request leaves it."""
    from moto import mock_aws

    with mock_aws():
        yield


class SkyPilot:
    """SkyPilot, running in a process with its own interpreter.

    Args:
        process: Process that runs ask_skypilot.py.
        log: File with the stderr of that process.
    """

    def __init__(self, process: 'subprocess.Popen[str]', log: Path) -> None:
        self._process, self._log = process, log
        self.known: dict[str, list[str]] = self._answer()
        """Keys by schema name, and the names of recovery strategies under `strategies`."""

    def problem(self, text: str) -> str | None:
        """Return the error of `sky jobs launch` for the text of a file, or None."""
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
    """SkyPilot as installed by `make .venv-skypilot/installed`, without a cloud, a server or a network."""
    python = ROOT / '.venv-skypilot' / 'bin' / 'python'
    if not python.exists():
        pytest.skip('SkyPilot is not installed; make test-all installs it')
    home = tmp_path_factory.mktemp('session-home')
    environ = os.environ | {'HOME': str(home), 'SKYPILOT_DISABLE_USAGE_COLLECTION': '1', 'https_proxy': 'localhost:1'}
    command = [str(python), str(Path(__file__).with_name('ask_skypilot.py'))]
    with (
        (home / 'log').open('w') as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environ
        ) as process,
    ):
        yield SkyPilot(process, home / 'log')
