"""Is what could not be judged said, and nobody accused for it? Episodes with a silent agent, or with batches lost.

An agent that never reports leaves its ranks unknown: the counts that become metrics have to say so, and an incident has
to say how many ranks nobody reports. Lost batches have to be counted, whether the agent knew of them or not.
"""

from collections.abc import Sequence

from msgspec import Struct

from benchmarks.quality.matching import Matched
from benchmarks.quality.score import Share
from schemas.alerts import Kind, Severity

SETTINGS = ("agent_missing", "losses")
_COUNTS = {"agent_missing": ("ranks_missing",), "losses": ("batches_lost", "events_lost")}


class Unseen(Struct, frozen=True, kw_only=True):
    """One sensor setting."""

    episodes: int
    nobody_accused_falsely: Share  # episodes without a false incident that names a component
    nothing_false: Share  # episodes without any false incident
    counted: Share  # episodes in which something was missing, and the stages' counts say so
    said: Share  # incidents above information, while ranks are unreported, that say how many


def unseen(matched: Sequence[Matched]) -> dict[str, Unseen]:
    """Score the episodes of each such setting."""
    by_setting = {name: [m for m in matched if m.outcome.setting == name] for name in SETTINGS}
    return {name: _scored(name, given) for name, given in by_setting.items() if given}


def _scored(setting: str, matched: Sequence[Matched]) -> Unseen:
    outcomes = [m.outcome for m in matched]
    lacking = [o for o in outcomes if o.unreported or o.lost_batches]
    incidents = [(o, one) for o in outcomes if o.unreported for one in o.openings if one.severity is not Severity.INFO]
    return Unseen(
        episodes=len(matched),
        nobody_accused_falsely=Share.of(all(one.kind is Kind.SLOW_JOB for one in m.false) for m in matched),
        nothing_false=Share.of(not m.false for m in matched),
        counted=Share.of(any(o.unseen.get(name, 0) > 0 for name in _COUNTS[setting]) for o in lacking),
        said=Share.of(one.unreported == o.unreported for o, one in incidents),
    )
