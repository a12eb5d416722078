"""What finds no room is counted: calls, not rows, by the process that made them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.ebpf import kernel_state
from agents.ebpf import tracer as tracer_module
from agents.ebpf.tracer import Tracer
from tests.agents.probed import Victim, attach, build_library, open_tracer, take, take_all, wait_until

pytestmark = pytest.mark.kernel

ROOM = os.sysconf("SC_PAGESIZE") // 88  # rows in the smallest ring, with their headers


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("probed"))


@pytest.fixture(scope="module")
def tracer(library: Path) -> Iterator[Tracer]:
    tracer = open_tracer(ring_bytes=os.sysconf("SC_PAGESIZE"))
    with Victim(library) as victim:
        attach(tracer, victim)
    yield tracer
    tracer.close()


def test_calls_that_find_no_room_are_counted_exactly(tracer: Tracer, library: Path) -> None:
    with Victim(library) as victim:
        victim.do("for i in range(1009): me.call('ncclAllReduce', count=14 + i)")
        truth = victim.truth()
        first = take(tracer, victim.pid)
        victim.do("for i in range(11): me.call('ncclAllGather', count=14 + i)")
        rest = take_all(tracer, victim)
    assert ROOM - 2 <= len(first.runs) <= ROOM
    assert len(first.runs) + first.lost_calls == 1008, "one run is open"
    assert first.keys == [each.key for each in truth[: len(first.runs)]]
    assert len(rest.runs) == 12
    assert rest.lost_calls == 0
    assert int(rest.runs["first_seq"][0]) == 1008, "what is lost is numbered all the same"


def test_a_lost_run_counts_all_of_its_calls(tracer: Tracer, library: Path) -> None:
    with Victim(library) as victim:
        victim.do(
            """
            for i in range(101):
                for _ in range(7): me.call("ncclAllReduce", count=14 + i % 2)
            """
        )
        seen = take_all(tracer, victim)
    assert len(seen.runs) < 101
    assert seen.lost_calls > 7
    assert int(seen.runs["count"].sum()) + seen.lost_calls == 707


def test_each_process_is_charged_with_its_own_losses(tracer: Tracer, library: Path) -> None:
    with Victim(library) as many, Victim(library) as few:
        many.do("for i in range(503): me.call('ncclAllReduce', count=14 + i)")
        few.do("for i in range(13): me.call('ncclAllReduce', count=14 + i)")
        records = tracer.take(flush_open=False)
        assert records.lost_calls == {many.pid: 502 - len(records.runs), few.pid: 12}
        assert tracer.take(flush_open=False).lost_calls == {}
        for victim in (many, few):
            tracer.forget(victim.pid)


def test_a_run_that_was_told_while_open_is_not_lost_later(tracer: Tracer, library: Path) -> None:
    with Victim(library) as quiet, Victim(library) as loud:
        quiet.do("for _ in range(7): me.call('ncclAllReduce')")
        told: list[object] = []

        def is_told() -> bool:
            runs = tracer.take().runs
            told.extend(runs[runs["tgid"] == quiet.pid])
            return bool(told)

        wait_until(is_told, "an idle run is told within seconds")
        loud.do("for i in range(503): me.call('ncclAllReduce', count=14 + i)")
        quiet.do("for _ in range(3): me.call('ncclAllReduce')")
        seen = take_all(tracer, quiet)
        tracer.forget(loud.pid)
    assert seen.runs["count"].tolist() == [3]
    assert seen.lost_calls == 0


def test_waits_and_communicators_without_room_are_counted(tracer: Tracer, library: Path) -> None:
    with Victim(library) as victim:
        victim.do("for _ in range(101): me.cuda.cudaDeviceSynchronize()")
        records = tracer.take()
        assert len(records.syncs) + records.lost_other == 101
        assert records.lost_creations == 0
        victim.do("for _ in range(5003): me.library.ncclCommDestroy(me.create(2, 0))")
        records = tracer.take()
        assert len(records.communicators) + records.lost_creations == 2 * 5003
        assert records.lost_creations > 0 == records.lost_other
        assert tracer.take().lost_creations == 0


def test_what_nobody_takes_is_dropped_from_the_oldest_and_counted(
    tracer: Tracer, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer_module, "ROWS_MAX", 30)
    with Victim(library) as victim:
        for i in range(7):
            victim.do(f"for i in range(11): me.call('ncclAllReduce', count={14 + 11 * i} + i)")
            tracer.poll()
        seen = take(tracer, victim.pid)
        for _ in range(7):
            victim.do("for i in range(11): me.cuda.cudaDeviceSynchronize()")
            tracer.poll()
        records = tracer.take()
        tracer.forget(victim.pid)
    assert len(records.syncs) <= 30
    assert len(records.syncs) + records.lost_other == 77
    assert len(seen.runs) <= 30
    assert len(seen.runs) + seen.lost_calls == 76
    assert int(seen.runs["bytes"][-1]) == 4 * (14 + 75)


@pytest.fixture
def small_tracer(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracer]:
    """With room for eight threads and eight processes."""
    monkeypatch.setattr(kernel_state, "N_THREADS", 8)
    monkeypatch.setattr(kernel_state, "N_PROCESSES", 8)
    monkeypatch.setattr(Tracer, "_defines", property(lambda _: DEFINES, lambda *_: None), raising=False)
    tracer = open_tracer()
    with Victim(library) as victim:
        attach(tracer, victim)
    yield tracer
    tracer.close()


DEFINES = ["RING_BYTES=8388608", "THREADS=8", "PROCESSES=8"]


def test_threads_beyond_the_places_take_over_those_of_idle_ones(small_tracer: Tracer, library: Path) -> None:
    with Victim(library) as victim:
        victim.do(
            """
            barrier = threading.Barrier(23)
            def work():
                for i in range(11):
                    barrier.wait()
                    with lock: me.call("ncclAllReduce", count=14 + i)
            lock = threading.Lock()
            threads = [threading.Thread(target=work) for _ in range(23)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            """
        )
        truth = victim.truth()
        seen = take_all(small_tracer, victim)
    assert len({each.tid for each in truth}) == 23
    assert seen.keys == [each.key for each in truth]


def test_processes_beyond_the_places_are_counted_as_lost_until_others_end(small_tracer: Tracer, library: Path) -> None:
    with contextlib.ExitStack() as stack:
        victims = [stack.enter_context(Victim(library)) for _ in range(11)]
        for victim in victims:
            victim.do("for _ in range(7): me.call('ncclAllReduce')")
        records = small_tracer.take(flush_open=False)
        assert records.lost_other == 3 * 7
        for victim in victims[:8]:
            assert take_all(small_tracer, victim).runs["count"].tolist() == [7]
        victims[8].do("for _ in range(5): me.call('ncclAllReduce')")
        assert take_all(small_tracer, victims[8]).runs["count"].tolist() == [5]


def test_processes_whose_numbers_have_one_place_find_others(small_tracer: Tracer, library: Path) -> None:
    with contextlib.ExitStack() as stack:
        victims = [stack.enter_context(Victim(library))]
        while len(victims) < 3:
            other = stack.enter_context(Victim(library))
            if other.pid % 8 == victims[0].pid % 8:
                victims.append(other)
            else:
                other.end()
        for victim in victims:
            victim.do("for _ in range(7): me.call('ncclAllReduce')")
        for victim in victims:
            assert take_all(small_tracer, victim).runs["count"].tolist() == [7]


def test_the_places_of_processes_that_have_ended_are_free_again_without_being_told(
    small_tracer: Tracer, library: Path
) -> None:
    for _ in range(11):
        with Victim(library) as victim:
            victim.do("for _ in range(7): me.call('ncclAllReduce')")
            victim.end()
        records = small_tracer.take(flush_open=False)
        assert records.runs["count"].tolist() == [7]
        assert records.lost_other == 0
