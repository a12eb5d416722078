"""The testbed itself: real processes, true truths, faults that bite and end, and nothing left behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from agents.nccl_hash import child_hash, unique_id_hash
from schemas.table import AnyArray
from tests.conftest import REPOSITORY, give_up
from tests.testbed import faults
from tests.testbed.launch import RankFailed, Testbed, missing
from tests.testbed.truth import FUNCTIONS, RankTruth, call_bytes
from tests.testbed.workload import Workload

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module", autouse=True)
def machine() -> None:
    reason = missing()
    if reason:
        give_up(reason)


@pytest.fixture(scope="module")
def trained() -> list[RankTruth]:
    """Eight ranks, each axis of parallelism, through 23 iterations; the rarer functions in each seventh."""
    workload = Workload(tp=2, dp=2, pp=2, iterations=23, rare_every=7, forward_ms=1.0, optimizer_ms=1.0, tp_calls=3)
    with Testbed(workload, gpus_per_node=4) as testbed:
        testbed.wait()
        return testbed.truth()


def durations_ms(rows: AnyArray) -> AnyArray:
    return np.asarray((rows["end_ns"] - rows["start_ns"]) / 1e6)


# ---- what a healthy job does


def test_every_rank_makes_exactly_the_calls_of_its_program(trained: list[RankTruth]) -> None:
    for truth in trained:
        counts = Counter(FUNCTIONS[number] for number in truth.calls["function"].tolist())
        assert counts == {
            "ncclAllReduce": 23 * (2 * 2 * 3 + 1) + 3 * 2,
            "ncclReduceScatter": 23 * 3,
            "ncclAllGather": 23,
            "ncclSend": 23 * 2,
            "ncclRecv": 23 * 2,
            **dict.fromkeys(("ncclBroadcast", "ncclBcast", "ncclReduce"), 3),
            **dict.fromkeys(("ncclAlltoAll", "ncclGather", "ncclScatter"), 3),
        }
        assert len(truth.groups) == 3 * 2
        assert len(truth.iterations) == len(truth.syncs) - 1 == 23
        assert not truth.calls["result"].any()
        assert truth.facts.is_complete


def test_calls_follow_each_other_and_lie_within_their_iterations(trained: list[RankTruth]) -> None:
    for truth in trained:
        assert (truth.calls["start_ns"] <= truth.calls["end_ns"]).all()
        assert (truth.calls["start_ns"][1:] >= truth.calls["end_ns"][:-1]).all()
        iterations = truth.iterations[truth.calls["iteration"].astype(int) - 1]
        assert (truth.calls["start_ns"] >= iterations["start_ns"]).all()
        assert (truth.calls["end_ns"] <= iterations["end_ns"]).all()


def test_members_of_a_communicator_agree_on_it_and_on_what_they_call(trained: list[RankTruth]) -> None:
    members: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {}
    for truth in trained:
        for comm in truth.facts.communicators:
            calls = truth.named("ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast")
            bytes_called = tuple(call_bytes(calls[calls["comm"] == comm.pointer]).tolist())
            members.setdefault(comm.hash, []).append((comm.rank, comm.size, bytes_called))
    assert Counter(len(found) for found in members.values()) == {8: 1, 2: 4 + 4 + 4}
    for found in members.values():
        assert sorted(rank for rank, _, _ in found) == list(range(len(found)))
        assert {(size, called) for _, size, called in found} == {(len(found), found[0][2])}


def test_a_rank_has_the_place_in_each_communicator_that_its_number_gives_it(trained: list[RankTruth]) -> None:
    places = [[truth.communicator(axis).rank for axis in ("pp", "dp", "tp", "world")] for truth in trained]
    assert places == [[rank >> 2, rank >> 1 & 1, rank & 1, rank] for rank in range(8)]


def test_hashes_follow_from_what_the_functions_were_told(trained: list[RankTruth]) -> None:
    for truth in trained:
        world = truth.communicator("world")
        splits = 0
        for comm in truth.facts.communicators:
            if comm.unique_id is not None:
                assert comm.hash == unique_id_hash(bytes.fromhex(comm.unique_id))
            else:
                splits += 1
                assert comm.color is not None
                assert comm.hash == child_hash(world.hash, splits, comm.color)
        assert splits == 2


def test_ranks_are_processes_of_their_own_with_their_nodes_names(trained: list[RankTruth]) -> None:
    assert [truth.facts.hostname for truth in trained] == ["node0"] * 4 + ["node1"] * 4
    assert len({truth.pid for truth in trained}) == 8


def test_the_bytes_of_a_ring_go_over_the_ranks_own_link() -> None:
    dp_bytes = 1_048_576
    workload = Workload(dp=3, tp=1, dp_calls=5, dp_bytes=dp_bytes, forward_ms=1, optimizer_ms=1)
    with Testbed(workload) as testbed:
        testbed.wait_until(5)
        before, first = sent_bytes(testbed.pids[1]), testbed.control.done(1)
        testbed.wait_until(first + 17)
        iterations = testbed.control.done(1) - first
        sent = sent_bytes(testbed.pids[1]) - before
    # Reduce-scatter and all-gather send a rank's share to the next one (members - 1) times.
    per_iteration = (5 + 1) * 2 * dp_bytes
    assert per_iteration * (iterations - 1) <= sent <= per_iteration * (iterations + 1) * 1.1


def sent_bytes(pid: int) -> int:
    """Bytes that a rank's namespace has sent over its link."""
    found = re.search(r"eth0:((?:\s+\d+)+)", Path(f"/proc/{pid}/net/dev").read_text())
    assert found
    return int(found.group(1).split()[8])


def test_asked_to_stop_all_ranks_end_after_the_same_iteration() -> None:
    with Testbed(Workload(dp=3, forward_ms=1, sync_every=5)) as testbed:
        testbed.wait_until(11)
        os.kill(testbed.pids[2], signal.SIGTERM)
        testbed.wait()
        truths = testbed.truth()
    (last,) = {len(truth.iterations) for truth in truths}
    assert last >= 11
    assert all(len(truth.syncs) == last // 5 + 1 for truth in truths)


def test_markers_say_each_iteration_and_pause_and_nobody_waits_for_a_listener(tmp_path: Path) -> None:
    path = tmp_path / "markers"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        with Testbed(Workload(dp=2, forward_ms=1, iterations=7, marker_socket=str(path))) as testbed:
            faults.checkpoint(testbed, duration_s=0.1)
            listener.settimeout(20)
            said = [listener.recv(100) for _ in range(2 * 8)]
            testbed.wait()
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.recv(100)
    assert Counter(said) == {**{b"iteration %d" % number: 2 for number in range(1, 8)}, b"checkpoint 0.1s": 2}
    with Testbed(Workload(dp=2, forward_ms=1, iterations=7, marker_socket=str(tmp_path / "nobody"))) as testbed:
        testbed.wait()


# ---- Inspector


@pytest.mark.parametrize("version", ["2.28", "4.0", "4.1", "4.2", "4.3", "4.4"])
def test_inspector_files_have_the_shape_of_their_version(version: str) -> None:
    settings = {"STUB_INSPECTOR_VERSION": version, "NCCL_INSPECTOR_DUMP_VERBOSE": "1"}
    with Testbed(Workload(dp=2, pp=2, iterations=29, forward_ms=1, optimizer_ms=1), inspector=settings) as testbed:
        testbed.wait()
        truth = testbed.truth()[3]
        text = (testbed.inspector / f"node0-pid{truth.pid}.log").read_bytes()
    lines = [msgspec.json.decode(line) for line in text.splitlines()]
    dp, pp = (f"{truth.communicator(axis).hash:#x}" for axis in ("dp", "pp"))
    counts = [line["dump_stats"] for line in lines if "dump_stats" in line]
    collectives = [line for line in lines if "coll_perf" in line]
    peers = [line for line in lines if "p2p_perf" in line]
    assert bool(counts) == (version not in {"2.28", "4.0"})
    assert {"header" in line for line in collectives} == {version not in {"4.3", "4.4"}}
    assert {"coll_algo" in line["coll_perf"] for line in collectives} == {version in {"4.2", "4.3", "4.4"}}
    formats = {line["metadata"]["inspector_output_format_version"] for line in lines if "metadata" in line}
    assert formats == {"v4.0" if version == "2.28" else f"v{version}"}
    assert {line["header"]["id"] for line in lines if "header" in line} >= {dp}
    scattered = [line["coll_perf"] for line in collectives if line["coll_perf"]["coll"] == "ReduceScatter"]
    numbers = [perf["coll_sn"] for perf in scattered]
    if version == "2.28":
        assert not peers
        assert len(collectives) < 29 * 4
        return
    assert sum(count["coll_records"] for count in counts) in {0, len(collectives)}
    assert numbers == list(range(29 * 3))
    assert {perf["coll_msg_size_bytes"] for perf in scattered} == {131_072}
    assert [line["p2p_perf"]["p2p_sn"] for line in peers] == list(range(1, 29 * 4 + 1))
    assert pp in {line["header"]["id"] for line in lines if "header" in line}


def test_the_slow_gpu_waits_least_in_the_collectives_by_inspectors_times() -> None:
    with Testbed(Workload(dp=4, forward_ms=2), inspector={}) as testbed:
        testbed.wait_until(5)
        with faults.slow_gpu(testbed, 2, factor=1.5):
            testbed.wait_until(testbed.iteration + 23)
            testbed.stop()
        waits = [np.median(scatter_us(testbed, truth)[-3 * 19 :: 3]) for truth in testbed.truth()]
    assert int(np.argmin(waits)) == 2
    assert 5_000 < sorted(waits)[1] - min(waits) < 9_000


def scatter_us(testbed: Testbed, truth: RankTruth) -> AnyArray:
    """Execution times of a rank's reduce-scatters; the first of each iteration waits for the slowest rank."""
    text = (testbed.inspector / f"node0-pid{truth.pid}.log").read_bytes()
    perfs = [msgspec.json.decode(line).get("coll_perf", {}) for line in text.splitlines()]
    return np.asarray([perf["coll_exec_time_us"] for perf in perfs if perf.get("coll") == "ReduceScatter"])


# ---- faults

Fault = Callable[[Testbed], AbstractContextManager[None]]
PLAIN = Workload(dp=4, forward_ms=2)
HOSTED = Workload(dp=4, forward_ms=2, host_ms=3)
READING = Workload(dp=4, forward_ms=2, read_bytes=1 << 20)
BITING: dict[str, tuple[Workload, Fault]] = {
    "quota": (HOSTED, lambda testbed: faults.cpu_quota(testbed, 2, share=0.03, period_ms=50)),
    "hog": (HOSTED, lambda testbed: faults.cpu_hog(testbed, 2, hogs=4, favour=8)),
    "stops": (PLAIN, lambda testbed: faults.stopped_in_bursts(testbed, 2, stopped_ms=20, running_ms=20)),
    "link": (PLAIN, lambda testbed: faults.slow_link(testbed, 2, bits_per_s=300e6)),
    "gpu": (PLAIN, lambda testbed: faults.slow_gpu(testbed, 2, factor=1.6)),
    "disk": (READING, lambda testbed: faults.slow_disk(testbed, 2, bytes_per_s=15e6)),
    "all": (PLAIN, lambda testbed: faults.all_slow(testbed, factor=1.6)),
}


@pytest.mark.parametrize("name", BITING)
def test_a_fault_slows_the_job_down_while_it_lasts_and_no_longer(name: str) -> None:
    workload, fault = BITING[name]
    with Testbed(workload) as testbed:
        testbed.wait_until(29)
        begin = testbed.iteration
        with fault(testbed):
            testbed.wait_until(begin + 19)
            end = testbed.iteration
        testbed.wait_until(end + 19)
        testbed.stop()
        iterations_ms = testbed.truth()[0].iteration_ms()
    healthy, slow = np.median(iterations_ms[4 : begin - 1]), np.mean(iterations_ms[begin + 1 : end - 1])
    after = np.median(iterations_ms[end + 2 :])
    assert slow > 1.15 * healthy
    assert after < (healthy + slow) / 2


def test_a_rank_with_less_work_makes_nobody_wait() -> None:
    with Testbed(PLAIN) as testbed:
        testbed.wait_until(17)
        begin = testbed.iteration
        with faults.less_work(testbed, [1], share=0.5):
            testbed.wait_until(begin + 17)
        testbed.stop()
        iterations_ms = testbed.truth()[0].iteration_ms()
    assert np.median(iterations_ms[begin + 2 : begin + 16]) < 1.1 * np.median(iterations_ms[4:begin])


def test_a_checkpoint_holds_up_all_ranks_once() -> None:
    with Testbed(PLAIN) as testbed:
        testbed.wait_until(11)
        iteration = faults.checkpoint(testbed, duration_s=0.3)
        testbed.wait_until(iteration + 5)
        testbed.stop()
        truths = testbed.truth()
    for truth in truths:
        paused = truth.iterations["iteration"][durations_ms(truth.iterations) > 250]
        assert paused.tolist() == [iteration]


# ---- what is left


def traces() -> set[str]:
    """What a testbed could leave behind."""
    namespaces = set(subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout.split())
    own = f"failslow-{os.getpid()}-"
    groups = Path("/sys/fs/cgroup").glob(f"*/{own}*")
    return {name for name in namespaces if name.startswith(own)} | {str(path) for path in groups}


def processes_are_gone(testbed: Testbed) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in testbed.pids)


def break_off(testbed: Testbed) -> None:
    with testbed:
        testbed.wait_until(3)
        with faults.cpu_quota(testbed, 1, share=0.1), faults.slow_link(testbed, 2, bits_per_s=1e9):
            assert traces()
            raise ZeroDivisionError


def lose_a_rank(testbed: Testbed) -> None:
    with testbed:
        testbed.wait_until(3)
        os.kill(testbed.pids[3], signal.SIGKILL)
        testbed.wait()


def test_a_failing_test_leaves_no_process_namespace_group_or_file_behind() -> None:
    testbed = Testbed(HOSTED)
    with pytest.raises(ZeroDivisionError):
        break_off(testbed)
    assert processes_are_gone(testbed)
    assert not testbed.directory.exists()
    assert traces() == set()


def test_ranks_end_when_the_test_that_started_them_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from tests.testbed.launch import Testbed; from tests.testbed.workload import Workload\n"
        "with Testbed(Workload(dp=2), network=False) as testbed:\n"
        "    testbed.wait_until(2); print(testbed.directory, *testbed.pids, flush=True); time.sleep(60)"
    )
    command, environment = [sys.executable, "-c", program], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, env=environment) as test:
        assert test.stdout
        pids = [int(pid) for pid in test.stdout.readline().split()[1:]]
        test.kill()
    until_s = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_rank_that_dies_is_said_with_its_last_words_and_ends_the_others() -> None:
    testbed = Testbed(PLAIN)
    with pytest.raises(RankFailed, match=r"rank \d ended with"):
        lose_a_rank(testbed)
    assert processes_are_gone(testbed)
    assert traces() == set()
