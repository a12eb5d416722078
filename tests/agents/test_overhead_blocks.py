"""What `make overhead` makes of blocks with and without probes, of which the truth is known."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.overhead.blocks import Block, _compared, _iterations
from tests.testbed.truth import ROW_FIELDS

MS = 1_000_000
CALLS = 47


def truth(durations_ms: list[float], begin_ns: int = 0) -> Any:
    ends = begin_ns + np.cumsum(np.array(durations_ms) * MS).astype(np.uint64)
    iterations = np.zeros(len(ends), np.dtype(list(ROW_FIELDS)))
    iterations["end_ns"], iterations["start_ns"] = ends, ends - (np.array(durations_ms) * MS).astype(np.uint64)
    return SimpleNamespace(iterations=iterations, calls=np.zeros(CALLS * len(ends)))


def block(begin_ms: float, end_ms: float, main_s: list[float], all_s: list[float]) -> Block:
    return Block(int(begin_ms * MS), int(end_ms * MS), np.array(main_s), np.array(all_s))


def test_parts_of_iterations_are_counted_and_only_whole_ones_are_timed() -> None:
    one = truth([10, 20, 20, 40, 7])
    n, seconds = _iterations(one, block(5, 70, [0], [0]))
    assert n == pytest.approx(0.5 + 2 + 20 / 40)
    assert seconds == pytest.approx(0.020)


def test_what_observing_adds_is_found_in_pairs_whatever_the_machine_did_between_them() -> None:
    observed_ms, plain_ms, n_pairs = 23.23, 23.0, 31
    random = np.random.default_rng(5)
    durations: list[float] = []
    pairs: list[dict[bool, Block]] = []
    for _ in range(n_pairs):
        burden = float(random.uniform(1, 3))  # of others on the machine, the same on both
        pair = {}
        for is_observed in (True, False):
            own_ms = burden * (observed_ms if is_observed else plain_ms)
            begin_ms = sum(durations)
            durations += [own_ms] * 11
            main = 11 * (0.001 + (CALLS * 1500e-9 if is_observed else 0))
            more = 11 * (0.002 + (CALLS * 1700e-9 if is_observed else 0))
            pair[is_observed] = block(begin_ms, begin_ms + 11 * own_ms, [main, main], [more, more])
        pairs.append(pair)
    found = _compared(pairs, [truth(durations), truth(durations)])
    assert found.n_pairs == n_pairs
    assert found.iteration_time.value == pytest.approx(0.01, rel=1e-3)
    own = found.cpu_ns_per_call
    assert [own.low, own.value, own.high] == pytest.approx([1500] * 3, rel=1e-3)
    assert found.cpu_share.value == pytest.approx(1500e-9 * 2000, rel=1e-3)
    assert found.all_cpu_share.value == pytest.approx(1700e-9 * 2000, rel=1e-3)
    assert found.cpu_without_ns_per_call == pytest.approx(1e6 / CALLS, rel=1e-3)
    assert 1000 * CALLS / 69 < found.calls_per_s < 1000 * CALLS / 23
