"""Folder layouts of generated images that the scorers of benchmarks read: GenEval and T2I-CompBench."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from diffusion.errors import UserError
from diffusion.evaluation.generated_images import GeneratedImages
from diffusion.evaluation.prompts import Prompt
from diffusion.storage.atomic import atomic_folder


def write_geneval(images: GeneratedImages, prompts: Sequence[Prompt], per_prompt: int, folder: Path) -> None:
    """Write images as `00000/samples/0000.png` with `00000/metadata.jsonl`, for `evaluate_images.py` of GenEval.

    Source: https://github.com/djghosh13/geneval. The prompts must come from its `evaluation_metadata.jsonl`.

    Args:
        images: The images, `per_prompt` in a row for each prompt.
        prompts: One per image.
        per_prompt: Images per prompt; GenEval takes 4.
        folder: New folder; replaced if it exists.

    Raises:
        UserError: The prompts have no metadata, or an image is missing in this folder since another node has it.
    """
    with _replaced(folder) as unfinished:
        for index, prompt in enumerate(prompts):
            if 'include' not in prompt.metadata:
                raise UserError(
                    f'layout: the prompt {prompt.text!r} has no metadata of GenEval; use evaluation_metadata.jsonl of '
                    'its authors as prompts'
                )
            target = unfinished / f'{index // per_prompt:05d}'
            if index % per_prompt == 0:
                (target / 'samples').mkdir(parents=True)
                (target / 'metadata.jsonl').write_text(json.dumps(prompt.metadata), encoding='utf-8')
            _copy(images.path(index), target / 'samples' / f'{index % per_prompt:04d}.png')


def write_t2i_compbench(images: GeneratedImages, prompts: Sequence[Prompt], per_prompt: int, folder: Path) -> None:
    """Write images as `samples/PROMPT_000012.png`, for the scorers of T2I-CompBench, which read the prompt there.

    Source: https://github.com/Karine-Huang/T2I-CompBench. Arguments and errors as for `write_geneval`.
    """
    with _replaced(folder) as unfinished:
        (unfinished / 'samples').mkdir()
        for index, prompt in enumerate(prompts):
            name = re.sub(r'[/\x00-\x1f]', ' ', prompt.text).strip()
            # File names have at most 255 bytes; the prompts of the benchmark are far shorter.
            name = name.encode()[:230].decode(errors='ignore')
            _copy(images.path(index), unfinished / 'samples' / f'{name}_{index:06d}.png')


LAYOUTS: dict[str, Callable[[GeneratedImages, Sequence[Prompt], int, Path], None]] = {
    'geneval': write_geneval,
    't2i_compbench': write_t2i_compbench,
}


def _replaced(folder: Path) -> AbstractContextManager[Path]:
    """Return the context of a new folder, after removing the one of an earlier evaluation."""
    if folder.exists():
        shutil.rmtree(folder)
    return atomic_folder(folder)


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
    except FileNotFoundError as error:
        raise UserError(
            f'layout: {source} is not on this node; write layouts on one node, or into a folder that all nodes share'
        ) from error
