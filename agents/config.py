"""How an agent is run: from the [agent] table of a TOML file, the command line, or both."""

import os
from pathlib import Path
from typing import Any

import msgspec

from agents.job_identity import IdentityConfig
from agents.markers import MarkerConfig


class InvalidConfig(ValueError):
    """A settings file or value that cannot be used; the message names it and the remedy."""


SOURCES = ("nccl", "host", "nvml", "inspector", "tcp", "infiniband", "markers")


class NcclConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How NCCL and CUDA calls are observed."""

    ring_bytes: int = 8 * 1024 * 1024  # between kernel and agent; what finds no room is counted as lost
    raw_calls: bool = False  # every call is a row; by default runs of equal calls are put together in the kernel
    count_launches: bool = False  # 20,000 kernel launches a second cost the launching thread 1 %
    probe_dear_functions: bool = False  # also those where the kernel has to single-step, 20 times as dear
    libraries: tuple[str, ...] = ()  # to observe from the start; others when a process is seen to use them

    def __post_init__(self) -> None:
        if self.ring_bytes < 65536 or self.ring_bytes & (self.ring_bytes - 1):
            raise ValueError(f"ring_bytes must be a power of two, and at least 65536: {self.ring_bytes}")


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One agent: where it publishes, what it observes, and how much it keeps while the broker is away."""

    bootstrap: str = "127.0.0.1:9092"
    buffer_bytes_max: int = 64 * 1024 * 1024  # beyond it the oldest batches are dropped, and counted as lost events
    node: str = ""  # empty: the host name
    flush_interval_s: float = 1.0
    state_dir: str = ""  # empty: failslow below $STATE_DIRECTORY, /var/lib (root) or $XDG_STATE_HOME
    off: tuple[str, ...] = ()  # sources that are not read, of SOURCES
    nvml_library: str = ""  # where the system's loader does not find libnvidia-ml.so.1
    sysfs: str = "/sys"  # where the counters of RDMA ports are found
    rdma_bytes_per_tick: float = 0.0  # of port_xmit_wait; 0: unknown, and so is the share of time without credit
    nccl: NcclConfig = NcclConfig()
    identity: IdentityConfig = IdentityConfig()
    markers: MarkerConfig = MarkerConfig()

    def __post_init__(self) -> None:
        if not self.bootstrap:
            raise ValueError("bootstrap is empty: give the broker's HOST:PORT")
        if self.buffer_bytes_max < 1024 * 1024:
            raise ValueError(f"buffer_bytes_max must be at least 1048576 (1 MiB): {self.buffer_bytes_max}")
        if not 0.1 <= self.flush_interval_s <= 60:
            raise ValueError(f"flush_interval_s must be in 0.1..60: {self.flush_interval_s}")
        if unknown := set(self.off) - set(SOURCES):
            raise ValueError(f"off names {sorted(unknown)}, sources are {', '.join(SOURCES)}")

    @property
    def state_path(self) -> Path:
        """The folder where an agent keeps what has to survive it."""
        if self.state_dir:
            return Path(self.state_dir)
        if directory := os.environ.get("STATE_DIRECTORY"):
            return Path(directory)
        if os.geteuid() == 0:
            return Path("/var/lib/failslow")
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "failslow"


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
