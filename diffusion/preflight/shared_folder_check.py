"""Check that all nodes share the run's folder: each node reads a file that every other node has written there."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR, FAILED
from diffusion.launch import environment
from diffusion.launch.findings import Finding
from diffusion.launch.run_id import RUN_FILE
from diffusion.storage import visibility

CHECK = 'shared folder'


@dataclass(frozen=True)
class FolderView:
    """The run's folder as one node sees it.

    Attributes:
        machine: Name of the node.
        file_system: Type and source of the file system of the folder, such as `nfs4 server:/export`.
        begun: True if the node sees the run.json of a run that has begun.
        file: Name of the file that the node wrote.
        seen: Names of the files that the node can read, its own included.
    """

    machine: str
    file_system: str
    begun: bool
    file: str
    seen: frozenset[str]


def check_shared_folder(folder: Path) -> list[Finding]:
    """Let each node write a file and read those of all other nodes; all ranks return the same findings; a collective.

    Args:
        folder: The run's folder, which exists on every node.
    """
    name = f'.shared-{uuid4().hex}' if os.environ['LOCAL_RANK'] == '0' else ''
    if name:
        # A fault of storage must not leave the other nodes waiting in the collective; they do not see the file then.
        with suppress(OSError):
            (folder / name).write_text(name, encoding='utf-8')
    names = [each for each in _gather(name) if each]
    views = [each for each in _gather(_view(folder, name, names) if name else None) if each is not None]
    if name:
        with suppress(OSError):
            (folder / name).unlink(missing_ok=True)
    return compare_views(folder, views)


def _view(folder: Path, name: str, names: Sequence[str]) -> FolderView:
    """Return the view of this node, after waiting until the files of all nodes are visible."""
    # If the first file stays invisible, it takes the whole time; the other files need no further wait then.
    seconds, seen = visibility.VISIBLE_SECONDS, set()
    for other in names:
        if visibility.why_not_visible(folder / other, other, seconds):
            seconds = 0.0
        else:
            seen.add(other)
    begun = False
    with suppress(OSError):
        begun = (folder / RUN_FILE).exists()
    return FolderView(environment.machine_name(os.environ), file_system_of(folder), begun, name, frozenset(seen))


def compare_views(folder: Path, views: Sequence[FolderView]) -> list[Finding]:
    """Return one passing finding if all nodes share the folder, else a finding for each node that sees another one."""
    groups: list[list[FolderView]] = []
    for view in views:
        for group in groups:
            if group[0].file in view.seen and view.file in group[0].seen:
                group.append(view)
                break
        else:
            groups.append([view])
    if len(groups) == 1:
        what = f"{len(views)} nodes read each other's files" if len(views) > 1 else 'a single node'
        return [Finding(CHECK, True, f'{folder}: {what}')]
    # The nodes that see the run's files are right; at the first start of a run, the majority is.
    ordered = sorted(groups, key=lambda group: (any(each.begun for each in group), len(group)), reverse=True)
    rank_of = [(any(each.begun for each in group), len(group)) for group in ordered]
    right = ordered[0] if rank_of[0] > rank_of[1] else []
    status = BAD_HARDWARE
    if not right:
        # No node is more likely at fault than another. If all have the same kind of file system, each has a folder of
        # its own there, which is a mistake in the recipe; if the kinds differ, some node lacks its mount.
        kinds = {view.file_system.split(' ')[0] for view in views}
        status = CONFIG_ERROR if len(kinds) == 1 and not any(view.begun for view in views) else FAILED
    findings = []
    for group in ordered:
        if group is right:
            continue
        for view in group:
            other = next(each for each in views if each.file not in view.seen or view.file not in each.seen)
            detail = (
                f'{folder} is on {view.file_system} here and on {other.file_system} on {other.machine}, which are not '
                'the same folder; mount it on all nodes, or set runs_dir to a folder that they share'
            )
            findings.append(Finding(CHECK, False, detail, status, view.machine))
    return findings


def file_system_of(path: Path) -> str:
    """Return the type and source of the file system that a path is on, such as `nfs4 server:/export`."""
    path = path.resolve()
    found = (-1, 'an unknown file system')
    try:
        lines = Path('/proc/self/mounts').read_text(encoding='utf-8', errors='replace').splitlines()
    except OSError:
        return found[1]
    for line in lines:
        source, point, kind, *_ = line.split(' ')
        point = point.replace('\\040', ' ')
        # The last of several mounts at one point covers the others.
        if path.is_relative_to(point) and len(point) >= found[0]:
            found = (len(point), f'{kind} {source}')
    return found[1]


def _gather(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
