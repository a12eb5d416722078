"""The `failslow-agent` command: one process on each node of a training job, or a simulated cluster of them."""

import logging
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import click
import msgspec

from agents.config import AgentConfig, InvalidConfig, load, override
from agents.publisher import Publisher
from agents.simulated import Cluster, InvalidScenario, Scenario, load_scenario
from agents.simulated.labels import expected
from schemas.codec import encode_events
from schemas.framing import frame
from schemas.topics import events_key

_EXAMPLES = """\b
Examples:
  failslow-agent run --simulate scenarios/demo.toml --bootstrap kafka:9092
  failslow-agent run --simulate scenarios/demo.toml --bootstrap kafka:9092 --speed 0 --epoch scenario
"""


class Problem(click.ClickException):
    """Bad usage or bad input: one clear sentence with a remedy on stderr, exit code 2."""

    exit_code = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="failslow")
def main() -> None:
    """Observe a training job on a node and send what is seen to the broker. An agent never judges."""


@main.command(epilog=_EXAMPLES)
@click.option(
    "--simulate",
    "scenario_path",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="SCENARIO",
    help="Be all agents of this simulated job, as TOML; docs/scenarios.md explains it.",
)
@click.option(
    "--bootstrap",
    envvar="KAFKA_BOOTSTRAP",
    metavar="HOST:PORT",
    help="Where the Kafka broker listens; the environment variable KAFKA_BOOTSTRAP stands in.",
)
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path, dir_okay=False), help="Read the [agent] table of a file."
)
@click.option(
    "--speed",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="Times real time; 0 is as fast as it can be made.",
)
@click.option(
    "--epoch",
    "epoch_ns",
    default="now",
    show_default=True,
    metavar="now|scenario|NS",
    callback=lambda _, __, value: _epoch_ns(value),
    help="When the job began: now, at a time in ns, or when the scenario says, for the same bytes every time.",
)
def run(
    scenario_path: Path, bootstrap: str | None, config_path: Path | None, speed: float, epoch_ns: int | None
) -> None:
    """Observe and send until the job has ended, or until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        config = override(load(config_path) if config_path else AgentConfig(), bootstrap=bootstrap)
    except InvalidConfig as error:
        raise Problem(str(error)) from error
    scenario = _scenario(scenario_path)
    if epoch_ns is not None:
        scenario = msgspec.structs.replace(scenario, epoch_ns=epoch_ns)
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    _publish(scenario, config, speed, stopped)


def _epoch_ns(text: str) -> int | None:
    """Return the time at which a simulated job begins; None leaves it to the scenario."""
    if text == "scenario":
        return None
    if text == "now":
        return time.time_ns()
    if text.isdecimal():
        return int(text)
    raise click.BadParameter(f"{text!r} is neither now, nor scenario, nor a time in nanoseconds")


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
        n_left = publisher.close()
        click.echo(f"{publisher.n_delivered} batches delivered", err=True)
        if lost := n_left + publisher.n_dropped + publisher.n_refused:
            raise click.ClickException(
                f"{lost} batches were not delivered: does a broker answer at {config.bootstrap}?"
            )


@main.command(epilog="\b\nExamples:\n  failslow-agent simulate scenarios/demo.toml --labels\n")
@click.argument("scenario_path", type=click.Path(path_type=Path, dir_okay=False), metavar="SCENARIO")
@click.option("--labels", "shows_labels", is_flag=True, help="Print the right answers as JSON instead.")
def simulate(scenario_path: Path, *, shows_labels: bool) -> None:
    """Write the batches of a simulated job to a pipe, for `failslow simulate`.

    Each is a msgpack array of time, key and value, preceded by its length as 32 bits, little-endian.
    """
    scenario = _scenario(scenario_path)
    if shows_labels:
        click.echo(msgspec.json.encode(_labels(scenario)))
        return
    if sys.stdout.isatty():
        raise Problem("batches are binary: send them to a program or file, or use `failslow simulate`")
    encoder = msgspec.msgpack.Encoder()
    for batch in Cluster(scenario).batches():
        key = events_key(batch.job_id, batch.node)
        sys.stdout.buffer.write(frame(encoder.encode((batch.flush_ns, key, encode_events(batch)))))


def _labels(scenario: Scenario) -> list[dict[str, Any]]:
    """Return the right answers; `onset_s` and `end_s` are when those iterations began, after the scenario's epoch."""
    start_s = Cluster(scenario).truth().start_s
    return [
        {
            "kind": answer.kind,
            "candidates": sorted(answer.candidates),
            "onset_iteration": answer.onset_iteration,
            "end_iteration": answer.end_iteration,
            "onset_s": float(start_s[answer.onset_iteration]),
            "end_s": None if answer.end_iteration is None else float(start_s[answer.end_iteration]),
            "is_visible": answer.visible,
            "severity": answer.severity,
            "slowdown_ratio": answer.slowdown_ratio,
        }
        for answer in expected(scenario)
    ]


def _scenario(path: Path) -> Scenario:
    try:
        return load_scenario(path)
    except InvalidScenario as error:
        raise Problem(str(error)) from error


if __name__ == "__main__":
    main()
