"""Real series and traces: what is known of them must be found, and little else."""

import json  # noqa: TID251  the recordings are other people's JSON
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from detectors.bocpd import Bocpd
from detectors.cusum import Cusum
from detectors.detector import Detector, FloatArray, IntArray
from detectors.peer import Peer
from detectors.verify import Outcome, confirm, shift

HISTORY = 500
LEAST_AFTER = 4

# Series that hold one, the record at which it begins, and by how much they then are slower for twenty records or more.
LASTING = {
    ("deepseekv3-proxy-tp1-pp4-ep16-h100-short", 26): 1.14,
    ("deepseekv3-proxy-tp2-pp2-ep16-gb200", 23): 1.09,
    ("deepseekv3-proxy-tp2-pp2-ep16-gb200", 4910): 1.14,
    ("gpt3-15b-h100", 270): 1.06,
    ("gpt3-tp2-pp2-gb200", 212): 1.13,
    ("gpt3-tp2-pp2-gb200", 1405): 2.2,
}


def proposals(series: list[FloatArray]) -> list[list[tuple[int, int]]]:
    """Return for each series the (last record, first record) of every change that BOCPD or CUSUM sees in it."""
    frames = np.full((max(map(len, series)), len(series)), np.nan)
    for column, times in enumerate(series):
        frames[: len(times), column] = np.log(times)
    detectors: list[Detector] = [Bocpd(len(series)), Cusum(len(series))]
    found: list[list[tuple[int, int]]] = [[] for _ in series]
    for now, frame in enumerate(frames):
        for detector in detectors:
            run_length = detector.update(frame).run_length
            for column in np.flatnonzero(run_length).tolist():
                found[column].append((now, now - int(run_length[column]) + 1))
    return found


def confirmed(times: FloatArray, proposed: list[tuple[int, int]]) -> dict[int, float]:
    """Return ratio by first record of the proposed changes that are confirmed as slowdowns by 5 % or more."""
    found: dict[int, float] = {}
    last = -1
    for now, onset in proposed:
        if onset > last:
            # The very first iteration of a job takes several times as long, and is nobody's reference.
            change = shift(times[max(1, onset - HISTORY) : onset], times[onset : now + 1])
            if confirm(change, least_after=LEAST_AFTER).outcome is Outcome.CONFIRMED:
                found[onset] = change.ratio
                last = now
    return found


def test_of_real_iteration_times_the_lasting_slowdowns_are_confirmed_and_five_short_spells(data: Path) -> None:
    paths = sorted((data / "healthy-iteration-times").glob("*.json"))
    series = [np.array(json.loads(path.read_text())["iteration_time"]) for path in paths]
    assert sum(map(len, series)) == 22_678
    spells = {
        (path.stem, onset): ratio
        for path, times, proposed in zip(paths, series, proposals(series), strict=True)
        for onset, ratio in confirmed(times, proposed).items()
    }
    assert {place: ratio for place, ratio in spells.items() if place in LASTING} == pytest.approx(LASTING, rel=0.05)
    assert len(spells.keys() - LASTING.keys()) <= 5


def computation(path: Path) -> tuple[IntArray, IntArray, FloatArray]:
    """Return rank (n,), pipeline stage (n,), and seconds of forward and backward computation (n_iterations, n)."""
    columns = pq.read_table(path, columns=["rank", "stage", "step", "optype", "duration"]).to_pydict()
    rows = zip(*columns.values(), strict=True)
    stage_of, total = {}, Counter[tuple[int, int]]()
    for rank, stage, iteration, op, duration_s in rows:
        stage_of[rank] = stage
        if op in {"forward-compute", "backward-compute"}:
            total[iteration, rank] += duration_s
    ranks = np.array(sorted(stage_of))
    iterations = sorted({iteration for iteration, _ in total})
    seconds = np.array([[total[iteration, rank] for rank in ranks.tolist()] for iteration in iterations], np.float64)
    return ranks, np.array([stage_of[rank] for rank in ranks.tolist()]), seconds


@pytest.mark.parametrize(("trace", "slow"), [("AR", [0]), ("ST", []), ("SE", [])])
def test_of_real_traces_the_one_slow_worker_is_found_and_no_healthy_one(
    data: Path, trace: str, slow: list[int]
) -> None:
    ranks, stages, seconds = computation(data / "straggler-analysis" / f"trace-{trace}.parquet")
    detector = Peer(stages)
    alarms = np.array([detector.update(frame).alarm for frame in np.log(seconds)])
    assert ranks[alarms.any(axis=0)].tolist() == slow
    assert all(np.flatnonzero(alarms[:, ranks == rank])[0] <= 5 for rank in slow)
