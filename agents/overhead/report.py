"""What was measured, as tables for people and as one object for programs."""

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from agents.overhead.costs import Interval, share
from agents.overhead.measuring import TITLES, Measured
from agents.overhead.rates import Rates

_HOT = "back to back"
_COLD = "work between"


def as_object(measured: Measured, ranks: Sequence[Rates], load: Sequence[float]) -> dict[str, Any]:
    """Return everything; times are nanoseconds per hit, shares are of one thread's time."""
    hot = {rates.title: share(measured.hot, rates.hits_per_s) for rates in ranks}
    dearest = max(ranks, key=lambda rates: hot[rates.title].value)
    return {
        "machine": machine(load),
        "ns": {name: asdict(cost.ns) for name, cost in measured.hot.items()},
        "ns_cold": {name: asdict(cost.ns) for name, cost in measured.cold.items()},
        "has_return_probes": measured.has_return_probes,
        "ranks": [
            {
                "rank": rates.title,
                "is_observed": rates.is_observed,
                "hits_per_s": dict(rates.hits_per_s),
                "share": asdict(hot[rates.title]),
                "share_cold": asdict(cold_share(measured, rates)),
            }
            for rates in ranks
        ],
        "iteration_share_mean": hot[dearest.title].value,
        "iteration_share_upper95": hot[dearest.title].high,
        "limits": [{"what": each.what, "why": each.why, "remedy": each.remedy} for each in measured.limits],
    }


def cold_share(measured: Measured, rates: Rates) -> Interval:
    """Return the share where other work has had the caches between two hits; of switches that is not known."""
    return share({**measured.hot, **measured.cold}, rates.hits_per_s)


def machine(load: Sequence[float]) -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "kernel": platform.release(),
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
        "load": [round(each, 2) for each in load],
    }


def print_report(console: Console, measured: Measured, ranks: Sequence[Rates], load: Sequence[float]) -> None:
    """Print the same: what each hit adds, and what that takes of the rank of which it takes most."""
    table = Table(title="Nanoseconds that one hit adds, with 95 % intervals", title_justify="left")
    for column in ("", _HOT, _COLD):
        table.add_column(column, justify="right" if column else "left")
    for name, title in TITLES.items():
        if name in measured.hot:
            own = [
                costs[name].ns.as_ns() if name in costs else "not measured" for costs in (measured.hot, measured.cold)
            ]
            table.add_row(title, *own)
    console.print(table)
    *others, dearest = sorted(ranks, key=lambda rates: share(measured.hot, rates.hits_per_s).value)
    console.print(_rank_table(measured, dearest))
    for rates in (dearest, *reversed(others)):
        hot, cold = share(measured.hot, rates.hits_per_s), cold_share(measured, rates)
        console.print(
            f"{rates.title}, all together: {hot.as_percent()} {_HOT}, {cold.as_percent()} with {_COLD}", soft_wrap=True
        )
    for line in _remarks(measured, dearest, load):
        console.print(line, style="dim", soft_wrap=True)


def _rank_table(measured: Measured, rates: Rates) -> Table:
    table = Table(title=f"Share of the time of {rates.title}", title_justify="left")
    for column in ("", "hits a second", _HOT, _COLD):
        table.add_column(column, justify="right" if column else "left")
    for name, rate in rates.hits_per_s.items():
        if rate and name in measured.hot:
            own = Rates(rates.title, {name: rate}, rates.is_observed)
            hot = share(measured.hot, own.hits_per_s)
            table.add_row(TITLES[name], f"{rate:,.0f}", f"{hot.value:.3%}", f"{cold_share(measured, own).value:.3%}")
    return table


def _remarks(measured: Measured, rates: Rates, load: Sequence[float]) -> Iterator[str]:
    yield f"{_HOT}: one hit after the other. {_COLD}: other work has had the processor's caches since the hit before."
    yield "A call, and a synchronisation, is two hits: entry and return. A context switch includes the wake-up."
    if rates.is_observed:
        yield "The hits of all threads of a rank are added up, as if each of them held up the training."
    else:
        yield "No process here calls NCCL, so the rates are assumed: --calls-per-s and --switches-per-s say others."
    yield f"The load average is {load[0]:.1f} on {os.cpu_count()} CPUs: the lower, the narrower the intervals."
    if not measured.has_return_probes:
        yield "Return probes are not safe on this kernel, so calls are measured without them."
    for limit in measured.limits:
        yield f"{limit.what}: {limit.why}: {limit.remedy}"
