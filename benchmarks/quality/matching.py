"""Which incident belongs to which fault, and whether it was right. Reads labels and incidents, nothing else.

An incident above information is explained by a fault that was there when it was detected, or had been until shortly
before. It is right if it says what the label says; coarse if it says that the job as a whole is slower, or names more
candidates than it should, the right ones among them; and wrong if it accuses anything else. Wrong ones are false, as
are those that no fault explains that the job felt.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from benchmarks.quality.answers import Answer, Said
from benchmarks.quality.outcome import Opening, Outcome
from schemas.alerts import Kind, Severity

GRACE = 12  # iterations after a fault's end in which its incident may still be opened
_EARLY = 1  # iterations that a number may be off at the onset
_FELT = 1.05  # times as long as without the fault: below, the fault is absorbed


@dataclass(slots=True)
class Finding:
    """What was said of one fault."""

    answer: Answer
    standing: list[Opening] = field(default_factory=list)  # right, and open since before (a restart, say)
    right: list[Opening] = field(default_factory=list)
    coarse: list[Opening] = field(default_factory=list)
    wrong: list[Opening] = field(default_factory=list)

    @property
    def said(self) -> list[Opening]:
        """Incidents opened while it was there that it explains, in the order of their detection."""
        return sorted((*self.right, *self.coarse), key=lambda opening: opening.detected)

    @property
    def is_found(self) -> bool:
        """Whether anybody would have learnt of it."""
        return bool(self.standing or self.right or self.coarse)

    @property
    def first(self) -> Opening | None:
        """The first incident of all, right or wrong."""
        opened = sorted((*self.right, *self.coarse, *self.wrong), key=lambda opening: opening.detected)
        return self.standing[0] if self.standing else (opened[0] if opened else None)

    @property
    def names_component_first(self) -> bool:
        """Whether the first incident named exactly the identifiable set."""
        return self.first is not None and (self.first in self.right or self.first in self.standing)

    @property
    def names_component(self) -> bool:
        """Whether any incident did, sooner or later."""
        return bool(self.right or self.standing)

    @property
    def names_kind(self) -> bool:
        """Whether the first incident was of the right kind."""
        return self.first is not None and self.first.kind in {said.kind for said in self.answer.accepted}


@dataclass(frozen=True, slots=True)
class Matched:
    """One episode, matched."""

    outcome: Outcome
    findings: tuple[Finding, ...]
    false: tuple[Opening, ...]
    n_accusing: int  # incidents above information
    healthy_iterations: int
    n_false_while_healthy: int


def match(outcome: Outcome) -> Matched:
    """Assign the incidents of an episode."""
    findings = tuple(Finding(answer) for answer in _merged(outcome.answers))
    accusing = [opening for opening in outcome.openings if opening.severity is not Severity.INFO]
    false, n_while_healthy = [], 0
    for opening in accusing:
        felt = [f for f in findings if _is_felt(f.answer, opening.detected)]
        exact = [f for f in felt if is_right(opening, f.answer)]
        if exact:
            max(exact, key=lambda f: (opening.detected < f.answer.end, f.answer.onset)).right.append(opening)
        elif vague := [f for f in felt if _is_coarse(opening, f.answer)]:
            next((f for f in vague if not f.said), vague[0]).coarse.append(opening)
        elif felt:
            false.append(opening)
            next((f for f in felt if f.first is None), felt[0]).wrong.append(opening)
        else:
            false.append(opening)
            n_while_healthy += 1
    for finding in findings:
        true = [o for o in accusing if o not in false]
        finding.standing += [o for o in true if _is_standing(o, finding.answer) and is_right(o, finding.answer)]
    healthy = sum(1 for i in range(outcome.iterations) if not any(_is_felt(f.answer, i) for f in findings))
    return Matched(outcome, findings, tuple(false), len(accusing), healthy, n_while_healthy)


def is_right(opening: Opening, answer: Answer) -> bool:
    """Return whether an incident says what the label says."""
    readings = (Said(kind=opening.kind, candidates=opening.candidates), *opening.also)
    return any(_says(reading, said) for reading in readings for said in answer.accepted)


def _is_coarse(opening: Opening, answer: Answer) -> bool:
    if opening.kind is Kind.SLOW_JOB:
        return True
    readings = (Said(kind=opening.kind, candidates=opening.candidates), *opening.also)
    if any(one.kind is said.kind and one.candidates > said.candidates for one in readings for said in answer.accepted):
        return True
    return bool(opening.also) and any(
        _touches(opening, said) for said in answer.accepted if said.kind is Kind.SLOW_LINK
    )


def _touches(opening: Opening, said: Said) -> bool:
    ends = {name for link in said.candidates for name in (link.node, link.peer) if name}
    return bool(ends & {one.node for one in opening.candidates})


def _is_felt(answer: Answer, iteration: int) -> bool:
    return answer.ratio >= _FELT and answer.onset - _EARLY <= iteration < answer.end + GRACE


def _is_standing(opening: Opening, answer: Answer) -> bool:
    was_open = opening.detected < answer.onset - _EARLY
    return was_open and (opening.resolved is None or opening.resolved > answer.onset + _EARLY)


def _says(reading: Said, said: Said) -> bool:
    if reading.kind is not said.kind:
        return False
    return reading.candidates >= said.candidates if said.is_loose else reading.candidates == said.candidates


def _merged(answers: tuple[Answer, ...]) -> Iterator[Answer]:
    """Yield the answers; of several that say the same at the same time, one for as long as any of them holds."""
    kept: list[Answer] = []
    for answer in sorted(answers, key=lambda a: (a.onset, -a.ratio)):
        for i, earlier in enumerate(kept):
            is_same = earlier.accepted[0] == answer.accepted[0] and earlier.asked == answer.asked
            if is_same and answer.onset < earlier.end:
                kept[i] = replace(earlier, end=max(earlier.end, answer.end))
                break
        else:
            kept.append(answer)
    yield from kept
