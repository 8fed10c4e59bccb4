"""Tests of runs start in the repository root, which recipe paths are relative to."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _in_root_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
