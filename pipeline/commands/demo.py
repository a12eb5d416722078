"""`failslow demo`: a fault injected, flagged and resolved, before your eyes."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from pipeline.agent_process import AgentProblem, ExpectedIncident, expected_incidents
from pipeline.broker import BrokerError
from pipeline.commands.options import command as declare_command
from pipeline.commands.options import examples, force_option, refuse_to_replace
from pipeline.demo import Demo, DemoError
from pipeline.engine import Engine
from pipeline.judge import Judge
from pipeline.recording import read_recording
from pipeline.replay import Stage, compare, count_records, incidents, merge, replay
from pipeline.terminal import Problem, accused_text, alert_line, component_text, progress, stdout
from pipeline.verdict import Answer, answers
from schemas.topics import ALERTS, EVENTS, ITERATIONS

SCENARIO = Path(__file__).parents[2] / "scenarios" / "demo.toml"


@declare_command(
    name="demo",
    epilog=examples("failslow demo", "failslow demo --scenario scenarios/two_at_once.toml --out two.fsr")
    + "\n\nExit code 1: a fault was not flagged right or not resolved, or the replay differs.",
)
@click.option(
    "--scenario",
    type=click.Path(path_type=Path, dir_okay=False),
    default=SCENARIO,
    help="The job to simulate, as TOML (docs/scenarios.md); else 64 ranks on 8 nodes with three faults.",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Keep the recording in this file.")
@force_option
@click.pass_context
def command(ctx: click.Context, /, scenario: Path, out: Path | None, *, force: bool) -> None:
    """Watch faults being injected into a simulated job, flagged and resolved.

    Starts a broker inside this process, and as processes of their own: the agents of the job, a Faust worker, and a
    recorder. Takes as long as the simulated job does, a minute by default; nothing is left behind.
    """
    if out is not None:
        refuse_to_replace(out, force=force)
    started_s = time.monotonic()
    try:
        expected = [fault for fault in expected_incidents(scenario) if fault.is_visible]
        with tempfile.TemporaryDirectory(prefix="failslow-demo-") as folder:
            recording = out or Path(folder, "demo.fsr")
            with Demo(scenario, recording, Path(folder)) as demo:
                click.echo(f"broker on {demo.bootstrap}; a Faust worker and a recorder are starting")
                demo.start_job()
                click.echo(f"{scenario.name} is running; {len(expected)} faults will come")
                _show(demo, expected)
                demo.end()
            given, strays = answers(expected, demo.arrivals, demo.epoch_ns)
            stdout().print(_table(given))
            for stray in strays:
                click.echo(f"not injected, but flagged: {stray.last.kind} of {accused_text(stray.last)}")
            is_identical = _replay(recording)
    except (AgentProblem, BrokerError) as error:
        raise Problem(str(error)) from error
    except DemoError as error:
        raise click.ClickException(str(error)) from error
    is_right = all(answer.is_right for answer in given) and not strays
    verdict = "every fault was flagged right and resolved" if is_right else "not every answer was right"
    click.echo(f"{verdict}; {time.monotonic() - started_s:.0f} s in all" + (f"; recording in {out}" if out else ""))
    ctx.exit(0 if is_right and is_identical else 1)


def _show(demo: Demo, expected: list[ExpectedIncident]) -> None:
    """Print each alert when it comes, and each fault when it begins and ends."""
    console = stdout()
    news = _news(expected)
    upcoming = next(news, None)
    for arrival in demo.follow():
        while upcoming is not None and time.time_ns() >= demo.epoch_ns + upcoming[0] * 1e9:
            console.print(Text(time.strftime("%H:%M:%S ", time.gmtime()) + upcoming[1], "dim"))
            upcoming = next(news, None)
        if arrival is not None:
            console.print(alert_line(arrival.alert))


def _news(expected: list[ExpectedIncident]) -> Iterator[tuple[float, str]]:
    news = []
    for fault in expected:
        what = f"{fault.kind} of {_candidates_text(fault)}"
        news.append((fault.onset_s, f"injected {what} from iteration {fault.onset_iteration}"))
        if fault.end_s is not None:
            news.append((fault.end_s, f"removed  {what} from iteration {fault.end_iteration}"))
    return iter(sorted(news))


def _candidates_text(fault: ExpectedIncident) -> str:
    return " or ".join(component_text(name) for name in sorted(fault.candidates))


def _table(given: list[Answer]) -> Table:
    table = Table(title="what was injected, and what was found", header_style="bold")
    table.add_column("injected", overflow="fold")
    table.add_column("flagged")
    for heading in ("onset", "found at", "delay in iterations", "in s", "slowdown", "found", "removed at"):
        table.add_column(heading, justify="right")
    table.add_column("resolved")
    for answer in given:
        fault, found = answer.expected, answer.found
        injected = Text(f"{fault.kind}: {_candidates_text(fault)}")
        end = "-" if fault.end_iteration is None else str(fault.end_iteration)
        if found is None:
            truth = ("", "", "", f"{fault.slowdown_ratio:.2f}x", "", end)
            table.add_row(injected, Text("no", "bold red"), str(fault.onset_iteration), *truth, "")
            continue
        is_resolved = found.last.resolution is not None
        resolved = f"{found.last.resolved_iteration} {found.last.resolution}" if is_resolved else "no"
        table.add_row(
            injected,
            Text("right", "green"),
            str(fault.onset_iteration),
            str(found.last.onset_iteration),
            str(answer.delay_iterations),
            f"{answer.delay_s:.1f}",
            f"{fault.slowdown_ratio:.2f}x",
            f"{found.last.slowdown_ratio:.2f}x",
            end,
            Text(resolved, "green" if is_resolved else "bold red"),
        )
    return table


def _replay(path: Path) -> bool:
    """Replay the recording both ways and say whether the alerts come out again, byte for byte."""
    recording = read_recording(path)
    counts = count_records(recording)
    is_identical = recording.truncated is None
    if recording.truncated is not None:
        click.echo(f"the recording is {recording.truncated}")
    ways: tuple[tuple[str, Stage], ...] = ((ITERATIONS, Judge()), (EVENTS, Engine()))
    for topic, stage in ways:
        started_s = time.monotonic()
        n_records = sum(n for (name, _), n in counts.items() if name == topic)
        records = progress(merge(recording, topic, counts), doing=f"replaying {topic}", total=n_records)
        alerts = list(replay(records, stage))
        took_s = time.monotonic() - started_s
        comparison = compare((record.value for record in merge(recording, ALERTS, counts)), alerts)
        said = f"{comparison.n_identical} alerts identical, byte for byte"
        if not comparison.is_identical:
            said += f"; {len(comparison.differences)} DIFFER, the first: {comparison.differences[0]}"
            is_identical = False
        n_incidents = len(incidents(alerts))
        what = f"{n_records} records of {topic} in {took_s:.1f} s: {n_incidents} incidents"
        click.echo(f"replayed {what}, {said}")
    return is_identical
