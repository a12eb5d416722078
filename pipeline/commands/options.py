"""What several commands share: options, examples in their help, and clear words instead of tracebacks."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click

from pipeline.recording import RecordingError
from pipeline.subscription import SubscriptionError
from pipeline.terminal import Problem
from pipeline.topics import BrokerUnreachable, TopicsMissing

P = ParamSpec("P")
T = TypeVar("T")

CLEAR_ERRORS = (BrokerUnreachable, RecordingError, SubscriptionError, TopicsMissing)

bootstrap_option = click.option(
    "--bootstrap",
    envvar="KAFKA_BOOTSTRAP",
    required=True,
    metavar="HOST:PORT",
    help="Where the Kafka broker listens; the environment variable KAFKA_BOOTSTRAP stands in.",
)
out_option = click.option(
    "--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="The recording to write."
)
force_option = click.option("--force", is_flag=True, help="Replace the file where it exists.")
max_bytes_option = click.option(
    "--max-bytes",
    type=click.IntRange(min=1 << 16),
    metavar="BYTES",
    help="Never let the file grow beyond this; what is dropped is counted and said.",
)


def examples(*lines: str) -> str:
    """Return an epilog that shows how a command is used, each line as it is typed."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def says_what_is_wrong(function: Callable[P, T]) -> Callable[P, T]:
    """Turn errors about input, files and brokers into one sentence and exit code 2."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except CLEAR_ERRORS as error:
            raise Problem(str(error)) from error

    return wrapped


def refuse_to_replace(out: Path, *, force: bool) -> None:
    """Raise a Problem where the file exists and --force was not given."""
    if out.exists() and not force:
        raise Problem(f"{out} exists: choose another name, or --force to replace it")


def size_text(n_bytes: int) -> str:
    """Return a size as people write it."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.1f} {unit}"
    return f"{n_bytes} bytes"


def command(**settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Declare a command whose errors are said clearly; `settings` are click's."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        made: click.Command = click.command(**settings)(says_what_is_wrong(function))
        return made

    return decorate
