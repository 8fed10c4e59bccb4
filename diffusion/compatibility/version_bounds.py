"""Bounds of packages that pyproject.toml names without any, checked when this package is imported.

With bounds in the package's metadata, pip before 26.3 would choose versions of these packages before that of
transformers, which mosaicml-streaming bounds, and search for hours for a set that fits. Remove this module when
mosaicml-streaming allows transformers 5.
"""

import importlib.metadata
import re

from diffusion.errors import UserError

BOUNDS = {
    'diffusers': ((0, 39), (0, 43)),  # U-Net, VAE, noise schedulers, pipelines; configs change in minor releases
    'huggingface-hub': ((0, 36), (3,)),  # weights by pinned revision
    'peft': ((0, 17), (0, 22)),  # LoRA; diffusers loads LoRA files with it
    'tokenizers': ((0, 22), (0, 24)),  # the byte tokenizer in place of T5's
}
"""The oldest version of each distribution that is used, and the first that is too new."""


def check_bounds() -> None:
    """Check the installed versions.

    Raises:
        UserError: A version is too old or too new.
    """
    for name, (oldest, too_new) in BOUNDS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # its import will say so
        release = re.split(r'[^\d.]', version)[0]
        numbers = tuple(int(number) for number in re.findall(r'\d+', release))
        if not oldest <= numbers < too_new:
            bounds = f'>={_joined(oldest)},<{_joined(too_new)}'
            raise UserError(
                f'{name} {version} is installed, but this package needs {bounds}; install it with pip install '
                f"'{name}{bounds}', or the tested versions with `make install`, see docs/install.md"
            )


def _joined(version: tuple[int, ...]) -> str:
    return '.'.join(map(str, version))
