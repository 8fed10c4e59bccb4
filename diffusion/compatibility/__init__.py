"""Private names of other packages, and differences between their versions."""

import importlib.metadata
import re

from diffusion.errors import UserError

DIFFUSERS_BOUNDS = '>=0.39,<0.43'
"""Bounds on the version of diffusers for U-Net, VAE, noise schedulers and pipelines, whose configs change in minor
releases.

They are checked when this package is imported instead of in pyproject.toml. With bounds in the metadata, pip before
26.3 would choose the version of diffusers before that of transformers, which mosaicml-streaming bounds; pip 23.2.1
found no compatible versions within ten minutes. Move the bounds to pyproject.toml when mosaicml-streaming allows
transformers 5.
"""


def check_diffusers() -> None:
    """Raise UserError if the installed version of diffusers is outside DIFFUSERS_BOUNDS."""
    version = importlib.metadata.version('diffusers')
    oldest, too_new = ((int(major), int(minor)) for major, minor in re.findall(r'(\d+)\.(\d+)', DIFFUSERS_BOUNDS))
    major, minor = version.split('.')[:2]
    if not oldest <= (int(major), int(minor)) < too_new:
        raise UserError(
            f'diffusers {version} is installed, but this package needs {DIFFUSERS_BOUNDS}; install it with pip install '
            f"'diffusers{DIFFUSERS_BOUNDS}', or the tested versions with `make install`, see docs/install.md"
        )


check_diffusers()
