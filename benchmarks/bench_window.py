"""Milliseconds and calls per second and core of the window stage, against the same answers from a loop over calls.

Run: .venv/bin/python benchmarks/bench_window.py   (make bench runs all benchmarks)

Both decode the same records of one simulated node. The baseline is what one writes first: dictionaries and one pass of
Python over the calls of a batch. It does less: it is told the anchor call, and knows neither loss, nor late or unsorted
calls, nor telemetry; its durations and communication times have to equal the window's.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from agents.simulated import Cluster, load_scenario
from pipeline.record import Record
from pipeline.window import Window
from schemas.codec import decode_events, encode_events
from schemas.events import CallSource, Op
from schemas.topics import EVENTS

N_WARM, N_REPEATS = 11, 3
SCENARIO = """
title = "one node of a job, with ten iterations a flush"
seed = 11
iterations = 400
micro_batches = {micro_batches}
[layout]
tp = 2
pp = 2
dp = 8
gpus_per_node = 8
[agents]
flush_interval_s = {flush_s}
gpu_delay_flushes = {delay}
sensors = ["host_call", "gpu", "sync", "nvml", "host"]
"""
Key = tuple[int, int, int, int]
Result = dict[tuple[int, int], tuple[float, float]]  # (rank, iteration): duration and communication, seconds


@dataclass
class LoopRank:
    """One rank of the baseline: calls of the open iteration, closed ones that wait for the GPU."""

    open: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    end_ns: int | None = None
    begun: bool = False
    closed: list[tuple[int, float, list[Key]]] = field(default_factory=list)


@dataclass
class LoopWindow:
    """The baseline."""

    ranks: dict[int, LoopRank] = field(default_factory=lambda: defaultdict(LoopRank))
    gpu: dict[Key, tuple[int, int, int, int]] = field(default_factory=dict)

    def handle(self, record: Record) -> Iterator[tuple[int, int, float, float]]:
        """Yield rank, iteration, duration and communication in seconds."""
        batch = decode_events(record.value)
        table = batch.calls
        columns = (table.rank, table.comm, table.op, table.source, table.bytes, table.count, table.first_seq)
        times = (table.start_ns, table.end_ns, table.duration_ns)
        syncs: dict[int, list[int]] = defaultdict(list)
        ends = (batch.syncs.start_ns + batch.syncs.duration_ns).tolist()
        for rank, end in sorted(zip(batch.syncs.rank.tolist(), ends, strict=True)):
            syncs[rank].append(end)
        for rank, comm, op, source, size, count, seq, start, end, total in zip(
            *(c.tolist() for c in columns), *(t.tolist() for t in times), strict=True
        ):
            if source == CallSource.GPU:
                self.gpu[rank, comm, op, seq] = (start, end, total, count)
                continue
            state = self.ranks[rank]
            if state.open and syncs[rank] and start >= syncs[rank][0]:
                self._close(rank, state, syncs[rank].pop(0))
            if not state.begun:
                state.begun, state.end_ns = True, start
            state.open.append((comm, op, size, seq, count))
        for rank, state in self.ranks.items():
            if state.open and syncs[rank]:
                self._close(rank, state, syncs[rank].pop(0))
            yield from self._finished(rank, state)

    def _close(self, rank: int, state: LoopRank, end: int) -> None:
        anchors = [seq for _, op, size, seq, _ in state.open if op == Op.ALL_REDUCE and size == 4]
        assert state.end_ns is not None
        keys = [(rank, comm, op, seq) for comm, op, _, seq, _ in state.open]
        state.closed.append((anchors[-1], (end - state.end_ns) / 1e9, keys))
        state.open, state.end_ns = [], end

    def _finished(self, rank: int, state: LoopRank) -> Iterator[tuple[int, int, float, float]]:
        while state.closed and all(key in self.gpu for key in state.closed[0][2]):
            iteration, duration_s, keys = state.closed.pop(0)
            covered, reached = 0, 0
            for start, end, total, count in sorted(self.gpu.pop(key) for key in keys):
                if count > 1:
                    covered += total
                elif end > reached:
                    covered += end - max(start, reached)
                    reached = end
            yield rank, iteration, duration_s, covered / 1e9


def ours(records: list[Record]) -> tuple[Result, list[float]]:
    """Run the window; return what it said, and the seconds of each batch."""
    window = Window()

    def handle(record: Record) -> Iterator[tuple[int, int, float, float]]:
        for answer in window.handle(record):
            rows = answer.rows
            yield from zip(
                rows.rank.tolist(),
                rows.iteration.tolist(),
                rows.duration_s.tolist(),
                rows.communication_s.tolist(),
                strict=True,
            )

    return _timed(handle, records)


def loop(records: list[Record]) -> tuple[Result, list[float]]:
    """Run the baseline likewise."""
    return _timed(LoopWindow().handle, records)


def _timed(
    handle: Callable[[Record], Iterator[tuple[int, int, float, float]]], records: list[Record]
) -> tuple[Result, list[float]]:
    said: Result = {}
    spent = []
    for record in records:
        start = time.process_time()
        rows = list(handle(record))
        spent.append(time.process_time() - start)
        said |= {(rank, iteration): (duration, busy) for rank, iteration, duration, busy in rows}
    return said, spent


def records_of(micro_batches: int, flush_s: float) -> tuple[list[Record], float]:
    """Return the records of one node, and the mean number of rows of calls in one."""
    scenario = load_scenario(SCENARIO.format(micro_batches=micro_batches, flush_s=flush_s, delay=0.5))
    batches = [b for b in Cluster(scenario).batches() if b.node == "node1" and not b.is_last]
    records = [Record(EVENTS, 0, i, b.flush_ns, b"", encode_events(b)) for i, b in enumerate(batches)]
    return records, float(np.mean([len(b.calls) for b in batches[N_WARM:]]))


def main() -> None:
    """Print one line per size of iteration."""
    print(
        f"{'calls/batch':>11} {'window ms':>10} {'loop ms':>8} {'window calls/s':>15} {'loop calls/s':>13} {'ratio':>6}"
    )
    for micro_batches, flush_s in ((2, 0.25), (6, 0.6), (24, 2.4)):
        records, n_calls = records_of(micro_batches, flush_s)
        best = {}
        said = {}
        for name, run in (("window", ours), ("loop", loop)):
            runs = [run(records) for _ in range(N_REPEATS)]
            said[name] = runs[0][0]
            best[name] = min(float(np.median(spent[N_WARM:])) for _, spent in runs)
        _compare(said["window"], said["loop"])
        window_s, loop_s = best["window"], best["loop"]
        print(
            f"{n_calls:>11,.0f} {window_s * 1e3:>10.2f} {loop_s * 1e3:>8.2f} "
            f"{n_calls / window_s:>15,.0f} {n_calls / loop_s:>13,.0f} {loop_s / window_s:>6.2f}"
        )


def _compare(said: Result, expected: Result) -> None:
    shared = said.keys() & expected.keys()
    assert len(shared) > 0.9 * len(expected)
    worst = max(abs(a - b) for pair in shared for a, b in zip(said[pair], expected[pair], strict=True))
    assert worst < 1e-6, f"the window and the loop differ by {worst} s"


if __name__ == "__main__":
    main()
