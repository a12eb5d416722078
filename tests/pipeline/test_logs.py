"""A worker's log: JSON where nobody looks, and no floods from client libraries."""

import logging
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pipeline.logs import REPEAT_S, Repeats


def record(name: str, message: str, line: int = 5) -> logging.LogRecord:
    return logging.LogRecord(name, logging.ERROR, "client.py", line, message, (), None)


def test_a_clients_line_is_said_once_and_then_with_the_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    repeats = Repeats()
    said = [repeats.filter(record("aiokafka.conn", f"node {number} is away")) for number in range(61)]
    assert said == [True] + [False] * 60
    assert repeats.filter(record("aiokafka.conn", "something else", line=6))
    now_s += REPEAT_S
    again = record("aiokafka.conn", "node 0 is away")
    assert repeats.filter(again)
    assert again.getMessage() == "node 0 is away (and 60 times before)"


def test_our_own_lines_are_never_held_back() -> None:
    repeats = Repeats()
    assert all(repeats.filter(record("pipeline.lanes", "an alert")) for _ in range(5))


def test_the_log_is_json_where_standard_error_is_no_terminal(repository: Path) -> None:
    program = """
import logging
from pipeline.logs import configure
from pipeline.settings import LogLevel
configure(LogLevel.INFO)
logging.getLogger("pipeline.x").info("%s is %d", "ü", 7)
logging.getLogger("pipeline.x").debug("not this")
logging.getLogger("aiokafka").info("nor this")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("pipeline.y").exception("why")
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=repository, capture_output=True, check=True)
    lines = [msgspec.json.decode(line) for line in ended.stderr.splitlines()]
    assert [(line["level"], line["logger"], line["message"]) for line in lines] == [
        ("info", "pipeline.x", "ü is 7"),
        ("error", "pipeline.y", "why"),
    ]
    assert "ZeroDivisionError" in lines[1]["error"]
