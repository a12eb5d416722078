"""Counters of InfiniBand and RoCE ports, from sysfs (Documentation/ABI/stable/sysfs-class-infiniband of Linux).

Adapters differ in what they count and what they call it; of each figure the first name is taken that a port has.
"""

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agents.clock import Clock
from agents.collector import Limit, NotAvailable, Observations, RankProcess
from agents.deltas import NAN, Deltas
from schemas.events import PortSamples, Sensor

SYSFS = Path("/sys")
PORTS_MAX: Final = 64

_RATE = re.compile(r"([\d.]+) Gb/sec")
_ACTIVE = "4"
_WORD_BYTES = 4  # what ports count data in


@dataclass(frozen=True, slots=True)
class _Counter:
    """One figure: files that may have it, below the port's folder; factors; and the largest value of old adapters.

    Counters of the InfiniBand specification's first edition stay at their largest value until somebody resets them.
    """

    files: dict[str, float]
    largest: int | None = None


_COUNTERS: Final = {
    "sent_bytes": _Counter(
        {
            "counters/port_xmit_data": _WORD_BYTES,
            "counters_ext/port_xmit_data_64": _WORD_BYTES,
            "hw_counters/tx_bytes": 1,
        },
        largest=0xFFFFFFFF,
    ),
    "received_bytes": _Counter(
        {
            "counters/port_rcv_data": _WORD_BYTES,
            "counters_ext/port_rcv_data_64": _WORD_BYTES,
            "hw_counters/rx_bytes": 1,
        },
        largest=0xFFFFFFFF,
    ),
    "wait_ticks": _Counter({"counters/port_xmit_wait": 1}, largest=0xFFFFFFFF),
    # What slows this node's own sending down; congestion that others cause is theirs to report.
    "congestion_notifications": _Counter(
        {"hw_counters/rp_cnp_handled": 1, "hw_counters/rx_cnp_pkts": 1, "hw_counters/cnpHandled": 1}
    ),
    "out_of_sequence": _Counter(
        {"hw_counters/out_of_sequence": 1, "hw_counters/packet_seq_err": 1, "hw_counters/out_of_seq_request": 1}
    ),
    "timeouts": _Counter({"hw_counters/local_ack_timeout_err": 1, "hw_counters/to_retransmits": 1}),
    "symbol_errors": _Counter({"counters/symbol_error": 1}, largest=0xFFFF),
    "link_downs": _Counter({"counters/link_downed": 1, "hw_counters/link_downed": 1}, largest=0xFF),
}
_PER_SECOND = ("sent_bytes", "received_bytes")
_IN_INTERVAL = ("congestion_notifications", "out_of_sequence", "timeouts", "symbol_errors", "link_downs")


@dataclass(slots=True)
class Infiniband:
    """Rows of PortSamples: one per port and reading, from the second reading of a port on."""

    clock: Clock
    root: Path = SYSFS
    # What a port could have sent in one tick of its wait counter: the adapter's affair, and not in sysfs.
    bytes_per_tick: float | None = None
    name: str = "infiniband"
    _is_open: bool = False
    _deltas: Deltas[tuple[str, str]] = field(default_factory=Deltas)
    _known: frozenset[str] = frozenset()
    _read_ns: int = 0
    _n_ports: int = 0
    _missing: set[str] = field(default_factory=set)  # what some port does not count, or counts no further

    @property
    def sensors(self) -> Sensor:
        """What it observes."""
        return Sensor.NETWORK if self._is_open else Sensor(0)

    def open(self) -> None:
        """Begin. Raises NotAvailable where the node has no such port."""
        if not self._ports():
            raise NotAvailable(
                f"no InfiniBand or RoCE port in {self._folder()}",
                "nothing to do on a node without such adapters; else load their driver (such as mlx5_ib), and give the "
                "agent's container the node's /sys",
            )
        self._is_open = True

    def collect(self, ranks: Sequence[RankProcess]) -> Observations:
        """Return a row for each port that was there at the last reading. Raises NotAvailable when no port is left."""
        del ranks  # all jobs of a node share its ports
        ports = self._ports()
        if not ports:
            raise NotAvailable(f"the ports in {self._folder()} are gone", "load the adapters' driver again")
        now_ns = time.monotonic_ns()
        interval_s = (now_ns - self._read_ns) / 1e9
        readings = {
            (port, what): _read(folder, counter)
            for port, folder in ports.items()
            for what, counter in _COUNTERS.items()
        }
        self._missing = {what for (_, what), value in readings.items() if math.isnan(value)}
        grown = self._deltas.update(readings)
        names = tuple(ports)
        rows = [
            {"port": place, **self._row(port, ports[port], grown, interval_s)}
            for place, port in enumerate(names)
            if port in self._known
        ]
        self._known, self._read_ns = frozenset(names), now_ns
        if not rows:
            return Observations()
        columns = {column: [row[column] for row in rows] for column in rows[0]}
        time_ns = now_ns + self.clock.offset_ns
        return Observations(port_samples=PortSamples.build(len(rows), time_ns=time_ns, **columns), ports=names)

    def limits(self) -> Sequence[Limit]:
        """Return what some port does not say."""
        found = [
            Limit(
                f"{what.replace('_', ' ')} of some RDMA ports",
                "the adapter or its driver does not count it, or the counter is full",
                "a newer driver, or `perfquery -R` to reset full counters",
            )
            for what in sorted(self._missing)
        ]
        if self._is_open and self.bytes_per_tick is None:
            found.append(
                Limit(
                    "for how long RDMA ports waited to send",
                    "ports count it in ticks, whose length only the adapter's maker knows",
                    "set [agent] rdma_bytes_per_tick; `perfquery -c LID PORT` prints the tick, one more is the bytes",
                )
            )
        if self._n_ports > PORTS_MAX:
            found.append(Limit(f"{self._n_ports - PORTS_MAX} RDMA ports", f"{PORTS_MAX} are read at most", "none"))
        return found

    def close(self) -> None:
        """Forget everything."""
        self._is_open = False
        self._known = frozenset()

    def _folder(self) -> Path:
        return self.root / "class/infiniband"

    def _ports(self) -> dict[str, Path]:
        """Return the folders of all ports by their names, such as mlx5_0/1."""
        found = {f"{path.parts[-3]}/{path.name}": path for path in sorted(self._folder().glob("*/ports/*"))}
        self._n_ports = len(found)
        return dict(list(found.items())[:PORTS_MAX])

    def _row(self, port: str, folder: Path, grown: dict[tuple[str, str], float], interval_s: float) -> dict[str, float]:
        rate = _rate(folder)
        waited_bytes = grown.get((port, "wait_ticks"), NAN) * (self.bytes_per_tick or NAN)
        return {
            "is_active": float(_text(folder / "state").startswith(_ACTIVE)),
            "rate_bits_per_s": rate,
            "send_wait_ratio": 8 * waited_bytes / rate / interval_s,
            **{f"{what}_per_s": grown.get((port, what), NAN) / interval_s for what in _PER_SECOND},
            **{what: grown.get((port, what), NAN) for what in _IN_INTERVAL},
        }


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # not there, or the adapter does not answer (EINVAL, EOPNOTSUPP)


def _rate(folder: Path) -> float:
    """Return bits per second, from such as "100 Gb/sec (4X EDR)"."""
    found = _RATE.match(_text(folder / "rate"))
    return float(found[1]) * 1e9 if found and float(found[1]) > 0 else NAN


def _read(folder: Path, counter: _Counter) -> float:
    for file, factor in counter.files.items():
        text = _text(folder / file).strip()
        if text.isdecimal() and int(text) != counter.largest:
            return int(text) * factor
    return NAN
