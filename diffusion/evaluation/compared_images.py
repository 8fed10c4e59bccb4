"""Read the images of one model in a comparison from a folder of files numbered by prompt."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from xxhash import xxh3_128_hexdigest

from diffusion.errors import UserError

IMAGE_ENDINGS = ('.png', '.jpg', '.jpeg', '.webp')
MANIFEST = 'images.json'
"""Name of the manifest of generated images. Do not import `generated_images.MANIFEST`: that module needs torch."""
SCORES = 'scores.json'
"""File beside generated images with the prompt and scores of each, which the evaluator `image_metrics` writes."""
_LEADING, _TRAILING = re.compile(r'^\d+'), re.compile(r'\d+$')


def has_images(folder: Path) -> bool:
    """Return True if a folder has image files; if they are from `diffusion evaluate`, they are in its batch folders."""
    return folder.is_dir() and bool(_image_files(folder))


def numbered_images(folder: Path, prompts: Sequence[str]) -> list[Path]:
    """Return the image file of each prompt.

    A file's number is at the start of its name, such as `00012-a-red-cube.png`, or otherwise at the end. Numbers must
    be consecutive and may start anywhere.

    Raises:
        UserError: A file has no number, two files have the same number, a number is missing, the counts of images and
            prompts differ, or images were generated for other prompts.
    """
    _check_manifest(folder, prompts)
    by_number: dict[int, Path] = {}
    for file in _image_files(folder):
        found = _LEADING.search(file.stem) or _TRAILING.search(file.stem)
        if found is None:
            raise UserError(f'{file}: has no prompt number in its name; name it like 00012.png')
        if (other := by_number.setdefault(int(found[0]), file)) != file:
            raise UserError(f'{other} and {file}: have the same number; remove one of them')
    if len(by_number) != len(prompts):
        raise UserError(
            f'{folder}: has {len(by_number)} images for {len(prompts)} prompts; give one image per prompt, in the '
            'order of the prompts'
        )
    first = min(by_number)
    missing = [number for number in range(first, first + len(prompts)) if number not in by_number]
    if missing:
        raise UserError(f'{folder}: has no image number {missing[0]}; number the images in the order of the prompts')
    files = [by_number[first + index] for index in range(len(prompts))]
    for index, (file, prompt) in enumerate(zip(files, prompts, strict=True)):
        if (own := _prompt_of(file)) is not None and own != prompt:
            raise UserError(
                f'{file}: was generated for {own[:60]!r}, but prompt {index + 1} is {prompt[:60]!r}; give the prompts '
                'for which these images were generated'
            )
    return files


def _image_files(folder: Path) -> list[Path]:
    paths = [*folder.iterdir(), *(folder.glob('batch-*/*') if (folder / MANIFEST).is_file() else ())]
    return sorted(path for path in paths if path.suffix.lower() in IMAGE_ENDINGS and path.is_file())


def _check_manifest(folder: Path, prompts: Sequence[str]) -> None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding='utf-8'))
    except FileNotFoundError:
        return
    except ValueError as error:
        raise UserError(f'{folder / MANIFEST}: is not JSON ({error}); remove the folder') from error
    digest = xxh3_128_hexdigest(json.dumps(list(prompts)).encode())
    if not isinstance(manifest, dict) or manifest.get('prompts') != digest:
        raise UserError(f'{folder}: its images were generated for other prompts; give the same prompts')


def _prompt_of(file: Path) -> str | None:
    """Return the prompt for which `diffusion evaluate` generated a PNG, or None for other files."""
    if file.suffix.lower() != '.png':
        return None
    try:
        with Image.open(file) as image:
            # Other programs use the key `prompt` for other values, so require `guidance_scale` too.
            found = image.info.get('prompt') if 'guidance_scale' in image.info else None
    except (OSError, SyntaxError, ValueError):
        # The file is damaged (`read_image` reports this), or has larger text chunks than `diffusion evaluate` writes.
        return None
    return found if isinstance(found, str) else None


def read_image(file: Path) -> Image.Image:
    """Read an image (or an animation's first frame) as upright sRGB without metadata, transparency over white.

    Raises:
        UserError: The file is not an image, or it is damaged.
    """
    # Import late: `diffusion compare` must not wait for the decoders' imports.
    from diffusion.data.image_reading import UnreadableImage
    from diffusion.data.image_reading import read_image as read_content

    try:
        return read_content(file.read_bytes(), first_frame=True).image
    except UnreadableImage as error:
        raise UserError(f'{file}: cannot be read as an image ({error}); replace it') from error
