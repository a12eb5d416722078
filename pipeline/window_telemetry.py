"""What the samples of GPUs and hosts say of an iteration.

A GPU's sample is of one instant: those taken within the iteration count, else the last one before, if it is fresh. A
host's sample is of the interval that ends with it, so what it says of an iteration shorter than that comes afterwards.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Generic

import numpy as np

from schemas.events import EventBatch, GpuSamples, HostSamples
from schemas.table import AnyArray, BoolArray, FloatArray, IntArray, TableT

_KEPT = 256  # samples per GPU and per rank
_FRESH_NS = 2_500_000_000
_TIME_BITS = 45  # ten hours of nanoseconds
_GPU_COLUMNS = ("sm_clock_ratio", "temperature_c")
_HOST_COLUMNS = ("run_queue_ratio", "blocked_ratio", "stopped_ratio", "throttled_ratio")


@dataclass(frozen=True, slots=True, eq=False)
class _Range:
    """Which samples belong to each iteration: [first, last), never empty, but to be believed only where `has`."""

    first: IntArray
    last: IntArray
    has: BoolArray


@dataclass(slots=True, eq=False)
class _Samples(Generic[TableT]):
    """The latest samples of one kind, in the order of owner and time; owner is a GPU or a rank."""

    table: TableT
    owner: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    time_ns: IntArray = field(default_factory=lambda: np.empty(0, np.int64))

    def add(self, owner: AnyArray, time_ns: AnyArray, more: TableT) -> None:
        """Take in samples; of each owner the latest _KEPT stay."""
        if not len(more):
            return
        owners, times = np.append(self.owner, owner.astype(np.int64)), np.append(self.time_ns, time_ns)
        order = np.lexsort((times, owners))
        owners = owners[order]
        is_old = np.append(owners[_KEPT:] == owners[:-_KEPT], np.zeros(min(_KEPT, len(owners)), bool))
        order = order[~is_old]
        self.table = type(more).concatenate([self.table, more]).take(order)
        self.owner, self.time_ns = owners[~is_old], times[order]

    def within(
        self, owner: IntArray, start_ns: IntArray, end_ns: IntArray, fresh_ns: IntArray, *, of_intervals: bool = False
    ) -> _Range:
        """Return the samples of (start_ns, end_ns], else the last one before, which must not be older than fresh_ns.

        Of intervals also the first one from end_ns on, unless it comes more than fresh_ns later.
        """
        base_ns = int(end_ns.max())  # not a sample's time, which may be wrong

        def placed(owners: IntArray, times: IntArray) -> IntArray:
            span = 1 << (_TIME_BITS - 1)
            return (owners << _TIME_BITS) + np.minimum(np.maximum(times - base_ns, -span), span - 1)

        names = placed(self.owner, self.time_ns)
        last = names.searchsorted(placed(owner, end_ns), "right")
        first = np.minimum(names.searchsorted(placed(owner, start_ns), "right"), last)
        if of_intervals:
            following = np.minimum(last, len(names) - 1)
            covers = (last < len(names)) & (self.owner[following] == owner)
            covers &= self.time_ns[following] - end_ns <= fresh_ns
            covers &= (last == first) | (self.time_ns[last - 1] < end_ns)
            last = last + covers
        newest = np.maximum(last - 1, 0)
        is_own = (last > 0) & (self.owner[newest] == owner)
        has = is_own & ((last > first) | (end_ns - self.time_ns[newest] <= fresh_ns))
        return _Range(np.where(is_own & (last > first), first, newest), np.maximum(last, 1), has)


@dataclass(slots=True, eq=False)
class Telemetry:
    """The latest samples of one node."""

    _gpu: _Samples[GpuSamples] = field(default_factory=lambda: _Samples(GpuSamples.empty()))
    _host: _Samples[HostSamples] = field(default_factory=lambda: _Samples(HostSamples.empty()))
    _gpu_of: dict[int, int] = field(default_factory=dict)
    _fresh_ns: int = _FRESH_NS

    COLUMNS = (
        *_GPU_COLUMNS,
        *_HOST_COLUMNS,
        "throttle_reasons",
        "throttle_known",
    )

    def learn(self, batch: EventBatch, ranks: Collection[int]) -> None:
        """Take in the samples of a batch, of GPUs and ranks that have a stream."""
        self._fresh_ns = max(_FRESH_NS, 2 * batch.flush_interval_ns)
        for info in batch.ranks:
            if info.gpu is not None and info.rank in ranks:
                self._gpu_of[info.rank] = info.gpu
        gpus, hosts = batch.gpu_samples, batch.host_samples
        if len(gpus):
            gpus = gpus.take(np.isin(gpus.gpu, list(self._gpu_of.values())))
            self._gpu.add(gpus.gpu, gpus.time_ns, gpus)
        if len(hosts):
            hosts = hosts.take(np.isin(hosts.rank, list(ranks)))
            self._host.add(hosts.rank, hosts.time_ns, hosts)

    def describe(
        self, rank: IntArray, start_ns: IntArray, end_ns: IntArray, duration_s: FloatArray
    ) -> dict[str, AnyArray]:
        """Return the telemetry columns of IterationRows for iterations, (n,) each."""
        columns: dict[str, AnyArray] = {name: np.full(len(rank), np.nan) for name in (*_GPU_COLUMNS, *_HOST_COLUMNS)}
        columns |= {"throttle_reasons": np.zeros(len(rank), np.uint64), "throttle_known": np.zeros(len(rank), bool)}
        length_ns = np.where(np.isfinite(duration_s), duration_s, 0.0) * 1e9
        fresh_ns = np.maximum(self._fresh_ns, length_ns).astype(np.int64)
        if len(self._gpu.owner):
            gpu = np.array([self._gpu_of.get(r, -1) for r in rank.tolist()])
            columns |= _gpu_columns(self._gpu.table, self._gpu.within(gpu, start_ns, end_ns, fresh_ns))
        if len(self._host.owner):
            found = self._host.within(rank, start_ns, end_ns, fresh_ns, of_intervals=True)
            for name in _HOST_COLUMNS:
                columns[name] = _means(getattr(self._host.table, name), found)
        return columns


def _gpu_columns(samples: GpuSamples, found: _Range) -> dict[str, AnyArray]:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = samples.sm_clock_hz / samples.sm_clock_max_hz
    ratio = np.where(np.isfinite(ratio), ratio, np.nan)
    is_known = samples.throttle_known != 0
    reasons = np.where(is_known, samples.throttle_reasons, np.uint64(0))
    return {
        "sm_clock_ratio": np.where(found.has, ratio[found.last - 1], np.nan),
        "temperature_c": np.where(found.has, samples.temperature_c[found.last - 1], np.nan),
        "throttle_reasons": np.where(found.has, _reduced(np.bitwise_or, reasons, found), np.uint64(0)),
        "throttle_known": found.has & _reduced(np.logical_or, is_known, found),
    }


def _reduced(function: np.ufunc, values: AnyArray, found: _Range) -> AnyArray:
    """Return (n,): a function over the values of each range."""
    padded = np.append(values, np.zeros(1, values.dtype))
    pairs = np.stack((found.first, found.last), axis=1).ravel()
    return np.asarray(function.reduceat(padded, pairs)[::2]) if len(pairs) else padded[:0]


def _means(values: AnyArray, found: _Range) -> FloatArray:
    """Return (n,): the mean of the known values of each range, NaN where none is."""
    is_known = np.isfinite(values)
    total = np.concatenate(([0.0], np.cumsum(np.where(is_known, values, 0.0), dtype=np.float64)))
    count = np.concatenate(([0], np.cumsum(is_known)))
    n_known = count[found.last] - count[found.first]
    means = (total[found.last] - total[found.first]) / np.maximum(n_known, 1)
    return np.where(found.has & (n_known > 0), means, np.nan)
