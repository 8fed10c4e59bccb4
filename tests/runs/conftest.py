"""Tests of runs start in the repository root, which recipe paths are relative to; some need job specs."""

from tests.launch.conftest import _in_root_folder, prepare, write_spec  # noqa: F401
