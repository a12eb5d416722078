"""The tracer against the truth of the process that makes the calls: what is called, in which order, and how long."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from agents.ebpf.tracer import Tracer
from tests.agents.probed import (
    EVERY_FUNCTION,
    OPS,
    Victim,
    attach,
    build_library,
    check_times,
    open_tracer,
    take,
    take_all,
    wait_until,
)

pytestmark = pytest.mark.kernel

SLEEPS = ("35 ", "230 ", "115 ")  # nanosleep, clock_nanosleep, and the latter on arm64


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("probed"))


@pytest.fixture(scope="module")
def tracer(library: Path) -> Iterator[Tracer]:
    tracer = open_tracer(count_launches=True)
    with Victim(library) as victim:
        attach(tracer, victim)
    yield tracer
    tracer.close()


@pytest.fixture(scope="module")
def raw_tracer(library: Path) -> Iterator[Tracer]:
    tracer = open_tracer(aggregate=False)
    with Victim(library) as victim:
        attach(tracer, victim)
    yield tracer
    tracer.close()


@pytest.fixture
def victim(library: Path) -> Iterator[Victim]:
    with Victim(library) as victim:
        yield victim


def test_every_function_is_seen_once_with_what_was_asked_of_it(tracer: Tracer, victim: Victim) -> None:
    victim.do(EVERY_FUNCTION)
    truth = victim.truth()
    seen = take_all(tracer, victim)
    assert len(truth) == 11 * 11
    assert seen.keys == [each.key for each in truth]
    assert seen.runs["count"].max() == 1
    check_times(seen.runs, truth)
    assert not seen.runs["depth"].any()
    assert seen.lost_calls == 0


def test_equal_calls_are_one_row_that_adds_up(tracer: Tracer, victim: Victim) -> None:
    victim.do(
        """
        for n, count in ((1009, 5), (1, 6), (101, 5)):
            for _ in range(n):
                me.call("ncclAllReduce", count=count)
        """
    )
    truth = victim.truth()
    seen = take_all(tracer, victim)
    assert seen.keys == [each.key for each in truth]
    check_times(seen.runs, truth)
    # A pause of the machine's between two calls may break a run, so the rows are at least the three.
    assert sorted(set(seen.runs["bytes"].tolist())) == [20, 24]
    assert 3 <= len(seen.runs) < 100


def test_numbers_go_on_per_communicator_and_function(tracer: Tracer, victim: Victim) -> None:
    victim.do(
        """
        for comm in (1, 2, 1):
            for name in ("ncclAllReduce", "ncclSend"):
                for _ in range(17):
                    me.call(name, comm=comm)
        """
    )
    seen = take_all(tracer, victim)
    for comm, n in ((1, 34), (2, 17)):
        for op in (OPS["ncclAllReduce"], OPS["ncclSend"]):
            own = seen.runs[(seen.runs["comm"] == comm) & (seen.runs["op"] == op)]
            numbers = [int(run["first_seq"]) + i for run in own for i in range(int(run["count"]))]
            assert numbers == list(range(n))


def test_what_a_call_returned_is_kept_also_within_a_run(tracer: Tracer, victim: Victim) -> None:
    victim.do(
        """
        for count in (7, 13, 13, 7):
            me.call("ncclReduceScatter", count=count, type=4)
        """
    )
    seen = take_all(tracer, victim)
    refused = seen.runs["bytes"] == 13 * 8
    assert set(seen.runs["result"][refused].tolist()) == {4}
    assert set(seen.runs["result"][~refused].tolist()) == {0}


def test_what_fails_or_moves_nothing_is_told_but_not_counted(tracer: Tracer, victim: Victim) -> None:
    victim.do(
        """
        result = ctypes.c_long.in_dll(me.library, "probed_result")
        for result.value in (0, 0, 5, 3, 7, 0): me.call("ncclAllReduce")
        for count in (7, 0, 7): me.call("ncclAllReduce", count=count)
        """
    )
    truth = victim.truth()
    seen = take_all(tracer, victim)
    assert [each.result for each in truth] == [0, 0, 5, 3, 7, 0, 0, 0, 0]
    runs = [seen.runs[name].tolist() for name in ("result", "count", "first_seq")]
    assert list(zip(*runs, strict=True))[:4] == [(0, 2, 0), (5, 1, 2), (3, 1, 2), (7, 3, 2)]
    assert runs[2][4:] == [5, 5]


def test_the_shortest_call_of_a_run_is_known(tracer: Tracer, victim: Victim) -> None:
    victim.do(
        """
        delay = ctypes.c_long.in_dll(me.library, "probed_delay_ns")
        for delay.value in (7_000_000, 1_000_000, 5_000_000): me.call("ncclAllReduce")
        """
    )
    truth = victim.truth()
    seen = take_all(tracer, victim)
    check_times(seen.runs, truth)
    assert seen.runs["count"].tolist() == [3]
    assert 1_000_000 <= int(seen.runs["least_ns"][0]) <= truth[1].after_ns - truth[1].before_ns
    assert int(seen.runs["total_ns"][0]) >= 13_000_000


@pytest.mark.parametrize(
    "between",
    [
        "me.cuda.cudaStreamSynchronize(None)",
        "me.cuda.cudaEventSynchronize(None)",
        "me.cuda.cudaDeviceSynchronize()",
        "me.library.ncclGroupStart()",
        "me.library.ncclGroupEnd()",
        "me.call('ncclAllGather')",
        "me.call('ncclAllReduce', count=8)",
        "me.call('ncclAllReduce', comm=2)",
        "time.sleep(0.011)",
        "thread = threading.Thread(target=me.call, args=('ncclRecv',)); thread.start(); thread.join()",
    ],
)
def test_something_else_ends_a_run(tracer: Tracer, victim: Victim, between: str) -> None:
    victim.do("for _ in range(5): me.call('ncclAllReduce')")
    victim.do(f"for _ in range(7): me.call('ncclAllReduce')\n{between}\nfor _ in range(3): me.call('ncclAllReduce')")
    truth = victim.truth()
    seen = take_all(tracer, victim)
    assert seen.keys == [each.key for each in truth]
    ends = np.cumsum(seen.runs["count"].astype("i8")).tolist()
    assert 12 in ends, "no run crosses what happened in between"


def test_a_peer_ends_a_run_of_sends(tracer: Tracer, victim: Victim) -> None:
    victim.do("for peer in (1, 1, 2, 1): me.call('ncclSend', peer=peer)")
    seen = take_all(tracer, victim)
    assert seen.runs["peer"].tolist() == [1, 2, 1]
    assert seen.runs["count"].tolist() == [2, 1, 1]


def test_a_run_is_told_while_it_is_open_and_then_not_again(tracer: Tracer, victim: Victim) -> None:
    victim.do("for _ in range(7): me.call('ncclAllReduce')")
    assert not len(take(tracer, victim.pid).runs)
    early = []

    def is_told() -> bool:
        records = tracer.take()
        early.extend(records.runs[records.runs["tgid"] == victim.pid])
        return bool(early)

    wait_until(is_told, "an idle run is told within seconds")
    assert [int(run["count"]) for run in early] == [7]
    assert not len(tracer.take().runs[:0])
    victim.do("for _ in range(3): me.call('ncclAllReduce')")
    seen = take_all(tracer, victim)
    assert seen.runs["count"].tolist() == [3]
    assert seen.runs["first_seq"].tolist() == [7]


def test_a_call_that_is_under_way_when_its_run_is_told_is_not_lost(tracer: Tracer, victim: Victim) -> None:
    """It began right after an equal call, and lasts until long after user space takes the run for idle."""
    victim.tell(
        """
        delay = ctypes.c_long.in_dll(me.library, "probed_delay_ns")
        for _ in range(7): me.call("ncclAllReduce")
        delay.value = 900_000_000
        me.call("ncclAllReduce")
        delay.value = 0
        for _ in range(3): me.call("ncclAllReduce")
        """
    )
    syscall = Path(f"/proc/{victim.pid}/syscall")
    wait_until(lambda: syscall.read_text().startswith(SLEEPS), "the long call sleeps")
    os.kill(victim.pid, signal.SIGSTOP)
    counts = []

    def is_told() -> bool:
        runs = tracer.take().runs
        counts.extend(runs["count"][runs["tgid"] == victim.pid].tolist())
        return bool(sum(counts) >= 7)

    try:
        wait_until(is_told, "an idle run is told within seconds, and what broke it before")
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    assert victim.process.stdout is not None
    assert victim.process.stdout.readline() == "None\n"
    seen = take_all(tracer, victim)
    assert sum(counts) == 7
    assert int(seen.runs["count"].sum()) == 4
    assert seen.lost_calls == 0
    assert int(seen.runs["first_seq"][0]) == 7
    assert int(seen.runs["total_ns"].max()) >= 900_000_000


def test_groups_are_told_by_the_depth_of_their_calls(tracer: Tracer, victim: Victim) -> None:
    victim.do(
        """
        me.call("ncclAllReduce")
        me.library.ncclGroupStart()
        me.call("ncclSend", peer=3)
        me.library.ncclGroupStart()
        me.call("ncclRecv", peer=5)
        me.library.ncclGroupEnd()
        me.call("ncclRecv", peer=7)
        me.library.ncclGroupEnd()
        me.call("ncclAllReduce")
        """
    )
    assert take_all(tracer, victim).runs["depth"].tolist() == [0, 1, 2, 1, 0]


def test_a_call_that_the_library_makes_to_itself_is_not_a_call(tracer: Tracer, victim: Victim) -> None:
    victim.do(
        """
        for root in range(7):
            me.call("ncclBcast", count=root + 14, peer=root)
            me.call("ncclAllReduceConfig", count=root + 14)
        """
    )
    truth = victim.truth()
    seen = take_all(tracer, victim)
    assert seen.keys == [each.key for each in truth]
    check_times(seen.runs, truth)


def test_calls_of_two_threads_keep_their_order(tracer: Tracer, victim: Victim) -> None:
    victim.do(
        """
        def work(own, other, comm):
            for i in range(101):
                own.acquire()
                for _ in range(1 + i % 3):
                    me.call("ncclAllReduce", count=14, comm=comm)
                other.release()
        first, second = threading.Semaphore(1), threading.Semaphore(0)
        threads = [threading.Thread(target=work, args=each) for each in ((first, second, 1), (second, first, 2))]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        """
    )
    truth = victim.truth()
    seen = take_all(tracer, victim)
    assert len(truth) == 2 * sum(1 + i % 3 for i in range(101))
    assert seen.keys == [each.key for each in truth]
    assert (np.diff(seen.runs["start_ns"].astype("i8")) > 0).all()


def test_threads_at_the_same_time_lose_nothing(tracer: Tracer, victim: Victim) -> None:
    """Within C both threads run at once, on two CPUs, and meet in the kernel."""
    victim.do(
        """
        n = me.library.probed_ns_per_call
        threads = [threading.Thread(target=n, args=(10007, 0)) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        """
    )
    seen = take_all(tracer, victim)
    assert int(seen.runs["count"].sum()) + seen.lost_calls == 4 * 10007
    assert seen.lost_calls == 0
    for tid in np.unique(seen.runs["tid"]):
        assert int(seen.runs["count"][seen.runs["tid"] == tid].sum()) == 10007


def test_waits_for_the_gpu_are_rows_of_their_own(tracer: Tracer, victim: Victim) -> None:
    before_ns, after_ns = victim.do(
        """
        delay = ctypes.c_long.in_dll(me.cuda, "probed_delay_ns")
        before_ns = time.monotonic_ns()
        delay.value = 3_000_000
        for wait in (me.cuda.cudaStreamSynchronize, me.cuda.cudaEventSynchronize): wait(None)
        me.cuda.cudaDeviceSynchronize()
        delay.value = 0
        answer = before_ns, time.monotonic_ns()
        """
    )
    seen = take_all(tracer, victim)
    assert seen.syncs["kind"].tolist() == [0, 1, 2]
    assert set(seen.syncs["tid"].tolist()) == {victim.pid}
    lasted = (seen.syncs["end_ns"] - seen.syncs["start_ns"]).astype("i8")
    assert (lasted >= 3_000_000).all()
    assert int(lasted.sum()) <= after_ns - before_ns
    assert before_ns < int(seen.syncs["start_ns"][0])
    assert not len(seen.runs)


def test_launches_are_counted(tracer: Tracer, victim: Victim) -> None:
    tracer.take()
    victim.do("for _ in range(1009): me.cuda.cudaLaunchKernel()")
    assert take(tracer, victim.pid).launches == 1009
    assert take(tracer, victim.pid).launches == 0
    victim.do("for _ in range(13): me.cuda.cudaLaunchKernel()")
    assert take_all(tracer, victim).launches == 13


def test_of_a_process_that_is_killed_within_a_call_the_calls_before_it_are_kept(tracer: Tracer, victim: Victim) -> None:
    victim.do("for _ in range(7): me.call('ncclAllReduce')")
    victim.do('ctypes.c_long.in_dll(me.library, "probed_delay_ns").value = 900_000_000')
    victim.tell("for _ in range(101): me.call('ncclAllReduce')")
    syscall = Path(f"/proc/{victim.pid}/syscall")
    wait_until(lambda: syscall.read_text().startswith(SLEEPS), "the call sleeps")
    victim.process.kill()
    victim.process.wait()
    tracer.forget(victim.pid)
    records = tracer.take(flush_open=False)
    own = records.runs[records.runs["tgid"] == victim.pid]
    assert int(own["count"].sum()) in {7, 8}
    assert records.lost_calls == {}


def test_raw_mode_gives_every_call_its_row(raw_tracer: Tracer, tracer: Tracer, victim: Victim) -> None:
    victim.do("for i in range(1009): me.call('ncclAllReduce', count=14 + i // 500)")
    truth = victim.truth()
    seen = take_all(raw_tracer, victim)
    assert seen.runs["count"].tolist() == [1] * 1009
    assert seen.run_keys == [each.key for each in truth]
    assert seen.runs["first_seq"].tolist() == list(range(1009))
    check_times(seen.runs, truth)
    tracer.forget(victim.pid)


def test_raw_mode_counts_as_runs_do(raw_tracer: Tracer, tracer: Tracer, victim: Victim) -> None:
    victim.do("for count in (14, 13, 14, 0, 14): me.call('ncclAllReduce', count=count)")
    seen = take_all(raw_tracer, victim)
    assert seen.runs["result"].tolist() == [0, 4, 0, 0, 0]
    assert seen.runs["first_seq"].tolist() == [0, 1, 1, 2, 2]
    tracer.forget(victim.pid)
