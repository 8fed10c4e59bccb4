"""Working folder of the planning tests."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def folder_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in an empty folder: `make quickstart` prepares data in the repository, whose sizes plans show."""
    monkeypatch.chdir(tmp_path)
