"""`failslow record`: the topics of a broker, in one file."""

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click

from pipeline.commands.options import (
    bootstrap_option,
    examples,
    force_option,
    max_bytes_option,
    out_option,
    refuse_to_replace,
    size_text,
)
from pipeline.commands.options import command as declare_command
from pipeline.recording import Header, RecordingWriter, write_recording
from pipeline.subscription import Subscription
from schemas.topics import ALERTS, DEAD_LETTERS, EVENTS, ITERATIONS

TOPICS = (EVENTS, ITERATIONS, ALERTS, DEAD_LETTERS)
FLUSH_S = 1.0
IDLE_S = 0.5  # after which a recorder that was asked to end has everything
END_S_MAX = 5.0


@declare_command(
    name="record",
    epilog=examples(
        "failslow record --bootstrap kafka:9092 --out today.fsr --max-bytes 2000000000",
        "failslow record --bootstrap kafka:9092 --out past.fsr --from-beginning --until-idle 10",
    ),
)
@bootstrap_option
@out_option
@force_option
@max_bytes_option
@click.option("--from-beginning", is_flag=True, help="Begin with the oldest record that the broker still has.")
@click.option(
    "--until-idle",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="End once everything has been read and nothing more has come for this long; else at Ctrl-C or SIGTERM.",
)
def command(
    bootstrap: str,
    out: Path,
    *,
    force: bool,
    max_bytes: int | None,
    from_beginning: bool,
    until_idle: float | None,
) -> None:
    """Write events, iterations, alerts and dead letters of a broker to one recording.

    What has been read is on disk a second later, so that whatever happens to this process costs no more than that.
    """
    refuse_to_replace(out, force=force)
    header = Header(source=f"broker {bootstrap}", created_ns=time.time_ns(), topics=TOPICS)
    with (
        Subscription(bootstrap, TOPICS, from_beginning=from_beginning) as subscription,
        write_recording(out, header, max_bytes=max_bytes) as writer,
        _stoppable() as stopped,
    ):
        click.echo(f"recording {bootstrap} to {out}", err=True)
        _copy(subscription, writer, until_idle, stopped)
    click.echo(
        f"{out}: {writer.n_records} records, {size_text(out.stat().st_size)}"
        + (f"; {writer.n_dropped} dropped by --max-bytes" if writer.n_dropped else "")
    )


def _copy(subscription: Subscription, writer: RecordingWriter, until_idle: float | None, stopped: list[int]) -> None:
    """Write what comes; once asked to end, what had come by then is still taken."""
    last_record_s = last_flush_s = time.monotonic()
    stopped_s = None
    while True:
        n_records = 0
        for record in subscription.poll():
            writer.write(record)
            n_records += 1
        now_s = time.monotonic()
        if n_records:
            last_record_s = now_s
        if now_s - last_flush_s >= FLUSH_S:
            writer.flush()
            last_flush_s = now_s
        if stopped and stopped_s is None:
            stopped_s = now_s
        idle_s = IDLE_S if stopped_s is not None else until_idle
        if idle_s is not None and subscription.has_caught_up and now_s - last_record_s >= idle_s:
            return
        if stopped_s is not None and now_s - stopped_s >= END_S_MAX:
            return


@contextlib.contextmanager
def _stoppable() -> Iterator[list[int]]:
    """Give a list that is no longer empty once the process is asked to end, so that the file is completed first."""
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        stopped.append(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
