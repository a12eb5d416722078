"""What open incidents explain already, so that it is accused of nothing further."""

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.suspect import CLOCK_DROP, CLOCK_EVIDENCE, Span, Suspect
from schemas.alerts import Kind


@dataclass(frozen=True, slots=True)
class Claims:
    """What is claimed, and by which kinds of incidents."""

    by_kind: tuple[tuple[Kind, frozenset[tuple[str, int]]], ...] = ()

    @classmethod
    def of(cls, suspects: Iterable[Suspect]) -> "Claims":
        """Return what the suspects of open incidents claim."""
        return cls(tuple((suspect.kind, suspect.claims) for suspect in suspects))

    def cover(self, suspect: Suspect, span: Span) -> bool:
        """Return whether open incidents explain what was seen of a suspect in a span.

        A slow GPU does not make its host busy, and a slow host makes no clock low: where the hosts' own times are seen,
        one does not speak for the other. Without a low clock, a GPU that a slow host feeds may be late by that host.
        """
        kinds = {kind for kind, claims in self.by_kind if suspect.claims & claims}
        if "sync" in suspect.sources:
            if suspect.kind is Kind.SLOW_HOST:
                kinds -= {Kind.SLOW_GPU}
            elif suspect.kind is Kind.SLOW_GPU and span.has_reference and _has_low_clock(suspect):
                kinds -= {Kind.SLOW_HOST}
        return bool(kinds)


def _has_low_clock(suspect: Suspect) -> bool:
    return any(one.what == CLOCK_EVIDENCE and one.value <= CLOCK_DROP for one in suspect.evidence)
