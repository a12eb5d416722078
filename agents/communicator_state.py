"""The registry of communicators as a file, for the agent that follows this one.

Written anew as a whole and put in place at once, so that a killed agent leaves either the old or the new. Read with
distrust: another version, another boot, damage, and processes that have ended since are left out.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from agents.collector import Limit, ProcessKey
from agents.processes import read_key

STATE_VERSION = 1
STATE_BYTES_MAX = 64 << 20


class SavedCommunicator(msgspec.Struct, array_like=True, frozen=True):
    """One communicator that was alive."""

    pointer: int
    generation: int
    comm: int | None
    rank: int | None
    size: int | None
    magic: int | None


class SavedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """What one process had; `firsts` are hash and rank of its first communicator of each size."""

    pid: int
    start_ticks: int
    communicators: list[SavedCommunicator]
    firsts: dict[str, tuple[int, int | None]]
    has_strangers: bool
    uses_old_hashes: bool


class _State(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    boot: str
    processes: list[SavedProcess]


class _Header(msgspec.Struct, frozen=True):
    version: int = 0


def load_state(path: Path) -> tuple[list[SavedProcess], Limit | None]:
    """Return the processes of a state file that still run, and what kept it from being read."""
    try:
        state = _read(path)
    except (FileNotFoundError, NotADirectoryError):
        return [], None
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return [], Limit(
            what="communicators that were made before this agent started",
            why=f"{path} cannot be used: {why}",
            remedy="nothing is lost for jobs that start from now on; the file is written anew",
        )
    if state.boot != _boot():
        return [], None
    return [p for p in state.processes if _is_sound(p) and read_key(p.pid) == ProcessKey(p.pid, p.start_ticks)], None


def _read(path: Path) -> _State:
    with path.open("rb") as file:
        raw = file.read(STATE_BYTES_MAX + 1)
    if len(raw) > STATE_BYTES_MAX:
        raise ValueError(f"it is larger than {STATE_BYTES_MAX} bytes")
    version = msgspec.json.decode(raw, type=_Header).version
    if version != STATE_VERSION:
        raise ValueError(f"it has version {version}, this agent writes {STATE_VERSION}")
    return msgspec.json.decode(raw, type=_State)


def _is_sound(process: SavedProcess) -> bool:
    numbers = [n for c in process.communicators for n in (c.pointer, c.comm, c.rank, c.size, c.magic) if n is not None]
    numbers += [comm for comm, _ in process.firsts.values()]
    return all(0 <= n < 1 << 64 for n in numbers) and all(size.isdecimal() for size in process.firsts)


def save_state(path: Path, processes: Sequence[SavedProcess]) -> Limit | None:
    """Put the state in place; returns what kept it from being written."""
    raw = msgspec.json.encode(_State(version=STATE_VERSION, boot=_boot(), processes=list(processes)))
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(handle, "wb") as file:
            file.write(raw)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        return Limit(
            what="communicators after a restart of the agent",
            why=f"{path} cannot be written: {error.strerror}",
            remedy="make room there, let the agent write there, or name another state_file",
        )
    return None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
