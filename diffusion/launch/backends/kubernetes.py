"""Kubernetes launch backend: a JobSet with an indexed Job per stage and a pod per node, optionally queued by Kueue."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from diffusion.config.schema import Gatherer, Problem, join
from diffusion.errors import ExternalError, UserError
from diffusion.exit_codes import BAD_HARDWARE, PREEMPTED
from diffusion.launch.backends.base import NotValidated, Rendered, call, deep_merge, environment_of, unmounted_folders
from diffusion.launch.job_spec import Job, JobSpec
from diffusion.runs import environment

INSTALL = 'install kubectl and configure a context (kubectl config get-contexts)'
LABEL = re.compile(r'[a-z]([a-z0-9-]*[a-z0-9])?')
MAX_NAME = 63
"""Maximum length of a DNS label, which also limits the names of pods and hosts."""
QUEUE = 'kueue.x-k8s.io/queue-name'
PRIORITY = 'kueue.x-k8s.io/priority-class'
RESTARTS = 'jobset.sigs.k8s.io/restart-attempt'
"""Pod label with the number of restarts of the JobSet."""
SCHEDULER_RESTARTS = 20
"""Factor by which the JobSet's maxRestarts exceeds the job spec's `max_restarts`: JobSet counts all failures except
preemptions and bad hardware, but the job spec limits only consecutive failures without progress."""
RAW = ('jobset', 'job', 'pod', 'container')


@dataclass(frozen=True)
class Options:
    """Settings of the Kubernetes launch backend, from `backend:` in a job spec."""

    namespace: str | None = None
    """Namespace of all objects. Null means that of the kubectl context."""
    gpu_resource: str = 'nvidia.com/gpu'
    """Name of the GPU resource in a pod's limits."""
    cpus_per_node: int | None = None
    """Number of CPU cores per pod. Leave some of the machine's cores to Kubernetes itself."""
    memory_per_node: str | None = None
    """Memory per pod including its /dev/shm, such as 900Gi."""
    shared_memory: str = '64Gi'
    """Size of /dev/shm, through which data loader workers pass batches (Docker's default is only 64 MB)."""
    service_account: str | None = None
    """Service account of the pods, for example for access to the object store."""
    keep_seconds: int | None = 604800
    """Time in seconds for which a finished JobSet is kept. Null means forever."""
    raw: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values that are merged last into the manifest, by object: jobset, job, pod (its spec) or container."""


def problems(jobs: Sequence[Job]) -> list[Problem]:
    spec, gather = jobs[0].spec, Gatherer()
    options: Options = spec.options
    if LABEL.fullmatch(spec.name) is None:
        message = f'{spec.name!r} is not a valid Kubernetes name; use a-z, 0-9 and dashes, starting with a letter'
        gather.problem('name', message)
    for job in jobs:
        # Pods are named <jobset>-<replicated job>-<job index>-<pod index>-<five characters>.
        excess = len(f'{spec.name}-{job.stage}-0-{job.nodes - 1}-abcde') - MAX_NAME
        if excess > 0:
            message = f'{spec.name!r} is {excess} characters too long for the pods of stage {job.stage!r}; shorten it'
            gather.problem('name', message)
    if spec.image is None:
        gather.problem('image', 'is missing; set the container image of the pods')
    if spec.schedule.preemptible:
        message = 'is not supported on Kubernetes; set schedule.priority or backend.raw.pod.nodeSelector instead'
        gather.problem('schedule.preemptible', message)
    if isinstance(spec.schedule.priority, int):
        message = f'{spec.schedule.priority} is a number; on Kubernetes, use the name of a priority class'
        gather.problem('schedule.priority', message)
    for target, source in spec.mounts.items():
        if _volume('x', source) is None:
            message = f'{source!r} cannot be mounted; use pvc://claim, pvc://claim/folder, or a folder on the nodes'
            gather.problem(join('mounts', target), message)
    for name, source in spec.secrets.items():
        if source is None or re.fullmatch(r'[a-z0-9.-]+/[A-Za-z0-9._-]+', source) is None:
            message = f'{source!r} is not a Kubernetes secret; use secret/key, the name of a Secret and a key in it'
            gather.problem(join('secrets', name), message)
    for name in options.raw:
        if name not in RAW:
            gather.problem(join('backend.raw', name), f'is unknown; use one of {", ".join(RAW)}')
    return gather.problems + (unmounted_folders(jobs) if spec.image else [])


def render(jobs: Sequence[Job]) -> Rendered:
    spec = jobs[0].spec
    options: Options = spec.options
    schedule, uncounted = spec.schedule, _uncounted_rules(jobs)
    labels = {}
    if schedule.queue is not None:
        priority = {} if schedule.priority is None else {PRIORITY: str(schedule.priority)}
        labels = {QUEUE: schedule.queue, **priority}
    metadata = {'name': spec.name, 'namespace': options.namespace, 'labels': labels}
    manifest = {
        'apiVersion': 'jobset.x-k8s.io/v1alpha2',
        'kind': 'JobSet',
        'metadata': {key: value for key, value in metadata.items() if value},
        'spec': {
            # These keys give the first pod a host name that is known before the job starts: the master address.
            'network': {'enableDNSHostnames': True, 'subdomain': spec.name},
            'failurePolicy': _failure_policy(jobs),
            **({} if options.keep_seconds is None else {'ttlSecondsAfterFinished': options.keep_seconds}),
            'replicatedJobs': [
                _replicated_job(job, previous, uncounted) for job, previous in zip(jobs, [None, *jobs], strict=False)
            ],
        },
    }
    name = f'{spec.name}.yaml'
    text = yaml.safe_dump(deep_merge(manifest, options.raw.get('jobset', {})), sort_keys=False, width=1000)
    return Rendered({name: text}, (('kubectl', 'create', '-f', name),), tuple(_notes(jobs)))


def validate(rendered: Rendered) -> list[Problem]:
    """Return the mistakes in manifests, found with the pip extra `kubernetes` or, if not installed, by kubectl."""
    found = []
    for text in rendered.files.values():
        try:
            found += _schema_problems(yaml.safe_load(text))
        except ImportError:
            found += _kubectl_problems(text)
    return found


def submit(jobs: Sequence[Job], rendered: Rendered, folder: Path) -> str:
    return '\n'.join(call(['kubectl', 'create', '-f', str(folder / name)], install=INSTALL) for name in rendered.files)


def status(jobs: Sequence[Job]) -> str:
    return call(['kubectl', *_namespace(jobs), 'get', 'jobset,jobs,pods', *_selector(jobs)], install=INSTALL)


def logs(jobs: Sequence[Job]) -> str:
    lines = ['--tail=100', '--prefix', '--max-log-requests=64']
    return call(['kubectl', *_namespace(jobs), 'logs', *_selector(jobs), *lines], install=INSTALL)


def cancel(jobs: Sequence[Job]) -> str:
    return call(['kubectl', *_namespace(jobs), 'delete', 'jobset', jobs[0].spec.name], install=INSTALL)


def free_nodes(spec: JobSpec) -> int:
    """Return the number of ready nodes whose free GPUs (not used by running pods) suffice for a pod."""
    resource, needed = spec.options.gpu_resource, spec.gpus_per_node if spec.gpu else 1
    used: dict[str, int] = {}
    for pod in _items('pods', '--all-namespaces', '--field-selector=status.phase!=Succeeded,status.phase!=Failed'):
        node = pod['spec'].get('nodeName', '')
        for container in pod['spec'].get('containers', []):
            requested = container.get('resources', {}).get('limits', {}).get(resource, 0)
            used[node] = used.get(node, 0) + int(requested)
    free = 0
    for node in _items('nodes'):
        ready = any(each['type'] == 'Ready' and each['status'] == 'True' for each in node['status']['conditions'])
        gpus = int(node['status']['allocatable'].get(resource, 0)) - used.get(node['metadata']['name'], 0)
        free += ready and not node['spec'].get('unschedulable') and gpus >= needed
    return free


def _items(*words: str) -> list[dict[str, Any]]:
    """Return the objects that `kubectl get` lists."""
    text = call(['kubectl', 'get', *words, '--output=json'], install=INSTALL)
    try:
        return json.loads(text)['items']
    except (ValueError, KeyError) as error:
        raise ExternalError(f'kubectl get {" ".join(words)}: its output is not a list of objects ({error})') from error


def _notes(jobs: Sequence[Job]) -> list[str]:
    spec, found = jobs[0].spec, []
    if spec.restart.codes('elsewhere'):
        found.append(
            'A restart may use a machine that failed the preflight; run kubectl cordon on the node that it reports.'
        )
    if spec.schedule.queue is None and any(job.nodes > 1 for job in jobs):
        found.append('Without a Kueue queue (schedule.queue), pods start one by one, and two jobs may wait forever.')
    if spec.restart.max_restarts:
        found.append('The rule for preempted pods needs JobSet 0.10 or later.')
    if len(jobs) > 1:
        found.append('Stages need JobSet 0.8 or later; a restart also runs completed stages, which exit immediately.')
    if len(jobs) > 1 and spec.schedule.queue is not None:
        found.append(f'Kueue reserves the machines of all stages, {sum(job.nodes for job in jobs)}, for the whole job.')
    return found


def _namespace(jobs: Sequence[Job]) -> list[str]:
    """Return the kubectl option for the namespace of the jobs; empty to use the namespace of the kubectl context."""
    namespace = jobs[0].spec.options.namespace
    return [] if namespace is None else [f'--namespace={namespace}']


def _selector(jobs: Sequence[Job]) -> list[str]:
    """Return the kubectl options that select all objects of the JobSet."""
    return ['--selector', f'jobset.sigs.k8s.io/jobset-name={jobs[0].spec.name}']


def _failure_policy(jobs: Sequence[Job]) -> dict[str, Any]:
    """Return the JobSet's failure policy, which restarts the job after every failure that may be retried."""
    restart = jobs[0].spec.restart
    # Fail the JobSet for these reasons. After a failure for any other reason, JobSet recreates all Jobs, because ranks
    # cannot continue without each other.
    final = {'name': 'stop', 'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy', 'DeadlineExceeded']}
    if restart.max_restarts == 0:
        return {'maxRestarts': 0, 'rules': [final]}
    # Match the message, since only it says which rule applied: the reason is PodFailurePolicy for every FailJob rule.
    patterns = [f'matching FailJob rule at index {index}$' for index in range(len(_uncounted_rules(jobs)))]
    uncounted = {
        'name': 'retry-without-limit',
        'action': 'RestartJobSetAndIgnoreMaxRestarts',
        'onJobFailureReasons': ['PodFailurePolicy'],
        'onJobFailureMessagePatterns': patterns,
    }
    # JobSet cannot tell which attempts made progress. The node entry point of a training run can, and exits with 78
    # when max_restarts is exceeded. JobSet's limit is therefore needed only if the node entry point cannot start, and
    # for tasks other than training, which do not record attempts.
    return {'maxRestarts': restart.max_restarts * SCHEDULER_RESTARTS, 'rules': [uncounted, final]}


def _uncounted_rules(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Return the podFailurePolicy rules for failures that do not count towards the JobSet's maxRestarts."""
    restart = jobs[0].spec.restart
    if restart.max_restarts == 0:
        return []
    # After a preemption, a hang or a hardware fault, the node entry point exits with PREEMPTED or BAD_HARDWARE. Do not
    # count these for training runs, which count attempts themselves; other jobs would restart forever on bad hardware.
    # All stages have the same rules, because JobSet identifies a rule by its index.
    trains = all(job.task == 'train' for job in jobs)
    codes = [code for code in (PREEMPTED, BAD_HARDWARE) if trains and restart.actions()[code] != 'stop']
    disruption = {'action': 'FailJob', 'onPodConditions': [{'type': 'DisruptionTarget', 'status': 'True'}]}
    return [disruption, *([_exit_rule('In', codes)] if codes else [])]


def _exit_rule(operator: str, codes: Sequence[int]) -> dict[str, Any]:
    return {'action': 'FailJob', 'onExitCodes': {'containerName': 'main', 'operator': operator, 'values': [*codes]}}


def _pod_failure_policy(job: Job, uncounted: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a Kubernetes Job's podFailurePolicy: it lists the failures to which the JobSet's failure policy reacts."""
    restart = job.spec.restart
    codes = restart.codes('stop')
    operator = 'In'
    if restart.otherwise == 'stop':
        operator, codes = 'NotIn', restart.codes('retry', 'elsewhere')
        # Kubernetes itself kills pods, for example on eviction: statuses 137 (SIGKILL) and 143 (SIGTERM) are not
        # failures of the job.
        codes = sorted({*codes, 137, 143})
    # The first matching rule applies. Rules for uncounted failures come first, since JobSet identifies them by index.
    rules = [*uncounted, *([_exit_rule(operator, codes)] if codes else [])]
    return {'podFailurePolicy': {'rules': rules}} if rules else {}


def _replicated_job(job: Job, previous: Job | None, uncounted: Sequence[dict[str, Any]]) -> dict[str, Any]:
    raw = job.spec.options.raw
    deadline = {} if job.time_limit_seconds is None else {'activeDeadlineSeconds': job.time_limit_seconds}
    depends = {} if previous is None else {'dependsOn': [{'name': previous.stage, 'status': 'Complete'}]}
    kubernetes_job = {
        'parallelism': job.nodes,
        'completions': job.nodes,
        'completionMode': 'Indexed',
        # Do not replace single pods: the JobSet restarts all pods together.
        'backoffLimit': 0,
        **deadline,
        **_pod_failure_policy(job, uncounted),
        'template': {'spec': deep_merge(_pod(job), raw.get('pod', {}))},
    }
    template = {'spec': deep_merge(kubernetes_job, raw.get('job', {}))}
    return {'name': job.stage, 'replicas': 1, **depends, 'template': template}


def _pod(job: Job) -> dict[str, Any]:
    spec = job.spec
    options: Options = spec.options
    volumes = [_volume(f'mount-{index}', source) for index, source in enumerate(spec.mounts.values())]
    shared = {'name': 'shared-memory', 'emptyDir': {'medium': 'Memory', 'sizeLimit': options.shared_memory}}
    # A podFailurePolicy requires restartPolicy Never.
    pod: dict[str, Any] = {'restartPolicy': 'Never', 'terminationGracePeriodSeconds': spec.schedule.notice_seconds}
    # Without a queue, set the priority of the pods. With a queue, a label sets that of Kueue's workload instead.
    if spec.schedule.priority is not None and spec.schedule.queue is None:
        pod['priorityClassName'] = str(spec.schedule.priority)
    if options.service_account is not None:
        pod['serviceAccountName'] = options.service_account
    if spec.gpu is not None:
        # GPU nodes commonly have a taint with the name of their GPU resource.
        pod['tolerations'] = [{'key': options.gpu_resource, 'operator': 'Exists', 'effect': 'NoSchedule'}]
    pod['containers'] = [deep_merge(_container(job), options.raw.get('container', {}))]
    pod['volumes'] = [shared, *volumes]
    return pod


def _container(job: Job) -> dict[str, Any]:
    spec = job.spec
    options: Options = spec.options
    resources = {
        options.gpu_resource: spec.gpus_per_node if spec.gpu else None,
        'cpu': options.cpus_per_node,
        'memory': options.memory_per_node,
    }
    limits = {key: value for key, value in resources.items() if value is not None}
    mounts = [{'name': 'shared-memory', 'mountPath': '/dev/shm'}]
    for index, (target, source) in enumerate(spec.mounts.items()):
        folder = source.removeprefix('pvc://').partition('/')[2] if source.startswith('pvc://') else ''
        mounts.append({'name': f'mount-{index}', 'mountPath': target} | ({'subPath': folder} if folder else {}))
    return {
        'name': 'main',
        'image': spec.image,
        # Set `args`: `command` would replace the image's entry point, tini, which forwards signals and reaps orphans.
        'args': [_literal(word) for word in job.command],
        **({} if spec.workdir is None else {'workingDir': spec.workdir}),
        'env': _env(job),
        **({'resources': {'limits': limits}} if limits else {}),
        'volumeMounts': mounts,
    }


def _env(job: Job) -> list[dict[str, Any]]:
    spec = job.spec
    # The first pod's host name is <jobset>-<replicated job>-<job index>-<pod index>.<subdomain>.
    first = f'{spec.name}-{job.stage}-0-0.{spec.name}'
    variables = environment_of(job, 'jobset', MASTER_ADDR=first)
    env: list[dict[str, Any]] = [{'name': name, 'value': _literal(value)} for name, value in variables.items()]
    label = {'fieldRef': {'fieldPath': f"metadata.labels['{RESTARTS}']"}}
    env.append({'name': environment.ATTEMPT, 'valueFrom': label})
    # Use the name of the node instead of the pod, because `kubectl cordon` takes node names.
    env.append({'name': environment.MACHINE, 'valueFrom': {'fieldRef': {'fieldPath': 'spec.nodeName'}}})
    for name, source in spec.secrets.items():
        secret, _, key = str(source).partition('/')
        env.append({'name': name, 'valueFrom': {'secretKeyRef': {'name': secret, 'key': key}}})
    return env


def _literal(text: str) -> str:
    """Escape the dollar signs in an argument: Kubernetes expands $(NAME) and reads $$ as a dollar sign."""
    return text.replace('$', '$$')


def _volume(name: str, source: str) -> dict[str, Any] | None:
    """Return the pod volume for a mount source (pvc://claim or a folder on the nodes); None for any other source."""
    claim = re.fullmatch(r'pvc://([a-z0-9.-]+)(/.+)?', source)
    if claim is not None:
        return {'name': name, 'persistentVolumeClaim': {'claimName': claim[1]}}
    return {'name': name, 'hostPath': {'path': source}} if source.startswith('/') else None


def _schema_problems(manifest: dict[str, Any]) -> list[Problem]:
    """Return a manifest's violations of published schemas; raise ImportError if the extra `kubernetes` is missing."""
    # Import these here: importing the models takes a second.
    import kubernetes_validate
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
    from pydantic import ValidationError

    try:
        JobsetV1alpha2JobSet.model_validate(manifest, extra='forbid', by_alias=True, by_name=False)
    except ValidationError as error:
        # Use these models only for JobSet's own keys, and kubernetes-validate for the template of a Job: the models
        # lack Kubernetes's int-or-string types, so they would refuse valid quantities and ports there.
        found = [
            Problem(_path(*each['loc']), 'unknown key; remove it' if each['type'] == 'extra_forbidden' else each['msg'])
            for each in error.errors()
            if 'template' not in each['loc'][:-1]
        ]
        if found:
            return found
    found, version = [], kubernetes_validate.latest_version()
    for index, part in enumerate(manifest.get('spec', {}).get('replicatedJobs', [])):
        job = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': part['name']}, **part['template']}
        try:
            kubernetes_validate.validate(job, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            where = _path('spec', 'replicatedJobs', index, 'template', *error.absolute_path)
            found.append(Problem(where, f'{error.message} (Kubernetes {error.version})'))
    return found


def _kubectl_problems(text: str) -> list[Problem]:
    """Return the mistakes that a kubectl dry run finds; raise NotValidated if kubectl or a cluster is missing."""
    try:
        call(['kubectl', 'version', '--request-timeout=10s'], install=INSTALL)
    except (UserError, ExternalError) as error:
        message = f"the JobSet was not validated; pip install 'diffusion-recipes[kubernetes]' ({error})"
        raise NotValidated(message) from error
    try:
        call(['kubectl', 'apply', '--dry-run=client', '--filename=-'], install=INSTALL, stdin=text)
    except ExternalError as error:
        return [Problem('backend.raw', str(error))]
    return []


def _path(*parts: str | int) -> str:
    """Return the job-spec key that sets a manifest value, such as `backend.raw.spec.replicatedJobs[0].name`."""
    return 'backend.raw' + ''.join(f'[{part}]' if isinstance(part, int) else f'.{part}' for part in parts)
