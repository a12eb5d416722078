"""Pointers become communicators that all members call alike."""

import pytest

from agents.communicators import Membership, Registry
from agents.nccl_hash import child_hash, grown_hash, grown_magic, old_child_hash, old_unique_id_hash
from tests.agents.communicator_events import A, B, C, an_id, created, ended, found, make_world, split


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


def test_a_grown_communicator_counts_for_the_children_that_follow() -> None:
    registry = Registry()
    world = make_world(registry, [A])
    registry.note(A, created(A, 0x2000, function="ncclCommGrow", parent=0x1000, n_ranks=5, rank=-1))
    split(registry, A, 0x3000, nth=0, color=0)
    assert found(registry, A, 0x3000).comm == child_hash(world, 2, 0)


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


def test_a_process_that_has_ended_leaves_nothing() -> None:
    registry = Registry()
    make_world(registry, [A, B])
    split(registry, A, 0x2000, nth=0, color=0)
    split(registry, B, 0x2000, nth=0, color=0)
    registry.forget(A)
    registry.forget(B)
    assert registry._splits == {}
    assert registry._processes == {}


def test_communicators_beyond_the_bound_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.communicators.COMMUNICATORS_MAX", 5)
    registry = Registry()
    for place in range(7):
        registry.note(A, created(A, 0x1000 + place, unique_id=an_id(place), rank=0, n_ranks=1))
    assert registry.n_dropped == 2
    assert len(registry.memberships(A)) == 5
    assert registry.find(A, 0x1000) is None
    assert registry.find(A, 0x1006) is not None
