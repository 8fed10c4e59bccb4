"""Arguments of `diffusion watch`, checked without importing torch."""

import argparse
import logging
from functools import partial
from pathlib import Path

from diffusion.config.image_metrics import IMAGE_METRICS, image_metrics_problems
from diffusion.config.schema import did_you_mean
from diffusion.errors import ExternalError, UserError
from diffusion.launch.free_nodes import free_nodes
from diffusion.launch.job_checks import check_jobs, load_job_spec
from diffusion.launch.job_spec import JobSpec, seconds_of
from diffusion.storage.places import is_url
from diffusion.tasks.watch import WatchSettings, evaluation_command, launch_command

log = logging.getLogger(__name__)

LOCAL_LEASE, JOB_LEASE = '10m', '12h'


def watch_settings(args: argparse.Namespace) -> WatchSettings:
    """Return the settings of a watcher.

    Raises:
        UserError: The run does not exist, or an option is out of range or contradicts another.
    """
    run = args.run_place if is_url(args.run_place) else str(Path(args.run_place).absolute())
    if not is_url(run) and not Path(run).is_dir():
        raise UserError(f'{args.run_place}: is not a folder; give the folder or URL of a run')
    options = _evaluation_options(args)
    metrics = list(args.metrics or ())
    if args.launch is not None:
        if options or args.processes != 1:
            raise UserError(
                '--launch: the recipe of the job names the evaluators and their settings, and the job its processes; '
                'set them there, or as KEY=VALUE, such as overrides.evaluators.image_metrics.metrics=[fid]'
            )
        checked = check_jobs(load_job_spec(args.launch, args.overrides), args.launch)
        spec, nodes = checked.spec, None
        if args.max_nodes is not None:
            if args.max_nodes < spec.nodes:
                raise UserError(f'--max-nodes: {args.max_nodes} is less than the {spec.nodes} nodes of {args.launch}')
            free_nodes(spec)  # a mistake here is better than at the first checkpoint
            nodes = partial(nodes_of_job, spec, args.max_nodes)
        command = launch_command(args.launch, spec.name, run, args.overrides, nodes)
    else:
        if args.max_nodes is not None:
            raise UserError('--max-nodes: sizes the jobs of --launch; add that, or remove it')
        command = evaluation_command([*args.overrides, *options], args.processes)
    lease = seconds_of(args.lease or (LOCAL_LEASE if args.launch is None else JOB_LEASE))
    return WatchSettings(
        run,
        command,
        policy=args.policy,
        only=args.checkpoints,
        metrics=metrics,
        jobs=args.jobs,
        keep_best=_best(args.keep_best),
        lease_seconds=lease,
        elsewhere=args.launch is not None,
        poll_seconds=seconds_of(args.poll),
        once=args.once,
    )


def nodes_of_job(spec: JobSpec, most: int) -> int:
    """Return the number of nodes of an evaluation: as many as are free, from those of the job spec to a maximum."""
    try:
        free = free_nodes(spec)
    except ExternalError as error:
        log.warning('%s; the job gets %d nodes', error, spec.nodes)
        return spec.nodes
    return min(most, max(spec.nodes, free))


def _best(text: str | None) -> tuple[str, int] | None:
    """Return the metric and number of `--keep-best`."""
    if text is None:
        return None
    metric, _, count = text.partition(':')
    if metric not in IMAGE_METRICS:
        raise UserError(f'--keep-best: there is no metric {metric!r}; {did_you_mean(metric, IMAGE_METRICS)}')
    if count and (not count.isdecimal() or int(count) < 1):
        raise UserError(f'--keep-best: {count!r} is not a positive number of checkpoints')
    return metric, int(count or 1)


def _evaluation_options(args: argparse.Namespace) -> list[str]:
    """Return the options of `diffusion evaluate` that `diffusion watch` was given."""
    for key, problem in image_metrics_problems({'metrics': args.metrics, 'guidance_scales': args.guidance}).items():
        raise UserError(f'{key}: {problem}')
    given = {
        '--metrics': args.metrics and ','.join(args.metrics),
        '--guidance': args.guidance and ','.join(f'{scale:g}' for scale in args.guidance),
        '--prompts': args.prompts,
        '--prompt-column': args.prompt_column,
        '--images': args.images,
        '--reference': args.reference,
        '--steps': args.steps,
        '--batch-size': args.batch_size,
        '--layout': args.layout,
    }
    words = [f'{option}={value}' for option, value in given.items() if value is not None]
    words += [f'--network={name}={source}' for name, source in args.network]
    if words and args.metrics is None:
        raise UserError('--metrics: the other options need it; add for example --metrics fid,clip_score')
    return words
