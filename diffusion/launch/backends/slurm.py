"""Slurm: an sbatch script that starts the node entry point once per node, and requeues its job."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diffusion.config.schema import Gatherer, Problem, join
from diffusion.errors import UserError
from diffusion.launch import environment
from diffusion.launch.backends.base import NotValidated, Rendered, environment_of, unmounted_run_folders
from diffusion.launch.command_line_tools import call
from diffusion.launch.job_spec import Job

AFTER = Path(__file__).with_name('slurm_after.sh')
"""The part of the script that follows srun."""
INSTALL = 'run this on a login node of the cluster'
NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,63}')
WORD = re.compile(r'[^\s"\'\\#]+')
"""A word that needs no quotes in an #SBATCH line, where nothing is expanded."""


@dataclass
class Options:
    """Slurm's own settings."""

    account: str | None = None
    """Account that the job is charged to."""
    gpu_type: str | None = None
    """The cluster's name of the GPU in a request, such as a100; null asks for any."""
    cpus_per_node: int | None = None
    """Cores per node; null takes whole nodes."""
    logs: str = 'logs'
    """Folder of the logs, which all nodes share."""
    setup: str = ''
    """Shell lines before the job, on the first node: `source .venv/bin/activate`, `module load cuda`."""
    raw: dict[str, str | int | bool | None] = field(default_factory=dict)
    """Additional #SBATCH options by their long names, which replace ours: `constraint: ib`; null drops an option, true
    gives it without a value."""


def problems(jobs: Sequence[Job]) -> list[Problem]:
    spec, gather = jobs[0].spec, Gatherer()
    options: Options = spec.options
    for job in jobs:
        if NAME.fullmatch(job.name) is None:
            gather.problem('name', f'{job.name!r} is no job name; use letters, digits, dots, dashes: at most 64')
    for where, value in (
        ('schedule.queue', spec.schedule.queue),
        ('schedule.priority', spec.schedule.priority),
        ('workdir', spec.workdir),
        *((f'backend.{name}', getattr(options, name)) for name in ('account', 'gpu_type', 'logs')),
        *((f'backend.raw.{name}', value) for name, value in options.raw.items() if not isinstance(value, bool)),
    ):
        if value is not None and WORD.fullmatch(str(value)) is None:
            gather.problem(where, f'{value!r} cannot stand in an #SBATCH line; use no spaces, quotes, # or backslashes')
    for name in options.raw:
        if re.fullmatch(r'[a-z][a-z0-9-]*', name) is None:
            gather.problem(join('backend.raw', name), 'is no long option of sbatch, such as constraint')
    if spec.schedule.preemptible and spec.schedule.queue is None and spec.schedule.priority is None:
        gather.problem(
            'schedule.preemptible', 'is chosen in Slurm by a partition or a QOS; set schedule.queue or priority'
        )
    if spec.image is None and spec.mounts:
        gather.problem('mounts', 'need an image; without one a job sees the folders of its nodes')
    for target, source in spec.mounts.items():
        if not source.startswith('/') or re.search(r'[\s,:]', source + target):
            gather.problem(join('mounts', target), f'{source!r} is no folder of the nodes; write an absolute path')
    if spec.image is not None:
        gather.problems += unmounted_run_folders(jobs)
    for name, source in spec.secrets.items():
        if source is not None:
            gather.problem(join('secrets', name), 'Slurm has no secrets; leave it null, and export it where you submit')
    return gather.problems


def render(jobs: Sequence[Job]) -> Rendered:
    files = {f'{job.name}.sbatch': _script(job) for job in jobs}
    commands = [('sbatch', '--parsable', *(_after('ID') if job.after else ()), f'{job.name}.sbatch') for job in jobs]
    notes = [f'Logs go to {jobs[0].spec.options.logs}/, which the nodes must share.']
    if jobs[0].spec.image is not None:
        notes.append('The image is run by pyxis (srun --container-image); the cluster needs it.')
    return Rendered(files, tuple(commands), tuple(notes))


def validate(rendered: Rendered) -> list[Problem]:
    """Check the syntax of the scripts with `bash -n`."""
    bash = shutil.which('bash')
    if bash is None:
        raise NotValidated('the script was not checked: bash is not on PATH')
    found = []
    for name, text in rendered.files.items():
        result = subprocess.run([bash, '-n'], input=text, capture_output=True, text=True, check=False)
        if result.returncode:
            found.append(Problem('backend.setup', f'{name}: {result.stderr.strip()}'))
    return found


def submit(jobs: Sequence[Job], rendered: Rendered, folder: Path) -> str:
    _logs(jobs).mkdir(parents=True, exist_ok=True)
    answers, number = [], ''
    for job in jobs:
        dependency = _after(number) if job.after else ()
        command = ['sbatch', '--parsable', *dependency, str(folder / f'{job.name}.sbatch')]
        # sbatch passes on all variables, so inside a restarted job the new one would inherit its count.
        number = call(command, install=INSTALL, env={'SLURM_RESTART_COUNT': '0'})
        number = number.partition(';')[0]  # --parsable may append the cluster's name
        answers.append(f'{job.name}: Slurm job {number}')
    return '\n'.join(answers)


def status(jobs: Sequence[Job]) -> str:
    names = ','.join(job.name for job in jobs)
    # Fields, each with the text that follows it.
    form = 'JobID: ,Name: ,State:; ,TimeUsed: of ,TimeLimit:; restarts: ,RestartCnt:; reason: ,Reason:'
    queued = call(['squeue', '--me', f'--name={names}', '--noheader', f'--Format={form}'], install=INSTALL)
    return queued or f'{names}: nothing in the queue; sacct --name={names} says how they ended'


def logs(jobs: Sequence[Job]) -> str:
    folder = _logs(jobs)
    own = re.compile(rf'({"|".join(re.escape(job.name) for job in jobs)})-\d+\.log')
    found = [path for path in folder.glob('*.log') if own.fullmatch(path.name)]
    if not found:
        raise UserError(f'logs: {folder} has none of {", ".join(job.name for job in jobs)}; has a job started?')
    newest = max(found, key=lambda path: path.stat().st_mtime)
    lines = newest.read_text(encoding='utf-8', errors='replace').splitlines()
    return '\n'.join([f'{newest}:', *lines[-100:]])


def cancel(jobs: Sequence[Job]) -> str:
    for job in jobs:
        call(['scancel', '--me', f'--name={job.name}'], install=INSTALL)
    return 'cancelled: ' + ', '.join(job.name for job in jobs)


def _logs(jobs: Sequence[Job]) -> Path:
    """Return the folder of the logs, which Slurm looks up where the job runs and does not create."""
    spec = jobs[0].spec
    return Path('' if spec.image else spec.workdir or '', spec.options.logs)


def _after(number: str) -> tuple[str, ...]:
    # Without the second option, the next job would wait forever after a final failure.
    return f'--dependency=afterok:{number}', '--kill-on-invalid-dep=yes'


def _script(job: Job) -> str:
    spec = job.spec
    options: Options = spec.options
    setup = options.setup.strip()
    lines = [
        '#!/bin/bash',
        *_directives(job),
        '',
        *(f'export {name}={shlex.quote(value)}' for name, value in environment_of(job, 'slurm').items()),
        *(['set -e', setup, 'set +e'] if setup else []),
        '',
        f'export {environment.ATTEMPT}=${{SLURM_RESTART_COUNT:-0}}',
        f'logs=$(realpath {shlex.quote(options.logs)})',
        f'export {environment.EXIT_FILE}="$logs/{job.name}-$SLURM_JOB_ID.${environment.ATTEMPT}.exits"',
        f'max_restarts={spec.restart.max_restarts}',
        *_follows(job),
        '',
        # Found here because there is no scontrol in a container.
        f'export {environment.MASTER_ADDR}=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f'srun --kill-on-bad-exit=1 {_cores(spec.options)} \\',
        *_container(job),
        f'    {job.shell_command}',
        'status=$?',
        '',
    ]
    return '\n'.join(lines) + AFTER.read_text(encoding='utf-8')


def _cores(options: Options) -> str:
    """Return options that give all cores to the one task of a node; srun does not inherit them from sbatch."""
    cpus = '' if options.cpus_per_node is None else f' --cpus-per-task={options.cpus_per_node}'
    return f'--cpu-bind=none{cpus}'


def _directives(job: Job) -> list[str]:
    """Return the #SBATCH lines; the user's own values replace ours."""
    spec = job.spec
    options: Options = spec.options
    schedule = spec.schedule
    kind = f'{options.gpu_type}:' if options.gpu_type else ''
    lines: dict[str, str | int | bool | None] = {
        'job-name': job.name,
        'nodes': job.nodes,
        'ntasks-per-node': 1,
        'gpus-per-node': f'{kind}{spec.gpus_per_node}' if spec.gpu else None,
        'cpus-per-task': options.cpus_per_node,
        'exclusive': True if options.cpus_per_node is None else None,
        'partition': schedule.queue,
        'qos': schedule.priority,
        'account': options.account,
        'chdir': spec.workdir if spec.image is None else None,
        'time': _time(job.time_limit_seconds),
        'signal': f'USR1@{schedule.notice_seconds}',
        'requeue': True,
        'open-mode': 'append',
        'output': f'{options.logs}/%x-%j.log',
    }
    lines |= options.raw
    return [
        f'#SBATCH --{name}' if value is True else f'#SBATCH --{name}={value}'
        for name, value in lines.items()
        if value not in (None, False)
    ]


def _container(job: Job) -> list[str]:
    spec = job.spec
    if spec.image is None:
        return []
    flags = [f'--container-image={spec.image}', '--no-container-mount-home']
    if spec.workdir:
        flags.append(f'--container-workdir={spec.workdir}')
    mounts = ''.join(f',{source}:{target}' for target, source in spec.mounts.items())
    quoted = [*(shlex.quote(flag) for flag in flags), f'--container-mounts="$logs:$logs"{shlex.quote(mounts)}']
    return [f'    {flag} \\' for flag in quoted]


def _follows(job: Job) -> list[str]:
    """Return a shell function that prints the action after an exit status."""
    restart = job.spec.restart
    actions = [f'        {code}) echo {action} ;;' for code, action in restart.actions().items()]
    return ['follows() {', '    case $1 in', *actions, f'        *) echo {restart.otherwise} ;;', '    esac', '}']


def _time(seconds: int | None) -> str | None:
    """Format a time as days-hours:minutes:seconds, rounded up to a minute as Slurm does."""
    if seconds is None:
        return None
    minutes = -(-seconds // 60)
    return f'{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00'
