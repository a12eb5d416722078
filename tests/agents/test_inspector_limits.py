"""What is said of Inspector's files that are not there, cannot be read, or leave something out."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents import inspector_files, nccl_inspector
from agents.collector import NotAvailable
from agents.inspector_advice import advice
from agents.inspector_files import Unreadable, find_file, read_settings
from agents.nccl_inspector import InspectorCollector
from agents.placing import CallTimes
from schemas.events import Op, Sensor
from tests.agents.inspector_lines import collective, transfer, v40, v43
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


def test_a_pipe_in_place_of_nccls_configuration_blocks_nobody(node: Node) -> None:
    os.mkfifo(node.files / "pipe")
    node.rank(NCCL_CONF_FILE="/dumps/pipe", NCCL_INSPECTOR_DUMP_DIR="/own")
    read: list[inspector_files.Settings] = []
    thread = threading.Thread(target=lambda: read.append(read_settings(node.proc / "4711")), daemon=True)
    thread.start()
    thread.join(30.0)
    assert [settings.folder for settings in read] == ["/own"]


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
