"""Command-line options made from the fields of a dataclass."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from golden import check_golden, check_transcripts

from diffusion.config.declarations import Fraction
from diffusion.config.options import Count, Option, Overrides, Port, RecipeFile, add_command, option_words


@dataclass
class Base:
    """Options of all."""

    recipe: RecipeFile
    """Recipe file."""
    overrides: Overrides = field(default_factory=list)
    """Overrides."""


@dataclass(kw_only=True)
class Settings(Base):
    """Options of one."""

    out: Path
    """Output folder."""
    max_rejected: Annotated[float | None, Fraction()] = None
    """Fraction of 100% (default: no limit)."""
    workers: Count = 4
    """Number of workers."""
    port: Port | None = None
    """Port."""
    store: Literal['resized', 'original'] = 'resized'
    """Form of the images."""
    sizes: list[int] = field(default_factory=list)
    """Sizes in pixels."""
    columns: Annotated[str | list[str] | None, Option('NAME', repeated=True)] = None
    """Columns."""
    serve: Annotated[str | None, Option('DIR', const='')] = None
    """Folder to serve."""
    dry: bool = False
    """Change nothing."""
    key: Annotated[str | None, Option(excludes='source')] = None
    """Key."""
    hash: Annotated[str | None, Option(excludes='source')] = None
    """Hash."""


@dataclass
class Evaluation:
    """Options of the evaluation."""

    metrics: Annotated[list[str] | None, Option(commas=True)] = None
    """Metrics."""
    scales: Annotated[list[float] | None, Option(commas=True, flag='--guidance')] = None
    """Scales."""
    networks: Annotated[dict[str, str], Option(flag='--network')] = field(default_factory=dict)
    """Networks."""


@pytest.fixture
def parse() -> Callable[..., Any]:
    """Function that returns what a command is called with."""
    called: list[Any] = []

    def command(settings: Settings, evaluation: Evaluation) -> int:
        called[:] = settings, evaluation
        return 0

    parser = argparse.ArgumentParser('program')
    add_command(parser, command)

    def parsed(*words: str) -> tuple[Settings, Evaluation]:
        args = parser.parse_args(['a.yaml', *words])
        assert args.call(args) == 0
        return called[0], called[1]

    parsed.help = parser.format_help  # type: ignore[attr-defined]
    return parsed


def test_omitted_options_have_the_defaults_of_the_dataclasses(parse):
    assert parse('--out', 'x') == (Settings('a.yaml', out=Path('x')), Evaluation())


def test_given_options_have_the_types_of_the_fields(parse):
    words = ['b=1', '--out', 'x', '--max-rejected', '0.5', '--workers', '2e3', '--port', '0', '--store', 'original']
    words += ['--sizes', '256', '512', '--columns', 'a', '--columns', 'b', '--serve', '--hash', 'ab']
    words += ['--metrics', 'fid, ,kid,', '--guidance', '1,7.5', '--network', 'dino=x', '--network', 'cmmd=y=z']
    settings = Settings('a.yaml', ['b=1'], out=Path('x'), max_rejected=0.5, workers=2000, port=0, store='original')
    settings.sizes, settings.columns, settings.serve, settings.hash = [256, 512], ['a', 'b'], '', 'ab'
    evaluation = Evaluation(['fid', 'kid'], [1.0, 7.5], {'dino': 'x', 'cmmd': 'y=z'})
    assert parse(*words) == (settings, evaluation)
    assert parse('--out', 'x', *option_words(evaluation))[1] == evaluation


def test_wrong_options_are_usage_errors(parse, capsys):
    """The lines of the file are arguments."""

    def outcome(line):
        with pytest.raises(SystemExit, match='2'):
            parse(*line.split()[1:])
        return [capsys.readouterr().err.splitlines()[-1].partition(' (choose from')[0]]

    check_transcripts(Path(__file__).parent / 'golden' / 'usage', outcome)


def test_help_is_the_doc_strings_and_defaults(parse, monkeypatch):
    monkeypatch.setenv('COLUMNS', '100')
    usage, _, text = parse.help().partition('\n\n')  # the usage has other line breaks in other versions of Python
    check_golden(Path(__file__).parent / 'golden' / 'options', {'help.txt': f'{" ".join(usage.split())}\n\n{text}'})
