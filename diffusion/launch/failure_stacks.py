"""Collect the stacks of all ranks when an attempt fails, and describe which ranks differ from the others."""

import time
from collections.abc import Callable, Mapping

from diffusion.launch.stack_folder import OTHERS_SECONDS, NodeReport, StackFolder
from diffusion.launch.stack_report import RankReport, describe_hang, find_place, main_thread
from diffusion.launch.workers import Workers, process_problem
from diffusion.runs import environment, heartbeat_file
from diffusion.runs.bounded_call import STORAGE_SECONDS, call_with_limit, within_limit

NCCL_DUMP_SECONDS = 10.0
"""Maximum wait for the files of NCCL's flight recorder after a hang."""
NCCL_UPLOAD_SECONDS = 20.0
"""Maximum time to upload these files to an object store."""


def keep_stacks(
    cause: str,
    problem: str,
    workers: Workers,
    stacks: StackFolder,
    *,
    environ: Mapping[str, str],
    begin: float,
    say: Callable[[str], None],
) -> str:
    """Write the stacks of this node's ranks to the run's folder; return a sentence about the ranks of all nodes.

    When any node entry point ends, the scheduler ends the rest. After a hang, the first node therefore waits for the
    stacks of the other nodes, and they wait for its summary. The sentence is empty on the other nodes.

    Args:
        cause: Cause of the failure, a key of `attempts.CAUSES`.
        begin: Start time of the workers, by time.monotonic().
        say: Function that prints a line for the operator.
    """
    position = workers.position
    texts = workers.write_stacks()
    reports = rank_reports(workers, texts, machine=environment.machine_name(environ), begin=begin)
    report = NodeReport(position.rank, cause, problem, reports)
    if not within_limit(lambda: stacks.write(report, texts)):
        # The file system may be what hangs. The sentence about the ranks of this node is still useful.
        say(f'{stacks.place} cannot be written; continuing without the stacks of the ranks')
        return describe_hang(reports) if position.rank == 0 else ''
    say(f'wrote the stacks of {len(texts)} of {position.processes} ranks to {stacks.place}')
    found: dict[int, NodeReport] = {position.rank: report}
    asked: list[int] = []
    if cause == 'hang':
        asked = workers.request_nccl_dumps()
        if position.rank:
            within_limit(stacks.wait_for_summary, OTHERS_SECONDS + STORAGE_SECONDS)
        else:
            found |= call_with_limit(stacks.wait_for_all, OTHERS_SECONDS + STORAGE_SECONDS, found)
    elif position.rank == 0:
        found |= call_with_limit(stacks.read, STORAGE_SECONDS, found)
    sentence = ''
    if position.rank == 0:
        missing = [node for node in range(position.nodes) if node not in found] if cause == 'hang' else []
        sentence = describe_hang([rank for each in found.values() for rank in each.ranks], missing)
        # Write the summary before waiting for NCCL, because the other nodes wait for it.
        within_limit(lambda: stacks.write_summary(sentence, found))
        sentence = f'{sentence}; stacks in {stacks.place}'
    within_limit(lambda: stacks.wait_for_nccl(asked, NCCL_DUMP_SECONDS), NCCL_DUMP_SECONDS + STORAGE_SECONDS)
    within_limit(stacks.upload_nccl, NCCL_UPLOAD_SECONDS)
    return sentence


def rank_reports(workers: Workers, texts: Mapping[int, str], *, machine: str, begin: float) -> list[RankReport]:
    """Return the state of each rank of this node by its last heartbeat, its stack and its process."""
    beats, now, reports = heartbeat_file.last_beats(workers.folder), time.monotonic(), []
    for rank, process in workers.by_rank().items():
        beat = beats.get(rank)
        place = find_place(main_thread(texts.get(rank, '')))
        code = process.poll()
        problem = '' if place.label else process_problem(process.pid)
        reports.append(
            RankReport(
                rank=rank,
                node=workers.position.rank,
                machine=machine,
                batch=-1 if beat is None else beat.batch,
                silent_seconds=now - (begin if beat is None else beat.at),
                place=place.label,
                waits=place.waits,
                problem=problem if code is None else f'has ended with {code}',
                ended=code is not None,
            )
        )
    return reports
