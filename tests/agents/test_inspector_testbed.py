"""Inspector's files of real processes, followed live: every operation finds its call, and takes as long as it took."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from agents.clock import Clock
from agents.collector import Observations, ProcessKey, RankProcess
from agents.inspector_placing import Placer
from agents.inspector_records import Parser
from agents.nccl_inspector import InspectorCollector
from agents.placing import CallTimes
from schemas.events import Calls, Op
from tests.conftest import give_up
from tests.testbed.launch import Testbed, missing
from tests.testbed.truth import FUNCTIONS, RankTruth, call_bytes
from tests.testbed.workload import Workload

pytestmark = pytest.mark.kernel

OPS = {
    "ncclAllReduce": Op.ALL_REDUCE,
    "ncclReduceScatter": Op.REDUCE_SCATTER,
    "ncclAllGather": Op.ALL_GATHER,
    "ncclBroadcast": Op.BROADCAST,
    "ncclBcast": Op.BROADCAST,
    "ncclReduce": Op.REDUCE,
    "ncclSend": Op.SEND,
    "ncclRecv": Op.RECV,
}
WORKLOAD = Workload(tp=2, dp=2, pp=2, forward_ms=1.0, optimizer_ms=1.0, sync_every=2, tp_bytes=4_096)
ITERATIONS = 19


@pytest.fixture(scope="module", autouse=True)
def machine() -> None:
    reason = missing()
    if reason:
        give_up(reason)


def start_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def rank_processes(testbed: Testbed) -> list[RankProcess]:
    return [
        RankProcess(
            key=ProcessKey(pid, start_ticks(pid)),
            job_id="testbed",
            incarnation="0",
            world_size=testbed.world_size,
            rank=rank,
            local_rank=rank % testbed.gpus_per_node,
            namespace_pid=pid,
            start_ns=0,
        )
        for rank, pid in enumerate(testbed.pids)
    ]


def host_calls(place: int, truth: RankTruth, clock: Clock) -> Calls:
    """What a perfect observer of the host sees: each call, numbered from its communicator's creation."""
    hashes = {c.pointer: c.hash for c in truth.facts.communicators}
    calls = truth.named(*OPS)
    ops = np.array([OPS[FUNCTIONS[f]] for f in calls["function"].tolist()], np.uint8)
    comms = np.array([hashes[pointer] for pointer in calls["comm"].tolist()], np.uint64)
    numbers = np.zeros(len(calls), np.int64)
    for comm, op in set(zip(comms.tolist(), ops.tolist(), strict=True)):
        own = (comms == comm) & (ops == op)
        numbers[own] = np.arange(np.count_nonzero(own))
    took_ns = (calls["end_ns"] - calls["start_ns"]).astype(np.int64)
    return Calls.build(
        len(calls),
        rank=place,
        comm=comms,
        op=ops,
        source=0,
        bytes=call_bytes(calls),
        peer=np.where(np.isin(ops, [Op.SEND, Op.RECV]), calls["peer"], 0),
        count=1,
        first_seq=numbers,
        seq_known=1,
        start_ns=clock.to_epoch_ns(calls["start_ns"]),
        end_ns=clock.to_epoch_ns(calls["end_ns"]),
        duration_ns=took_ns,
        duration_min_ns=took_ns,
    )


class Followed:
    """A job that was followed to its end, and then told what the host had called."""

    def __init__(self, **inspector: str) -> None:
        self.clock, times = Clock(), CallTimes()
        collector = InspectorCollector(times, self.clock, budget_s=5.0)
        collector.open()
        found: list[Observations] = []
        with Testbed(WORKLOAD, gpus_per_node=4, inspector=inspector) as testbed:
            ranks = rank_processes(testbed)
            files = [testbed.inspector / f"{testbed.node(r.rank)}-pid{r.key.pid}.log" for r in ranks]
            until_s = time.monotonic() + 60
            while not all(file.exists() for file in files) and time.monotonic() < until_s:
                testbed.wait_until(testbed.iteration + 1)
            for iteration in range(0, ITERATIONS, 3):
                testbed.wait_until(iteration)
                found.append(collector.collect(ranks))
            testbed.stop()
            self.truths = testbed.truth()
            self.lines = [Parser().feed(file.read_bytes()) for file in files]
        self.hosts = [host_calls(place, truth, self.clock) for place, truth in enumerate(self.truths)]
        for rank, host in zip(ranks, self.hosts, strict=True):
            times.note(rank.key, host)
        found.append(collector.collect(ranks))
        self.join_rates = collector.join_rates()
        self.limits = collector.limits()
        self.members = found[-1].communicators
        collector.close()
        self.calls = Calls.concatenate([o.calls for o in found])

    def pairs(self) -> Iterator[tuple[Calls, Calls]]:
        """Yield each rank's host calls and GPU calls of one communicator, op and peer, in the order of numbers."""
        for place, host in enumerate(self.hosts):
            gpu = self.calls.take(self.calls.rank == place)
            for name in sorted({*names(host), *names(gpu)}):
                yield in_order(host, name), in_order(gpu, name)


def names(calls: Calls) -> list[tuple[int, int, int]]:
    return list(zip(calls.comm.tolist(), calls.op.tolist(), calls.peer.tolist(), strict=True))


def in_order(calls: Calls, name: tuple[int, int, int]) -> Calls:
    own = calls.take((calls.comm == name[0]) & (calls.op == name[1]) & (calls.peer == name[2]))
    return own.take(np.argsort(own.first_seq))


def shares(followed: Followed) -> tuple[float, float]:
    """Return which share of the records has a place, and which share of the calls a GPU time."""
    records = sum(rate.records for rate in followed.join_rates)
    placed = sum(rate.placed for rate in followed.join_rates)
    n_calls = sum(len(host) for host in followed.hosts)
    return placed / records, sum(rate.on_calls for rate in followed.join_rates) / n_calls


def say(capsys: pytest.CaptureFixture[str], what: str, followed: Followed) -> None:
    placed, timed = shares(followed)
    with capsys.disabled():
        sys.stdout.write(f"{what}: {placed:.1%} of the records placed, {timed:.1%} of the calls with a GPU time\n")


@pytest.mark.parametrize("verbose", ["0", "1"])
@pytest.mark.parametrize("version", ["4.0", "4.1", "4.2", "4.3"])
def test_every_operation_finds_its_call(version: str, verbose: str, capsys: pytest.CaptureFixture[str]) -> None:
    followed = Followed(
        STUB_INSPECTOR_VERSION=version,
        NCCL_INSPECTOR_DUMP_VERBOSE=verbose,
        NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES="0",
    )
    say(capsys, f"v{version}, verbose {verbose}", followed)
    for host, gpu in followed.pairs():
        np.testing.assert_array_equal(gpu.first_seq, host.first_seq)
        np.testing.assert_array_equal(gpu.bytes, host.bytes)
        # A clock of microseconds, read on one side before and on the other after the call.
        assert (gpu.start_ns >= host.start_ns - 2000).all()
        assert (gpu.end_ns - gpu.start_ns == gpu.duration_ns).all()
        assert gpu.seq_known.all()
    assert shares(followed) == (1.0, 1.0)
    assert not [limit for limit in followed.limits if "GPU times" in limit.what]
    for place, truth in enumerate(followed.truths):
        own = followed.members.take(followed.members.rank == place)
        told = set(zip(own.comm.tolist(), own.comm_rank.tolist(), own.size.tolist(), strict=True))
        assert told == {(c.hash, c.rank, c.size) for c in truth.facts.communicators}


def test_durations_and_times_are_those_of_the_gpu() -> None:
    followed = Followed(NCCL_INSPECTOR_DUMP_VERBOSE="1", NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES="0")
    for place, truth in enumerate(followed.truths):
        gpu = followed.calls.take(followed.calls.rank == place)
        synced = followed.clock.to_epoch_ns(truth.syncs["end_ns"])
        # Nothing runs on when the host has waited for it: each ends before the next return of a synchronisation.
        for host_start_ns, end_ns in ends_by_call(followed.hosts[place], gpu):
            assert end_ns <= synced[np.searchsorted(synced, host_start_ns)] + 1_000_000
        # On one stream nothing overlaps, so that all that ran fits into the time that there was.
        total_ns = int(truth.iterations["end_ns"].max() - truth.iterations["start_ns"].min())
        assert 0 < gpu.duration_ns[gpu.op < Op.SEND].sum() < total_ns


def ends_by_call(host: Calls, gpu: Calls) -> list[tuple[int, int]]:
    def name(calls: Calls) -> list[tuple[int, int, int]]:
        return list(zip(calls.comm.tolist(), calls.op.tolist(), calls.first_seq.tolist(), strict=True))

    ends = dict(zip(name(gpu), gpu.end_ns.tolist(), strict=True))
    return [(start, ends[n]) for n, start in zip(name(host), host.start_ns.tolist(), strict=True)]


def test_without_their_own_times_operations_are_placed_close_to_when_they_ran(
    capsys: pytest.CaptureFixture[str],
) -> None:
    followed = Followed(NCCL_INSPECTOR_DUMP_VERBOSE="1", NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES="0")
    off_ms = []
    for place, (host, lines) in enumerate(zip(followed.hosts, followed.lines, strict=True)):
        key, times = ProcessKey(place, 0), CallTimes()
        times.note(key, host)
        placer, now_ns = Placer(key, times), followed.clock.now_ns()
        placer.add([record._replace(start_ns=None) for record in lines], now_ns)
        collectives = [p for p in placer.take(now_ns) if p.record.op < Op.SEND]
        ran_ns = {(r.comm, r.op, r.number): r.start_ns for r in lines}
        off_ms += [(p.start_ns - (ran_ns[p.record[:3]] or 0)) / 1e6 for p in collectives]
    quarters = np.percentile(off_ms, [5, 25, 50, 75, 95])
    with capsys.disabled():
        sys.stdout.write(
            f"placed after they ran by (5, 25, 50, 75, 95 %) ms: {' '.join(f'{ms:.2f}' for ms in quarters)}\n"
        )
    # The GPU is never more than two iterations behind its host, which synchronises so often.
    longest_ms = max(truth.iteration_ms(2).max() for truth in followed.truths)
    assert np.abs(off_ms).max() < 3 * longest_ms
    assert np.median(np.abs(off_ms)) < longest_ms


def test_small_operations_are_left_out_by_default_and_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    followed = Followed()
    large = sum(np.count_nonzero(host.bytes >= 8192) for host in followed.hosts)
    assert len(followed.calls) == large
    for host, gpu in followed.pairs():
        np.testing.assert_array_equal(gpu.first_seq, host.first_seq[host.bytes >= 8192])
    placed, timed = shares(followed)
    say(capsys, "8192 bytes and more", followed)
    assert placed == 1.0
    assert timed == pytest.approx(large / sum(len(host) for host in followed.hosts))


def test_versions_that_keep_the_last_collective_alone_leave_normal_gaps(capsys: pytest.CaptureFixture[str]) -> None:
    followed = Followed(STUB_INSPECTOR_VERSION="2.28")
    placed, timed = shares(followed)
    say(capsys, "2.28", followed)
    assert placed == 1.0
    assert 0 < timed < 0.5
    for host, gpu in followed.pairs():
        assert set(gpu.first_seq.tolist()) <= set(host.first_seq.tolist())
    assert any("numbers" in limit.why for limit in followed.limits)


def test_a_ring_that_overflows_is_said_and_what_remains_keeps_its_numbers() -> None:
    followed = Followed(
        STUB_INSPECTOR_VERSION="4.1",
        NCCL_INSPECTOR_DUMP_COLL_RING_SIZE="3",
        NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES="0",
    )
    placed, timed = shares(followed)
    assert (placed, 0 < timed < 1) == (1.0, True)
    for host, gpu in followed.pairs():
        found = np.searchsorted(host.first_seq, gpu.first_seq)
        np.testing.assert_array_equal(host.first_seq[found], gpu.first_seq)
        np.testing.assert_array_equal(host.bytes[found], gpu.bytes)
    assert any("no room" in limit.why for limit in followed.limits)
