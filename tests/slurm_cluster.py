"""Real Slurm cluster on one machine: Debian's slurmctld and slurmd, with the nodes as processes of a PID namespace.

It writes to one folder only and needs no privileged port or user. It ends with the process that started it: the first
process of the namespace reads a pipe from that process, and when it exits, the kernel kills all others, jobs included.
"""

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ranks import free_port

PROGRAMS = ('munged', 'slurmctld', 'slurmd', 'sbatch', 'srun', 'scontrol', 'squeue', 'scancel', 'unshare')
PATH = f'{os.environ["PATH"]}:/usr/sbin:/sbin'
READY_SECONDS = 60

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job waits until its credential expires; 5 s is the minimum.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=1
# Divide the memory of a node among jobs, as clusters do.
DefMemPerNode=1
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""

# The shell is PID 1 of the namespace: it reaps orphaned processes, and when its stdin is closed, the namespace ends.
START = """\
munged --foreground --force --key-file=key --socket="$PWD/munge.socket" \\
    --pid-file="$PWD/munged.pid" --seed-file="$PWD/munged.seed" --log-file="$PWD/munged.log" </dev/null >&2 &
until [ -S munge.socket ]; do
    kill -0 $! || exit 1
    sleep 0.05
done
slurmctld -D </dev/null >&2 &
declare -A slurmd
for node; do
    mkdir "$node"
    slurmd -D -N "$node" </dev/null >&2 &
    slurmd[$node]=$!
done
while read -r node signal; do
    kill -s "$signal" "${slurmd[$node]}"
    echo sent
done
"""


def why_not() -> str | None:
    """Return the reason why no cluster can be started on this machine, or None."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        what = 'apt-get install --no-install-recommends slurmctld slurmd slurm-client munge'
        return f'{", ".join(absent)}: not installed; {what}'
    result = subprocess.run([*_namespace(), 'true'], capture_output=True, text=True, check=False)
    return f'no PID namespaces here: {result.stderr.strip()}' if result.returncode else None


@dataclass
class Cluster:
    folder: Path
    """Folder of all its files."""
    nodes: tuple[str, ...]
    """Names of the nodes."""
    environ: dict[str, str]
    """Environment variables that lead Slurm's programs to the cluster."""
    daemons: 'subprocess.Popen[str]'
    """Process that holds the namespace; its stdin takes the signals to send to nodes."""

    def call(self, *command: str) -> str:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=os.environ | self.environ, check=False
        )
        assert result.returncode == 0, f'{" ".join(command)}: {result.stderr}\n{self.log()}'
        return result.stdout.strip()

    def field(self, job: str, name: str) -> str:
        """Return a field of `scontrol show job`, such as JobState."""
        words = self.call('scontrol', '--oneliner', 'show', 'job', job).split()
        return next(word.partition('=')[2] for word in words if word.startswith(f'{name}='))

    def signal(self, node: str, name: str) -> None:
        """Send a signal to a node's slurmd; STOP makes the node unreachable while its jobs keep running."""
        assert self.daemons.stdin is not None and self.daemons.stdout is not None
        print(node, name, file=self.daemons.stdin, flush=True)
        assert self.daemons.stdout.readline() == 'sent\n'

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        states: list[str] = []
        while states != ['idle'] * len(self.nodes):
            assert self.daemons.poll() is None and time.monotonic() < deadline, f'nodes: {states}\n{self.log()}'
            time.sleep(0.1)
            command = ['sinfo', '--Node', '--partition=main', '--noheader', '--format=%T']
            environ = os.environ | self.environ
            # Do not use call(), which asserts success: at first slurmctld does not answer.
            states = subprocess.run(command, capture_output=True, text=True, env=environ, check=False).stdout.split()

    def log(self) -> str:
        return (self.folder / 'log').read_text(errors='replace')


@contextmanager
def start(folder: Path, *, nodes: int) -> Iterator[Cluster]:
    """Start a cluster in an empty folder, yield it when its nodes are idle, and end it with all its jobs afterwards."""
    names = tuple(f'n{number + 1}' for number in range(nodes))
    user = pwd.getpwuid(os.geteuid()).pw_name
    host = socket.gethostname().partition('.')[0]
    lines = [f'NodeName={name} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1' for name in names]
    conf = CONF.format(host=host, port=free_port(), user=user, folder=folder) + '\n'.join([*lines, ''])
    (folder / 'slurm.conf').write_text(conf)
    (folder / 'state').mkdir()
    (folder / 'key').touch(mode=0o600)
    (folder / 'key').write_bytes(os.urandom(64))
    environ = {'SLURM_CONF': str(folder / 'slurm.conf'), 'PATH': PATH}
    with (folder / 'log').open('wb') as log:
        daemons = subprocess.Popen(
            [*_namespace(), 'bash', '-c', START, 'start', *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=folder,
            env=os.environ | environ,
            text=True,
            start_new_session=True,  # Ctrl-C must reach only the tests
        )
    cluster = Cluster(folder, names, environ, daemons)
    try:
        cluster.wait_until_idle()
        yield cluster
    finally:
        daemons.communicate()  # closes the pipe, which ends the namespace, and waits for it


def _namespace() -> list[str]:
    """Return the command that runs a program in a new PID namespace."""
    user = [] if os.geteuid() == 0 else ['--user', '--map-current-user']
    return ['unshare', *user, '--pid', '--fork', '--kill-child', '--mount-proc']
