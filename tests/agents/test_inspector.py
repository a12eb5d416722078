"""Following the files of NCCL's Inspector, as they are written, cut, renamed and removed."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agents import inspector_files, nccl_inspector
from agents.collector import ProcessKey
from agents.inspector_files import read_settings
from agents.nccl_inspector import InspectorCollector
from agents.placing import CallTimes
from schemas.events import Calls, CallSource, Op, Sensor
from tests.agents.inspector_lines import collective, v40, v43
from tests.agents.inspector_node import HASH, SECOND, Node, Wall, add, host_calls, now_us, numbers, verbose


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def clock() -> Wall:
    return Wall(offset_ns=0)


@pytest.fixture
def times() -> CallTimes:
    return CallTimes()


@pytest.fixture
def collector(node: Node, clock: Wall, times: CallTimes) -> Iterator[InspectorCollector]:
    collector = InspectorCollector(times, clock, proc=node.proc, budget_s=30.0)
    collector.open()
    yield collector
    collector.close()


def test_records_become_calls_of_the_gpu(
    node: Node, clock: Wall, times: CallTimes, collector: InspectorCollector
) -> None:
    ranks = [node.rank(4, 50, 50), node.rank(5)]
    times.note(ranks[1].key, host_calls(clock, 3))
    add(node.file(), v40(collective(1, took_us=250), dump_us=now_us(clock), rank=6))
    found = collector.collect(ranks)
    start_ns = clock.time_ns - SECOND + 1_000_000
    expected = Calls.build(
        1,
        rank=1,  # the place among the given
        comm=HASH,
        op=int(Op.ALL_REDUCE),
        source=int(CallSource.GPU),
        bytes=8192,
        count=1,
        first_seq=1,
        seq_known=1,
        start_ns=start_ns,
        end_ns=start_ns + 250_000,
        duration_ns=250_000,
        duration_min_ns=250_000,
        is_timed=0,
    )
    assert found.calls == expected
    members = found.communicators
    assert (members.rank.tolist(), members.comm.tolist()) == ([1], [HASH])
    assert (members.comm_rank.tolist(), members.size.tolist()) == ([6], [7])
    assert found.lost_events == 0


def test_a_file_is_followed_as_it_grows_and_nothing_is_reported_twice(
    node: Node, clock: Wall, collector: InspectorCollector
) -> None:
    rank, content = node.rank(), verbose(clock, 0, 1, 2)
    assert numbers(collector, rank) == []
    add(node.file(), content[:-77])
    clock.time_ns += 2 * SECOND
    assert numbers(collector, rank) == [0, 1]
    assert numbers(collector, rank) == []
    add(node.file(), content[-77:])
    assert numbers(collector, rank) == [2]


def test_calls_come_in_the_order_of_their_start(node: Node, clock: Wall, collector: InspectorCollector) -> None:
    ranks = [node.rank(), node.rank(1, 60, 60)]
    add(node.file(), verbose(clock, 3, 1))
    add(node.file(60), verbose(clock, 2, 0))
    calls = collector.collect(ranks).calls
    assert calls.first_seq.tolist() == [0, 1, 2, 3]
    assert calls.rank.tolist() == [1, 0, 1, 0]


def test_communicators_are_told_every_time(node: Node, clock: Wall, collector: InspectorCollector) -> None:
    rank = node.rank()
    add(node.file(), verbose(clock, 0))
    assert len(collector.collect([rank]).communicators) == len(collector.collect([rank]).communicators) == 1


def test_the_sensor_is_there_while_records_find_their_place(
    node: Node, clock: Wall, collector: InspectorCollector
) -> None:
    rank = node.rank()
    add(node.file(), v40(collective(0), dump_us=now_us(clock)))
    collector.collect([rank])
    assert collector.sensors == Sensor(0)  # nobody knows when it ran
    add(node.file(), verbose(clock, 1))
    collector.collect([rank])
    assert collector.sensors == Sensor.GPU
    clock.time_ns += nccl_inspector.FRESH_NS
    assert collector.sensors == Sensor(0)


def test_the_open_file_is_found_whatever_it_is_called_there(
    node: Node, clock: Wall, collector: InspectorCollector
) -> None:
    rank = node.rank(NCCL_INSPECTOR_DUMP_DIR="/nowhere")
    elsewhere = node.folder / "host-of-a-container-pid11.log"
    add(elsewhere, verbose(clock, 0, 1))
    (node.proc / "4711" / "fd" / "3").symlink_to("/dev/null")
    (node.proc / "4711" / "fd" / "4").symlink_to(node.folder / "no-pid12.log")
    (node.proc / "4711" / "fd" / "7").symlink_to(elsewhere)
    assert numbers(collector, rank) == [0, 1]


@pytest.mark.parametrize(
    ("settings", "folder"),
    [
        ({"NCCL_INSPECTOR_DUMP_DIR": "", "SLURM_JOBID": "137"}, "nccl-inspector-137"),
        ({"NCCL_INSPECTOR_DUMP_DIR": "", "SLURM_JOBID": "none"}, "nccl-inspector-0"),
        ({"NCCL_INSPECTOR_DUMP_DIR": ""}, "nccl-inspector-unknown-jobid"),
        ({"NCCL_INSPECTOR_DUMP_DIR": "below"}, "below"),
    ],
)
def test_the_folder_is_the_one_that_the_plug_in_chooses(
    settings: dict[str, str], folder: str, node: Node, clock: Wall, collector: InspectorCollector
) -> None:
    (node.files / folder).mkdir()
    node.files /= folder
    rank = node.rank(0, **settings)
    (node.proc / "4711" / "cwd").unlink()
    (node.proc / "4711" / "cwd").symlink_to(node.files.parent)
    add(node.file(), verbose(clock, 3))
    assert numbers(collector, rank) == [3]


def test_what_nccls_configuration_says_is_known(node: Node) -> None:
    rank = node.rank(NCCL_INSPECTOR_ENABLE="", NCCL_INSPECTOR_DUMP_DIR="", HOME="/people/u")
    (node.folder / "root" / "etc").mkdir()
    (node.folder / "root" / "people" / "u").mkdir(parents=True)
    (node.folder / "root" / "etc" / "nccl.conf").write_text(
        "# of the image\nNCCL_INSPECTOR_ENABLE=1\n NCCL_INSPECTOR_DUMP_DIR = /a\nNCCL_INSPECTOR_DUMP_VERBOSE=1\nodd\n"
    )
    (node.folder / "root" / "people" / "u" / ".nccl.conf").write_text("NCCL_INSPECTOR_DUMP_DIR=/b\n")
    settings = read_settings(node.proc / str(rank.key.pid))
    assert (settings.is_on, settings.folder, settings.is_verbose) == (True, "/b", True)
    assert (settings.interval_us, settings.least_bytes) == (500_000, 8192)


def test_files_of_other_hosts_and_processes_are_left_alone(
    node: Node, clock: Wall, collector: InspectorCollector
) -> None:
    rank = node.rank()
    add(node.file(host="another-host"), verbose(clock, 1))
    add(node.file(pid=111), verbose(clock, 2))
    add(node.files / f"{node.file().name}.gz", b"\x1f\x8b" + verbose(clock, 3))
    add(node.files / f"{node.file().name}.1", verbose(clock, 4))
    assert numbers(collector, rank) == []
    named = node.rank(1, 4712, 11, HOSTNAME="another-host")
    assert numbers(collector, named) == [1]


def test_a_renamed_file_is_read_to_its_end_before_the_new_one(
    node: Node, clock: Wall, collector: InspectorCollector
) -> None:
    rank = node.rank()
    add(node.file(), verbose(clock, 0))
    assert numbers(collector, rank) == [0]
    old = node.file().rename(node.files / "old.1")
    add(old, verbose(clock, 1))
    add(node.file(), verbose(clock, 2))
    assert numbers(collector, rank) == [1]
    clock.time_ns += 31 * SECOND
    add(old, verbose(clock, 3))
    assert sorted(numbers(collector, rank)) == [2, 3]


def test_a_removed_file_is_read_to_its_end(node: Node, clock: Wall, collector: InspectorCollector) -> None:
    rank = node.rank()
    add(node.file(), verbose(clock, 0))
    collector.collect([rank])
    with node.file().open("ab") as file:
        node.file().unlink()
        file.write(verbose(clock, 1))
    assert numbers(collector, rank) == [1]
    clock.time_ns += 31 * SECOND
    assert numbers(collector, rank) == []
    add(node.file(), verbose(clock, 2))
    clock.time_ns += 31 * SECOND
    assert numbers(collector, rank) == [2]


def test_a_file_that_its_writer_begins_anew_is_read_from_its_beginning(
    node: Node, clock: Wall, collector: InspectorCollector
) -> None:
    rank = node.rank()
    add(node.file(), verbose(clock, 0, 1, 2))
    collector.collect([rank])
    node.file().write_bytes(verbose(clock, 3))
    assert numbers(collector, rank) == [3]


def test_a_file_truncated_under_its_writer_is_read_on(node: Node, clock: Wall, collector: InspectorCollector) -> None:
    rank = node.rank()
    with node.file().open("wb") as file:
        for n in range(97):
            file.write(verbose(clock, n))
        file.flush()
        assert len(numbers(collector, rank)) == 97
        os.truncate(node.file(), 0)
        assert numbers(collector, rank) == []
        file.write(verbose(clock, 97, 98, 99))
        file.flush()
        found = numbers(collector, rank)
    assert found in ([98, 99], [97, 98, 99])


def test_a_large_old_file_is_not_read_from_its_beginning(
    node: Node, clock: Wall, collector: InspectorCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspector_files, "TAIL_BYTES", 3000)
    rank = node.rank()
    add(node.file(), v43([collective(n, starts_us=[now_us(clock)]) for n in range(50)], dump_us=now_us(clock)))
    add(node.file(), v43([collective(n, starts_us=[now_us(clock)]) for n in range(50, 53)], dump_us=now_us(clock)))
    assert numbers(collector, rank) == [50, 51, 52]


def test_records_from_long_before_the_agent_are_left_out(
    node: Node, clock: Wall, collector: InspectorCollector
) -> None:
    rank = node.rank()
    before_us = now_us(clock) - nccl_inspector.JOIN_NS // 1000
    add(node.file(), v40(collective(0, starts_us=[before_us - 10]), dump_us=before_us - 1))
    add(node.file(), v40(collective(1, starts_us=[before_us - 10]), dump_us=before_us + 1))
    found = collector.collect([rank])
    assert found.calls.first_seq.tolist() == [1]
    assert len(found.communicators) == 1


def test_a_reader_that_is_hopelessly_behind_leaves_out_the_middle_and_says_so(
    node: Node, clock: Wall, collector: InspectorCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspector_files, "TAIL_BYTES", 3000)
    monkeypatch.setattr(inspector_files, "BACKLOG_MAX", 20_000)
    rank = node.rank()
    add(node.file(), verbose(clock, 0))
    assert numbers(collector, rank) == [0]
    add(node.file(), verbose(clock, *range(1, 101)))
    found = numbers(collector, rank)
    assert found == list(range(found[0], 101))
    assert found[0] > 90
    (limit,) = [x for x in collector.limits() if "left out" in x.why]
    assert "rank 0" in limit.what


def test_a_reader_that_is_late_leaves_out_what_would_come_too_late(
    node: Node, clock: Wall, collector: InspectorCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspector_files, "TAIL_BYTES", 3000)
    monkeypatch.setattr(nccl_inspector, "CHUNK_BYTES", 2000)
    rank = node.rank()
    add(node.file(), verbose(clock, 0))
    collector.collect([rank])
    add(node.file(), verbose(clock, *range(1, 101)))
    clock.time_ns += nccl_inspector.LATE_NS + SECOND
    add(node.file(), verbose(clock, *range(101, 111)))
    found = numbers(collector, rank)
    assert found == [1, 2, 3, *range(found[3], 111)]
    assert found[3] > 100
    assert any("left out" in limit.why for limit in collector.limits())


def test_reading_keeps_to_its_budget_and_starves_nobody(
    node: Node, clock: Wall, times: CallTimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_inspector, "CHUNK_BYTES", 2000)
    collector = InspectorCollector(times, clock, proc=node.proc, budget_s=0.0)
    collector.open()
    ranks = [node.rank(i, 100 + i, 20 + i) for i in range(3)]
    for i in range(3):
        add(node.file(20 + i), verbose(clock, *range(23)))
    found = [collector.collect(ranks).calls for _ in range(30)]
    assert max(len(calls) for calls in found) <= 5
    by_rank = [[c for calls in found for c in calls.first_seq[calls.rank == i].tolist()] for i in range(3)]
    assert len(by_rank[0]) == len(by_rank[1]) == len(by_rank[2])
    found += [collector.collect(ranks).calls for _ in range(60)]
    assert sum(len(calls) for calls in found) == 3 * 23
    collector.close()


def test_a_restarted_agent_goes_on_where_the_last_one_stopped(node: Node, clock: Wall, tmp_path: Path) -> None:
    state, rank = tmp_path / "inspector.json", node.rank()
    content = v43([collective(n, starts_us=[now_us(clock)]) for n in range(7)], dump_us=now_us(clock))
    cut = content.index(b'"coll_sn":3')
    for part, expected in ((content[:cut], [0, 1, 2]), (content[cut:], [3, 4, 5, 6]), (b"", [])):
        add(node.file(), part)
        collector = InspectorCollector(CallTimes(), clock, proc=node.proc, state_file=state, budget_s=30.0)
        collector.open()
        assert numbers(collector, rank) == expected
        collector.close()


def test_what_was_remembered_of_another_process_is_not_used(node: Node, clock: Wall, tmp_path: Path) -> None:
    state, rank = tmp_path / "inspector.json", node.rank()
    add(node.file(), verbose(clock, 0, 1))
    for own in (rank, replace(rank, key=ProcessKey(rank.key.pid, 99))):
        collector = InspectorCollector(CallTimes(), clock, proc=node.proc, state_file=state, budget_s=30.0)
        collector.open()
        assert numbers(collector, own) == [0, 1]
        collector.close()


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b"\xff"])
def test_a_damaged_state_file_stops_nothing(damage: bytes, node: Node, clock: Wall, tmp_path: Path) -> None:
    state = tmp_path / "inspector.json"
    state.write_bytes(damage)
    add(node.file(), verbose(clock, 0))
    collector = InspectorCollector(CallTimes(), clock, proc=node.proc, state_file=state, budget_s=30.0)
    collector.open()
    assert numbers(collector, node.rank()) == [0]
    collector.close()


def refused(tail: inspector_files.Tail, n_bytes: int) -> inspector_files.Chunk | None:
    raise inspector_files.Unreadable(f"{tail.path} cannot be read (Stale file handle)")


def test_after_a_failed_read_nothing_is_reported_twice_and_nothing_left_out(
    node: Node, clock: Wall, collector: InspectorCollector
) -> None:
    rank = node.rank()
    next_line = verbose(clock, 3)
    add(node.file(), verbose(clock, 0, 1, 2) + next_line[:17])
    assert numbers(collector, rank) == [0, 1, 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspector_files.Tail, "read", refused)
        assert numbers(collector, rank) == []
    add(node.file(), next_line[17:] + verbose(clock, 4))
    found = []
    for _ in range(5):
        clock.time_ns += 31 * SECOND
        found += numbers(collector, rank)
    assert found == [3, 4]


def test_an_agent_that_ends_while_a_file_cannot_be_read_is_followed_by_one_that_goes_on(
    node: Node, clock: Wall, tmp_path: Path
) -> None:
    rank, found = node.rank(), []
    add(node.file(), verbose(clock, 0, 1))
    for fails in (True, False):
        collector = InspectorCollector(
            CallTimes(), clock, proc=node.proc, state_file=tmp_path / "positions", budget_s=30.0
        )
        collector.open()
        found += numbers(collector, rank)
        if fails:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(inspector_files.Tail, "read", refused)
                found += numbers(collector, rank)
        collector.close()
        add(node.file(), verbose(clock, 2))
    assert found == [0, 1, 2]


def test_a_process_that_has_ended_is_let_go(node: Node, clock: Wall, collector: InspectorCollector) -> None:
    rank, other = node.rank(), node.rank(1, 60, 60)
    add(node.file(), verbose(clock, 0))
    collector.collect([rank, other])
    n_open = len(os.listdir("/proc/self/fd"))
    assert numbers(collector, other) == []
    assert len(os.listdir("/proc/self/fd")) == n_open - 1
    assert {limit.what for limit in collector.limits()} == set()


def test_a_process_that_is_gone_already_is_no_trouble(node: Node, collector: InspectorCollector) -> None:
    rank = node.rank()
    (node.proc / "4711" / "environ").unlink()
    assert numbers(collector, rank) == []
    assert not any(limit.why.startswith("the environment") for limit in collector.limits())
