"""What every baseline promises: what was observed of one job in, the points at which it would have said "slow" out.

A baseline keeps its authors' rule and defaults. What it asks for is stated in `needs`; where a recording lacks that, it
has no opinion and raises Unseen. The first iterations are left out for all alike (compilation and caches make them
long), and those that want unit-free values get ratios to the first ones judged.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from detectors.robust import wide_scale
from schemas.table import BoolArray, FloatArray, IntArray

WARM_UP = 10  # iterations left out at the start, as the judge does
REFERENCE = 30  # iterations from which level and spread are learnt, by those that need them
_RECENT = 10  # iterations that tell in which direction a change went, where a baseline does not say when it was


class Input(Enum):
    """What a baseline may ask for."""

    DURATION = "iteration time of the job"
    COMPUTE = "computation time of each rank"
    COMMUNICATION = "time of each rank inside collectives, waiting included"


class Unseen(Exception):
    """A recording lacks what the baseline asks for."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Observed:
    """One job: n iterations in order. Seconds; NaN is unknown.

    duration_s (n,); compute_s and communication_s (n, world_size), None where no sensor saw them;
    node (world_size,) numbers the node of each rank, None if all are on one.
    """

    duration_s: FloatArray
    compute_s: FloatArray | None = None
    communication_s: FloatArray | None = None
    node: IntArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """One statement that the job or a rank is slow (or fast again). Positions count the iterations observed, from 0.

    at: the newest iteration known when it was said; onset: since when, None where the baseline does not say;
    rank: None accuses nobody; is_slower: False for a change to shorter times;
    is_information: said without accusing or alarming anybody.
    """

    at: int
    onset: int | None = None
    rank: int | None = None
    is_slower: bool = True
    is_information: bool = False


class Baseline(Protocol):
    """Judges one job after the other; holds no state between them."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    @property
    def needs(self) -> frozenset[Input]:
        """Return what it asks for."""
        ...

    @property
    def is_online(self) -> bool:
        """Whether each statement stands on nothing later than its `at`."""
        ...

    def judges(self, observed: Observed) -> list[Detection]:
        """Return its statements in the order of `at`. Raises Unseen if what it needs is not there."""
        ...


def known(duration_s: FloatArray) -> tuple[IntArray, FloatArray]:
    """Return positions (m,) and times (m,) of the iterations known, without the first WARM_UP of them."""
    positions = np.flatnonzero(np.isfinite(duration_s))[WARM_UP:]
    return positions, duration_s[positions]


def relative(times_s: FloatArray) -> FloatArray:
    """Return the times (m,) over the median of the first REFERENCE of them."""
    return times_s / np.median(times_s[:REFERENCE]) if len(times_s) else times_s


def standardised(logs: FloatArray) -> FloatArray:
    """Return the values (m,) in spreads of their first REFERENCE from the median of those."""
    reference = logs[:REFERENCE]
    return (logs - np.median(reference)) / max(float(wide_scale(reference)), 1e-3) if len(logs) else logs


def has_risen(values: FloatArray, at: int, change: int | None = None) -> bool:
    """Whether values[change..at] lie above those just before; without a change, whether the latest few do."""
    split = max(at + 1 - _RECENT, 1) if change is None else max(change, 1)
    before, after = values[max(0, split - 3 * _RECENT) : split], values[split : at + 1]
    return bool(len(after)) and float(np.mean(after)) > float(np.mean(before))


def per_rank(values: FloatArray | None, wanted: Input, name: str) -> FloatArray:
    """Return values (n, world_size); raise Unseen, naming the baseline, where they were not observed."""
    if values is None or (len(values) and not np.isfinite(values).any()):
        raise Unseen(f"{name} needs the {wanted.value}, which this recording lacks")
    return values


def newly_accused(at: Iterable[int], accused: Iterable[BoolArray]) -> Iterator[Detection]:
    """Yield one detection per rank and spell, from (world_size,) flags after each look."""
    before: BoolArray | None = None
    for position, flags in zip(at, accused, strict=True):
        fresh = flags if before is None else flags & ~before
        for rank in np.flatnonzero(fresh).tolist():
            yield Detection(at=position, rank=rank)
        before = flags
