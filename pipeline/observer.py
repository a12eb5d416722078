"""Sees what the stages see and cannot change it: metrics while live, tables in a postmortem, nothing in a test."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pipeline.hypotheses import Hypothesis
from schemas.alerts import Alert


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSummary:
    """What the judge made of one iteration of one job; arrays are (world_size,), NaN is unknown."""

    job_id: str
    incarnation: str
    iteration: int
    end_ns: int
    iteration_s: float  # median over ranks of the iteration time; NaN if nothing is known
    reference_s: float  # the healthy iteration time it is compared with; NaN before there is one
    rank_slowdown: npt.NDArray[np.float64]  # own computation over that of the peers, 1.0 is healthy
    node: tuple[str, ...]  # of each rank, "" where unknown
    gpu: tuple[str, ...]  # of each rank, "" where unknown
    missing_ranks: int  # closed without them


class Observer:
    """Callbacks, all doing nothing; subclass and override what is of interest."""

    wants_hypotheses: ClassVar[bool] = False  # without it none is made, which costs nothing

    def frame_judged(self, frame: FrameSummary, /) -> None:
        """Take note of one judged frame."""

    def alert_made(self, alert: Alert, /) -> None:
        """Take note of one alert, before it is published."""

    def weighed(self, hypothesis: Hypothesis, /) -> None:
        """Take note of something that may be wrong, and what came of it, before the frame is told as judged."""

    def counted(self, what: str, amount: int, /) -> None:
        """Take note of `amount` more of a named occurrence, such as "rows_late" or "batches_duplicate"."""

    def job_ended(self, job_id: str, incarnation: str, /) -> None:
        """Forget a job: its state is freed, and so should be its series."""


@dataclass(slots=True)
class Counting(Observer):
    """Remembers counts, for tests and for the summary of a replay."""

    counts: dict[str, int] = field(default_factory=dict)
    frames: list[FrameSummary] = field(default_factory=list)
    keep_frames: bool = False

    def counted(self, what: str, amount: int, /) -> None:
        """Add to the named count."""
        self.counts[what] = self.counts.get(what, 0) + amount

    def frame_judged(self, frame: FrameSummary, /) -> None:
        """Keep the frame where asked to."""
        if self.keep_frames:
            self.frames.append(frame)
