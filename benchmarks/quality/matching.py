"""Which incident belongs to which fault, and whether it was right. Reads labels and incidents, nothing else.

An incident above information is explained by a fault that was there when it was detected, or had been until shortly
before. It is right if it says what the label says, coarse if it says that the job as a whole is slower, and wrong if it
accuses anything else: wrong ones and those that no fault explains are false.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.quality.answers import Answer, Said
from benchmarks.quality.trial import Opening, Outcome
from schemas.alerts import Kind, Severity

GRACE = 12  # iterations after a fault's end in which its incident may still be opened
_EARLY = 1  # iterations that a number may be off at the onset


@dataclass(slots=True)
class Finding:
    """What was said of one fault."""

    answer: Answer
    right: list[Opening] = field(default_factory=list)
    coarse: list[Opening] = field(default_factory=list)
    wrong: list[Opening] = field(default_factory=list)  # opened while it was there, and no other fault's either

    @property
    def said(self) -> list[Opening]:
        """Incidents that this fault explains, in the order of their detection."""
        return sorted((*self.right, *self.coarse), key=lambda opening: opening.detected)

    @property
    def is_found(self) -> bool:
        """Whether anybody would have learnt of it."""
        return bool(self.right or self.coarse)

    @property
    def names_component_first(self) -> bool:
        """Whether the first incident of all named exactly the identifiable set."""
        every = sorted((*self.said, *self.wrong), key=lambda opening: opening.detected)
        return bool(every) and every[0] in self.right

    @property
    def names_kind(self) -> bool:
        """Whether the first incident was of the right kind."""
        every = sorted((*self.said, *self.wrong), key=lambda opening: opening.detected)
        return bool(every) and every[0].kind in {said.kind for said in self.answer.accepted}


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
    false = []
    accusing = [opening for opening in outcome.openings if opening.severity is not Severity.INFO]
    n_while_healthy = 0
    for opening in accusing:
        present = [f for f in findings if _is_present(f.answer, opening.detected)]
        felt = [f for f in present if f.answer.asked != "nothing" or f.answer.ratio >= 1.05]
        exact = [f for f in felt if _is_right(opening, f.answer)]
        if exact:
            exact[0].right.append(opening)
        elif felt and opening.kind is Kind.SLOW_JOB:
            next((f for f in felt if not f.said), felt[0]).coarse.append(opening)
        else:
            false.append(opening)
            if present:
                present[0].wrong.append(opening)
            else:
                n_while_healthy += 1
    healthy = sum(1 for i in range(outcome.iterations) if not any(_is_present(f.answer, i) for f in findings))
    return Matched(outcome, findings, tuple(false), len(accusing), healthy, n_while_healthy)


def _is_present(answer: Answer, iteration: int) -> bool:
    return answer.onset - _EARLY <= iteration < answer.end + GRACE


def _is_right(opening: Opening, answer: Answer) -> bool:
    return any(_says(opening, said) for said in answer.accepted)


def _says(opening: Opening, said: Said) -> bool:
    if opening.kind is not said.kind:
        return False
    return opening.candidates >= said.candidates if said.is_loose else opening.candidates == said.candidates


def _merged(answers: tuple[Answer, ...]) -> Iterator[Answer]:
    """Yield the answers; of several that say the same at the same time, only the one that is there first."""
    kept: list[Answer] = []
    for answer in sorted(answers, key=lambda a: (a.onset, -a.ratio)):
        said = answer.accepted[0]
        twin = next((k for k in kept if k.accepted[0] == said and answer.onset < k.end + GRACE), None)
        if twin is None or twin.asked != answer.asked:
            kept.append(answer)
    yield from kept
