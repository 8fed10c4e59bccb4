"""A version of diffusers outside the bounds that pyproject.toml does not declare."""

import importlib.metadata

import pytest

from diffusion.compatibility import check_diffusers
from diffusion.errors import UserError


@pytest.mark.parametrize('version', ['0.39.0', '0.39.0rc1', '0.42.1'])
def test_version_within_the_bounds_is_accepted(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, 'version', lambda name: version)
    check_diffusers()


@pytest.mark.parametrize('version', ['0.38.9', '0.43.0.dev0', '1.0.0'])
def test_version_outside_the_bounds_is_refused_with_the_way_out(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, 'version', lambda name: version)
    with pytest.raises(UserError, match=rf"diffusers {version} is .* pip install 'diffusers>=0\.39,<0\.43', or"):
        check_diffusers()
