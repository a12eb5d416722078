"""The collector of host signals begins with what it has, and leaves nothing behind."""

import contextlib
import ctypes
import math
import os
from pathlib import Path

import numpy as np
import pytest

from agents import host_programs, host_tracer
from agents.clock import Clock
from agents.collector import NotAvailable
from agents.ebpf import bcc_backend, requirements
from agents.ebpf.bpf_call import bpf
from agents.host import HostCollector
from agents.host_programs import HostPrograms
from schemas.events import Sensor
from tests.agents import host_machine as machine
from tests.conftest import REPOSITORY, give_up

FOLLOWS = """
import sys
from agents.clock import Clock
from agents.host import HostCollector
from agents.host_programs import HostPrograms
from tests.agents import host_machine as machine
collector = HostCollector(clock=Clock(), programs=HostPrograms())
collector.open()
collector.collect([machine.rank_process(int(sys.argv[1]))])
print("ready", *collector.limits(), flush=True)
sys.stdin.read()
"""
_BPF_PROG_GET_FD_BY_ID = 13


class _ProgramNumber(ctypes.Structure):
    _fields_ = (("number", ctypes.c_uint32), ("next", ctypes.c_uint32), ("flags", ctypes.c_uint32))


def programs_of(pid: int) -> set[int]:
    """Return the numbers of the kernel programs that a process holds."""
    found = set()
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of the folder itself, while it was read
            lines = dict(line.split(":\t", 1) for line in info.read_text().splitlines() if ":\t" in line)
            if "prog_id" in lines:
                found.add(int(lines["prog_id"]))
    return found


def is_loaded(program: int) -> bool:
    """Say whether the kernel still has a program."""
    try:
        os.close(bpf(_BPF_PROG_GET_FD_BY_ID, _ProgramNumber(number=program)))
    except FileNotFoundError:
        return False
    return True


@pytest.mark.kernel
@pytest.mark.parametrize("end", ["killed", "ended"])
def test_nothing_is_left_in_the_kernel_when_the_agent_is_killed_or_ends(end: str) -> None:
    with (
        machine.talking(machine.THREADS) as rank,
        machine.talking(FOLLOWS, arguments=(str(rank.pid),), cwd=REPOSITORY) as agent,
    ):
        loaded = programs_of(agent.pid)
        if not loaded:
            give_up("no kernel programs here: run as root, with bcc installed")
        assert len(loaded) > 5
        assert all(is_loaded(program) for program in loaded)
        if end == "killed":
            agent.kill()
        else:
            assert agent.stdin is not None
            agent.stdin.close()
        agent.wait()
        machine.wait_for(lambda: not any(is_loaded(program) for program in loaded), "the kernel to let go")
        assert machine.state(rank.pid) == "S", "the rank process goes on"


@pytest.mark.kernel
def test_a_collector_may_be_opened_again_and_closed_twice() -> None:
    collector = HostCollector(clock=Clock(), programs=HostPrograms())
    collector.close()
    assert collector.sensors == Sensor(0)
    before = programs_of(os.getpid())
    with machine.talking(machine.THREADS) as idle:
        rank = machine.rank_process(idle.pid)
        for _ in range(2):
            collector.open()
            if any("refuses" in limit.why or "bcc" in limit.why for limit in collector.limits()):
                give_up(str(collector.limits()))
            assert programs_of(os.getpid()) > before
            assert len(machine.read(collector, rank)) == 0
            rows = machine.rows_until(collector, [rank], lambda row: True)
            assert rows[0]["off_cpu_ratio"] == pytest.approx(1, abs=0.05)
            collector.close()
            assert programs_of(os.getpid()) == before
            assert collector.sensors == Sensor(0)
    collector.close()


@pytest.fixture
def in_first_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the agent believe that it sees processes by the kernel's own numbers, wherever the tests run."""
    monkeypatch.setattr(requirements, "_FIRST_PID_NAMESPACE", os.stat("/proc/self/ns/pid").st_ino)


@pytest.mark.kernel
def test_threads_and_processes_beyond_the_room_for_them_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tracer, "PROCESSES_MAX", 1)
    collector = HostCollector(clock=Clock(), programs=HostPrograms())
    collector.open()
    if any("refuses" in limit.why or "bcc" in limit.why for limit in collector.limits()):
        give_up(str(collector.limits()))
    tracer = collector._tracer
    assert tracer is not None
    with machine.talking(machine.THREADS) as one, machine.talking(machine.THREADS) as other:
        machine.order(one, "2")
        ranks = [machine.rank_process(one.pid), machine.rank_process(other.pid, 1)]
        row = np.zeros((), host_programs.THREAD)
        row["process"] = 7
        for number in range(host_programs.THREADS_MAX - 1):  # a map that is full but for one thread
            tracer._threads.set((1 << 30 | number).to_bytes(4, "little"), row.tobytes())
        machine.read(collector, *ranks)
        found = {limit.what for limit in collector.limits()}
        assert found == {"the threads of 1 rank processes", "2 threads of rank processes, at first"}
        machine.order(one, "3")
        found = {limit.what for limit in collector.limits()}
        assert "5 threads of rank processes, at first" in found
    collector.close()


def works_all_the_same(collector: HostCollector) -> None:
    """Check that the figures that need no kernel programs are there."""
    assert collector.sensors == Sensor.HOST
    with machine.talking(machine.THREADS) as idle:
        ranks = [machine.rank_process(idle.pid)]
        machine.read(collector, *ranks)
        row = machine.rows_until(collector, ranks, lambda row: True)[0]
    assert row["off_cpu_ratio"] == pytest.approx(1, abs=0.05)
    assert row["page_faults"] >= 0
    assert math.isnan(row["stopped_ratio"])


def test_without_bcc_the_agent_says_how_to_install_it_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_first_namespace: None
) -> None:
    def fail() -> None:
        raise NotAvailable("the Python package of bcc is not installed", "apt install python3-bpfcc")

    monkeypatch.setattr(bcc_backend, "import_bcc", fail)
    number = tmp_path / "events/sched/sched_switch/id"
    number.parent.mkdir(parents=True)
    number.write_text("7\n")
    collector = HostCollector(clock=Clock(), programs=HostPrograms(tracefs=tmp_path))
    collector.open()
    found = collector.limits()
    assert "bcc is not installed" in found[0].why
    assert "apt install" in found[0].remedy
    works_all_the_same(collector)
    collector.close()


def test_without_tracefs_the_agent_says_how_to_mount_it_and_goes_on(tmp_path: Path, in_first_namespace: None) -> None:
    collector = HostCollector(clock=Clock(), programs=HostPrograms(tracefs=tmp_path))
    collector.open()
    assert f"mount -t tracefs tracefs {tmp_path}" in collector.limits()[0].remedy
    works_all_the_same(collector)
    collector.close()


def test_in_a_pid_namespace_of_its_own_the_agent_does_not_mistake_one_process_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requirements, "_FIRST_PID_NAMESPACE", 7)
    collector = HostCollector(clock=Clock(), programs=HostPrograms())
    collector.open()
    assert "hostPID" in collector.limits()[0].remedy
    works_all_the_same(collector)
    collector.close()


def test_without_proc_nothing_can_be_said(tmp_path: Path) -> None:
    collector = HostCollector(clock=Clock(), programs=None, proc=tmp_path)
    with pytest.raises(NotAvailable, match="cannot be read"):
        collector.open()
    assert collector.sensors == Sensor(0)
