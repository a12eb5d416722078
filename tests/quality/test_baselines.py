"""One contract for all baselines, and for each the case that its source says it is for and one that it cannot see.

Those whose package is in the group `baselines` need it installed (`make baselines`): skipped without, but not in CI.
"""

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.quality.baselines.baseline import Baseline, Detection, Input, Observed, Unseen
from benchmarks.quality.baselines.bocd_package import BocdPackage
from benchmarks.quality.baselines.dlrover import DlRover
from benchmarks.quality.baselines.feed import series_by_incarnation
from benchmarks.quality.baselines.longest_collective import LongestCollective
from benchmarks.quality.baselines.megatron import MegatronReport
from benchmarks.quality.baselines.nvrx import Nvrx
from benchmarks.quality.baselines.packages import Missing, load
from benchmarks.quality.baselines.rbeast_falcon import RbeastFalcon
from benchmarks.quality.baselines.registry import BASELINES
from benchmarks.quality.baselines.river_drift import adwin, kswin, page_hinkley
from benchmarks.quality.baselines.ruptures_offline import RupturesOffline
from benchmarks.quality.chain import Chain
from benchmarks.synthetic_job import SyntheticJob
from schemas.table import FloatArray
from tests.conftest import give_up

N, ONSET, END = 251, 101, 191
WORLD, CULPRIT = 7, 5
ALL: dict[str, Callable[[], Baseline]] = BASELINES | {
    "failslow": Chain,
    "falcon": lambda: RbeastFalcon(round_s=29.0),  # each look takes a fifth of a second
}


def times(slowdown: float = 1.6, *, noise: float = 0.02, seed: int = 11) -> FloatArray:
    duration_s = np.exp(np.random.default_rng(seed).normal(0.0, noise, N))
    duration_s[ONSET:END] *= slowdown
    return duration_s


def job(slowdown: float = 1.6, *, noise: float = 0.02, seed: int = 11) -> Observed:
    """A job whose rank 5 computes longer for a while; the others wait for it in their collectives."""
    random = np.random.default_rng(seed)
    compute_s = 0.8 * np.exp(random.normal(0.0, noise, (N, WORLD)))
    compute_s[ONSET:END, CULPRIT] *= slowdown
    duration_s = compute_s.max(axis=1) + 0.2
    return Observed(
        duration_s=duration_s,
        compute_s=compute_s,
        communication_s=duration_s[:, None] - compute_s,
        node=np.arange(WORLD),
    )


def judged(baseline: Baseline, observed: Observed) -> list[Detection]:
    try:
        return baseline.judges(observed)
    except Missing as missing:
        give_up(str(missing))


def slower(detections: list[Detection]) -> list[Detection]:
    return [d for d in detections if d.is_slower]


@pytest.fixture(params=sorted(ALL))
def baseline(request: pytest.FixtureRequest) -> Baseline:
    return ALL[request.param]()


def test_statements_come_in_order_and_name_what_was_observed(baseline: Baseline) -> None:
    found = judged(baseline, job())
    assert [d.at for d in found] == sorted(d.at for d in found)
    for detection in found:
        assert 0 <= detection.at < N
        assert detection.onset is None or 0 <= detection.onset <= detection.at
        assert detection.rank is None or 0 <= detection.rank < WORLD


def test_the_same_job_gives_the_same_statements_and_is_left_as_it_was(baseline: Baseline) -> None:
    observed = job()
    before = [None if a is None else a.copy() for a in (observed.duration_s, observed.compute_s)]
    first = judged(baseline, observed)
    assert judged(baseline, observed) == first
    for array, copy in zip((observed.duration_s, observed.compute_s), before, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_what_is_online_stands_on_nothing_later(baseline: Baseline) -> None:
    if not baseline.is_online:
        return
    cut = 149
    observed = job()
    assert observed.compute_s is not None
    assert observed.communication_s is not None
    part = Observed(
        duration_s=observed.duration_s[:cut],
        compute_s=observed.compute_s[:cut],
        communication_s=observed.communication_s[:cut],
        node=observed.node,
    )
    assert judged(baseline, part) == [d for d in judged(baseline, observed) if d.at < cut]


def test_what_needs_ranks_says_so_where_they_were_not_seen(baseline: Baseline) -> None:
    if baseline.needs <= {Input.DURATION}:
        judged(baseline, Observed(duration_s=times()))
        return
    with pytest.raises(Unseen, match=baseline.name):
        baseline.judges(Observed(duration_s=times()))


def test_a_missing_iteration_is_left_out_and_nothing_is_made_of_an_empty_job(baseline: Baseline) -> None:
    duration_s = times()
    duration_s[[3, 97, ONSET]] = np.nan
    if baseline.needs <= {Input.DURATION}:
        assert all(np.isfinite(duration_s[d.at]) for d in judged(baseline, Observed(duration_s=duration_s)))
    nothing = np.empty((0, WORLD))
    assert judged(baseline, Observed(duration_s=np.empty(0), compute_s=nothing, communication_s=nothing)) == []


@pytest.mark.parametrize("name", ["nvrx", "falcon", "bocd", "adwin", "kswin", "pelt", "binseg", "failslow"])
def test_a_job_that_takes_much_longer_for_a_while_is_found_by_its_iteration_time(name: str) -> None:
    found = slower(judged(ALL[name](), Observed(duration_s=times())))
    assert found
    assert ONSET - (0 if ALL[name]().is_online else 5) <= found[0].at < END
    assert all(d.rank is None for d in found)


def test_page_hinkley_at_rivers_threshold_is_blind_to_ratios_and_finds_them_at_a_smaller_one() -> None:
    observed = Observed(duration_s=times())
    assert page_hinkley().judges(observed) == []
    assert ONSET <= slower(page_hinkley(1.0).judges(observed))[0].at < ONSET + 20


def test_adwin_looks_at_every_value_only_with_a_clock_of_one() -> None:
    observed = Observed(duration_s=times())
    assert slower(adwin(clock=1).judges(observed))[0].at <= slower(adwin().judges(observed))[0].at
    assert slower(adwin(is_standardised=True, clock=1).judges(observed))[0].at < ONSET + 20


def test_kswin_samples_alike_in_every_run() -> None:
    observed = Observed(duration_s=times(1.1, noise=0.05))
    assert kswin().judges(observed) == kswin().judges(observed)


def test_bocd_learns_the_spread_only_with_the_update_corrected() -> None:
    # Noise of a tenth of what the first values show: the release goes on to believe in a spread above one.
    random = np.random.default_rng(5)
    duration_s = np.exp(np.concatenate([random.normal(0.0, 0.1, 60), random.normal(0.0, 0.01, N - 60)]))
    duration_s[ONSET:] *= 1.08
    observed = Observed(duration_s=duration_s)
    near = range(ONSET, ONSET + 15)
    assert any(d.at in near for d in slower(judged(BocdPackage(is_corrected=True), observed)))
    assert not any(d.at in near for d in slower(judged(BocdPackage(), observed)))


def test_the_falcon_artefact_leaves_out_changes_below_a_tenth() -> None:
    assert judged(RbeastFalcon(round_s=29.0), Observed(duration_s=times(1.08, noise=0.005))) == []
    found = judged(RbeastFalcon(round_s=29.0), Observed(duration_s=times(1.15, noise=0.005)))
    assert [d.is_slower for d in found] == [True, False]
    assert found[0].onset is not None
    assert abs(found[0].onset - ONSET) <= 2


def test_offline_segmentation_finds_both_ends() -> None:
    for method in ("Pelt", "Binseg"):
        found = judged(RupturesOffline(method), Observed(duration_s=times()))
        ends = {d.is_slower: d.at for d in found}
        assert abs(ends[True] - ONSET) <= 5
        assert abs(ends[False] - END) <= 5


def test_nvrx_scores_name_the_slow_rank_and_want_a_third_more_time() -> None:
    assert {d.rank for d in judged(Nvrx(), job())} == {CULPRIT}
    assert judged(Nvrx(), job(1.3)) == []
    assert {d.rank for d in judged(Nvrx(threshold=0.85), job(1.3))} == {CULPRIT}


def test_ranks_that_compute_for_no_time_have_no_score_by_nvrx_and_the_others_have_one() -> None:
    observed = job()
    assert observed.compute_s is not None
    observed.compute_s[:, 2] = 0.0
    assert {d.rank for d in judged(Nvrx(), observed)} == {CULPRIT}


def test_nvrx_runs_its_own_code_and_leaves_no_stand_in_behind() -> None:
    import sys

    before = sys.modules.get("torch")
    judged(Nvrx(), job())
    assert sys.modules.get("torch") is before


def test_dlrover_wants_twice_the_median() -> None:
    assert DlRover().judges(job(1.6)) == []
    found = DlRover().judges(job(2.5))
    assert [(d.rank, d.at) for d in found] == [(CULPRIT, ONSET)]


def test_dlrover_cannot_tell_one_of_two_nodes() -> None:
    observed = job(30.0)
    two = Observed(duration_s=observed.duration_s, compute_s=observed.compute_s, node=np.arange(WORLD) // 4)
    assert DlRover().judges(two) == []


def test_megatron_names_a_slowest_rank_whether_or_not_anything_is_wrong() -> None:
    assert len(MegatronReport().judges(job(1.0))) == 2
    assert {d.rank for d in MegatronReport(least_ratio=1.2).judges(job())} == {CULPRIT}
    assert MegatronReport(least_ratio=1.2).judges(job(1.0)) == []


def test_the_longest_collective_never_belongs_to_the_culprit() -> None:
    observed = job(1.6, noise=0.002)
    assert observed.communication_s is not None
    observed.communication_s[ONSET:END, 2] *= 1.5  # one victim waits longer than the others
    assert {d.rank for d in LongestCollective().judges(observed)} == {2}


def test_a_package_that_is_not_there_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Missing, match="make baselines"):
        load("no_such_baseline")


def test_recordings_show_baselines_what_the_ranks_reported() -> None:
    synthetic = SyntheticJob(1, 1, 16, seed=3)
    slowdown = np.ones(16)
    slowdown[CULPRIT] = 2.5
    records = [r for i in range(43) for r in synthetic.records(i, slowdown if i >= 23 else 1.0)]
    (series,) = series_by_incarnation(records).values()
    assert series.iteration.tolist() == list(range(43))
    assert series.observed.node is not None
    assert series.observed.node.tolist() == [0] * 8 + [1] * 8
    assert series.observed.compute_s is not None
    assert series.observed.compute_s.shape == (43, 16)
    assert series.observed.duration_s[23:].min() > 2 * series.observed.duration_s[:23].max()
    assert series.observed.compute_s[23:].argmax(axis=1).tolist() == [CULPRIT] * 20
