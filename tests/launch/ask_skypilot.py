"""What SkyPilot itself says of tasks; run by an interpreter that has it, which is not that of the tests.

SkyPilot and Composer want other versions of the same packages, and SkyPilot takes seconds to import: one process
answers all questions. The first line it writes is what SkyPilot knows; then each line of JSON on stdin, a file's text,
is answered by one on stdout, what is wrong with it or null.
"""
# pyright: reportMissingImports=false

import json
import os
import sys

answers = os.fdopen(os.dup(1), 'w', buffering=1)
os.dup2(2, 1)  # SkyPilot prints what it does

from sky.jobs import utils as jobs_utils  # noqa: E402
from sky.utils import common_utils, dag_utils, registry, schemas  # noqa: E402


def known():
    """The keys of a task and of what is in it, and the names of strategies."""
    resources = schemas.get_resources_schema()
    recovery = resources['properties']['job_recovery']['anyOf'][1]
    found = {'Task': schemas.get_task_schema(), 'Resources': resources, 'JobRecovery': recovery}
    keys = {kind: sorted(schema['properties']) for kind, schema in found.items()}
    return keys | {'strategies': sorted(registry.JOBS_RECOVERY_STRATEGY_REGISTRY)}


def problem_of(text):
    """By what `sky jobs launch` does with a file before it asks a cloud."""
    try:
        for task in dag_utils.load_dag_from_yaml_str(text).tasks:
            # Not Task.validate, which fetches a list of what clouds offer.
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
