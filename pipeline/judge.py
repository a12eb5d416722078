"""The judge stage: iteration batches of whole jobs in, alerts out. Deterministic; reads no clock, draws no number."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.frames import Lateness
from pipeline.incidents import JobIdentity
from pipeline.job import Job
from pipeline.judge_params import DEFAULTS, JudgeParams
from pipeline.observer import Observer
from pipeline.record import Record
from schemas.alerts import Alert, Resolution
from schemas.codec import InvalidRecord, decode_iterations
from schemas.iterations import IterationBatch

_SILENT_NS = 30 * 60 * 10**9
_MOST_JOBS = 4096
_PREDECESSOR_FLUSHES = 8
_PREDECESSOR_NS = 5 * 10**9
_MOST_REMEMBERED = 16384


@dataclass(slots=True)
class _Memory:
    """What outlives an incarnation: components do, and a consumer must never see a revision twice."""

    revisions: dict[str, int] = field(default_factory=dict)
    holds: dict[str, int] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    incarnations: list[str] = field(default_factory=list)  # that hold state, oldest first


@dataclass(slots=True)
class _Tracked:
    job: Job
    last_record_ns: int
    seen: dict[tuple[str, int], int] = field(default_factory=dict)  # (node, agent start) -> last batch


@dataclass(slots=True)
class Judge:
    """State of all jobs whose records this judge is given."""

    observer: Observer = field(default_factory=Observer)
    params: JudgeParams = DEFAULTS
    lateness: Lateness = field(default_factory=Lateness)
    _jobs: OrderedDict[tuple[str, str], _Tracked] = field(default_factory=OrderedDict)
    _ended: OrderedDict[tuple[str, str], None] = field(default_factory=OrderedDict)
    _memory: OrderedDict[str, _Memory] = field(default_factory=OrderedDict)

    def handle(self, record: Record) -> Iterator[Alert]:
        """Take in one record of the iterations topic. Raises InvalidRecord, before any state has changed."""
        batch = decode_iterations(record.value)
        for alert in self._handle(batch, record.time_ns):
            self.observer.alert_made(alert)
            yield alert

    def _handle(self, batch: IterationBatch, record_ns: int) -> Iterator[Alert]:
        key = (batch.job_id, batch.incarnation)
        if key in self._ended:
            self.observer.counted("batches_after_end", 1)
            return
        tracked = self._track(batch, key)
        last = tracked.seen.get((batch.node, batch.agent_start_ns), -1)
        if batch.seq <= last:
            self.observer.counted("batches_duplicate", 1)
            return
        tracked.seen[batch.node, batch.agent_start_ns] = batch.seq
        if len(tracked.seen) > 4 * batch.world_size + 64:
            del tracked.seen[next(iter(tracked.seen))]
        tracked.last_record_ns = record_ns
        if batch.lost_events:
            self.observer.counted("events_lost", batch.lost_events)
        yield from tracked.job.handle(batch)
        if tracked.job.has_ended:
            yield from self._end(key, Resolution.JOB_ENDED)
        yield from self._end_predecessors(batch, record_ns)
        yield from self._evict(record_ns)

    def _track(self, batch: IterationBatch, key: tuple[str, str]) -> _Tracked:
        tracked = self._jobs.get(key)
        if tracked is not None:
            if tracked.job.identity.world_size != batch.world_size:
                raise InvalidRecord(
                    f"node {batch.node!r} says world_size {batch.world_size} of job {batch.job_id!r}, "
                    f"other nodes say {tracked.job.identity.world_size}: give the jobs different identifiers"
                )
            self._jobs.move_to_end(key)
            return tracked
        memory = self._memory.setdefault(batch.job_id, _Memory())
        self._memory.move_to_end(batch.job_id)
        while len(self._memory) > _MOST_REMEMBERED:
            self._memory.popitem(last=False)
        job = Job(
            JobIdentity(job_id=batch.job_id, incarnation=batch.incarnation, world_size=batch.world_size),
            self.params,
            self.observer,
            memory.revisions,
            memory.holds,
            memory.owners,
            self.lateness,
        )
        memory.incarnations.append(batch.incarnation)
        tracked = self._jobs[key] = _Tracked(job, 0)
        return tracked

    def _end_predecessors(self, batch: IterationBatch, record_ns: int) -> Iterator[Alert]:
        """Take it that a node that runs a later incarnation has left the earlier ones, and soon that all have."""
        memory = self._memory.get(batch.job_id)
        if memory is None or len(memory.incarnations) < 2:
            return
        earlier = memory.incarnations[: memory.incarnations.index(batch.incarnation)]
        patience_ns = max(_PREDECESSOR_FLUSHES * batch.flush_interval_ns, _PREDECESSOR_NS)
        for incarnation in earlier:
            key = (batch.job_id, incarnation)
            tracked = self._jobs[key]
            if batch.node in tracked.job.nodes_seen:
                tracked.job.nodes_ended.add(batch.node)
            is_left = bool(tracked.job.nodes_ended) and record_ns - tracked.last_record_ns > patience_ns
            if tracked.job.has_ended or is_left:
                yield from self._end(key, Resolution.JOB_ENDED)

    def _evict(self, record_ns: int) -> Iterator[Alert]:
        """Let go of jobs that fell silent: what became of them is unknown."""
        key, oldest = next(iter(self._jobs.items()), (None, None))
        if key is None or oldest is None:
            return
        if len(self._jobs) > _MOST_JOBS or 0 < oldest.last_record_ns < record_ns - _SILENT_NS:
            self.observer.counted("jobs_silent", 1)
            yield from self._end(key, Resolution.LOST_SIGHT)

    def _end(self, key: tuple[str, str], resolution: Resolution) -> Iterator[Alert]:
        tracked = self._jobs.pop(key)
        if (memory := self._memory.get(key[0])) is not None and key[1] in memory.incarnations:
            memory.incarnations.remove(key[1])
        self._ended[key] = None
        while len(self._ended) > _MOST_REMEMBERED:
            self._ended.popitem(last=False)
        yield from tracked.job.end(resolution)
        self.observer.job_ended(*key)

    @property
    def n_jobs(self) -> int:
        """How many incarnations hold state."""
        return len(self._jobs)
