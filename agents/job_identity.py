"""Which processes are ranks, and of which job: the same answer on every node, without configuration.

A process is a rank if it calls NCCL; its wrappers, launchers and data loaders have the same variables, and some of them
map NCCL as well, but do not call it. The environment says which rank of which job (rank_variables.py). What tells one
start of a job from the next is, where no launcher does, the hash of the world communicator: all members have it alike,
whenever they started and whoever restarted them. Until it is known a process has no identity yet, and whoever holds its
events waits; after a bound the identity is guessed from what nodes have in common, and that is said.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from agents.collector import Limit, ProcessKey, RankProcess
from agents.communicators import Membership, Registry
from agents.ebpf.libraries import Identity, Library
from agents.nccl_hash import NEW_HASH_SINCE, library_version
from agents.processes import TICK_NS, Candidate
from agents.rank_candidates import Known, pids_of, ranks_by_default, shared_sayings
from agents.rank_gpu import Gpu, GpusByPid, find_gpu
from agents.rank_variables import (
    NAMES,
    SLURM,
    SPELLINGS,
    Claim,
    Spelling,
    digest,
    expand,
    guessed_launch_name,
    job_name,
    launch_name,
    read_claim,
    template_names,
)

PROMPT_NS = 1_500_000_000  # from mapping a library to the first communicator it takes longer than that


class IdentityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which processes are observed, and what they are called; every field may be left out."""

    select: dict[str, str] = {}  # only processes in whose environment each NAME has its value
    job_id: str = ""  # such as "{SLURM_CLUSTER_NAME}-{SLURM_JOB_ID}", of variables that all nodes have alike
    rank: str = ""  # the variables to read instead of the launchers'
    world_size: str = ""
    local_rank: str = ""
    wait_s: float = 60.0  # for the world communicator, from the first call to NCCL on
    settle_s: float = 5.0  # without a larger communicator, until the largest is taken for the world's

    def __post_init__(self) -> None:
        if bool(self.rank) != bool(self.world_size):
            raise ValueError("rank and world_size go together: name a variable for each, or for neither")
        for name in ("wait_s", "settle_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be 0 or more: {getattr(self, name)}")
        try:
            template_names(self.job_id)
        except ValueError as error:
            raise ValueError(f"job_id is no template: {error}") from error

    @property
    def names(self) -> frozenset[str]:
        """The environment variables that are needed of a process."""
        own = {self.rank, self.world_size, self.local_rank} - {""}
        return NAMES | own | self.select.keys() | template_names(self.job_id)

    @property
    def settle_ns(self) -> int:
        """settle_s in nanoseconds."""
        return round(self.settle_s * 1e9)

    @property
    def wait_ns(self) -> int:
        """wait_s in nanoseconds."""
        return round(self.wait_s * 1e9)

    @property
    def spellings(self) -> tuple[Spelling, ...]:
        """How ranks are spelled."""
        if not self.rank:
            return SPELLINGS
        local = (self.local_rank,) if self.local_rank else ()
        return (Spelling("configured", (self.rank,), (self.world_size,), local), *SPELLINGS)


@dataclass(slots=True)
class Discovery:
    """Rank processes from look to look. node: this node's name."""

    config: IdentityConfig
    registry: Registry
    node: str
    gpus: Sequence[Gpu] = ()  # all of the node
    observes_calls: bool = True  # otherwise the environment alone makes a rank
    _known: dict[ProcessKey, Known] = field(default_factory=dict)
    _observed: dict[Identity, int] = field(default_factory=dict)  # since when each library is
    _versions: dict[Identity, tuple[int, int, int] | None] = field(default_factory=dict)
    _disagreements: dict[str, Limit] = field(default_factory=dict)

    def update(self, candidates: Sequence[Candidate], gpus_by_pid: GpusByPid, now_ns: int) -> list[RankProcess]:
        """Return the rank processes that run now, by job and rank. now_ns: by the monotonic clock."""
        self._disagreements = {}
        running = {c.key: c for c in candidates if self.is_selected(c)}
        self._known = {key: known for key, known in self._known.items() if key in running}
        for key, candidate in running.items():
            known = self._known.get(key)
            if known is None or (known.rank is None and known.candidate.environment != candidate.environment):
                claim = read_claim(candidate.environment, self.config.spellings)
                saying = digest(*(f"{name}={value}" for name, value in sorted(candidate.environment.items())))
                known = self._known[key] = Known(candidate, claim, saying, now_ns)
            if candidate.maps_nccl and not known.maps_nccl:
                known.maps_nccl = True
                known.is_old = self._may_have_begun(candidate, now_ns)
            known.candidate = candidate
            self._note_calls(key, known, now_ns)
        family = {k.candidate.key.pid: k for k in self._known.values()}
        if self.observes_calls:
            callers, shared = [k for k in family.values() if k.called_ns is not None], shared_sayings(family)
        else:
            callers, shared = ranks_by_default(family, now_ns - self.config.settle_ns), set()
        self._identify(callers, shared, now_ns)
        for known in callers:
            if known.rank is not None:
                self._place(known, callers, gpus_by_pid)
        ranks = self._distinct(k.rank for k in callers if k.rank is not None)
        self._compare(ranks)
        return ranks

    def note_observed(self, library: Library, now_ns: int) -> None:
        """Take note that a library is observed from now on; one that a candidate maps is from the look at it."""
        self._observed.setdefault(library.identity, now_ns)

    def note_unobserved(self, library: Library) -> None:
        """Take note that a library is observed no more."""
        self._observed.pop(library.identity, None)
        self._versions.pop(library.identity, None)

    def disagreements(self) -> list[Limit]:
        """Return where the sources of identity contradict each other, or leave a choice."""
        own = [limit for known in self._known.values() for limit in known.contradictions.values()]
        return [*self._disagreements.values(), *own]

    def limits(self) -> list[Limit]:
        """Return which processes are not observed, or under a guessed name, and why."""
        limits = self.disagreements()
        waiting = [k for k in self._known.values() if k.called_ns is not None and k.rank is None]
        if waiting:
            limits.append(
                Limit(
                    what=f"{len(waiting)} processes that call NCCL (pid {pids_of(waiting)})",
                    why="their world communicator is not known yet, so neither is their job's name",
                    remedy="wait; or set [agent.identity] job_id, rank and world_size",
                )
            )
        guessed = [k for k in self._known.values() if k.is_guessed]
        if guessed:
            limits.append(
                Limit(
                    what=f"which start of their job {len(guessed)} processes (pid {pids_of(guessed)}) belong to",
                    why="nobody saw their world communicator being made, so it was guessed from their environment",
                    remedy="start the agent before the job, keep its state_file, or switch NCCL Inspector on",
                )
            )
        return limits

    def is_selected(self, candidate: Candidate) -> bool:
        """Whether a process is to be observed at all."""
        return all(candidate.environment.get(name) == value for name, value in self.config.select.items())

    def _may_have_begun(self, candidate: Candidate, now_ns: int) -> bool:
        """Whether a process that is first seen with NCCL may have used it before: not if we waited for it."""
        is_old = False
        for library in candidate.libraries:
            if library.kind.startswith("nccl"):
                # Starts are rounded down to a tick, in which nobody loads a library and makes a communicator.
                observed_ns = self._observed.setdefault(library.identity, now_ns)
                is_old |= observed_ns >= candidate.started_ns + TICK_NS
                version = library_version(library.path) if library.identity not in self._versions else None
                self._versions.setdefault(library.identity, version)
                if (self._versions[library.identity] or NEW_HASH_SINCE) < NEW_HASH_SINCE:
                    self.registry.use_old_hashes(candidate.key)
        if candidate.unmapped_ns is not None and now_ns - candidate.unmapped_ns <= PROMPT_NS:
            is_old = False
        return is_old and not self.registry.is_restored(candidate.key)

    def _note_calls(self, key: ProcessKey, known: Known, now_ns: int) -> None:
        if not self.registry.calls_nccl(key):
            return
        if known.called_ns is None:
            known.called_ns = known.grew_ns = now_ns
        largest = max((m.size for m in self.registry.memberships(key) if m.size), default=0)
        if largest > known.largest:
            known.largest, known.grew_ns = largest, now_ns

    def _identify(self, callers: Sequence[Known], shared: Collection[str], now_ns: int) -> None:
        open_ones = [k for k in callers if k.rank is None or k.is_guessed]
        nameless = []
        for known in open_ones:
            claim = self._claim(known, shared, now_ns)
            if claim is None:
                continue
            world = self._world(known, claim, now_ns)
            job = self._job_name(known, claim)
            if job is None:
                nameless.append((known, claim, world))
                continue
            launch = launch_name(known.candidate.environment, claim)
            self._name(known, claim, job, launch or _launch_of(world), now_ns)
        for known, claim, world in nameless:
            if world is None:
                continue
            job = self._job_of_peers(world, callers) or f"nccl-{world.comm:016x}"
            self._name(known, claim, job, _launch_of(world), now_ns)

    def _claim(self, known: Known, shared: Collection[str], now_ns: int) -> Claim | None:
        """Return rank and world size: by the environment, or by the largest communicator where that knows better."""
        claim = known.claim
        key = known.candidate.key
        is_inherited = known.saying in shared
        if claim.is_complete and not is_inherited and known.largest <= (claim.world_size or 0):
            return claim
        is_settled = now_ns - known.grew_ns >= self.config.settle_ns or (
            known.largest == claim.world_size and not is_inherited
        )
        world = self.registry.world(key)
        if not is_settled or world is None or world.comm_rank is None or world.size is None:
            return None
        if claim.is_complete and claim.launcher != SLURM:
            _contradict(
                known,
                f"rank of process {key.pid}",
                f"its environment says rank {claim.rank} of {claim.world_size}, "
                f"its communicator {world.comm_rank} of {world.size}, which is believed",
                "set RANK and WORLD_SIZE for each process, or name the right variables in [agent.identity]",
            )
        return replace(claim, rank=world.comm_rank, world_size=world.size)

    def _world(self, known: Known, claim: Claim, now_ns: int) -> Membership | None:
        world = self.registry.world(known.candidate.key, claim.world_size)
        if world is None or not known.is_old or self.registry.is_late(known.candidate.key):
            return world
        # A process that was there before the agent may have made communicators before. It would be seen to use them.
        return world if known.called_ns is None or now_ns - known.called_ns >= self.config.settle_ns else None

    def _job_name(self, known: Known, claim: Claim) -> str | None:
        environment = known.candidate.environment
        if self.config.job_id:
            name = expand(self.config.job_id, environment)
            if name is not None:
                return name
            _contradict(
                known,
                f"job of process {known.candidate.key.pid}",
                f"its environment does not have all variables of job_id = {self.config.job_id!r}",
                "set them for all of the job's processes, or change job_id in [agent.identity]",
            )
        return job_name(environment, claim, self.node)

    def _job_of_peers(self, world: Membership, callers: Iterable[Known]) -> str | None:
        """Return the name that other members of a communicator have, where a launcher tells only some."""
        names = set()
        for known in callers:
            if known.rank is not None and not known.is_guessed:
                peer = self.registry.world(known.candidate.key, known.rank.world_size)
                if peer is not None and peer.comm == world.comm:
                    names.add(known.rank.job_id)
        return names.pop() if len(names) == 1 else None

    def _name(self, known: Known, claim: Claim, job: str, launch: str | None, now_ns: int) -> None:
        """Give a process its identity; a guess is replaced once, where others tell a late process its world."""
        assert claim.rank is not None
        assert claim.world_size is not None
        is_late = self.registry.is_late(known.candidate.key)
        if launch is None:
            since_ns = known.first_seen_ns if known.called_ns is None else known.called_ns
            # Nobody will see the world communicator of a late process being made; others tell it, once it has a name.
            is_in_vain = is_late or not self.observes_calls
            wait_ns = self.config.settle_ns if is_in_vain else self.config.wait_ns
            if known.rank is not None or now_ns - since_ns < wait_ns:
                return
            launch = guessed_launch_name(known.candidate.environment, claim)
            known.is_guessed = True
        elif known.is_guessed:
            if not is_late:
                return  # all nodes guessed alike; a communicator that comes now is not the one they missed
            known.is_guessed = False
        known.rank = RankProcess(
            key=known.candidate.key,
            job_id=job,
            incarnation=launch,
            world_size=claim.world_size,
            rank=claim.rank,
            local_rank=claim.local_rank or 0,
            namespace_pid=known.candidate.namespace_pid,
            start_ns=known.candidate.start_ns,
        )

    def _place(self, known: Known, callers: Iterable[Known], gpus_by_pid: GpusByPid) -> None:
        """Add what may become known later: the place on the node, and the GPU."""
        rank = known.rank
        assert rank is not None
        if known.claim.local_rank is None:
            peers = [k.rank for k in callers if k.rank is not None]
            own = {p.rank for p in peers if (p.job_id, p.incarnation) == (rank.job_id, rank.incarnation)}
            rank = replace(rank, local_rank=sorted(own).index(rank.rank))
        used = gpus_by_pid.get(rank.key.pid, ())
        if used or rank.gpu is None:
            gpu = find_gpu(used, known.candidate.environment, known.claim.local_rank, self.gpus)
            if gpu is not None and (gpu.uuid is not None or rank.gpu_uuid is None):
                rank = replace(rank, gpu=gpu.index, gpu_uuid=gpu.uuid)
        known.rank = rank

    def _distinct(self, ranks: Iterable[RankProcess]) -> list[RankProcess]:
        """Return one process per rank, the oldest."""
        found: dict[tuple[str, str, int], RankProcess] = {}
        for rank in sorted(ranks, key=lambda r: (r.job_id, r.incarnation, r.rank, r.key.start_ticks, r.key.pid)):
            first = found.setdefault((rank.job_id, rank.incarnation, rank.rank), rank)
            if first is not rank:
                self._disagree(
                    f"rank {rank.rank} of {rank.job_id}",
                    f"processes {first.key.pid} and {rank.key.pid} both say they are it; the second is not observed",
                    "set [agent.identity] rank and world_size, or select, so that they can be told apart",
                )
        return list(found.values())

    def _compare(self, ranks: Sequence[RankProcess]) -> None:
        launches: dict[str, set[str]] = {}
        for rank in ranks:
            launches.setdefault(rank.job_id, set()).add(rank.incarnation)
        for job, names in launches.items():
            if len(names) > 1:
                self._disagree(
                    f"job {job}",
                    f"{len(names)} starts of it run on this node at the same time",
                    "if they are different jobs, give each its own --rdzv-id, or set [agent.identity] job_id",
                )

    def _disagree(self, what: str, why: str, remedy: str) -> None:
        self._disagreements.setdefault(what, Limit(what=what, why=why, remedy=remedy))


def _contradict(known: Known, what: str, why: str, remedy: str) -> None:
    known.contradictions[what] = Limit(what=what, why=why, remedy=remedy)


def _launch_of(world: Membership | None) -> str | None:
    return None if world is None else f"{world.comm:016x}"
