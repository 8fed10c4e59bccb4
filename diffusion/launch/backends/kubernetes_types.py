"""Kubernetes' objects as far as a job needs them: the fields are the keys, so that an unknown one is found offline.

From jobset.x-k8s.io/v1alpha2, batch/v1 and core/v1. What is deeper than a job usually goes is Any; what Kubernetes
fills in itself, and what it has given up, is left out.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class Metadata:
    """ObjectMeta."""

    name: str | None = None
    namespace: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


@dataclass
class FieldRef:
    """ObjectFieldSelector."""

    fieldPath: str
    apiVersion: str | None = None


@dataclass
class KeyRef:
    """SecretKeySelector and ConfigMapKeySelector."""

    name: str
    key: str
    optional: bool | None = None


@dataclass
class EnvSource:
    """EnvVarSource."""

    fieldRef: FieldRef | None = None
    secretKeyRef: KeyRef | None = None
    configMapKeyRef: KeyRef | None = None
    fileKeyRef: Any = None
    resourceFieldRef: Any = None


@dataclass
class EnvVar:
    """EnvVar."""

    name: str
    value: str | None = None
    valueFrom: EnvSource | None = None


@dataclass
class Resources:
    """ResourceRequirements."""

    limits: dict[str, str | int] = field(default_factory=dict)
    requests: dict[str, str | int] = field(default_factory=dict)
    claims: list[Any] = field(default_factory=list)


@dataclass
class VolumeMount:
    """VolumeMount."""

    name: str
    mountPath: str
    subPath: str | None = None
    subPathExpr: str | None = None
    readOnly: bool | None = None
    recursiveReadOnly: str | None = None
    mountPropagation: str | None = None


@dataclass
class Container:
    """Container."""

    name: str
    image: str | None = None
    command: list[str] = field(default_factory=list)
    args: list[str] = field(default_factory=list)
    workingDir: str | None = None
    env: list[EnvVar] = field(default_factory=list)
    envFrom: list[Any] = field(default_factory=list)
    resources: Resources | None = None
    volumeMounts: list[VolumeMount] = field(default_factory=list)
    volumeDevices: list[Any] = field(default_factory=list)
    ports: list[Any] = field(default_factory=list)
    imagePullPolicy: Literal['Always', 'IfNotPresent', 'Never'] | None = None
    securityContext: Any = None
    lifecycle: Any = None
    livenessProbe: Any = None
    readinessProbe: Any = None
    startupProbe: Any = None
    terminationMessagePath: str | None = None
    terminationMessagePolicy: Literal['File', 'FallbackToLogsOnError'] | None = None
    restartPolicy: str | None = None
    restartPolicyRules: list[Any] = field(default_factory=list)
    resizePolicy: Any = None
    stdin: bool | None = None
    stdinOnce: bool | None = None
    tty: bool | None = None


@dataclass
class EmptyDir:
    """EmptyDirVolumeSource."""

    medium: str | None = None
    sizeLimit: str | None = None


@dataclass
class Claim:
    """PersistentVolumeClaimVolumeSource."""

    claimName: str
    readOnly: bool | None = None


@dataclass
class HostPath:
    """HostPathVolumeSource."""

    path: str
    type: str | None = None


@dataclass
class Volume:
    """Volume."""

    name: str
    emptyDir: EmptyDir | None = None
    persistentVolumeClaim: Claim | None = None
    hostPath: HostPath | None = None
    configMap: Any = None
    csi: Any = None
    downwardAPI: Any = None
    ephemeral: Any = None
    fc: Any = None
    image: Any = None
    iscsi: Any = None
    nfs: Any = None
    projected: Any = None
    secret: Any = None


@dataclass
class Toleration:
    """Toleration."""

    key: str | None = None
    operator: Literal['Exists', 'Equal'] | None = None
    value: str | None = None
    effect: Literal['NoSchedule', 'PreferNoSchedule', 'NoExecute'] | None = None
    tolerationSeconds: int | None = None


@dataclass
class PodSpec:
    """PodSpec."""

    containers: list[Container]
    restartPolicy: Literal['Never', 'OnFailure']
    initContainers: list[Container] = field(default_factory=list)
    volumes: list[Volume] = field(default_factory=list)
    terminationGracePeriodSeconds: int | None = None
    activeDeadlineSeconds: int | None = None
    nodeSelector: dict[str, str] = field(default_factory=dict)
    tolerations: list[Toleration] = field(default_factory=list)
    affinity: Any = None
    topologySpreadConstraints: Any = None
    priorityClassName: str | None = None
    priority: int | None = None
    preemptionPolicy: str | None = None
    schedulerName: str | None = None
    schedulingGates: Any = None
    schedulingGroup: Any = None
    serviceAccountName: str | None = None
    automountServiceAccountToken: bool | None = None
    imagePullSecrets: list[dict[str, str]] = field(default_factory=list)
    securityContext: Any = None
    hostNetwork: bool | None = None
    hostIPC: bool | None = None
    hostPID: bool | None = None
    hostUsers: bool | None = None
    hostname: str | None = None
    hostnameOverride: str | None = None
    subdomain: str | None = None
    hostAliases: Any = None
    setHostnameAsFQDN: bool | None = None
    dnsPolicy: str | None = None
    dnsConfig: Any = None
    shareProcessNamespace: bool | None = None
    runtimeClassName: str | None = None
    overhead: dict[str, Any] = field(default_factory=dict)
    readinessGates: Any = None
    enableServiceLinks: bool | None = None
    nodeName: str | None = None
    os: Any = None
    resourceClaims: Any = None
    resources: Resources | None = None


@dataclass
class PodTemplate:
    """PodTemplateSpec."""

    spec: PodSpec
    metadata: Metadata | None = None


@dataclass
class OnExitCodes:
    """PodFailurePolicyOnExitCodesRequirement."""

    operator: Literal['In', 'NotIn']
    values: list[int]
    containerName: str | None = None


@dataclass
class PodFailureRule:
    """PodFailurePolicyRule."""

    action: Literal['FailJob', 'FailIndex', 'Ignore', 'Count']
    onExitCodes: OnExitCodes | None = None
    onPodConditions: list[Any] = field(default_factory=list)


@dataclass
class PodFailurePolicy:
    """PodFailurePolicy."""

    rules: list[PodFailureRule]


@dataclass
class KubernetesJobSpec:
    """JobSpec of batch/v1."""

    template: PodTemplate
    parallelism: int | None = None
    completions: int | None = None
    completionMode: Literal['Indexed', 'NonIndexed'] | None = None
    backoffLimit: int | None = None
    backoffLimitPerIndex: int | None = None
    maxFailedIndexes: int | None = None
    activeDeadlineSeconds: int | None = None
    podFailurePolicy: PodFailurePolicy | None = None
    podReplacementPolicy: Literal['TerminatingOrFailed', 'Failed'] | None = None
    successPolicy: Any = None
    suspend: bool | None = None
    ttlSecondsAfterFinished: int | None = None
    managedBy: str | None = None
    manualSelector: bool | None = None
    selector: Any = None


@dataclass
class JobTemplate:
    """JobTemplateSpec."""

    spec: KubernetesJobSpec
    metadata: Metadata | None = None


@dataclass
class DependsOn:
    """DependsOn of a replicated job."""

    name: str
    status: Literal['Ready', 'Complete']


@dataclass
class ReplicatedJob:
    """ReplicatedJob."""

    name: str
    template: JobTemplate
    replicas: int | None = None
    groupName: str | None = None
    dependsOn: list[DependsOn] = field(default_factory=list)


@dataclass
class Network:
    """Network."""

    enableDNSHostnames: bool | None = None
    subdomain: str | None = None
    publishNotReadyAddresses: bool | None = None


@dataclass
class FailureRule:
    """FailurePolicyRule."""

    name: str
    action: Literal[
        'FailJobSet',
        'RestartJobSet',
        'RestartJobSetAndIgnoreMaxRestarts',
        'RestartJob',
        'RestartJobAndIgnoreMaxRestarts',
    ]
    onJobFailureReasons: list[
        Literal[
            'BackoffLimitExceeded',
            'DeadlineExceeded',
            'FailedIndexes',
            'MaxFailedIndexesExceeded',
            'PodFailurePolicy',
        ]
    ] = field(default_factory=list)
    onJobFailureMessagePatterns: list[str] = field(default_factory=list)
    targetReplicatedJobs: list[str] = field(default_factory=list)


@dataclass
class FailurePolicy:
    """FailurePolicy."""

    maxRestarts: int | None = None
    restartStrategy: Literal['Recreate', 'BlockingRecreate', 'InPlaceRestart'] | None = None
    rules: list[FailureRule] = field(default_factory=list)


@dataclass
class SuccessPolicy:
    """SuccessPolicy."""

    operator: Literal['All', 'Any']
    targetReplicatedJobs: list[str] = field(default_factory=list)


@dataclass
class Coordinator:
    """Coordinator."""

    replicatedJob: str
    jobIndex: int | None = None
    podIndex: int | None = None


@dataclass
class JobSetSpec:
    """JobSetSpec."""

    replicatedJobs: list[ReplicatedJob]
    network: Network | None = None
    successPolicy: SuccessPolicy | None = None
    failurePolicy: FailurePolicy | None = None
    startupPolicy: Any = None
    suspend: bool | None = None
    coordinator: Coordinator | None = None
    managedBy: str | None = None
    ttlSecondsAfterFinished: int | None = None
    volumeClaimPolicies: list[Any] = field(default_factory=list)


@dataclass
class JobSet:
    """JobSet."""

    apiVersion: Literal['jobset.x-k8s.io/v1alpha2']
    kind: Literal['JobSet']
    metadata: Metadata
    spec: JobSetSpec
