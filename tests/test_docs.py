"""Every command and code block of the README and the documentation runs as it is written."""

import dataclasses
import functools
import http.server
import importlib.util
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any, get_args, get_type_hints
from urllib.parse import urlsplit

import pytest
import yaml
from browser import browser_context, needs_browser
from docs_shell import RUN, Reader, blocks_of, offline
from prepare import drawn, hub_datasets
from safetensors import safe_open

from diffusion.config import registry
from diffusion.config.families import family_of_model
from diffusion.config.load import load
from diffusion.config.recipe import Component, Recipe
from diffusion.launch.job_checks import check_jobs, load_job_spec

ROOT = Path(__file__).parents[1]
DOCS = ROOT / 'docs'
PAGES = [ROOT / 'README.md', ROOT / 'docker' / 'README.md', *sorted(DOCS.glob('*.md'))]
RUN_BELOW = {
    *('README.md', 'docker/README.md', 'docs/quickstart.md', 'docs/own-images.md', 'docs/data.md', 'docs/extending.md'),
    *('docs/recipes.md', 'docs/models.md', 'docs/planning.md', 'docs/clusters.md', 'docs/install.md'),
    'docs/changing-data.md',
}
"""Pages whose blocks a test below runs."""


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def test_every_page_with_commands_is_run():
    with_commands = [page for page in PAGES if any(block.language in RUN for block in blocks_of(page))]
    assert {*names(with_commands)} == RUN_BELOW


@pytest.mark.parametrize('page', PAGES, ids=names(PAGES))
def test_every_block_is_of_a_kind_that_is_checked(page):
    assert {block.language for block in blocks_of(page)} <= {'bash', 'python', 'yaml', 'toml', 'console'}


@pytest.fixture(scope='module')
def checkout(tmp_path_factory, forkserver) -> Reader:
    """A folder like a checkout after `make .venv/installed`, with a quickstart of a few batches."""
    folder = tmp_path_factory.mktemp('checkout')
    reader = Reader(folder, forkserver.path)
    for name in ('Makefile', 'pyproject.toml', 'constraints-current.txt'):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / 'yamls', folder / 'yamls')
    for name in ('diffusion', 'docker', 'tests'):
        (folder / name).symlink_to(ROOT / name)
    (folder / 'run.py').symlink_to(ROOT / 'tests' / 'forkserver.py')
    programs = folder / '.venv' / 'bin'
    programs.parent.mkdir()
    programs.symlink_to(reader.programs)
    (folder / '.venv' / 'installed').touch()
    shorten(folder / 'yamls' / 'quickstart.yaml')
    make_photographs(folder / 'photos', count=30, size=(96, 72))
    return reader


def shorten(path: Path) -> None:
    """Make the quickstart's recipe one of 24 batches."""
    text = path.read_text()
    for long, short in {'1600ba': '24ba', '1100ba': '12ba', '400ba': '12ba', '100ba': '4ba'}.items():
        assert long in text
        text = text.replace(long, short)
    text = text.replace('num_inference_steps: 25', 'num_inference_steps: 2').replace(
        'num_captions: 100', 'num_captions: 4'
    )
    path.write_text(text)


def make_photographs(folder: Path, *, count: int, size: tuple[int, int]) -> None:
    """Write JPEGs that differ, each with a caption beside it."""
    from PIL import Image

    folder.mkdir()
    for index in range(count):
        noise = Image.effect_noise((size[0] // 8, size[1] // 8), 20 + index).convert('RGB')
        noise.resize(size).save(folder / f'{index:04}.jpg')
        (folder / f'{index:04}.txt').write_text(f'photograph number {index}')


@pytest.fixture(scope='module')
def quickstart(checkout) -> str:
    """Output of the page whose files other pages use."""
    return checkout.read(DOCS / 'quickstart.md')


@pytest.fixture(scope='module')
def own_images(tmp_path_factory, forkserver) -> tuple[Reader, str]:
    """A folder with photographs alone, after the page was followed in it, and the output."""
    reader = Reader(tmp_path_factory.mktemp('own'), forkserver.path)
    make_photographs(reader.folder / 'photos', count=30, size=(96, 72))
    after_init(reader, r's/: [0-9]+ba/: 4ba/')
    return reader, reader.read(DOCS / 'own-images.md')


def after_init(reader: Reader, *edits: str, options: str = '') -> None:
    """Make `diffusion init` edit the recipe that it has written by expressions of sed, so that the run is short."""
    script = reader.programs / 'diffusion'
    words = ' '.join(f'-e {shlex.quote(edit)}' for edit in edits)
    run = script.read_text().splitlines()[-1].removeprefix('exec ')
    script.write_text(
        f'#!/bin/bash\nset -e\n[ "$1" != init ] || set -- "$@" {options}\n{run}\n'
        f'if [ "$1" = init ]; then sed -i -E {words} photos.yaml; fi\n'
    )


@pytest.mark.slow
def test_quickstart_page(checkout, quickstart):
    assert 'Retrieval top-1' in quickstart
    run = checkout.folder / 'runs' / 'quickstart'
    results = ('samples.png', 'loss.png', 'images', 'ba24', 'export/model_index.json', 'report.html')
    assert all((run / name).exists() for name in results)
    assert len((checkout.folder / 'data' / 'openmoji' / 'captions.txt').read_text().splitlines()) > 150
    assert len([*(checkout.folder / 'more').glob('*.png')]) == 2
    assert (checkout.folder / 'frog.png').exists()


@pytest.mark.slow
def test_own_images_page_from_photographs_to_an_export(own_images):
    reader, output = own_images
    folder = reader.folder
    assert 'diffusion:small' in output and 'photos.yaml: ok' in output and 'openmoji' not in output
    counts = [
        sum(
            shard['samples']
            for shard in json.loads((folder / 'data' / name / '64px' / 'index.json').read_text())['shards']
        )
        for name in ('photos', 'photos-held-out')
    ]
    assert counts == [22, 8]
    assert (folder / 'look.png').exists()
    assert (folder / 'runs' / 'photos' / 'ba4').exists()
    assert [path.suffix for path in (folder / 'cats').glob('*.png')] == ['.png']
    assert draws_with_stock_diffusers('PRXPixelPipeline', folder / 'photos-model', use_resolution_binning=False)


def draws_with_stock_diffusers(pipeline: str, folder: Path, lora: Path | None = None, **call: Any) -> bool:
    """Return True if a process without this package draws an image with an exported pipeline."""
    program = f"""
import sys, diffusers
pipeline = diffusers.{pipeline}.from_pretrained({str(folder)!r})
if {lora is not None}:
    pipeline.load_lora_weights({str(lora)!r}, weight_name='pytorch_lora_weights.safetensors')
image = pipeline('a photograph', num_inference_steps=2, **{call!r}).images[0]
assert 'diffusion' not in sys.modules
print(image.size)
"""
    done = subprocess.run([sys.executable, '-c', program], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.endswith(')\n')


@pytest.mark.slow
def test_data_page(checkout, quickstart, own_images):
    for name in ('photos.yaml', 'data/photos', 'data/photos-held-out'):
        (checkout.folder / name).symlink_to(own_images[0].folder / name)
    for number in range(2):
        write_tar(checkout.folder / 'laion' / f'{number:05}.tar', number)
    write_parquet(checkout.folder / 'parquet' / '0.parquet', checkout.folder / 'photos')
    pictures = {
        f'data/{split}-0000{n}-of-00002.parquet': hub_datasets.parquet_of(hub_datasets.rows(split, [n, n + 1]))
        for split in ('train', 'test')
        for n in range(2)
    }
    drawn.write_files(checkout.folder / 'snapshots' / 'pictures', pictures)
    output = checkout.read(DOCS / 'data.md') + checkout.read(DOCS / 'changing-data.md')
    (loss,) = re.findall(r'loss (\d+\.\d{3})$', output, flags=re.MULTILINE)
    assert 0 < float(loss) < 10
    assert (checkout.folder / 'runs' / 'photos-latents' / 'ba4').exists()


def write_tar(path: Path, number: int) -> None:
    """Write 30 images of three aspect ratios as img2dataset does."""
    from PIL import Image

    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, 'w') as tar:
        for index in range(30):
            key, (width, height) = f'{number:05}{index:04}', [(96, 96), (140, 84), (84, 140)][index % 3]
            image = io.BytesIO()
            Image.effect_noise((width, height), 20 + index).convert('RGB').save(image, 'JPEG')
            caption = f'image {key}'
            metadata = {'key': key, 'caption': caption, 'status': 'success', 'width': width, 'height': height}
            metadata |= {'aesthetic_score': 5.0, 'punsafe': 0.1}
            files = {'jpg': image.getvalue(), 'txt': caption.encode(), 'json': json.dumps(metadata).encode()}
            for suffix, content in files.items():
                member = tarfile.TarInfo(f'{key}.{suffix}')
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def write_parquet(path: Path, photos: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir()
    images = sorted(photos.glob('*.jpg'))
    columns = {
        'image': [image.read_bytes() for image in images],
        'caption': [image.with_suffix('.txt').read_text() for image in images],
    }
    parquet.write_table(pyarrow.table(columns), path)


@pytest.mark.slow
def test_models_page(checkout):
    write_tar(checkout.folder / 'laion' / '00007.tar', 7)
    checkout.read(DOCS / 'models.md')
    assert (checkout.folder / 'data' / 'laion-16' / '64px' / '80x48' / 'index.json').exists()


@pytest.mark.slow
def test_extending_page(checkout, quickstart):
    output = checkout.read(DOCS / 'extending.md')
    assert re.search(r'loss \d\.\d{4}', output), 'the callback of the page prints the loss'


@pytest.mark.slow
def test_recipes_and_planning_pages(checkout):
    output = checkout.read(DOCS / 'recipes.md') + checkout.read(DOCS / 'planning.md')
    # Complete if a page read before this one has made the quickstart's data.
    assert re.search(r'yamls/quickstart\.yaml: (ok|valid)', output) and '128 x a100-80gb' in output


@pytest.mark.slow
def test_clusters_page(checkout, quickstart):
    assert 'ok; nothing was submitted' in checkout.read(DOCS / 'clusters.md')
    assert (checkout.folder / 'runs' / 'quickstart-local' / 'ba24').exists()


@pytest.mark.slow
def test_docker_page(checkout):
    checkout.read(ROOT / 'docker' / 'README.md')
    log = (checkout.folder / 'docker.log').read_text()
    arguments = set(re.findall(r'^ARG (\w+)', (ROOT / 'docker' / 'Dockerfile').read_text(), flags=re.MULTILINE))
    assert set(re.findall(r'--build-arg (\w+)=', log)) <= arguments


@pytest.mark.slow
def test_readme(checkout, tmp_path, forkserver):
    """Use a miniature in place of the published Stable Diffusion 2, and pretend that the machine has a GPU."""
    reader = Reader(tmp_path / 'reader', forkserver.path)
    for path in checkout.folder.iterdir():
        if path.name not in ('photos', 'photos.yaml', 'yamls', '.programs', '.overlay', 'data', 'runs'):
            (reader.folder / path.name).symlink_to(path.resolve() if path.is_symlink() else path)
    shutil.copytree(checkout.folder / 'yamls', reader.folder / 'yamls')
    # What the quickstart has made for its own page, if that was tested; `make quickstart` then has nothing left to do.
    for name in ('data/openmoji', 'data/openmoji-latents', 'runs/quickstart'):
        if (checkout.folder / name).exists():
            shutil.copytree(checkout.folder / name, reader.folder / name, symlinks=True)
    write_miniature(reader.folder)
    make_photographs(reader.folder / 'photos', count=24, size=(560, 520))
    edits = ('s/diffusion:lora/miniature.yaml/', 's/: [0-9]+ba/: 4ba/', 's/resolution: 512/resolution: 64/')
    after_init(reader, *edits, options='--gpu rtx-4090 --gpus 1')
    output = reader.read(ROOT / 'README.md', **offline(reader.environ), PYTEST_ARGS='tests/config/test_image_shapes.py')
    assert 'a LoRA, since 16 images are too few' in output
    assert [path.suffix for path in (reader.folder / 'oranges').glob('*.png')] == ['.png']
    folder, lora = reader.folder / 'published', reader.folder / 'photos-model'
    assert draws_with_stock_diffusers('StableDiffusionPipeline', folder, lora)
    reader.shell('diffusion export runs/photos --out photos.safetensors')
    with safe_open(reader.folder / 'photos.safetensors', 'pt') as file:
        assert all(name.startswith('lora_unet_') for name in file.keys())  # noqa: SIM118
    assert [*(reader.folder / '.overlay').glob('lib/*/site-packages/diffusion/__init__.py')]


def write_miniature(folder: Path) -> None:
    """Write the pipeline of a small model, and the recipe of a LoRA of it, with the keys of diffusion:lora."""
    from diffusion.training.components import build_model

    stream = {'photos': {'local': '???', 'resolution': 64}}
    recipe: dict[str, Any] = {
        'name': 'miniature',
        'global_batch': 4,
        'model': {'name': 'tiny', 'resolution': 64, 'block_out_channels': [32], 'train_text_encoder': False},
        'dataset': {'name': 'image_text'},
        'streams': stream,
        'eval_streams': stream,
        'loader': {'num_workers': 0},
        'scheduler': {'name': 'constant_with_warmup', 't_warmup': '1ba'},
        'callbacks': {'image_grid': {'every': '2ba', 'prompts': ['a photograph'], 'num_inference_steps': 2}},
        'generate': {'prompts': ['a photograph'], 'num_inference_steps': 2},
        'trainer': {'max_duration': '4ba', 'save_interval': '2ba', 'precision': 'fp32', 'autoresume': True},
    }
    path = folder / 'miniature.yaml'
    path.write_text(yaml.safe_dump(recipe))
    model: Any = build_model(load(path, allow_missing=True))
    model.adapter.pipeline(model).save_pretrained(folder / 'published')
    path.write_text(yaml.safe_dump(recipe | {'init_from': 'published', 'lora': {'rank': 4, 'alpha': 4.0}}))


@pytest.mark.slow
def test_install_page(tmp_path, forkserver):
    reader = Reader(tmp_path / 'reader', forkserver.path)
    (reader.folder / 'docker').symlink_to(ROOT / 'docker')
    variables = offline(reader.environ)
    for block in blocks_of(DOCS / 'install.md'):
        if block.language != 'bash':
            continue
        shutil.rmtree(reader.folder / 'diffusion', ignore_errors=True)
        assert 'Traceback' not in reader.run(block, **variables)


@pytest.mark.slow
def test_the_mistakes_shown_are_those_that_check_prints():
    (shown,) = [block.text for block in blocks_of(ROOT / 'README.md') if block.language == 'console']
    line, expected = shown.removeprefix('$ ').split('\n', 1)
    program = 'import sys; from diffusion.cli import main; sys.exit(main(sys.argv[1:]))'
    words = [sys.executable, '-c', program, *shlex.split(line)[1:]]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == expected


def test_every_recipe_and_job_that_is_shown_is_valid(tmp_path):
    (tmp_path / 'yamls').symlink_to(ROOT / 'yamls')
    checked = []
    for page in PAGES:
        for index, block in enumerate(blocks_of(page)):
            if block.language == 'yaml' and 'imports:' not in block.text:
                path = tmp_path / f'{page.stem}-{index}.yaml'
                path.write_text(block.text)
                if 'backend:' in block.text:
                    job = check_jobs(load_job_spec(path), path, environ={})
                    assert not job.backend.validate(job.backend.render(job.jobs))
                else:
                    load(path, allow_missing=True)
                checked.append('backend:' in block.text)
    assert checked.count(False) >= 4 and checked.count(True) >= 1, 'recipes, and the job of the page about clusters'


@pytest.mark.parametrize('page', PAGES, ids=names(PAGES))
def test_every_file_that_is_named_exists(page, reference):
    text = page.read_text()
    named = set(re.findall(r'`((?:yamls|diffusion|docs|benchmarks|docker)/[\w./-]+\.\w+)`', text))
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    links = {link for link in re.findall(r'\]\(([^)#]+)(?:#[^)]*)?\)', text) if '://' not in link}
    missing += [
        link
        for link in sorted(links)
        if not (page.parent / link).exists() and str((page.parent / link).relative_to(DOCS)) not in reference
    ]
    assert missing == []


@functools.cache
def hook(name: str) -> Any:
    """Return a module of hooks of mkdocs."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f'{name}.py')
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bullets_have_at_most_60_words():
    long_bullets = hook('bullet_length').long_bullets
    words, code = 'word ' * 59, '```console\n- ' + 'word ' * 99 + '\n```\n'
    assert long_bullets(f'- [a\n  b](one two three) {words}c\n  - {words}\n1. {words}\n\n{words}\n\n{code}') == [
        (62, f'[a\n  b] {words}c')
    ]
    assert {page.name: found for page in PAGES if (found := long_bullets(page.read_text()))} == {}


@pytest.fixture(scope='module')
def reference() -> dict[str, str]:
    """Pages of the reference, by their paths in the documentation."""
    return hook('build_reference').pages()


def rows(page: str, title: str) -> dict[str, str]:
    """Return the rows of the table under a heading by their first cell."""
    _, _, rest = page.partition(f'# {title}\n')
    assert rest, title
    section = re.split(r'^#{1,4} ', rest, flags=re.MULTILINE)[0]
    return {match[1]: match[0] for match in re.finditer(r'^\| `([^`]+)` \|.*$', section, flags=re.MULTILINE)}


def sections(kind: type) -> dict[str, type]:
    """Return the dataclasses in a dataclass by the field that holds them, at any depth."""
    found: dict[str, type] = {}
    for name, hint in get_type_hints(kind).items():
        for each in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(each) and isinstance(each, type) and each is not Component:
                found = {name: each} | sections(each) | found
    return found


def test_reference_has_every_key_of_a_recipe(reference):
    page = reference['reference/recipe.md']
    expected = {field.name for field in dataclasses.fields(Recipe) if field.repr}
    assert {*rows(page, 'Top level')} == expected
    found = sections(Recipe)
    found.pop('missing', None)
    documented = {kind: name for name, kind in reversed(found.items()) if f'# `{name}`\n' in page}
    for kind in {*found.values()}:
        if kind.__name__ == 'Problem':
            continue
        table = rows(page, f'`{documented[kind]}`')
        assert {*table} == {field.metadata.get('key', field.name) for field in dataclasses.fields(kind)}
        assert all(len(row.split(' | ')[-1]) > 15 for row in table.values()), 'a key without a meaning'


@pytest.mark.parametrize('kind', registry.TARGETS)
def test_reference_has_every_keyword_of_every_component(reference, kind):
    from diffusion.config.checks import SUPPLIED

    page = reference['reference/components.md']
    for name in hook('build_reference').shipped_names(kind):
        supplied = {*SUPPLIED.get(kind, ()), *(('model',) if kind == 'trainer' else ())}
        title = 'Trainer' if kind == 'trainer' else f'`{name}`'
        begin = page.index('## ' + hook('build_reference').KINDS[kind])
        table = rows(page[begin:], title)
        assert {*table} == {*registry.signature(kind, name).names()} - supplied, (kind, name)
        if registry.TARGETS[kind][name].startswith('diffusion.'):
            assert not [key for key, row in table.items() if re.search(r'\|\s*\|$', row)], 'a keyword without a meaning'


def test_defaults_are_those_that_recipes_and_commands_rely_on(reference):
    """A recipe or command without a setting must mean the same tomorrow: CHANGELOG.md has each change of a default."""
    recorded = yaml.safe_load((ROOT / 'tests' / 'documented_defaults.yaml').read_text())
    for page, titles in recorded.items():
        text = reference[f'reference/{page}.md']
        for title, defaults in titles.items():
            if page == 'command-line':
                section = re.split(r'^## ', text.partition(f'## `diffusion {title}`\n')[2], flags=re.MULTILINE)[0]
                options = [' '.join(option.split()) for option in re.split(r'\n  (?=-)', section)]
                found = dict(re.findall(r'^(--\S+).*\(default: (.*?)\)', '\n'.join(options), flags=re.MULTILINE))
            else:
                found = {key: row.split(' | ')[-2].strip('`') for key, row in rows(text, title).items()}
            assert {key: yaml.safe_load(found[key]) for key in defaults} == defaults, (page, title)


def test_parameters_of_every_family_are_in_the_table_of_models():
    table = (DOCS / 'models.md').read_text()
    for name in ('sd2', 'sdxl', 'prx', 'mmdit', 'i1'):
        row = next(line for line in table.splitlines() if line.startswith(f'| `{name}` |'))
        assert all(f' {number:,}' in row for number in family_of_model(name).parameters.values())


def test_reference_has_every_exit_status_and_variable(reference):
    from diffusion import exit_codes
    from diffusion.runs import environment

    statuses = {value for name, value in vars(exit_codes).items() if name.isupper()}
    listed = set(map(int, re.findall(r'^\| (\d+) \|', reference['reference/exit-statuses.md'], flags=re.MULTILINE)))
    assert listed == statuses | {0, 3, 130}
    variables = {value for name, value in vars(environment).items() if name.isupper()}
    assert all(f'`{variable}`' in reference['reference/environment.md'] for variable in variables)


def test_reference_has_every_key_that_may_change_on_resume(reference):
    from diffusion.config.resume_rules import rules

    page = reference['reference/resume.md']
    for rule in rules():
        assert all(f'| `{key}` | {rule.effect.value} | {rule.reason} |' in page for key in rule.keys), rule


def test_reference_shows_the_help_of_every_command(reference):
    page = reference['reference/command-line.md']
    for words in ('check', 'prepare folder', 'data look', 'launch', 'completion'):
        assert f'## `diffusion {words}`\n\n```text\nusage: diffusion {words}' in page


@pytest.fixture(scope='module')
def site(tmp_path_factory) -> Path:
    """The built site. With --quiet, mkdocs counts no warnings, and --strict has no effect."""
    folder = tmp_path_factory.mktemp('site') / 'site'
    command = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_site_builds_strictly(site):
    assert (site / 'reference' / 'recipe' / 'index.html').exists()


SEARCHES = {
    **{'OOM': 'troubleshooting', 'out of memory': 'troubleshooting', 'NaN': 'troubleshooting', 'resume': 'resume'},
    **{'custom dataset': 'extending', 'multi-node': 'clusters', 'Slurm': 'clusters', 'S3': 'bucket-runs'},
    **{'FID': 'evaluation', 'LoRA': 'lora', 'captions': 'data', 'own images': 'own-images', 'cost': 'planning'},
}
"""First page of the results of a search."""


@pytest.mark.slow
@needs_browser
def test_search_leads_to_the_page(site):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    first = {}
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server, browser_context() as (context, left):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = context.new_page()
        for words in SEARCHES:
            page.goto(f'http://127.0.0.1:{server.server_port}/?q={words}')
            link = page.locator('.md-search-result__link').first
            first[words] = urlsplit(link.get_attribute('href') or '').path.strip('/')
        server.shutdown()
    assert first == SEARCHES
    assert left == [], 'the built site loads nothing from the network'
