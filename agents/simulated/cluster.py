"""The simulated cluster: a scenario in, the nodes' batches out, in the order in which a broker would receive them."""

import heapq
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from agents.simulated.delivery import Delivery
from agents.simulated.rows import CallRows
from agents.simulated.samples import NodeSampler
from agents.simulated.scenario import Scenario
from agents.simulated.streams import NodeStream
from agents.simulated.timeline import Ended, Passed, Paused, Started, Truth, timeline, truth
from schemas.events import EventBatch

_CLOCKS = 7  # purpose of random numbers
_ATTACHES_AT = 0.37  # of an iteration: late agents attach in its middle


class Cluster:
    """One simulated job on its nodes. The same scenario gives the same batches, byte for byte, every time."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario

    def batches(self) -> Iterator[EventBatch]:
        """Yield all batches in the order of their arrival, as fast as they can be made.

        Whoever wants real time waits for each batch's flush_ns. Memory holds a few flush intervals of events.
        """
        delivery = Delivery(self.scenario)
        incarnation = None
        for happening in timeline(self.scenario, self.scenario.faults):
            match happening:
                case Started():
                    incarnation = _Incarnation(happening, delivery)
                case Passed() if incarnation:
                    yield from incarnation.add_pass(happening)
                case Paused() if incarnation:
                    yield from incarnation.add_pause(happening)
                case Ended() if incarnation:
                    yield from incarnation.end(happening.time_s)
        yield from delivery.arrived(np.inf)

    def truth(self) -> Truth:
        """Return when iterations really began and ended."""
        return truth(self.scenario)


class _Incarnation:
    """The agents of all nodes during one incarnation, and the order of their flushes."""

    def __init__(self, started: Started, delivery: Delivery) -> None:
        scenario = started.placement.scenario
        self._placement = started.placement
        self._start_s = started.time_s
        self._delivery = delivery
        self._rows = CallRows(started.placement, started.programs, scenario.agents.sensor_flags)
        self._ends_s: list[float] = []  # of the iterations so far
        self._first_iteration = started.first_iteration
        self._streams: dict[int, NodeStream] = {}
        self._flushes: list[tuple[float, int]] = []
        random = np.random.default_rng([scenario.seed, _CLOCKS])
        skew_s = random.uniform(-1, 1, scenario.n_nodes) * scenario.clocks.skew_s
        self._clock_offset_ns = [scenario.epoch_ns + round(skew * 1e9) for skew in skew_s.tolist()]
        self._late = {late.node: late.at_iteration for late in scenario.agents.late}
        for node in range(scenario.n_nodes):
            if node not in self._late:
                self._attach(node, started.time_s, is_late=False)

    def add_pass(self, passed: Passed) -> Iterator[EventBatch]:
        """Take in a pass; yield the batches that have arrived by then."""
        times = passed.times
        if not passed.is_evaluation:
            self._ends_s.append(times.end_s)
            for node, at_iteration in self._late.items():
                if passed.iteration == max(at_iteration, self._first_iteration):
                    attach_s = times.start_s + _ATTACHES_AT * (times.end_s - times.start_s)
                    self._attach(node, attach_s, is_late=at_iteration >= self._first_iteration)
        matrices = self._rows.matrices(passed.program, times.stages)
        for stream in self._streams.values():
            stream.add_pass(passed, matrices)
        yield from self._flush(times.complete_s)

    def add_pause(self, paused: Paused) -> Iterator[EventBatch]:
        """Take in a pause; yield the batches that have arrived by then."""
        for stream in self._streams.values():
            stream.add_pause(paused)
        yield from self._flush(float(paused.end_s.min()))

    def end(self, time_s: float) -> Iterator[EventBatch]:
        """Let every agent see the processes end, and send the last batch at its next flush time."""
        yield from self._flush(time_s)
        for flush_s, node in sorted(self._flushes):
            self._delivery.send(self._streams[node].flush(is_last=True), flush_s)

    def _attach(self, node: int, time_s: float, *, is_late: bool) -> None:
        stream = NodeStream(
            placement=self._placement,
            node=node,
            rows=self._rows,
            clock_offset_ns=self._clock_offset_ns[node],
            attach_s=time_s,
            is_late=is_late,
            process_start_s=self._start_s,
            sampler=NodeSampler(self._placement.scenario, self._placement.incarnation, node, self._iteration_at),
        )
        self._streams[node] = stream
        heapq.heappush(self._flushes, (stream.next_flush_s, node))

    def _iteration_at(self, time_s: float) -> int:
        return self._first_iteration + bisect_left(self._ends_s, time_s)

    def _flush(self, until_s: float) -> Iterator[EventBatch]:
        while self._flushes and self._flushes[0][0] <= until_s:
            flush_s, node = self._flushes[0]
            stream = self._streams[node]
            self._delivery.send(stream.flush(is_last=False), flush_s)
            heapq.heapreplace(self._flushes, (stream.next_flush_s, node))
            yield from self._delivery.arrived(flush_s)
