"""SageMaker launch backend: a job is a create_training_job request, and jobs in sequence are a pipeline."""

import datetime
import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusion.config.schema import Gatherer, Problem, join
from diffusion.errors import ExternalError, UserError
from diffusion.launch.backends.base import Rendered, deep_merge, environment_of, unmounted_folders
from diffusion.launch.job_spec import Job
from diffusion.launch.node_settings import secret_references
from diffusion.runs import environment

INSTANCES = {
    'a100-40gb': 'ml.p4d.24xlarge',
    'a100-80gb': 'ml.p4de.24xlarge',
    'h100-sxm': 'ml.p5.48xlarge',
    'h200': 'ml.p5en.48xlarge',
    'b200': 'ml.p6-b200.48xlarge',
    'l40s': 'ml.g6e.48xlarge',
    'a10g': 'ml.g5.48xlarge',
}
"""Instance types with eight GPUs, by GPU model."""
NAME = re.compile(r'[a-zA-Z0-9](-*[a-zA-Z0-9])*')
MAX_NAME = 63 - len('-20260101-000000')
"""Maximum length of a job name. SageMaker's names cannot be reused, so each submission appends the time."""
CHANNELS = '/opt/ml/input/data/'
FSX = re.compile(r'fsx://(?P<id>fs-[0-9a-f]+)(?P<path>/.+)')
MAX_RETRIES = 30
"""Largest value of MaximumRetryAttempts that SageMaker accepts."""


@dataclass(frozen=True)
class Options:
    """Settings of the SageMaker launch backend, from `backend:` in a job spec."""

    role: str
    """The ARN of the IAM role with which the job runs."""
    output: str
    """The S3 folder for SageMaker's own output."""
    region: str | None = None
    """AWS region. Null means that of the AWS profile."""
    instance_type: str | None = None
    """Instance type. Null means the type that has eight GPUs of the requested model."""
    volume_gb: int = 500
    """Disk size in GB, for machines without local disks."""
    subnets: list[str] = field(default_factory=list)
    """Subnets of the VPC, required for FSx."""
    security_groups: list[str] = field(default_factory=list)
    """Security groups of the VPC, required for FSx."""
    infra_check: bool = True
    """True lets SageMaker check GPUs and network before it starts the job."""
    keep_alive_seconds: int | None = None
    """Time in seconds to keep the machines for the next job (a warm pool), which costs the usual price."""
    raw: dict[str, Any] = field(default_factory=dict)
    """Values that are merged last into the request of create_training_job."""


def problems(jobs: Sequence[Job]) -> list[Problem]:
    spec, gather = jobs[0].spec, Gatherer()
    options: Options = spec.options
    for job in jobs:
        if NAME.fullmatch(job.name) is None or len(job.name) > MAX_NAME:
            message = f'{job.name!r} is not a valid training job name; use a-z, 0-9 and dashes, at most {MAX_NAME}'
            gather.problem('name', message)
        if job.time_limit_seconds is None:
            message = 'is missing, and the default of SageMaker is one day; set it, such as 5d'
            gather.problem('schedule.time_limit', message)
    if spec.image is None:
        gather.problem('image', 'is missing; use a container image in ECR')
    if spec.workdir is not None:
        gather.problem('workdir', "is not supported by SageMaker, which uses the container image's; remove it")
    _check_machines(jobs, gather)
    for key in ('queue', 'priority'):
        if getattr(spec.schedule, key) is not None:
            gather.problem(f'schedule.{key}', 'is not supported by SageMaker; remove it')
    for name, source in spec.secrets.items():
        if source is None or re.fullmatch(r'[A-Za-z0-9/_+=.@:-]+', source) is None:
            message = 'use the name or ARN of a secret in AWS Secrets Manager'
            gather.problem(join('secrets', name), f'SageMaker shows environments in plain text; {message}')
    _check_mounts(jobs, gather)
    if options.keep_alive_seconds is not None and spec.schedule.preemptible:
        message = 'spot instances have no warm pools; remove this or schedule.preemptible'
        gather.problem('backend.keep_alive_seconds', message)
    return gather.problems


def render(jobs: Sequence[Job]) -> Rendered:
    spec = jobs[0].spec
    notes = ['SageMaker does not restart a failed job; the node entry point does, on the same machines.']
    if spec.restart.codes('elsewhere'):
        notes.append(
            'No other machines are available on restart: relaunch a job that ends with bad hardware (76) yourself.'
        )
    if any(source.startswith('s3://') for source in spec.mounts.values()):
        how = 'in the background, without links'
        notes.append(f'SageMaker copies the folder to S3 {how}: init_from needs a checkpoint.')
    if len(jobs) == 1:
        name = f'{spec.name}.json'
        command = ('aws', 'sagemaker', 'create-training-job', '--cli-input-json', f'file://{name}')
        return Rendered({name: _json(_request(jobs[0]))}, (command,), tuple(notes))
    name = f'{spec.name}-pipeline.json'
    definition = ('--pipeline-definition', f'file://{name}', '--role-arn', spec.options.role)
    create = ('aws', 'sagemaker', 'create-pipeline', '--pipeline-name', spec.name, *definition)
    start = ('aws', 'sagemaker', 'start-pipeline-execution', '--pipeline-name', spec.name)
    return Rendered({name: _json(_pipeline(jobs))}, (create, start), tuple(notes))


def validate(rendered: Rendered) -> list[Problem]:
    """Return the mistakes in rendered requests according to botocore's service model: keys, types and limits."""
    from botocore.validate import ParamValidator

    shape, found = _request_shape(), []
    for text in rendered.files.values():
        document = json.loads(text)
        requests = [document]
        if 'Steps' in document:
            # The service model requires a TrainingJobName, which the steps of a pipeline lack: add one.
            requests = [{'TrainingJobName': step['Name'], **step['Arguments']} for step in document['Steps']]
        for request in requests:
            report = ParamValidator().validate(request, shape)
            found += [Problem('backend.raw', line) for line in report.generate_report().splitlines() if line]
            found += [] if report.has_errors() else _limit_problems(shape, request)
    return found


def submit(jobs: Sequence[Job], rendered: Rendered, folder: Path) -> str:
    spec = jobs[0].spec
    client = _client(jobs)
    text = next(iter(rendered.files.values()))
    if len(jobs) == 1:
        request = json.loads(text)
        now = datetime.datetime.now(datetime.timezone.utc)
        request['TrainingJobName'] += f'-{now:%Y%m%d-%H%M%S}'
        _call(client.create_training_job, **request)
        return f'training job {request["TrainingJobName"]}'
    definition = {'PipelineName': spec.name, 'PipelineDefinition': text, 'RoleArn': spec.options.role}
    listed = _call(client.list_pipelines, PipelineNamePrefix=spec.name)['PipelineSummaries']
    if any(each['PipelineName'] == spec.name for each in listed):
        _call(client.update_pipeline, **definition)
    else:
        # The idempotency token must have at least 32 characters.
        _call(client.create_pipeline, ClientRequestToken=f'{spec.name:-<32}'[:32], **definition)
    return str(_call(client.start_pipeline_execution, PipelineName=spec.name)['PipelineExecutionArn'])


def status(jobs: Sequence[Job]) -> str:
    lines = [f'{each["TrainingJobName"]}: {each["TrainingJobStatus"]}' for each in _newest(jobs)]
    return '\n'.join(lines) or 'no job yet'


def logs(jobs: Sequence[Job]) -> str:
    names = [each['TrainingJobName'] for each in _newest(jobs)]
    return '\n'.join(f'aws logs tail /aws/sagemaker/TrainingJobs --log-stream-name-prefix {name}' for name in names)


def cancel(jobs: Sequence[Job]) -> str:
    client, stopped = _client(jobs), []
    for each in _newest(jobs):
        if each['TrainingJobStatus'] == 'InProgress':
            _call(client.stop_training_job, TrainingJobName=each['TrainingJobName'])
            stopped.append(each['TrainingJobName'])
    return f'stopping: {", ".join(stopped)}' if stopped else 'nothing is running'


def _check_machines(jobs: Sequence[Job], gather: Gatherer) -> None:
    spec = jobs[0].spec
    if spec.options.instance_type is not None:
        return
    if spec.gpu not in INSTANCES:
        message = f'is missing; set it (there is no default for {spec.gpu or "a job without GPUs"})'
        gather.problem('backend.instance_type', message)
    elif spec.gpus_per_node != 8:
        message = f'{spec.gpus_per_node} of the 8 GPUs of {INSTANCES[spec.gpu]}; use 8, or set backend.instance_type'
        gather.problem('gpus_per_node', message)


def _check_mounts(jobs: Sequence[Job], gather: Gatherer) -> None:
    spec = jobs[0].spec
    checkpoints = [target for target, source in spec.mounts.items() if source.startswith('s3://')]
    for target in checkpoints[1:]:
        message = f'SageMaker copies only one folder to S3; remove this or {checkpoints[0]}'
        gather.problem(join('mounts', target), message)
    for target, source in spec.mounts.items():
        if FSX.fullmatch(source) is not None:
            if re.fullmatch(CHANNELS + '[A-Za-z0-9_.-]+', target) is None:
                message = f'FSx is mounted at {CHANNELS}NAME; use that path, and set runs_dir to it'
                gather.problem(join('mounts', target), message)
            if not spec.options.subnets or not spec.options.security_groups:
                gather.problem('backend.subnets', 'FSx is only reachable inside a VPC; set subnets and security_groups')
        elif not source.startswith('s3://'):
            message = f'{source!r} cannot be mounted; use s3://bucket/folder or fsx://id/path'
            gather.problem(join('mounts', target), message)
    gather.problems += unmounted_folders(jobs)


def _request(job: Job) -> dict[str, Any]:
    spec = job.spec
    options: Options = spec.options
    limit, spot = job.time_limit_seconds, spec.schedule.preemptible
    variables = environment_of(job, 'sagemaker', RESTART_IN_PLACE='1')
    if spec.secrets:
        variables[environment.SECRETS] = secret_references(spec.secrets)
    resources = {
        'InstanceType': options.instance_type or INSTANCES.get(str(spec.gpu)),
        'InstanceCount': job.nodes,
        'VolumeSizeInGB': options.volume_gb,
        'KeepAlivePeriodInSeconds': options.keep_alive_seconds,
    }
    waiting = {'MaxWaitTimeInSeconds': 2 * (limit or 0)} if spot else {}
    request: dict[str, Any] = {
        'TrainingJobName': job.name,
        'RoleArn': options.role,
        'AlgorithmSpecification': {
            'TrainingImage': spec.image,
            'TrainingInputMode': 'File',
            'ContainerEntrypoint': ['python', '-m', 'diffusion.launch.node'],
            'ContainerArguments': job.arguments,
        },
        'ResourceConfig': {key: value for key, value in resources.items() if value is not None},
        # A spot job may wait for machines as long as it may run. (SageMaker's MaxWaitTime includes the run time.)
        'StoppingCondition': {'MaxRuntimeInSeconds': limit, **waiting},
        'EnableManagedSpotTraining': spot,
        'OutputDataConfig': {'S3OutputPath': options.output},
        'Environment': variables,
        'InfraCheckConfig': {'EnableInfraCheck': options.infra_check},
    }
    if spec.restart.max_restarts:
        # These retries cover only SageMaker's own errors; the node entry point restarts the workers if the run fails.
        request['RetryStrategy'] = {'MaximumRetryAttempts': min(spec.restart.max_restarts, MAX_RETRIES)}
    if options.subnets:
        request['VpcConfig'] = {'Subnets': options.subnets, 'SecurityGroupIds': options.security_groups}
    return deep_merge(request | _mounts(job), options.raw)


def _mounts(job: Job) -> dict[str, Any]:
    """Return the request's keys for mounts: FSx file systems, and a folder whose files SageMaker copies to S3."""
    found: dict[str, Any] = {}
    channels = []
    for target, source in job.spec.mounts.items():
        system = FSX.fullmatch(source)
        if system is None:
            found['CheckpointConfig'] = {'S3Uri': source, 'LocalPath': target}
            continue
        file_system = {'FileSystemId': system['id'], 'FileSystemType': 'FSxLustre'}
        file_system |= {'FileSystemAccessMode': 'rw', 'DirectoryPath': system['path']}
        name = target.removeprefix(CHANNELS)
        channels.append({'ChannelName': name, 'DataSource': {'FileSystemDataSource': file_system}})
    return found | ({'InputDataConfig': channels} if channels else {})


def _pipeline(jobs: Sequence[Job]) -> dict[str, Any]:
    steps = []
    for job in jobs:
        arguments = _request(job)
        del arguments['TrainingJobName']  # a pipeline generates the job names
        step = {'Name': job.name, 'Type': 'Training', 'Arguments': arguments}
        steps.append(step | ({'DependsOn': [job.after]} if job.after else {}))
    return {'Version': '2020-12-01', 'Metadata': {}, 'Parameters': [], 'Steps': steps}


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + '\n'


@functools.cache
def _request_shape() -> Any:
    import botocore.session

    service = botocore.session.get_session().get_service_model('sagemaker')
    return service.operation_model('CreateTrainingJob').input_shape


def _limit_problems(shape: Any, value: Any, where: str = '') -> list[Problem]:
    """Return violations of limits, patterns and enums in a request; botocore itself does not check these."""
    parts = []
    if shape.type_name == 'structure':
        parts = [(shape.members[key], item, join(where, key)) for key, item in value.items()]
    elif shape.type_name == 'map':
        parts = [(shape.value, item, join(where, key)) for key, item in value.items()]
    elif shape.type_name == 'list':
        parts = [(shape.member, item, f'{where}[{index}]') for index, item in enumerate(value)]
    found = [problem for part in parts for problem in _limit_problems(*part)]
    size = value if isinstance(value, int) else len(value)
    limits = shape.metadata
    if size > limits.get('max', size):
        found.append(Problem(where, f'{size} is above the SageMaker limit of {limits["max"]}'))
    if isinstance(value, str):
        # Replace Unicode classes, such as \p{L} in the patterns of tags: `re` does not support them.
        if 'pattern' in limits and re.fullmatch(re.sub(r'\\p{\w+}', r'\\w ', limits['pattern']), value) is None:
            found.append(Problem(where, f'{value!r} does not match the SageMaker pattern {limits["pattern"]}'))
        if shape.enum and value not in shape.enum:
            found.append(Problem(where, f'{value!r} is not one of the {len(shape.enum)} values that SageMaker accepts'))
    return found


def _client(jobs: Sequence[Job]) -> Any:
    try:
        import boto3
    except ImportError as error:
        raise UserError('backend.name: sagemaker needs boto3; pip install boto3') from error
    # Avoid boto3.client(): its default session keeps the first credentials it found until the process ends.
    return _call(lambda: boto3.Session(region_name=jobs[0].spec.options.region).client('sagemaker'))


def _call(function: Any, *arguments: Any, **keywords: Any) -> Any:
    """Call a function of boto3; raise ExternalError with a one-line message if it fails."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return function(*arguments, **keywords)
    except (BotoCoreError, ClientError) as error:
        raise ExternalError(f'SageMaker: {error}') from error


def _newest(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Return SageMaker's summary of the latest submission of each job; skip jobs that were never submitted."""
    client, found = _client(jobs), []
    for job in jobs:
        # NameContains also matches jobs with longer names. A pipeline adds its execution id before a step's name, and a
        # suffix after it.
        name = re.escape(job.name)
        pattern = re.compile(rf'{name}(-\d{{8}}-\d{{6}})?|pipelines-[^-]+-{name}-[^-]+')
        order = {'SortBy': 'CreationTime', 'SortOrder': 'Descending', 'MaxResults': 20}
        listed = _call(client.list_training_jobs, NameContains=job.name, **order)['TrainingJobSummaries']
        found += [each for each in listed if pattern.fullmatch(each['TrainingJobName'])][:1]
    return found
