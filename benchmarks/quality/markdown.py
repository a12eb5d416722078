"""Numbers and tables as Markdown; what is null in the file of results is unknown or does not apply: a dash."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, and an empty one; the first column is words, the others are numbers."""
    yield "| " + " | ".join(names) + " |"
    yield "|---|" + "---:|" * (len(names) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def value(number: float | None, digits: int) -> str:
    """Return a number."""
    return "-" if number is None else f"{number:.{digits}f}"


def with_interval(number: float | None, bounds: Sequence[float | None] | None, digits: int) -> str:
    """Return a number and its interval, where it has one."""
    if number is None or bounds is None:
        return value(number, digits)
    low, high = bounds
    return f"{value(number, digits)} ({value(low, digits)}-{value(high, digits)})"


def share(one: Mapping[str, Any]) -> str:
    """Return a share with its interval; of none it is a dash."""
    return with_interval(one["value"], one["interval"], 3) if one["n"] else "-"


def quantiles(one: Mapping[str, Any]) -> str:
    """Return a median and a 95th percentile."""
    return f"{value(one['median'], 0)} / {value(one['p95'], 0)}" if one["n"] else "-"
