"""Baselines beside the product on one episode: the same records, the same labels, the same scorer.

The window's output is made once, handed to the judge, and put together into arrays for everybody else.
"""

from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.quality.baselines.baseline import Baseline, Unseen
from benchmarks.quality.baselines.feed import Feed
from benchmarks.quality.baselines.registry import BASELINES, CLAIMS
from benchmarks.quality.baselines.statements import Seen, seen
from benchmarks.quality.corpus import Episode
from benchmarks.quality.outcome import Opening, Outcome
from benchmarks.quality.trial import outcome
from schemas.alerts import Kind

OURS = "failslow"


class Beside(Struct, frozen=True, kw_only=True):
    """One episode: what came of it, and what each baseline said; None where its sensors do not show what it needs."""

    ours: Outcome
    others: dict[str, tuple[Opening, ...] | None]

    def outcome(self, name: str) -> Outcome:
        """Return the episode as one method judged it; where it sees nothing it said nothing."""
        if name == OURS:
            return self.ours
        return replace(self.ours, openings=self.others[name] or (), hints=())

    def sees(self, name: str) -> bool:
        """Whether a method could judge the episode at all."""
        return name == OURS or self.others[name] is not None


def beside(episode: Episode, names: tuple[str, ...], folder: Path | None = None) -> Beside:
    """Run an episode, and let baselines judge what the window made of it. folder: see given()."""
    feed = Feed()
    ours = outcome(episode, listener=feed.take, folder=folder)
    shown = seen(episode.draw()[1], feed.series())
    others = {name: _said(BASELINES[name](), shown, CLAIMS.get(name, Kind.SLOW_RANK)) for name in names}
    return Beside(ours=ours, others=others)


def _said(baseline: Baseline, shown: list[Seen], claims: Kind) -> tuple[Opening, ...] | None:
    try:
        return tuple(opening for one in shown for opening in one.said(baseline, claims))
    except Unseen:
        return None
