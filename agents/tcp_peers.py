"""How the TCP connections of rank processes do, by the address at their other end.

Every process is looked at in its own network namespace. Ratios are those of the worst connection to an address: NCCL
spreads its transfers over several, and the slowest one is waited for.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agents.clock import Clock
from agents.collector import Limit, NotAvailable, Observations, ProcessKey, RankProcess
from agents.deltas import NAN
from agents.socket_diag import Connection, SocketDiag
from agents.socket_owners import Owners
from schemas.events import PeerSamples, Sensor

PEERS_MAX = 128  # of one process; those that it is busiest with are told of


class _Namespace(NamedTuple):
    """A network namespace that rank processes are in."""

    diag: SocketDiag
    owners: Owners


class _Growth(NamedTuple):
    """What was added to one connection's totals since the last reading; NaN for a connection that is new."""

    retransmits: float
    busy_s: float
    window_limited_s: float
    buffer_limited_s: float


_NEW = _Growth(NAN, NAN, NAN, NAN)


class TcpPeers:
    """Rows of PeerSamples: one per rank process and address, from the second reading of a process on."""

    name = "tcp"

    def __init__(self, *, clock: Clock, proc: Path = Path("/proc")) -> None:
        """Say where times come from, and where processes are found."""
        self._clock = clock
        self._proc = proc
        self._is_open = False
        self._namespaces: dict[int, _Namespace] = {}
        self._refused: dict[ProcessKey, str] = {}  # processes whose namespace cannot be entered, and why
        self._before: dict[tuple[int, int], Connection] = {}  # by namespace and cookie
        self._known: frozenset[ProcessKey] = frozenset()
        self._read_ns = 0
        self._n_left_out = 0

    @property
    def sensors(self) -> Sensor:
        """What it observes."""
        return Sensor.NETWORK if self._is_open else Sensor(0)

    def open(self) -> None:
        """Begin. Raises NotAvailable where the kernel does not list connections."""
        try:
            diag = SocketDiag(self._proc / "self/ns/net")
            try:
                diag.read(frozenset())
            finally:
                diag.close()
        except OSError as error:
            raise NotAvailable(
                f"the kernel does not list TCP connections ({error})",
                "run the agent as root with CAP_SYS_ADMIN, on a kernel with CONFIG_INET_DIAG (`modprobe tcp_diag`)",
            ) from error
        self._is_open = True

    def collect(self, ranks: Sequence[RankProcess]) -> Observations:
        """Return the rows of the processes that were there at the last reading too."""
        keys = [rank.key for rank in ranks]
        members = self._enter(keys)
        now_ns = time.monotonic_ns()
        interval_s = (now_ns - self._read_ns) / 1e9
        connections = self._read(members)
        growths = self._compare(connections)
        rows: list[dict[str, Any]] = []
        self._n_left_out = 0
        for place, key in enumerate(keys):
            if key in self._known:
                rows += self._rows(place, growths[key], interval_s)
        self._known, self._read_ns = frozenset(key for inside in members.values() for key in inside), now_ns
        return Observations(peer_samples=_table(rows, now_ns + self._clock.offset_ns))

    def limits(self) -> Sequence[Limit]:
        """Return the processes whose connections are not seen."""
        return list(self._limits())

    def close(self) -> None:
        """Let all namespaces go."""
        for namespace in self._namespaces.values():
            namespace.diag.close()
        self._namespaces = {}
        self._known = frozenset()
        self._is_open = False

    def _enter(self, keys: Sequence[ProcessKey]) -> dict[int, list[ProcessKey]]:
        """Return the processes of each namespace; leave those that nobody is in, which would live on otherwise."""
        members: dict[int, list[ProcessKey]] = defaultdict(list)
        refused = {}
        for key in keys:
            path = self._proc / str(key.pid) / "ns/net"
            try:
                number = path.stat().st_ino
                if number not in self._namespaces:
                    self._namespaces[number] = _Namespace(SocketDiag(path), Owners(self._proc))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            except OSError as error:
                refused[key] = f"{path}: {error.strerror}"
                continue
            members[number].append(key)
        self._refused = refused
        for number in self._namespaces.keys() - members.keys():
            self._namespaces.pop(number).diag.close()
        return members

    def _read(self, members: dict[int, list[ProcessKey]]) -> dict[ProcessKey, list[tuple[int, Connection]]]:
        """Return the connections of each process, each with the number of its namespace."""
        found: dict[ProcessKey, list[tuple[int, Connection]]] = defaultdict(list)
        for number, keys in members.items():
            diag, owners = self._namespaces[number]
            owners.follow(keys, time.monotonic())
            by_inode = owners.by_inode()
            try:
                inodes, connections = diag.read(by_inode)
            except OSError as error:
                self._refused |= dict.fromkeys(keys, f"their connections cannot be listed: {error}")
                continue
            owners.note(inodes)
            for connection in connections:
                found[by_inode[connection.inode]].append((number, connection))
        return found

    def _compare(
        self, found: dict[ProcessKey, list[tuple[int, Connection]]]
    ) -> dict[ProcessKey, list[tuple[Connection, _Growth]]]:
        """Add what each connection's totals grew by."""
        before, self._before = self._before, {}
        growths: dict[ProcessKey, list[tuple[Connection, _Growth]]] = defaultdict(list)
        for key, connections in found.items():
            for number, connection in connections:
                name = number, connection.cookie
                self._before[name] = connection
                growths[key].append((connection, _growth(before.get(name), connection)))
        return growths

    def _rows(
        self, place: int, growths: Iterable[tuple[Connection, _Growth]], interval_s: float
    ) -> list[dict[str, Any]]:
        by_peer: dict[bytes, list[tuple[Connection, _Growth]]] = defaultdict(list)
        for connection, growth in growths:
            by_peer[connection.peer].append((connection, growth))
        rows = [_row(place, peer, inside, interval_s) for peer, inside in by_peer.items()]
        if len(rows) > PEERS_MAX:
            rows.sort(key=lambda row: -1.0 if math.isnan(row["busy_ratio"]) else row["busy_ratio"], reverse=True)
            self._n_left_out += len(rows) - PEERS_MAX
        return rows[:PEERS_MAX]

    def _limits(self) -> Iterator[Limit]:
        refused = dict(self._refused)
        for namespace in self._namespaces.values():
            refused |= namespace.owners.refused
        for key, why in refused.items():
            yield Limit(
                f"TCP connections of process {key.pid}",
                why,
                "run the agent as root with CAP_SYS_ADMIN and CAP_SYS_PTRACE",
            )
        if self._n_left_out:
            yield Limit(
                f"{self._n_left_out} addresses that rank processes are connected to",
                f"no more than {PEERS_MAX} are told of for each process, those that it is busiest with",
                "none needed: NCCL has few",
            )


def _growth(before: Connection | None, now: Connection) -> _Growth:
    if before is None:
        return _NEW
    return _Growth(
        _grown(before.retransmits, now.retransmits),
        _grown(before.busy_s, now.busy_s),
        _grown(before.window_limited_s, now.window_limited_s),
        _grown(before.buffer_limited_s, now.buffer_limited_s),
    )


def _grown(before: float, now: float) -> float:
    return now - before if before <= now else NAN


def _row(place: int, peer: bytes, growths: Sequence[tuple[Connection, _Growth]], interval_s: float) -> dict[str, Any]:
    return {
        "rank": place,
        "peer_high": int.from_bytes(peer[:8], "big"),
        "peer_low": int.from_bytes(peer[8:], "big"),
        "connections": len(growths),
        "delivery_bytes_per_s": _most(connection.delivery_bytes_per_s for connection, _ in growths),
        "busy_ratio": _most(growth.busy_s for _, growth in growths) / interval_s,
        "send_buffer_limited_ratio": _most(growth.buffer_limited_s for _, growth in growths) / interval_s,
        "receive_window_limited_ratio": _most(growth.window_limited_s for _, growth in growths) / interval_s,
        "round_trip_s": _most(connection.round_trip_s for connection, _ in growths),
        "retransmits": _sum(growth.retransmits for _, growth in growths),
    }


def _most(values: Iterable[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=NAN)


def _sum(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) if known else NAN


def _table(rows: Sequence[dict[str, Any]], time_ns: int) -> PeerSamples:
    if not rows:
        return PeerSamples.empty()
    return PeerSamples.build(len(rows), time_ns=time_ns, **{name: [row[name] for row in rows] for name in rows[0]})
