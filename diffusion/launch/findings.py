"""Results of node and GPU checks, and their output as a table, as JSON and as one exit status."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR, FAILED


@dataclass(frozen=True)
class Finding:
    """Result of one check on a node or on one of its processes.

    Attributes:
        check: Name of the check.
        ok: True if the check passed.
        detail: The measured value, or the fault and how to fix it.
        status: Exit status if the check failed: 76 for a fault of this node, 78 for a mistake that would fail on every
            node, 1 for a fault that may pass.
        where: Name of the host, and the rank if the check is per rank.
        warns: True if the check passed, but the detail names a risk.
    """

    check: str
    ok: bool
    detail: str
    status: int = BAD_HARDWARE
    where: str = ''
    warns: bool = False


def findings_exit_status(findings: Iterable[Finding]) -> int:
    """Return one exit status for all findings: user error (78), else bad hardware (76), other fault (1), or 0."""
    found = {finding.status for finding in findings if not finding.ok}
    return next((status for status in (CONFIG_ERROR, BAD_HARDWARE, FAILED) if status in found), 0)


def downgrade_shared_faults(findings: Sequence[Finding], nodes: int) -> list[Finding]:
    """Change the exit status from bad hardware (76) to failure (1) for checks that failed on all of several nodes."""
    # A check that fails on all nodes points to something that they share, such as a disk. Status 76 would make the
    # scheduler exclude every node of the job, and none might be left to run it.
    hosts: dict[str, set[str]] = {}
    for each in findings:
        if not each.ok and each.status == BAD_HARDWARE:
            hosts.setdefault(each.check, set()).add(each.where.split(' ')[0])
    failed_everywhere = {check for check, names in hosts.items() if len(names) == nodes > 1}
    return [
        replace(each, status=FAILED, detail=f'{each.detail} (on all nodes)')
        if not each.ok and each.status == BAD_HARDWARE and each.check in failed_everywhere
        else each
        for each in findings
    ]


def findings_table(findings: Sequence[Finding]) -> str:
    """Format the findings as a table with one line per finding, warnings and then failed checks last."""
    ordered = sorted(findings, key=lambda finding: (not finding.ok, finding.warns, finding.check, finding.where))
    widths = [max((len(getattr(each, name)) for each in ordered), default=0) for name in ('check', 'where')]
    return '\n'.join(
        f'{_mark(each):4} {each.check:{widths[0]}}  {each.where:{widths[1]}}  {each.detail}' for each in ordered
    )


def _mark(finding: Finding) -> str:
    if not finding.ok:
        return 'BAD'
    return 'WARN' if finding.warns else 'ok'


def findings_json(findings: Sequence[Finding]) -> str:
    """Format the findings and their exit status as JSON."""
    content = {'status': findings_exit_status(findings), 'findings': [asdict(each) for each in findings]}
    return json.dumps(content, indent=1) + '\n'
