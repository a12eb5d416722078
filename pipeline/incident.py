"""One incident while it is open, frames numbered as in the history."""

from dataclasses import dataclass

from pipeline.suspect import Suspect
from schemas.alerts import Component, Kind, Severity

_GOOD_FRAMES = 3  # in succession that end a spell


@dataclass(slots=True, kw_only=True)
class Incident:
    """One open incident; frames are numbered as in the history."""

    suspect: Suspect
    component: Component  # as published: information accuses the job as a whole
    kind: Kind
    fingerprint: str
    severity: Severity
    onset_iteration: int
    onset_time_ns: int
    detected_iteration: int
    reference_s: float
    excess_s: float
    confidence: float
    opened_frame: int
    hold: int
    lost_gpu_s: float = 0.0
    throttle_reasons: int = 0
    restated_frame: int = 0
    restated_excess_s: float = 0.0
    unseen: int = 0
    n_updates: int = 0  # each waits twice as long as the one before
    spell: int = 0  # slow frames in the latest spell
    longest_spell: int = 0
    good: int = 0  # frames that were not slow since then
    fastest_s: float = 0.0  # iteration time before it, at its lowest
    grown: int = 0  # frames for which information about the job has been too little to say

    @property
    def slowdown(self) -> float:
        """Iteration time over what it would be without."""
        return 1.0 + max(self.excess_s, 0.0) / self.reference_s

    @property
    def good_s(self) -> float:
        """The excess up to which a frame counts as good."""
        return min(0.5 * self.excess_s, max(0.04 * self.reference_s, 0.25 * self.excess_s))


def count_spell(incident: Incident, *, is_slow: bool) -> None:
    """Count the slow frames since the last few good ones in succession."""
    if is_slow:
        incident.spell = 1 if incident.good >= _GOOD_FRAMES else incident.spell + 1
        incident.good = 0
        incident.longest_spell = max(incident.longest_spell, incident.spell)
    else:
        incident.good += 1
