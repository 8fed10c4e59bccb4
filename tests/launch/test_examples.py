"""Rendered jobs: the examples in yamls/launch and jobs with every key are rendered and priced offline as reviewed."""

import json
from pathlib import Path

import pytest
import yaml
from commands import output_of

from diffusion.launch.backends import NAMES
from diffusion.launch.job_checks import load_job_spec
from tests.golden import check_golden
from tests.launch.specs import ABSENT, changed

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / 'golden'
EXAMPLES = sorted((ROOT / 'yamls' / 'launch').glob('*.yaml'))


@pytest.fixture
def rendering_of(tmp_path, capsys, monkeypatch):
    """Function that returns the files of a dry run and what it prints, without warnings: they depend on the machine."""
    monkeypatch.delenv('WANDB_API_KEY', raising=False)
    monkeypatch.setenv('DIFFUSION_WORKING_FOLDER', '/working')

    def rendering(path):
        printed = output_of(capsys, 'launch', path, '--dry-run', '--out', tmp_path / 'jobs')
        lines = [line for line in printed.splitlines(keepends=True) if not line.startswith('warning: ')]
        files = {file.name: file.read_text(encoding='utf-8') for file in (tmp_path / 'jobs').iterdir()}
        return files | {'dry-run.txt': ''.join(lines).replace(f'{path.parent}/', '')}

    return rendering


@pytest.mark.parametrize('path', EXAMPLES, ids=lambda path: path.stem)
def test_example_is_rendered_and_priced_as_reviewed(path, rendering_of):
    check_golden(GOLDEN / path.stem, rendering_of(path))


COMMON = {
    'stages': {
        'one': {
            'overrides': {'name': 'one', 'loggers': {'wandb.tags': ['${oc.env:A}']}},
            'nodes': 4,
            'time_limit': '90s',
        },
        'two': {
            'recipe': 'yamls/small.yaml',
            'overrides': {'streams.photos.local': 'photos', 'eval_streams.photos.local': 'photos'},
        },
    },
    'overrides': {'runs_dir': '/runs', 'seed': 5},
    'env': {'A': "it's"},
    'secrets': {'KEY': None, 'OTHER': None},
    'restart': {'max_restarts': 7, 'on_exit': {'3': 'retry', '75': 'elsewhere', '76': 'stop'}, 'otherwise': 'stop'},
    'preflight': 'deep',
    'hang_seconds': 600,
    'master_port': 12345,
    'workdir': '/work',
    'price_usd_per_gpu_hour': 1.5,
}
SECRETS = {'KEY': 'store/key', 'OTHER': 'other/key'}
CPU = {'gpu': None, 'gpus_per_node': 2, 'price_usd_per_gpu_hour': None}
EVERY_KEY = {
    'kubernetes': {
        'secrets': ABSENT,
        'restart': {'on_exit': ABSENT, 'otherwise': ABSENT, 'standby': True},
        'schedule': {'queue': 'research', 'priority': 'high', 'time_limit': '25h', 'notice_seconds': 60},
        'mounts': {'/workspace/runs': ABSENT, '/runs': 'pvc://runs/a/b', '/data': '/nvme'},
        'backend': {
            'namespace': 'research',
            'gpu_resource': 'amd.com/gpu',
            'cpus_per_node': 8,
            'memory_per_node': '10Gi',
            'shared_memory': '1Gi',
            'service_account': 'trainer',
            'keep_seconds': 60,
            'raw': {
                'jobset': {'spec': {'suspend': True}},
                'job': {'backoffLimit': 2, 'podReplacementPolicy': 'Failed'},
                'pod': {'hostNetwork': True},
                'container': {'resources': {'limits': {'memory': None, 'vpc.amazonaws.com/efa': 4}}},
            },
        },
    },
    'kubernetes-cpu': CPU
    | {
        'secrets': SECRETS,
        'workdir': ABSENT,
        'stages': ABSENT,
        'schedule': {'priority': 'high'},
        'mounts': {'/runs': 'pvc://runs'},
        'backend': {'keep_seconds': None},
    },
    'local': CPU
    | {
        'stages': {'one': {'time_limit': ABSENT, 'nodes': 1}},
        'overrides': {'runs_dir': 's3://bucket/runs'},
    },
    'slurm': {
        'stages': {'two': {'time_limit': '36h'}},
        'image': 'registry.example.com#diffusion:latest',
        'schedule': {'queue': 'gpu', 'priority': 'high', 'preemptible': True, 'notice_seconds': 60},
        'mounts': {'/runs': '/shared/runs', '/data': '/nvme'},
        'backend': {
            'account': 'research',
            'gpu_type': 'a100',
            'cpus_per_node': 8,
            'logs': 'other-logs',
            'setup': '\nmodule load cuda\n',
            'raw': {'mem': '900G', 'contiguous': True, 'open-mode': None, 'requeue': False},
        },
    },
    'sagemaker': {
        'secrets': SECRETS,
        'restart': {'max_restarts': 99},
        'workdir': ABSENT,
        'overrides': {'runs_dir': '/opt/ml/input/data/shared/runs'},
        'schedule': {'time_limit': '2d', 'preemptible': True},
        'mounts': {'/opt/ml/input/data/shared': 'fsx://fs-0123456789abcdef0/b', '/workspace/runs': 's3://bucket/runs'},
        'backend': {
            'instance_type': 'ml.p4d.24xlarge',
            'volume_gb': 100,
            'subnets': ['subnet-1'],
            'security_groups': ['sg-1'],
            'infra_check': False,
            'raw': {'Tags': [{'Key': 'team', 'Value': 'it is'}]},
        },
    },
    'skypilot': {
        'stages': {'one': {'time_limit': ABSENT}},
        'overrides': {'runs_dir': '/runs/${oc.env:A}'},
        'schedule': {'priority': -1000, 'preemptible': True},
        'mounts': {'/runs': 'volume://runs', '/data': 's3://b/data', '/more': 'gs://b/more'},
        'backend': {
            'infra': 'aws/us-east-1',
            'disk_gb': 512,
            'network_tier': 'best',
            'recovery': 'FAILOVER',
            'raw': {'setup': 'nvidia-smi', 'resources': {'labels': {'team': 'x'}}},
        },
    },
    'mcli': {
        'schedule': {'queue': 'cluster', 'priority': 'low', 'preemptible': True, 'time_limit': '36h'},
        'backend': {'gpu_type': 'a100_sxm', 'raw': {'metadata': {'team': 'x'}}},
    },
}


@pytest.mark.parametrize('name', EVERY_KEY)
def test_job_with_every_key_is_rendered_as_reviewed(name, write_spec, rendering_of):
    path = write_spec(name.partition('-')[0], **changed(COMMON, EVERY_KEY[name]))
    files = rendering_of(path)
    for file in [file for file in files if file.endswith(('.yaml', '.json'))]:
        shorter = {'sort_keys': False, 'width': 150, 'default_flow_style': None}
        files[file] = yaml.safe_dump_all(yaml.safe_load_all(files[file]), **shorter)
    check_golden(GOLDEN / f'every-key-{name}', files)


@pytest.mark.slow
def test_skypilot_accepts_the_examples(skypilot):
    assert [skypilot.problem(file.read_text()) for file in GOLDEN.glob('*-skypilot/*.yaml')] == [None, None]


@pytest.mark.slow
def test_sagemaker_accepts_the_examples(aws):
    """Validated by botocore, which checks before it sends, and by moto."""
    import boto3

    client = boto3.client('sagemaker')
    for file in GOLDEN.glob('phase1-sagemaker/*.json'):
        request = json.loads(file.read_text())
        client.create_training_job(**request)
        job = client.describe_training_job(TrainingJobName=request['TrainingJobName'])
        del job['AlgorithmSpecification']['MetricDefinitions']  # added by moto
        kept = request.keys() - {'Environment', 'InfraCheckConfig', 'RetryStrategy'}  # which moto does not store
        assert {key: job[key] for key in kept} == {key: request[key] for key in kept}


def test_every_backend_has_an_example():
    assert {load_job_spec(path).backend for path in EXAMPLES} == set(NAMES)
