"""`failslow init`: the topics, declared."""

import click

from pipeline.commands.options import bootstrap_option, examples
from pipeline.commands.options import command as declare_command
from pipeline.terminal import Problem
from pipeline.topics import declare


@declare_command(name="init", epilog=examples("failslow init --bootstrap kafka:9092 --replication 3"))
@bootstrap_option
@click.option("--replication", type=click.IntRange(min=1), default=1, show_default=True, help="Copies of each topic.")
def command(bootstrap: str, replication: int) -> None:
    """Declare the topics on a broker: partitions, retention, clean-up policy.

    Running it again changes nothing, or what has to change; partitions are never taken away.
    """
    try:
        changes = declare(bootstrap, replication=replication)
    except RuntimeError as error:
        raise Problem(str(error)) from error
    click.echo("\n".join(changes) or "all topics stand as they should")
