"""Measure what observing costs a rank with 2,000 calls to NCCL a second: python -m benchmarks.overhead --help."""

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from agents.overhead.costs import Interval, share
from agents.overhead.measuring import LAUNCH, Measured, measure
from agents.overhead.report import machine
from benchmarks.overhead.agent import Taken, measure_agent
from benchmarks.overhead.blocks import Compared, compare
from benchmarks.overhead.job import CALLS_PER_S, Counted, Observer, calibrated, count, libraries_in, own_libraries
from tests.testbed.launch import missing
from tests.testbed.workload import Workload

BAR = 0.0039
LAUNCHES_PER_S = 20_000


@click.command()
@click.option("--rounds", default=400, show_default=True, help="How often what a hit adds is taken.")
@click.option("--seconds", default=20.0, show_default=True, help="How long hits are counted, and the agent is watched.")
@click.option("--pairs", default=60, show_default=True, help="Pairs of blocks with and without the probes.")
@click.option("--block-s", default=1.5, show_default=True, help="How long a block is.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/overhead.json"), show_default=True)
def main(*, rounds: int, seconds: float, pairs: int, block_s: float, out: Path) -> None:
    """Write build/overhead.json. Exit code 1: hits times nanoseconds may come to more than 0.39 % of an iteration."""
    console = Console(highlight=False)
    if (lacking := missing()) is not None:
        raise click.ClickException(lacking)
    load, begin_s = os.getloadavg(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="failslow-overhead-") as name, console.status("measuring") as status:
        folder = Path(name)
        copies = own_libraries(folder)
        measured = measure(rounds, progress=status.update)
        status.update("finding a workload of some 2,000 calls a second")
        workload = calibrated(copies)
        observer = Observer(libraries_in(copies))
        with observer.open():
            status.update(f"counting hits for {seconds:g} s")
            ranks = count(observer, workload, copies, seconds)
            compared = compare(observer, workload, copies, n_pairs=pairs, block_s=block_s, progress=status.update)
        status.update(f"watching the agent for {seconds:g} s")
        taken = measure_agent(workload, copies, folder, seconds)
    loads = {"load_before": load, "load_after": os.getloadavg(), "minutes": (time.monotonic() - begin_s) / 60}
    result = results(measured, ranks, compared, taken) | loads | {"workload": asdict_of(workload)}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    say(console, result)
    if not result["is_within_bar"]:
        sys.exit(1)


def results(measured: Measured, ranks: Sequence[Counted], compared: Compared, taken: Taken) -> dict[str, Any]:
    """Return everything; shares are of the iteration time, and of the rank of which observing takes most."""
    everywhere = {**measured.hot, **measured.cold}
    rank = max(ranks, key=lambda each: share(measured.hot, each.hits_per_s).value)
    hot = share(measured.hot, rank.hits_per_s)
    launches = {LAUNCH: float(LAUNCHES_PER_S)}
    return {
        "iteration_share_mean": hot.value,
        "iteration_share_upper95": hot.high,
        "bar": BAR,
        "is_within_bar": hot.high <= BAR,
        "machine": machine(os.getloadavg()),
        "ns": {name: asdict(cost.ns) for name, cost in measured.hot.items()},
        "ns_cold": {name: asdict(cost.ns) for name, cost in measured.cold.items()},
        "ranks": [asdict(each) for each in ranks],
        "share": asdict(hot),
        "share_cold": asdict(share(everywhere, rank.hits_per_s)),
        "share_stand_in": asdict(share(measured.hot, rank.stand_in_hits_per_s)),
        "compared": asdict(compared),
        "launches_per_s": LAUNCHES_PER_S,
        "launches_share": asdict(share(measured.hot, launches)),
        "launches_share_cold": asdict(share(everywhere, launches)),
        "agent": asdict(taken),
        "limits": [limit.what for limit in measured.limits],
    }


def asdict_of(workload: Workload) -> Mapping[str, object]:
    """Return a workload's fields."""
    return msgspec.structs.asdict(workload)


def say(console: Console, result: Mapping[str, Any]) -> None:
    """Print what the file holds."""
    cold, compared, agent = (result[name] for name in ("ns_cold", "compared", "agent"))
    met = "within" if result["is_within_bar"] else "NOT within"
    lines = [
        "What one hit adds in nanoseconds, back to back, and with other work between two hits:",
        *(
            f"  {name:22} {_ns(value):>22} {_ns(cold[name]) if name in cold else 'not measured':>22}"
            for name, value in result["ns"].items()
        ),
        *(
            f"rank {place}: {rank['calls_per_s']:,.0f} calls a second, iterations of {rank['iteration_ms']:.1f} ms"
            for place, rank in enumerate(result["ranks"])
        ),
        f"Of an iteration with {CALLS_PER_S:,.0f} calls a second:",
        f"  hits times nanoseconds: {_percent(result['share'])}, {met} the bar of {BAR:.2%}",
        f"    with other work between two hits: {_percent(result['share_cold'])}",
        f"    beside that, switches of the threads that stand for the GPU: {_percent(result['share_stand_in'])}",
        f"  with and without the probes in turn, {compared['n_pairs']} pairs of blocks:",
        f"    (there it was {compared['calls_per_s']:,.0f} calls a second)",
        f"    iteration time: {_percent(compared['iteration_time'])} more",
        f"    CPU time of the thread that trains: {_percent(compared['cpu_share'])},",
        f"      that is {_ns(compared['cpu_ns_per_call'])} ns for each call",
        f"    CPU time of all threads: {_percent(compared['all_cpu_share'])}",
        f"Launch probes, off by default, at {LAUNCHES_PER_S:,} a second: {_percent(result['launches_share'])}",
        f"  with other work between two hits: {_percent(result['launches_share_cold'])}",
        f"Load average {result['load_before'][0]:.1f}, then {result['load_after'][0]:.1f}, on {os.cpu_count()} CPUs",
        f"The agent: {agent['cpu_share']:.1%} of a core; {agent['start_cpu_s']:.1f} s of CPU time to start,",
        f"  {agent['resident_bytes'] / 2**20:.0f} MiB resident, {agent['anonymous_bytes'] / 2**20:.0f} of them its own",
    ]
    for line in lines:
        console.print(line, soft_wrap=True)


def _ns(value: Mapping[str, float]) -> str:
    return Interval(**value).as_ns()


def _percent(value: Mapping[str, float]) -> str:
    return Interval(**value).as_percent()


if __name__ == "__main__":
    main()
