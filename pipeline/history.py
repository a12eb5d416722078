"""The last ordinary frames of one job, as arrays: what every question about the past is answered from."""

from dataclasses import dataclass, field

import numpy as np

from pipeline.frames import Frame, Signal
from pipeline.groups import median_error
from schemas.table import AnyArray, FloatArray, IntArray

Float32Array = AnyArray
_LUCK = 1.5  # standard errors by which the lowest of some ten medians lies below their mean
_LEVEL_FRAMES = 24  # whose median is a level of the job: off by a quarter of its noise
HOST_SIGNALS = (Signal.RUN_QUEUE, Signal.BLOCKED, Signal.STOPPED, Signal.THROTTLED)  # what kept a process from running


@dataclass(slots=True)
class History:
    """A ring of `capacity` frames; memory is bounded by capacity x (7 x world_size + n_series) x 4 bytes."""

    world_size: int
    capacity: int = 128
    n_frames: int = 0  # ever pushed
    iterations: IntArray = field(init=False)
    end_ns: IntArray = field(init=False)
    duration_s: FloatArray = field(init=False)
    _compute: Float32Array = field(init=False)
    _host: Float32Array = field(init=False)
    _clock: Float32Array = field(init=False)
    _host_signals: dict[Signal, Float32Array] = field(init=False)
    _transfers: Float32Array = field(init=False)

    def __post_init__(self) -> None:
        self.iterations = np.zeros(self.capacity, np.int64)
        self.end_ns = np.zeros(self.capacity, np.int64)
        self.duration_s = np.full(self.capacity, np.nan)
        shape = (self.capacity, self.world_size)
        self._compute, self._host, self._clock = (np.full(shape, np.nan, np.float32) for _ in range(3))
        self._host_signals = {signal: np.full(shape, np.nan, np.float32) for signal in HOST_SIGNALS}
        self._transfers = np.full((self.capacity, 0), np.nan, np.float32)

    def push(self, frame: Frame, duration_s: float, transfers: FloatArray, usable: AnyArray) -> None:
        """Append a frame; ranks outside `usable` (world_size,) and everything not seen are NaN.

        The host's own time is the iteration less its wait for the GPU.
        """
        self._grow(len(transfers))
        slot = self.n_frames % self.capacity
        self.n_frames += 1
        self.iterations[slot] = frame.iteration
        self.end_ns[slot] = frame.end_ns
        self.duration_s[slot] = duration_s
        host = frame.signal(Signal.DURATION) - frame.signal(Signal.HOST_WAIT)
        for store, values in (
            (self._compute, frame.signal(Signal.COMPUTE)),
            (self._host, host),
            (self._clock, frame.signal(Signal.SM_CLOCK)),
            *((store, frame.signal(signal)) for signal, store in self._host_signals.items()),
        ):
            store[slot] = np.where(usable, values, np.nan)
        self._transfers[slot] = np.nan
        self._transfers[slot, : len(transfers)] = transfers

    def _grow(self, n_series: int) -> None:
        more = n_series - self._transfers.shape[1]
        if more > 0:
            room = np.full((self.capacity, max(more, self._transfers.shape[1] // 2)), np.nan, np.float32)
            self._transfers = np.concatenate([self._transfers, room], axis=1)

    @property
    def first(self) -> int:
        """The number of the oldest frame still held; frames are numbered by order of arrival, from 0."""
        return max(0, self.n_frames - self.capacity)

    def slots(self, start: int, stop: int) -> IntArray:
        """Return where frames start..stop-1 lie, as far as they are still held."""
        return np.arange(max(start, self.first), min(stop, self.n_frames)) % self.capacity

    def durations(self, start: int, stop: int) -> FloatArray:
        """Return the job's iteration times of frames start..stop-1, seconds."""
        return self.duration_s[self.slots(start, stop)]

    def fastest(self, stop: int) -> float:
        """Return the lowest median of successive blocks of frames before `stop`, seconds; infinite without a block.

        The lowest of several is too low by chance, so that what chance brings is added.
        """
        times_s, n = self.durations(self.first, stop), _LEVEL_FRAMES
        blocks = [times_s[i : i + n] for i in range(0, len(times_s) - n + 1, n)]
        if not blocks:
            return float("inf")
        lowest = min(blocks, key=lambda block: float(np.median(block)))
        return min(float(np.median(lowest)) + _LUCK * median_error(lowest), float(np.median(times_s)))

    def compute(self, start: int, stop: int) -> FloatArray:
        """Return (n, world_size) computation times, seconds."""
        return self._compute[self.slots(start, stop)].astype(np.float64)

    def host(self, start: int, stop: int) -> FloatArray:
        """Return (n, world_size) times the hosts were busy themselves, seconds."""
        return self._host[self.slots(start, stop)].astype(np.float64)

    def clock(self, start: int, stop: int) -> FloatArray:
        """Return (n, world_size) SM clocks over their maximum."""
        return self._clock[self.slots(start, stop)].astype(np.float64)

    def host_signal(self, signal: Signal, start: int, stop: int) -> FloatArray:
        """Return (n, world_size) of one of HOST_SIGNALS, seconds per second."""
        return self._host_signals[signal][self.slots(start, stop)].astype(np.float64)

    def transfers(self, start: int, stop: int, n_series: int) -> FloatArray:
        """Return (n, n_series) shortest calls of the transfer series, seconds."""
        self._grow(n_series)
        return self._transfers[self.slots(start, stop), :n_series].astype(np.float64)

    def iterations_held(self) -> IntArray:
        """Return the iterations of all frames that are held, oldest first."""
        return self.iterations[self.slots(self.first, self.n_frames)]

    def iteration_at(self, number: int) -> int:
        """Return the iteration of a frame that is still held (the oldest one's, where it is not)."""
        return int(self.iterations[min(max(number, self.first), self.n_frames - 1) % self.capacity])

    def time_at(self, number: int) -> int:
        """Return when the iteration of a held frame began, nanoseconds."""
        slot = min(max(number, self.first), self.n_frames - 1) % self.capacity
        duration_s = self.duration_s[slot]
        return int(self.end_ns[slot]) - (int(duration_s * 1e9) if np.isfinite(duration_s) else 0)
