"""The wheel and the source distribution: their files, and the path from images to a model in an empty folder."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from docs_shell import make_overlay
from PIL import Image

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow

SMALLER = ['model.depth=1', 'trainer.max_duration=8ba', 'scheduler.t_warmup=2ba', 'generate.num_inference_steps=2']


def build(target: str, folder: Path) -> Path:
    words = [sys.executable, '-m', 'hatchling', 'build', '--target', target, '--directory', str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    (file,) = folder.glob('diffusion_recipes-*')
    return file


@pytest.fixture(scope='module')
def wheel(tmp_path_factory) -> Path:
    return build('wheel', tmp_path_factory.mktemp('wheel'))


def test_wheel_contains_every_file_of_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if '.dist-info/' not in name}
    folders = os.walk(ROOT / 'diffusion', followlinks=True)  # `recipes` is a link to `yamls`
    files = (Path(folder, name) for folder, _, names in folders if '__pycache__' not in folder for name in names)
    assert packed == {path.relative_to(ROOT).as_posix() for path in files}
    assert 'diffusion/recipes/quickstart.yaml' in packed


def test_source_distribution_contains_the_recipes_as_files(tmp_path):
    with tarfile.open(build('sdist', tmp_path)) as archive:
        files = {member.name.partition('/')[2] for member in archive.getmembers() if member.isfile()}
    names = {path.name for path in (ROOT / 'yamls').glob('*.yaml')}
    assert {f'{folder}/{name}' for folder in ('diffusion/recipes', 'yamls') for name in names} <= files


def test_installed_wheel_goes_from_images_to_an_export_in_an_empty_folder(wheel, tmp_path):
    python = make_overlay(tmp_path / 'environment')
    install = [sys.executable, '-m', 'pip', '--python', python, 'install', '--quiet', '--no-deps', '--no-index', wheel]
    subprocess.run(install, check=True)
    folder = tmp_path / 'empty'
    (folder / 'photos').mkdir(parents=True)
    for index in range(8):
        Image.effect_noise((80, 72), 20 + index).convert('RGB').save(folder / 'photos' / f'{index}.png')
        (folder / 'photos' / f'{index}.txt').write_text(f'noise number {index}')
    kept = {name: value for name, value in os.environ.items() if not name.startswith(('PYTHON', 'PYTEST_'))}

    def diffusion(*words: str) -> str:
        program = [python.with_name('diffusion'), *words]
        environ = kept | {'CUDA_VISIBLE_DEVICES': '', 'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1'}
        done = subprocess.run(program, cwd=folder, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and 'Traceback' not in done.stderr, f'{words}\n{done.stdout}\n{done.stderr}'
        return done.stdout

    where = subprocess.run([python, '-c', 'import diffusion; print(diffusion.__file__)'], cwd=folder, env=kept,
                           capture_output=True, text=True, check=True)  # fmt: skip
    assert Path(where.stdout).is_relative_to(tmp_path), 'the checkout would be tested instead'
    assert 'quickstart' in diffusion('recipes')
    diffusion('recipes', 'copy', 'phase1', '.')
    diffusion('prepare', 'folder', 'photos', '--out', 'data/photos', '--sizes', '64', '--workers', '1')
    assert 'diffusion train my.yaml' in diffusion('init', 'data/photos', '--out', 'my.yaml')
    assert 'my.yaml: ok' in diffusion('check', 'my.yaml', *SMALLER)
    diffusion('train', 'my.yaml', *SMALLER)
    diffusion('generate', 'runs/my', 'noise', '--out', 'images')
    diffusion('export', 'runs/my', '--out', 'model')
    assert len([*(folder / 'images').glob('*.png')]) == 1
    weights = folder / 'model' / 'transformer' / 'diffusion_pytorch_model.safetensors'
    assert (folder / 'model' / 'model_index.json').exists()
    assert weights.stat().st_mode == (folder / 'my.yaml').stat().st_mode, 'others may read what the umask allows'
