"""Asking NCCL's RAS service, played by a small server here."""

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agents.collector import NotAvailable, ProcessKey, RankProcess
from agents.ras import Inquiry, RasCommunicator, RasMember, local_addresses, own_memberships
from schemas.events import Op
from tests.conftest import give_up

OWN = Path("/proc") / str(os.getpid())


def place(rank: int, pid: int, host: str = "10.0.0.1", **counts: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "host": host,
        "pid": pid,
        "cuda_dev": 0,
        "nvml_dev": 0,
        "status": {"init_state": 0, "async_error": 0, "finalize_called": False},
        "collective_counts": {"Broadcast": 0, "SendRecv": 5, **counts},
    }


STATUS = {
    "nccl_version": "2.30.7",
    "cuda_runtime_version": 13000,
    "timestamp": "2026-08-22 15:22:22",
    "communicators_count": 2,
    "communicators": [
        {
            "hash": "0xf0f0f0f0f0f0f0f1",
            "secondary_hash": "0x1:0x2",
            "size": 3,
            "ranks_count": 2,
            "missing_ranks_count": 1,
            "ranks": [place(0, 71, AllReduce=13), place(2, 71, "10.0.0.2", AllReduce=11)],
            "missing_ranks": [{"rank": 1, "host": "10.0.0.1", "pid": 73, "status": {"unresponsive": True}}],
        },
        {"hash": "0x5", "size": 2, "ranks": [place(0, 71), place(1, 71)], "missing_ranks": []},
    ],
    "ras": {"collection_time_sec": 0.001, "timeouts_count": 0},
}


class Service:
    """Speaks as NCCL's RAS thread does; `answers` may put others in the place of what it says."""

    def __init__(self, answers: dict[str, bytes] | None = None) -> None:
        self.heard: list[str] = []
        self._answers = {
            "CLIENT PROTOCOL": b"SERVER PROTOCOL 2\n",
            "TIMEOUT": b"OK\n",
            "SET FORMAT": b"OK\n",
            "STATUS": msgspec.json.format(msgspec.json.encode(STATUS)),
        } | (answers or {})
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(30)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with self._listener, self._listener.accept()[0] as connection:
            connection.settimeout(30)
            for line in connection.makefile("rb"):
                command = line.decode().strip()
                self.heard.append(command)
                name = next(n for n in self._answers if command.startswith(n))
                try:
                    connection.sendall(self._answers[name])
                except OSError:
                    return
                if name == "STATUS":
                    return

    def close(self) -> None:
        self._thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def start(answers: dict[str, bytes] | None = None) -> Service:
        services.append(Service(answers))
        return services[-1]

    yield start
    for service in services:
        service.close()


def ask(port: int) -> list[RasCommunicator]:
    found = Inquiry(OWN, {"NCCL_RAS_ADDR": f"localhost:{port}"}).answer(wait_s=30)
    assert found is not None
    return found


def test_it_tells_communicators_their_members_and_what_they_have_launched(serve: Callable[..., Service]) -> None:
    service = serve()
    first, second = ask(service.port)
    assert (first.comm, first.size) == (0xF0F0_F0F0_F0F0_F0F1, 3)
    assert first.members == (
        RasMember(0, "10.0.0.1", 71, {Op.BROADCAST: 0, Op.ALL_REDUCE: 13}),
        RasMember(2, "10.0.0.2", 71, {Op.BROADCAST: 0, Op.ALL_REDUCE: 11}),
        RasMember(1, "10.0.0.1", 73, {}),
    )
    assert (second.comm, second.size, len(second.members)) == (5, 2, 2)
    assert service.heard == ["CLIENT PROTOCOL 2", "TIMEOUT 4", "SET FORMAT JSON", "STATUS"]


def test_a_process_finds_its_own_places_by_address_and_number(serve: Callable[..., Service]) -> None:
    communicators = ask(serve().port)
    rank = RankProcess(
        key=ProcessKey(4711, 3),
        job_id="j",
        incarnation="a",
        world_size=3,
        rank=2,
        local_rank=0,
        namespace_pid=71,
        start_ns=0,
    )
    found = own_memberships(communicators, rank, {"127.0.0.1", "10.0.0.2"})
    assert {comm: (member.comm_rank, size) for comm, (member, size) in found.items()} == {0xF0F0_F0F0_F0F0_F0F1: (2, 3)}
    # Of two places in one communicator it is not known which is meant.
    assert own_memberships(communicators, rank, {"10.0.0.1"}).keys() == {0xF0F0_F0F0_F0F0_F0F1}
    assert own_memberships(communicators, rank, {"10.0.0.3"}) == {}


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"SET FORMAT": b"ERROR: Unknown command SET FORMAT JSON\n"}, "Unknown command"),
        ({"CLIENT PROTOCOL": b"220 mail ready\n"}, "mail ready"),
        ({"CLIENT PROTOCOL": b""}, "does not answer|says"),
        ({"TIMEOUT": b"ERROR: Invalid timeout\n"}, "Invalid timeout"),
        ({"STATUS": b"nothing here"}, "nothing here"),
        ({"STATUS": b'{"communicators": 3}'}, "cannot be read|can be read"),
        ({"STATUS": b'{"communicators": [{"hash": "0xzz", "size": 1}]}'}, "can be read"),
        ({"STATUS": msgspec.json.encode(STATUS)[:-40]}, "can be read"),
    ],
)
def test_an_odd_answer_is_said_with_a_remedy(
    answers: dict[str, bytes], words: str, serve: Callable[..., Service]
) -> None:
    with pytest.raises(NotAvailable, match=words) as raised:
        ask(serve(answers).port)
    assert "NCCL_RAS_ENABLE" in raised.value.remedy


def test_where_nobody_listens_it_is_not_available() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(NotAvailable, match=f"localhost:{port}"):
        ask(port)


def test_a_process_that_has_ended_is_not_available() -> None:
    with pytest.raises(NotAvailable, match="No such file"):
        Inquiry(Path("/proc/0"), {}).answer(wait_s=30)


def test_there_is_no_answer_before_there_is_one() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        port = silent.getsockname()[1]
        inquiry = Inquiry(OWN, {"NCCL_RAS_ADDR": f"127.0.0.1:{port}"})
        assert inquiry.answer() is None
        with pytest.raises(NotAvailable, match="timed out"):
            inquiry.answer(wait_s=30)


def test_the_addresses_of_a_network_namespace_are_known() -> None:
    assert "127.0.0.1" in local_addresses(OWN)
    assert local_addresses(Path("/proc/0")) == frozenset()


IN_A_NAMESPACE = """
import ctypes, socket, subprocess, sys
if ctypes.CDLL(None, use_errno=True).unshare(0x40000000) != 0:
    sys.exit("not allowed")
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with socket.create_server(("127.0.0.1", 28028)) as listener:
    print("listening", flush=True)
    connection, _ = listener.accept()
    with connection, connection.makefile("rb") as lines:
        for line in lines:
            if line.startswith(b"STATUS"):
                connection.sendall(b'{"communicators": [{"hash": "0x1f", "size": 7}]}')
                break
            connection.sendall(b"SERVER PROTOCOL 2\\n" if line.startswith(b"CLIENT") else b"OK\\n")
"""


@pytest.mark.kernel
def test_it_asks_in_the_network_namespace_of_the_process() -> None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        give_up("making a network namespace needs root and iproute2: run as root, install Debian's iproute2")
    with subprocess.Popen([sys.executable, "-c", IN_A_NAMESPACE], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"listening\n"
            own = os.stat("/proc/self/ns/net").st_ino
            found = Inquiry(Path("/proc") / str(process.pid), {}).answer(wait_s=30)
            assert found == [RasCommunicator(31, 7, ())]
            assert os.stat("/proc/thread-self/ns/net").st_ino == own
        finally:
            process.kill()
