"""What the README says is run as it stands there."""

import io
import json
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text()
BLOCKS = re.findall(r'```(\w*)\n(.*?)```', README, flags=re.S)


def block(content: str) -> str:
    """The one piece of Python that has this in it."""
    (found,) = [text for language, text in BLOCKS if language == 'python' and content in text]
    return found


@pytest.mark.slow
def test_from_tars_to_the_first_loss(forkserver, tmp_path):
    script = block('webdataset')
    assert len(script.splitlines()) <= 20
    (tmp_path / 'yamls').symlink_to(ROOT / 'yamls')
    (tmp_path / 'script.py').write_text(script)
    for number in range(2):
        write_tar(tmp_path / 'laion' / f'{number:05}.tar', number)
    said = forkserver.run('script.py', folder=tmp_path, output=tmp_path / 'log')
    (loss,) = re.findall(r'loss (\d+\.\d{3})$', said, flags=re.MULTILINE)  # after a progress bar
    assert 0 < float(loss) < 10


def write_tar(path: Path, number: int) -> None:
    """30 pictures of three aspects, as img2dataset writes them."""
    from PIL import Image

    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, 'w') as tar:
        for index in range(30):
            key, (width, height) = f'{number:05}{index:04}', [(96, 96), (140, 84), (84, 140)][index % 3]
            picture = io.BytesIO()
            Image.effect_noise((width, height), 20 + index).convert('RGB').save(picture, 'JPEG')
            caption = f'picture {key}'
            said = {'key': key, 'caption': caption, 'status': 'success', 'width': width, 'height': height}
            files = {'jpg': picture.getvalue(), 'txt': caption.encode(), 'json': json.dumps(said).encode()}
            for suffix, content in files.items():
                member = tarfile.TarInfo(f'{key}.{suffix}')
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def test_the_script_for_other_projects_runs(forkserver, tmp_path):
    """In a folder that has the quickstart's data and nothing else of ours but the installed package."""
    script = block('model.generate')
    (tmp_path / 'yamls').symlink_to(ROOT / 'yamls')
    (tmp_path / 'run.py').symlink_to(ROOT / 'run.py')
    (tmp_path / 'script.py').write_text(script + "\nassert pictures.shape == (1, 3, 64, 64)\nprint('drawn')\n")
    for command in (
        '-m diffusion prepare openmoji --out data/openmoji --sizes 64 --limit 32',
        'run.py yamls/quickstart.yaml task=precompute',
        'script.py',
    ):
        said = forkserver.run(*command.split(), folder=tmp_path, output=tmp_path / 'log')
    assert 'drawn\n' in said


def test_the_mistakes_shown_are_the_mistakes_told():
    (shown,) = [text for _, text in BLOCKS if text.startswith('$ diffusion check')]
    line, expected = shown.removeprefix('$ ').split('\n', 1)
    program = 'import sys; from diffusion.cli import main; sys.exit(main(sys.argv[1:]))'
    words = [sys.executable, '-c', program, *shlex.split(line)[1:]]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == expected


def test_every_file_that_is_named_exists():
    named = set(re.findall(r'`((?:yamls|diffusion|docs|benchmarks|docker)/[\w./-]+)`', README))
    named |= {link for link in re.findall(r'\]\(([^)#]+)\)', README) if '://' not in link}
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_recipe_is_in_the_table():
    assert all(f'`yamls/{path.name}`' in README for path in (ROOT / 'yamls').glob('*.yaml'))
