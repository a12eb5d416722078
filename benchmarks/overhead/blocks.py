"""With the probes and without, in turn, beside one running job: what that does to its CPU time and its iterations."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agents.overhead.costs import Floats, Interval, interval, resampled_medians
from benchmarks.overhead.job import CALLS_PER_S, Observer, keys_of
from tests.testbed.launch import Testbed
from tests.testbed.truth import RankTruth
from tests.testbed.workload import Workload

_SETTLE_S = 1.0  # after probes were placed or removed, which disturbs the ranks for about so long
_WARM_UP = 20


@dataclass(frozen=True, slots=True)
class Block:
    """A short time with the probes or without. CPU seconds are by rank, (n_ranks,)."""

    begin_ns: int
    end_ns: int
    main_cpu_s: Floats  # of the thread that trains
    all_cpu_s: Floats


@dataclass(frozen=True, slots=True)
class Compared:
    """What the probes add, by pairs of blocks."""

    n_pairs: int
    calls_per_s: float
    iteration_time: Interval  # as a share of the iteration time without
    cpu_ns_per_call: Interval  # of the thread that trains: everything that a call causes, caches included
    cpu_share: Interval  # the same, of the time of an iteration with CALLS_PER_S
    all_cpu_share: Interval  # the same, of all threads, those that stand for the GPU included
    cpu_without_ns_per_call: float  # what the thread that trains spends for each call without probes


def compare(
    observer: Observer,
    workload: Workload,
    copies: Path,
    *,
    n_pairs: int,
    block_s: float,
    progress: Callable[[str], None] = lambda _: None,
) -> Compared:
    """Run a job under pairs of blocks, each pair in an order drawn anew."""
    order = random.Random(11)
    pairs: list[dict[bool, Block]] = []
    with Testbed(workload, library_folder=copies) as testbed:
        testbed.wait_until(_WARM_UP)
        keys = keys_of(testbed)
        for turn in range(n_pairs):
            progress(f"pair {turn + 1} of {n_pairs}")
            pair = {}
            for is_observed in order.sample([True, False], 2):
                if is_observed:
                    observer.switch_on()
                    observer.follow(keys)
                observer.poll_for(_SETTLE_S)
                pair[is_observed] = _block(observer, testbed, block_s)
                if is_observed:
                    observer.switch_off()
            observer.tracer.take()
            pairs.append(pair)
        testbed.stop()
        return _compared(pairs, testbed.truth())


def _block(observer: Observer, testbed: Testbed, seconds: float) -> Block:
    before, begin_ns = [_cpu_s(pid) for pid in testbed.pids], time.monotonic_ns()
    observer.poll_for(seconds)
    spent = np.array([_cpu_s(pid) for pid in testbed.pids]) - before
    return Block(begin_ns, time.monotonic_ns(), spent[:, 0], spent[:, 1])


def _cpu_s(pid: int) -> tuple[float, float]:
    """Return the CPU time of a process's first thread, and of all that it has."""
    spent = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        spent[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return spent[pid], sum(spent.values())


def _compared(pairs: Sequence[dict[bool, Block]], truths: Sequence[RankTruth]) -> Compared:
    """Return medians over pairs; a pair's own figure is the mean over its ranks."""
    iteration_s, main_s, all_s = ({kind: np.empty((len(pairs), len(truths))) for kind in (True, False)} for _ in "123")
    for place, pair in enumerate(pairs):
        for kind, block in pair.items():
            n, iteration_s[kind][place] = np.transpose([_iterations(truth, block) for truth in truths])
            main_s[kind][place], all_s[kind][place] = block.main_cpu_s / n, block.all_cpu_s / n
    n_calls = sum(len(truth.calls) for truth in truths) / sum(len(truth.iterations) for truth in truths)
    usual_s = float(np.median(iteration_s[False]))
    more_main_s = (main_s[True] - main_s[False]).mean(axis=1)
    more_s = (all_s[True] - all_s[False]).mean(axis=1)
    return Compared(
        n_pairs=len(pairs),
        calls_per_s=n_calls / usual_s,
        iteration_time=_median((iteration_s[True] / iteration_s[False] - 1).mean(axis=1)),
        cpu_ns_per_call=_median(more_main_s / n_calls * 1e9),
        cpu_share=_median(more_main_s / n_calls * CALLS_PER_S),
        all_cpu_share=_median(more_s / n_calls * CALLS_PER_S),
        cpu_without_ns_per_call=float(np.median(main_s[False])) / n_calls * 1e9,
    )


def _iterations(truth: RankTruth, block: Block) -> tuple[float, float]:
    """Return how many iterations a rank did in a block, parts of them included, and how long the whole ones took."""
    begins, ends = (truth.iterations[name].astype(np.int64) for name in ("start_ns", "end_ns"))
    within = np.clip(np.minimum(ends, block.end_ns) - np.maximum(begins, block.begin_ns), 0, None)
    is_whole = (begins >= block.begin_ns) & (ends <= block.end_ns)
    return float((within / (ends - begins)).sum()), float(np.median((ends - begins)[is_whole])) / 1e9


def _median(values: Floats) -> Interval:
    return interval(float(np.median(values)), resampled_medians(values))
