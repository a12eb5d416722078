"""Which incident counts as right, coarse, wrong or false: small cases worked out by hand."""

from typing import Any

import pytest

from benchmarks.quality.answers import Answer, Said
from benchmarks.quality.failures import failures
from benchmarks.quality.matching import GRACE, Matched, match
from benchmarks.quality.outcome import Opening, Outcome
from benchmarks.quality.score import class_scores, delay, headline, is_clear, is_in_time, is_prompt
from schemas.alerts import ComponentName, ComponentType, Kind, Severity

JOB = ComponentName(type=ComponentType.JOB)
CARD, OTHER = (ComponentName(type=ComponentType.GPU, node="node1", gpu=gpu) for gpu in ("a", "b"))
THIS_JOB = Said(kind=Kind.SLOW_JOB, candidates=frozenset({JOB}))
THIS_CARD = Said(kind=Kind.SLOW_GPU, candidates=frozenset({CARD}))


def answer(**changes: Any) -> Answer:
    given: dict[str, Any] = {
        "fault": "slow_gpu",
        "shape": "step",
        "accepted": (THIS_CARD,),
        "asked": "incident",
        "has_past": True,
        "onset": 50,
        "end": 100,
        "deadline": 110,
        "onset_s": 50.0,
        "ratio": 1.4,
        "shift_sigmas": 12.0,
    }
    return Answer(**(given | changes))


def opening(said: Said = THIS_CARD, detected: int = 53, **changes: Any) -> Opening:
    given: dict[str, Any] = {
        "kind": said.kind,
        "candidates": said.candidates,
        "severity": Severity.WARNING,
        "onset": 50,
        "detected": detected,
        "detected_s": float(detected),
        "ratio": 1.4,
    }
    return Opening(**(given | changes))


def matched(answers: list[Answer], *openings: Opening, class_name: str = "gpu_step") -> Matched:
    return match(
        Outcome(
            class_name=class_name,
            seed=0,
            layout="tp2-pp2-dp4",
            setting="inspector",
            ranks=16,
            iterations=150,
            sigma=0.03,
            flush_s=1.0,
            answers=tuple(answers),
            hints=(),
            openings=openings,
            unseen={},
        )
    )


def test_what_the_label_says_is_right_and_its_delay_counts_the_first_slow_iteration() -> None:
    one = matched([answer()], opening())
    (finding,) = one.findings
    assert finding.names_component_first
    assert finding.names_kind
    assert is_clear(finding)
    assert is_prompt(finding)
    assert is_in_time(finding)
    assert delay(finding) == 4
    assert one.false == ()
    assert one.healthy_iterations == 150 - (1 + 50 + GRACE)


def test_another_component_is_false_and_leaves_the_fault_missed() -> None:
    one = matched([answer()], opening(Said(kind=Kind.SLOW_GPU, candidates=frozenset({OTHER}))))
    (finding,) = one.findings
    assert not finding.is_found
    assert len(one.false) == 1
    assert one.n_false_while_healthy == 0
    assert [line.split(":")[0].strip() for line in failures([one])][:2] == ["gpu_step/0", "missed"]


def test_too_large_a_set_of_candidates_is_coarse_unless_the_label_is_loose() -> None:
    both = opening(candidates=frozenset({CARD, OTHER}))
    (finding,) = matched([answer()], both).findings
    assert (finding.is_found, finding.names_component) == (True, False)
    loose = Said(kind=Kind.SLOW_GPU, candidates=frozenset({CARD}), is_loose=True)
    assert matched([answer(accepted=(loose,))], both).findings[0].names_component_first


def test_the_job_is_coarse_where_the_component_can_be_known_and_right_where_it_cannot() -> None:
    coarse = matched([answer()], opening(THIS_JOB))
    assert coarse.findings[0].is_found
    assert not coarse.findings[0].names_component_first
    assert coarse.false == ()
    assert matched([answer(accepted=(THIS_JOB,))], opening(THIS_JOB)).findings[0].names_component_first


def test_a_component_that_comes_second_is_late() -> None:
    one = matched([answer()], opening(THIS_JOB, detected=52), opening(detected=58))
    (finding,) = one.findings
    assert not finding.names_component_first
    assert finding.names_component
    assert delay(finding) == 3


@pytest.mark.parametrize("detected", [48, 100 + GRACE])
def test_an_incident_outside_of_the_fault_is_a_false_one_of_the_healthy_job(detected: int) -> None:
    one = matched([answer()], opening(detected=detected))
    assert (one.n_false_while_healthy, one.findings[0].is_found) == (1, False)


def test_information_is_no_incident() -> None:
    one = matched([], opening(THIS_JOB, severity=Severity.INFO))
    assert (one.n_accusing, one.false, one.n_false_while_healthy) == (0, (), 0)


def test_a_fault_that_the_job_does_not_feel_excuses_nobody() -> None:
    one = matched([answer(ratio=1.02, asked="nothing", shift_sigmas=0.6)], opening())
    assert (len(one.false), one.n_false_while_healthy, one.healthy_iterations) == (1, 1, 150)


def test_an_incident_that_stands_through_a_restart_finds_the_fault_again_without_a_delay() -> None:
    parts = [answer(end=80), answer(onset=80, end=120, has_past=False)]
    one = matched(parts, opening(resolved=120))
    assert [finding.is_found for finding in one.findings] == [True, True]
    assert not is_prompt(one.findings[1])
    resolved = matched(parts, opening(resolved=80))
    assert [finding.is_found for finding in resolved.findings] == [True, False]


def test_two_faults_of_which_only_the_job_can_be_told_are_one() -> None:
    twins = [answer(accepted=(THIS_JOB,)), answer(accepted=(THIS_JOB,), onset=70, end=130)]
    one = matched(twins, opening(THIS_JOB))
    assert [(finding.answer.onset, finding.answer.end) for finding in one.findings] == [(50, 130)]


def test_scores_of_a_class_are_what_its_episodes_add_up_to() -> None:
    episodes = [
        matched([answer()], opening()),
        matched([answer()], opening(THIS_JOB, detected=60)),
        matched([answer()]),
        matched([answer(shift_sigmas=2.0)]),
        matched([answer()], opening(detected=20), opening(detected=51)),
    ]
    scores = class_scores(episodes)
    assert (scores.recall.n, scores.recall.value) == (4, 0.75)
    assert scores.recall_any.n == 5
    assert (scores.precision.n, scores.precision.value) == (4, 0.75)
    assert scores.component_first.value == pytest.approx(2 / 3)
    assert (scores.delay_iterations.n, scores.delay_iterations.median) == (3, 4.0)
    assert scores.false_per_10000.value == pytest.approx(1e4 / (5 * 87))
    assert scores.recall.interval[0] < 0.75 < scores.recall.interval[1]


def test_the_headline_weighs_classes_and_not_episodes() -> None:
    found = [matched([answer()], opening()) for _ in range(30)]
    missed = [matched([answer()], class_name="job_step") for _ in range(3)]
    scores = headline([*found, *missed])
    assert scores.recall == pytest.approx(0.07 / (0.07 + 0.03))
    assert scores.component_first == 1.0
    assert scores.intervals["recall"][0] <= scores.recall <= scores.intervals["recall"][1]


def test_a_few_episodes_that_all_went_well_promise_little() -> None:
    few, many = (headline([matched([answer()], opening()) for _ in range(n)]).intervals for n in (3, 300))
    assert few["recall"] == pytest.approx((0.4385, 1.0), abs=1e-4)  # as Wilson's interval of 3 of 3
    assert many["recall"][0] == pytest.approx(0.9874, abs=1e-4)
    assert few["false_incidents_per_10000"][1] == pytest.approx(100 * many["false_incidents_per_10000"][1])
    assert few["precision"][0] == few["recall"][0]
    mixed = headline([matched([answer()], opening()), *[matched([answer()], class_name="job_step") for _ in range(9)]])
    low, high = mixed.intervals["recall"]
    assert low < mixed.recall < high
