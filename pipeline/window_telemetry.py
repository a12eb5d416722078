"""What the samples of GPUs and hosts say of an iteration: those taken within it, else the last one if it is fresh."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.window_blocks import Closed
from pipeline.window_calls import by_rank
from schemas.events import EventBatch
from schemas.table import AnyArray, FloatArray

_KEPT = 256  # samples per GPU and per rank
_FRESH_NS = 2_500_000_000
_GPU = ("time_ns", "sm_clock_hz", "sm_clock_max_hz", "throttle_reasons", "throttle_known", "temperature_c")
_HOST = ("time_ns", "run_queue_ratio", "blocked_ratio")

Samples = dict[str, AnyArray]  # by column, in the order of time_ns


@dataclass(slots=True, eq=False)
class Telemetry:
    """The latest samples of one node."""

    COLUMNS = (
        "sm_clock_ratio",
        "temperature_c",
        "run_queue_ratio",
        "blocked_ratio",
        "throttle_reasons",
        "throttle_known",
    )

    _gpu: dict[int, Samples] = field(default_factory=dict)
    _host: dict[int, Samples] = field(default_factory=dict)
    _gpu_of: dict[int, int] = field(default_factory=dict)
    _fresh_ns: int = _FRESH_NS

    def learn(self, batch: EventBatch, ranks: Iterable[int]) -> None:
        """Take in the samples of a batch, of GPUs and ranks that have a stream."""
        self._fresh_ns = max(_FRESH_NS, 2 * batch.flush_interval_ns)
        known = set(ranks)
        self._gpu_of.update({i.rank: i.gpu for i in batch.ranks if i.gpu is not None and i.rank in known})
        _keep(self._gpu, batch.gpu_samples.gpu, batch.gpu_samples, _GPU, set(self._gpu_of.values()))
        _keep(self._host, batch.host_samples.rank, batch.host_samples, _HOST, known)

    def describe(self, closed: Closed) -> dict[str, AnyArray]:
        """Return the telemetry columns of IterationRows for one rank's iterations, (n,) each."""
        n = len(closed.mark)
        columns: dict[str, AnyArray] = {name: np.full(n, np.nan) for name in self.COLUMNS[:4]}
        columns |= {"throttle_reasons": np.zeros(n, np.uint64), "throttle_known": np.zeros(n, bool)}
        gpu = self._gpu.get(self._gpu_of.get(closed.rank, -1))
        if gpu is not None:
            first, last, has = self._range(gpu["time_ns"], closed)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = gpu["sm_clock_hz"] / gpu["sm_clock_max_hz"]
            ratio[~np.isfinite(ratio)] = np.nan
            columns["sm_clock_ratio"] = np.where(has, ratio[last - 1], np.nan)
            columns["temperature_c"] = np.where(has, gpu["temperature_c"][last - 1], np.nan)
            known = gpu["throttle_known"] != 0
            reasons = np.where(known, gpu["throttle_reasons"], np.uint64(0))
            columns["throttle_reasons"] = np.where(has, _reduced(np.bitwise_or, reasons, first, last), np.uint64(0))
            columns["throttle_known"] = has & _reduced(np.logical_or, known, first, last)
        host = self._host.get(closed.rank)
        if host is not None:
            first, last, has = self._range(host["time_ns"], closed)
            for name in ("run_queue_ratio", "blocked_ratio"):
                columns[name] = np.where(has, _means(host[name], first, last), np.nan)
        return columns

    def _range(self, time_ns: AnyArray, closed: Closed) -> tuple[AnyArray, AnyArray, AnyArray]:
        """Return the first and the end of the samples of each iteration, and whether there are any."""
        last = np.searchsorted(time_ns, closed.end_ns, "right")
        first = np.minimum(np.searchsorted(time_ns, closed.start_ns, "right"), last)
        age_ns = closed.end_ns - time_ns[np.maximum(last - 1, 0)]
        length_ns = np.nan_to_num(closed.duration_s, nan=0.0) * 1e9
        has = (last > first) | ((last > 0) & (age_ns <= np.maximum(self._fresh_ns, length_ns)))
        first = np.where(last > first, first, np.maximum(last - 1, 0))
        return first, np.maximum(last, 1), has


def _keep(kept: dict[int, Samples], owners: AnyArray, table: Any, names: tuple[str, ...], known: set[int]) -> None:
    for owner, rows in by_rank(owners):
        if owner not in known:
            continue
        new = {name: getattr(table, name)[rows] for name in names}
        old = kept.get(owner)
        both = new if old is None else {name: np.concatenate((old[name], new[name])) for name in names}
        time_ns = both["time_ns"]
        if (time_ns[1:] < time_ns[:-1]).any():
            order = np.argsort(time_ns, kind="stable")
            both = {name: column[order] for name, column in both.items()}
        kept[owner] = {name: column[-_KEPT:] for name, column in both.items()}


def _reduced(function: np.ufunc, values: AnyArray, first: AnyArray, last: AnyArray) -> AnyArray:
    """Return (n,): a function over values[first[i]:last[i]], none of which is empty."""
    padded = np.append(values, np.zeros(1, values.dtype))
    pairs = np.stack((first, last), axis=1).ravel()
    return np.asarray(function.reduceat(padded, pairs)[::2]) if len(pairs) else padded[:0]


def _means(values: AnyArray, first: AnyArray, last: AnyArray) -> FloatArray:
    """Return (n,): the mean of the known values[first[i]:last[i]], NaN where none is."""
    is_known = np.isfinite(values)
    total = np.concatenate(([0.0], np.cumsum(np.where(is_known, values, 0.0))))
    count = np.concatenate(([0], np.cumsum(is_known)))
    n_known = count[last] - count[first]
    return np.where(n_known > 0, (total[last] - total[first]) / np.maximum(n_known, 1), np.nan)
