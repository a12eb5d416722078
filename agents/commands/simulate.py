"""`failslow-agent simulate`: the batches, or the right answers, of a job that never ran."""

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from agents.commands.options import Problem
from agents.simulated import Cluster, InvalidScenario, Scenario, load_scenario
from agents.simulated.labels import expected
from schemas.codec import encode_events
from schemas.framing import frame
from schemas.topics import events_key


@click.command(name="simulate", epilog="\b\nExamples:\n  failslow-agent simulate scenarios/demo.toml --labels\n")
@click.argument("scenario_path", type=click.Path(path_type=Path, dir_okay=False), metavar="SCENARIO")
@click.option("--labels", "shows_labels", is_flag=True, help="Print the right answers as JSON instead.")
def command(scenario_path: Path, *, shows_labels: bool) -> None:
    """Write the batches of a simulated job to a pipe, for `failslow simulate`.

    Each is a msgpack array of time, key and value, preceded by its length as 32 bits, little-endian.
    """
    scenario = read_scenario(scenario_path)
    if shows_labels:
        click.echo(msgspec.json.encode(_labels(scenario)))
        return
    if sys.stdout.isatty():
        raise Problem("batches are binary: send them to a program or file, or use `failslow simulate`")
    encoder = msgspec.msgpack.Encoder()
    for batch in Cluster(scenario).batches():
        key = events_key(batch.job_id, batch.node)
        sys.stdout.buffer.write(frame(encoder.encode((batch.flush_ns, key, encode_events(batch)))))


def read_scenario(path: Path) -> Scenario:
    """Read a scenario. Raises Problem."""
    try:
        return load_scenario(path)
    except InvalidScenario as error:
        raise Problem(str(error)) from error


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
