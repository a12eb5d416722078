"""`failslow simulate`: a job that never ran, as a recording."""

from pathlib import Path

import click
import msgspec

from pipeline.agent_process import AgentProblem, expected_incidents, simulated
from pipeline.commands.options import command as declare_command
from pipeline.commands.options import examples, force_option, max_bytes_option, out_option, refuse_to_replace, size_text
from pipeline.record import Record
from pipeline.recording import Header, write_recording
from pipeline.terminal import Problem, progress
from schemas.topics import EVENTS


@declare_command(
    name="simulate",
    epilog=examples(
        "failslow simulate scenarios/demo.toml --out demo.fsr",
        "failslow replay demo.fsr",
        "failslow simulate scenarios/demo.toml --out demo.fsr --force --json-truth | jq",
    ),
)
@click.argument("scenario", type=click.Path(path_type=Path, dir_okay=False))
@out_option
@force_option
@max_bytes_option
@click.option("--json-truth", is_flag=True, help="Print the right answers as JSON; they are not in the recording.")
def command(scenario: Path, out: Path, *, force: bool, max_bytes: int | None, json_truth: bool) -> None:
    """Simulate the agents of a training job and write what they would have sent.

    SCENARIO is a TOML file: the job, its faults and its harmless oddities; docs/scenarios.md explains it. The same
    scenario always gives the same file, byte for byte.
    """
    refuse_to_replace(out, force=force)
    header = Header(source=f"simulation {scenario.name}", topics=(EVENTS,))
    try:
        batches = simulated(scenario)
        first = next(batches, None)  # so that a scenario that cannot be read leaves no file behind
        with write_recording(out, header, max_bytes=max_bytes) as writer:
            if first is not None:
                writer.write(Record(EVENTS, 0, 0, first.time_ns, first.key, first.value))
            for offset, batch in enumerate(progress(batches, doing="simulating"), start=1):
                writer.write(Record(EVENTS, 0, offset, batch.time_ns, batch.key, batch.value))
        if json_truth:
            click.echo(msgspec.json.format(msgspec.json.encode(expected_incidents(scenario)), indent=2))
    except AgentProblem as error:
        raise Problem(str(error)) from error
    click.echo(
        f"{out}: {writer.n_records} batches, {size_text(out.stat().st_size)}"
        + (f"; {writer.n_dropped} dropped by --max-bytes" if writer.n_dropped else ""),
        err=json_truth,
    )
