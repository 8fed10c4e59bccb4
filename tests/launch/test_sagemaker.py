"""SageMaker requests, validated by its service model and accepted by a mock of its API (moto)."""

import json
from unittest.mock import Mock

import pytest
from commands import output_of
from object_store import ENVIRONMENT

from diffusion.cli import main
from diffusion.errors import UserError
from diffusion.exit_codes import FAILED
from diffusion.launch import node
from diffusion.launch.backends import sagemaker
from diffusion.launch.backends.base import Rendered
from diffusion.launch.node_settings import fetch_secrets, secret_references
from diffusion.runs import environment


@pytest.fixture
def request_of(prepare):
    return lambda **changes: json.loads(prepare('sagemaker', **changes)[1].files['job.json'])


def problems_of(request):
    rendered = Rendered({'job.json': json.dumps(request)}, ())
    return [str(problem) for problem in sagemaker.validate(rendered)]


@pytest.mark.parametrize(
    ('change', 'expected'),
    [
        ({'TrainingJobNames': 'x'}, 'TrainingJobNames'),
        ({'RoleArn': 'training'}, 'RoleArn'),
        ({'TrainingJobName': 'a' * 64}, 'TrainingJobName: 64 is above the SageMaker limit of 63'),
        ({'ResourceConfig': {'InstanceType': 'ml.p9.big', 'InstanceCount': 2}}, "InstanceType: 'ml.p9.big' is not"),
        ({'Environment': {'A': 'x' * 513}}, 'Environment.A: 513 is above the SageMaker limit of 512'),
        ({'Environment': {f'A{index}': 'x' for index in range(101)}}, 'Environment: 101 is above the SageMaker limit'),
        ({'RetryStrategy': {'MaximumRetryAttempts': 31}}, 'MaximumRetryAttempts: 31 is above the SageMaker limit of'),
    ],
)
def test_invalid_request_is_found_offline(change, expected, request_of):
    request = request_of()
    assert problems_of(request) == []
    assert any(expected in problem for problem in problems_of(request | change))


def test_submit_status_logs_and_cancel(write_spec, aws, capsys, monkeypatch):
    import boto3

    assert main(['launch', str(write_spec('sagemaker', name='job-of-another'))]) == 0
    path = write_spec('sagemaker', secrets={'KEY': 'training/key'}, env={'A': 'b'})
    capsys.readouterr()
    assert main(['status', str(path)]) == main(['cancel', str(path)]) == 0
    assert capsys.readouterr().out == 'no job yet\nnothing is running\n', 'the job with the longer name is another'
    name = output_of(capsys, 'launch', path).splitlines()[-1].split()[-1]
    assert name.startswith('job-2')
    job = boto3.client('sagemaker').describe_training_job(TrainingJobName=name)
    assert job['ResourceConfig']['InstanceCount'] == 2
    assert output_of(capsys, 'status', path).startswith(f'{name}: ')
    assert f'--log-stream-name-prefix {name}' in output_of(capsys, 'logs', path)
    states, client = {'a': 'InProgress', 'b': 'Failed'}, Mock()
    found = [{'TrainingJobName': each, 'TrainingJobStatus': state} for each, state in states.items()]
    for function, result in (('_client', client), ('_newest', found)):
        monkeypatch.setattr(sagemaker, function, lambda jobs, result=result: result)
    assert output_of(capsys, 'cancel', path) == 'stopping: a\n'
    client.stop_training_job.assert_called_once_with(TrainingJobName='a')


def test_chain_is_a_pipeline_that_can_be_resubmitted(write_spec, aws, capsys):
    import boto3

    path = write_spec('sagemaker', stages={name: {'overrides': {'name': name}} for name in ('one', 'two')})
    for value in ('old', 'new'):
        assert main(['launch', str(path), f'env.A={value}']) == 0
    client = boto3.client('sagemaker')
    (pipeline,) = client.list_pipelines()['PipelineSummaries']
    steps = json.loads(client.describe_pipeline(PipelineName=pipeline['PipelineName'])['PipelineDefinition'])['Steps']
    assert steps[1]['Arguments']['Environment']['A'] == 'new'
    assert len(client.list_pipeline_executions(PipelineName='job')['PipelineExecutionSummaries']) == 2


def test_aws_error_is_one_line(write_spec, monkeypatch, capsys):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in {'EC2_METADATA_DISABLED': 'true', 'CONFIG_FILE': '-', 'SHARED_CREDENTIALS_FILE': '-'}.items():
        monkeypatch.setenv(f'AWS_{name}', value)
    assert main(['launch', str(write_spec('sagemaker', backend={'region': 'us-east-1'}))]) == FAILED
    assert capsys.readouterr().err == 'error: SageMaker: Unable to locate credentials\n'


@pytest.mark.slow
def test_node_fetches_secrets_by_name(aws):
    import boto3

    boto3.client('secretsmanager').create_secret(Name='training/key', SecretString='hunter2')
    environ = {environment.SECRETS: secret_references({'KEY': 'training/key'})}
    assert 'hunter2' not in str(environ)
    assert fetch_secrets(environ) == {'KEY': 'hunter2'}
    assert fetch_secrets({}) == {}
    with pytest.raises(UserError, match=r'secrets\.KEY: training/none cannot be read'):
        fetch_secrets({environment.SECRETS: 'KEY=training/none'})


def test_unreachable_secrets_manager_is_retryable_and_a_wrong_call_is_not(monkeypatch, capsys, credentials):
    monkeypatch.setenv('AWS_ENDPOINT_URL', 'http://127.0.0.1:9')
    monkeypatch.setenv('AWS_MAX_ATTEMPTS', '1')
    monkeypatch.setenv(environment.SECRETS, 'KEY=training/key')
    monkeypatch.setenv(environment.SCHEDULER, 'local')
    assert node.main(['--', 'run.py', 'yamls/quickstart.yaml']) == FAILED
    assert 'error: secrets.KEY: training/key cannot be read (Could not connect' in capsys.readouterr().err
    assert node.main(['run.py', 'a.yaml', 'b=1']) == 2 and 'usage: python -m' in capsys.readouterr().err
    monkeypatch.setattr(node, '_main', Mock(side_effect=KeyboardInterrupt))
    assert node.main([]) == 75 and capsys.readouterr().err == 'interrupted before the start\n'
