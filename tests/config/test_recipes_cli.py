"""Recipes in the package: `diffusion recipes`, copies of them, and `diffusion:NAME` in place of a path."""

from pathlib import Path

import pytest
from commands import output_of, refusal
from golden import check_golden
from recipe_files import all_values

from diffusion.config.load import RecipeError, load
from diffusion.config.yaml_files import shipped_names

YAMLS = Path(__file__).parents[2] / 'yamls'


def test_list_has_a_line_with_title_and_cost_for_each_recipe(capsys):
    assert shipped_names() == sorted(path.stem for path in YAMLS.glob('*.yaml'))
    check_golden(Path(__file__).parent / 'golden' / 'recipes', {'list.txt': output_of(capsys, 'recipes')})


def test_name_stands_for_the_file_in_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = all_values(load(YAMLS / 'quickstart.yaml'))
    assert all_values(load('diffusion:quickstart')) == all_values(load('diffusion:quickstart.yaml')) == expected
    Path('mine.yaml').write_text('extends: diffusion:quickstart\nseed: 3\n')
    assert load('mine.yaml').seed == 3
    with pytest.raises(RecipeError, match="is called 'quickstrat'; did you mean 'quickstart'"):
        load('diffusion:quickstrat')
    Path('mine.yaml').write_text('extends: diffusion:../phase1\n')
    with pytest.raises(RecipeError, match="no recipe of this package is called '../phase1'"):
        load('mine.yaml')


def test_copy_extends_the_recipe_of_the_package_and_replaces_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert output_of(capsys, 'recipes', 'copy', 'phase2', '.') == 'phase2.yaml\n'
    copied, original = load('phase2.yaml', allow_missing=True), load(YAMLS / 'phase2.yaml', allow_missing=True)
    assert all_values(copied) == all_values(original)
    for words, message in (
        (['phase2', '.'], 'recipes copy: phase2.yaml exists; give another path, or remove it'),
        (['phase2', 'nowhere/mine.yaml'], 'recipes copy: the folder nowhere does not exist; create it'),
        (['phase22', '.'], "did you mean 'phase2'?"),
    ):
        assert message in refusal(capsys, 'recipes', 'copy', *words)
    output_of(capsys, 'recipes', 'copy', 'lora', 'mine.yaml')
    assert load('mine.yaml', allow_missing=True).name == 'lora'
