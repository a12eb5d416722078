"""One pipeline stage in one pass: all its (dp, tp) ranks at once, operation by operation."""

from dataclasses import dataclass

import numpy as np

from agents.simulated.benign import GcPauses
from agents.simulated.draws import Draws
from agents.simulated.layout import Axis
from agents.simulated.program import Collective, Compute, Exchange, StageProgram
from schemas.events import SpanKind
from schemas.table import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class StageTimes:
    """What the rows of one stage took, (rows, dp, tp) each, and its computes, (computes, dp, tp); seconds."""

    start: FloatArray  # of the first call of the row, on the GPU
    end: FloatArray  # of the last
    total: FloatArray  # inside all calls of the row, waiting included
    least: FloatArray  # inside the shortest
    host_start: FloatArray  # of the first call of the row, on the host
    host_end: FloatArray
    host_call: FloatArray  # (dp, tp): inside one call, on the host
    compute_start: FloatArray
    compute_end: FloatArray


class Stage:
    """Runs the items of one stage's program. `ready` (dp, tp) is when each GPU has done all so far."""

    def __init__(
        self,
        draws: Draws,
        stage: int,
        program: StageProgram,
        *,
        pace: float,
        gpu_s: FloatArray,
        host_s: FloatArray,
        spread: FloatArray,
    ) -> None:
        """Start at gpu_s and host_s, when GPUs and hosts are free, (dp, tp); forwards take `pace` times as long."""
        self.program = program
        self.ready = gpu_s
        self.gc_pauses: list[tuple[int, int, float]] = []  # dp, tp, start
        self._work = draws.scenario.work
        self._calls = self._work.tp_calls
        shape = gpu_s.shape
        nominal = self._nominal()
        is_pass = np.array([c.kind != SpanKind.OPTIMIZER for c in program.computes])
        length = np.stack(
            [draws.length[c.micro_batch] if c.micro_batch >= 0 else np.ones(shape[0]) for c in program.computes]
        )
        pace_of = np.where(is_pass, pace, 1.0)
        factor = spread * draws.factors.gpu[stage]
        self._compute_s = (
            (nominal * pace_of)[:, None, None] * length[:, :, None] * draws.computation(len(nominal)) * factor
        )
        host_factor = draws.factors.host[stage] * draws.launch()
        self._host_call = self._work.host_call_s * host_factor
        self.host = self._launch(host_s, nominal, host_factor, draws)
        self._transfer_s = draws.ring_s(Axis.TP, (stage,), (len(nominal),))[:, :, None]
        self._slice_s = self._compute_s / self._calls
        self._longest_s = self._slice_s.max(axis=2, keepdims=True) + self._transfer_s
        self._tail_s = (self._calls - 1) * self._longest_s
        n_rows = len(program.rows)
        self.start = np.empty((n_rows, *shape))
        self.end = np.empty((n_rows, *shape))
        self._compute_start = np.empty_like(self._compute_s)
        self._compute_end = np.empty_like(self._compute_s)
        self._host_bound: dict[int, tuple[FloatArray, FloatArray]] = {}  # row: total, least

    def _nominal(self) -> FloatArray:
        seconds = {
            SpanKind.FORWARD: self._work.forward_s,
            SpanKind.BACKWARD: self._work.forward_s * self._work.backward_ratio,
            SpanKind.OPTIMIZER: self._work.optimizer_s,
        }
        return np.array([seconds[c.kind] for c in self.program.computes])

    def _launch(self, host_s: FloatArray, nominal: FloatArray, factor: FloatArray, draws: Draws) -> FloatArray:
        """Return (items + 1, dp, tp): when each host turns to each item, and when it has launched all."""
        self._launch_s = np.array([self._launch_cost(item, nominal) for item in self.program.items])
        elapsed = np.concatenate([[0.0], np.cumsum(self._launch_s)])
        host: FloatArray = host_s + elapsed[:, None, None] * factor
        gc = draws.scenario.find(GcPauses)
        for item, dp, tp in draws.gc_pauses(len(elapsed)):
            self.gc_pauses.append((dp, tp, float(host[item, dp, tp])))
            host[item:, dp, tp] += gc.pause_s if gc else 0.0
        host += draws.data_stalls_s()
        # A piece of work is held up by its host if the host takes longer to launch it than the GPU to do it.
        index = [number for number, item in enumerate(self.program.items) if isinstance(item, Compute)]
        launch_s = host[np.array(index) + 1] - host[index]
        self._may_be_host_bound = (launch_s > self._compute_s).any(axis=(1, 2))
        return host

    def _launch_cost(self, item: Compute | Exchange | Collective, nominal: FloatArray) -> float:
        call_s = self._work.host_call_s
        match item:
            case Compute(index=index, row=row):
                return float(self._work.host_ratio * nominal[index]) + (0 if row is None else self._calls * call_s)
            case Exchange(messages=messages):
                return len(messages) * call_s
            case Collective():
                return call_s

    def compute(self, number: int, item: Compute) -> None:
        """Compute, with the all-reduces of the tensor-parallel group in between: the slower member waits less."""
        free = np.maximum(self.ready, self.host[number])
        if item.row is None:
            self._compute_start[item.index] = free
            self.ready = np.maximum(free + self._compute_s[item.index], self.host[number + 1])
            self._compute_end[item.index] = self.ready
        elif self._may_be_host_bound[item.index]:
            self._compute_held_up(number, item, item.row, free)
        else:
            arrival = self.start[item.row]
            np.add(free, self._slice_s[item.index], out=arrival)
            first = arrival.max(axis=1, keepdims=True) + self._transfer_s[item.index]
            self.end[item.row] = first + self._tail_s[item.index]
            self.ready = self.end[item.row]

    def _compute_held_up(self, number: int, item: Compute, row: int, free: FloatArray) -> None:
        """Compute slice by slice: none can end before the host has launched its last kernel."""
        transfer, slice_s = self._transfer_s[item.index], self._slice_s[item.index]
        launched, launch_s = self.host[number], (self.host[number + 1] - self.host[number]) / self._calls
        leave = free
        total, least = np.zeros(free.shape), np.full(free.shape, np.inf)
        for call in range(self._calls):
            arrival = np.maximum(leave + slice_s, launched + (call + 1) * launch_s)
            if call == 0:
                self.start[row] = arrival
            leave = np.broadcast_to(arrival.max(axis=1, keepdims=True) + transfer, free.shape)
            total += leave - arrival
            least = np.minimum(least, leave - arrival)
        self.end[row] = leave
        self.ready = self.end[row]
        self._host_bound[row] = (total, least)

    def arrive(self, number: int, item: Exchange) -> None:
        """Start the messages of a group."""
        arrival = np.maximum(self.ready, self.host[number])
        for _, row in item.messages:
            self.start[row] = arrival

    def leave(self, item: Exchange) -> None:
        """Go on once all messages of a group are through."""
        self.ready = self.end[item.messages[0][1]]
        for _, row in item.messages[1:]:
            self.ready = np.maximum(self.ready, self.end[row])

    def arrive_at(self, number: int, row: int) -> FloatArray:
        """Start a collective; return when each rank did."""
        arrival: FloatArray = self.start[row]
        np.maximum(self.ready, self.host[number], out=arrival)
        return arrival

    def leave_from(self, row: int, end: FloatArray) -> None:
        """End a collective at times that broadcast to (dp, tp)."""
        self.end[row] = end
        self.ready = self.end[row]

    def times(self) -> StageTimes:
        """Return all times, once every item is done."""
        total = self.end - self.start
        least = total.copy()
        rows = [(c.row, c.index) for c in self.program.computes if c.row is not None]
        if rows:
            row, index = np.array(rows).T
            first = self.end[row] - self._tail_s[index] - self.start[row]
            later = self._longest_s[index] - self._slice_s[index]
            total[row] = first + (self._calls - 1) * later
            least[row] = np.minimum(first, later) if self._calls > 1 else first
            self._compute_start[index] = self.start[row] - self._slice_s[index]
            self._compute_end[index] = self.end[row]
        for held_up, (row_total, row_least) in self._host_bound.items():
            total[held_up], least[held_up] = row_total, row_least
        host_start, host_end = self._host_calls()
        return StageTimes(
            self.start,
            self.end,
            total,
            least,
            host_start,
            host_end,
            self._host_call,
            self._compute_start,
            self._compute_end,
        )

    def _host_calls(self) -> tuple[FloatArray, FloatArray]:
        items: IntArray = np.array(self.program.item_of_row, np.int64)
        place = np.array([row - self.program.item_of_row.index(item) for row, item in enumerate(items.tolist())])
        start = self.host[items] + place[:, None, None] * self._host_call
        end = start + self._host_call
        rows = [c.row for c in self.program.computes if c.row is not None]
        if rows:
            launch_s = (self.host[items[rows] + 1] - self.host[items[rows]]) / self._calls
            start[rows] += launch_s - self._host_call
            end[rows] = self.host[items[rows] + 1]
        return start, end
