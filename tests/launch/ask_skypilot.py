"""Server that validates tasks with SkyPilot itself, run by an interpreter that has SkyPilot installed.

SkyPilot and Composer need different versions of the same packages, and SkyPilot takes seconds to import, so one process
answers all requests. The first line of output holds the keys that SkyPilot knows. Each line of JSON on stdin, the text
of a file, is then answered by one line on stdout: an error or null.
"""
# pyright: reportMissingImports=false

import json
import os
import sys

answers = os.fdopen(os.dup(1), 'w', buffering=1)
os.dup2(2, 1)  # SkyPilot logs to stdout, which here carries the answers

from sky.jobs import utils as jobs_utils  # noqa: E402
from sky.utils import common_utils, dag_utils, registry, schemas  # noqa: E402


def known():
    """Return the keys of tasks and their parts, and the names of recovery strategies."""
    resources = schemas.get_resources_schema()
    recovery = resources['properties']['job_recovery']['anyOf'][1]
    found = {'Task': schemas.get_task_schema(), 'Resources': resources, 'JobRecovery': recovery}
    keys = {kind: sorted(schema['properties']) for kind, schema in found.items()}
    return keys | {'strategies': sorted(registry.JOBS_RECOVERY_STRATEGY_REGISTRY)}


def problem_of(text):
    """Return the error that `sky jobs launch` would report before it contacts a cloud, or None."""
    try:
        for task in dag_utils.load_dag_from_yaml_str(text).tasks:
            # Task.validate() would download a catalog of cloud offerings.
            task.validate_name()
            task.validate_run()
            task.expand_and_validate_file_mounts()
            common_utils.check_cluster_name_is_valid(jobs_utils.generate_managed_job_cluster_name(task.name, 1))
    except Exception as error:
        return f'{type(error).__name__}: {error}'
    return None


print(json.dumps(known()), file=answers)
for line in sys.stdin:
    print(json.dumps(problem_of(json.loads(line))), file=answers)
