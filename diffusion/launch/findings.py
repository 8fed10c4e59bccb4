"""What a check has found, as a line for people, as JSON, and as an exit status."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR, FAILED


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


def findings_exit_status(findings: Iterable[Finding]) -> int:
    """What follows from all of them: a mistake before bad hardware before what may pass."""
    found = {finding.status for finding in findings if not finding.ok}
    return next((status for status in (CONFIG_ERROR, BAD_HARDWARE, FAILED) if status in found), 0)


def excuse(findings: Sequence[Finding], nodes: int) -> list[Finding]:
    """The findings, where what is wrong on every one of several nodes is no node's fault: a disk that they share.

    To leave them all for others would leave none.
    """
    hosts: dict[str, set[str]] = {}
    for each in findings:
        if not each.ok and each.status == BAD_HARDWARE:
            hosts.setdefault(each.check, set()).add(each.where.split(' ')[0])
    everywhere = {check for check, names in hosts.items() if len(names) == nodes > 1}
    return [
        replace(each, status=FAILED, detail=f'{each.detail} (on all nodes)')
        if not each.ok and each.status == BAD_HARDWARE and each.check in everywhere
        else each
        for each in findings
    ]


def findings_table(findings: Sequence[Finding]) -> str:
    """A line each, what is wrong last, where it is seen."""
    ordered = sorted(findings, key=lambda finding: (not finding.ok, finding.check, finding.where))
    widths = [max((len(getattr(each, name)) for each in ordered), default=0) for name in ('check', 'where')]
    return '\n'.join(
        f'{"ok " if each.ok else "BAD"}  {each.check:{widths[0]}}  {each.where:{widths[1]}}  {each.detail}'
        for each in ordered
    )


def findings_json(findings: Sequence[Finding]) -> str:
    """For programs."""
    return (
        json.dumps(
            {'status': findings_exit_status(findings), 'findings': [asdict(each) for each in findings]}, indent=1
        )
        + '\n'
    )
