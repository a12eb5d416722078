"""What a worker leaves behind when it ends, and what the supervisor makes of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from pipeline.poison import ENDS_MAX, Hand, Ledger, held, place
from pipeline.record import Record

RECORD = Record("failslow.events", 5, 2**40 + 7, 1_796_000_000_123_000_000, b"k", b"v")


def test_what_is_held_is_found_by_another_process_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "hand"
    assert held(path) is None
    with Hand(path) as hand:
        assert held(path) is None
        hand.hold(RECORD)
        assert held(path) == place(RECORD)
        hand.release()
        assert held(path) is None
        hand.hold(RECORD)
    assert held(path) == place(RECORD)


def test_what_is_held_outlives_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "hand"
    program = f"""
import os, signal
from pathlib import Path
from pipeline.poison import Hand
from pipeline.record import Record
Hand(Path({str(path)!r})).hold(Record("failslow.events", 5, {RECORD.offset}, {RECORD.time_ns}, b"", b""))
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert ended.returncode == -signal.SIGKILL
    assert held(path) == place(RECORD)


def test_a_new_worker_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "hand"
    Hand(path).hold(RECORD)
    Hand(path)
    assert held(path) is None


def test_a_file_of_another_size_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "hand"
    path.write_bytes(b"\1")
    assert held(path) is None


def test_a_record_is_poison_once_it_has_ended_enough_workers(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    for ends in range(1, ENDS_MAX + 1):
        assert not Ledger(path).is_poison(RECORD)
        assert Ledger(path).count(place(RECORD)) == ends
    assert Ledger(path).is_poison(RECORD)


def test_the_same_offset_of_another_topic_life_is_not_blamed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json")
    for _ in range(ENDS_MAX):
        ledger.count(place(RECORD))
    other = Record(RECORD.topic, RECORD.partition, RECORD.offset, RECORD.time_ns + 1_000_000, b"k", b"v")
    assert ledger.is_poison(RECORD)
    assert not ledger.is_poison(other)


def test_a_ledger_that_cannot_be_read_is_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    path.write_text("{half")
    assert not Ledger(path).is_poison(RECORD)
    assert Ledger(path).count(place(RECORD)) == 1


def test_a_ledger_forgets_the_oldest_beyond_its_bound(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json")
    ledger._ends = {place(Record("t", 0, offset, 0, b"", b"")): 1 for offset in range(4096)}
    ledger.count(place(RECORD))
    assert len(ledger._ends) == 4096
    assert place(Record("t", 0, 0, 0, b"", b"")) not in ledger._ends
