"""Draw images with an exported pipeline of diffusers in a process that does not import this package."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PROGRAM = """
import importlib, json, sys, torch
module, name, folder, latents, call, out = sys.argv[1:]
pipeline = getattr(importlib.import_module('diffusers.' + module), name)
pipeline = pipeline.from_pretrained(folder, local_files_only=True, low_cpu_mem_usage=False)
pipeline.set_progress_bar_config(disable=True)
images = pipeline(latents=torch.load(latents), output_type='pt', **json.loads(call)).images
assert 'diffusion' not in sys.modules
torch.save(images, out)
"""


def draw(
    pipeline: tuple[str, str], exported: Path, latents: Tensor, call: Mapping[str, Any], folder: Path
) -> tuple[Tensor, str]:
    """Return the images that an exported pipeline draws, and what it wrote to stderr.

    Args:
        pipeline: Module within diffusers, and name of the class.
        exported: Folder of the export.
        latents: Initial noise.
        call: Other arguments of the pipeline's call.
        folder: Folder for the files that pass the tensors.
    """
    torch.save(latents, folder / 'latents.pt')
    words = [*pipeline, str(exported), str(folder / 'latents.pt'), json.dumps(dict(call)), str(folder / 'out.pt')]
    done = subprocess.run([sys.executable, '-c', PROGRAM, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / 'out.pt'), done.stderr
