"""A log with a line for every iteration tells when each ended; any other tells nothing."""

import re
from pathlib import Path

import pytest

from agents.marker_log import LogFollower
from agents.markers import LogConfig

NOW_NS = 1_764_504_000_000_000_000

MEGATRON_LINE = (
    " [2026-11-30 12:00:{:09.6f}] iteration {:8d}/{:8d} | consumed samples: {:12d} | elapsed time per iteration (ms): "
    "2131.7 | learning rate: 1.5E-04 | global batch size:   512 | lm loss: 2.1E+00 |"
)


def follow(path: Path) -> LogFollower:
    follower = LogFollower(str(path), re.compile(LogConfig(path=str(path)).pattern))
    follower.look(NOW_NS)
    return follower


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(line + "\n" for line in lines)


def test_a_megatron_log_of_every_iteration_tells_their_ends(tmp_path: Path) -> None:
    follower = follow(tmp_path / "log")
    arrival_ns = 1_796_040_000_000_000_000 + 7 * 3_600_000_000_000  # its zone is seven hours off
    lines = [MEGATRON_LINE.format(n * 2.25, n, 500, n * 512) for n in range(3, 8)]
    append(tmp_path / "log", lines[0], "something else", "7: " + lines[1].strip(), *lines[2:])
    follower.look(arrival_ns + 20 * 10**9)
    ends = follower.take()
    assert [number for number, _ in ends] == [3, 4, 5, 6, 7]
    assert [time_ns - arrival_ns for _, time_ns in ends] == [n * 2_250_000_000 for n in range(3, 8)]
    assert follower.interval == 1


def test_a_line_without_a_time_counts_at_its_arrival(tmp_path: Path) -> None:
    follower = follow(tmp_path / "log")
    for number in range(3, 6):
        append(tmp_path / "log", f" iteration {number:8d}/     500 | consumed samples: 1 |")
        follower.look(NOW_NS + number)
    assert follower.take() == [(3, NOW_NS + 3), (4, NOW_NS + 4), (5, NOW_NS + 5)]


@pytest.mark.parametrize("interval", [2, 10])
def test_a_log_with_an_interval_ends_no_iteration(tmp_path: Path, interval: int) -> None:
    follower = follow(tmp_path / "log")
    append(tmp_path / "log", *(f" iteration {n}/ 500 |" for n in range(interval, 13 * interval, interval)))
    follower.look(NOW_NS)
    assert follower.take() == []
    assert follower.interval == interval


def test_a_job_that_goes_on_from_a_checkpoint_counts_anew(tmp_path: Path) -> None:
    follower = follow(tmp_path / "log")
    append(tmp_path / "log", *(f" iteration {n}/ 500 |" for n in (5, 6, 7, 3, 4, 9, 10)))
    follower.look(NOW_NS)
    assert [number for number, _ in follower.take()] == [5, 6, 7, 3, 4, 9, 10]


def test_what_a_log_had_before_anybody_looked_is_not_reported(tmp_path: Path) -> None:
    append(tmp_path / "log", " iteration 1/ 9 |", " iteration 2/ 9 |")
    follower = follow(tmp_path / "log")
    append(tmp_path / "log", " iteration 3/ 9 |", " iteration 4/ 9 |")
    follower.look(NOW_NS)
    assert [number for number, _ in follower.take()] == [3, 4]


def test_a_log_is_followed_over_rotation_truncation_and_cut_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    follower = follow(path)
    append(path, " iteration 1/ 9 |", " iteration 2/ 9 |")
    follower.look(NOW_NS)
    append(path, " iteration 3/ 9 |")
    path.rename(tmp_path / "log.1")
    append(path, " iteration 4/ 9 |")
    follower.look(NOW_NS)
    path.write_text("")
    follower.look(NOW_NS)
    append(path, " iteration 5/ 9 |")
    with path.open("a") as file:
        file.write(" itera")
    follower.look(NOW_NS)
    with path.open("a") as file:
        file.write("tion 6/ 9 |\n")
    follower.look(NOW_NS)
    assert [number for number, _ in follower.take()] == [1, 2, 3, 4, 5, 6]
    follower.close()


def test_more_than_can_be_read_is_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.marker_log.READ_BYTES_MAX", 997)
    follower = follow(tmp_path / "log")
    append(tmp_path / "log", "x" * 3001, *(f" iteration {n}/ 9 |" for n in range(1, 4)))
    follower.look(NOW_NS)
    assert [number for number, _ in follower.take()] == [1, 2, 3]
    assert follower.n_dropped_bytes == 3002 + 3 * 18 - 997
