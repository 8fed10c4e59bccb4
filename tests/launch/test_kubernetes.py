"""Rendered JobSets: valid by the schemas of Kubernetes and JobSet, with the right failure policies."""

import json
import re
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from commands import output_of

from diffusion.cli import main
from diffusion.errors import ExternalError
from diffusion.launch.backends import free_nodes
from diffusion.launch.job_checks import load_job_spec


@pytest.fixture
def manifest(prepare):
    return lambda **changes: yaml.safe_load(prepare('kubernetes', **changes)[1].files['job.yaml'])


VARIANTS = {
    'one node': {'nodes': 1, 'gpus_per_node': 1},
    'stops': {'restart': {'otherwise': 'stop', 'max_restarts': 0}},
    'never stops': {'restart': {'on_exit': {'78': 'retry'}}},
    'odd words': {'env': {'A': 'it\'s $(x) "y"\n', 'B': ''}, 'mounts': {'/a b': '/c d', '/workspace': 'pvc://a/a b'}},
    'probe': {'backend': {'raw': {'container': {'livenessProbe': {'httpGet': {'port': 'health'}}}}}},  # port by name
}


OLDEST = '1.29'
"""Oldest version of Kubernetes whose schema accepts the rendered jobs; 1.28 requires onPodConditions in all rules."""


def test_rendered_manifest_is_valid_for_old_and_new_kubernetes(manifest):
    """Validated by the newest schema in `prepare` and by the oldest here, like the reviewed outputs."""
    reviewed = [
        yaml.safe_load(file.read_text()) for file in (Path(__file__).parent / 'golden').glob('*kubernetes*/*.yaml')
    ]
    assert len(reviewed) == 4
    for each in [*reviewed, *(manifest(**changes) for changes in VARIANTS.values())]:
        for part in each['spec']['replicatedJobs']:
            job = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': 'job'}, **part['template']}
            kubernetes_validate.validate(job, OLDEST, strict=True)


@pytest.mark.parametrize(
    ('raw', 'expected'),
    [
        ({'container': {'securityContext': {'privileged': 'very'}}}, r"raw\.spec.*\.privileged: 'very' is not of type"),
        ({'container': {'unheardOf': 1}}, r"containers\[0\]: .*'unheardOf' was unexpected"),
        ({'job': {'unheardOf': 1}}, r"template\.spec: .*'unheardOf' was unexpected"),
        ({'pod': {'affinity': {'nodeAffinity': {'unheardOf': {}}}}}, r"nodeAffinity: .*'unheardOf' was unexpected"),
        ({'jobset': {'spec': {'network': {'subdomain': 7}}}}, r'backend\.raw\.spec\.network\.subdomain: .* valid'),
        ({'jobset': {'spec': {'ttl_seconds_after_finished': 7}}}, r'spec\.ttl_seconds_after_finished: unknown key'),
        ({'jobset': {'spec': {'replicatedJobs': 7}}}, r'backend\.raw\.spec\.replicatedJobs: .* valid list'),
        ({'jobset': {'spec': {'replicatedJobs': [{'name': 'one'}]}}}, r'replicatedJobs\[0\]\.template: Field required'),
    ],
)
def test_mistakes_in_raw_are_found_by_the_published_schemas(raw, expected, prepare):
    with pytest.raises(AssertionError, match=expected):
        prepare('kubernetes', backend={'raw': raw})


KUBECTL = """#!/bin/bash
echo "called: $*"
[ "$1" = apply ] && grep unheardOf && echo 'error validating data: unknown field "unheardOf"' >&2 && exit 1
exit 0
"""


@pytest.fixture
def kubectl(add_program):
    """Fake kubectl on PATH that validates manifests."""
    return add_program('kubectl', KUBECTL)


def test_free_nodes_have_the_gpus_that_running_pods_leave(write_spec, kubectl):
    def node(name: str, gpus: int, *, ready: str = 'True', **spec) -> dict:
        status = {
            'conditions': [{'type': 'Ready', 'status': ready}],
            'allocatable': {'nvidia.com/gpu': str(gpus)} if gpus else {},
        }
        return {'metadata': {'name': name}, 'spec': spec, 'status': status}

    def pod(node: str, gpus: int) -> dict:
        return {'spec': {'nodeName': node, 'containers': [{'resources': {'limits': {'nvidia.com/gpu': str(gpus)}}}]}}

    nodes = [node('a', 8), node('b', 8), node('c', 8, unschedulable=True), node('d', 8, ready='False'), node('e', 4)]
    nodes.append(node('cpu', 0))
    pods = [pod('b', 1), {'spec': {'containers': [{}]}}, {'spec': {'nodeName': 'e', 'containers': [{}]}}]
    texts = [json.dumps({'items': items}) for items in (nodes, pods)]
    kubectl.write_text("#!/bin/bash\ncase $2 in nodes) echo '{}' ;; *) echo '{}' ;; esac\n".format(*texts))
    specs = [load_job_spec(write_spec('kubernetes', gpus_per_node=count)) for count in (8, 4, 1)]
    assert [free_nodes(spec) for spec in specs] == [1, 3, 3]
    kubectl.write_text('#!/bin/bash\necho Unauthorized >&2; exit 1\n')
    with pytest.raises(ExternalError, match='Unauthorized'):
        free_nodes(specs[0])


def test_kubectl_validates_without_the_extra(write_spec, kubectl, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'kubernetes_validate', None)
    assert 'not validated' not in output_of(capsys, 'launch', write_spec('kubernetes'), '--dry-run')
    path = write_spec('kubernetes', backend={'raw': {'pod': {'unheardOf': 1}}})
    assert main(['launch', str(path), '--dry-run']) == 2
    assert 'backend.raw: kubectl apply --dry-run=client: error validating data' in capsys.readouterr().err


def outcome_of(manifest, *, code=1, disrupted=False):
    """Return the action of a JobSet after a pod failed, by the documented semantics of Kubernetes and JobSet."""
    spec = manifest['spec']
    job = spec['replicatedJobs'][0]['template']['spec']
    assert job['backoffLimit'] == 0
    reason, message = 'BackoffLimitExceeded', 'Job has reached the specified backoff limit'
    for index, rule in enumerate(job.get('podFailurePolicy', {}).get('rules', [])):
        codes = rule.get('onExitCodes')
        found = disrupted if codes is None else (code in codes['values']) == (codes['operator'] == 'In')
        if found:
            assert rule['action'] == 'FailJob'
            what = 'Container main for pod a/b failed with exit code 1' if codes else 'Pod a/b has condition x'
            reason, message = 'PodFailurePolicy', f'{what} matching FailJob rule at index {index}'
            break
    for rule in spec['failurePolicy']['rules']:
        patterns = rule.get('onJobFailureMessagePatterns', [''])
        if reason in rule['onJobFailureReasons'] and any(re.search(each, message) for each in patterns):
            return rule['action']
    return 'RestartJobSet' if spec['failurePolicy']['maxRestarts'] else 'FailJobSet'


def test_user_error_fails_job_set_and_other_failures_restart_it(manifest):
    rendered = manifest(restart={'max_restarts': 7})
    assert outcome_of(rendered, code=78) == 'FailJobSet'
    assert outcome_of(rendered, code=1) == outcome_of(rendered, code=137) == 'RestartJobSet'
    assert rendered['spec']['failurePolicy']['maxRestarts'] == 140, 'the node entry point counts those without progress'


def test_preempted_pods_use_up_no_restarts(manifest):
    rendered = manifest()
    ignoring = 'RestartJobSetAndIgnoreMaxRestarts'
    for code in (1, 75, 78, 137):
        assert outcome_of(rendered, code=code, disrupted=True) == ignoring
    assert outcome_of(rendered, code=75) == outcome_of(rendered, code=76) == ignoring
    rendered = manifest(restart={'on_exit': {'76': 'stop'}})
    assert (outcome_of(rendered, code=75), outcome_of(rendered, code=76)) == (ignoring, 'FailJobSet')
    rendered = manifest(restart={'otherwise': 'stop'})
    assert outcome_of(rendered, code=1) == 'FailJobSet'
    assert outcome_of(rendered, code=137) == outcome_of(rendered, code=143) == 'RestartJobSet', 'killed by Kubernetes'
    assert outcome_of(rendered, code=137, disrupted=True) == ignoring
    rendered = manifest(restart={'max_restarts': 0}, overrides={'trainer.autoresume': False})
    assert outcome_of(rendered, code=75) == outcome_of(rendered, code=75, disrupted=True) == 'FailJobSet'


def test_kubectl_selects_by_label_of_job_set(write_spec, kubectl, capsys):
    path = write_spec('kubernetes', backend={'namespace': 'research'})
    label = '--selector jobset.sigs.k8s.io/jobset-name=job'
    for action, expected in {
        'launch': 'create -f /',
        'status': f'--namespace=research get jobset,jobs,pods {label}',
        'logs': f'--namespace=research logs {label}',
        'cancel': '--namespace=research delete jobset job',
    }.items():
        assert f'called: {expected}' in output_of(capsys, action, path)
