"""Asks NCCL itself who is in which communicator, for jobs that ran before the agent: NCCL's RAS service (from 2.24).

Every NCCL process listens on localhost:28028 of its network namespace unless NCCL_RAS_ENABLE=0 or NCCL_RAS_ADDR says
otherwise, and answers for its whole job, within seconds and without its training threads. Source: NVIDIA/nccl,
src/ras/client.cc and client_support.cc: lines of text, each answered by one ("SERVER PROTOCOL n", "OK", "ERROR: ..."),
and after STATUS the answer until the connection ends. With SET FORMAT JSON, which older versions do not know, it says
for each communicator its hash and size, and for each rank in it the address of its node, its process in its own PID
namespace, and how many collectives of each function it has launched: the text form says none of that by process.

Jobs on one node share the port, and the kernel chooses who answers: ask again where a process is not in the answer.
"""

import ctypes
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agents.collector import NotAvailable, RankProcess
from schemas.events import Op

PORT = 28028
ANSWER_BYTES_MAX = 64 << 20
TIMEOUT_S = 4  # for NCCL to ask the other processes

_PROTOCOL = 2
_CLONE_NEWNET = 0x40000000
_REMEDY = "start the agent before the job, or unset NCCL_RAS_ENABLE for new jobs (NCCL 2.28 or newer)"
_LOCAL = re.compile(r"\|-- (\S+)\n\s+/32 host LOCAL")
_OPS = {
    "AllReduce": Op.ALL_REDUCE,
    "AllGather": Op.ALL_GATHER,
    "ReduceScatter": Op.REDUCE_SCATTER,
    "Broadcast": Op.BROADCAST,
    "Reduce": Op.REDUCE,
}


@dataclass(frozen=True, slots=True)
class RasMember:
    """One place in a communicator; `counts` are NCCL's own, of collectives launched when it was asked."""

    comm_rank: int
    host: str  # an address of its node
    pid: int  # in its own PID namespace
    counts: Mapping[Op, int]


@dataclass(frozen=True, slots=True)
class RasCommunicator:
    """One communicator, with those of its members that answered or are known."""

    comm: int
    size: int
    members: tuple[RasMember, ...]


class _Rank(msgspec.Struct):
    rank: int
    host: str = ""
    pid: int = -1
    collective_counts: dict[str, int] = {}


class _Communicator(msgspec.Struct):
    hash: str
    size: int
    ranks: list[_Rank] = []
    missing_ranks: list[_Rank] = []


class _Status(msgspec.Struct):
    communicators: list[_Communicator]


class Inquiry:
    """One question, asked on a thread of its own: the answer takes seconds."""

    def __init__(self, process: Path, environment: Mapping[str, str], *, timeout_s: int = TIMEOUT_S) -> None:
        """Ask in the network namespace of a process, given as its folder under /proc, by its NCCL settings."""
        self._process = process
        self._address = _address(environment)
        self._timeout_s = timeout_s
        self._answer: list[RasCommunicator] | NotAvailable | None = None
        self._thread = threading.Thread(target=self._run, name="nccl-ras", daemon=True)
        self._thread.start()

    def answer(self, *, wait_s: float = 0.0) -> list[RasCommunicator] | None:
        """Return the communicators; None while there is no answer yet. Raises NotAvailable."""
        self._thread.join(wait_s)
        if isinstance(self._answer, NotAvailable):
            raise self._answer
        return self._answer

    def _run(self) -> None:
        where = f"NCCL's RAS service at {self._address[0]}:{self._address[1]} of process {self._process.name}"
        try:
            _enter(self._process / "ns" / "net")
            self._answer = _ask(self._address, self._timeout_s)
        except OSError as error:
            self._answer = NotAvailable(f"{where} does not answer ({error})", _REMEDY)
        except (ValueError, msgspec.MsgspecError) as error:
            self._answer = NotAvailable(f"{where} gives no answer that can be read ({error})", _REMEDY)


def own_memberships(
    communicators: Iterable[RasCommunicator], rank: RankProcess, addresses: Iterable[str]
) -> dict[int, tuple[RasMember, int]]:
    """Return a process's places in communicators, with their size, by hash; addresses: of its network namespace.

    A process with several places in one communicator, one for each of its GPUs, has none here: which is meant is
    not known.
    """
    own = frozenset(addresses)
    places: dict[int, list[tuple[RasMember, int]]] = {}
    for communicator in communicators:
        for member in communicator.members:
            if member.pid == rank.namespace_pid and member.host in own:
                places.setdefault(communicator.comm, []).append((member, communicator.size))
    return {comm: found[0] for comm, found in places.items() if len(found) == 1}


def local_addresses(process: Path) -> frozenset[str]:
    """Return the addresses of a process's network namespace, as text; nothing where they cannot be read."""
    found: set[str] = set()
    try:
        found.update(_LOCAL.findall((process / "net" / "fib_trie").read_text()))
        for line in (process / "net" / "if_inet6").read_text().splitlines():
            found.add(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])))
    except (OSError, ValueError):
        pass
    return frozenset(found)


def _address(environment: Mapping[str, str]) -> tuple[str, int]:
    host, _, port = environment.get("NCCL_RAS_ADDR", "").rpartition(":")
    return (host.strip("[]") or "localhost", int(port)) if port.isdigit() else ("localhost", PORT)


def _enter(namespace: Path) -> None:
    """Move this thread to another network namespace, unless it is there. Raises OSError."""
    if os.stat(namespace).st_ino == os.stat("/proc/thread-self/ns/net").st_ino:
        return
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if library.setns(descriptor, _CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
    finally:
        os.close(descriptor)


def _ask(address: tuple[str, int], timeout_s: int) -> list[RasCommunicator]:
    """Hold the conversation. Raises OSError, ValueError."""
    until_s = time.monotonic() + 2 * timeout_s + 1
    with socket.create_connection(address, timeout=1.0) as connection, connection.makefile("rb") as answers:
        for question, expected in (
            (f"CLIENT PROTOCOL {_PROTOCOL}", b"SERVER PROTOCOL"),
            (f"TIMEOUT {timeout_s}", b"OK"),
            ("SET FORMAT JSON", b"OK"),
        ):
            connection.sendall(question.encode() + b"\n")
            said = answers.readline(4096)
            if not said.startswith(expected):
                raise ValueError(f"to {question!r} it says {said.decode(errors='replace').strip()!r}")
        connection.sendall(b"STATUS\n")
        content = bytearray()
        while piece := answers.read1(1 << 16):
            content += piece
            if len(content) > ANSWER_BYTES_MAX:
                raise ValueError(f"it is longer than {ANSWER_BYTES_MAX} bytes")
            connection.settimeout(max(0.01, until_s - time.monotonic()))
    begin = content.find(b"{")
    if begin < 0:
        raise ValueError(f"it says {bytes(content[:80]).decode(errors='replace')!r}")
    return _read(bytes(content[begin:]))


def _read(content: bytes) -> list[RasCommunicator]:
    status = msgspec.json.decode(content, type=_Status)
    return [
        RasCommunicator(int(c.hash, 16), c.size, _members((*c.ranks, *c.missing_ranks))) for c in status.communicators
    ]


def _members(ranks: Sequence[_Rank]) -> tuple[RasMember, ...]:
    return tuple(
        RasMember(r.rank, r.host, r.pid, {_OPS[name]: n for name, n in r.collective_counts.items() if name in _OPS})
        for r in ranks
    )
