"""What Kubernetes' and JobSet's published schemas say of a JobSet, and which keys they know."""

import kubernetes_validate
from kubeflow_trainer_api import models

VERSIONS = ('1.29', kubernetes_validate.latest_version())
"""Of Kubernetes: the oldest whose schema takes what we render (1.28 wants onPodConditions in all rules), the newest."""
PREFIXES = ('JobsetV1alpha2', 'IoK8sApiBatchV1', 'IoK8sApiCoreV1', 'IoK8sApimachineryPkgApisMetaV1')


def problems_of(manifest):
    """Unknown keys and wrong types."""
    found = []
    try:
        read = models.JobsetV1alpha2JobSet.from_dict(manifest)
        # The models drop what they do not know.
        if read is None or read.to_dict() != manifest:
            found.append('JobSet: its models have no place for some of it')
    except ValueError as error:
        found.append(f'JobSet: {error}')
    for part in manifest['spec']['replicatedJobs']:
        job = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': 'job'}, **part['template']}
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(job, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                found.append(f'Kubernetes {version}: {error.message}')
    return found


def keys_of(kind):
    """The keys of an object, as PodSpec."""
    model = next(getattr(models, prefix + kind) for prefix in PREFIXES if hasattr(models, prefix + kind))
    return {field.alias or name for name, field in model.model_fields.items()}
