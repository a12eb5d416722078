"""How alerts and incidents look to people: one line each, or a table; and progress where it takes a while.

Names come from the network: they are stripped of control characters and never read as markup.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pipeline.replay import Incident
from schemas.alerts import Alert, AlertState, ComponentName, ComponentType, Resolution, Severity

PROGRESS_AFTER_S = 2.0

_STYLE = {Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.CRITICAL: "bold red"}
_RESOLUTION = {
    Resolution.RECOVERED: "recovered",
    Resolution.JOB_ENDED: "job ended",
    Resolution.SUPERSEDED: "superseded",
    Resolution.LOST_SIGHT: "lost sight",
}

Item = TypeVar("Item")


class Problem(click.ClickException):
    """Bad usage or bad input: one clear sentence with a remedy on stderr, exit code 2."""

    exit_code = 2


def printable(text: str) -> str:
    """Return the text without what could steer a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def component_text(name: ComponentName) -> str:
    """Return a component in the words of an operator: "GPU GPU-5a of node-3", "link node-1 - node-2"."""
    match name.type:
        case ComponentType.GPU:
            said = f"{_gpu_text(name.gpu)} of {name.node}"
        case ComponentType.HOST:
            said = f"host {name.node}"
        case ComponentType.RANK:
            said = f"rank {name.rank}" + (f" on {name.node}" if name.node else "")
        case ComponentType.LINK if not name.peer:
            said = f"network interface of {name.node}"
        case ComponentType.LINK if name.peer == name.node:
            said = f"GPU interconnect of {name.node}"
        case ComponentType.LINK:
            said = f"link {name.node} - {name.peer}"
        case ComponentType.STAGE:
            said = f"pipeline stage {name.stage}"
        case ComponentType.JOB:
            said = "the whole job"
    return printable(said)


def accused_text(alert: Alert) -> str:
    """Return the accused, or all candidates where the sensors cannot tell them apart."""
    candidates = alert.component.candidates or (alert.component.name,)
    shown = [component_text(name) for name in candidates[:4]]
    more = len(candidates) - len(shown)
    return " or ".join(shown) + (f" or {more} more" if more else "")


def alert_line(alert: Alert) -> Text:
    """Return one revision of an incident as one line: when, what, who, how much, since when."""
    is_firing = alert.state is AlertState.FIRING
    at = datetime.fromtimestamp(alert.as_of_time_ns / 1e9, UTC).strftime("%H:%M:%S")
    line = Text(no_wrap=True, overflow="ignore")
    line.append(f"{at} ", "dim")
    line.append(f"{'FIRING  ' if is_firing else 'RESOLVED'} ", _STYLE[alert.severity] if is_firing else "green")
    line.append(f"{alert.severity:<8} {alert.kind} ", _STYLE[alert.severity])
    line.append(f"job {printable(alert.job_id)}: {accused_text(alert)}, ")
    line.append(f"{alert.slowdown_ratio:.2f}x slower", "bold")
    line.append(f" since iteration {alert.onset_iteration} (detected at {alert.detected_iteration})")
    if alert.resolution is not None:
        line.append(f", {_RESOLUTION[alert.resolution]} at {_or_dash(alert.resolved_iteration)}")
    line.append(f", {alert.lost_gpu_s:,.0f} GPU-seconds lost, confidence {alert.confidence:.2f}")
    return line


def incident_table(incidents: Iterable[Incident]) -> Table:
    """Return incidents as a table, one row each."""
    table = Table(header_style="bold", expand=False)
    table.add_column("no", justify="right")
    for column in ("job", "component", "kind", "severity"):
        table.add_column(column, overflow="fold")
    for column in ("slowdown", "onset", "detected", "delay"):
        table.add_column(column, justify="right")
    table.add_column("resolved", overflow="fold")
    table.add_column("lost GPU-s", justify="right")
    table.add_column("advice", overflow="fold", min_width=12)
    for number, incident in enumerate(incidents, 1):
        last = incident.last
        resolved = (
            "-" if last.resolution is None else f"{_or_dash(last.resolved_iteration)} {_RESOLUTION[last.resolution]}"
        )
        table.add_row(
            str(number),
            Text(printable(last.job_id)),
            Text(accused_text(last)),
            Text(last.kind),
            Text(last.severity, _STYLE[last.severity]),
            f"{last.slowdown_ratio:.2f}x",
            str(last.onset_iteration),
            str(last.detected_iteration),
            str(last.detected_iteration - last.onset_iteration),
            Text(resolved),
            f"{last.lost_gpu_s:,.0f}",
            Text(printable(last.advice)),
        )
    return table


def stdout() -> Console:
    """Return a console on stdout; where that is no terminal, lines are as long as they need to be."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200, highlight=False, soft_wrap=False)


def progress(items: Iterable[Item], *, doing: str, total: int | None = None) -> Iterator[Item]:
    """Yield the items, with a bar on stderr once it has taken two seconds; none where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    started_s = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(doing, total=total)
    is_shown = False
    try:
        for n_done, item in enumerate(items):
            if not is_shown and time.monotonic() - started_s > PROGRESS_AFTER_S:
                bar.start()
                is_shown = True
            bar.update(task, completed=n_done)
            yield item
    finally:
        if is_shown:
            bar.stop()


def _gpu_text(gpu: str) -> str:
    """Return an index as "GPU 5", and of a UUID as much as tells the GPUs of a node apart."""
    return gpu[:12] if gpu.startswith("GPU-") else f"GPU {gpu or '?'}"


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)
