"""`failslow-agent run`: observe this node, or be the agents of a simulated job."""

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import click
import msgspec

from agents.commands.options import Problem, config_option, load_config
from agents.commands.simulate import read_scenario
from agents.config import AgentConfig
from agents.publisher import Publisher
from agents.simulated import Cluster, Scenario

_EXAMPLES = """\b
Examples:
  failslow-agent run --bootstrap kafka:9092
  failslow-agent run --config /etc/failslow/failslow.toml
  failslow-agent run --simulate scenarios/demo.toml --bootstrap kafka:9092 --speed 0 --epoch scenario
"""
_SIMULATED_ONLY = ("speed", "epoch_ns")


@click.command(name="run", epilog=_EXAMPLES)
@click.option(
    "--simulate",
    "scenario_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="SCENARIO",
    help="Be all agents of this simulated job instead, as TOML; docs/scenarios.md explains it.",
)
@click.option(
    "--bootstrap",
    envvar="KAFKA_BOOTSTRAP",
    metavar="HOST:PORT",
    help="Where the Kafka broker listens; the environment variable KAFKA_BOOTSTRAP stands in.",
)
@config_option
@click.option("--node", help="What this node is called; by default its host name.")
@click.option(
    "--speed",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="Of a simulated job, times real time; 0 is as fast as it can be made.",
)
@click.option(
    "--epoch",
    "epoch_ns",
    default="now",
    show_default=True,
    metavar="now|scenario|NS",
    callback=lambda _, __, value: _epoch_ns(value),
    help="When a simulated job began: now, at a time in ns, or when the scenario says, for the same bytes every time.",
)
@click.pass_context
def command(
    ctx: click.Context,
    scenario_path: Path | None,
    bootstrap: str | None,
    config_path: Path | None,
    node: str | None,
    speed: float,
    epoch_ns: int | None,
) -> None:
    """Observe and send: this node until SIGTERM, a simulated job until it has ended."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    config = load_config(config_path, bootstrap=bootstrap, node=node)
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if scenario_path is not None:
        scenario = read_scenario(scenario_path)
        if epoch_ns is not None:
            scenario = msgspec.structs.replace(scenario, epoch_ns=epoch_ns)
        _publish(scenario, config, speed, stopped)
        return
    for name in _SIMULATED_ONLY:
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise Problem(f"--{name.removesuffix('_ns')} is for a simulated job: give --simulate SCENARIO as well")
    _observe(config, stopped)


def _observe(config: AgentConfig, stopped: threading.Event) -> None:
    from agents.wiring import build  # noqa: PLC0415 (a simulated job needs no collectors)

    if sys.platform != "linux":
        raise Problem("an agent observes Linux nodes; use --simulate SCENARIO elsewhere")
    if os.geteuid() != 0:
        logging.getLogger(__name__).warning(
            "not run as root: what that hides is said below; docs/agent-privileges.md has the least that work"
        )
    with Publisher(config.bootstrap, buffer_bytes_max=config.buffer_bytes_max) as publisher:
        build(config, publisher).run(stopped)
        _say_undelivered(publisher, config)


def _publish(scenario: Scenario, config: AgentConfig, speed: float, stopped: threading.Event) -> None:
    with Publisher(config.bootstrap, buffer_bytes_max=config.buffer_bytes_max) as publisher:
        started_s = time.monotonic()
        for batch in Cluster(scenario).batches():
            while speed and not stopped.is_set():
                wait_s = (batch.flush_ns - scenario.epoch_ns) / 1e9 / speed - (time.monotonic() - started_s)
                if wait_s <= 0:
                    break
                publisher.poll(min(wait_s, 0.05))
            if stopped.is_set():
                break
            publisher.publish(batch)
        _say_undelivered(publisher, config)


def _say_undelivered(publisher: Publisher, config: AgentConfig) -> None:
    n_left = publisher.close()
    click.echo(f"{publisher.n_delivered} batches delivered", err=True)
    if lost := n_left + publisher.n_dropped + publisher.n_refused:
        raise click.ClickException(f"{lost} batches were not delivered: does a broker answer at {config.bootstrap}?")


def _epoch_ns(text: str) -> int | None:
    """Return the time at which a simulated job begins; None leaves it to the scenario."""
    if text == "scenario":
        return None
    if text == "now":
        return time.time_ns()
    if text.isdecimal():
        return int(text)
    raise click.BadParameter(f"{text!r} is neither now, nor scenario, nor a time in nanoseconds")
