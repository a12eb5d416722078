"""What the scheduler does to real processes, seen by real kernel programs and checked against its own counts."""

import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.clock import Clock
from agents.host import HostCollector
from agents.host_programs import HostPrograms
from agents.kernel_types import BTF
from schemas.events import Sensor
from tests.agents import host_machine as machine
from tests.conftest import give_up

pytestmark = pytest.mark.kernel


def opened(collector: HostCollector) -> HostCollector:
    collector.open()
    for limit in collector.limits():
        if "switched off" not in limit.why:
            give_up(f"{limit.what}: {limit.why}")
    return collector


@pytest.fixture(params=["typed", "records"])
def collector(request: pytest.FixtureRequest) -> Iterator[HostCollector]:
    """Each kind of kernel programs: for kernels that describe their types, and for those that do not."""
    btf = BTF if request.param == "typed" else Path("/nowhere")
    made = opened(HostCollector(clock=Clock(), programs=HostPrograms(btf=btf)))
    yield made
    made.close()


@pytest.fixture
def plain() -> Iterator[HostCollector]:
    """A collector without kernel programs."""
    made = opened(HostCollector(clock=Clock(), programs=None))
    yield made
    made.close()


def test_a_process_beside_a_hog_waits_as_long_as_the_scheduler_says(collector: HostCollector) -> None:
    with machine.running(machine.BUSY, on=machine.cpu()) as busy, machine.running(machine.BUSY, on=machine.cpu()):
        rank = machine.rank_process(busy.pid)
        machine.read(collector, rank)
        before = machine.scheduled(busy.pid)
        seen = [
            row
            for _ in range(5)
            for row in machine.rows_until(collector, [rank], lambda row: row["run_queue_ratio"] > 0.2)
        ]
        truth = machine.scheduled(busy.pid).since(before)
    ends_ns = [row["time_ns"] for row in seen]
    assert ends_ns == sorted(ends_ns)
    span_s = truth.run_s + truth.wait_s  # it never sleeps
    waited_s = sum(row["run_queue_ratio"] for row in seen) / len(seen) * span_s
    assert waited_s == pytest.approx(truth.wait_s, rel=0.15)
    assert sum(row["context_switches"] for row in seen) == pytest.approx(truth.switches, abs=0.02 * truth.switches + 3)
    assert max(row["off_cpu_ratio"] for row in seen) < 0.05
    assert max(row["stopped_ratio"] for row in seen) == 0


# Naps, and gives way to whoever runs when it wakes up.
NAPS = """
import os, time
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
os.nice(10)
while True:
    time.sleep(0.003)
"""


def test_a_thread_that_was_woken_waits_for_a_cpu_and_no_longer_sleeps(collector: HostCollector) -> None:
    with machine.running(NAPS, on=machine.cpu()) as process, machine.running(machine.BUSY, on=machine.cpu()):
        ranks = [machine.rank_process(process.pid)]
        machine.read(collector, *ranks)
        before, start_ns = machine.scheduled(process.pid), time.time_ns()
        rows = machine.rows_until(collector, ranks, lambda row: row["time_ns"] > start_ns + 2e9)
        truth = machine.scheduled(process.pid).since(before)
    told_s = sum(row["run_queue_ratio"] for row in rows) / len(rows) * (rows[-1]["time_ns"] - start_ns) / 1e9
    assert told_s == pytest.approx(truth.wait_s, rel=0.15, abs=0.02)
    assert truth.wait_s > 0.1


def test_a_stopped_process_is_stopped_now_and_not_when_it_goes_on(collector: HostCollector) -> None:
    with machine.running(machine.BUSY) as busy, machine.talking(machine.THREADS) as idle:
        machine.order(idle, "3")
        ranks = [machine.rank_process(busy.pid), machine.rank_process(idle.pid, 1)]
        machine.read(collector, *ranks)
        for process in (busy, idle):
            process.send_signal(signal.SIGSTOP)
            machine.wait_for_state(process.pid, "T")
        machine.read(collector, *ranks)
        for _ in range(3):
            machine.rows_until(collector, ranks, lambda row: row["stopped_ratio"] == pytest.approx(1, abs=0.02))
        both = machine.read(collector, *ranks)
        assert both.stopped_ratio[1] == pytest.approx(1, abs=0.05), "a process of four threads is stopped once"
        assert both.off_cpu_ratio.tolist() == pytest.approx([0, 0], abs=0.05), (
            "it neither sleeps nor waits for anything"
        )
        for process in (busy, idle):
            process.send_signal(signal.SIGCONT)
            machine.wait_for_state(process.pid, "RS")
        machine.read(collector, *ranks)
        last = machine.rows_until(collector, ranks, lambda row: True)[-1]
        assert last["stopped_ratio"] == 0


def test_a_process_that_sleeps_all_the_time_is_seen_to_sleep_from_the_first_row_on(collector: HostCollector) -> None:
    with machine.talking(machine.THREADS) as idle:
        ranks = [machine.rank_process(idle.pid)]
        assert len(machine.read(collector, *ranks)) == 0, "nothing is known of the time before"
        rows = machine.rows_until(collector, ranks, lambda row: True)
        assert rows[0]["off_cpu_ratio"] == pytest.approx(1, abs=0.02)
        assert rows[0]["blocked_ratio"] == 0
        assert rows[0]["context_switches"] == 0
        assert math.isnan(rows[0]["block_io_s"])


def test_threads_are_counted_from_when_they_begin_until_they_end(collector: HostCollector) -> None:
    with machine.talking(machine.THREADS) as idle:
        ranks = [machine.rank_process(idle.pid)]
        machine.read(collector, *ranks)
        machine.order(idle, "7")
        machine.rows_until(collector, ranks, lambda row: row["off_cpu_ratio"] == pytest.approx(8, abs=0.1))
        machine.order(idle, "")
        machine.rows_until(collector, ranks, lambda row: row["off_cpu_ratio"] == pytest.approx(1, abs=0.1))
        assert collector._tracer is not None
        assert len(collector._tracer._all_threads.read()[0]) == 1, "their numbers may be given to others"


def test_threads_from_before_the_agent_came_are_counted_too(collector: HostCollector) -> None:
    with machine.talking(machine.THREADS) as idle:
        machine.order(idle, "5")
        ranks = [machine.rank_process(idle.pid)]
        machine.read(collector, *ranks)
        rows = machine.rows_until(collector, ranks, lambda row: True)
        assert rows[0]["off_cpu_ratio"] == pytest.approx(6, abs=0.1)


SHORT_THREADS = """
import sys, threading, time
print("ready", flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        thread = threading.Thread(target=time.sleep, args=(0.003,))
        thread.start()
        thread.join()
    print("done", flush=True)
"""


def test_what_threads_did_is_kept_when_they_have_ended(collector: HostCollector) -> None:
    with machine.talking(SHORT_THREADS) as process:
        ranks = [machine.rank_process(process.pid)]
        machine.read(collector, *ranks)
        machine.order(process, "101")
        row = machine.rows_until(collector, ranks, lambda row: True)[0]
        # Each thread slept for three milliseconds, and so did the main thread that waited for it.
        assert row["context_switches"] >= 2 * 101
        assert row["off_cpu_ratio"] > 1.05


# posix_spawn() waits, uninterruptibly, until its child runs the new program; here the child waits for a named pipe.
BLOCKED = """
import os, sys
pipe = sys.argv[1]
print("ready", flush=True)
sys.stdin.readline()
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, pipe, os.O_RDONLY, 0)])
print("done", flush=True)
sys.stdin.readline()
"""


def test_uninterruptible_sleep_is_told_apart(collector: HostCollector, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with machine.talking(BLOCKED, arguments=(str(pipe),)) as process:
        ranks = [machine.rank_process(process.pid)]
        machine.read(collector, *ranks)
        asleep = machine.rows_until(collector, ranks, lambda row: True)[-1]
        assert asleep["blocked_ratio"] == 0
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        machine.wait_for_state(process.pid, "D")
        machine.read(collector, *ranks)
        try:
            blocked = machine.rows_until(collector, ranks, lambda row: True)[-1]
        finally:
            pipe.open("w").close()
        assert blocked["blocked_ratio"] == pytest.approx(1, abs=0.02)
        assert blocked["off_cpu_ratio"] == pytest.approx(1, abs=0.02)
        machine.rows_until(collector, ranks, lambda row: row["blocked_ratio"] < 0.02)


def test_a_process_that_has_ended_is_forgotten_and_the_next_one_begins_at_nothing(collector: HostCollector) -> None:
    with machine.talking(machine.THREADS) as gone:
        machine.order(gone, "11")
        ended = machine.rank_process(gone.pid)
        machine.read(collector, ended)
        machine.rows_until(collector, [ended], lambda row: True)
    assert len(machine.read(collector, ended)) == 0
    assert collector._tracer is not None
    machine.read(collector)
    assert len(collector._tracer._all_threads.read()[0]) == 0
    collector._tracer._last_place -= 1  # the next process gets the same place
    with machine.talking(machine.THREADS) as process:
        ranks = [machine.rank_process(process.pid)]
        collector._tracer.follow([ranks[0].key])
        _, sums = collector._tracer.read()
        assert sums[ranks[0].key].switches == 0
        machine.read(collector, *ranks)
        first = machine.rows_until(collector, ranks, lambda row: True)[0]
        assert first["off_cpu_ratio"] == pytest.approx(1, abs=0.05)
        assert first["context_switches"] == 0


def test_of_two_processes_each_has_its_own_row_in_the_order_asked_for(collector: HostCollector) -> None:
    with machine.running(machine.BUSY) as busy, machine.talking(machine.THREADS) as idle:
        ranks = [machine.rank_process(idle.pid), machine.rank_process(busy.pid, 1)]
        machine.read(collector, *ranks)
        machine.rows_until(collector, ranks, lambda row: True)
        table = machine.read(collector, *reversed(ranks))
        assert table.rank.tolist() == [0, 1]
        assert table.off_cpu_ratio[0] < 0.1
        assert table.off_cpu_ratio[1] == pytest.approx(1, abs=0.05)


def test_without_kernel_programs_the_schedulers_own_counts_are_told(plain: HostCollector) -> None:
    assert plain.sensors == Sensor.HOST
    assert ["switched off" in limit.why for limit in plain.limits()] == [True]
    with machine.running(machine.BUSY, on=machine.cpu()) as busy, machine.running(machine.BUSY, on=machine.cpu()):
        ranks = [machine.rank_process(busy.pid)]
        start_ns = time.time_ns()
        machine.read(plain, *ranks)
        before = machine.scheduled(busy.pid)
        rows = machine.rows_until(plain, ranks, lambda row: row["time_ns"] > start_ns + 2e9)
        truth = machine.scheduled(busy.pid).since(before)
    row = rows[-1]
    share = truth.wait_s / (truth.run_s + truth.wait_s)
    assert sum(row["run_queue_ratio"] for row in rows) / len(rows) == pytest.approx(share, abs=0.2)
    assert sum(row["off_cpu_ratio"] for row in rows) / len(rows) < 0.25
    assert math.isnan(row["blocked_ratio"])
    assert math.isnan(row["stopped_ratio"])
    assert math.isnan(row["reclaim_ratio"])
    with machine.talking(machine.THREADS) as idle:
        machine.order(idle, "3")
        ranks = [machine.rank_process(idle.pid)]
        machine.read(plain, *ranks)
        row = machine.rows_until(plain, ranks, lambda row: True)[-1]
    assert row["off_cpu_ratio"] == pytest.approx(4, abs=0.1)
