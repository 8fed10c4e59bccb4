"""Description of pickles that a restricted unpickler has refused, since they would have run code."""

import pickle
import re

REFUSED = re.compile(r'(?:unsupported global|unsupported global: global|unsupported class) ([\w.]+)', re.IGNORECASE)
"""Messages of torch's restricted unpickler about a function or class that it does not call."""


def code_to_run(error: BaseException) -> str | None:
    """Return a description of the code that a pickle wants to run, or None if the error has another reason.

    Args:
        error: Error of `torch.load` with `weights_only=True`, or of another unpickler with the same messages.
    """
    found = REFUSED.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    return None if found is None else f'wants to run code when it is read (its pickle calls {found[1]})'
