"""Scores as tables, for the terminal."""

from collections.abc import Mapping, Sequence
from math import isnan

from rich.console import Console
from rich.table import Table

from benchmarks.quality.real import Healthy
from benchmarks.quality.real_curves import Curve
from benchmarks.quality.score import Headline, Quantile, Share
from benchmarks.quality.unseen import Unseen


def print_table(console: Console, title: str, scores: Headline) -> None:
    """Print one line per class, and one over all of them by their weights."""
    table = Table(title=f"{title}: {scores.episodes} episodes", title_justify="left")
    table.add_column("class")
    for name in ("episodes", "clear", "recall", "precision", "component first", "kind", "in time"):
        table.add_column(name, justify="right")
    for name in ("delay, iterations", "delay, s", "onset error", "opened", "false / 10,000"):
        table.add_column(name, justify="right")
    for name, one in scores.classes.items():
        rate = one.false_per_10000
        table.add_row(
            name,
            str(one.episodes),
            str(one.recall.n),
            *(_share(s) for s in (one.recall, one.precision, one.component_first, one.kind, one.in_time)),
            *(_quantile(q) for q in (one.delay_iterations, one.delay_s, one.onset_error)),
            number(one.openings_per_fault, 2),
            f"{number(rate.value, 2)} (<{number(rate.interval[1], 1)})",
        )
    table.add_section()
    shares = (scores.recall, scores.precision, scores.component_first, scores.kind, scores.in_time)
    delays = f"{number(scores.delay_iterations_median, 0)} / {number(scores.delay_iterations_p95, 0)}"
    table.add_row(
        "all, weighted",
        str(scores.episodes),
        "",
        *(number(share, 4) for share in shares),
        delays,
        "",
        "",
        "",
        number(scores.false_incidents_per_10000, 2),
    )
    console.print(table)


def print_unseen(console: Console, title: str, scores: Mapping[str, Unseen]) -> None:
    """Print one line per sensor setting in which something cannot be judged."""
    table = Table(title=f"{title}: what could not be judged", title_justify="left")
    table.add_column("setting")
    for name in ("episodes", "nobody accused falsely", "nothing false", "counted as missing", "said in the incident"):
        table.add_column(name, justify="right")
    for name, one in scores.items():
        shares = (one.nobody_accused_falsely, one.nothing_false, one.counted, one.said)
        table.add_row(name.replace("_", " "), str(one.episodes), *map(_share, shares))
    console.print(table)


def _share(share: Share) -> str:
    if share.n == 0:
        return "-"
    return f"{share.value:.3f} ({share.interval[0]:.3f}-{share.interval[1]:.3f})"


def _quantile(quantile: Quantile) -> str:
    return "-" if quantile.n == 0 else f"{number(quantile.median, 1)} / {number(quantile.p95, 1)}"


def number(value: float, digits: int) -> str:
    """Return a number as text; what is unknown or does not apply is a dash."""
    return "-" if isnan(value) else f"{value:.{digits}f}"


def print_real(console: Console, said: Healthy, curves: Sequence[Curve]) -> None:
    """Print what was said of healthy series, and one line per shape and noise of the splices."""
    console.print(f"{said.false_incidents} false incidents in {said.iterations:,} real healthy iterations")
    for spell in said.spells:
        kind = "information" if spell.is_information else "false"
        console.print(f"    {kind}: {spell.series}, since {spell.onset}, known at {spell.detected}")
    own = [curve for curve in curves if curve.noise == "own"]
    drawn = [curve for curve in curves if curve.noise != "own"]
    print_curves(console, "shifts of a size in a series as it is", own, [f"x{c.ratio:g}" for c in own])
    print_curves(console, "shifts in noise drawn anew", drawn, [f"{c.shift_sigmas:.2g} sigma" for c in drawn])


def print_curves(console: Console, title: str, curves: Sequence[Curve], sizes: Sequence[str]) -> None:
    """Print one line per shape and noise, one column per size."""
    table = Table(title=f"{title}: recall, median delay (bound)", title_justify="left")
    for name in ("shape", "noise", *dict.fromkeys(sizes), "extra / 10,000"):
        table.add_column(name, justify="right")
    for shape, noise in dict.fromkeys((curve.shape, curve.noise) for curve in curves):
        line = [curve for curve in curves if (curve.shape, curve.noise) == (shape, noise)]
        cells = [f"{c.recall:.2f} {number(c.delay, 0)} ({c.bound:.0f})" for c in line]
        extra = sum(c.extra_per_10000 for c in line) / len(line)
        table.add_row(shape, noise, *cells, f"{extra:.1f}")
    console.print(table)
