"""Refuse bullets of more than 60 words, which nobody skims: an mkdocs hook for all pages and the README."""

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

log = logging.getLogger('mkdocs.hooks.bullet_length')
"""A warning under this name fails a strict build."""

MAX_WORDS = 60
BULLET = re.compile(r'^ *(?:[-*]|\d+\.) (.*(?:\n(?! *(?:[-*]|\d+\.) ) +\S.*)*)', flags=re.MULTILINE)
CODE = re.compile(r'^ *```.*?^ *```$', flags=re.MULTILINE | re.DOTALL)
LINK_TARGET = re.compile(r'(?<=\])\([^)]*\)')


def on_pre_build(config: 'MkDocsConfig') -> None:
    """Check the README, which is not a page of the site (mkdocs calls this)."""
    _warn('README.md', Path(config.config_file_path).with_name('README.md').read_text(encoding='utf-8'))


def on_page_markdown(markdown: str, /, *, page: 'Page', **_: Any) -> None:
    """Check a page of the site (mkdocs calls this)."""
    _warn(page.file.src_uri, markdown)


def long_bullets(markdown: str) -> list[tuple[int, str]]:
    """Return the number of words and the text of each bullet that is too long, without code blocks and link targets."""
    texts = [LINK_TARGET.sub('', match[1]) for match in BULLET.finditer(CODE.sub('', markdown))]
    return [(len(text.split()), text) for text in texts if len(text.split()) > MAX_WORDS]


def _warn(name: str, markdown: str) -> None:
    for count, text in long_bullets(markdown):
        log.warning('%s: a bullet of %d words; split or cut it to %d: %.60s...', name, count, MAX_WORDS, text)
