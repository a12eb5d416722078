"""Following the files of NCCL's Inspector, as they are written, cut, renamed and removed."""

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agents import inspector_files, nccl_inspector
from agents.clock import Clock
from agents.collector import NotAvailable, ProcessKey, RankProcess
from agents.inspector_advice import advice
from agents.inspector_files import Unreadable, find_file, read_settings
from agents.nccl_inspector import InspectorCollector
from agents.placing import CallTimes
from schemas.events import Calls, CallSource, Op, Sensor
from tests.agents.inspector_lines import COMM, collective, transfer, v40, v43

HASH = int(COMM, 16)
SECOND = 1_000_000_000


class Wall(Clock):
    """A clock that is moved by hand."""

    time_ns = 1_790_000_000 * SECOND

    def now_ns(self) -> int:
        return self.time_ns


class Node:
    """A proc file system of our own, and the files of its processes."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.files = folder / "root" / "dumps"
        self.files.mkdir(parents=True)
        (self.proc / "self").mkdir(parents=True)
        self.folder = folder

    def rank(self, number: int = 0, pid: int = 4711, inside: int = 11, /, **settings: str) -> RankProcess:
        own = self.proc / str(pid)
        (own / "fd").mkdir(parents=True)
        (own / "root").symlink_to(self.folder / "root")
        (own / "cwd").symlink_to(self.files)
        given = {"NCCL_INSPECTOR_ENABLE": "1", "NCCL_INSPECTOR_DUMP_DIR": "/dumps", "PATH": "/bin"} | settings
        given |= {"NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "500000", **settings}
        (own / "environ").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in given.items() if v))
        return RankProcess(
            key=ProcessKey(pid, 3),
            job_id="job-7",
            incarnation="a",
            world_size=7,
            rank=number,
            local_rank=number,
            namespace_pid=inside,
            start_ns=Wall.time_ns - SECOND,
        )

    def file(self, pid: int = 11, host: str = socket.gethostname()) -> Path:
        return self.files / f"{host}-pid{pid}.log"


def now_us(clock: Wall) -> int:
    return clock.time_ns // 1000


def host_calls(clock: Wall, n: int, *, first: int = 0) -> Calls:
    start_ns = clock.time_ns - SECOND + (first + np.arange(n)) * 1_000_000
    return Calls.build(
        n,
        rank=0,
        comm=HASH,
        op=int(Op.ALL_REDUCE),
        source=0,
        bytes=8192,
        count=1,
        first_seq=first + np.arange(n),
        seq_known=1,
        start_ns=start_ns,
        end_ns=start_ns + 1000,
        duration_ns=1000,
        duration_min_ns=1000,
    )


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


def numbers(collector: InspectorCollector, *ranks: RankProcess) -> list[int]:
    return collector.collect(ranks).calls.first_seq.tolist()  # type: ignore[no-any-return]


def verbose(clock: Wall, *ns: int, **header: int) -> bytes:
    bodies = (collective(n, starts_us=[now_us(clock) - 1000 + n]) for n in ns)
    return b"".join(v40(body, dump_us=now_us(clock), **header) for body in bodies)  # type: ignore[arg-type]


def add(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


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
    rank = node.rank(NCCL_INSPECTOR_ENABLE="", NCCL_INSPECTOR_DUMP_DIR="", HOME="/home/u")
    (node.folder / "root" / "etc").mkdir()
    (node.folder / "root" / "home" / "u").mkdir(parents=True)
    (node.folder / "root" / "etc" / "nccl.conf").write_text(
        "# of the image\nNCCL_INSPECTOR_ENABLE=1\n NCCL_INSPECTOR_DUMP_DIR = /a\nNCCL_INSPECTOR_DUMP_VERBOSE=1\nodd\n"
    )
    (node.folder / "root" / "home" / "u" / ".nccl.conf").write_text("NCCL_INSPECTOR_DUMP_DIR=/b\n")
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


def test_what_may_not_be_read_is_a_limit_and_the_others_are_read(
    node: Node, clock: Wall, collector: InspectorCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, open_ = node.rank(), node.rank(1, 60, 60)
    add(node.file(60), verbose(clock, 5))

    def refuse(proc: Path) -> inspector_files.Settings:
        if proc.name == "4711":
            raise Unreadable(f"the environment of process {proc.name} cannot be read (Permission denied)")
        return read_settings(proc)

    monkeypatch.setattr(nccl_inspector, "read_settings", refuse)
    assert numbers(collector, hidden, open_) == [5]
    (limit,) = collector.limits()
    assert (limit.what, "process 4711" in limit.why) == ("GPU times of rank 0", True)
    assert "root" in limit.remedy


def test_permission_errors_are_told_from_missing_files(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = node.rank()

    def refuse(path: object) -> object:
        raise PermissionError(13, "Permission denied")

    settings = read_settings(node.proc / "4711")
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(Unreadable, match=r"open files of process 4711 .* \(Permission denied\)"):
        find_file(node.proc / "4711", rank, settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"NCCL_INSPECTOR_ENABLE": ""}, "not switched on"),
        ({"NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": ""}, "no interval"),
        ({"NCCL_INSPECTOR_PROM_DUMP": "1"}, "Prometheus"),
        ({}, "has no file in /dumps"),
    ],
)
def test_why_there_are_no_times_is_said(
    settings: dict[str, str], words: str, node: Node, clock: Wall, collector: InspectorCollector
) -> None:
    ranks = [node.rank(3, **settings), node.rank(4, 60, 60, **settings)]
    collector.collect(ranks)
    clock.time_ns += 61 * SECOND
    limits = collector.limits()
    assert any(words in limit.why for limit in limits)
    assert all("rank" in limit.what and limit.remedy for limit in limits)


def test_ranks_with_the_same_trouble_share_a_limit(node: Node, collector: InspectorCollector) -> None:
    ranks = [node.rank(i, 60 + i, 60 + i, NCCL_INSPECTOR_ENABLE="") for i in (5, 3)]
    collector.collect(ranks)
    assert [limit.what for limit in collector.limits()] == ["GPU times of ranks 3, 5"]


def test_gaps_that_are_normal_are_told_with_the_setting_that_closes_them(
    node: Node, clock: Wall, collector: InspectorCollector
) -> None:
    add(node.file(), verbose(clock, 0, 5, 10))
    found = collector.collect([node.rank()])
    assert (len(found.calls), found.lost_events) == (3, 0)
    (limit,) = [x for x in collector.limits() if "numbers" in x.why]
    assert "73%" in limit.why
    assert "NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES=0" in limit.remedy


def test_calls_of_a_kind_that_is_never_recorded_are_told_too(
    node: Node, clock: Wall, times: CallTimes, collector: InspectorCollector
) -> None:
    rank = node.rank()
    collector.collect([rank])
    clock.time_ns += 60 * SECOND
    times.note(rank.key, host_calls(clock, 6))
    times.note(rank.key, host_calls(clock, 2).replace(op=int(Op.BROADCAST)))
    add(node.file(), b"".join(v40(collective(n), dump_us=now_us(clock)) for n in range(6)))
    collector.collect([rank])
    (limit,) = [x for x in collector.limits() if "host's calls" in x.why]
    assert "25%" in limit.why


def test_the_plug_ins_own_losses_are_said(node: Node, clock: Wall, collector: InspectorCollector) -> None:
    add(node.file(), v43([collective(0, starts_us=[now_us(clock)])], dump_us=now_us(clock), dropped=37))
    found = collector.collect([node.rank()])
    assert found.lost_events == 0
    assert any("37 records" in limit.why for limit in collector.limits())


def test_the_join_rate_says_what_was_placed_and_what_has_times(
    node: Node, clock: Wall, times: CallTimes, collector: InspectorCollector
) -> None:
    ranks = [node.rank(), node.rank(1, 60, 60)]
    for rank in ranks:
        times.note(rank.key, host_calls(clock, 11))
    add(node.file(), b"".join(v40(collective(n), dump_us=now_us(clock)) for n in range(5)))
    add(node.file(60), b"".join(v40(collective(n), dump_us=now_us(clock)) for n in range(3, 13)))
    add(node.file(60), v40(transfer(1), dump_us=now_us(clock), comm="0x5"))
    collector.collect(ranks)
    clock.time_ns += 7 * SECOND
    collector.collect(ranks)
    other, main = collector.join_rates()
    assert (main.job_id, main.comm, main.records, main.placed, main.on_calls) == ("job-7", HASH, 15, 13, 13)
    assert main.placed_share == pytest.approx(13 / 15)
    assert main.timed_share == pytest.approx(13 / 22)
    assert (other.comm, other.records, other.placed_share, other.timed_share) == (5, 1, 0, None)
    assert any("host's call is not known" in limit.why for limit in collector.limits())


def test_the_advice_names_settings_and_is_honest_about_the_cost() -> None:
    text = "\n".join(advice())
    for name in ("NCCL_PROFILER_PLUGIN", "NCCL_INSPECTOR_ENABLE=1", "/etc/nccl.conf", "NCCL_CONF_FILE", "2.28"):
        assert name in text
    assert "inside the training process" in text
    assert "not measured" in text


def test_without_a_proc_file_system_it_is_not_available(tmp_path: Path, clock: Wall, times: CallTimes) -> None:
    collector = InspectorCollector(times, clock, proc=tmp_path / "proc")
    with pytest.raises(NotAvailable, match="mount"):
        collector.open()
    assert collector.sensors == Sensor(0)
    collector.close()
    collector.close()
