"""How an agent is run: from the [agent] table of a TOML file, the command line, or both."""

from pathlib import Path
from typing import Any

import msgspec


class InvalidConfig(ValueError):
    """A settings file or value that cannot be used; the message names it and the remedy."""


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One agent: where it publishes, and how much it keeps while the broker is away."""

    bootstrap: str = "127.0.0.1:9092"
    buffer_bytes_max: int = 64 * 1024 * 1024  # beyond it the oldest batches are dropped, and counted as lost events

    def __post_init__(self) -> None:
        if not self.bootstrap:
            raise ValueError("bootstrap is empty: give the broker's HOST:PORT")
        if self.buffer_bytes_max < 1024 * 1024:
            raise ValueError(f"buffer_bytes_max must be at least 1048576 (1 MiB): {self.buffer_bytes_max}")


class _File(msgspec.Struct, frozen=True, kw_only=True):
    agent: AgentConfig = AgentConfig()


def load(path: Path) -> AgentConfig:
    """Read the [agent] table of a settings file. Raises InvalidConfig, naming file and field."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=_File).agent
    except OSError as error:
        raise InvalidConfig(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}: {error}; docs/cli.md lists every field") from error


def override(config: AgentConfig, **changes: Any) -> AgentConfig:
    """Return `config` with those `changes` that are not None. Raises InvalidConfig."""
    fields = msgspec.structs.asdict(config) | {name: value for name, value in changes.items() if value is not None}
    try:
        return msgspec.convert(fields, AgentConfig)
    except msgspec.ValidationError as error:
        raise InvalidConfig(str(error)) from error
