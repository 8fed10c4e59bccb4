"""Slurm launch backend: an sbatch script that starts the node entry point once per node and requeues the job."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diffusion.config.schema import Gatherer, Problem, join
from diffusion.errors import UserError
from diffusion.launch.backends.base import NotValidated, Rendered, call, environment_of, unmounted_folders
from diffusion.launch.job_spec import Job, JobSpec
from diffusion.runs import environment

AFTER_SRUN = Path(__file__).with_name('slurm_requeue.sh')
"""Part of the sbatch script that runs after srun."""
INSTALL = 'run this on a login node of the cluster'
IDLE = ('idle', 'idle~')
"""States of a free node: idle, or powered down until a job needs it."""
NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,63}')
WORD = re.compile(r'[^\s"\'\\#]+')
"""Pattern of a word that needs no quotes in an #SBATCH line, in which Slurm expands no variables."""


@dataclass(frozen=True)
class Options:
    """Settings of the Slurm launch backend, from `backend:` in a job spec."""

    account: str | None = None
    """Account that is charged for the job."""
    gpu_type: str | None = None
    """Name of the GPU type in the cluster, such as a100. Null means any type."""
    cpus_per_node: int | None = None
    """Number of CPU cores per node. Null means whole nodes."""
    logs: str = 'logs'
    """Folder for logs, on storage shared by all nodes."""
    setup: str = ''
    """Shell commands that run on the first node before the job: `source .venv/bin/activate`, `module load cuda`."""
    raw: dict[str, str | int | bool | None] = field(default_factory=dict)
    """Additional #SBATCH options by long name, such as `constraint: ib`, which override the defaults. Null drops an
    option, and true sets it without a value."""


def problems(jobs: Sequence[Job]) -> list[Problem]:
    spec, gather = jobs[0].spec, Gatherer()
    options: Options = spec.options
    for job in jobs:
        if NAME.fullmatch(job.name) is None:
            message = f'{job.name!r} is not a valid job name; use at most 64 letters, digits, dots and dashes'
            gather.problem('name', message)
    for where, value in (
        ('schedule.queue', spec.schedule.queue),
        ('schedule.priority', spec.schedule.priority),
        ('workdir', spec.workdir),
        *((f'backend.{name}', getattr(options, name)) for name in ('account', 'gpu_type', 'logs')),
        *((f'backend.raw.{name}', value) for name, value in options.raw.items() if not isinstance(value, bool)),
    ):
        if value is not None and WORD.fullmatch(str(value)) is None:
            gather.problem(where, f'{value!r} is invalid in an #SBATCH line; remove spaces, quotes, # and backslashes')
    for name in options.raw:
        if re.fullmatch(r'[a-z][a-z0-9-]*', name) is None:
            gather.problem(join('backend.raw', name), 'is not a long option of sbatch; use one, such as constraint')
    if spec.schedule.preemptible and spec.schedule.queue is None and spec.schedule.priority is None:
        message = 'has no effect on Slurm without a partition or QOS; set schedule.queue or schedule.priority'
        gather.problem('schedule.preemptible', message)
    if spec.image is None and spec.mounts:
        gather.problem('mounts', 'require a container image; set image, or remove the mounts')
    for target, source in spec.mounts.items():
        if not source.startswith('/') or re.search(r'[\s,:]', source + target):
            gather.problem(join('mounts', target), f'{source!r} is not a folder on the nodes; use an absolute path')
    if spec.image is not None:
        gather.problems += unmounted_folders(jobs)
    for name, source in spec.secrets.items():
        if source is not None:
            message = 'Slurm cannot store secrets; set it to null, and export it before submitting'
            gather.problem(join('secrets', name), message)
    return gather.problems


def render(jobs: Sequence[Job]) -> Rendered:
    files = {f'{job.name}.sbatch': _script(job) for job in jobs}
    dependencies = [_dependency_options('ID') if job.after else () for job in jobs]
    commands = [('sbatch', '--parsable', *each, name) for each, name in zip(dependencies, files, strict=True)]
    notes = [f'Logs are written to {jobs[0].spec.options.logs}/, which all nodes must share.']
    if jobs[0].spec.image is not None:
        notes.append('The image is run by pyxis (srun --container-image), which the cluster must provide.')
    return Rendered(files, tuple(commands), tuple(notes))


def validate(rendered: Rendered) -> list[Problem]:
    """Return the syntax errors that `bash -n` finds in the rendered sbatch scripts."""
    bash = shutil.which('bash')
    if bash is None:
        raise NotValidated('the script was not checked, because bash is not on PATH; install bash')
    found = []
    for name, text in rendered.files.items():
        result = subprocess.run([bash, '-n'], input=text, capture_output=True, text=True, check=False)
        if result.returncode:
            found.append(Problem('backend.setup', f'{name}: {result.stderr.strip()}'))
    return found


def submit(jobs: Sequence[Job], rendered: Rendered, folder: Path) -> str:
    _logs_folder(jobs).mkdir(parents=True, exist_ok=True)
    lines, job_id = [], ''
    for job in jobs:
        dependency = _dependency_options(job_id) if job.after else ()
        command = ['sbatch', '--parsable', *dependency, str(folder / f'{job.name}.sbatch')]
        # Reset the restart count: sbatch exports its whole environment to the job. If it ran inside a requeued job, the
        # new job would get that job's count, as if it had been restarted itself.
        job_id = call(command, install=INSTALL, env={'SLURM_RESTART_COUNT': '0'})
        job_id = job_id.partition(';')[0]  # --parsable may append the cluster's name
        lines.append(f'{job.name}: Slurm job {job_id}')
    return '\n'.join(lines)


def status(jobs: Sequence[Job]) -> str:
    names = ','.join(job.name for job in jobs)
    # squeue appends the text after a field's colon to the field's value.
    form = 'JobID: ,Name: ,State:; ,TimeUsed: of ,TimeLimit:; restarts: ,RestartCnt:; reason: ,Reason:'
    queued = call(['squeue', '--me', f'--name={names}', '--noheader', f'--Format={form}'], install=INSTALL)
    return queued or f'{names}: not in the queue; sacct --name={names} shows how they ended'


def logs(jobs: Sequence[Job]) -> str:
    folder = _logs_folder(jobs)
    pattern = re.compile(rf'({"|".join(re.escape(job.name) for job in jobs)})-\d+\.log')
    found = [path for path in folder.glob('*.log') if pattern.fullmatch(path.name)]
    if not found:
        raise UserError(f'logs: {folder} has no log of {", ".join(job.name for job in jobs)}; wait until it starts')
    newest = max(found, key=lambda path: path.stat().st_mtime)
    lines = newest.read_text(encoding='utf-8', errors='replace').splitlines()
    return '\n'.join([f'{newest}:', *lines[-100:]])


def cancel(jobs: Sequence[Job]) -> str:
    for job in jobs:
        call(['scancel', '--me', f'--name={job.name}'], install=INSTALL)
    return 'canceled: ' + ', '.join(job.name for job in jobs)


def free_nodes(spec: JobSpec) -> int:
    """Return the number of idle nodes in the partition of a job spec."""
    where = [] if spec.schedule.queue is None else [f'--partition={spec.schedule.queue}']
    # sinfo lists a node once per partition. Do not use --states=idle, which also matches drained nodes.
    listed = call(['sinfo', '--noheader', '--Node', '--format=%N %t', *where], install=INSTALL)
    states = dict(line.split() for line in listed.splitlines())
    return sum(state in IDLE for state in states.values())


def _logs_folder(jobs: Sequence[Job]) -> Path:
    spec = jobs[0].spec
    return Path('' if spec.image else spec.workdir or '', spec.options.logs)


def _dependency_options(job_id: str) -> tuple[str, ...]:
    # The second option cancels the next job if the previous one fails for good; otherwise it would stay queued forever.
    return f'--dependency=afterok:{job_id}', '--kill-on-invalid-dep=yes'


def _script(job: Job) -> str:
    spec = job.spec
    options: Options = spec.options
    setup = options.setup.strip()
    cpus = '' if options.cpus_per_node is None else f' --cpus-per-task={options.cpus_per_node}'
    lines = [
        '#!/bin/bash',
        *_directives(job),
        '',
        *(f'export {name}={shlex.quote(value)}' for name, value in environment_of(job, 'slurm').items()),
        # A failing setup must end the job before srun. Later errors must not end the script: its last part handles the
        # exit status of srun.
        *(['set -e', setup, 'set +e'] if setup else []),
        '',
        f'export {environment.ATTEMPT}=${{SLURM_RESTART_COUNT:-0}}',
        # Make the path absolute: a container has another working directory.
        f'logs=$(realpath {shlex.quote(options.logs)})',
        f'export {environment.EXIT_FILE}="$logs/{job.name}-$SLURM_JOB_ID.${environment.ATTEMPT}.exits"',
        f'failures="$logs/{job.name}-$SLURM_JOB_ID.failures"',
        f'max_restarts={spec.restart.max_restarts}',
        *_action_function(job),
        '',
        # Resolve the first node's address outside the container, which does not have scontrol.
        f'export {environment.MASTER_ADDR}=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        # When one node fails, the others hang in a collective; --kill-on-bad-exit ends them.
        # srun does not inherit the number of cores from sbatch. Give all cores to the one task per node.
        f'srun --kill-on-bad-exit=1 --cpu-bind=none{cpus} \\',
        *_container(job),
        f'    {job.shell_command}',
        'status=$?',
        '',
    ]
    return '\n'.join(lines) + AFTER_SRUN.read_text(encoding='utf-8')


def _directives(job: Job) -> list[str]:
    """Return the #SBATCH lines of a job; the values in `backend.raw` replace the defaults."""
    spec, schedule = job.spec, job.spec.schedule
    options: Options = spec.options
    kind = f'{options.gpu_type}:' if options.gpu_type else ''
    lines: dict[str, str | int | bool | None] = {
        'job-name': job.name,
        'nodes': job.nodes,
        'ntasks-per-node': 1,
        'gpus-per-node': f'{kind}{spec.gpus_per_node}' if spec.gpu else None,
        'cpus-per-task': options.cpus_per_node,
        'exclusive': True if options.cpus_per_node is None else None,
        # --exclusive allocates all cores and GPUs of a node, but only DefMemPerNode of its memory; 0 means all memory.
        'mem': 0 if options.cpus_per_node is None else None,
        'partition': schedule.queue,
        'qos': schedule.priority,
        'account': options.account,
        'chdir': spec.workdir if spec.image is None else None,
        'time': _time_limit(job.time_limit_seconds),
        # Omit the prefix `B:`, so that Slurm signals the node entry points and not the batch shell, which must survive
        # to requeue the job.
        'signal': f'USR1@{schedule.notice_seconds}',
        'requeue': True,
        # By default, Slurm truncates the log of earlier attempts when the job is requeued.
        'open-mode': 'append',
        'output': f'{options.logs}/%x-%j.log',
    }
    lines |= options.raw
    return [
        f'#SBATCH --{name}' if value is True else f'#SBATCH --{name}={value}'
        for name, value in lines.items()
        if value is not None and value is not False
    ]


def _container(job: Job) -> list[str]:
    """Return the srun options that run a job in its container image, one per line; empty without an image."""
    spec = job.spec
    if spec.image is None:
        return []
    flags = [f'--container-image={spec.image}', '--no-container-mount-home']
    if spec.workdir:
        flags.append(f'--container-workdir={spec.workdir}')
    mounts = ''.join(f',{source}:{target}' for target, source in spec.mounts.items())
    quoted = [*(shlex.quote(flag) for flag in flags), f'--container-mounts="$logs:$logs"{shlex.quote(mounts)}']
    return [f'    {flag} \\' for flag in quoted]


def _action_function(job: Job) -> list[str]:
    restart = job.spec.restart
    actions = [f'        {code}) echo {action} ;;' for code, action in restart.actions().items()]
    return ['action_after() {', '    case $1 in', *actions, f'        *) echo {restart.otherwise} ;;', '    esac', '}']


def _time_limit(seconds: int | None) -> str | None:
    """Return a time as days-hours:minutes:seconds for Slurm, rounded up to a minute as Slurm does; None stays None."""
    if seconds is None:
        return None
    minutes = -(-seconds // 60)
    return f'{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00'
