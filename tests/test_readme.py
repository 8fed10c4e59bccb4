"""Execute the README's scripts and commands, and check its names and links."""

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
    """Return the README's Python block that contains a text; there must be exactly one."""
    (found,) = [text for language, text in BLOCKS if language == 'python' and content in text]
    return found


@pytest.mark.slow
def test_webdataset_script_prints_a_loss(forkserver, tmp_path):
    script = block('webdataset')
    assert len(script.splitlines()) <= 20
    (tmp_path / 'yamls').symlink_to(ROOT / 'yamls')
    (tmp_path / 'script.py').write_text(script)
    for number in range(2):
        write_tar(tmp_path / 'laion' / f'{number:05}.tar', number)
    output = forkserver.run('script.py', folder=tmp_path, output=tmp_path / 'log')
    (loss,) = re.findall(r'loss (\d+\.\d{3})$', output, flags=re.MULTILINE)  # a progress bar may be before it
    assert 0 < float(loss) < 10


def write_tar(path: Path, number: int) -> None:
    """Write 30 images of three aspect ratios as a tar file in img2dataset's format."""
    from PIL import Image

    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, 'w') as tar:
        for index in range(30):
            key, (width, height) = f'{number:05}{index:04}', [(96, 96), (140, 84), (84, 140)][index % 3]
            image = io.BytesIO()
            Image.effect_noise((width, height), 20 + index).convert('RGB').save(image, 'JPEG')
            caption = f'image {key}'
            metadata = {'key': key, 'caption': caption, 'status': 'success', 'width': width, 'height': height}
            files = {'jpg': image.getvalue(), 'txt': caption.encode(), 'json': json.dumps(metadata).encode()}
            for suffix, content in files.items():
                member = tarfile.TarInfo(f'{key}.{suffix}')
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def test_the_script_for_other_projects_runs(forkserver, tmp_path):
    """The folder has only the quickstart's data and recipes; the package is imported as if installed."""
    script = block('model.generate')
    (tmp_path / 'yamls').symlink_to(ROOT / 'yamls')
    (tmp_path / 'run.py').symlink_to(ROOT / 'run.py')
    (tmp_path / 'script.py').write_text(script + "\nassert pictures.shape == (1, 3, 64, 64)\nprint('done')\n")
    for command in (
        '-m diffusion prepare openmoji --out data/openmoji --sizes 64 --limit 32',
        'run.py yamls/quickstart.yaml task=precompute',
        'script.py',
    ):
        output = forkserver.run(*command.split(), folder=tmp_path, output=tmp_path / 'log')
    assert 'done\n' in output


def test_mistakes_in_the_readme_equal_the_printed_ones():
    (shown,) = [text for _, text in BLOCKS if text.startswith('$ diffusion check')]
    line, expected = shown.removeprefix('$ ').split('\n', 1)
    program = 'import sys; from diffusion.cli import main; sys.exit(main(sys.argv[1:]))'
    words = [sys.executable, '-c', program, *shlex.split(line)[1:]]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == expected


def test_every_file_named_in_the_readme_exists():
    named = set(re.findall(r'`((?:yamls|diffusion|docs|benchmarks|docker)/[\w./-]+)`', README))
    named |= {link for link in re.findall(r'\]\(([^)#]+)\)', README) if '://' not in link}
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_recipe_is_in_the_table_of_the_readme():
    assert all(f'`yamls/{path.name}`' in README for path in (ROOT / 'yamls').glob('*.yaml'))
