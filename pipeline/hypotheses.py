"""What the judge considered, as it says it to whoever asks for an explanation: each thought with its numbers."""

from dataclasses import dataclass
from enum import StrEnum

from schemas.alerts import ComponentName, Kind


class Question(StrEnum):
    """What was asked of the job, in the order in which it is asked in one iteration."""

    CHANGE = "is the job slower than it was?"
    LASTS = "does the incident last?"
    CULPRIT = "who made it slower?"
    PEERS = "is anybody slower than its equals?"
    BALANCE = "is the job's own work uneven?"


class Verdict(StrEnum):
    """What became of a hypothesis in one iteration."""

    ACCUSED = "accused"
    INFORMED = "told as information"  # too small to accuse anybody
    CONFIRMED = "confirmed"
    UNDECIDED = "undecided"
    REFUTED = "refuted"
    SUSPECTED = "suspected"  # within all bounds, and asked no further in this iteration
    WAITING = "not clear yet"
    ABSORBED = "absorbed by slack"
    CLAIMED = "explained by an open incident"
    OUTSCORED = "outscored"
    BELOW = "below its bounds"
    PASSED = "over by itself"
    LASTS = "lasts"
    GOOD = "as good as healthy"
    RESTATED = "restated"
    RESOLVED = "resolved"


def seconds_text(value_s: float) -> str:
    """Return a duration as people read it: below a second in milliseconds."""
    return f"{value_s * 1e3:z.1f} ms" if abs(value_s) < 1 else f"{value_s:.2f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One number that a verdict stands on, and the bound that it was held against, if any."""

    what: str
    value: float
    unit: str  # "s", "ratio", "share", "sigma", "nats", "count"
    bound: float | None = None
    at_most: bool = False  # the bound holds from above

    @property
    def is_met(self) -> bool:
        """Whether the number is on the side of its bound that speaks for the hypothesis; without a bound it is."""
        if self.bound is None:
            return True
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    @property
    def nearness(self) -> float:
        """How far from where nothing is wrong (a ratio of 1, else 0) towards the bound: below 1.0 it is missed."""
        if self.bound is None:
            return float("inf")
        healthy = 1.0 if self.unit == "ratio" else 0.0
        if self.bound == healthy:
            return float("inf") if self.is_met else 0.0
        return (self.value - healthy) / (self.bound - healthy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """One thing that may be wrong, as of one iteration: `score` is what hypotheses of its sort are ranked by."""

    job_id: str
    incarnation: str
    iteration: int
    question: Question
    kind: Kind
    candidates: tuple[ComponentName, ...]
    excess_s: float  # that it adds to each iteration; NaN where that was not asked
    score: float
    score_unit: str  # "sigma": signal over noise; "nats": logarithm of likelihood gained over "nothing is slow"
    verdict: Verdict
    reason: str
    numbers: tuple[Number, ...] = ()
    fingerprint: str | None = None  # of the incident, where there is one

    @property
    def missed(self) -> tuple[Number, ...]:
        """The bounds that it did not reach."""
        return tuple(number for number in self.numbers if not number.is_met)

    @property
    def closest(self) -> Number | None:
        """The bound that decided, or that was nearest to deciding otherwise."""
        bounded = [number for number in self.numbers if number.bound is not None]
        return min(bounded, key=lambda number: number.nearness, default=None)
