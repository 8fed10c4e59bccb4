"""What a check has found, as a line for people, as JSON, and as an exit status."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from diffusion.exits import BAD_HARDWARE, CONFIG_ERROR, FAILED


@dataclass(frozen=True)
class Finding:
    """The result of a check on a node, or of one process of it.

    Attributes:
        check: Its name.
        ok: Whether training may begin.
        detail: A figure, or what is wrong and the way out.
        status: The exit status where it is not ok: 76 for what another node may do better, 78 for what none will, 1
            for what may pass.
        where: The host, and the rank where it matters.
    """

    check: str
    ok: bool
    detail: str
    status: int = BAD_HARDWARE
    where: str = ''


def status_of(findings: Iterable[Finding]) -> int:
    """What follows from all of them: a mistake before bad hardware before what may pass."""
    found = {finding.status for finding in findings if not finding.ok}
    return next((status for status in (CONFIG_ERROR, BAD_HARDWARE, FAILED) if status in found), 0)


def table(findings: Sequence[Finding]) -> str:
    """A line each, what is wrong last, where it is seen."""
    ordered = sorted(findings, key=lambda finding: (not finding.ok, finding.check, finding.where))
    widths = [max((len(getattr(each, name)) for each in ordered), default=0) for name in ('check', 'where')]
    return '\n'.join(
        f'{"ok " if each.ok else "BAD"}  {each.check:{widths[0]}}  {each.where:{widths[1]}}  {each.detail}'
        for each in ordered
    )


def as_json(findings: Sequence[Finding]) -> str:
    """For programs."""
    return json.dumps({'status': status_of(findings), 'findings': [asdict(each) for each in findings]}, indent=1) + '\n'
