"""Commands `diffusion recipes` and `diffusion recipes copy`: the recipes that come with this package."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from diffusion.config.options import Option, add_command
from diffusion.config.yaml_files import SHIPPED, locate_yaml, shipped_names
from diffusion.errors import UserError


@dataclass(frozen=True)
class ListOptions:
    """Options of `diffusion recipes`."""


@dataclass(frozen=True)
class CopyOptions:
    """Options of `diffusion recipes copy`."""

    name: Annotated[str, Option(positional=True)]
    """Name of the recipe, as `diffusion recipes` lists it."""
    out: Annotated[Path, Option('PATH', positional=True, files=True)]
    """File to write, or a folder for it, such as `.`."""


def add_arguments(parser: Any) -> None:
    """Add the arguments of `diffusion recipes` to its parser."""
    add_command(parser, run_list)
    actions = parser.add_subparsers(dest='action', metavar='ACTION')
    actions.add_parser('copy', partial(add_command, function=run_copy), help='write a recipe to a file, to edit it')


def run_list(options: ListOptions) -> int:
    """Run `diffusion recipes`: print name, title and cost of each recipe, one per line."""
    rows = [(name, *describe(locate_yaml(f'{SHIPPED}{name}').read_text(encoding='utf-8'))) for name in shipped_names()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, title, cost in rows:
        print(f'{name:{widths[0]}}  {title:{widths[1]}}  {cost}')
    print('\nTo train one: diffusion train diffusion:NAME [KEY=VALUE ...]')
    print('To edit one first: diffusion recipes copy NAME .')
    return 0


def run_copy(options: CopyOptions) -> int:
    """Run `diffusion recipes copy`: write a copy of a recipe of this package.

    If the recipe extends another one, the copy extends it as `diffusion:NAME`.

    Raises:
        UserError: The package does not have this recipe, or the file to write already exists.
    """
    source = locate_yaml(f'{SHIPPED}{options.name.removeprefix(SHIPPED)}')
    out = options.out / source.name if options.out.is_dir() else options.out
    try:
        with out.open('x', encoding='utf-8') as file:
            file.write(re.sub(r'(?m)^extends: (\w\S*)\.yaml$', rf'extends: {SHIPPED}\1', source.read_text('utf-8')))
    except FileExistsError:
        raise UserError(f'recipes copy: {out} exists; give another path, or remove it') from None
    except FileNotFoundError:
        raise UserError(f'recipes copy: the folder {out.parent} does not exist; create it') from None
    print(out)
    return 0


def describe(text: str) -> tuple[str, str]:
    """Return the title and the cost of a recipe, from the comment at its beginning.

    The title is the first sentence up to a colon. The cost is the text after `Cost:` up to ';', '(', 'with' or 'at'.
    """
    header = ' '.join(line.removeprefix('#').strip() for line in text.partition('\n#\n')[0].splitlines())
    title = re.split(r'[.:] ', f'{header} ')[0]
    cost = re.search(r'(?m)^# Cost: +((?:.|\n#  )*?)(?:[;(]| with | at |$)', text)
    line = ' '.join(cost[1].replace('#', '').split()).rstrip(',') if cost else ''
    return title, re.sub(r', [\d,]+ GPU-hours', '', line)
