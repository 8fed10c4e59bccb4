"""Names: what a back end takes is what its scheduler takes, by the scheduler's own rules."""

import functools
import re
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from diffusion.launch.backends import backend_of, sagemaker
from diffusion.launch.job_checks import check_jobs, load_job_spec

names = (
    st.from_regex(r'[a-zA-Z0-9._-]{1,70}', fullmatch=True)
    | st.text(max_size=8)
    | st.from_regex(r'[a-z][a-z0-9-]{40,64}[a-z0-9]', fullmatch=True)
)


def is_dns_label(name):
    """RFC 1035, as apimachinery's IsDNS1035Label has it."""
    return len(name) <= 63 and re.fullmatch(r'[a-z]([-a-z0-9]*[a-z0-9])?', name, re.ASCII) is not None


@functools.cache
def limits_of_a_training_job():
    """Of its name, in SageMaker's own service model."""
    import botocore.session

    service: Any = botocore.session.get_session().get_service_model('sagemaker')
    return service.operation_model('CreateTrainingJob').input_shape.members['TrainingJobName'].metadata


def is_training_job(name):
    limits = limits_of_a_training_job()
    return len(name) <= limits['max'] and re.fullmatch(limits['pattern'], name) is not None


def is_run(name):
    """As mcli itself judges, which would otherwise change the name."""
    from mcli.utils.utils_string_functions import MAX_RUN_NAME_LENGTH, rfc_verification

    return bool(rfc_verification(name, MAX_RUN_NAME_LENGTH, '-'))


def is_task(name):
    """As sky/task.py has it; SkyPilot itself is asked below."""
    return re.fullmatch(r'[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*', name) is not None


def is_cluster(name):
    """As sky/skylet/constants.py has it: a job's machines are a cluster whose name begins with the job's."""
    return re.fullmatch(r'[a-zA-Z]([-_.a-zA-Z0-9]*[a-zA-Z0-9])?', name) is not None


@pytest.fixture(scope='module')
def judge():
    """Whether a back end takes a name, everything else being sound."""
    jobs = {}

    def takes(backend, name, write_spec):
        from dataclasses import replace

        if backend not in jobs:
            path = write_spec(backend)
            jobs[backend] = check_jobs(load_job_spec(path), path).jobs
        spec = replace(jobs[backend][0].spec, name=name)
        job = replace(jobs[backend][0], name=name, spec=spec)
        found = backend_of(backend).problems([job])
        return not any(problem.where == 'name' for problem in found)

    return takes


RULES = {
    # Two nodes: the second pod's name is as long as the first's.
    'kubernetes': lambda name: is_dns_label(f'{name}-main-0-1-abcde') and is_dns_label(name),
    'sagemaker': lambda name: is_training_job(f'{name}-20260101-000000') and is_training_job(name),
    'mcli': is_run,
    'skypilot': lambda name: is_task(name) and is_cluster(name),
    'slurm': lambda name: re.fullmatch(r'[A-Za-z0-9][A-Za-z0-9._-]{0,63}', name) is not None,
}


EDGES = [
    'a',
    '1a',
    'a-',
    '',
    'a\n',
    'a_b',
    'Ab',
    'a' * 50,
    'a' * 51,
    'a' * 47,
    'a' * 48,
    'a' * 49,
    'a' * 56,
    'a' * 57,
    'a--b',
    'a---b',
    'a._b',
    'a_-_b',
    '1',
]


def with_edges(test):
    for name in EDGES:
        test = example(name=name)(test)
    return test


@pytest.mark.parametrize('backend', RULES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=names)
@with_edges
def test_a_back_end_takes_the_names_that_its_scheduler_takes(backend, name, judge, write_spec):
    assert judge(backend, name, write_spec) == RULES[backend](name)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=names)
@with_edges
def test_skypilot_itself_takes_the_names_that_we_take(name, judge, write_spec, skypilot):
    task = yaml.safe_dump({'name': name, 'run': 'true', 'resources': {'infra': 'k8s'}})
    assert judge('skypilot', name, write_spec) == (skypilot.problem(task) is None)


def test_the_time_that_sagemaker_appends_is_reckoned_with():
    assert sagemaker.MAX_NAME == 47
