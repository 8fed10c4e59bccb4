"""Levels of other libraries' loggers."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def errors_only(name: str) -> Iterator[None]:
    """Context in which a logger logs only errors, to suppress redundant warnings."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
