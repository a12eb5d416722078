"""Pointers become communicators that all members call alike, and stay so when the agent starts anew."""

import itertools
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.collector import ProcessKey
from agents.communicators import Membership, Registry
from agents.ebpf.records import CommCreated, CommEnded
from agents.nccl_hash import child_hash, grown_hash, grown_magic, old_child_hash, old_unique_id_hash, unique_id_hash
from agents.processes import read_key

A, B, C = (ProcessKey(1009, 7), ProcessKey(1013, 11), ProcessKey(1019, 13))
TIMES = itertools.count(1)


def an_id(seed: int) -> bytes:
    return bytes((place * seed + 5) % 256 for place in range(128))


def created(process: ProcessKey, comm: int, /, **fields: Any) -> CommCreated:
    values: dict[str, Any] = dict.fromkeys(
        ("parent", "unique_id", "n_ranks", "rank", "color", "key", "name", "nth_child")
    )
    values |= {"function": "ncclCommInitRank", "result": 0, "time_ns": next(TIMES)} | fields
    return CommCreated(tgid=process.pid, tid=process.pid, comm=comm, **values)


def ended(key: ProcessKey, comm: int) -> CommEnded:
    return CommEnded(tgid=key.pid, time_ns=next(TIMES), comm=comm, function="ncclCommDestroy")


def make_world(registry: Registry, keys: list[ProcessKey], *, seed: int = 3, size: int | None = None) -> int:
    for rank, key in enumerate(keys):
        registry.note(key, created(key, 0x1000, unique_id=an_id(seed), rank=rank, n_ranks=size or len(keys)))
    return unique_id_hash(an_id(seed))


def split(registry: Registry, key: ProcessKey, comm: int, *, nth: int, color: int, place: int = 0) -> None:
    registry.note(
        key,
        created(key, comm, function="ncclCommSplit", parent=0x1000, color=color, key=place, nth_child=nth),
    )


def found(registry: Registry, key: ProcessKey, pointer: int) -> Membership:
    membership = registry.find(key, pointer)
    assert membership is not None
    return membership


def test_a_communicator_is_known_by_its_hash_with_rank_and_size() -> None:
    registry = Registry()
    world = make_world(registry, [A, B])
    assert registry.find(B, 0x1000) == Membership(world, 1, 2, is_counted_from_creation=True, generation=0)
    assert registry.find(B, 0x2000) is None
    assert registry.find(C, 0x1000) is None


def test_a_pointer_that_is_used_again_is_another_generation() -> None:
    registry = Registry()
    first = make_world(registry, [A])
    registry.note(A, ended(A, 0x1000))
    assert registry.find(A, 0x1000) is None
    second = make_world(registry, [A], seed=7)
    assert second != first
    assert found(registry, A, 0x1000).comm == second
    assert found(registry, A, 0x1000).generation == 1


def test_a_pointer_that_is_used_again_without_a_destruction_seen_is_another_generation() -> None:
    registry = Registry()
    make_world(registry, [A])
    make_world(registry, [A], seed=7)
    assert found(registry, A, 0x1000).generation == 1
    assert len(registry.memberships(A)) == 1


def test_members_of_a_split_are_ordered_by_key_and_then_by_their_rank_in_the_parent() -> None:
    registry = Registry()
    world = make_world(registry, [A, B, C])
    split(registry, A, 0x2000, nth=0, color=5, place=9)
    split(registry, B, 0x2000, nth=0, color=5, place=4)
    assert found(registry, A, 0x2000).size is None, "one member has not called yet"
    split(registry, C, 0x2000, nth=0, color=5, place=9)
    comm = child_hash(world, 1, 5)
    assert [found(registry, k, 0x2000).comm_rank for k in (A, B, C)] == [1, 0, 2]
    assert {found(registry, k, 0x2000).size for k in (A, B, C)} == {3}
    assert {found(registry, k, 0x2000).comm for k in (A, B, C)} == {comm}


def test_a_split_with_members_on_other_nodes_has_no_size_and_no_rank() -> None:
    registry = Registry()
    world = make_world(registry, [A, B], size=5)
    split(registry, A, 0x2000, nth=0, color=0)
    split(registry, B, 0x2000, nth=0, color=0)
    membership = found(registry, A, 0x2000)
    assert (membership.comm, membership.comm_rank, membership.size) == (child_hash(world, 1, 0), None, None)


def test_a_member_without_color_gets_no_communicator_and_counts_for_the_parent() -> None:
    registry = Registry()
    world = make_world(registry, [A, B])
    split(registry, A, 0x2000, nth=0, color=2)
    split(registry, B, 0, nth=0, color=-1)
    split(registry, A, 0x3000, nth=1, color=2)
    split(registry, B, 0x3000, nth=1, color=2)
    assert found(registry, A, 0x2000).size == 1
    assert found(registry, A, 0x3000).comm == found(registry, B, 0x3000).comm == child_hash(world, 2, 2)
    assert [m.comm for m in registry.memberships(B)] == [world, child_hash(world, 2, 2)]


def test_a_child_that_is_told_late_keeps_its_place_among_the_children() -> None:
    registry = Registry()
    world = make_world(registry, [A])
    split(registry, A, 0x3000, nth=1, color=0)
    split(registry, A, 0x2000, nth=0, color=0)
    assert found(registry, A, 0x2000).comm == child_hash(world, 1, 0)
    assert found(registry, A, 0x3000).comm == child_hash(world, 2, 0)


def test_children_are_counted_here_where_the_tracer_does_not() -> None:
    registry = Registry()
    world = make_world(registry, [A])
    for count, pointer in ((1, 0x2000), (2, 0x3000)):
        event = created(A, pointer, function="ncclCommSplit", parent=0x1000, color=0, key=0)
        registry.note(A, event)
        assert found(registry, A, pointer).comm == child_hash(world, count, 0)


def test_a_grandchild_knows_its_size_once_all_of_its_ancestors_do() -> None:
    registry = Registry()
    world = make_world(registry, [A, B, C])
    for key, color in ((A, 0), (B, 0), (C, 1)):
        split(registry, key, 0x2000, nth=0, color=color)
    for key in (A, B):
        event = created(key, 0x3000, function="ncclCommSplit", parent=0x2000, color=3, key=-key.pid, nth_child=0)
        registry.note(key, event)
    assert found(registry, A, 0x3000) == Membership(
        child_hash(child_hash(world, 1, 0), 1, 3), 1, 2, is_counted_from_creation=True, generation=0
    )
    assert found(registry, B, 0x3000).comm_rank == 0


def test_a_shrunk_communicator_has_a_name_and_does_not_count_as_a_split() -> None:
    registry = Registry()
    world = make_world(registry, [A])
    shrink = created(A, 0x2000, function="ncclCommShrink", parent=0x1000, nth_child=0)
    registry.note(A, shrink)
    split(registry, A, 0x3000, nth=1, color=0)
    assert found(registry, A, 0x2000).comm == child_hash(world, 0, 0)
    assert found(registry, A, 0x3000).comm == child_hash(world, 1, 0)


def test_what_is_made_of_a_nameless_communicator_is_nameless() -> None:
    registry = Registry()
    registry.note(A, created(A, 0x1000, function="ncclCommInitAll"))
    shrink = created(A, 0x2000, function="ncclCommShrink", parent=0x1000, nth_child=0)
    grow = created(A, 0x3000, function="ncclCommGrow", parent=0x1000, n_ranks=5, rank=-1)
    for event in (shrink, grow):
        registry.note(A, event)
    split(registry, A, 0x4000, nth=1, color=0)
    assert registry.memberships(A) == []
    assert all(registry.saw(A, pointer) for pointer in (0x1000, 0x2000, 0x3000, 0x4000))
    assert registry.world(A) is None


def test_old_and_new_members_of_a_grown_communicator_agree() -> None:
    registry = Registry()
    make_world(registry, [A], size=2)
    magic = grown_magic(int.from_bytes(an_id(3)[:8], "little"), 1)
    grown_id = magic.to_bytes(8, "little") + bytes(120)
    registry.note(A, created(A, 0x2000, function="ncclCommGrow", parent=0x1000, n_ranks=5, rank=-1))
    registry.note(B, created(B, 0x2000, function="ncclCommGrow", unique_id=grown_id, n_ranks=5, rank=4))
    assert found(registry, A, 0x2000).comm == found(registry, B, 0x2000).comm == grown_hash(magic, 5)
    assert (found(registry, A, 0x2000).comm_rank, found(registry, B, 0x2000).comm_rank) == (0, 4)


def test_a_failed_creation_makes_nothing_and_leaves_later_children_nameless() -> None:
    registry = Registry()
    make_world(registry, [A])
    refused = created(A, 0x2000, function="ncclCommSplit", parent=0x1000, color=0, key=0, nth_child=0, result=4)
    registry.note(A, refused)
    assert registry.find(A, 0x2000) is None
    split(registry, A, 0x3000, nth=1, color=0)
    assert registry.find(A, 0x3000) is None
    assert [limit.what for limit in registry.limits()] == ["1 communicators without a name"]


def test_a_communicator_in_progress_is_one() -> None:
    registry = Registry()
    registry.note(A, created(A, 0x1000, unique_id=an_id(3), rank=0, n_ranks=2, result=7))
    assert registry.find(A, 0x1000) is not None


def test_children_are_nameless_once_creations_may_have_been_lost() -> None:
    registry = Registry()
    make_world(registry, [A])
    registry.doubt()
    split(registry, A, 0x2000, nth=0, color=0)
    assert registry.find(A, 0x2000) is None
    world = make_world(registry, [B], seed=7)
    split(registry, B, 0x2000, nth=0, color=0)
    assert found(registry, B, 0x2000).comm == child_hash(world, 1, 0)


def test_a_child_of_an_unknown_parent_is_nameless() -> None:
    registry = Registry()
    split(registry, A, 0x2000, nth=0, color=0)
    assert registry.find(A, 0x2000) is None
    assert registry.calls_nccl(A)


def test_an_old_library_has_old_names() -> None:
    registry = Registry()
    registry.use_old_hashes(A)
    make_world(registry, [A])
    split(registry, A, 0x2000, nth=0, color=3)
    assert found(registry, A, 0x1000).comm == old_unique_id_hash(an_id(3))
    assert found(registry, A, 0x2000).comm == old_child_hash(old_unique_id_hash(an_id(3)), 3)


def test_the_world_is_the_first_communicator_of_the_worlds_size_even_when_it_has_ended() -> None:
    registry = Registry()
    registry.note(A, created(A, 0x5000, unique_id=an_id(17), rank=0, n_ranks=2))
    assert registry.world(A, 3) is None
    world = make_world(registry, [A], size=3)
    registry.note(A, ended(A, 0x1000))
    make_world(registry, [A], seed=11, size=3)
    for known in (registry.world(A, 3), registry.world(A)):
        assert known is not None
        assert (known.comm, known.size) == (world, 3)


def test_a_process_with_communicators_nobody_saw_made_has_the_world_that_others_tell_if_there_is_one() -> None:
    registry = Registry()
    registry.note_call(A, is_stranger=True)
    make_world(registry, [A], size=3)
    assert registry.world(A, 3) is None, "the first of this size may have been made before"
    registry.tell(A, Membership(23, 1, 3, is_counted_from_creation=False, generation=0))
    registry.tell(A, Membership(29, 1, 2, is_counted_from_creation=False, generation=0))
    told = registry.world(A, 3)
    assert told is not None
    assert told.comm == 23
    registry.tell(A, Membership(31, 0, 3, is_counted_from_creation=False, generation=0))
    assert registry.world(A, 3) is None


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


def test_a_process_that_has_ended_leaves_nothing(tmp_path: Path) -> None:
    registry = Registry()
    make_world(registry, [A, B])
    split(registry, A, 0x2000, nth=0, color=0)
    split(registry, B, 0x2000, nth=0, color=0)
    registry.forget(A)
    registry.forget(B)
    assert registry._splits == {}
    assert registry._processes == {}


def test_processes_that_ended_without_anybody_saying_so_are_let_go_of(
    process: ProcessKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.communicators.PROCESSES_MAX", 3)
    registry = Registry()
    ended_ones = [ProcessKey(process.pid, process.start_ticks + n) for n in range(1, 4)]
    make_world(registry, [*ended_ones[:2], process, ended_ones[2]])
    assert registry.find(process, 0x1000) is not None
    assert [registry.calls_nccl(key) for key in ended_ones] == [False, False, True]


def test_communicators_beyond_the_bound_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.communicators.COMMUNICATORS_MAX", 5)
    registry = Registry()
    for place in range(7):
        registry.note(A, created(A, 0x1000 + place, unique_id=an_id(place), rank=0, n_ranks=1))
    assert registry.n_dropped == 2
    assert len(registry.memberships(A)) == 5
    assert registry.find(A, 0x1000) is None
    assert registry.find(A, 0x1006) is not None
