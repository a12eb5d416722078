"""The `failslow-agent` command: one process on each node of a training job, or a simulated cluster of them."""

import importlib

import click

COMMANDS = {
    "run": "observe this node and send what is seen to the broker",
    "check": "say what can and what cannot be seen on this node, and why",
    "bench": "measure what observing costs the training process",
    "simulate": "write the batches of a simulated job to a pipe",
}


class _Commands(click.Group):
    """Finds a subcommand in the module of its name, when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"agents.commands.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="failslow")
def main() -> None:
    """Observe a training job on a node and send what is seen to the broker. An agent never judges."""


if __name__ == "__main__":
    main()
