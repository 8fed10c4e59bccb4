"""Self-contained HTML page of a report: one file with data, style, scripts and images."""

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import diffusion

ASSETS = Path(__file__).with_name('assets')
SCRIPTS = (
    *('elements.js', 'curve_values.js', 'charts.js', 'curves.js', 'samples.js', 'summary.js', 'evaluations.js'),
    *('history.js', 'run_table.js', 'report.js'),
)
CHART_LIBRARY = 'uPlot.iife.min.js'
STYLES = ('uPlot.min.css', 'report.css')
MAX_BYTES = 5_000_000


def report_page(
    data: Mapping[str, Any],
    *,
    title: str,
    places: Sequence[str],
    images: Mapping[str, bytes] | None = None,
    live_seconds: float | None = None,
) -> str:
    """Return the HTML of a report page.

    Args:
        data: Result of `page_data` or `run_table`.
        images: WebP images to embed, by key; None if a server sends them.
        live_seconds: Interval at which the page asks its server for newer data; None if the page is a file.
    """
    embedded = {
        key: f'data:image/webp;base64,{base64.b64encode(each).decode()}' for key, each in (images or {}).items()
    }
    content = {**data, 'live': live_seconds} | ({} if images is None else {'images': embedded})
    style = '\n'.join(_asset(name) for name in STYLES)
    # Put all scripts in one scope, so that their names do not become properties of `window`.
    script = f'(() => {{\n{"".join(_asset(name) for name in SCRIPTS)}}})();'
    values = {
        'POLICY': _policy(style, [_asset(CHART_LIBRARY), script]),
        'TITLE': html.escape(title),
        'STYLE': style,
        'PLACES': html.escape(', '.join(places)),
        'VERSION': html.escape(diffusion.__version__),
        'DATA': json_for_script(content),
        'CHARTS': _asset(CHART_LIBRARY),
        'SCRIPT': script,
    }
    return re.sub('@([A-Z]+)@', lambda match: values[match[1]], _asset('page.html'))


def json_for_script(content: Any) -> str:
    """Return JSON that is safe inside a script element, whatever strings it contains."""
    text = json_text(content)
    # `</script>` or `<!--` would otherwise end or change the element.
    return text.replace('<', '\\u003c').replace('>', '\\u003e').replace('&', '\\u0026')


def json_text(content: Any) -> str:
    try:
        return json.dumps(content, allow_nan=False, separators=(',', ':'))
    except ValueError:
        return json.dumps(_finite(content), separators=(',', ':'))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _policy(style: str, scripts: Sequence[str]) -> str:
    """Return a Content-Security-Policy that allows only these scripts and styles, and the page's own server."""
    rules = {
        'default-src': "'none'",
        'script-src': ' '.join(_hash(each) for each in scripts),
        'style-src': _hash(style),
        'img-src': "'self' data:",
        'connect-src': "'self'",
        'base-uri': "'none'",
        'form-action': "'none'",
    }
    return '; '.join(f'{name} {value}' for name, value in rules.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding='utf-8')
