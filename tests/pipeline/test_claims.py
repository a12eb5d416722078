"""Which suspects open incidents speak for: of one rank and its host, by what was seen of either."""

import numpy as np
import pytest

from pipeline.claims import Claims
from pipeline.suspect import CLOCK_EVIDENCE, Span, Suspect
from pipeline.watch import RankWatch
from schemas.alerts import Component, ComponentName, ComponentType, Evidence, Kind

PAST = Span(start=30, stop=38, reference_start=0, reference_stop=30)
NO_PAST = Span(start=30, stop=38)


def suspect(kind: Kind, *, clock: float = 1.0, rank: int = 3, sync: bool = True) -> Suspect:
    name = ComponentName(type=ComponentType.RANK, rank=rank)
    return Suspect(
        kind=kind,
        component=Component(type=ComponentType.RANK, name=name, candidates=(name,)),
        excess_s=0.1,
        z=9.0,
        watch=RankWatch(np.array([rank]), np.empty((1, 0), np.int64), np.zeros(1), of_host=False),
        sources=("gpu", "sync") if sync else ("gpu",),
        evidence=(Evidence(what=CLOCK_EVIDENCE, value=clock, unit="ratio", reference=1.0, source="nvml"),),
        claims=frozenset({("rank", rank)}),
    )


GPU, HOST, RANK = Kind.SLOW_GPU, Kind.SLOW_HOST, Kind.SLOW_RANK


@pytest.mark.parametrize(
    ("opened", "seen", "span", "is_covered"),
    [
        (GPU, suspect(HOST), PAST, False),
        (GPU, suspect(HOST), NO_PAST, False),
        (GPU, suspect(HOST, sync=False), PAST, True),
        (HOST, suspect(GPU, clock=0.7), PAST, False),
        (HOST, suspect(GPU, clock=0.7), NO_PAST, True),
        (HOST, suspect(GPU, clock=0.7, sync=False), PAST, True),
        (HOST, suspect(GPU, clock=1.0), PAST, True),
        (RANK, suspect(HOST), PAST, True),
        (RANK, suspect(GPU, clock=0.7), PAST, True),
        (GPU, suspect(GPU, clock=0.7), PAST, True),
        (HOST, suspect(HOST), PAST, True),
        (GPU, suspect(GPU, rank=4), PAST, False),
    ],
)
def test_an_incident_covers_what_cannot_be_told_from_it(
    opened: Kind, seen: Suspect, span: Span, *, is_covered: bool
) -> None:
    assert Claims.of([suspect(opened)]).cover(seen, span) is is_covered
    assert not Claims().cover(seen, span)
