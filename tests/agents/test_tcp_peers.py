"""TCP connections of processes in network namespaces of their own, over links that lose and delay on order."""

import ctypes
import errno
import ipaddress
import math
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from agents import socket_diag, socket_owners, tcp_peers
from agents.clock import Clock
from agents.collector import NotAvailable, RankProcess
from agents.host import HostCollector
from agents.socket_diag import SocketDiag
from agents.tcp_peers import TcpPeers
from schemas.events import PeerSamples, Sensor
from tests.agents import host_machine as machine
from tests.conftest import give_up

pytestmark = pytest.mark.kernel

# Takes connections and reads them to their end.
SERVER = """
import socket, sys, threading
def drain(taken):
    while taken.recv(1 << 16):
        pass
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
both = family == socket.AF_INET6
listener = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family, backlog=64, dualstack_ipv6=both)
print("ready", flush=True)
while True:
    threading.Thread(target=drain, args=(listener.accept()[0],), daemon=True).start()
"""
# "A.B.C.D PORT N": makes N connections there; "send N": sends N bytes on each, and waits; "close": closes them.
CLIENT = """
import socket, sys, threading
made = []
print("ready", flush=True)
for line in sys.stdin:
    words = line.split()
    if words[0] == "close":
        for connection in made:
            connection.close()
        made.clear()
    elif words[0] == "send":
        for connection in made:
            connection.sendall(bytes(int(words[1])))
    elif words[0] == "start":
        for connection in made:
            threading.Thread(target=connection.sendall, args=(bytes(int(words[1])),), daemon=True).start()
    else:
        made += [socket.create_connection((words[0], int(words[1]))) for _ in range(int(words[2]))]
    print("done", flush=True)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Network(NamedTuple):
    """Two hosts and a switch between them, each a namespace."""

    left: str
    right: str
    switch: str
    left_address: str = "10.213.0.1"
    right_address: str = "10.213.0.2"

    def inside(self, name: str) -> tuple[str, ...]:
        """Return what makes a command run in a namespace."""
        return ("ip", "netns", "exec", name)

    def limit(self, *what: str) -> None:
        """Have the switch send to the right host through a queue that is shorter than what is sent."""
        subprocess.run(["tc", "-n", self.switch, "qdisc", "add", "dev", "right", "root", *what], check=True)


@pytest.fixture
def network() -> Iterator[Network]:
    """Make the namespaces, and remove them."""
    names = [f"failslow-{side}-{os.getpid()}" for side in ("left", "right", "switch")]
    made = Network(*names)
    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except (OSError, subprocess.CalledProcessError) as error:
            give_up(f"no network namespaces: {error}")
        ip("-n", made.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", made.switch, "link", "set", "bridge", "up")
        for side, name, address in (
            ("left", made.left, made.left_address),
            ("right", made.right, made.right_address),
        ):
            ip("link", "add", "wire", "netns", name, "type", "veth", "peer", "name", side, "netns", made.switch)
            ip("-n", made.switch, "link", "set", side, "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            ip("-n", name, "addr", "add", f"fd00:213::{address[-1]}/64", "dev", "wire", "nodad")
            ip("-n", name, "link", "set", "wire", "up")
        yield made
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def peers() -> Iterator[TcpPeers]:
    made = TcpPeers(clock=Clock())
    made.open()
    yield made
    made.close()


@pytest.fixture
def searches_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """New connections need not wait for their owner to be searched."""
    monkeypatch.setattr(socket_owners, "SEARCH_S_MIN", 0.0)


def address(samples: PeerSamples, row: int) -> str:
    number = int(samples.peer_high[row]) << 64 | int(samples.peer_low[row])
    found = ipaddress.IPv6Address(number)
    return str(found.ipv4_mapped or found)


def rows(seen: PeerSamples) -> dict[tuple[int, str], dict[str, float]]:
    """Return the rows by rank and address."""
    return {
        (int(seen.rank[row]), address(seen, row)): {name: float(getattr(seen, name)[row]) for name in seen.__slots__}
        for row in range(len(seen))
    }


def until(
    peers: TcpPeers,
    ranks: list[RankProcess],
    enough: Callable[[dict[tuple[int, str], dict[str, float]]], bool],
) -> dict[tuple[int, str], dict[str, float]]:
    """Read until the rows are as wished. Raises TimeoutError."""
    found: dict[tuple[int, str], dict[str, float]] = {}

    def look() -> bool:
        nonlocal found
        time.sleep(0.1)  # an interval to look at
        found = rows(peers.collect(ranks).peer_samples)
        return enough(found)

    try:
        machine.wait_for(look, "")
    except TimeoutError:
        raise TimeoutError(f"never as wished: {found}") from None
    return found


def test_connections_are_told_by_address_from_inside_the_namespace_of_each_process(
    network: Network, peers: TcpPeers, searches_at_once: None
) -> None:
    assert peers.sensors == Sensor.NETWORK
    with (
        machine.talking(SERVER, arguments=("::", "4001"), prefix=network.inside(network.right), waits=False) as server,
        machine.talking(CLIENT, prefix=network.inside(network.left)) as client,
    ):
        ranks = [machine.rank_process(client.pid, 0), machine.rank_process(server.pid, 1)]
        assert peers.collect(ranks).peer_samples == PeerSamples.empty()
        machine.order(client, f"{network.right_address} 4001 5")
        machine.order(client, "fd00:213::2 4001 3")
        wanted = {
            (0, network.right_address): 5,
            (0, "fd00:213::2"): 3,
            (1, network.left_address): 5,
            (1, "fd00:213::1"): 3,
        }
        found = until(peers, ranks, lambda found: {key: row["connections"] for key, row in found.items()} == wanted)
        assert 0 < found[0, network.right_address]["round_trip_s"] < 1
        machine.order(client, "close")
        until(peers, ranks, lambda found: found == {})


def test_a_queue_that_drops_shows_as_retransmits_of_the_sender(
    network: Network, peers: TcpPeers, searches_at_once: None
) -> None:
    network.limit("tbf", "rate", "20mbit", "burst", "16kb", "limit", "24kb")
    host = HostCollector(clock=Clock(), programs=None)
    host.open()
    right = network.inside(network.right)
    with (
        machine.talking(SERVER, arguments=("0.0.0.0", "4001"), prefix=right, waits=False) as server,  # noqa: S104
        machine.talking(CLIENT, prefix=network.inside(network.left)) as client,
    ):
        ranks = [machine.rank_process(client.pid, 0), machine.rank_process(server.pid, 1)]
        peers.collect(ranks)
        machine.order(client, f"{network.right_address} 4001 2")
        until(peers, ranks, lambda found: len(found) == 2)
        host.collect(ranks)
        machine.order(client, "start 1000000000")
        there, back = (0, network.right_address), (1, network.left_address)

        def is_held_up(found: dict[tuple[int, str], dict[str, float]]) -> bool:
            row = found[there]
            is_slow = row["delivery_bytes_per_s"] < 2 * 20e6 / 8  # what the queue lets through; TCP's estimate varies
            return row["retransmits"] > 2 and row["busy_ratio"] > 0.9 and is_slow

        found = until(peers, ranks, is_held_up)
        assert found[there]["busy_ratio"] < 1.2
        assert found[back]["retransmits"] == 0
        assert found[back]["busy_ratio"] < 0.1
        of_namespaces = host.collect(ranks).host_samples.tcp_retransmits
        assert of_namespaces[0] > 2
        assert of_namespaces[1] == 0
    host.close()


LAZY = """
import socket, sys
listener = socket.create_server((sys.argv[1], 4001))
print("ready", flush=True)
taken = [listener.accept()[0] for _ in range(2)]
sys.stdin.read()
"""


def test_a_receiver_that_does_not_read_shows_as_a_limiting_window(
    network: Network, peers: TcpPeers, searches_at_once: None
) -> None:
    right = network.inside(network.right)
    with (
        machine.talking(LAZY, arguments=(network.right_address,), prefix=right) as server,
        machine.talking(CLIENT, prefix=network.inside(network.left)) as client,
    ):
        del server
        ranks = [machine.rank_process(client.pid)]
        peers.collect(ranks)
        machine.order(client, f"{network.right_address} 4001 1")
        machine.order(client, "start 1000000000")
        there = (0, network.right_address)
        until(
            peers,
            ranks,
            lambda found: there in found and found[there]["receive_window_limited_ratio"] > 0.9,
        )


def test_the_namespace_of_a_process_that_has_ended_is_let_go(network: Network, peers: TcpPeers) -> None:
    with machine.talking(CLIENT, prefix=network.inside(network.left)) as client:
        ranks = [machine.rank_process(client.pid)]
        peers.collect(ranks)
        ip("netns", "del", network.left)
    assert len(peers.collect(ranks).peer_samples) == 0

    def is_gone() -> bool:
        links = subprocess.run(["ip", "-n", network.switch, "link"], check=True, capture_output=True, text=True)
        return "left" not in links.stdout

    machine.wait_for(is_gone, "the end of the namespace, and of its link")


def test_one_process_that_cannot_be_looked_into_is_told_of_and_hurts_no_other(
    peers: TcpPeers, network: Network, monkeypatch: pytest.MonkeyPatch, searches_at_once: None
) -> None:
    def refuse(namespace: Path) -> SocketDiag:
        if namespace.parts[2] == str(refused.pid):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return SocketDiag(namespace)

    monkeypatch.setattr(tcp_peers, "SocketDiag", refuse)
    right = network.inside(network.right)
    with (
        machine.talking(SERVER, arguments=(network.right_address, "4001"), prefix=right, waits=False) as refused,
        machine.talking(CLIENT, prefix=network.inside(network.left)) as client,
    ):
        ranks = [machine.rank_process(refused.pid, 0), machine.rank_process(client.pid, 1)]
        peers.collect(ranks)
        machine.order(client, f"{network.right_address} 4001 1")
        until(peers, ranks, lambda found: set(found) == {(1, network.right_address)})
        assert [limit.what for limit in peers.limits()] == [f"TCP connections of process {refused.pid}"]


def test_of_too_many_addresses_the_busiest_are_told(
    network: Network, peers: TcpPeers, monkeypatch: pytest.MonkeyPatch, searches_at_once: None
) -> None:
    monkeypatch.setattr(tcp_peers, "PEERS_MAX", 1)
    network.limit("tbf", "rate", "20mbit", "burst", "16kb", "limit", "24kb")
    right = network.inside(network.right)
    with (
        machine.talking(SERVER, arguments=("::", "4001"), prefix=right, waits=False),
        machine.talking(CLIENT, prefix=network.inside(network.left)) as client,
    ):
        ranks = [machine.rank_process(client.pid)]
        peers.collect(ranks)
        machine.order(client, f"{network.right_address} 4001 1")
        machine.order(client, "start 1000000000")
        machine.order(client, "fd00:213::2 4001 2")
        until(peers, ranks, lambda found: set(found) == {(0, network.right_address)} and bool(peers.limits()))
        assert peers.limits()[0].what == "1 addresses that rank processes are connected to"


def test_a_kernel_that_lists_nothing_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(namespace: Path) -> SocketDiag:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(tcp_peers, "SocketDiag", refuse)
    made = TcpPeers(clock=Clock())
    with pytest.raises(NotAvailable, match="tcp_diag"):
        made.open()
    assert made.sensors == Sensor(0)
    made.close()


def test_the_agents_own_namespace_is_looked_at_without_entering_it(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refuses:
        """The C library of a process without CAP_SYS_ADMIN."""

        def setns(self, *_: int) -> int:
            ctypes.set_errno(errno.EPERM)
            return -1

    monkeypatch.setattr(socket_diag, "_libc", Refuses())
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as made:
        diag = SocketDiag(Path("/proc/self/ns/net"))
        inode = os.fstat(made.fileno()).st_ino
        inodes, found = diag.read({inode})
        diag.close()
        assert inode in inodes
        assert [connection.inode for connection in found] == [inode]
    with pytest.raises(PermissionError):
        SocketDiag(Path(f"/run/netns/{network.left}"))


def test_what_an_old_kernel_does_not_count_is_missing() -> None:
    info = bytearray(104)
    struct.pack_into("=I", info, 68, 1_009)
    struct.pack_into("=I", info, 100, 7)
    header = bytearray(72)
    header[24:28] = bytes([10, 213, 0, 2])
    reply = bytes(header) + struct.pack("=HH", 4 + 1, 5) + b"c\0\0\0" + struct.pack("=HH", 4 + 104, 2) + bytes(info)
    found = socket_diag._connection(memoryview(reply), socket.AF_INET, inode=11)
    assert found.peer == ipaddress.IPv6Address("::ffff:10.213.0.2").packed
    assert found.round_trip_s == pytest.approx(1_009e-6)
    assert found.retransmits == 7
    assert math.isnan(found.busy_s)
    assert math.isnan(found.delivery_bytes_per_s)
