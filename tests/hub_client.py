"""huggingface_hub in the tests: the address that it downloads from, and its sessions, in versions 0.36 and 2."""

from collections.abc import Callable
from typing import Any


def set_address(url: str, setattr: Callable[[Any, str, str], Any]) -> None:
    """Make huggingface_hub download files from the server at an address; `setattr` may be `monkeypatch.setattr`."""
    from huggingface_hub import constants, file_download

    setattr(constants, 'ENDPOINT', url)
    # Version 0.36 has a copy of the name.
    for module in (constants, file_download):
        if hasattr(module, 'HUGGINGFACE_CO_URL_TEMPLATE'):
            setattr(module, 'HUGGINGFACE_CO_URL_TEMPLATE', url + '/{repo_id}/resolve/{revision}/{filename}')


def skip_certificates(monkeypatch: Any) -> None:
    """Keep clients from reading the machine's certificates, which takes longer than a request: servers use HTTP."""
    monkeypatch.delenv('SSL_CERT_FILE', raising=False)
    monkeypatch.setenv('SSL_CERT_DIR', '/nowhere')


def forget_sessions() -> None:
    """Close huggingface_hub's connections, and keep it from asking for a list of the programs that may call it."""
    from huggingface_hub import utils

    functions: Any = utils._http
    if hasattr(functions, 'reset_sessions'):
        functions.reset_sessions()
    else:
        functions.close_session()
        utils._detect_agent._registry = {'standardEnvVars': [], 'harnesses': {}}
