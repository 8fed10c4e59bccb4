"""The JobSet: strictly what Kubernetes and JobSet know, and what follows a pod's end."""

import copy
import dataclasses
import shutil

import pytest
import yaml

from diffusion.cli import main
from diffusion.launch import environment
from diffusion.launch.backends import kubernetes, kubernetes_types
from diffusion.launch.backends.base import Rendered
from tests.launch.ask_kubernetes import keys_of, problems_of
from tests.launch.specs import changed

FULL = {
    'env': {'A': 'b'},
    'secrets': {'KEY': 'secret/key'},
    'mounts': {'/workspace/runs': 'pvc://runs/folder', '/data': '/nvme'},
    'workdir': '/workspace',
    'schedule': {'priority': 'high', 'time_limit': '3d', 'notice_seconds': 60},
    'backend': {'cpus_per_node': 8, 'memory_per_node': '10Gi', 'service_account': 'trainer', 'namespace': 'research'},
}
STAGES = {'stages': {name: {'overrides': {'name': name}} for name in ('one', 'two')}}


def manifest_of(rendered):
    return yaml.safe_load(rendered.files['job.yaml'])


@pytest.fixture
def manifest(prepare):
    return lambda **changes: manifest_of(prepare('kubernetes', **changes)[1])


def places(value, path=()):
    """The path of every mapping in a document."""
    if isinstance(value, dict):
        yield path
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*path, index))


def at(document, path):
    for part in path:
        document = document[part]
    return document


VARIANTS = {
    'plain': {},
    'full': FULL,
    'chain': STAGES,
    'chain of all': FULL | STAGES,
    'CPUs': {'gpu': None, 'gpus_per_node': 2},
    'one node': {'nodes': 1, 'gpus_per_node': 1},
    'other GPUs': {'backend': {'gpu_resource': 'amd.com/gpu', 'keep_seconds': None}},
    'Kueue': {'schedule': {'queue': 'research', 'priority': 'high'}},
    'stops': {'restart': {'otherwise': 'stop', 'max_restarts': 0}},
    'never stops': {'restart': {'on_exit': {'78': 'retry'}}},
    'odd words': {
        'env': {'A': 'it\'s $(x) "y"\n', 'B': ''},
        'mounts': {'/a b': '/c d', '/workspace': 'pvc://runs/a b'},
    },
    'raw': {
        'backend': {
            'raw': {
                'jobset': {'spec': {'coordinator': {'replicatedJob': 'main', 'jobIndex': 0, 'podIndex': 0}}},
                'job': {'podReplacementPolicy': 'Failed'},
                'pod': {'securityContext': {'fsGroup': 1000}, 'imagePullSecrets': [{'name': 'registry'}]},
                'container': {
                    'resources': {'limits': {'vpc.amazonaws.com/efa': 4, 'hugepages-2Mi': '5Gi'}},
                    'securityContext': {'capabilities': {'add': ['IPC_LOCK']}},
                },
            }
        }
    },
}


FREE = {'labels', 'annotations', 'limits', 'requests', 'nodeSelector'}
"""Mappings whose keys are the user's own."""


def test_an_unknown_key_is_found_wherever_it_is(manifest, monkeypatch):
    monkeypatch.setattr(shutil, 'which', lambda _: None)  # by our own copy of the keys alone
    whole = manifest(**FULL)
    checked = 0
    for path in places(whole):
        if path and path[-1] in FREE:
            continue
        broken = copy.deepcopy(whole)
        at(broken, path)['unheardOf'] = 1
        found = kubernetes.validate(Rendered({'job.yaml': yaml.safe_dump(broken)}, ()))
        assert [problem.where.rsplit('.', 1)[-1] for problem in found] == ['unheardOf'], path
        assert 'unknown key' in found[0].what
        assert problems_of(broken), f'{path}: their own schemas find it as well'
        checked += 1
    assert checked > 30


@pytest.mark.parametrize('variant', VARIANTS)
def test_the_published_schemas_take_it(variant, manifest):
    assert problems_of(manifest(**VARIANTS[variant])) == []


@pytest.mark.parametrize(
    ('raw', 'expected'),
    [
        ({'container': {'securityContext': {'privileged': 'very'}}}, "'very' is not of type 'boolean'"),
        ({'pod': {'affinity': {'nodeAffinity': {'unheardOf': {}}}}}, "'unheardOf' was unexpected"),
        ({'jobset': {'spec': {'network': {'subdomain': 7}}}}, 'subdomain'),
    ],
)
def test_the_published_schemas_find_what_our_copy_leaves_open(raw, expected, manifest):
    whole = manifest()
    spec = whole['spec']['replicatedJobs'][0]['template']['spec']['template']['spec']
    for name, part in (('jobset', whole), ('pod', spec), ('container', spec['containers'][0])):
        part.update(changed(part, raw.get(name, {})))
    assert any(expected in problem for problem in problems_of(whole))


LEFT_OUT = {
    # What the cluster fills in.
    'Metadata': """creationTimestamp deletionGracePeriodSeconds deletionTimestamp finalizers generateName generation
        managedFields ownerReferences resourceVersion selfLink uid""",
    'JobSet': 'status',
    # What a job does not have, and the old name of serviceAccountName.
    'PodSpec': 'ephemeralContainers serviceAccount',
    # What CSI drivers have replaced.
    'Volume': """awsElasticBlockStore azureDisk azureFile cephfs cinder flexVolume flocker gcePersistentDisk gitRepo
        glusterfs photonPersistentDisk portworxVolume quobyte rbd scaleIO storageos vsphereVolume""",
}
"""Keys of theirs that we have no use for."""


@pytest.mark.parametrize('kind', [kind for kind in vars(kubernetes_types).values() if dataclasses.is_dataclass(kind)])
def test_our_copy_of_the_keys_is_theirs(kind):
    ours = {field.name for field in dataclasses.fields(kind)}
    assert ours == keys_of(kind.__doc__.partition(' ')[0].rstrip('.')) - set(LEFT_OUT.get(kind.__name__, '').split())


@pytest.mark.skipif(shutil.which('kubectl') is None, reason='kubectl is not installed')
def test_kubectl_knows_every_key_and_finds_what_our_copy_leaves_open(prepare):
    prepare('kubernetes', **FULL, **STAGES)
    raw = {'pod': {'affinity': {'nodeAffinity': {'unheardOf': {}, 'alsoUnheard': [1]}}}}
    with pytest.raises(
        AssertionError, match=r'backend\.raw\.spec.*affinity\.nodeAffinity\.alsoUnheard: kubectl does not'
    ):
        prepare('kubernetes', backend={'raw': raw})
    with pytest.raises(AssertionError, match=r'kubectl: '):
        prepare('kubernetes', backend={'raw': {'container': {'securityContext': {'privileged': 'very'}}}})


def test_every_node_is_a_pod_that_knows_the_first(manifest):
    job = manifest(nodes=4)['spec']['replicatedJobs'][0]['template']['spec']
    assert (job['parallelism'], job['completions'], job['completionMode'], job['backoffLimit']) == (4, 4, 'Indexed', 0)
    container = job['template']['spec']['containers'][0]
    env = {entry['name']: entry.get('value') for entry in container['env']}
    assert env['DIFFUSION_MASTER_ADDR'] == 'job-main-0-0.job'
    assert (env['DIFFUSION_NODES'], env['DIFFUSION_PROCESSES_PER_NODE']) == ('4', '8')
    assert container['resources']['limits'] == {'nvidia.com/gpu': 8}
    assert {'name': 'shared-memory', 'mountPath': '/dev/shm'} in container['volumeMounts']


def test_a_mistake_in_the_recipe_ends_the_job_set_and_everything_else_restarts_it(manifest):
    spec = manifest(restart={'max_restarts': 7})['spec']
    (rule,) = spec['failurePolicy']['rules']
    assert spec['failurePolicy']['maxRestarts'] == 7
    assert (rule['action'], rule['onJobFailureReasons'][0]) == ('FailJobSet', 'PodFailurePolicy')
    job = spec['replicatedJobs'][0]['template']['spec']
    (pod_rule,) = job['podFailurePolicy']['rules']
    assert pod_rule['action'] == 'FailJob'
    assert pod_rule['onExitCodes'] == {'containerName': 'main', 'operator': 'In', 'values': [78]}
    assert job['template']['spec']['restartPolicy'] == 'Never', 'a pod failure policy needs it'


def test_stopping_at_everything_else_still_lets_kubernetes_end_pods(manifest):
    job = manifest(restart={'otherwise': 'stop'})['spec']['replicatedJobs'][0]['template']['spec']
    codes = job['podFailurePolicy']['rules'][0]['onExitCodes']
    assert (codes['operator'], codes['values']) == ('NotIn', [75, 76, 137, 143])


def test_kueue_gets_the_job_by_one_label(manifest):
    queued = manifest(schedule={'queue': 'research', 'priority': 'high'})
    labels = {'kueue.x-k8s.io/queue-name': 'research', 'kueue.x-k8s.io/priority-class': 'high'}
    assert queued['metadata']['labels'] == labels
    assert 'priorityClassName' not in str(queued), 'Kueue has priorities of its own'
    pod = manifest(schedule={'priority': 'high'})['spec']['replicatedJobs'][0]['template']['spec']['template']['spec']
    assert pod['priorityClassName'] == 'high'


def test_a_pod_knows_its_machine_by_the_name_that_cordon_takes(manifest):
    pod = manifest()['spec']['replicatedJobs'][0]['template']['spec']['template']['spec']
    (machine,) = (entry for entry in pod['containers'][0]['env'] if entry['name'] == environment.MACHINE)
    assert machine['valueFrom'] == {'fieldRef': {'fieldPath': 'spec.nodeName'}}


def test_what_an_operator_must_know_and_cannot_see_is_said(prepare):
    def notes(**changes):
        return ' '.join(prepare('kubernetes', **changes)[1].notes)

    assert 'kubectl cordon' in notes() and 'cordon' not in notes(restart={'on_exit': {'76': 'stop'}})
    assert 'two jobs may wait for ever' in notes() and 'wait for ever' not in notes(nodes=1)
    queued = notes(**STAGES, schedule={'queue': 'research'})
    assert 'keeps the machines of all stages, 4,' in queued and 'JobSet 0.8' in queued


def test_stages_wait_for_one_another(manifest):
    first, second = manifest(**STAGES)['spec']['replicatedJobs']
    assert 'dependsOn' not in first
    assert second['dependsOn'] == [{'name': 'one', 'status': 'Complete'}]


def test_the_users_own_comes_last(manifest):
    raw = {
        'jobset': {'spec': {'ttlSecondsAfterFinished': None, 'suspend': True}},
        'job': {'backoffLimit': 2},
        'pod': {'hostNetwork': True},
        'container': {'resources': {'limits': {'vpc.amazonaws.com/efa': 32}}, 'imagePullPolicy': 'Always'},
    }
    spec = manifest(backend={'raw': raw})['spec']
    job = spec['replicatedJobs'][0]['template']['spec']
    pod = job['template']['spec']
    assert 'ttlSecondsAfterFinished' not in spec and spec['suspend'] is True
    assert (job['backoffLimit'], pod['hostNetwork']) == (2, True)
    assert pod['containers'][0]['resources']['limits'] == {'nvidia.com/gpu': 8, 'vpc.amazonaws.com/efa': 32}


def test_kubectl_is_asked_by_the_label_of_the_job_set(write_spec, tmp_path, capsys, monkeypatch):
    programs = tmp_path / 'bin'
    programs.mkdir()
    (programs / 'kubectl').write_text('#!/bin/bash\necho "called: $*"\n')
    (programs / 'kubectl').chmod(0o755)
    monkeypatch.setenv('PATH', f'{programs}:/usr/bin:/bin')
    path = write_spec('kubernetes', backend={'namespace': 'research'})
    label = '--selector jobset.sigs.k8s.io/jobset-name=job'
    for action, expected in {
        'status': f'--namespace=research get jobset,jobs,pods {label}',
        'logs': f'--namespace=research logs {label}',
        'cancel': '--namespace=research delete jobset job',
    }.items():
        assert main([action, str(path)]) == 0
        assert f'called: {expected}' in capsys.readouterr().out
