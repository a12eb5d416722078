"""What the searches for slow ranks and slow links have in common: the frames they look at, and what they find."""

from dataclasses import dataclass

from pipeline.frames import Signal
from pipeline.watch import Watch
from schemas.alerts import Component, Evidence, Kind

CLOCK_EVIDENCE = "SM clock over peers'"
CLOCK_DROP = 0.95  # of that: above, a clock is as usual
HOST_EVIDENCE = {  # what kept a rank's process from running
    Signal.RUN_QUEUE: "run-queue delay",
    Signal.BLOCKED: "blocked on storage or memory",
    Signal.STOPPED: "stopped by a signal",
    Signal.THROTTLED: "throttled by a CPU quota",
}
LEAST_HOST_RATIO = 0.05  # of the time, beyond all ranks' median: less is what any process meets with
FEWEST_REFERENCE = 5  # frames of the past that are worth comparing with


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A component that may be the cause: excess_s is what it adds to each iteration, z its signal over noise."""

    kind: Kind
    component: Component
    excess_s: float
    z: float
    watch: Watch
    sources: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    claims: frozenset[tuple[str, int]] = frozenset()  # what it explains: ranks, or transfer series
    is_clear: bool = True  # more frames would not say more: nobody else explains what was seen, and ranks do not wander


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The frames to judge, [start, stop), and those to compare with, [reference_start, reference_stop), maybe none."""

    start: int
    stop: int
    reference_start: int = 0
    reference_stop: int = 0

    @property
    def has_reference(self) -> bool:
        """Whether there is a past to compare with."""
        return self.reference_stop - self.reference_start >= FEWEST_REFERENCE
