"""Generate the reference pages from the code: an mkdocs hook.

The pages are made from the recipe's dataclasses, the registry's signatures and docstrings, the rules of resuming,
argparse, and the constants of `exit_codes` and `runs.environment`, so that they cannot go stale. Nothing here imports
torch.
"""

import argparse
import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from diffusion import cli, exit_codes
from diffusion.captioning.settings import CaptionSettings
from diffusion.config import registry
from diffusion.config.checks import NAMED_COMPONENT_SECTIONS, SUPPLIED
from diffusion.config.prompt_files import Prompt
from diffusion.config.recipe import Component, Recipe
from diffusion.config.resume_rules import rules
from diffusion.config.schema import attribute_docs
from diffusion.config.signatures import of_source, source_file, words
from diffusion.launch.backends import NAMES, backend_of
from diffusion.launch.job_spec import JobSpec
from diffusion.prepare.settings import PrepareSettings
from diffusion.runs import environment

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

BUILDERS = re.compile(r'diffusion\.models\.families\.\w+\.builder$')
"""Modules of functions that build a LatentDiffusion and pass their last keywords on to it."""
LATENT_DIFFUSION = ('diffusion.models.latent_diffusion', 'LatentDiffusion')
TRAINING_KEYWORDS = 'diffusion.models.training_keywords'

KINDS = {
    'model': 'Models',
    'dataset': 'Datasets',
    'optimizer': 'Optimizers',
    'scheduler': 'Learning-rate schedulers',
    'algorithm': 'Algorithms',
    'callback': 'Callbacks',
    'logger': 'Loggers',
    'evaluator': 'Evaluators',
    'guidance': 'Guidance',
    'trainer': 'Trainer',
}


def on_files(files: 'Files', config: 'MkDocsConfig') -> 'Files':
    """Add the generated pages to the site (mkdocs calls this), after the written ones in the results of a search."""
    from mkdocs.structure.files import File

    for path, content in pages().items():
        files.append(File.generated(config, path, content=f'---\nsearch: {{boost: 0.3}}\n---\n{content}'))
    return files


def pages() -> dict[str, str]:
    """Return the Markdown of every generated page by its path in the site."""
    return {
        'reference/recipe.md': recipe_page(),
        'reference/components.md': components_page(),
        'reference/resume.md': resume_page(),
        'reference/command-line.md': command_line_page(),
        'reference/prepare.md': prepare_page(),
        'reference/captions.md': captions_page(),
        'reference/job.md': job_page(),
        'reference/exit-statuses.md': exit_status_page(),
        'reference/environment.md': environment_page(),
        'reference/limits.md': limits_page(),
    }


# -- recipe, preparation, job: dataclasses --


def recipe_page() -> str:
    """Return the page of every recipe key outside of components."""
    intro = """
        # Recipe keys

        Every key of a recipe, with its type and default. Nested sections have a table each. `required` keys have no
        default. Keys of components (`model`, `optimizer`, `callbacks`, ...) are in [Components](components.md);
        `trainer` takes the keywords of [`composer.Trainer`](components.md#trainer) that no other section sets.

        Two keys are read before the others: `extends`, the path of the recipe that this one is based on, and
        `imports`.
    """
    return _joined(textwrap.dedent(intro), *dataclass_tables(Recipe, 'Top level'))


def resume_page() -> str:
    """Return the page of the effect of each key that changes when a run resumes."""
    intro = """
        # Changes on resume

        A run that resumes is compared with the recipe that its checkpoint was trained with, with defaults filled in.
        This table has the effect of a change of each key; every change that is made is logged and added to the end of
        the run's `recipe.yaml`. `*` stands for the name of a stream, and at the end of a key for all other keys there.
        Keys of algorithms, callbacks and loggers are listed by their registered names.

        - *fixed*: the run is refused with both values.
        - *applied*: the new value takes effect.
        - *needs allow_data_change*: the new value takes effect if it leaves the samples and their order as they were;
          otherwise the run is refused unless the recipe sets `allow_data_change: true`.
        - *applied before averaging starts, then fixed*: refused if the checkpoint has averaged weights.
    """
    rows = [(key, rule.effect.value, rule.reason) for rule in rules() for key in rule.keys]
    return _joined(textwrap.dedent(intro), table(('key', 'effect', 'reason'), rows, code=(0,)))


def prepare_page() -> str:
    """Return the page of every key of a preparation's YAML."""
    intro = """
        # Preparation keys

        The keys of a YAML for `diffusion prepare RECIPE.yaml`, such as `yamls/prepare/webdataset.yaml`. On the
        command line, a key is an option, such as `--max-rejected` for `max_rejected`, and `--set KEY=VALUE` sets the
        keys of a section, such as `filters.min_side=512`.
    """
    return _joined(textwrap.dedent(intro), *dataclass_tables(PrepareSettings, 'Top level'))


def captions_page() -> str:
    """Return the page of every key of the settings of `diffusion caption`, and of a prompt file."""
    intro = """
        # Captioning keys

        The keys of the YAML for `diffusion caption DATASET --with FILE.yaml`, and of the prompt files that it names.
    """
    parts = [*dataclass_tables(CaptionSettings, 'Top level'), *dataclass_tables(Prompt, 'Prompt files')]
    return _joined(textwrap.dedent(intro), *parts)


def job_page() -> str:
    """Return the page of every key of a job's YAML."""
    intro = """
        # Job keys

        The keys of a YAML for `diffusion launch`, such as `yamls/launch/phase1-slurm.yaml`. `backend` is the name of
        a back end, or a mapping of `name` and that back end's own keys, which are listed at the end.
    """
    parts = dataclass_tables(JobSpec, 'Top level')
    for name in NAMES:
        parts += dataclass_tables(backend_of(name).Options, f'backend: {name}')
    return _joined(textwrap.dedent(intro), *parts)


def dataclass_tables(kind: Any, title: str) -> list[str]:
    """Return a heading and a table of the fields of a dataclass, then those of each dataclass in its fields, once."""
    sections: dict[Any, str] = {kind: title}
    parts = []
    queue = [kind]
    while queue:
        each = queue.pop(0)
        docs, hints = attribute_docs(each), get_type_hints(each)
        rows = []
        for field in dataclasses.fields(each):
            if not field.init or not field.repr:
                continue
            inner = _dataclass_in(hints[field.name])
            link = ''
            if inner is not None and inner is not Component:
                if inner not in sections:
                    sections[inner] = field.name
                    queue.append(inner)
                link = f' Keys: [`{sections[inner]}`](#{sections[inner]}).'
            meaning = docs.get(field.name, '') + link
            key = field.metadata.get('key', field.name)
            rows.append((key, type_text(hints[field.name]), default_text(field), meaning))
        heading = title if each is kind else f'`{sections[each]}`'
        parts += [f'## {heading}', inspect.cleandoc(each.__doc__ or '')]
        parts.append(table(('key', 'type', 'default', 'meaning'), rows, code=(0, 2)))
    return parts


def _dataclass_in(hint: Any) -> Any:
    """Return the dataclass that a type is or contains, or None."""
    if dataclasses.is_dataclass(hint):
        return hint
    return next((found for each in get_args(hint) if (found := _dataclass_in(each)) is not None), None)


def type_text(hint: Any) -> str:
    """Return a type in the words of a YAML's author."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return ' or '.join(type_text(each) for each in arguments)
    if origin is Literal:
        return ', '.join(f'`{each}`' for each in arguments)
    if origin in (list, tuple):
        return f'list of {type_text(arguments[0])}'
    if origin is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return f'mapping of {type_text(arguments[1])} by name'
    if dataclasses.is_dataclass(hint):
        return 'component' if hint is Component else 'section'
    simple = {int: 'integer', float: 'number', str: 'string', bool: 'boolean', type(None): 'null', Any: 'any value'}
    return simple.get(hint, getattr(hint, '__name__', str(hint)))


def default_text(field: 'dataclasses.Field[Any]') -> str:
    """Return the default of a field as YAML, or `required`."""
    if field.default is not dataclasses.MISSING:
        return _yaml(field.default)
    if field.default_factory is dataclasses.MISSING:
        return 'required'
    value = field.default_factory()
    if isinstance(value, Component):
        return _yaml({'name': value.name} | value.kwargs)
    return '' if dataclasses.is_dataclass(value) else _yaml(value)


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: 'null', True: 'true', False: 'false'}[value]
    if isinstance(value, dict):
        return '{' + ', '.join(f'{key}: {_yaml(item)}' for key, item in value.items()) + '}'
    if isinstance(value, list | tuple):
        return '[' + ', '.join(map(_yaml, value)) + ']'
    return "''" if value == '' else str(value)


# -- components: signatures and docstrings, read from the source --


def components_page() -> str:
    """Return the page of every registered component and its keywords."""
    intro = """
        # Components

        A component of a recipe is a registered `name` plus keywords. [Extending](../extending.md) shows how to
        register your own. Components that come from Composer or PyTorch are described in those projects'
        documentation; their keywords are listed here.
    """
    parts = [textwrap.dedent(intro)]
    section = {kind: plural for plural, kind in NAMED_COMPONENT_SECTIONS.items()}
    for kind, title in KINDS.items():
        parts.append(f'## {title}')
        where = f'`{section[kind]}:`' if kind in section else f'`{kind}:`'
        parts.append(f'In a recipe: {where}.')
        for name in shipped_names(kind):
            parts += _component(kind, name)
    return _joined(*parts)


def shipped_names(kind: str) -> list[str]:
    """Return the names of the components of this library, without those that a program has registered."""
    return [name for name in registry.names(kind) if str(registry.TARGETS[kind][name]).count(':') == 1]


def _component(kind: str, name: str) -> Iterator[str]:
    module, attribute = registry.TARGETS[kind][name].split(':')
    node = _definition(module, attribute)
    summary, meanings = parse_docstring(node)
    if not meanings and (base := _imported_base(module, node)) is not None:
        node, meanings = base, parse_docstring(base)[1]
    if BUILDERS.match(module):  # the builders pass the other keywords on
        shared = parse_docstring(_definition(*LATENT_DIFFUSION))[1] | parse_docstring(_tree(TRAINING_KEYWORDS))[1]
        meanings = shared | meanings
    defaults = _defaults(node) | _resolved_defaults(module, node)
    supplied = {*SUPPLIED.get(kind, ()), *(('model',) if kind == 'trainer' else ())}
    signature = registry.signature(kind, name)
    rows = [
        (each.name, each.annotation, in_yaml(defaults.get(each.name, 'required')), meanings.get(each.name, each.doc))
        for each in signature.parameters
        if each.name not in supplied
    ]
    if kind != 'trainer':
        yield f'### `{name}`'
    if module.startswith('diffusion.'):
        yield summary
        yield table(('keyword', 'type', 'default', 'meaning'), rows, code=(0, 1, 2)) if rows else ''
    else:
        yield f'`{module}.{attribute}`'
        yield table(('keyword', 'type', 'default'), [row[:3] for row in rows], code=(0, 1, 2)) if rows else ''
    for parameter in signature.parameters:
        if parameter.name in supplied:
            continue
        for inner in words(parameter.annotation) & {*signature.nested}:
            yield f'#### `{name}`: keys of `{parameter.name}`'
            yield _dataclass_table(*signature.nested[inner].split(':'))


def _dataclass_table(module: str, attribute: str) -> str:
    """Return the table of a dataclass that is read from its source."""
    rows = [
        (each.name, each.annotation, 'required' if each.required else in_yaml(repr(each.default)), each.doc)
        for each in of_source(module, attribute).parameters
    ]
    return table(('key', 'type', 'default', 'meaning'), rows, code=(0, 1, 2))


def in_yaml(default: str) -> str:
    """Return the source text of a default as a recipe would have it."""
    return {'None': 'null', 'True': 'true', 'False': 'false'}.get(default, default)


def _resolved_defaults(module: str, node: ast.FunctionDef | ast.ClassDef) -> dict[str, str]:
    """Return the defaults of a builder that are constants of its file, or declared with the shared keywords."""
    if not BUILDERS.match(module):
        return {}
    own = _defaults(node)
    return {
        name: value if isinstance(value, str) else str(value)
        for name, value in of_source(module, node.name).defaults().items()
        if isinstance(value, str) or name not in own or own[name].isupper()
    }


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(source_file(module).read_text(encoding='utf-8'))


def _definition(module: str, attribute: str) -> ast.FunctionDef | ast.ClassDef:
    return next(
        node
        for node in _tree(module).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == attribute
    )


def _imported_base(module: str, node: ast.FunctionDef | ast.ClassDef) -> ast.FunctionDef | ast.ClassDef | None:
    """Return the base class of a class without keywords of its own, if it is imported from this package."""
    names = {ast.unparse(base) for base in node.bases} if isinstance(node, ast.ClassDef) else {*()}
    imports = (each for each in _tree(module).body if isinstance(each, ast.ImportFrom))
    found = [(each.module, name.name) for each in imports for name in each.names if name.name in names]
    return next((_definition(home, name) for home, name in found if home and home.startswith('diffusion.')), None)


def parse_docstring(node: ast.FunctionDef | ast.ClassDef | ast.Module) -> tuple[str, dict[str, str]]:
    """Split a Google-style docstring into its text before `Args:` and the meaning of each argument."""
    text = ast.get_docstring(node) or ''
    summary, _, rest = text.partition('\nArgs:\n')
    summary = re.split(r'\n(?:Raises|Returns|Attributes|Example|Examples|Yields|\.\. \w+::)', summary)[0]
    arguments = re.split(r'\n(?=\S)', rest)[0]
    meanings: dict[str, str] = {}
    for entry in re.split(r'\n(?=    \S)', '\n' + arguments):
        match = re.match(r'    (\w+)[^:\n]*:\s*(.*)', entry.strip('\n'), flags=re.DOTALL)
        if match:
            meanings[match[1]] = ' '.join(match[2].split())
    return ' '.join(summary.split()), meanings


def _defaults(node: ast.FunctionDef | ast.ClassDef) -> dict[str, str]:
    """Return the source text of the defaults of a function, or of a class's `__init__`."""
    if isinstance(node, ast.ClassDef):
        inits = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == '__init__']
        if not inits:
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and item.value is not None]
            return {ast.unparse(item.target): ast.unparse(item.value) for item in fields if item.value is not None}
        node = inits[0]
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(reversed(positional), reversed(arguments.defaults), strict=False)]
    pairs += [(a, default) for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default]
    return {argument.arg: ast.unparse(default) for argument, default in pairs}


# -- command line --


def command_line_page() -> str:
    """Return the help text of every command."""
    parts = [
        '# Command line',
        '`composer run.py RECIPE [KEY=VALUE ...]` runs a recipe with one process per GPU. Everything else is a command '
        'of `diffusion`. `KEY=VALUE` overrides a key of the recipe, as in `trainer.max_duration=20ba`.',
    ]
    for parser in cli.make_parser().tree():
        if not parser._subparsers:
            parts += [f'## `{parser.prog}`', f'```text\n{help_text(parser)}\n```']
    return _joined(*parts)


def help_text(parser: argparse.ArgumentParser) -> str:
    """Return a parser's `--help`, 100 columns wide, whatever the terminal's width."""
    formatter: Callable[..., argparse.HelpFormatter] = parser.formatter_class
    parser.formatter_class = lambda prog: formatter(prog, width=100)  # type: ignore[assignment]
    try:
        return parser.format_help().strip()
    finally:
        parser.formatter_class = formatter  # type: ignore[assignment]


# -- exit statuses and environment variables: constants and their doc strings --


def exit_status_page() -> str:
    """Return the page of exit statuses."""
    docs = constant_docs(exit_codes)
    rows = [('0', 'Success.')]
    rows += [(str(value), docs[name]) for name, value in vars(exit_codes).items() if name in docs]
    rows += [
        ('3', '`diffusion data verify` found damaged data, or `diffusion prepare` more unusable images than allowed.'),
    ]
    text = inspect.cleandoc(exit_codes.__doc__ or '')
    return _joined('# Exit statuses', text, table(('status', 'meaning'), sorted(rows, key=lambda row: int(row[0]))))


def environment_page() -> str:
    """Return the page of environment variables."""
    docs = constant_docs(environment)
    rows = [(vars(environment)[name], doc) for name, doc in docs.items()]
    general = [
        ('DIFFUSION_TRACEBACK', 'Set to 1 to print a traceback with every error message.'),
        (
            'XDG_CACHE_HOME',
            'Parent of caches and of the working folders of runs in an object store (default: `~/.cache`).',
        ),
        ('DIFFUSION_WORKING_FOLDER', 'Folder for the working folders of runs in an object store, on a local disk.'),
        (
            'DIFFUSION_FAILURE_DOMAIN',
            'What fails together with this node, such as its rack, for `checkpointing.tiers`.',
        ),
        ('HF_HOME, HF_HUB_OFFLINE, HF_TOKEN', "Hugging Face's cache, offline mode, token for gated repositories."),
        ('HF_ENDPOINT', 'Address of another Hugging Face Hub.'),
        ('S3_ENDPOINT_URL', 'Endpoint of an S3-compatible object store.'),
    ]
    return _joined(
        '# Environment variables',
        '## For everybody',
        table(('variable', 'meaning'), general, code=(0,)),
        '## Set by `diffusion launch`',
        inspect.cleandoc(environment.__doc__ or ''),
        table(('variable', 'meaning'), rows, code=(0,)),
    )


NUMBERS = r'\(?[\d.*/ e-]+(, [\d.*/ e-]+)*\)?'
"""Pattern of a constant's value: numbers, or their products and quotients."""


def limits_page() -> str:
    """Return the page of the numbers that no setting changes: times in seconds, then all others."""
    intro = """
        # Limits and waiting times

        Numbers that are constants of the code. Those that a setting changes, such as `notice_seconds` of a job, are in
        the pages of their keys.

        ## Times

        In seconds: how often something is checked, and after how long it counts as failed.
    """
    package, times, others = Path(cli.__file__).parent, [], []
    for path in sorted(package.rglob('*.py')):
        module = '.'.join(path.relative_to(package).with_suffix('').parts)
        body = ast.parse(path.read_text(encoding='utf-8')).body
        values = {
            ast.unparse(each.targets[0]): ast.unparse(each.value) for each in body if isinstance(each, ast.Assign)
        }
        for name, doc in doc_strings(body).items():
            if re.fullmatch(r'[A-Z][A-Z_]*', name) and re.fullmatch(NUMBERS, values.get(name, '')):
                is_time = name.endswith('_SECONDS') and 'planning' not in module
                (times if is_time else others).append((f'{module}.{name}', values[name], doc))
    limits = '## Limits, sizes and assumptions\n', table(('constant', 'value', 'meaning'), others, code=(0, 1))
    return _joined(textwrap.dedent(intro), table(('constant', 'seconds', 'meaning'), times, code=(0, 1)), *limits)


def constant_docs(module: types.ModuleType) -> dict[str, str]:
    """Return the doc strings under a module's constants, by the constant's name."""
    return doc_strings(ast.parse(Path(module.__file__ or '').read_text(encoding='utf-8')).body)


def doc_strings(body: list[ast.stmt]) -> dict[str, str]:
    """Return the doc strings under assignments, by the name that is assigned."""
    return {
        ast.unparse(statement.targets[0] if isinstance(statement, ast.Assign) else statement.target): ' '.join(
            str(following.value.value).split()
        )
        for statement, following in itertools.pairwise(body)
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
    }


# -- Markdown --


def table(header: tuple[str, ...], rows: Any, *, code: tuple[int, ...] = ()) -> str:
    """Return a Markdown table; the columns in `code` are set in monospace."""
    lines = ['| ' + ' | '.join(header) + ' |', '|' + '---|' * len(header)]
    for row in rows:
        cells = [_cell(cell, monospace=index in code) for index, cell in enumerate(row)]
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def _cell(text: str, *, monospace: bool) -> str:
    if not monospace:
        # A bar ends a cell, and so does one in code.
        return text.replace('|', '\\|')
    if not text or text == 'required':
        return text
    return ', '.join(f'`{part}`' for part in [text]).replace('|', '\\|')


def _joined(*parts: str) -> str:
    return '\n\n'.join(part.strip('\n') for part in parts if part) + '\n'
