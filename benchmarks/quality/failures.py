"""Episodes that went wrong, one line per fault and incident: what to look at next, and the name to look it up by."""

from collections.abc import Iterator, Sequence

from benchmarks.quality.answers import Answer
from benchmarks.quality.matching import Finding, Matched
from benchmarks.quality.outcome import Opening
from benchmarks.quality.score import is_clear, is_in_time
from schemas.alerts import ComponentName


def failures(matched: Sequence[Matched]) -> Iterator[str]:
    """Yield lines about every episode with a missed clear fault, a wrong first answer or a false incident."""
    for one in matched:
        wrong = [(finding, reason) for finding in one.findings if (reason := _reason(finding))]
        if not wrong and not one.false:
            continue
        o = one.outcome
        yield f"{o.class_name}/{o.seed}: {o.layout}, {o.setting}, {o.iterations} iterations, noise {o.sigma:.3f}"
        for finding, reason in wrong:
            yield f"    {reason}: {_answer(finding.answer)}"
            yield from (f"        {kind} {_opening(opening)}" for kind, opening in _openings(finding))
        yield from (f"    false {_opening(opening)}" for opening in one.false)


def _reason(finding: Finding) -> str:
    if not is_clear(finding):
        return ""
    if not finding.is_found:
        return "missed"
    if not finding.names_component_first:
        return "component late" if finding.names_component else "component missed"
    return "" if is_in_time(finding) else "too late"


def _openings(finding: Finding) -> Iterator[tuple[str, Opening]]:
    for kind in ("standing", "right", "coarse", "wrong"):
        for opening in getattr(finding, kind):
            yield kind, opening


def _answer(answer: Answer) -> str:
    best = answer.accepted[0]
    return (
        f"{answer.fault} {answer.shape} x{answer.ratio:.2f} = {answer.shift_sigmas:.1f} sigma in "
        f"[{answer.onset}, {answer.end}), right {best.kind.value} {_names(best.candidates)}"
    )


def _opening(opening: Opening) -> str:
    return (
        f"{opening.severity.value} {opening.kind.value} {_names(opening.candidates)} x{opening.ratio:.2f} "
        f"since {opening.onset}, known at {opening.detected}, resolved {opening.resolved} {opening.resolution or ''}"
    )


def _names(candidates: frozenset[ComponentName]) -> str:
    names = []
    for one in sorted(candidates):
        parts = [one.node, one.peer, one.gpu[:8], "" if one.rank is None else f"rank {one.rank}"]
        names.append("/".join(part for part in parts if part) or one.type.value)
    return ", ".join(names)
