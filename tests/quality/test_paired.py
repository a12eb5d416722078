"""Comparisons on splices: who is ahead, what is remembered, and what a judge without a parameter is not asked."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality.chain import Chain
from benchmarks.quality.compare_series import judged
from benchmarks.quality.curves import Outcomes, Scored, resampled
from benchmarks.quality.paired import OURS, Paired, before_only, defaults, paired, settings
from benchmarks.quality.splices import Splice
from benchmarks.quality.sweeps import METHODS
from pipeline.judge_params import DEFAULTS

N = 83


def outcomes(before: int, after: int, missed: int) -> Outcomes:
    """Every splice with so many extra alarms; every `missed`th was missed."""
    delays = [float("nan") if i % missed == 0 else 3.0 for i in range(N)]
    return Outcomes.of("one", [Scored(before=before, after=after, delay=d, iterations=1000) for d in delays])


def row(rows: list[Paired], equal: str, at: float) -> Paired:
    (found,) = (one for one in rows if (one.equal, one.at) == (equal, at))
    return found


def test_who_finds_more_with_fewer_alarms_is_ahead_in_both_and_the_other_is_not() -> None:
    better, worse = [outcomes(0, 0, 20)], [outcomes(0, 1, 3)]
    rows = paired({OURS: better, "other": worse}, resampled(N, 1))
    assert row(rows, "extra", 10.0).verdict == "yes"
    assert row(rows, "recall", 0.5).verdict == "yes"
    assert np.isinf(row(rows, "recall", 0.8).other)
    turned = paired({OURS: worse, "other": better}, resampled(N, 1))
    assert row(turned, "extra", 10.0).verdict == "no"
    assert row(turned, "recall", 0.8).verdict == "no"
    same = paired({OURS: better, "other": better}, resampled(N, 1))
    assert {one.verdict for one in same} == {"open"}


def test_repeated_alarms_can_be_forgiven_and_those_before_the_onset_never() -> None:
    one = outcomes(2, 5, 20)
    assert before_only(one).extra.tolist() == [2.0] * N
    assert one.extra.tolist() == [7.0] * N


def test_defaults_and_settings_are_told_as_observed() -> None:
    found = {"other": [outcomes(1, 0, 2), outcomes(0, 3, 20)]}
    (default,) = defaults(found, {"other": 1}, resampled(N, 1))
    assert default.extra_per_10000[0] == pytest.approx(30.0)
    assert default.before_per_10000 == 0.0
    assert default.recall[0] == pytest.approx(78 / 83)
    assert [one.extra_per_10000 for one in settings(found)] == pytest.approx([10.0, 30.0])


def test_what_a_method_made_of_the_same_splices_is_read_and_of_others_made_anew(tmp_path: Path) -> None:
    kept = tmp_path / "series.jsonl"
    times = np.exp(np.random.default_rng(5).normal(0.0, 0.05, (2, 97)))
    times[:, 53:] *= 1.5
    given = [Splice(duration_s=one, onset=53) for one in times]
    name = "River PageHinkley"
    first = judged(given, [name], 1, kept)[name]
    lines = kept.read_bytes().splitlines()
    assert len(lines) == len(list(METHODS[name]()))
    again = judged(given, [name], 1, kept)[name]
    assert kept.read_bytes().splitlines() == lines
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.delay, other.delay)
        np.testing.assert_array_equal(one.extra, other.extra)
    judged(given[:1], [name], 1, kept)
    assert len(kept.read_bytes().splitlines()) == 2 * len(lines)


def test_the_judge_is_swept_over_its_evidence_on_either_side_of_its_default() -> None:
    made = [setting.make() for setting in METHODS[OURS]()]
    swept = [chain.params.evidence for chain in made if isinstance(chain, Chain)]
    assert len(swept) == len(set(swept)) == len(made)
    assert min(swept) < DEFAULTS.evidence < max(swept)
    assert [setting.is_default for setting in METHODS[OURS]()].count(True) == 1
