"""The product beside other methods on the same splices, with paired intervals.

At defaults; recall at equal extra alarms; extra alarms at equal recall. How curves are made is said in curves.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isinf, isnan

import numpy as np
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from benchmarks.quality.curves import PER, Curve, Outcomes, interval
from schemas.table import FloatArray

OURS = "failslow"
RATES = 1.0, 3.0, 10.0  # extra alarms per 10,000 iterations
RECALLS = 0.5, 0.8, 0.9

Three = tuple[float, float, float]  # a value and its 95 % interval


class Default(Struct, frozen=True, kw_only=True):
    """A method at its authors' defaults; delays in iterations, the first slow one counts as 1."""

    method: str
    recall: Three
    extra_per_10000: Three
    before_per_10000: float  # of the extra alarms, those before the onset
    delay_median: float
    delay_p95: float
    told_as_information: float


class Paired(Struct, frozen=True, kw_only=True):
    """One comparison: a difference above 0 is in favour of the product; infinite where a recall is never reached."""

    method: str
    equal: str  # "extra" (then values are recalls) or "recall" (then they are extra alarms per 10,000 iterations)
    at: float
    ours: float
    other: float
    difference: Three
    verdict: str  # whether the product is ahead: "yes", "no", or "open" where the interval holds 0


class Setting(Struct, frozen=True, kw_only=True):
    """One setting of one method, as it was observed."""

    method: str
    setting: str
    recall: float
    extra_per_10000: float
    delay_median: float


def before_only(outcomes: Outcomes) -> Outcomes:
    """Return the outcomes with repeated alarms after the onset forgiven: only those before it are extra."""
    return replace(outcomes, after=np.zeros_like(outcomes.after))


def defaults(
    found: Mapping[str, Sequence[Outcomes]], is_default: Mapping[str, int], weights: FloatArray
) -> list[Default]:
    """Return each method at its default, which `is_default` numbers among its settings."""
    rows = []
    for method, outcomes in found.items():
        one = outcomes[is_default[method]]
        curve = Curve.of([one], weights)
        delays = one.delay[np.isfinite(one.delay)]
        rows.append(
            Default(
                method=method,
                recall=interval(curve.recall[:, 0]),
                extra_per_10000=interval(curve.extra[:, 0]),
                before_per_10000=float(PER * one.before.sum() / one.iterations.sum()),
                delay_median=float(np.median(delays)) if len(delays) else float("nan"),
                delay_p95=float(np.quantile(delays, 0.95)) if len(delays) else float("nan"),
                told_as_information=float(one.is_information.sum() / len(delays)) if len(delays) else float("nan"),
            )
        )
    return rows


def settings(found: Mapping[str, Sequence[Outcomes]]) -> list[Setting]:
    """Return every setting of every method."""
    return [
        Setting(
            method=method,
            setting=one.setting,
            recall=float(one.found.mean()),
            extra_per_10000=float(PER * one.extra.sum() / one.iterations.sum()),
            delay_median=float(np.median(known)) if len(known := one.delay[np.isfinite(one.delay)]) else float("nan"),
        )
        for method, outcomes in found.items()
        for one in outcomes
    ]


def paired(found: Mapping[str, Sequence[Outcomes]], weights: FloatArray) -> list[Paired]:
    """Return both comparisons of the product with each other method, at any setting of each."""
    curves = {method: Curve.of(outcomes, weights) for method, outcomes in found.items()}
    rows = []
    for method in (m for m in found if m != OURS):
        for rate in RATES:
            ours, other = curves[OURS].recall_at(rate), curves[method].recall_at(rate)
            rows.append(_row(method, "extra", rate, ours, other, ours - other))
        for recall in RECALLS:
            ours, other = curves[OURS].extra_at(recall), curves[method].extra_at(recall)
            rows.append(_row(method, "recall", recall, ours, other, _less(other, ours)))
    return rows


def _row(method: str, equal: str, at: float, ours: FloatArray, other: FloatArray, difference: FloatArray) -> Paired:
    middle, low, high = interval(difference)
    return Paired(
        method=method,
        equal=equal,
        at=at,
        ours=float(ours[0]),
        other=float(other[0]),
        difference=(middle, low, high),
        verdict="yes" if low > 0 else "no" if high < 0 else "open",
    )


def _less(other: FloatArray, ours: FloatArray) -> FloatArray:
    """Return by how many extra alarms the other has more; none if neither reaches the recall."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(other) & np.isinf(ours), 0.0, other - ours)


def print_defaults(console: Console, rows: Sequence[Default]) -> None:
    """Print the methods at their defaults."""
    names = ("recall", f"extra / {PER:,}", "before onset", "delay median", "95 %", "told as info")
    table = _table("at defaults", ("method",), names)
    for row in rows:
        table.add_row(
            row.method,
            _three(row.recall, 3),
            _three(row.extra_per_10000, 1),
            f"{row.before_per_10000:.1f}",
            _value(row.delay_median, 0),
            _value(row.delay_p95, 0),
            "-" if isnan(row.told_as_information) else f"{row.told_as_information:.0%}",
        )
    console.print(table)


def print_settings(console: Console, rows: Sequence[Setting]) -> None:
    """Print every setting."""
    table = _table("settings", ("method", "setting"), ("recall", f"extra / {PER:,}", "delay median"))
    for row in rows:
        delay = _value(row.delay_median, 0)
        table.add_row(row.method, row.setting, f"{row.recall:.3f}", f"{row.extra_per_10000:.1f}", delay)
    console.print(table)


def print_paired(console: Console, title: str, rows: Sequence[Paired]) -> None:
    """Print the comparisons."""
    table = _table(title, ("at equal", "method"), (OURS, "the other", "difference (paired 95 %)", "ahead"))
    for row in rows:
        digits = 3 if row.equal == "extra" else 1
        middle, low, high = (_signed(value, digits) for value in row.difference)
        ours, other = _value(row.ours, digits), _value(row.other, digits)
        table.add_row(f"{row.equal} {row.at:g}", row.method, ours, other, f"{middle} ({low} to {high})", row.verdict)
    console.print(table)


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


def _three(values: Three, digits: int) -> str:
    middle, low, high = values
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def _value(value: float, digits: int) -> str:
    return "-" if isnan(value) else "never" if isinf(value) else f"{value:.{digits}f}"


def _signed(value: float, digits: int) -> str:
    """Return a difference, other less ours; an infinite one says which of both never gets there."""
    return ("the other never" if value > 0 else "ours never") if isinf(value) else f"{value:+.{digits}f}"
