"""What a training process may say in a line: an iteration is over, or a pause of some length is.

    iteration 123
    checkpoint 4.2s
    evaluation begin
    evaluation end
    profiling 350ms

Further words, in any order: `at=SECONDS` since the epoch, where the line is sent later than it became true; `rank=N`,
where the line is not sent by a rank's own process or a child of it; `iteration=N` with a pause.
"""

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from schemas.events import MarkerKind

LINE_BYTES_MAX = 512
ITERATION_MAX = 1 << 43
DURATION_NS_MAX = 7 * 86_400 * 1_000_000_000
AT_NS_MAX = 3_600_000_000_000  # by which a time that is given may differ from the arrival

_KINDS = {
    "iteration": MarkerKind.ITERATION_END,
    "checkpoint": MarkerKind.CHECKPOINT,
    "evaluation": MarkerKind.EVALUATION,
    "profiling": MarkerKind.PROFILING,
}
_UNITS_NS = {"ns": 1, "us": 1000, "ms": 10**6, "s": 10**9, "min": 60 * 10**9}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ns|us|ms|s|min)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One line, understood."""

    kind: MarkerKind
    iteration: int | None
    duration_ns: int | None = None  # of a pause; None at its begin and its end
    is_begin: bool = False
    at_ns: int | None = None
    rank: int | None = None


def read_line(line: bytes, arrival_ns: int) -> Said | None:
    """Return what a line says; None where it says nothing that is meant for us."""
    try:
        first, *words = line[:LINE_BYTES_MAX].decode("ascii").split()
        kind = _KINDS[first]
        main = words.pop(0)
        extra = _read_extra(words, arrival_ns)
    except (ValueError, KeyError, IndexError):
        return None
    if extra is None:
        return None
    if kind is MarkerKind.ITERATION_END:
        number = _number(main)
        return None if number is None else Said(kind=kind, iteration=number, at_ns=extra.at_ns, rank=extra.rank)
    if main in {"begin", "end"}:
        duration_ns = None
    elif (match := _DURATION.fullmatch(main)) is not None:
        duration_ns = int(Decimal(match[1]) * _UNITS_NS[match[2]])
        if not 0 < duration_ns <= DURATION_NS_MAX:
            return None
    else:
        return None
    return Said(
        kind=kind,
        iteration=extra.iteration,
        duration_ns=duration_ns,
        is_begin=main == "begin",
        at_ns=extra.at_ns,
        rank=extra.rank,
    )


def _read_extra(words: list[str], arrival_ns: int) -> Said | None:
    values: dict[str, int] = {}
    for word in words:
        name, separator, text = word.partition("=")
        value = _instant(text, arrival_ns) if name == "at" else _number(text)
        if not separator or value is None or name not in {"at", "rank", "iteration"} or name in values:
            return None
        values[name] = value
    return Said(
        kind=MarkerKind.ITERATION_END,
        iteration=values.get("iteration"),
        at_ns=values.get("at"),
        rank=values.get("rank"),
    )


def _number(text: str) -> int | None:
    if not text.isdecimal() or len(text) > 13 or int(text) > ITERATION_MAX:
        return None
    return int(text)


def _instant(text: str, arrival_ns: int) -> int | None:
    try:
        at_ns = int(Decimal(text) * 10**9)
    except (InvalidOperation, ValueError, OverflowError):
        return None
    return at_ns if abs(at_ns - arrival_ns) <= AT_NS_MAX else None
