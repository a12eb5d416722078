"""`failslow-agent bench`: what observing costs a training process on this machine."""

import logging
import os
import sys
from pathlib import Path

import click
import msgspec
from rich.console import Console

from agents.collector import NotAvailable
from agents.commands.options import Problem, config_option, load_config
from agents.overhead import rates
from agents.overhead.measuring import N_ROUNDS, N_ROUNDS_MIN, measure
from agents.overhead.report import as_object, print_report


@click.command(
    name="bench",
    epilog="\b\nExamples:\n  failslow-agent bench\n  failslow-agent bench --calls-per-s 500 --json\n\n"
    "docs/overhead.md says how it measures, and what the figures do not include.",
)
@config_option
@click.option(
    "--seconds",
    default=5.0,
    show_default=True,
    type=click.FloatRange(min=0, max=600),
    help="How long to look at the job that runs here; 0: assume one.",
)
@click.option(
    "--rounds",
    default=N_ROUNDS,
    show_default=True,
    type=click.IntRange(min=N_ROUNDS_MIN, max=10_000),
    help="How often each figure is taken.",
)
@click.option(
    "--calls-per-s", default=rates.CALLS_PER_S, show_default=True, type=click.FloatRange(min=0),
    help="NCCL calls of a rank, where none runs here.",
)  # fmt: skip
@click.option(
    "--switches-per-s", default=rates.SWITCHES_PER_S, show_default=True, type=click.FloatRange(min=0),
    help="Context switches of a rank, where none runs here.",
)  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object instead of tables.")
def command(
    config_path: Path | None, seconds: float, rounds: int, calls_per_s: float, switches_per_s: float, *, is_json: bool
) -> None:
    """Measure the cost of each probe with the agent's own programs, and the share of a rank's time that they take.

    Rates are those of the job that runs on this node, which needs no agent, and which one that runs does not disturb.
    """
    logging.basicConfig(level=logging.CRITICAL)
    config = load_config(config_path)
    if sys.platform != "linux":
        raise Problem("probes are of Linux: measure on a node")
    load = os.getloadavg()
    console = Console(highlight=False)
    with Console(stderr=True).status("measuring") as status:
        try:
            found = rates.observe(config, seconds, status.update) if seconds else []
            ranks = found or [rates.assumed(calls_per_s, switches_per_s)]
            measured = measure(rounds, progress=status.update)
        except NotAvailable as error:
            raise Problem(f"nothing can be measured: {error.reason}: {error.remedy}") from error
    if is_json:
        click.echo(msgspec.json.format(msgspec.json.encode(as_object(measured, ranks, load))))
    else:
        print_report(console, measured, ranks, load)
