"""Observations of all collectors to one EventBatch per job, incarnation and flush."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np

from agents.batch_size import split
from agents.collector import Observations, RankProcess
from schemas.events import CallSource, Communicators, EventBatch, Sensor
from schemas.table import AnyArray, IntArray

_BY_RANK = ("calls", "communicators", "spans", "syncs", "host_samples", "markers", "peer_samples")
_PER_JOB = Sensor.GPU | Sensor.MARKER | Sensor.SYNC
_ENDED_MAX = 1024  # jobs whose end is remembered
_NOTHING = Sensor(0)
LINGER_FLUSHES = 3  # after the end of a job's last process here: its files are read to their end


@dataclass(slots=True)
class _Job:
    """What is remembered of one incarnation of a job between flushes."""

    world_size: int
    seq: int = 0
    silent: int = 0  # flushes without a process
    seen: Sensor = _NOTHING  # of _PER_JOB
    ranks: dict[int, RankProcess] = field(default_factory=dict)

    def claimed(self, sensors: Sensor, tables: dict[str, Any]) -> Sensor:
        """Return what is observed of this very job: its processes may do without what others have switched on."""
        if "calls" in tables and (tables["calls"].source == int(CallSource.GPU)).any():
            self.seen |= Sensor.GPU
        if "markers" in tables:
            self.seen |= Sensor.MARKER
        if "syncs" in tables:
            self.seen |= Sensor.SYNC
        return sensors & (~_PER_JOB | self.seen)


class Assembler:
    """Cuts what was observed into batches; the state of a job ends with its last batch."""

    def __init__(self, node: str, *, agent_start_ns: int, flush_interval_ns: int) -> None:
        self._node = node
        self._agent_start_ns = agent_start_ns
        self._flush_interval_ns = flush_interval_ns
        self._agent_version = version("failslow")
        self._jobs: dict[tuple[str, str], _Job] = {}
        self._n_ends: OrderedDict[tuple[str, str], int] = OrderedDict()
        self.linger_flushes = LINGER_FLUSHES

    def assemble(
        self,
        ranks: Sequence[RankProcess],
        alive: Sequence[RankProcess],
        observations: Sequence[Observations],
        *,
        sensors: Sensor,
        flush_ns: int,
        clock_error_ns: int | None,
    ) -> list[EventBatch]:
        """Return one batch for each job that has processes here, or had until just now.

        ranks: what the places in `observations` mean; alive: those of them whose processes still run.
        """
        places = _places_by_job(ranks)
        batches: list[EventBatch] = []
        for name in list(dict.fromkeys([*places, *self._jobs])):
            own = places.get(name, [])
            job = self._jobs.get(name)
            if job is None:
                job = self._jobs[name] = _Job(ranks[own[0]].world_size)
            job.ranks |= {ranks[p].rank: ranks[p] for p in reversed(own)}  # those that run win over those that ended
            is_alive = any((r.job_id, r.incarnation) == name for r in alive)
            job.silent = 0 if is_alive else job.silent + 1
            tables = _tables_of(np.array(own, np.int64), ranks, observations)
            tables |= _node_tables(job, observations)
            batches += split(
                EventBatch(
                    job_id=name[0],
                    incarnation=self._incarnation(name),
                    node=self._node,
                    agent_version=self._agent_version,
                    seq=job.seq,
                    agent_start_ns=self._agent_start_ns,
                    flush_ns=flush_ns,
                    flush_interval_ns=self._flush_interval_ns,
                    world_size=job.world_size,
                    sensors=job.claimed(sensors, tables),
                    lost_events=_lost(own, observations),
                    clock_error_ns=clock_error_ns,
                    is_last=job.silent > LINGER_FLUSHES,
                    ranks=tuple(r.info for _, r in sorted(job.ranks.items())),
                    **tables,
                )
            )
            job.seq = batches[-1].seq + 1
            if batches[-1].is_last:
                self._end(name)
        return batches

    def _end(self, name: tuple[str, str]) -> None:
        del self._jobs[name]
        self._n_ends[name] = self._n_ends.pop(name, 0) + 1
        if len(self._n_ends) > _ENDED_MAX:
            self._n_ends.popitem(last=False)

    def _incarnation(self, name: tuple[str, str]) -> str:
        """Return what tells this start of a job from others: some launchers start twice under one name."""
        n_ends = self._n_ends.get(name, 0)
        return f"{name[1]}.{n_ends + 1}" if n_ends else name[1]


def _lost(places: Sequence[int], observations: Sequence[Observations]) -> int:
    """Return how many events of these ranks are missing; of what is nobody's in particular, all jobs are told."""
    return sum(o.lost_events + sum(o.lost_by_rank.get(place, 0) for place in places) for o in observations)


def _places_by_job(ranks: Sequence[RankProcess]) -> dict[tuple[str, str], list[int]]:
    places: dict[tuple[str, str], list[int]] = {}
    for place, rank in enumerate(ranks):
        places.setdefault((rank.job_id, rank.incarnation), []).append(place)
    return places


def _tables_of(places: IntArray, ranks: Sequence[RankProcess], observations: Sequence[Observations]) -> dict[str, Any]:
    """Return the rows of some places, with the ranks themselves in place of places."""
    rank_of = np.array([r.rank for r in ranks], np.uint32)
    tables: dict[str, Any] = {}
    for name in _BY_RANK:
        parts: list[Any] = [getattr(o, name) for o in observations]
        table: Any = type(parts[0]).concatenate(parts) if parts else None
        if table is None or not len(table):
            continue
        own: Any = table.take(np.isin(table.rank, places))
        if len(own):
            tables[name] = own.replace(rank=rank_of[own.rank])
    if "communicators" in tables:
        tables["communicators"] = _distinct(tables["communicators"])
    return tables


def _distinct(table: Any) -> Communicators:
    """Return one row per rank and communicator, of several the one that knows most."""
    order: AnyArray = np.lexsort((-table.size.astype(np.int64), table.comm, table.rank))
    table = table.take(order)
    is_first = np.ones(len(table), bool)
    is_first[1:] = (table.rank[1:] != table.rank[:-1]) | (table.comm[1:] != table.comm[:-1])
    found: Communicators = table.take(is_first)
    return found


def _node_tables(job: _Job, observations: Sequence[Observations]) -> dict[str, Any]:
    """Return the samples of the job's GPUs, of all where it is not known which are its own, and of all ports."""
    tables: dict[str, Any] = {}
    gpus = {r.gpu for r in job.ranks.values()}
    for o in observations:
        if len(o.gpu_samples):
            own = [g for g in gpus if g is not None]
            samples = o.gpu_samples if None in gpus else o.gpu_samples.take(np.isin(o.gpu_samples.gpu, own))
            tables["gpu_samples"] = samples
        if o.ports:
            tables["ports"] = o.ports
            tables["port_samples"] = o.port_samples
    return tables
