"""What came of one episode: all that scoring reads."""

import msgspec

from benchmarks.quality.answers import Answer, Said
from schemas.alerts import ComponentName, Kind, Resolution, Severity


class Opening(msgspec.Struct, kw_only=True):
    """An incident from its firing to its resolution; iterations are those of the whole job."""

    kind: Kind
    candidates: frozenset[ComponentName]
    severity: Severity  # the gravest that it reached
    onset: int
    detected: int  # the last iteration known when it first had a severity above information, else when it fired
    detected_s: float  # when the record came that made it known, since the scenario's epoch
    ratio: float
    resolved: int | None = None
    resolution: Resolution | None = None
    also: tuple[Said, ...] = ()  # what else it may mean, where whoever said it claims no kind
    unreported: int = 0  # ranks that it says no agent reports


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """An episode, what is right about it, and what was said."""

    class_name: str
    seed: int
    layout: str
    setting: str
    ranks: int
    iterations: int
    sigma: float
    flush_s: float
    answers: tuple[Answer, ...]
    hints: tuple[Kind, ...]  # information about the workload itself that is due
    openings: tuple[Opening, ...]
    unseen: dict[str, int]  # what the stages say that they could not see
    unreported: int = 0  # ranks that no agent reports, in truth
    lost_batches: int = 0  # that never arrived, or arrived without their events
