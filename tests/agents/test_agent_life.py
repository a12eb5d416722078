"""Agents that are killed, start anew or come late, brokers that go away, processes that end or cannot be observed."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from agents.ebpf.libraries import Library, identify
from agents.ebpf.symbols import read_image
from pipeline.broker import EmbeddedBroker
from schemas.iterations import Numbering
from tests.agents.agent_process import Agent, Events, JobEvents
from tests.agents.probed import first_byte, open_tracer
from tests.agents.test_agent_truth import OP_OF, check_all, iteration_errors, seen_calls
from tests.conftest import give_up
from tests.integration.live_tools import wait_until
from tests.testbed import libraries
from tests.testbed.launch import Testbed, missing
from tests.testbed.truth import RankTruth, call_bytes
from tests.testbed.workload import Workload

pytestmark = pytest.mark.kernel

WORKLOAD = Workload(dp=2, forward_ms=5)
# Of no interest here, and their programs take seconds to compile.
LEAN = {"off": '["host", "nvml", "tcp", "infiniband"]'}
BREAKPOINT = 0xCC


@pytest.fixture(scope="module", autouse=True)
def machine() -> None:
    reason = missing()
    if reason:
        give_up(reason)
    open_tracer().close()


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as broker:
        yield broker


@pytest.fixture(scope="module")
def events(broker: EmbeddedBroker) -> Iterator[Events]:
    with Events(broker.bootstrap) as events:
        yield events


def is_probed(pid: int, path: Path) -> bool:
    """Whether a process would be interrupted where ncclAllReduce begins."""
    image = read_image(str(path), ["ncclAllReduce"])
    library = Library(str(path), identify(str(path), image.build_id), "nccl", name=str(path))
    return first_byte(pid, library, image.symbols["ncclAllReduce"].offset) == BREAKPOINT


def check_last_calls(seen: JobEvents, truth: RankTruth) -> None:
    """Assert that what was seen is the end of what a rank did, without a gap.

    Probes are placed one after the other, so of the iterations at the very beginning only some functions are seen.
    """
    rows, row_of = seen_calls(seen, truth.rank)
    calls = truth.calls[-len(row_of) :]
    is_equal = (rows.op[row_of] == OP_OF[calls["function"]]) & (rows.bytes[row_of] == call_bytes(calls))
    n_partial = int(np.flatnonzero(~is_equal)[-1]) + 1 if not is_equal.all() else 0
    assert n_partial <= 2 * len(truth.calls) / len(truth.iterations)
    for comm, op in {(int(comm), int(op)) for comm, op in zip(rows.comm, rows.op, strict=True)}:
        own = rows.take((rows.comm == comm) & (rows.op == op))
        assert own.first_seq.tolist() == (np.cumsum(own.count) - own.count).tolist()
    assert not rows.seq_known.any()


def world_of(testbed: Testbed) -> str:
    """The hash of a running job's first communicator."""
    return f"{testbed.truth()[0].communicator('world').hash:016x}"


def hashes(truth: RankTruth) -> set[int]:
    return {each.hash for each in truth.facts.communicators}


def test_an_agent_that_is_killed_leaves_no_probe_and_its_successor_goes_on(
    broker: EmbeddedBroker, events: Events, tmp_path: Path
) -> None:
    with Agent(tmp_path / "agent", broker.bootstrap, agent=LEAN) as agent, agent.testbed(WORKLOAD, "mortal") as testbed:
        wait_until(lambda: any(len(batch.calls) for batch in events.of("mortal").batches), "the first calls")
        testbed.wait_until(testbed.iteration + 29)
        library = agent.libraries / "libnccl.so.2"
        assert is_probed(testbed.pids[0], library)
        agent.kill()
        wait_until(lambda: not is_probed(testbed.pids[0], library), "the kernel removes the probes of a killed agent")
        testbed.wait_until(testbed.iteration + 13)
        agent.start()
        testbed.wait_until(testbed.iteration + 101)
        testbed.stop()
        seen = events.wait_for_end("mortal")
        truths = testbed.truth()
    first_start_ns, second_start_ns = dict.fromkeys(batch.agent_start_ns for batch in seen.batches)
    first, second = seen.since(first_start_ns), seen.since(second_start_ns)
    assert {batch.incarnation for batch in first.batches} == {batch.incarnation for batch in second.batches}
    assert first.table("calls").seq_known.all()
    assert seen.lost == 0
    for truth in truths:
        assert set(second.table("calls", truth.rank).comm.tolist()) == hashes(truth)
        told = second.table("communicators", truth.rank)
        assert {(int(c), int(r), int(s)) for c, r, s in zip(told.comm, told.comm_rank, told.size, strict=True)} == {
            (each.hash, each.rank, each.size) for each in truth.facts.communicators
        }
        check_last_calls(second, truth)
        rows = seen.iterations(truth.rank)
        assert set(rows.numbering.tolist()) == {int(Numbering.SEQUENCE), int(Numbering.LOCAL)}
        errors = iteration_errors(seen, truth, int(truth.iterations["iteration"][-1]) - 67)
        assert np.median(np.abs(errors)) < 0.012


# So many different calls that the window stage learns their pattern soon, although it knows no communicator's members.
VARIED = Workload(dp=2, forward_ms=1.5, rare_every=1)
# Communicators that differ in their calls, and the world from others by its size.
MIXED = Workload(tp=2, dp=2, forward_ms=2)
PATCHES = {"agents.nccl.UNRESOLVED_NS": 4_000_000_000, "agents.late.SPAN_NS": 1_500_000_000}


def test_an_agent_that_comes_late_says_whom_it_does_not_know_and_sees_iterations(
    broker: EmbeddedBroker, events: Events, tmp_path: Path
) -> None:
    agent = Agent(tmp_path / "agent", broker.bootstrap, agent=LEAN, patches=PATCHES, identity={"settle_s": "2.0"})
    with agent.testbed(VARIED, "late", network=False) as testbed:
        testbed.wait_until(17)
        with agent:
            wait_until(lambda: any(len(out.rows) for out in events.of("late").windows), "the first iterations")
            testbed.wait_until(testbed.iteration + 41)
            testbed.stop()
            seen = events.wait_for_end("late")
            truths = testbed.truth()
            said = agent.said()
    (incarnation,) = {batch.incarnation for batch in seen.batches}
    assert incarnation.startswith("guess-")
    assert "it was guessed from their environment" in said
    assert "members of 4 communicators" in said
    for truth in truths:
        check_last_calls(seen, truth)
        assert not set(seen.table("calls", truth.rank).comm.tolist()) & hashes(truth)
        assert not len(seen.table("communicators", truth.rank))
        assert set(seen.iterations(truth.rank).numbering.tolist()) == {int(Numbering.LOCAL)}
        errors = iteration_errors(seen, truth, int(truth.iterations["iteration"][-1]) - 37)
        assert np.median(np.abs(errors)) < 0.012


def test_an_agent_that_comes_late_takes_communicators_from_the_inspector(
    broker: EmbeddedBroker, events: Events, tmp_path: Path
) -> None:
    agent = Agent(tmp_path / "agent", broker.bootstrap, agent=LEAN, patches=PATCHES, identity={"settle_s": "2.0"})
    settings = {"NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES": "0", "NCCL_INSPECTOR_DUMP_VERBOSE": "1"}
    with agent.testbed(MIXED, "told", network=False, inspector=settings) as testbed:
        testbed.wait_until(17)
        with agent:
            world = world_of(testbed)
            wait_until(lambda: events.of("told").incarnations[-1:] == [world], "the world's name")
            testbed.wait_until(testbed.iteration + 101)
            testbed.stop()
            wait_until(lambda: len(events.of("told").ended) == 2, "the end under both names")
            seen = events.of("told")
            truths = testbed.truth()
    guess, _ = seen.incarnations
    assert guess.startswith("guess-")
    for truth in truths:
        assert set(seen_calls(seen, truth.rank)[0].comm.tolist()) == hashes(truth)
        told = seen.table("communicators", truth.rank)
        assert {(int(c), int(r), int(s)) for c, r, s in zip(told.comm, told.comm_rank, told.size, strict=True)} == {
            (each.hash, each.rank, each.size) for each in truth.facts.communicators
        }


def test_a_rank_that_is_killed_takes_nobody_elses_events_with_it(
    broker: EmbeddedBroker, events: Events, tmp_path: Path
) -> None:
    with Agent(tmp_path / "agent", broker.bootstrap, agent=LEAN) as agent, ExitStack() as stack:
        other = stack.enter_context(agent.testbed(WORKLOAD, "healthy", network=False))
        with agent.testbed(WORKLOAD, "wounded", network=False, gpu_folder=tmp_path) as wounded:
            wounded.wait_until(31)
            wait_until(lambda: "rank 1 of 2 of job wounded" in agent.said(), "the agent to know both ranks")
            os.kill(wounded.pids[1], signal.SIGKILL)
            agent.wait_for("rank 1 of job wounded has ended")
        seen = events.wait_for_end("wounded")
        other.stop()
        check_all(events.wait_for_end("healthy"), other)
    assert {info.rank for info in seen.batches[0].ranks} == {0, 1}
    assert [batch.is_last for batch in seen.batches].count(True) == 1
    assert "Traceback" not in agent.said()


def test_batches_wait_for_a_broker_that_is_away_at_the_start_and_later(tmp_path: Path) -> None:
    with EmbeddedBroker() as broker:
        broker.down()
        agent = Agent(tmp_path / "agent", broker.bootstrap, agent=LEAN, patches={"agents.loop.SILENT_BROKER_S": 1.0})
        with agent, agent.testbed(WORKLOAD, "patient", network=False) as testbed:
            testbed.wait_until(31)
            agent.wait_for("wait for a broker that does not answer")
            broker.up()
            agent.wait_for("the broker takes batches again")
            testbed.wait_until(testbed.iteration + 31)
            broker.down()
            testbed.wait_until(testbed.iteration + 67)
            broker.up()
            testbed.stop()
            with Events(broker.bootstrap) as events:
                check_all(events.wait_for_end("patient"), testbed)
            assert agent.end() == 0
            assert "batches delivered" in agent.said()


def test_a_library_that_cannot_be_probed_is_reported_and_hurts_no_other(
    broker: EmbeddedBroker, events: Events, tmp_path: Path
) -> None:
    with Agent(tmp_path / "agent", broker.bootstrap, agent=LEAN) as agent:
        protected = libraries.build(branch_protected=True)
        name = protected / "libnccl.so.2"
        with (
            agent.testbed(WORKLOAD, "plain", network=False) as plain,
            agent.testbed(WORKLOAD, "hard", network=False, gpu_folder=tmp_path, library_folder=protected) as hard,
        ):
            agent.wait_for(f"ncclAllReduce of {name} cannot be seen")
            hard.wait_until(31)
            hard.stop()
            plain.stop()
            check_all(events.wait_for_end("plain"), plain)
            assert hard.truth()[0].facts.is_complete
    assert "probe_dear_functions" in agent.said()


def test_libraries_are_taken_up_as_they_come_and_let_go_of_when_nobody_uses_them(
    broker: EmbeddedBroker, events: Events, tmp_path: Path
) -> None:
    agent = Agent(
        tmp_path / "agent",
        broker.bootstrap,
        agent=LEAN,
        is_to_know_libraries=False,
        identity={"settle_s": "1.0"},
        patches={"agents.loop.UNUSED_S": 1.0, "agents.late.STRANGER_NS": 300_000_000},
    )
    with agent:
        agent.wait_for("markers is observed")  # the last of the sources
        for n_ended, job in ((2, "first"), (4, "second")):
            with agent.testbed(WORKLOAD, job, network=False) as testbed:
                agent.wait_for(f"of 2 of job {job}")
                testbed.stop()
                seen = events.wait_for_end(job)
                truths = testbed.truth()
            agent.wait_for("is not used any more", times=n_ended)
            for truth in truths:
                check_last_calls(seen, truth)
