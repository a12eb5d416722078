"""Which of the candidates are the ranks where calls cannot be observed, by who descends from whom."""

import random
from collections.abc import Iterator

import pytest

from agents import rank_candidates
from agents.collector import ProcessKey
from agents.ebpf.libraries import Identity, Library
from agents.processes import Candidate
from agents.rank_candidates import Family, Known, ranks_by_default
from agents.rank_variables import Claim

NCCL = Library("/usr/lib/libnccl.so.2", Identity(1, 1, 1, None), "nccl")
SINCE_NS = 1000


def known(pid: int, parent: int, rank: int | None, *, able: bool = True, seen_ns: int = 0) -> Known:
    candidate = Candidate(
        key=ProcessKey(pid, 1),
        parent=parent,
        start_ns=0,
        namespace_pid=pid,
        environment={},
        libraries=(NCCL,) if able else (),
    )
    return Known(candidate, Claim(rank=rank, world_size=7), f"rank {rank}", seen_ns)


def a_family(*members: Known) -> Family:
    return {member.candidate.key.pid: member for member in members}


def ranks(family: Family) -> list[int]:
    return [found.candidate.key.pid for found in ranks_by_default(family, SINCE_NS)]


def test_of_a_rank_and_its_helpers_the_uppermost_is_the_rank_and_of_a_launcher_its_children() -> None:
    launcher, first, second = known(10, 1, 0), known(11, 10, 1), known(12, 10, 2)
    helpers = [known(21, 11, 1), known(22, 21, 1), known(23, 12, 2)]
    assert ranks(a_family(launcher, first, second, *helpers)) == [11, 12]
    assert ranks(a_family(known(10, 1, 0), known(11, 10, 0))) == [10]
    assert ranks(a_family(known(10, 1, 0, able=False), known(11, 10, 0))) == [11]
    assert ranks(a_family(known(10, 1, 0, seen_ns=SINCE_NS + 1), known(11, 10, 0))) == []
    assert ranks(a_family(known(10, 1, None), known(11, 10, 3))) == [11]


def by_pairs(family: Family) -> list[int]:
    """Ask of each pair of processes who is above whom."""

    def above(pid: int) -> set[int]:
        found: set[int] = set()
        while (pid := family[pid].candidate.parent) in family:
            found.add(pid)
        return {p for p in found if family[p].candidate.maps_nccl}

    able = [pid for pid, member in family.items() if member.candidate.maps_nccl]
    return [
        pid
        for pid in able
        if family[pid].claim.rank is not None
        and family[pid].first_seen_ns <= SINCE_NS
        and all(family[p].claim.rank != family[pid].claim.rank for p in above(pid))
        and all(family[p].claim.rank == family[pid].claim.rank for p in able if pid in above(p))
    ]


@pytest.mark.parametrize("seed", range(101))
def test_the_answer_is_that_of_looking_at_each_pair(seed: int) -> None:
    draw = random.Random(seed)
    members = [
        known(
            pid,
            draw.choice([1, *range(max(100, pid - 5), pid)]),
            draw.choice([None, *range(draw.choice([1, 3]))]),
            able=draw.random() < 0.8,
            seen_ns=draw.choice([0, 0, SINCE_NS, SINCE_NS + 1]),
        )
        for pid in range(100, 100 + draw.randrange(31))
    ]
    draw.shuffle(members)
    family = a_family(*members)
    assert ranks(family) == by_pairs(family)


def test_each_process_is_asked_once_for_those_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = rank_candidates._ancestors

    def counted(pid: int, family: Family) -> Iterator[int]:
        asked.append(pid)
        return real(pid, family)

    monkeypatch.setattr(rank_candidates, "_ancestors", counted)
    family = a_family(*(known(10 + n, 1 if n % 31 == 0 else 10 + n - n % 31, n // 31) for n in range(31 * 31)))
    assert len(ranks(family)) == 31
    assert sorted(asked) == sorted(family)
