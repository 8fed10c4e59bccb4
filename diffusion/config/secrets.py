"""Secrets in recipes and job specs: find those written in plain text, and hide secrets in messages.

These files are printed, saved with checkpoints, sent to schedulers and committed, so they must not contain secrets.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from diffusion.config.interpolation import Interpolation, KeyPath
from diffusion.config.schema import MISSING, Problem, join

SECRET_NAME = re.compile(
    r'(?i)(?<![a-z])(token|secret|password|passwd|passphrase|credentials?|api[_-]?key|access[_-]?key(?!_id)|'
    r'secret[_-]?key|account[_-]?key|private[_-]?key|auth[_-]?key)$'
)
"""Name endings that mark the value of a variable or setting as a secret; token_dropout, for example, does not match."""
_NO_SECRET_NAME = re.compile(r'(?i)(pad|eos|bos|unk|mask|cls|sep|start|end|special|class|prompt)_?token$')
_FORMATS = {
    'an AWS access key': r'\b(AKIA|ASIA)[0-9A-Z]{16}\b',
    'an AWS session token': r'\b(IQoJb3JpZ2lu|FwoGZXIvYXdz|FQoGZXIvYXdz)[A-Za-z0-9+/=]{20,}',
    'a Hugging Face token': r'\b(hf|api_org)_[A-Za-z0-9]{30,}',
    'a Weights & Biases key': r'\bwandb_v1_[A-Za-z0-9_-]{20,}|\blocal-[0-9a-f]{40}\b',
    'a GitHub token': r'\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_[A-Za-z0-9_]{30,}',
    'a GitLab token': r'\bglpat-[A-Za-z0-9_-]{20,}',
    'an OpenAI or Anthropic key': r'\bsk-[A-Za-z0-9_-]{30,}',
    'a Slack token': r'\bxox[abeoprs]-[A-Za-z0-9-]{10,}|\bxapp-[A-Za-z0-9-]{10,}',
    'a webhook URL': r'hooks\.slack\.com/(services|workflows|triggers)/\w+/|discord(app)?\.com/api/webhooks/\d+/\w',
    'an Azure storage key': r'(?i:\bAccountKey=)[A-Za-z0-9+/]{20,}|(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{86}==',
    'a signed URL': r'(?i)[?&;](sig|signature|x-(amz|goog)-signature|x-amz-security-token)=[A-Za-z0-9%+/=_-]{16}',
    'a Google key': r'\bAIza[0-9A-Za-z_-]{35}|\bya29\.[0-9A-Za-z_-]{20,}|\bGOOG1[0-9A-Z]{20,}',
    'a private key': r'-----BEGIN [A-Z ]*PRIVATE KEY-----|"private_key"\s*:',
    'a JSON web token': r'\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}',
    'a Databricks token': r'\bdapi[0-9a-f]{32}\b',
    'a URL with a password': r'\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@?#\'"]{0,100}:[^\s/@?#\'"$]{1,200}@',
}
_FORMAT = {what: re.compile(pattern) for what, pattern in _FORMATS.items()}
# An AWS secret key has no prefix. A SHA-1 has 40 characters too, but only hexadecimal digits.
_AWS_SECRET = re.compile(r'(?<![A-Za-z0-9+/=_.-])[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/=_.-])')
_HEX_KEY = re.compile(r'[0-9a-f]{40}')
_HASH_NAME = re.compile(r'(?i)(revision|commit|sha\d*|hash|digest|checksum|version|ref|rev|fingerprint|etag)(_|$)|_id$')


def secret_problems(values: Any, where: str = '') -> list[Problem]:
    """Return a problem for each text in plain values whose format or key name marks it as a secret.

    The messages do not contain the text. An interpolation is not a secret: its text names an environment variable.
    """
    if isinstance(values, Mapping):
        found = [problem for key, item in values.items() for problem in secret_problems(item, join(where, key))]
        # Kubernetes writes variables as {name: NAME, value: VALUE}.
        name, value = values.get('name'), values.get('value')
        if isinstance(name, str) and isinstance(value, str) and has_secret_name(name, value):
            found.append(_problem(join(where, 'value'), f'looks like a secret by the name {name}'))
        return found
    if isinstance(values, list):
        return [found for index, item in enumerate(values) for found in secret_problems(item, f'{where}[{index}]')]
    if not isinstance(values, str):
        return []
    name = re.sub(r'\[\d+\]$', '', where).rpartition('.')[2]
    if has_secret_name(name, values):
        return [_problem(where, 'looks like a secret by its name')]
    what = secret_format(values, name=name)
    return [] if what is None else [_problem(where, f'contains what looks like a secret ({what})')]


def has_secret_name(name: str, value: str) -> bool:
    """Return True if the name marks a variable or setting as a secret and the value is the secret in plain text."""
    if not SECRET_NAME.search(name) or _NO_SECRET_NAME.search(name):
        return False
    # The path of a file with the secret, and the name of an environment variable, are not the secret itself.
    is_place = re.match(r'/|~|\.{1,2}/|\w+://[^@?]*$|[A-Z][A-Z0-9]*(_[A-Z0-9]+)+$', value) is not None
    return not isinstance(value, Interpolation) and value not in ('', MISSING) and not is_place


def secret_format(text: str, *, name: str = '') -> str | None:
    """Return the kind of secret that a text contains, such as 'a GitHub token', or None.

    Args:
        name: Key of the text. 40 hexadecimal digits are a Git revision if it is `revision` or similar, else a W&B key.
    """
    # Interpolations in a URL, such as https://user:${oc.env:PASSWORD}@host, do not contain the secret itself.
    plain = re.sub(r'\$\{oc\.env:\w+\}', '$', text) if isinstance(text, Interpolation) else text
    for what, pattern in _FORMAT.items():
        if pattern.search(plain):
            return what
    if _HEX_KEY.fullmatch(plain) and not _HASH_NAME.search(name):
        return 'a Weights & Biases key (for a Git revision, use a key whose name ends in revision)'
    for each in _AWS_SECRET.findall(plain):
        kinds = [len(re.findall(pattern, each)) for pattern in ('[A-Z]', '[a-z]', '[0-9]')]
        # Tell keys from paths, which have few capitals: 40 random characters have on average 16 of them and 6 digits.
        if kinds[0] >= 6 and kinds[1] >= 6 and kinds[2] and each.count('/') <= 3:
            return 'an AWS secret key'
    return None


def _problem(where: str, what: str) -> Problem:
    way_out = 'write ${oc.env:NAME}, and set the variable NAME where the recipe runs (secrets of a job spec)'
    return Problem(where, f'{what}, and would be saved in plain text; {way_out}')


MIN_CHARACTERS = 6
"""Minimum length of a value that `hide_values` replaces in all messages; shorter ones would match parts of words."""


def hide_values(
    text: str, from_environment: Mapping[KeyPath, str], values: Any, *, quoted_at: Collection[KeyPath] = ()
) -> str:
    """Replace values of environment variables in a message by the interpolations from which they come.

    Args:
        quoted_at: Paths of the values that the message is about; these are replaced even if they are short.
    """
    hidden: dict[str, str] = {}
    # Add the values that the message is about last: if two variables have the same value, the last one added is shown.
    for path, expression in sorted(from_environment.items(), key=lambda item: item[0] in quoted_at):
        for part in _scalars(_value_at(values, path)):
            if str(part) == expression or part is None or isinstance(part, bool):
                continue
            if len(str(part)) >= MIN_CHARACTERS or path in quoted_at:
                hidden |= {repr(part): repr(str(expression)), repr(part)[1:-1]: expression, str(part): expression}
    # Replace the longest value first: one value may be part of another.
    for value in sorted(filter(None, hidden), key=len, reverse=True):
        pattern = re.escape(value) if len(value) >= MIN_CHARACTERS else rf'(?<![\w.]){re.escape(value)}(?![\w.])'
        text = re.sub(pattern, lambda _, value=value: hidden[value], text)
    return text


def _value_at(values: Any, path: KeyPath) -> Any:
    for key in path:
        items: Any = dict(enumerate(values)) if isinstance(values, list) else values
        if not isinstance(items, dict) or key not in items:
            return None
        values = items[key]
    return values


def _scalars(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [found for item in value.values() for found in _scalars(item)]
    if isinstance(value, list):
        return [found for item in value for found in _scalars(item)]
    return [value]
