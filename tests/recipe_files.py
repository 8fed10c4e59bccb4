"""Write recipes to files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def write_yaml(path: Path, content: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content), encoding='utf-8')
    return path
