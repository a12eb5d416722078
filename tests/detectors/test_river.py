"""River's detectors behind the protocol, and BOCPD in River's own form, held to River's own checks."""

import doctest
import importlib
import pickle
import sys
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
from river import checks, drift

from detectors import river_bocpd
from detectors.adwin import Adwin
from detectors.bocpd import Bocpd
from detectors.null import Null
from detectors.page_hinkley import PageHinkley
from detectors.river_bocpd import BOCPD


@pytest.fixture
def all_checks(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[BOCPD], None]]:
    """River's checks for this estimator.

    River imports scikit-learn before it decides that a drift detector needs none of its data sets.
    """
    for name in ("base", "compose", "datasets", "preprocessing", "stream", "time_series.base", "utils"):
        importlib.import_module(f"river.{name}")
    stand_in = ModuleType("sklearn")
    stand_in.datasets = ModuleType("sklearn.datasets")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sklearn", stand_in)
    return list(checks.yield_checks(BOCPD()))


def test_bocpd_passes_rivers_estimator_checks(all_checks: list[Callable[[BOCPD], None]]) -> None:
    names = {check.__name__ for check in all_checks}
    assert {"check_clone_is_idempotent", "check_pickling_supports_roundtrip", "check_doc"} <= names
    assert len(names) >= 14
    for check in all_checks:
        check(BOCPD().clone())
        check(BOCPD(short=7, threshold=0.8).clone())


def test_the_example_in_its_documentation_runs_as_printed() -> None:
    result = doctest.testmod(river_bocpd)
    assert result.failed == 0
    assert result.attempted >= 4


def stream(seed: int, n: int, onset: int, shift: float) -> list[float]:
    values = np.random.default_rng(seed).normal(0.0, 1.0, n)
    values[onset:] += shift
    return [float(value) for value in values]


def test_bocpd_reports_a_drift_once_and_goes_on_by_itself() -> None:
    values = stream(6, 307, 101, 5.0)
    values[211:] = [value - 5.0 for value in values[211:]]
    detector = BOCPD()
    drifts = []
    for position, value in enumerate(values):
        detector.update(value)
        if detector.drift_detected:
            drifts.append((position, position - detector.run_length + 1))
    assert [change for _, change in drifts] == [101, 211]
    assert all(position - change <= 4 for position, change in drifts)


def test_bocpd_agrees_with_the_detector_for_many_series() -> None:
    values = stream(2, 211, 101, 2.5)
    many, one = Bocpd(1, scale_floor=1e-6), BOCPD()
    was_alarm = False
    for value in values:
        verdict = many.update(np.array([value]))
        one.update(value)
        assert one.drift_detected == (verdict.alarm[0] and not was_alarm)
        assert one.run_length == verdict.run_length[0]
        was_alarm = bool(verdict.alarm[0])


def test_bocpd_takes_a_missing_value_for_nothing() -> None:
    plain, interrupted = BOCPD(), BOCPD()
    for value in stream(3, 131, 101, 5.0):
        interrupted.update(float("nan"))
        assert not interrupted.drift_detected
        plain.update(value)
        interrupted.update(value)
        assert plain.drift_detected == interrupted.drift_detected


def test_a_pickled_bocpd_goes_on_where_it_stood() -> None:
    values = stream(4, 131, 101, 5.0)
    detector = BOCPD()
    for value in values[:102]:
        detector.update(value)
    revived = pickle.loads(pickle.dumps(detector))  # noqa: S301  written a moment ago
    for value in values[102:]:
        detector.update(value)
        revived.update(value)
        assert detector.drift_detected == revived.drift_detected


def test_bocpd_serves_a_model_of_river_as_its_drift_detector() -> None:
    model = drift.DriftRetrainingClassifier(model=Majority(), drift_detector=BOCPD(), train_in_background=False)
    for position in range(211):
        model.learn_one({"x": position % 7}, position < 101)
    assert model.predict_one({"x": 1}) is False


class Majority:
    """A classifier that says what it has seen most."""

    _multiclass = False

    def __init__(self) -> None:
        self.seen = [0, 0]

    def clone(self) -> "Majority":
        return Majority()

    def learn_one(self, x: dict[str, int], y: bool) -> None:  # noqa: FBT001  River's signature
        self.seen[y] += 1

    def predict_one(self, x: dict[str, int]) -> bool:
        return self.seen[1] > self.seen[0]

    def predict_proba_one(self, x: dict[str, int]) -> dict[bool, float]:
        return {self.predict_one(x): 1.0}


def test_adwin_behind_the_protocol_is_rivers() -> None:
    frames = np.random.default_rng(5).normal(0.0, 0.1, (307, 3))
    frames[151:, 1] += 1.0
    ours = Adwin(3, clock=1, warmup_frames=10)
    theirs = [drift.ADWIN(clock=1, grace_period=10) for _ in range(3)]
    fired = False
    for frame in frames:
        verdict = ours.update(frame)
        for series, detector in enumerate(theirs):
            detector.update(frame[series])
            assert verdict.alarm[series] == detector.drift_detected
            if detector.drift_detected:
                assert verdict.run_length[series] == detector.width
                fired = True
    assert fired


def test_page_hinkley_fires_on_a_rise_and_not_on_a_fall() -> None:
    frames = np.zeros((101, 2))
    frames[61:] = [0.7, -0.7]
    detector = PageHinkley(2)
    alarms = np.array([detector.update(frame).alarm for frame in frames])
    assert np.flatnonzero(alarms[:, 0])[0] == 61
    assert not alarms[:, 1].any()


def test_null_finds_everything_healthy() -> None:
    verdict = Null(3).update(np.array([0.0, 1e9, np.nan]))
    np.testing.assert_array_equal(verdict.score, [0.0, 0.0, np.nan])
