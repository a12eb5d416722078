"""What the subcommands share: how they are configured, and how they say what is wrong."""

from pathlib import Path
from typing import Any

import click

from agents.config import AgentConfig, InvalidConfig, load, override


class Problem(click.ClickException):
    """Bad usage or bad input: one clear sentence with a remedy on stderr, exit code 2."""

    exit_code = 2


# Whether the file can be read is found out by reading it: access(2), which click asks, knows nothing of capabilities.
_FILE = click.Path(path_type=Path, dir_okay=False, readable=False)
config_option = click.option("--config", "config_path", type=_FILE, help="Read the [agent] table of a file.")


def load_config(path: Path | None, **changes: Any) -> AgentConfig:
    """Return the settings of a file, or the defaults, with those `changes` that are not None. Raises Problem."""
    try:
        return override(load(path) if path else AgentConfig(), **changes)
    except InvalidConfig as error:
        raise Problem(str(error)) from error
