"""What the pipeline concludes: one Alert per change of an incident, as JSON on the alerts topic."""

import hashlib
from enum import StrEnum

import msgspec

ALERT_SCHEMA_VERSION = 1


class AlertState(StrEnum):
    """Where an incident stands."""

    FIRING = "firing"
    RESOLVED = "resolved"


class Severity(StrEnum):
    """`info` accuses no component."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class Kind(StrEnum):
    """What is wrong."""

    SLOW_GPU = "slow_gpu"
    SLOW_HOST = "slow_host"
    SLOW_RANK = "slow_rank"  # late; GPU or host are not separable with the sensors at hand
    SLOW_LINK = "slow_link"
    SLOW_JOB = "slow_job"  # slower as a whole, or slower and the component cannot be known
    STAGE_IMBALANCE = "stage_imbalance"
    DATA_IMBALANCE = "data_imbalance"
    HANG = "hang"


class Resolution(StrEnum):
    """Why an incident ended."""

    RECOVERED = "recovered"
    JOB_ENDED = "job_ended"
    SUPERSEDED = "superseded"  # another incident explains it
    LOST_SIGHT = "lost_sight"  # the sensors that saw it fell silent: unknown, not healthy


class ComponentType(StrEnum):
    """What sort of thing is accused."""

    GPU = "gpu"
    HOST = "host"
    RANK = "rank"
    LINK = "link"
    STAGE = "stage"
    JOB = "job"


class ComponentName(msgspec.Struct, frozen=True, kw_only=True, order=True, omit_defaults=True):
    """What names one component: only the fields that apply are set.

    A GPU has `node` and `gpu` (its UUID, else its index as text); a host `node`; a rank `rank` (and `node`); a link
    `node` and `peer` (two nodes in sorted order), or `node` alone for that node's network interface, or `node` equal to
    `peer` for the GPU interconnect inside it; a pipeline stage `stage`, from 0; a job nothing further.
    """

    type: ComponentType
    node: str = ""
    gpu: str = ""
    rank: int | None = None
    peer: str = ""
    comm_id: str = ""
    stage: int | None = None


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """The accused, and the smallest set of candidates that the sensors can tell apart (often of one: itself)."""

    type: ComponentType
    name: ComponentName
    candidates: tuple[ComponentName, ...]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One number that the verdict stands on, beside what it was compared with."""

    what: str
    value: float
    unit: str
    reference: float | None = None
    source: str = ""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One revision of one incident. Consumers deduplicate by (fingerprint, revision)."""

    schema_version: int
    fingerprint: str
    revision: int
    state: AlertState
    severity: Severity
    job_id: str
    incarnation: str
    kind: Kind
    component: Component
    onset_iteration: int
    detected_iteration: int
    as_of_iteration: int  # the iteration after which this revision was made
    resolved_iteration: int | None
    resolution: Resolution | None
    onset_time_ns: int
    as_of_time_ns: int
    slowdown_ratio: float  # iteration time over what it would be without the incident; 1.0 is healthy
    lost_gpu_s: float
    confidence: float
    sources: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    causes: tuple[str, ...]
    advice: str


def fingerprint(job_id: str, kind: Kind, component: Component) -> str:
    """Name an incident: the same for the same job, kind and set of candidates, whatever the incarnation."""
    content = msgspec.json.encode([job_id, kind, sorted(component.candidates or (component.name,))])
    return hashlib.blake2b(content, digest_size=8).hexdigest()
