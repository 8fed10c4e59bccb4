"""Options of `diffusion watch`, checked without importing torch."""

import logging
import signal
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

from diffusion.config.image_metrics import IMAGE_METRICS, image_metrics_problems
from diffusion.config.language_model import JudgeConfig
from diffusion.config.options import Count, Option, Overrides, option_words
from diffusion.config.schema import Gatherer, build_dataclass, did_you_mean
from diffusion.errors import ExternalError, UserError
from diffusion.launch.backends import free_nodes
from diffusion.launch.job_checks import check_jobs, load_job_spec
from diffusion.launch.job_spec import JobSpec, seconds_of
from diffusion.storage.places import is_url
from diffusion.tasks.argument_checks import EvaluationOptions
from diffusion.tasks.run_recipe import configure_logging
from diffusion.tasks.watch import Policy, Watcher, WatchSettings, evaluation_command, launch_command

log = logging.getLogger(__name__)

LOCAL_LEASE, JOB_LEASE = '10m', '12h'


@dataclass(frozen=True)
class WatchOptions:
    """Options of `diffusion watch`."""

    run: Annotated[str, Option(positional=True, files=True)]
    """Folder or URL of a run."""
    overrides: Overrides = field(default_factory=list)
    """Overrides of values in the run's recipe or, with --launch, in the job YAML."""
    policy: Policy = 'every'
    """Evaluate every checkpoint, oldest first, or always only the latest."""
    checkpoints: Annotated[list[str], Option('NAMES', commas=True)] = field(default_factory=list)
    """Comma-separated names of the checkpoints to evaluate, such as ba1000,ba2000 (default: all)."""
    keep_best: Annotated[str | None, Option('METRIC[:N]')] = None
    """Pin the N checkpoints that are best by a metric, so that the run keeps them, such as fid:3 for the 3 lowest FIDs.
    Without :N, only the best one is pinned (default: pin none)."""
    launch: Annotated[str | None, Option('SPEC', files=True)] = None
    """Job YAML, submitted for each checkpoint (default: evaluate on this machine)."""
    max_nodes: Count | None = None
    """Give each job all nodes that are free in Slurm or Kubernetes, but at most N (default: the job YAML's number)."""
    processes: Count = 1
    """Number of processes, one per GPU."""
    jobs: Count = 1
    """Maximum number of evaluations at once."""
    lease: Annotated[str | None, Option('TIME')] = None
    """Time without a renewed claim after which an evaluation counts as dead and is repeated, such as 6h (default: 10m
    on this machine; 12h for jobs, including their time in the queue)."""
    poll: Annotated[str, Option('TIME')] = '30s'
    """Time between two searches for new checkpoints."""
    once: bool = False
    """End when all checkpoints are evaluated (default: wait for new ones)."""


def run_watch(options: WatchOptions, evaluation: EvaluationOptions) -> int:
    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    settings = watch_settings(options, evaluation)
    configure_logging()
    signal.signal(signal.SIGTERM, stop)
    Watcher(settings).run()
    return 0


def watch_settings(options: WatchOptions, evaluation: EvaluationOptions) -> WatchSettings:
    """Return the settings of a watcher; raise UserError for wrong or contradictory options."""
    run = options.run if is_url(options.run) else str(Path(options.run).absolute())
    if not is_url(run) and not Path(run).is_dir():
        raise UserError(f'{options.run}: is not a folder; give the folder or URL of a run')
    for key, problem in image_metrics_problems(vars(evaluation)).items():
        raise UserError(f'{key}: {problem}')
    given = evaluation.given()
    gather, judge = Gatherer(), None
    if 'judge' in given:
        judge = build_dataclass(JudgeConfig, given['judge'], '--judge', gather)
    for problem in gather.problems + gather.missing:
        raise UserError(str(problem))
    if options.launch is not None:
        if given or options.processes != 1:
            raise UserError(
                "--launch: set the evaluators and their settings in the job's recipe, and the processes in the job "
                'YAML, or set both as KEY=VALUE, such as overrides.evaluators.image_metrics.metrics=[fid]'
            )
        checked = check_jobs(load_job_spec(options.launch, options.overrides), options.launch)
        spec, nodes = checked.spec, None
        if options.max_nodes is not None:
            if options.max_nodes < spec.nodes:
                what = f'--max-nodes: {options.max_nodes} is less than the {spec.nodes} nodes of {options.launch}'
                raise UserError(what)
            free_nodes(spec)  # report mistakes now instead of at the first checkpoint
            nodes = partial(nodes_of_job, spec, options.max_nodes)
        command = launch_command(options.launch, spec.name, run, options.overrides, nodes)
    else:
        if options.max_nodes is not None:
            raise UserError('--max-nodes: is for the jobs of --launch; add --launch, or remove --max-nodes')
        command = evaluation_command([*options.overrides, *option_words(evaluation)], options.processes)
    lease = seconds_of(options.lease or (LOCAL_LEASE if options.launch is None else JOB_LEASE))
    return WatchSettings(
        run,
        command,
        policy=options.policy,
        only=options.checkpoints,
        metrics=evaluation.metrics or [],
        judge=None if judge is None else judge.label,
        jobs=options.jobs,
        keep_best=_best(options.keep_best),
        lease_seconds=lease,
        elsewhere=options.launch is not None,
        poll_seconds=seconds_of(options.poll),
        once=options.once,
    )


def nodes_of_job(spec: JobSpec, most: int) -> int:
    """Return the nodes for a job: all free ones, at least `spec.nodes` and at most `most`; if unknown, `spec.nodes`."""
    try:
        free = free_nodes(spec)
    except ExternalError as error:
        log.warning('%s; the job gets %d nodes', error, spec.nodes)
        return spec.nodes
    return min(most, max(spec.nodes, free))


def _best(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    metric, _, count = text.partition(':')
    if (base := metric.partition('/')[0]) not in IMAGE_METRICS:
        raise UserError(f'--keep-best: there is no metric {base!r}; {did_you_mean(base, IMAGE_METRICS)}')
    if count and (not count.isdecimal() or int(count) < 1):
        raise UserError(f'--keep-best: {count!r} is not a positive number of checkpoints')
    return metric, int(count or 1)
