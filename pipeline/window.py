"""The window stage: one node's event batches in, one batch of complete iterations out for each. Deterministic.

Batches of a node are answered in the order of their sequence numbers: a repeated one is ignored, one that came too
early is held for a while, and one that does not come is a loss that marks the iterations it touched.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pipeline.observer import Observer
from pipeline.record import Record
from pipeline.window_node import NodeWindow
from schemas.codec import InvalidRecord, decode_events
from schemas.events import EventBatch
from schemas.iterations import IterationBatch

_MOST_NODES = 16384
_MOST_HELD = 4


@dataclass(slots=True)
class _Order:
    """Puts one agent's batches in order."""

    agent_start_ns: int
    next_seq: int
    held: dict[int, EventBatch] = field(default_factory=dict)


@dataclass(slots=True)
class _Tracked:
    node: NodeWindow
    order: _Order


@dataclass(slots=True)
class Window:
    """State of all nodes whose records this window is given."""

    observer: Observer = field(default_factory=Observer)
    _nodes: OrderedDict[tuple[str, str, str], _Tracked] = field(default_factory=OrderedDict)

    def handle(self, record: Record) -> Iterator[IterationBatch]:
        """Take in one record of the events topic. Raises InvalidRecord, before any state has changed."""
        batch = decode_events(record.value)
        _check(batch)
        key = (batch.job_id, batch.incarnation, batch.node)
        tracked = self._nodes.get(key)
        lost = 0
        if tracked is None:
            self._forget_earlier_incarnations(batch)
            tracked = self._nodes[key] = _Tracked(NodeWindow(self.observer), _Order(batch.agent_start_ns, batch.seq))
            while len(self._nodes) > _MOST_NODES:
                self._nodes.popitem(last=False)
                self.observer.counted("nodes_forgotten", 1)
        elif batch.agent_start_ns > tracked.order.agent_start_ns:
            yield from self._release(tracked)
            tracked.order = _Order(batch.agent_start_ns, 0)
            lost = 1  # whatever happened while the agent was down
        self._nodes.move_to_end(key)
        yield from self._in_order(tracked, batch, lost)
        if batch.is_last:
            yield from self._release(tracked)
            del self._nodes[key]

    def _in_order(self, tracked: _Tracked, batch: EventBatch, lost: int) -> Iterator[IterationBatch]:
        order = tracked.order
        if batch.agent_start_ns < order.agent_start_ns or batch.seq < order.next_seq or batch.seq in order.held:
            self.observer.counted("batches_duplicate", 1)
            return
        if batch.seq > order.next_seq:
            order.held[batch.seq] = batch
            if len(order.held) > _MOST_HELD:
                lost = min(order.held) - order.next_seq
                self.observer.counted("batches_lost", lost)
                order.next_seq = min(order.held)
            else:
                self.observer.counted("batches_early", 1)
                return
        else:
            order.held[batch.seq] = batch
        while order.next_seq in order.held:
            yield tracked.node.answer(order.held.pop(order.next_seq), lost)
            order.next_seq += 1
            lost = 0

    def _release(self, tracked: _Tracked) -> Iterator[IterationBatch]:
        """Answer what is held, with the gaps as losses."""
        order = tracked.order
        for seq in sorted(order.held):
            lost = seq - order.next_seq
            if lost:
                self.observer.counted("batches_lost", lost)
            yield tracked.node.answer(order.held.pop(seq), lost)
            order.next_seq = seq + 1

    def _forget_earlier_incarnations(self, batch: EventBatch) -> None:
        for key in [k for k in self._nodes if k[0] == batch.job_id and k[2] == batch.node]:
            if self._nodes[key].order.agent_start_ns <= batch.agent_start_ns:
                del self._nodes[key]

    @property
    def n_nodes(self) -> int:
        """How many nodes hold state."""
        return len(self._nodes)


def _check(batch: EventBatch) -> None:
    """Refuse what no agent can have seen."""
    calls = batch.calls
    if len(calls):
        if (calls.duration_ns < 0).any() or (calls.duration_min_ns < 0).any() or (calls.end_ns < calls.start_ns).any():
            raise InvalidRecord("a call ends before it starts")
        if (calls.count == 0).any():
            raise InvalidRecord("a call row counts no call")
        if (calls.bytes < 0).any() or (calls.first_seq < 0).any():
            raise InvalidRecord("a call has a negative size or sequence number")
    for name in ("syncs", "spans", "markers"):
        table = getattr(batch, name)
        if len(table) and (np.asarray(table.duration_ns) < 0).any():
            raise InvalidRecord(f"{name} have a negative duration")
