"""Ranks among the candidates, by who descends from whom.

Launchers, wrappers and helpers of a rank have its variables, and many map NCCL: a data loader's worker was forked from
the rank, or imports the same framework; torchrun's agent under srun has a rank of srun's; a program that spawns its
ranks hands its own variables to all of them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from agents.collector import Limit, RankProcess
from agents.processes import Candidate
from agents.rank_variables import Claim


@dataclass(slots=True)
class Known:
    """What is known of one candidate."""

    candidate: Candidate
    claim: Claim
    saying: str  # digest of its environment
    first_seen_ns: int
    maps_nccl: bool = False
    is_old: bool = False  # may have made communicators before the agent looked
    called_ns: int | None = None  # when it was first seen to call NCCL
    largest: int = 0  # members of its largest communicator so far
    grew_ns: int = 0
    rank: RankProcess | None = None
    is_guessed: bool = False
    contradictions: dict[str, Limit] = field(default_factory=dict)  # that it was named in spite of


Family = Mapping[int, Known]  # by pid


def shared_sayings(family: Family) -> set[str]:
    """Return what several processes say of themselves that may all be ranks: it was said to their common parent.

    Ancestors and descendants of a process that calls NCCL are its launchers and helpers.
    """
    callers = {pid for pid, known in family.items() if known.called_ns is not None}
    related = {pid for caller in callers for pid in _ancestors(caller, family)}
    related |= {pid for pid in family if not callers.isdisjoint(_ancestors(pid, family))}
    n_saying = Counter(
        known.saying
        for pid, known in family.items()
        if known.claim.is_complete and (pid in callers or (known.candidate.maps_nccl and pid not in related))
    )
    return {saying for saying, n in n_saying.items() if n > 1}


def ranks_by_default(family: Family, known_since_ns: int) -> list[Known]:
    """Return the ranks where calls cannot be observed: of those with a claim, the uppermost that could call.

    A process is no launcher if none of its descendants that could call NCCL claims anything else. known_since_ns: a
    process has to have been there by then, for its descendants to be there as well.
    """
    able = {pid: k for pid, k in family.items() if k.candidate.maps_nccl}
    under_alike: set[int] = set()  # those with one above that claims the same
    over_other: set[int] = set()  # those with one below that claims something else
    for pid, known in able.items():
        for above in _ancestors(pid, family):
            if above not in able:
                continue
            if _claims_alike(able[above], known):
                under_alike.add(pid)
            else:
                over_other.add(above)
    excluded = under_alike | over_other
    return [
        known
        for pid, known in able.items()
        if known.claim.is_complete and known.first_seen_ns <= known_since_ns and pid not in excluded
    ]


def _claims_alike(one: Known, other: Known) -> bool:
    return (one.claim.rank, one.claim.world_size) == (other.claim.rank, other.claim.world_size)


def _ancestors(pid: int, family: Family) -> Iterator[int]:
    """Yield the candidates above one, the nearest first; a chain of candidates is followed to its first gap."""
    for _ in range(len(family)):
        if pid not in family:
            return
        pid = family[pid].candidate.parent
        if pid in family:
            yield pid


def pids_of(known: Iterable[Known]) -> str:
    """Return some process numbers, for people."""
    numbers = sorted(k.candidate.key.pid for k in known)
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
