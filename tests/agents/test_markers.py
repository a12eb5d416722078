"""What training processes say on the socket or in their logs becomes markers of the right rank, at the right time."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agents.collector import NotAvailable, Observations, ProcessKey, RankProcess
from agents.marker_socket import MarkerSocket
from agents.marker_text import Said, read_line
from agents.markers import LogConfig, MarkerCollector, MarkerConfig
from schemas.events import MarkerKind, Sensor

DEADLINE_S = 30.0
NOW_NS = 1_764_504_000_000_000_000


def a_rank(pid: int, rank: int = 5, job: str = "job") -> RankProcess:
    return RankProcess(
        key=ProcessKey(pid, 7),
        job_id=job,
        incarnation="0",
        world_size=23,
        rank=rank,
        local_rank=rank,
        namespace_pid=pid,
        start_ns=NOW_NS,
    )


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., MarkerCollector]]:
    with contextlib.ExitStack() as stack:

        def start(**fields: Any) -> MarkerCollector:
            config = MarkerConfig(**({"socket": str(tmp_path / "sub" / "markers.sock")} | fields))
            collector = MarkerCollector(config)
            stack.callback(collector.close)
            collector.open()
            return collector

        yield start


def send(collector: MarkerCollector, *texts: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for text in texts:
            sender.sendto(text, collector._config.socket)


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(line + "\n" for line in lines)


def collected(
    collector: MarkerCollector, ranks: list[RankProcess], n_rows: int, *, until: Callable[[], bool] = lambda: True
) -> list[tuple[int, int, int]]:
    """Return place, kind and iteration of the markers once there are so many."""
    rows: list[tuple[int, int, int]] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while len(rows) < n_rows or not until():
        assert time.monotonic() < deadline_s, f"only {len(rows)} of {n_rows} markers came"
        markers = collector.collect(ranks).markers
        rows += zip(markers.rank.tolist(), markers.kind.tolist(), markers.iteration.tolist(), strict=True)
        time.sleep(0.002)
    return rows


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"iteration 123", Said(kind=MarkerKind.ITERATION_END, iteration=123)),
        (b"  iteration 0\r\n", Said(kind=MarkerKind.ITERATION_END, iteration=0)),
        (b"iteration 7 rank=3", Said(kind=MarkerKind.ITERATION_END, iteration=7, rank=3)),
        (
            b"iteration 7 at=1764504000.000000123",
            Said(kind=MarkerKind.ITERATION_END, iteration=7, at_ns=NOW_NS + 123),
        ),
        (b"checkpoint 4.2s", Said(kind=MarkerKind.CHECKPOINT, iteration=None, duration_ns=4_200_000_000)),
        (b"profiling 350ms", Said(kind=MarkerKind.PROFILING, iteration=None, duration_ns=350_000_000)),
        (b"evaluation 2min iteration=29", Said(kind=MarkerKind.EVALUATION, iteration=29, duration_ns=120_000_000_000)),
        (b"evaluation begin", Said(kind=MarkerKind.EVALUATION, iteration=None, is_begin=True)),
        (b"evaluation end", Said(kind=MarkerKind.EVALUATION, iteration=None)),
    ],
)
def test_a_line_says_what_is_over(line: bytes, said: Said) -> None:
    assert read_line(line, NOW_NS) == said


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"iteration",
        b"iteration -1",
        b"iteration 1.5",
        b"iteration 99999999999999",
        "iteration ٣".encode(),
        b"iteration 1 2",
        b"iteration 1 rank=x",
        b"iteration 1 rank=1 rank=2",
        b"iteration 1 speed=3",
        b"iteration 1 at=nan",
        b"iteration 1 at=1e400",
        b"iteration 1 at=17",
        b"checkpoint 4.2",
        b"checkpoint 0s",
        b"checkpoint -3s",
        b"checkpoint 999999999999min",
        b"checkpoint soon",
        b"epoch 3",
        b"\xff\xfe\x00",
        b"iteration " + b"1" * 10_007,
    ],
)
def test_a_line_that_is_none_of_ours_says_nothing(line: bytes) -> None:
    assert read_line(line, NOW_NS) is None


def test_a_ranks_own_lines_become_its_markers_at_the_time_of_sending(make: Callable[..., MarkerCollector]) -> None:
    collector = make()
    assert collector.sensors == Sensor.MARKER
    before_ns = time.time_ns()
    send(collector, b"iteration 41")
    after_ns = time.time_ns()
    time.sleep(0.05)  # what passes until the agent looks does not count
    deadline_s = time.monotonic() + DEADLINE_S
    found = Observations()
    while not len(found.markers):
        assert time.monotonic() < deadline_s
        found = collector.collect([a_rank(1), a_rank(os.getpid())])
    assert found.markers.rank.tolist() == [1]
    assert before_ns <= found.markers.time_ns[0] <= after_ns


def test_a_child_of_a_rank_speaks_for_it(make: Callable[..., MarkerCollector]) -> None:
    collector = make()
    program = (
        "import socket, sys\n"
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'checkpoint 4.2s', sys.argv[1])\n"
        "input()\n"
    )
    arguments = [sys.executable, "-c", program, collector._config.socket]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE) as child:
        assert collected(collector, [a_rank(os.getpid())], 1) == [(0, MarkerKind.CHECKPOINT, 0)]
        child.kill()


def test_somebody_else_speaks_for_the_only_rank_of_a_number(make: Callable[..., MarkerCollector]) -> None:
    collector = make()
    ranks = [a_rank(1, rank=3), a_rank(2, rank=7), a_rank(3, rank=7, job="other")]
    send(collector, b"iteration 5 rank=7", b"iteration 6 rank=3")
    assert collected(collector, ranks, 1) == [(0, MarkerKind.ITERATION_END, 6)]
    assert collector.n_unplaced == 0, "the other rank 7 may end, and then it is clear which is meant"
    assert collected(collector, ranks[:2], 1) == [(1, MarkerKind.ITERATION_END, 5)]


def test_what_is_said_before_the_rank_is_known_is_kept(make: Callable[..., MarkerCollector]) -> None:
    collector = make()
    send(collector, b"iteration 11\niteration 12")
    collected(collector, [], 0, until=lambda: bool(collector._held))
    assert collected(collector, [a_rank(os.getpid())], 2) == [(0, 0, 11), (0, 0, 12)]


def test_what_nobody_turns_out_to_have_said_is_counted(
    make: Callable[..., MarkerCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.markers.HELD_NS", 0)
    collector = make()
    send(collector, b"iteration 11")
    collected(collector, [], 0, until=lambda: collector.n_unplaced == 1)
    assert "no rank processes" in collector.limits()[0].why


def test_garbage_is_counted_and_said_and_hurts_nothing(make: Callable[..., MarkerCollector]) -> None:
    collector = make()
    send(collector, b"\xff" * 3001, b"iteration x", b"", b"iteration 1", b"hello\niteration 2")
    ranks = [a_rank(os.getpid())]
    assert collected(collector, ranks, 2) == [(0, 0, 1), (0, 0, 2)]
    assert collector.n_not_understood == 4
    assert collector.limits()[0].what == "4 lines on the marker socket"


def test_the_page_on_markers_shows_what_works(make: Callable[..., MarkerCollector], repository: Path) -> None:
    page = (repository / "docs" / "markers.md").read_text()
    collector = make()
    (python,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (shell,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    path = collector._config.socket
    program = python.replace("/run/failslow/markers.sock", path)
    with subprocess.Popen([sys.executable, "-c", f"{program}\ninput()"], stdin=subprocess.PIPE) as child:
        assert collected(collector, [a_rank(child.pid)], 1) == [(0, MarkerKind.ITERATION_END, 123)]
        child.kill()
    subprocess.run(
        ["sh", "-c", shell.replace("/run/failslow/markers.sock", path)], env=os.environ | {"RANK": "7"}, check=True
    )
    assert collected(collector, [a_rank(1, rank=7)], 1) == [(0, MarkerKind.CHECKPOINT, 0)]


def test_a_repeated_iteration_is_one(make: Callable[..., MarkerCollector]) -> None:
    collector = make()
    send(collector, b"iteration 1", b"iteration 1", b"iteration 2", b"iteration 1")
    assert [i for _, _, i in collected(collector, [a_rank(os.getpid())], 3)] == [1, 2, 1]


def test_a_pause_lasts_from_its_begin_to_its_end(make: Callable[..., MarkerCollector]) -> None:
    collector = make()
    now_s = time.time_ns() // 10**9
    texts = (f"iteration 17\ncheckpoint begin at={now_s - 5}\ncheckpoint end at={now_s - 3}\nevaluation end").encode()
    send(collector, texts)
    deadline_s = time.monotonic() + DEADLINE_S
    found = Observations()
    while not len(found.markers):
        assert time.monotonic() < deadline_s
        found = collector.collect([a_rank(os.getpid())])
    row = found.markers.kind.tolist().index(MarkerKind.CHECKPOINT)
    assert len(found.markers) == 2, "an end without a begin is no pause"
    assert found.markers.duration_ns[row] == 2 * 10**9
    assert found.markers.time_ns[row] == (now_s - 3) * 10**9
    assert found.markers.iteration[row] == 17


def test_a_flood_is_bounded_and_counted_as_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("agents.marker_socket.MESSAGES_MAX", 11)
    listening = MarkerSocket(tmp_path / "markers.sock")
    listening._messages = type(listening._messages)(maxlen=11)
    listening.open()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for number in range(29):
            sender.sendto(b"iteration %d" % number, str(listening.path))
            listening.receive(7)
    assert listening.n_dropped == 18
    assert [message.text for message in listening.take()] == [b"iteration %d" % n for n in range(18, 29)]
    listening.close()


def test_dropped_messages_are_said_and_spoil_no_job(make: Callable[..., MarkerCollector]) -> None:
    collector = make()
    assert collector._socket is not None
    collector._socket.n_dropped = 13  # anybody may send them
    assert collector.collect([]).lost_events == 0
    assert [limit.what for limit in collector.limits()] == ["13 messages on the marker socket"]


def test_a_sender_is_not_kept_waiting_between_two_looks(make: Callable[..., MarkerCollector]) -> None:
    collector = make()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(DEADLINE_S)
        for number in range(97):  # the kernel keeps about ten
            sender.sendto(b"iteration %d" % number, collector._config.socket)
    assert [i for _, _, i in collected(collector, [a_rank(os.getpid())], 97)] == list(range(97))


def test_anybody_may_write_and_nothing_is_left_behind(make: Callable[..., MarkerCollector]) -> None:
    collector = make()
    path = Path(collector._config.socket)
    assert path.stat().st_mode & 0o777 == 0o666
    assert path.parent.stat().st_mode & 0o055 == 0o055
    collector.close()
    assert not path.exists()
    assert collector.sensors == Sensor(0)
    collector.close()


def test_the_socket_of_a_killed_agent_is_replaced(make: Callable[..., MarkerCollector], tmp_path: Path) -> None:
    path = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as killed:
        killed.bind(str(path))
    collector = make(socket=str(path))
    send(collector, b"iteration 3")
    assert collected(collector, [a_rank(os.getpid())], 1) == [(0, 0, 3)]


def test_the_socket_of_a_running_agent_is_left_alone(make: Callable[..., MarkerCollector]) -> None:
    first = make()
    second = MarkerCollector(first._config)
    with pytest.raises(NotAvailable, match="another agent listens there"):
        second.open()
    second.close()
    send(first, b"iteration 3")
    assert collected(first, [a_rank(os.getpid())], 1) == [(0, 0, 3)]


def test_a_file_in_the_way_is_left_alone_and_said(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    collector = MarkerCollector(MarkerConfig(socket=str(path)))
    with pytest.raises(NotAvailable, match="no socket"):
        collector.open()
    assert path.read_text() == "mine"
    assert collector.sensors == Sensor(0)


def test_logs_are_read_where_there_can_be_no_socket(make: Callable[..., MarkerCollector], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    collector = make(socket=str(path), logs=(LogConfig(path=str(tmp_path / "log")),))
    collected(collector, [a_rank(1)], 0, until=lambda: any(log.problem for log in collector._logs.values()))
    append(tmp_path / "log", " iteration 1/ 9 |", " iteration 2/ 9 |")
    assert collected(collector, [a_rank(1)], 2) == [(0, 0, 1), (0, 0, 2)]
    assert collector.limits()[0].what == "the marker socket"


def test_markers_that_are_switched_off_are_not_available() -> None:
    with pytest.raises(NotAvailable, match="switched off"):
        MarkerCollector(MarkerConfig(socket="")).open()


def test_a_log_speaks_for_all_ranks_of_its_job_here(make: Callable[..., MarkerCollector], tmp_path: Path) -> None:
    collector = make(socket="", logs=(LogConfig(path=str(tmp_path / "{job_id}.log")),))
    ranks = [a_rank(1, job="a"), a_rank(2, rank=6, job="b"), a_rank(3, rank=7, job="b")]
    collected(collector, ranks, 0, until=lambda: sum(bool(log.problem) for log in collector._logs.values()) == 2)
    append(tmp_path / "b.log", " iteration 1/ 9 |", " iteration 2/ 9 |")
    rows = collected(collector, ranks, 4)
    assert sorted(rows) == [(1, 0, 1), (1, 0, 2), (2, 0, 1), (2, 0, 2)]
    assert [limit.what for limit in collector.limits()] == [f"iterations in {tmp_path / 'a.log'}"]
    assert len(collector.collect(ranks[:1]).markers) == 0
    assert len(collector._logs) == 1


@pytest.mark.parametrize(
    "text",
    [
        b'logs = [{path = ""}]',
        b"logs = [{path = 'x', pattern = '('}]",
        b"logs = [{path = 'x', pattern = 'a'}]",
        b"sockte = ''",
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(text: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.toml.decode(text, type=MarkerConfig)
