"""The product beside other change detectors on one bare series of iteration times with a shift of known size.

    python -m benchmarks.quality.compare_series                     four development series, CV 10 %, shift 10 %
    python -m benchmarks.quality.compare_series --held-out          the other four: only once a change is finished

Every method judges the same splices. The first alarm for a slowdown after the onset finds the shift; all other alarms
for slowdowns, before it or repeated, are extra; alarms for speed-ups count for nobody.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from math import isinf, isnan, log
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.quality.baselines.baseline import Observed
from benchmarks.quality.curves import PER, Curve, Outcomes, interval, resampled, score
from benchmarks.quality.splices import Splice, read_noise, series_names, splices
from benchmarks.quality.sweeps import METHODS
from schemas.table import FloatArray

DATA = Path(os.environ.get("FAILSLOW_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
SEED = 20261130
OURS = "failslow"
RATES = 1.0, 3.0, 10.0
RECALLS = 0.5, 0.8, 0.9

_given: list[Splice] = []


def _receive(given: list[Splice]) -> None:
    _given[:] = given


def _judge(method: str, number: int) -> Outcomes:
    setting = list(METHODS[method]())[number]
    baseline = setting.make()
    scored = [
        score(baseline.judges(Observed(duration_s=s.duration_s)), s, is_online=baseline.is_online) for s in _given
    ]
    return Outcomes.of(setting.label, scored)


def judged(given: list[Splice], methods: list[str], n_processes: int) -> dict[str, list[Outcomes]]:
    """Return what each setting of each method made of the splices."""
    wanted = [(m, k) for m in methods for k in range(len(list(METHODS[m]())))]
    found: dict[str, list[Outcomes]] = {m: [] for m in methods}
    with ProcessPoolExecutor(n_processes, initializer=_receive, initargs=(given,)) as pool:
        results = pool.map(_judge, *zip(*wanted, strict=True))
        for (method, _), outcomes in track(zip(wanted, results, strict=True), "settings", total=len(wanted)):
            found[method].append(outcomes)
    return found


def defaults_table(found: dict[str, list[Outcomes]], weights: FloatArray) -> Table:
    """Return each method at its authors' defaults."""
    table = Table(title="at defaults", title_justify="left")
    for name in (
        "method",
        "recall",
        f"extra / {PER:,}",
        "before onset",
        "repeated",
        "delay median",
        "95 %",
        "told as info",
    ):
        table.add_column(name, justify="left" if name == "method" else "right")
    for method, outcomes in found.items():
        one = outcomes[[s.is_default for s in METHODS[method]()].index(True)]
        curve = Curve.of([one], weights)
        total = one.iterations.sum() / PER
        delays = one.delay[np.isfinite(one.delay)]
        table.add_row(
            method,
            _with_interval(curve.recall[:, 0], 3),
            _with_interval(curve.extra[:, 0], 1),
            f"{one.before.sum() / total:.1f}",
            f"{one.after.sum() / total:.1f}",
            *((f"{np.quantile(delays, q):.0f}" if len(delays) else "-") for q in (0.5, 0.95)),
            f"{one.is_information.sum() / len(delays):.0%}" if len(delays) else "-",
        )
    return table


def settings_table(found: dict[str, list[Outcomes]]) -> Table:
    """Return every setting as it was observed."""
    table = Table(title="settings", title_justify="left")
    for name in ("method", "setting", "recall", f"extra / {PER:,}", "delay median"):
        table.add_column(name, justify="left" if name in ("method", "setting") else "right")
    for method, outcomes in found.items():
        for one in outcomes:
            delays = one.delay[np.isfinite(one.delay)]
            rate = PER * one.extra.sum() / one.iterations.sum()
            delay = f"{np.median(delays):.0f}" if len(delays) else "-"
            table.add_row(method, one.setting, f"{one.found.mean():.3f}", f"{rate:.1f}", delay)
    return table


def paired_table(found: dict[str, list[Outcomes]], weights: FloatArray) -> Table:
    """Return both comparisons with each other method; a positive difference in recall is in favour of the product."""
    curves = {method: Curve.of(outcomes, weights) for method, outcomes in found.items()}
    table = Table(title=f"{OURS} beside others, any setting", title_justify="left")
    for name in ("at equal", "method", OURS, "the other", "difference (paired 95 %)", "ahead"):
        table.add_column(name, justify="left" if name in ("at equal", "method") else "right")
    for method in (m for m in found if m != OURS):
        for rate in RATES:
            ours, other = curves[OURS].recall_at(rate), curves[method].recall_at(rate)
            table.add_row(f"extra {rate:g}", method, f"{ours[0]:.3f}", f"{other[0]:.3f}", *_difference(ours - other, 3))
        for recall in RECALLS:
            ours, other = curves[OURS].extra_at(recall), curves[method].extra_at(recall)
            table.add_row(
                f"recall {recall:g}", method, _rate(ours[0]), _rate(other[0]), *_difference(_less(other, ours), 1)
            )
        table.add_section()
    return table


def _less(other: FloatArray, ours: FloatArray) -> FloatArray:
    """Return by how many extra alarms the other has more; none if neither reaches the recall."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(other) & np.isinf(ours), 0.0, other - ours)


def _difference(values: FloatArray, digits: int) -> tuple[str, str]:
    middle, low, high = interval(values)
    verdict = "yes" if low > 0 else "no" if high < 0 else "open"
    return f"{_signed(middle, digits)} ({_signed(low, digits)} to {_signed(high, digits)})", verdict


def _with_interval(values: FloatArray, digits: int) -> str:
    middle, low, high = interval(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def _rate(value: float, digits: int = 1) -> str:
    return "-" if isnan(value) else "never" if isinf(value) else f"{value:.{digits}f}"


def _signed(value: float, digits: int) -> str:
    """Return a difference, other less ours; an infinite one says which of both never gets there."""
    return ("the other never" if value > 0 else "ours never") if isinf(value) else f"{value:+.{digits}f}"


def bound_iterations(cv: float, shift: float) -> float:
    """Return ln(10,000) / KL: the fewest iterations, on average, at one false alarm in 10,000, for Gaussian logs."""
    return log(PER) / (log(shift) ** 2 / (2 * log(1 + cv**2)))


def _names(methods: str) -> Iterator[str]:
    for name in (m.strip() for m in methods.split(";")):
        if name not in METHODS:
            raise click.UsageError(f"no method {name!r}: the methods are {'; '.join(METHODS)}")
        yield name


@click.command()
@click.option("--cv", default=0.10, help="Coefficient of variation of the noise.")
@click.option("--shift", default=1.10, help="Iteration time after over before.")
@click.option("--splices", "n_splices", default=300, help="How many series.")
@click.option("--before", default=200, help="Healthy iterations of each.")
@click.option("--after", default=100, help="Slow iterations of each: later alarms do not count.")
@click.option("--seed", default=SEED)
@click.option("--processes", default=1)
@click.option("--held-out", is_flag=True, help="The series that nobody tunes on.")
@click.option("--methods", default="; ".join(m for m in METHODS if "FALCON" not in m), help="With ; between.")
@click.option("--every-setting", is_flag=True, help="Print each setting as well.")
def main(  # noqa: D103  click prints the module's words
    cv: float,
    shift: float,
    n_splices: int,
    before: int,
    after: int,
    seed: int,
    processes: int,
    held_out: bool,  # noqa: FBT001  a flag of the command line
    methods: str,
    every_setting: bool,  # noqa: FBT001
) -> None:
    names = series_names(DATA, held_out=held_out)
    noises = [read_noise(DATA, name) for name in names]
    given = list(splices(noises, n_splices, seed=seed, cv=cv, shift=shift, before=before, after=after))
    console = Console(width=160)
    console.print(
        f"{n_splices} splices of {before} + {after} iterations, CV {cv:.0%}, shift {shift - 1:.0%}, seed {seed}, "
        f"of {', '.join(names)}\ninformation bound: {bound_iterations(cv, shift):.1f} iterations"
    )
    found = judged(given, list(_names(methods)), processes)
    weights = resampled(n_splices, seed)
    if every_setting:
        console.print(settings_table(found))
    console.print(defaults_table(found, weights))
    if OURS in found:
        console.print(paired_table(found, weights))


if __name__ == "__main__":
    main()
