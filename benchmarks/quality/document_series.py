"""The results on real series as Markdown: healthy ones, shifts in their noise, and other detectors beside ours."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.quality.markdown import table, value, with_interval
from benchmarks.quality.paired import OURS, RATES, RECALLS


def times_lines(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was said of the healthy series, and the curves over the size of a shift."""
    healthy = given["real_healthy"]
    yield f"{healthy['false_incidents']} false incidents in {healthy['iterations']:,} real healthy iterations."
    yield ""
    curves = given.get("real_curves", [])
    for title, is_own in (("a shift by a ratio, in a series as it is", True), ("a shift in sigmas, drawn anew", False)):
        some = [one for one in curves if (one["noise"] == "own") is is_own]
        if some:
            yield f"Recall, and median delay (bound) in iterations, of {title}:"
            yield ""
            yield from _curves(some, is_own=is_own)


def _curves(curves: Sequence[Mapping[str, Any]], *, is_own: bool) -> Iterator[str]:
    sizes = [f"x{one['ratio']:.3g}" if is_own else f"{one['shift_sigmas']:.2g}" for one in curves]
    lines = dict.fromkeys((one["shape"], one["noise"]) for one in curves)
    rows = []
    for line in lines:
        points = [one for one in curves if (one["shape"], one["noise"]) == line]
        cells = [f"{one['recall']:.2f}, {value(one['delay'], 0)} ({one['bound']:.0f})" for one in points]
        rows.append((" ".join(line), str(points[0]["n"]), *cells))
    n_columns = max(len(row) - 2 for row in rows)
    yield from table(("shape, noise", "n", *sizes[:n_columns]), rows)


def series_lines(given: Mapping[str, Any], part: str) -> Iterator[str]:
    """Yield the comparisons on real noise."""
    for one in given.values():
        flag = " --held-out" if part == "held_out" else ""
        yield (
            f"`.venv/bin/python -m benchmarks.quality.compare_series{flag} --cv {one['cv']:g} --shift {one['shift']:g} "
            f"--splices {one['splices']}`:"
        )
        yield (
            f"{one['splices']} splices of {one['before']} healthy and {one['after']} slow iterations, seed "
            f"{one['seed']}; information bound {one['bound_iterations']:.1f} iterations. At defaults:"
        )
        yield ""
        yield from table(
            ("method", "recall", "extra / 10,000", "before onset", "delay, median / 95 %"),
            [_default(row) for row in one["defaults"]],
        )
        if "paired" in one:
            yield "At equal extra alarms per 10,000 iterations (recall), and at equal recall (extra alarms per 10,000);"
            yield "in brackets by how much failslow is better, with the paired interval:"
            yield ""
            yield from _paired(one["paired"])
            yield "The same, where alarms after the onset are forgiven:"
            yield ""
            yield from _paired(one["paired_before_onset"])


def _default(row: Mapping[str, Any]) -> tuple[str, ...]:
    recall, extra = row["recall"], row["extra_per_10000"]
    return (
        row["method"],
        with_interval(recall[0], recall[1:], 3),
        with_interval(extra[0], extra[1:], 1),
        value(row["before_per_10000"], 1),
        f"{value(row['delay_median'], 0)} / {value(row['delay_p95'], 0)}",
    )


def _paired(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    points = [("extra", at) for at in RATES] + [("recall", at) for at in RECALLS]
    by_point = {(row["method"], row["equal"], row["at"]): row for row in rows}
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = [(OURS, *(_reached(by_point[methods[0], *point], "ours") for point in points))]
    lines += [(method, *(_other(by_point[method, *point]) for point in points)) for method in methods]
    yield from table(("method", *(f"{equal} {at:g}" for equal, at in points)), lines)
    for title, verdict in (("Significantly better than failslow", "no"), ("Not decided", "open")):
        found = [f"{row['method']} at {row['equal']} {row['at']:g}" for row in rows if row["verdict"] == verdict]
        yield f"{title}: {'; '.join(found) or 'none'}."
        yield ""


def _reached(row: Mapping[str, Any], who: str) -> str:
    reached = row[who]
    return "never" if reached is None else f"{reached:.{_digits(row)}f}"


def _other(row: Mapping[str, Any]) -> str:
    middle, low, high = (_signed(one, _digits(row)) for one in row["difference"])
    return f"{_reached(row, 'other')} ({middle}, {low} to {high})"


def _signed(number: float | None, digits: int) -> str:
    return "never" if number is None else f"{number:+.{digits}f}"


def _digits(row: Mapping[str, Any]) -> int:
    return 3 if row["equal"] == "extra" else 1
