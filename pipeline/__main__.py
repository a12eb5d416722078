"""The `failslow` command. Each subcommand is loaded when it is called, as some take their time to import."""

import importlib
import keyword

import click

COMMANDS = {
    "demo": "see three faults found in a simulated job",
    "run": "judge the events of a broker, live",
    "alerts": "show the alerts of a broker",
    "record": "write the topics of a broker to a file",
    "replay": "judge a recording again",
    "simulate": "write a recording of a simulated job",
    "import": "write a recording of another tool's file",
    "init": "declare the topics on a broker",
    "schema": "print the JSON Schema of alerts",
    "doctor": "say what is missing on this machine",
}


class _Commands(click.Group):
    """Finds a subcommand in the module of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"pipeline.commands.{_module(cmd_name)}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands, the first to try first"):
            formatter.write_dl(list(COMMANDS.items()))


def _module(command_name: str) -> str:
    """Return the module of a command; a word of the language itself gets an underscore."""
    return f"{command_name}_" if keyword.iskeyword(command_name) else command_name


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="failslow")
def main() -> None:
    """Find the GPU, host or link that makes a distributed training job slow, while the job runs."""


if __name__ == "__main__":
    main()
