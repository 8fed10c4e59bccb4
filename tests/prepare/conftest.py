"""Fixtures of the tests of data preparation."""

import os

import pytest


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out fsync, which takes a fifth of the time and matters only when the machine stops."""
    monkeypatch.setattr(os, 'fsync', lambda descriptor: None)
