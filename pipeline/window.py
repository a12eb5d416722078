"""The window stage: one node's event batches in, one batch of complete iterations out for each. Deterministic.

Batches of a node are answered in the order of their sequence numbers: a repeated one is ignored, one that came too
early is held for a while, and one that does not come is a loss that marks the iterations it touched.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.observer import Observer
from pipeline.record import Record
from pipeline.window_check import check
from pipeline.window_params import DEFAULTS, WindowParams
from pipeline.window_state import NodeState
from schemas.codec import InvalidRecord, decode_events
from schemas.events import EventBatch
from schemas.iterations import IterationBatch

_MOST_ENDED = 1 << 16
_MOST_AGENTS = 64  # remembered per node, to know their late batches

_Key = tuple[str, str]  # job_id and node


@dataclass(slots=True)
class _Tracked:
    """One incarnation on one node, and the order of its batches."""

    incarnation: str
    world_size: int
    state: NodeState
    agent_start_ns: int
    next_seq: int
    last_record_ns: int
    held: dict[int, EventBatch] = field(default_factory=dict)
    earlier_agents: OrderedDict[int, None] = field(default_factory=OrderedDict)


@dataclass(slots=True)
class Window:
    """State of all nodes whose records this window is given."""

    observer: Observer = field(default_factory=Observer)
    params: WindowParams = DEFAULTS
    _nodes: OrderedDict[_Key, _Tracked] = field(default_factory=OrderedDict)
    _ended: OrderedDict[tuple[str, str, str], None] = field(default_factory=OrderedDict)

    def handle(self, record: Record) -> Iterator[IterationBatch]:
        """Take in one record of the events topic. Raises InvalidRecord, before any state has changed."""
        batch = decode_events(record.value)
        check(batch)
        key = (batch.job_id, batch.node)
        if (*key, batch.incarnation) in self._ended:
            self.observer.counted("batches_after_end", 1)
            return
        tracked = self._nodes.get(key)
        if tracked is not None and tracked.incarnation != batch.incarnation:
            yield from self._end(key, tracked)
            tracked = None
        if tracked is None:
            state = NodeState(self.params, self.observer.counted)
            tracked = self._nodes[key] = _Tracked(
                batch.incarnation, batch.world_size, state, batch.agent_start_ns, batch.seq, record.time_ns
            )
        elif tracked.world_size != batch.world_size:
            raise InvalidRecord(
                f"node {batch.node!r} says world_size {batch.world_size} of job {batch.job_id!r}, before it said "
                f"{tracked.world_size}: give the jobs different identifiers"
            )
        tracked.last_record_ns = record.time_ns
        self._nodes.move_to_end(key)
        yield from self._in_order(tracked, batch)
        if batch.is_last and batch.agent_start_ns == tracked.agent_start_ns:
            yield from self._end(key, tracked)
        self._evict(record.time_ns)

    def _in_order(self, tracked: _Tracked, batch: EventBatch) -> Iterator[IterationBatch]:
        if batch.agent_start_ns != tracked.agent_start_ns:
            if batch.agent_start_ns in tracked.earlier_agents:
                self.observer.counted("batches_duplicate", 1)
                return
            yield from self._release(tracked)
            tracked.earlier_agents[tracked.agent_start_ns] = None
            if len(tracked.earlier_agents) > _MOST_AGENTS:
                tracked.earlier_agents.popitem(last=False)
            tracked.agent_start_ns, tracked.next_seq = batch.agent_start_ns, 0
        if batch.seq < tracked.next_seq or batch.seq in tracked.held:
            self.observer.counted("batches_duplicate", 1)
            return
        tracked.held[batch.seq] = batch
        yield from self._consecutive(tracked)
        if len(tracked.held) > self.params.reorder_batches:
            yield self._next(tracked)
            yield from self._consecutive(tracked)

    def _consecutive(self, tracked: _Tracked) -> Iterator[IterationBatch]:
        while tracked.next_seq in tracked.held:
            yield self._next(tracked)

    def _next(self, tracked: _Tracked) -> IterationBatch:
        """Answer the first of the held batches; what should have come before it is lost."""
        seq = min(tracked.held)
        n_lost = seq - tracked.next_seq
        if n_lost:
            self.observer.counted("batches_lost", n_lost)
        tracked.next_seq = seq + 1
        return tracked.state.answer(tracked.held.pop(seq), n_lost)

    def _release(self, tracked: _Tracked) -> Iterator[IterationBatch]:
        while tracked.held:
            yield self._next(tracked)

    def _end(self, key: _Key, tracked: _Tracked) -> Iterator[IterationBatch]:
        yield from self._release(tracked)
        del self._nodes[key]
        self._ended[*key, tracked.incarnation] = None
        if len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)

    def _evict(self, record_ns: int) -> None:
        """Forget the node that has been silent for longest, where that is too long or there are too many."""
        key, oldest = next(iter(self._nodes.items()), (None, None))
        if key is None or oldest is None:
            return
        if len(self._nodes) > self.params.nodes or oldest.last_record_ns < record_ns - self.params.silent_s * 1e9:
            del self._nodes[key]
            self.observer.counted("nodes_dropped", 1)

    @property
    def n_nodes(self) -> int:
        """How many nodes hold state."""
        return len(self._nodes)
