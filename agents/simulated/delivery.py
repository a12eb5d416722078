"""How batches travel: after a short while each, in the order of their node, and some of them lost, twice or late."""

import heapq
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np

from agents.simulated.benign import DuplicatedBatches, LateBatches, LostBatches
from agents.simulated.scenario import Scenario
from schemas.events import Calls, EventBatch, GpuSamples, HostSamples, Markers, Spans, Syncs

_DELIVERY = 6  # purpose of random numbers


class Delivery:
    """Takes batches in the order of their flush and gives them in the order of their arrival."""

    def __init__(self, scenario: Scenario) -> None:
        self._random = np.random.default_rng([scenario.seed, _DELIVERY])
        self._mean_s = scenario.agents.delivery_s
        self._lost = scenario.find(LostBatches)
        self._duplicated = scenario.find(DuplicatedBatches)
        self._late = scenario.find(LateBatches)
        self._on_the_way: list[tuple[float, int, EventBatch]] = []
        self._number = count()
        self._last_arrival_s: dict[str, float] = {}

    def send(self, batch: EventBatch, flush_s: float) -> None:
        """Take a batch that leaves its node at flush_s."""
        way, lost, duplicated, late = self._random.random(4).tolist()
        if self._lost and lost < self._lost.probability and not batch.is_last:
            if not self._lost.known:
                return
            batch = _without_events(batch)
        arrival_s = flush_s - self._mean_s * float(np.log1p(-way))  # exponential
        if self._late and late < self._late.probability:
            arrival_s += self._late.delay_s
        # A producer keeps the order of its node: a late batch holds up the next ones.
        arrival_s = max(arrival_s, self._last_arrival_s.get(batch.node, arrival_s))
        self._last_arrival_s[batch.node] = arrival_s
        self._push(arrival_s, batch)
        if self._duplicated and duplicated < self._duplicated.probability:
            self._push(arrival_s + self._duplicated.delay_s, batch)

    def arrived(self, until_s: float) -> Iterator[EventBatch]:
        """Yield what has arrived by a time."""
        while self._on_the_way and self._on_the_way[0][0] <= until_s:
            yield heapq.heappop(self._on_the_way)[2]

    def _push(self, arrival_s: float, batch: EventBatch) -> None:
        heapq.heappush(self._on_the_way, (arrival_s, next(self._number), batch))


def _without_events(batch: EventBatch) -> EventBatch:
    tables = (batch.calls, batch.spans, batch.syncs, batch.gpu_samples, batch.host_samples, batch.markers)
    return replace(
        batch,
        lost_events=sum(len(table) for table in tables),
        calls=Calls.empty(),
        spans=Spans.empty(),
        syncs=Syncs.empty(),
        gpu_samples=GpuSamples.empty(),
        host_samples=HostSamples.empty(),
        markers=Markers.empty(),
    )
