"""Examples in yamls/launch: valid, priced offline within seconds, and rendered as reviewed."""

import json
from pathlib import Path

import pytest
from golden import check_golden
from object_store import ENVIRONMENT

from diffusion.launch.backends import NAMES
from diffusion.launch.job_checks import check_jobs, load_job_spec

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / 'golden'
EXAMPLES = sorted((ROOT / 'yamls' / 'launch').glob('*.yaml'))


def files_of(backend):
    paths = [path for path in EXAMPLES if load_job_spec(path).backend == backend]
    found = [file.read_text(encoding='utf-8') for path in paths for file in sorted((GOLDEN / path.stem).iterdir())]
    assert found
    return found


@pytest.mark.parametrize('path', EXAMPLES, ids=lambda path: path.stem)
def test_example_renders_as_reviewed(path):
    checked = check_jobs(load_job_spec(path), path, environ={'WANDB_API_KEY': 'x'})
    rendered = checked.backend.render(checked.jobs)
    assert not checked.backend.validate(rendered)
    check_golden(GOLDEN / path.stem, rendered.files)


@pytest.mark.slow
def test_skypilot_accepts_the_examples(skypilot):
    assert [skypilot.problem(text) for text in files_of('skypilot')] == [None]


@pytest.mark.slow
def test_sagemaker_accepts_the_examples(monkeypatch):
    """Validated by botocore, which checks before it sends, and by moto, which mocks AWS in this process."""
    import boto3
    from moto import mock_aws

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with mock_aws():
        client = boto3.client('sagemaker')
        for text in files_of('sagemaker'):
            request = json.loads(text)
            client.create_training_job(**request)
            job = client.describe_training_job(TrainingJobName=request['TrainingJobName'])
            del job['AlgorithmSpecification']['MetricDefinitions']  # added by moto
            kept = request.keys() - {'Environment', 'InfraCheckConfig', 'RetryStrategy'}  # which moto does not store
            assert {key: job[key] for key in kept} == {key: request[key] for key in kept}


def test_every_backend_has_an_example():
    assert {load_job_spec(path).backend for path in EXAMPLES} == set(NAMES)
