"""Communicators stay known when the agent starts anew, as far as their processes still run."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.collector import ProcessKey
from agents.communicators import Membership, Registry
from agents.nccl_hash import child_hash
from agents.processes import read_key
from tests.agents.communicator_events import A, ended, make_world, split


@pytest.fixture
def process() -> Iterator[ProcessKey]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        key = read_key(child.pid)
        assert key is not None
        yield key
        child.kill()


def test_communicators_are_known_after_a_restart_of_the_agent(process: ProcessKey, tmp_path: Path) -> None:
    before = Registry(tmp_path / "state" / "communicators.json")
    world = make_world(before, [process, A], size=2)
    split(before, process, 0x2000, nth=0, color=0)
    split(before, A, 0x2000, nth=0, color=0)
    before.save()
    after = Registry(tmp_path / "state" / "communicators.json")
    assert after.find(process, 0x1000) == Membership(world, 0, 2, is_counted_from_creation=False, generation=0)
    assert after.find(process, 0x2000) == Membership(
        child_hash(world, 1, 0), 0, 2, is_counted_from_creation=False, generation=0
    )
    assert after.find(A, 0x1000) is None, "this process does not run"
    assert after.is_restored(process)
    known = after.world(process, 2)
    assert known is not None
    assert known.comm == world
    split(after, process, 0x3000, nth=0, color=0)
    assert after.find(process, 0x3000) is None, "splits may have been missed in the meantime"


def test_a_process_of_the_same_number_with_another_start_is_not_restored(process: ProcessKey, tmp_path: Path) -> None:
    other = ProcessKey(process.pid, process.start_ticks + 1)
    before = Registry(tmp_path / "state")
    make_world(before, [other])
    before.save()
    after = Registry(tmp_path / "state")
    assert after.find(other, 0x1000) is None
    assert after.find(process, 0x1000) is None


def test_the_state_of_another_boot_is_left_out(
    process: ProcessKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Registry(tmp_path / "state")
    make_world(before, [process])
    before.save()
    monkeypatch.setattr("agents.communicator_state._boot", lambda: "another")
    assert Registry(tmp_path / "state").find(process, 0x1000) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_003,
        b'{"version": 2}',
        b'{"version": 1, "boot": 3, "processes": []}',
        b'{"version": 1, "boot": "x", "processes": [{"pid": "a"}]}',
    ],
)
def test_a_damaged_state_file_is_said_and_written_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state"
    path.write_bytes(content)
    registry = Registry(path)
    assert str(path) in registry.limits()[0].why
    make_world(registry, [A])
    registry.save()
    assert not Registry(path).limits()


def test_numbers_that_are_none_of_a_communicator_are_left_out(process: ProcessKey, tmp_path: Path) -> None:
    path = tmp_path / "state"
    before = Registry(path)
    make_world(before, [process])
    before.save()
    path.write_bytes(path.read_bytes().replace(b"[4096,0,", b"[-4096,0,"))
    assert Registry(path).memberships(process) == []


def test_a_state_file_that_cannot_be_written_is_said_and_tried_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    registry = Registry(tmp_path / "file" / "state")
    make_world(registry, [A])
    registry.save()
    registry.save()
    assert [limit.what for limit in registry.limits()] == ["communicators after a restart of the agent"]
    (tmp_path / "file").unlink()
    registry.save()
    assert registry.limits() == []
    assert (tmp_path / "file" / "state").exists()


def test_the_state_file_is_for_the_agent_alone_and_nothing_else_is_left_beside_it(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "state")
    make_world(registry, [A])
    registry.save()
    assert stat.S_IMODE(os.stat(tmp_path / "state").st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_nothing_is_written_while_nothing_changes(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "state")
    make_world(registry, [A])
    registry.save()
    (tmp_path / "state").unlink()
    registry.find(A, 0x1000)
    registry.note_call(A)
    registry.save()
    assert not (tmp_path / "state").exists()
    registry.note(A, ended(A, 0x1000))
    registry.save()
    assert (tmp_path / "state").exists()


def test_processes_that_ended_without_anybody_saying_so_are_let_go_of(
    process: ProcessKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.communicators.PROCESSES_MAX", 3)
    registry = Registry()
    ended_ones = [ProcessKey(process.pid, process.start_ticks + n) for n in range(1, 4)]
    make_world(registry, [*ended_ones[:2], process, ended_ones[2]])
    assert registry.find(process, 0x1000) is not None
    assert [registry.calls_nccl(key) for key in ended_ones] == [False, False, True]
