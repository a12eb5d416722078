"""How a worker is run: one frozen record, from failslow.toml, the command line, or both."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from schemas.topics import EVENTS, ITERATIONS

SESSION_TIMEOUT_S_MIN = 6.0  # group.min.session.timeout.ms of Apache Kafka
REQUEST_TIMEOUT_S = 90.0


class InvalidSettings(ValueError):
    """A settings file or value that cannot be used; the message names it and the remedy."""


class Stage(StrEnum):
    """Which part of the pipeline a worker runs."""

    WINDOW = "window"
    JUDGE = "judge"
    BOTH = "both"

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that the stage consumes."""
        return {Stage.WINDOW: (EVENTS,), Stage.JUDGE: (ITERATIONS,), Stage.BOTH: (EVENTS, ITERATIONS)}[self]


class Driver(StrEnum):
    """What moves records through the stages."""

    FAUST = "faust"
    PLAIN = "plain"


class LogLevel(StrEnum):
    """What is logged, from everything to errors alone."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker. Workers of one `consumer_group` share the partitions between them."""

    bootstrap: str = "127.0.0.1:9092"
    stage: Stage = Stage.BOTH
    driver: Driver = Driver.FAUST
    consumer_group: str = "failslow"
    member: str = ""  # a worker's name in the group that outlives its process; empty: the supervisor makes one
    warmup_s: float = 1800.0  # of records that are read again before the first new one, to rebuild state from
    session_timeout_s: float = 12.0  # after which the broker gives a silent worker's partitions to another
    commit_interval_s: float = 1.0
    fetch_wait_ms: int = 100  # that the broker may hold a fetch back for lack of data
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 9464  # 0 takes any free port, and says which
    state_dir: str = ""  # where the supervisor keeps which record ended a worker; empty: failslow under XDG_STATE_HOME
    log_level: LogLevel = LogLevel.INFO

    def __post_init__(self) -> None:
        if not self.bootstrap:
            raise ValueError("bootstrap is empty: give the broker's HOST:PORT")
        if not self.consumer_group:
            raise ValueError("consumer_group is empty: give workers that share the partitions one name")
        if self.warmup_s < 0:
            raise ValueError(f"warmup_s must not be negative: {self.warmup_s}")
        if not SESSION_TIMEOUT_S_MIN <= self.session_timeout_s <= REQUEST_TIMEOUT_S:
            raise ValueError(
                f"session_timeout_s must be within {SESSION_TIMEOUT_S_MIN:g} and {REQUEST_TIMEOUT_S:g}: "
                f"{self.session_timeout_s:g}"
            )
        if self.commit_interval_s <= 0:
            raise ValueError(f"commit_interval_s must be positive: {self.commit_interval_s}")
        if not 0 <= self.metrics_port <= 65535:
            raise ValueError(f"metrics_port must be within 0 and 65535: {self.metrics_port}")

    @property
    def state_folder(self) -> Path:
        """Where the supervisor and its worker keep what has to outlive the worker."""
        if self.state_dir:
            return Path(self.state_dir)
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return Path(home) / "failslow"


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run: Settings = Settings()
    agent: dict[str, Any] = {}  # for failslow-agent, which reads it itself


def load(path: Path) -> Settings:
    """Read the [run] table of a settings file. Raises InvalidSettings, naming file and field."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=_File).run
    except OSError as error:
        raise InvalidSettings(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"{path}: {error}; failslow.toml in the repository shows every field") from error


def override(settings: Settings, **changes: Any) -> Settings:
    """Return `settings` with those `changes` that are not None; raises InvalidSettings as load() does."""
    fields = msgspec.structs.asdict(settings) | {name: value for name, value in changes.items() if value is not None}
    try:
        return msgspec.convert(fields, Settings)
    except msgspec.ValidationError as error:
        raise InvalidSettings(str(error)) from error


def to_argument(settings: Settings) -> str:
    """Return settings as one command-line word, for a worker's own process."""
    return msgspec.json.encode(settings).decode()


def from_argument(word: str) -> Settings:
    """Read what to_argument() wrote. Raises InvalidSettings."""
    try:
        return msgspec.json.decode(word, type=Settings)
    except msgspec.DecodeError as error:
        raise InvalidSettings(f"not a worker's settings: {error}") from error
