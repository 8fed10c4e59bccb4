"""Job specs to break, over recipes that are sound."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from diffusion.launch.backend import Rendered
from diffusion.launch.checking import Checked, check, load
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
def prepare(write_spec: Callable[..., Path]) -> Callable[..., tuple[Checked, Rendered]]:
    """Checks, renders and validates a spec."""

    def make(of: str, /, **changes: Any) -> tuple[Checked, Rendered]:
        path = write_spec(of, **changes)
        checked = check(load(path), path)
        rendered = checked.backend.render(checked.jobs)
        problems = checked.backend.validate(rendered)
        assert not problems, '\n'.join(str(problem) for problem in problems)
        return checked, rendered

    return make
