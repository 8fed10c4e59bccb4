"""Versions outside the bounds that pyproject.toml does not declare."""

import importlib.metadata

import pytest

from diffusion.compatibility.version_bounds import BOUNDS, check_bounds
from diffusion.errors import UserError


@pytest.mark.parametrize(
    ('version', 'accepted'),
    [('0.38.9', False), ('0.39', True), ('0.39.0rc1', True), ('0.42.1', True), ('0.43.0.dev0', False), ('1.0', False)],
)
def test_version_outside_the_bounds_is_refused_with_the_way_out(monkeypatch, version, accepted):
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, 'version', lambda name: version if name == 'diffusers' else installed(name))
    if accepted:
        check_bounds()
        return
    with pytest.raises(UserError, match=rf"diffusers {version} is .* pip install 'diffusers>=0\.39,<0\.43', or"):
        check_bounds()


def test_missing_package_is_left_to_its_import(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, 'version', version)
    check_bounds()
    assert BOUNDS
