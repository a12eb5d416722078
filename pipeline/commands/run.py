"""`failslow run`: a worker of the live pipeline."""

import contextlib
from pathlib import Path

import click

from pipeline.commands.options import command as declare_command
from pipeline.commands.options import examples
from pipeline.logs import configure
from pipeline.settings import Driver, InvalidSettings, LogLevel, Settings, Stage, load, override
from pipeline.supervise import run
from pipeline.terminal import Problem
from pipeline.topics import BrokerUnreachable, check


@declare_command(
    name="run",
    epilog=examples(
        "failslow run --bootstrap kafka:9092",
        "failslow run --config failslow.toml --stage judge",
        "failslow run --bootstrap kafka:9092 --stage window --metrics-port 0 --driver plain",
    ),
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Read the [run] table of this file; failslow.toml in the repository shows every field. Options win.",
)
@click.option(
    "--bootstrap",
    envvar="KAFKA_BOOTSTRAP",
    metavar="HOST:PORT",
    help="Where the Kafka broker listens; the environment variable KAFKA_BOOTSTRAP stands in.",
)
@click.option(
    "--stage",
    type=click.Choice([stage.value for stage in Stage]),
    help="window scales by node, judge by job; both is the default.",
)
@click.option(
    "--driver",
    type=click.Choice([driver.value for driver in Driver]),
    help="What moves the records: Faust, or a plain consumer loop.",
)
@click.option("--consumer-group", metavar="NAME", help="Workers of one group share the partitions between them.")
@click.option("--warmup-s", type=float, metavar="SECONDS", help="How much is read again to rebuild what a worker knew.")
@click.option(
    "--session-timeout-s", type=float, metavar="SECONDS", help="Silence after which another worker takes over."
)
@click.option(
    "--commit-interval-s", type=float, metavar="SECONDS", help="How often a worker writes down how far it is."
)
@click.option("--fetch-wait-ms", type=int, metavar="MS", help="How long the broker may wait for more data.")
@click.option("--metrics-host", metavar="HOST", help="Where Prometheus finds the metrics (docs/metrics.md).")
@click.option("--metrics-port", type=int, metavar="PORT", help="0 takes any free one, and says which.")
@click.option("--state-dir", metavar="FOLDER", help="Where it is kept which record ended a worker.")
@click.option("--log-level", type=click.Choice([level.value for level in LogLevel]), help="How much is logged.")
@click.pass_context
def command(ctx: click.Context, /, config_path: Path | None, **changes: str | float | None) -> None:
    """Judge the events of a broker until SIGTERM: windows, judgements, alerts.

    Alerts go to the topic failslow.alerts (`failslow alerts` shows them), records that cannot be read to
    failslow.dead-letters. A worker that dies is started anew; what it had published is published once.
    """
    try:
        settings = override(load(config_path) if config_path else Settings(), **changes)
    except InvalidSettings as error:
        raise Problem(str(error)) from error
    configure(settings.log_level)
    with contextlib.suppress(BrokerUnreachable):  # a broker that is not up yet is waited for
        check(settings.bootstrap)
    ctx.exit(run(settings))
