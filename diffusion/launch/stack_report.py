"""Find the rank that hangs: read the Python stacks of all ranks, group them, and name the ranks that differ.

The ranks of a run wait for each other in collectives, so one rank that hangs stops all others. These ranks are suspect,
in this order of certainty: a rank that does not respond to a signal, a rank that has completed fewer batches than the
others, and a rank whose main thread is not in a collective while the others wait in one.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import NamedTuple

_THREAD = re.compile(r'(?:Thread|Current thread) 0x[0-9a-f]+.*:$')
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.+)$')
_COLLECTIVES = 'torch/distributed/distributed_c10d.py'
_COLLECTIVE_WRAPPERS = (_COLLECTIVES, 'torch/distributed/c10d_logger.py')
_OWN_CODE = re.compile(r'/diffusion/(?:[a-z_]+/)?[a-z_0-9]+\.py$')
_LIBRARIES = re.compile(r'/(?:site-packages|dist-packages|lib/python3[.0-9]*)/')
_STANDARD_LIBRARY = re.compile(r'/lib/python3[.0-9]*/(?!site-packages|dist-packages)')
_PLUMBING = re.compile(f'/torch/|/composer/utils/|{_STANDARD_LIBRARY.pattern}')
"""Pattern of library code to skip in a stack when looking for the function that called a collective."""
MAX_NAMED = 4


class Frame(NamedTuple):
    file: str
    line: int
    function: str


class Place(NamedTuple):
    """Position of a thread in the program, without line number, so that ranks in the same call have equal places."""

    label: str
    """Description such as `all_reduce (highest_signal, preemption.py)` or `DataLoader.next`; empty if unknown."""
    waits: bool
    """True if the thread waits, or may wait, for other ranks."""


@dataclass(frozen=True)
class RankReport:
    """Last known state of a rank at the time when its node collected stacks.

    Attributes:
        batch: Number of batches completed at the last heartbeat; -1 before the first batch.
        silent_seconds: Time since the last heartbeat, or since the start if there was none.
        place: Label of the main thread's `Place`; empty if the rank has written no stack.
        problem: Description of a process without a stack, such as `is stopped (SIGSTOP)`.
    """

    rank: int
    node: int
    machine: str
    batch: int
    silent_seconds: float
    place: str = ''
    waits: bool = False
    problem: str = ''
    ended: bool = False


def main_thread(text: str) -> list[Frame]:
    """Return the main thread's stack in a dump by faulthandler, innermost call first; empty if the dump has none."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append(Frame(frame[1], int(frame[2]), frame[3]))
    # Take the thread whose outermost call is the main module. If the stack is cut after 100 calls, this call is
    # missing: take the last thread. faulthandler writes the main thread last, unless it stops at 100 threads.
    with_module = [thread for thread in threads if thread and thread[-1].function == '<module>']
    return with_module[-1] if with_module else threads[-1] if threads else []


def find_place(stack: Sequence[Frame]) -> Place:
    """Return a thread's place: a collective, data loader, backward pass or GPU wait, else the last non-library call."""
    for index, frame in enumerate(stack):
        outside, inside = stack[index + 1 :], stack[:index]
        if frame.file.endswith(_COLLECTIVES):
            return Place(_collective(stack[index:]), True)
        if frame.file.endswith('torch/utils/data/dataloader.py') and frame.function in ('__next__', '_next_data'):
            return Place('DataLoader.next' + _described(_own_frame(inside)), False)
        if frame.file.endswith('torch/autograd/graph.py') and frame.function == '_engine_run_backward':
            # DDP's all-reduce runs inside the autograd engine, which has no Python frames.
            return Place('the backward pass', True)
        if frame.file.endswith(('torch/cuda/__init__.py', 'torch/cuda/streams.py')) and frame.function == 'synchronize':
            return Place('cuda.synchronize' + _described(_own_frame(outside)), True)
    found = _own_frame(stack) or next((frame for frame in stack if not _STANDARD_LIBRARY.search(frame.file)), None)
    found = found or (stack[0] if stack else None)
    return Place(f'{found.function} ({_file_name(found)})' if found else '', False)


def _collective(stack: Sequence[Frame]) -> str:
    """Return the name of the collective at the top of a stack, with the function that called it."""
    wrapped = takewhile(lambda frame: frame.file.endswith(_COLLECTIVE_WRAPPERS), stack)
    inside = [each for each in wrapped if each.file.endswith(_COLLECTIVES)]
    # Take the outermost public function: all_gather_object calls all_gather.
    public = [each for each in inside if not each.function.startswith('_')]
    name = (public or inside)[-1].function
    caller = next((frame for frame in stack if not _PLUMBING.search(frame.file)), None)
    return name + _described(caller)


def _own_frame(stack: Sequence[Frame]) -> Frame | None:
    """Return the innermost call in this package, else in code outside installed libraries, or None."""
    own = next((frame for frame in stack if _OWN_CODE.search(frame.file)), None)
    return own or next((frame for frame in stack if not _LIBRARIES.search(frame.file) and '/' in frame.file), None)


def _described(frame: Frame | None) -> str:
    if frame is None:
        return ''
    function = '' if frame.function == '<module>' else f'{frame.function}, '
    return f' ({function}{_file_name(frame)})'


def _file_name(frame: Frame) -> str:
    return frame.file.rpartition('/')[2]


def suspects(reports: Sequence[RankReport]) -> list[RankReport]:
    """Return the ranks that most likely caused a hang; empty if no rank differs from the others."""
    running = [each for each in reports if not each.ended]
    # 1. Processes that do not even run their signal handler: they are stopped, or stuck in the kernel.
    silent = [each for each in running if each.problem]
    if silent:
        return silent
    # 2. Ranks that have completed fewer batches, because the others wait for them.
    newest = max((each.batch for each in running), default=-1)
    late = [each for each in running if each.batch < newest]
    if late and 2 * len(late) <= len(running):
        return late
    # 3. Ranks that are not in a collective, because ranks in a collective wait for them.
    busy = [each for each in running if not each.waits]
    if busy and len(busy) < len(running):
        return busy
    # 4. Ranks outside the largest group, such as a rank in another collective.
    sizes = {place: sum(each.place == place for each in running) for place in {each.place for each in running}}
    if sizes and 2 * max(sizes.values()) > len(running):
        largest = max(sizes, key=lambda place: sizes[place])
        return [each for each in running if each.place != largest]
    return []


def describe_hang(reports: Sequence[RankReport], missing_nodes: Sequence[int] = ()) -> str:
    """Return one sentence about the ranks of a hanging run: where most of them wait, and which ranks differ."""
    found = {each.rank for each in suspects(reports)}
    running = [each for each in reports if not each.ended and not each.problem]
    others = [each for each in running if each.rank not in found]
    places = sorted(_grouped(others), key=lambda group: -len(group))
    parts = []
    if places:
        parts.append(_majority(places[0], everyone=len(places[0]) == len(reports) > 1))
    parts += [_minority(group) for group in _grouped([each for each in reports if each.rank in found])]
    parts += [_minority(group) for group in places[1:]]
    parts += [_minority(group) for group in _grouped([each for each in reports if each.ended])]
    if not found and not missing_nodes and len(running) == len(reports) > 1:
        parts.append('no rank differs, so check the network and the GPUs')
    if missing_nodes:
        names = ', '.join(map(str, missing_nodes[:MAX_NAMED])) + (' ...' if len(missing_nodes) > MAX_NAMED else '')
        parts.append(f'node{"s" * (len(missing_nodes) > 1)} {names} wrote no stacks')
    return '; '.join(parts)


def _grouped(reports: Iterable[RankReport]) -> list[list[RankReport]]:
    groups: dict[tuple[str, str, bool], list[RankReport]] = {}
    for each in sorted(reports, key=lambda each: each.rank):
        groups.setdefault((each.place, each.problem, each.ended), []).append(each)
    return list(groups.values())


def _majority(group: Sequence[RankReport], *, everyone: bool) -> str:
    first = group[0]
    if len(group) == 1:
        return _minority(group)
    verb = 'wait in' if first.waits else 'are in'
    batch = max(each.batch for each in group)
    when = f' of batch {batch}' if batch >= 0 else ' before the first batch'
    return f'{"all " * everyone}{len(group)} ranks {verb} {first.place or "an unknown call"}{when}'


def _minority(group: Sequence[RankReport]) -> str:
    first = group[0]
    plural = len(group) > 1
    if first.problem:
        state = first.problem if not plural else re.sub('^is ', 'are ', re.sub('^does ', 'do ', first.problem))
    elif first.waits:
        state = f'{"wait" if plural else "waits"} in {first.place}'
    else:
        state = f'{"are" if plural else "is"} in {first.place or "an unknown call"}'
    return f'{_name_ranks(group)} {state}'


def _name_ranks(group: Sequence[RankReport]) -> str:
    """Return the ranks of a group by node, such as `ranks 32-39 on node 4 (gpu-17)`."""
    names = []
    for (node, machine), members in groupby(group, key=lambda each: (each.node, each.machine)):
        ranks = [each.rank for each in members]
        runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])]
        text = ', '.join(f'{run[0]}-{run[-1]}' if len(run) > 1 else str(run[0]) for run in runs)
        names.append(f'rank{"s" * (len(ranks) > 1)} {text} on node {node} ({machine})')
    more = f' and on {len(names) - MAX_NAMED} more nodes' if len(names) > MAX_NAMED else ''
    return ', '.join(names[:MAX_NAMED]) + more
