"""Draw images with an exported pipeline of diffusers: without this package, and with `diffusion generate`."""

import atexit
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from diffusion.cli import main
from diffusion.data.image_sheet import to_images

SERVER = """
import importlib, json, os, sys, traceback
import torch

def draw(order):
    pipeline = getattr(importlib.import_module('diffusers.pipelines.' + order['module']), order['name'])
    settings = {'local_files_only': True, 'low_cpu_mem_usage': False} | order['load']
    pipeline = pipeline.from_pretrained(order['exported'], **settings)
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(latents=torch.load(order['latents']), output_type='pt', **order['call']).images
    assert 'diffusion' not in sys.modules
    torch.save(images, order['out'])

for line in sys.stdin:
    order = json.loads(line)
    importlib.import_module('diffusers.pipelines.' + order['module'])
    child = os.fork()
    if child == 0:
        os.dup2(os.open(order['stderr'], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        try:
            draw(order)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Program without this package. Each drawing is made in a fork of it, since importing a pipeline takes ten seconds."""


@functools.cache
def _server() -> 'subprocess.Popen[str]':
    """Return the running program, which is stopped when these tests end."""
    server = subprocess.Popen(
        [sys.executable, '-c', SERVER],
        cwd=tempfile.gettempdir(),  # from which this package cannot be imported by accident
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)  # closes its input, at whose end it ends
    return server


def draw(
    pipeline: tuple[str, str], exported: Path, latents: Tensor, call: Mapping[str, Any], folder: Path, load: Any = None
) -> tuple[Tensor, str]:
    """Return the images that an exported pipeline draws from initial noise, and what it wrote to stderr.

    `pipeline` is a module within diffusers.pipelines, and the name of a class; `call` and `load` are other arguments
    of its call and of `from_pretrained`. Files in `folder` pass the tensors.
    """
    torch.save(latents, folder / 'latents.pt')
    paths = {'exported': exported, 'latents': folder / 'latents.pt', 'out': folder / 'out.pt', 'stderr': folder / 'err'}
    order = {'module': pipeline[0], 'name': pipeline[1], 'call': dict(call), 'load': dict(load or {})}
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    print(json.dumps(order | {name: str(path) for name, path in paths.items()}), file=server.stdin, flush=True)
    status, stderr = server.stdout.readline(), paths['stderr'].read_text()
    assert status == '0\n', stderr[-3000:]
    return torch.load(folder / 'out.pt'), stderr


def assert_command_draws_the_same(model: Any, exported: Path, *, noise_scheduler: str, **sampling: Any) -> None:
    """Assert that `diffusion generate` draws with an export what the model draws, without options for its family.

    `sampling`: Settings of the run that the export has too.
    """
    prompts = ['A red, RED square!', 'green']
    words = ['--steps', '4', '--guidance', '3', '--seed', '5', '--out', str(exported.parent / 'drawn')]
    assert main(['generate', str(exported), *prompts, *words]) == 0
    files = sorted((exported.parent / 'drawn').iterdir())
    assert [file.name for file in files] == ['00005-a-red-red-square.png', '00006-green.png']
    sampling |= {'num_inference_steps': 4, 'guidance_scale': 3.0, 'noise_scheduler': noise_scheduler}
    images = to_images(model.generate(prompts, seeds=[5, 6], **sampling))
    for ours, file in zip(images, files, strict=True):
        with Image.open(file) as theirs:
            assert abs(np.asarray(ours).astype(int) - np.asarray(theirs)).max() <= 2, file.name
