"""`failslow replay`: a recording, judged again."""

from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

import click

from pipeline.commands.options import command as declare_command
from pipeline.commands.options import examples
from pipeline.engine import Engine
from pipeline.explain import Explaining
from pipeline.explain_view import explanation_view
from pipeline.judge import Judge
from pipeline.observer import Counting
from pipeline.record import Record
from pipeline.recording import Recording, read_recording
from pipeline.replay import FrameLog, Partition, compare, count_records, differing_frames, incidents, merge, replay
from pipeline.terminal import Problem, incident_table, printable, progress, stdout
from schemas.alerts import Alert
from schemas.codec import InvalidRecord, encode_alert
from schemas.topics import ALERTS, EVENTS, ITERATIONS

EXIT_DIFFERENT = 1
EXIT_INCIDENTS = 3
_DIFFERENCES_SHOWN = 20
_WORST = "worst"


@declare_command(
    name="replay",
    epilog=examples(
        "failslow replay today.fsr",
        "failslow replay today.fsr --json | jq .component.name",
        "failslow replay today.fsr --from iterations --compare",
        "failslow replay today.fsr --explain",
        "failslow replay today.fsr --explain 2 --json | jq .hypotheses",
    )
    + "\n\n\b\nExit codes:\n  0  no incident above info\n  3  incidents above info\n  2  bad usage or input"
    "\n  1  --compare found a difference",
)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--from",
    "start",
    type=click.Choice(["events", "iterations"]),
    help="Where to begin: with what the agents sent (both stages), or with the recorded iterations (the judge alone). "
    "Without it: with the events, where the recording has any.",
)
@click.option("--json", "as_json", is_flag=True, help="One alert per line, as on the topic, instead of a table.")
@click.option(
    "--compare", "comparing", is_flag=True, help="Say whether the recorded alerts come out again, byte for byte."
)
@click.option(
    "--explain",
    "which",
    is_flag=False,
    flag_value=_WORST,
    metavar="[INCIDENT]",
    help="Show for one incident every hypothesis that was weighed, its score and the numbers it stood on. INCIDENT is "
    "its number in the table or the beginning of its fingerprint; without it: the worst.",
)
@click.pass_context
def command(
    ctx: click.Context, file: Path, start: str | None, which: str | None, *, as_json: bool, comparing: bool
) -> None:
    """Judge a recording again and show its incidents.

    The same code as live, without a broker and without a clock: the same recording always gives the same alerts.
    """
    recording = read_recording(file)
    counts = count_records(progress(recording, doing="reading"))
    topic = _topic(recording, counts, start)
    _say_what_is_missing(recording)
    explaining = None if which is None else Explaining()
    observer = explaining or Counting()
    alerts: list[Alert] = []
    for alert in _replayed(recording, counts, topic, observer):
        alerts.append(alert)
        if as_json and which is None:
            click.echo(encode_alert(alert))
    found = incidents(alerts)
    if not as_json:
        if found:
            stdout().print(incident_table(found))
        else:
            click.echo("no incident")
    if explaining is not None and which is not None and found:
        _explain(explaining, which, as_json=as_json)
    for what, amount in sorted(observer.counts.items()):
        click.echo(f"{what}: {amount}", err=True)
    if comparing and not _is_identical(recording, counts, topic, alerts):
        ctx.exit(EXIT_DIFFERENT)
    ctx.exit(EXIT_INCIDENTS if any(incident.is_above_info for incident in found) else 0)


def _topic(recording: Recording, counts: Counter[Partition], start: str | None) -> str:
    present = {topic for topic, _ in counts}
    topic = {"events": EVENTS, "iterations": ITERATIONS, None: EVENTS if EVENTS in present else ITERATIONS}[start]
    if topic not in present:
        held = ", ".join(sorted(present)) or "no record at all"
        raise Problem(f"{recording.path} has no record of {topic} to start from; it holds {held}")
    return topic


def _say_what_is_missing(recording: Recording) -> None:
    if recording.truncated is not None:
        click.echo(f"{recording.path}: {recording.truncated}", err=True)
    if recording.n_dropped:
        click.echo(
            f"{recording.path}: {recording.n_dropped} records were dropped by the recorder's size bound", err=True
        )


def _replayed(recording: Recording, counts: Counter[Partition], topic: str, observer: Counting) -> Iterator[Alert]:
    def report(record: Record, error: InvalidRecord) -> None:
        where = f"{record.topic} partition {record.partition} offset {record.offset}"
        click.echo(f"passed over {where}: {printable(str(error))}", err=True)

    stage = Engine(observer) if topic == EVENTS else Judge(observer)
    total = sum(n for (name, _), n in counts.items() if name == topic)
    records = progress(merge(recording, topic, counts), doing="judging", total=total)
    return replay(records, stage, when_unreadable=report)


def _explain(explaining: Explaining, which: str, *, as_json: bool) -> None:
    named = [explaining.worst()] if which == _WORST else explaining.named(which)
    known = ", ".join(f"{e.number} ({e.first.fingerprint})" for e in explaining.explanations)
    if len({e.first.fingerprint for e in named}) != 1:
        what = f"begins the fingerprints of {len(named)} incidents" if named else "names no incident"
        raise Problem(f"{printable(which)!r} {what}: give a number or a longer fingerprint of {known}")
    for explanation in named:
        if as_json:
            click.echo(explanation.as_json())
        else:
            click.echo()
            console = stdout()
            console.print(explanation_view(explanation, console.width))


def _is_identical(recording: Recording, counts: Counter[Partition], topic: str, alerts: list[Alert]) -> bool:
    """Compare with the recorded alerts and say the outcome."""
    recorded = (record.value for record in merge(recording, ALERTS, counts))
    comparison = compare(recorded, alerts)
    if comparison.is_identical:
        click.echo(f"identical: {comparison.n_identical} alerts, byte for byte", err=True)
        return True
    differences = comparison.differences
    if topic == EVENTS and any(name == ITERATIONS for name, _ in counts):
        live, replayed = FrameLog(), FrameLog()
        deque(replay(merge(recording, ITERATIONS, counts), Judge(live)), maxlen=0)
        deque(replay(merge(recording, EVENTS, counts), Engine(replayed)), maxlen=0)
        differences = differences + differing_frames(live, replayed)
    for difference in differences[:_DIFFERENCES_SHOWN]:
        click.echo(f"differs: {printable(difference)}", err=True)
    if len(differences) > _DIFFERENCES_SHOWN:
        click.echo(f"and {len(differences) - _DIFFERENCES_SHOWN} differences more", err=True)
    click.echo(f"{len(comparison.differences)} differences, {comparison.n_identical} alerts identical", err=True)
    return False
