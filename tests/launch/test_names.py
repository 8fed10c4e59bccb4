"""Job names: each backend accepts exactly the names that its scheduler accepts."""

import functools
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from diffusion.launch.backends import backend_of
from diffusion.launch.job_checks import check_jobs, load_job_spec

names = (
    st.from_regex(r'[a-zA-Z0-9._-]{1,70}', fullmatch=True)
    | st.text(max_size=8)
    | st.from_regex(r'[a-z][a-z0-9-]{40,64}[a-z0-9]', fullmatch=True)
)


def is_dns_label(name):
    """Return True for a DNS label of RFC 1035, as in IsDNS1035Label of apimachinery."""
    return len(name) <= 63 and re.fullmatch(r'[a-z]([-a-z0-9]*[a-z0-9])?', name, re.ASCII) is not None


@functools.cache
def training_job_name_limits():
    import botocore.session

    service: Any = botocore.session.get_session().get_service_model('sagemaker')
    return service.operation_model('CreateTrainingJob').input_shape.members['TrainingJobName'].metadata


def is_training_job_name(name):
    limits = training_job_name_limits()
    return len(name) <= limits['max'] and re.fullmatch(limits['pattern'], name) is not None


def is_run_name(name):
    """Return True if mcli accepts the name; it would change any other."""
    from mcli.utils.utils_string_functions import MAX_RUN_NAME_LENGTH, rfc_verification

    return bool(rfc_verification(name, MAX_RUN_NAME_LENGTH, '-'))


def is_task_name(name):
    """Return True for a task name by the rule of sky/task.py. A test below asks SkyPilot itself."""
    return re.fullmatch(r'[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*', name) is not None


def is_cluster_name(name):
    """Return True for a name that a cluster name may start with, by the rule of sky/skylet/constants.py."""
    return re.fullmatch(r'[a-zA-Z]([-_.a-zA-Z0-9]*[a-zA-Z0-9])?', name) is not None


@pytest.fixture(scope='module')
def accepts_name():
    """Function that returns True if a backend accepts a name in an otherwise valid spec."""
    jobs = {}

    def accepts(backend, name, write_spec):
        if backend not in jobs:
            path = write_spec(backend)
            jobs[backend] = check_jobs(load_job_spec(path), path).jobs[0]
        job = replace(jobs[backend], name=name, spec=replace(jobs[backend].spec, name=name))
        return not any(problem.where == 'name' for problem in backend_of(backend).problems([job]))

    return accepts


RULES = {
    # The pod names of two nodes have the same length.
    'kubernetes': lambda name: is_dns_label(f'{name}-main-0-1-abcde') and is_dns_label(name),
    'sagemaker': lambda name: is_training_job_name(f'{name}-20260101-000000') and is_training_job_name(name),
    'mcli': is_run_name,
    'skypilot': lambda name: is_task_name(name) and is_cluster_name(name),
    'slurm': lambda name: re.fullmatch(r'[A-Za-z0-9][A-Za-z0-9._-]{0,63}', name) is not None,
}


EDGES = ['', 'a', '1', '1a', 'a-', 'a\n', 'a_b', 'Ab', 'a--b', 'a---b', 'a._b', 'a_-_b']
EDGES += ['a' * length for length in (47, 48, 49, 50, 51, 56, 57)]


def with_edges(test):
    for name in EDGES:
        test = example(name=name)(test)
    return test


@pytest.mark.parametrize('backend', RULES)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=names)
@with_edges
def test_backend_accepts_exactly_the_names_of_its_scheduler(backend, name, accepts_name, write_spec):
    assert accepts_name(backend, name, write_spec) == RULES[backend](name)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=names)
@with_edges
def test_skypilot_accepts_the_same_names(name, accepts_name, write_spec, skypilot):
    task = yaml.safe_dump({'name': name, 'run': 'true', 'resources': {'infra': 'k8s'}})
    assert accepts_name('skypilot', name, write_spec) == (skypilot.problem(task) is None)
